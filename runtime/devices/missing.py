"""Refuses a program with targets for a device that the machine lacks: it allocates memory there, which says more than a list of devices."""

from __future__ import annotations

from collections.abc import Sequence

from ..artifact.format import CUDA
from ..errors import UsageError
from .device_memory import allocate
from .devices import Device, Devices


def refuse_missing(devices: Devices, used: Sequence[str], where: str) -> None:
    """UsageError where a program has targets for a device that this machine lacks or onnxruntime cannot use."""
    for target in used:
        device = devices.of(target)
        if device.is_host or not (why := _missing(device)):
            continue
        raise UsageError(
            f"{where}: there is no device for the target {CUDA}: {device}: {why}\n"
            f"  help: --device cuda=cpu runs the same program on the CPU; a GPU needs onnxruntime-gpu, CUDA and cuDNN"
        )


def _missing(device: Device) -> str:
    """Why memory cannot be had on a device; empty where it can."""
    try:
        allocate(device, 1)
    except Exception as error:
        text = " ".join(str(error).split())
        return text.rpartition("GetProviderInfo_CUDA() ")[2] or type(error).__name__
    return ""
