"""The role of each action of a step plan, for code that must know which values an action reads and writes.

STEPS      a step of the program, or a run of copies that is one action
SENT       the wait for a step's sends: until then their values are read
DROPPED    the end of a value that has memory of its own
FREED      the filling of memory after the last use of its value (`freed.py`)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ...devices.device_memory import Placed


class ActionKind(Enum):
    """The kinds of actions, described in this module's docstring."""

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
        """The index of the step that names the action in reports."""
        return self.steps[-1]
