"""`target` of a plan: the kind of device that runs the nodes that match a pattern, within its rank.

target: {"**": cuda, "embedding": cpu}
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from partc.runtime.artifact.format import CPU, CUDA
from partc.runtime.options import Refused, shown
from pydantic import PlainValidator

KINDS = (CPU, CUDA)
_OTHERS = {"gpu": CUDA, "host": CPU}
_NUMBERED = re.compile(r"(cpu|cuda|gpu):\d+")
_LAW = f"a target is a kind of device: {' or '.join(KINDS)}"


@dataclass(frozen=True)
class TargetRule:
    """The kind of device that runs the nodes matching the pattern."""

    pattern: str
    target: str
    where: str

    def __str__(self) -> str:
        return f"{self.where.replace(chr(92), '/').rpartition('/')[2]} '{self.pattern}'"


def named_target(value: object) -> str:
    """The kind of device that a call in a model names, in any case, `GPU` included; empty for anything else."""
    word = value.lower() if isinstance(value, str) else ""
    return word if word in KINDS else _OTHERS.get(word, "")


def is_default_device(value: object) -> bool:
    """Whether a call in a model leaves the device to the job: None, or `Ascend`, the default of MindSpore's `device`."""
    return value is None or (isinstance(value, str) and value.lower() == "ascend")


def meant_target(value: object) -> str:
    """Returns the kind of device that a text such as `cuda:0` means; empty for any other value."""
    return (
        named_target(value.partition(":")[0])
        if isinstance(value, str) and (_NUMBERED.fullmatch(value.lower()) or named_target(value))
        else ""
    )


def checked_target(value: object) -> str:
    """Returns a kind of device unchanged; raises Refused for any other value."""
    if not isinstance(value, str):
        raise Refused(f"expected a target, but got {shown(value)}", _LAW)
    if value in KINDS:
        return value
    word = value.lower()
    if _NUMBERED.fullmatch(word):
        kind = word.partition(":")[0]
        remedy = f"write {_OTHERS.get(kind, kind)}; the number of a device follows the rank"
        raise Refused(f"'{value}' names one device", _LAW, remedy)
    meant = named_target(value)
    raise Refused(f"'{value}' is no target", _LAW, f"write {meant}" if meant else "")


TargetName: TypeAlias = Annotated[str, PlainValidator(checked_target, json_schema_input_type=Literal["cpu", "cuda"])]
