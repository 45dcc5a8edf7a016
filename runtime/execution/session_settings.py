"""Makes the settings of a rank's sessions from the arguments of `load`."""

from __future__ import annotations

from pathlib import Path

from ..communication.transport import Transport
from ..devices.devices import RequestedDevices, devices_from
from ..program.sessions import Settings


def settings_for(
    transport: Transport, threads: int | None, devices: RequestedDevices | None, op_times: Path | None = None
) -> Settings:
    """Returns a rank's settings: by default its own cores, and the CPU. `op_times`: a folder, if the times of ops are to be measured."""
    profile = str(op_times / f"rank{transport.rank}") if op_times is not None else ""
    placed = devices_from(devices, transport.place)
    return Settings(threads or transport.cores, not transport.shares_host, placed, profile=profile)
