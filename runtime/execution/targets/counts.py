"""Counts of the targets of a rank: copies and their bytes, by the destination target, and switches between targets.

    counts = program.counts
    counts.copies["cuda"].bytes / counts.steps       bytes copied to the device in a step

Counted while steps run; a program without targets counts nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...program.steps import Copy, Step


@dataclass
class Copies:
    """The number of copies to a target, and their bytes."""

    number: int = 0
    bytes: int = 0


@dataclass
class TargetCounts:
    """The counts of one rank since it was loaded.

    A switch is a segment or an update whose target is not that of the one before it in the file.
    """

    steps: int = 0
    switches: int = 0
    device: str = ""
    """The device of the target cuda, if the rank has one."""
    copies: dict[str, Copies] = field(default_factory=dict)

    def add_step(self, switches: int) -> None:
        """Counts a step that has ended."""
        self.steps += 1
        self.switches += switches

    def text(self) -> str:
        """Returns the counts as JSON; `device` is that of the target cuda."""
        copies = {target: [one.number, one.bytes] for target, one in sorted(self.copies.items())}
        told = {"steps": self.steps, "switches": self.switches, "copies": copies, "device": self.device}
        return json.dumps(told)

    def copies_to(self, target: str) -> Copies:
        """Returns the counts of copies to a target, which may be changed."""
        return self.copies.setdefault(target, Copies())


def switches(targets: Mapping[int, str], steps: Sequence[Step]) -> int:
    """Returns the number of changes of target between the computations of a program."""
    order = [target for index, target in sorted(targets.items()) if not isinstance(steps[index], Copy)]
    return sum(one != two for one, two in itertools.pairwise(order))
