"""The role of each action of a step plan, for code that must know what it reads and writes.

STEPS      a step of the program, or a run of copies that is one action
SENT       the wait for what a step has sent: until then it is read
DROPPED    the end of a value that has memory of its own
FREED      memory that is filled when its value is needed no more (`freed.py`)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ...devices.device_memory import Placed


class ActionKind(Enum):
    """See above."""

    STEPS = auto()
    SENT = auto()
    DROPPED = auto()
    FREED = auto()


@dataclass(frozen=True)
class Role:
    """An action: the steps that it does, or the step that it follows. `name`: the value that ends, `place` its memory."""

    kind: ActionKind
    steps: tuple[int, ...]
    name: str = ""
    place: Placed | None = None

    @property
    def index(self) -> int:
        """The step by which reports name the action."""
        return self.steps[-1]
