"""Chooses the device of each target of a rank: the one that `--device` requests, by default the CPU.

    devices_from({"device": "cuda"}, 1)     nodes without a named target run on cuda, on the machine's second GPU
    devices_from({"cuda": "cpu"}, 0)        the target cuda is the CPU: the same program, copies included

A program has two targets at most, `cpu` and `cuda`; the name `device` means one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..artifact.format import CPU, CUDA, DEVICE
from ..errors import UsageError

RequestedDevices: TypeAlias = Mapping[str, str]
"""Maps each target to the device that was requested for it, and `device` to the target that it means."""

_CUDA_PROVIDER, _CPU_PROVIDER = "CUDAExecutionProvider", "CPUExecutionProvider"
_NUMBERED = re.compile(r"cuda:(\d{1,4})")
_HELP = (
    "--device cuda for a GPU, --device cuda:1 for the second one, --device cuda=cpu to run the target cuda on the CPU"
)


@dataclass(frozen=True)
class Device:
    """A device of onnxruntime: its kind and number."""

    kind: str = CPU
    number: int = 0

    @property
    def is_host(self) -> bool:
        """Whether its kernels work on the memory of the process."""
        return self.kind == CPU

    @property
    def providers(self) -> list[tuple[str, dict[str, str]]]:
        """The execution provider and its options: an arena that grows only by the requested size, and float32 without TF32."""
        if self.is_host:
            return [(_CPU_PROVIDER, {})]
        options = {"device_id": str(self.number), "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
        return [(_CUDA_PROVIDER, options)]

    def __str__(self) -> str:
        return CPU if self.is_host else f"{self.kind}:{self.number}"


HOST = Device()


@dataclass(frozen=True)
class Devices:
    """The devices of one rank: that of the target `cuda`, and the target of nodes that no pattern of the plan names."""

    cuda: Device = HOST
    default: str = CPU

    def target(self, name: str) -> str:
        """Returns `cpu` or `cuda` for the target of a node in its file."""
        return self.default if name in ("", DEVICE) else name

    def of(self, name: str) -> Device:
        """The device of a target."""
        return self.cuda if self.target(name) == CUDA else HOST


def parse_devices(texts: Sequence[str]) -> dict[str, str]:
    """Parses the texts of options `--device`; UsageError for an option that names no device."""
    asked: dict[str, str] = {}
    for text in texts:
        target, equals, device = text.partition("=")
        if equals:
            asked[target] = device
        else:
            asked[DEVICE] = text.partition(":")[0]
            asked |= {CUDA: text} if ":" in text else {}
    check_devices(asked)
    return asked


def check_devices(asked: RequestedDevices) -> None:
    """Raises UsageError for targets or devices that do not exist."""
    problems = []
    for target, device in asked.items():
        if target == DEVICE:
            if device not in (CPU, CUDA):
                problems.append(f"there is no device '{device}'; it is {CPU} or {CUDA}")
        elif target == CUDA:
            if device not in (CPU, CUDA) and not _NUMBERED.fullmatch(device):
                problems.append(f"the target {CUDA} cannot be '{device}'; it is {CPU}, {CUDA} or cuda:N")
        else:
            which = "is always the CPU" if target == CPU else f"is not a target; a target is {CPU} or {CUDA}"
            problems.append(f"the target '{target}' {which}")
    if problems:
        raise UsageError("\n".join([*problems, f"  help: {_HELP}"]))


def devices_from(asked: RequestedDevices | None, place: int = 0) -> Devices:
    """Returns the devices of the rank with index `place` among those of its machine; the ranks take the machine's GPUs in turn."""
    asked = asked or {}
    check_devices(asked)
    wanted = asked.get(CUDA, CUDA)
    if wanted == CPU:
        cuda = HOST
    else:
        numbered = _NUMBERED.fullmatch(wanted)
        cuda = Device(CUDA, int(numbered[1]) if numbered else place % (gpus() or 1))
    return Devices(cuda, asked.get(DEVICE, CPU))


def gpus() -> int:
    """Returns the number of GPUs that this process sees; 0 where the system does not list them."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        return sum(bool(one.strip()) for one in seen.split(","))
    return sum(one.name[6:].isdecimal() for one in Path("/dev").glob("nvidia*"))
