"""A rank's file with the messages and collectives that go from device to device, and what carries them.

    PARTC_DEVICE_MESSAGES=0     values of devices go through the host
    PARTC_DEVICE_MESSAGES=1     values of targets that run on the CPU go from one memory to the other, too

By default values go between GPUs where each rank has one of its own and cupy has NCCL. Elsewhere they go through the host, of which rank 0
tells once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..artifact.manifest import Artifact
from ..communication.in_process import LocalTransport
from ..communication.nccl import COLLECTIVE, MESSAGE, Key, NcclLinks, gpu
from ..communication.transport import Transport
from ..devices.devices import Device, Devices
from ..program.device_messages import ON_CPU, DeviceEnds, agreed, device_ends, on_devices
from ..program.rank_file import RankFile, read_rank_file
from ..program.steps import PostRecv, Send, StartCollective
from ..program.value_table import known_shapes, promised_shapes
from .symbol_bindings import bound_symbols

VARIABLE = "PARTC_DEVICE_MESSAGES"


@dataclass(frozen=True)
class LinkedFile:
    """A rank's file; `links` carry what has a target in it, None where these targets run on the CPU."""

    file: RankFile
    links: NcclLinks | None = None


def linked_file(
    artifact: Artifact | None,
    transport: Transport,
    devices: Devices,
    links: NcclLinks | None = None,
    host: bool = False,
) -> LinkedFile | None:
    """Reads a rank's file, and links it to those of the other ranks; collective. Returns None without an artifact.

    A rank that fails here, or that has no artifact, tells the others that it has no device. `links`: those of another program of the
    artifact. `host`: whether all values go through the host.
    """
    ends, file, failure = DeviceEnds(), None, None
    try:
        if artifact is not None:
            artifact.refuse_without_weights()
            file = read_rank_file(artifact, transport.rank)
            # NCCL's requests are not those that threads wait for
            host |= isinstance(transport, LocalTransport) and not devices.cuda.is_host
            ends = ends if host or transport.size == 1 else _ends(file, devices)
    except Exception as error:
        failure = error
    rows = [ends]
    if transport.size > 1:
        rows = [DeviceEnds.parsed(text) for text in transport.all_gather_text(ends.text())]
    if transport.rank == 0:
        for lacks in dict.fromkeys(row.lacks for row in rows if row.lacks):
            _report(lacks)
    rows = _alone_on_their_gpus(rows)
    tags = agreed(transport.rank, rows, file) if file is not None else frozenset()
    if file is not None and tags:
        bound = bound_symbols(file.manifest)
        file = on_devices(file, devices, known_shapes(file, bound, promised_shapes(file, bound)), tags)
    if any(row.name not in ("", ON_CPU) for row in rows):
        keys = _keys(file, transport.rank) if file is not None else []
        links = links or (NcclLinks(devices.cuda, transport.rank) if keys else None)
        exchanged = transport.all_gather_text(links.identifiers(keys) if links is not None else "{}")
        if links is not None:
            links.open(keys, exchanged)
    if failure is not None:
        raise failure
    return LinkedFile(file, links) if file is not None else None


def _ends(file: RankFile, devices: Devices) -> DeviceEnds:
    """Returns what a rank can send and receive on its device."""
    name, lacks = _named(devices.cuda) if file.copies else ("", "")
    if not name and not lacks:
        return DeviceEnds()
    bound = bound_symbols(file.manifest)
    promises = promised_shapes(file, bound)
    found = device_ends(file, devices, known_shapes(file, bound, promises), promises)
    if not (found.sends or found.receives or found.collectives):
        return found
    return replace(found, name=name) if name else DeviceEnds(lacks=lacks)


def _named(device: Device) -> tuple[str, str]:
    """Returns the name of a device for messages, or else what it lacks; neither where values go through the host by choice."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "0" or (device.is_host and asked != "1"):
        return "", ""
    return (ON_CPU, "") if device.is_host else gpu(device)


def _alone_on_their_gpus(rows: Sequence[DeviceEnds]) -> list[DeviceEnds]:
    """Returns the ranks' ends, none for a rank whose GPU is another rank's, too, since NCCL takes one rank for each."""
    names = [row.name for row in rows]
    return [row if row.name == ON_CPU or names.count(row.name) == 1 else DeviceEnds() for row in rows]


def _keys(file: RankFile, rank: int) -> list[Key]:
    """Returns the communicators of a rank's messages and collectives that have a target."""
    keys: list[Key] = []
    for step in file.steps:
        match step:
            case Send(target=target) if target:
                keys.append((MESSAGE, (rank, step.peer)))
            case PostRecv(target=target) if target:
                keys.append((MESSAGE, (step.peer, rank)))
            case StartCollective(target=target) if target:
                keys.append((COLLECTIVE, step.ranks))
    return keys


@functools.cache
def _report(lacks: str) -> None:
    text = f"values of GPUs go from rank to rank through the host: {lacks}"
    print(f'partc: {text}\n  help: pip install "partc[nccl]"', file=sys.stderr, flush=True)
