"""The view of a step plan that the proof reads: its actions by their roles, the locations of values, and the lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from partc.runtime.artifact.tensors.dtypes import Bytes

from ...communication.transport import Transport
from ...devices.device_memory import Cell
from ...program.value_table import ValueTable
from ..collective_plans import AnyCollective
from ..rank_program import RankProgram
from ..targets.lanes import Lanes
from ..targets.session_calls import SessionCalls
from .roles import Role


class Planned(Protocol):
    """A step plan whose actions and places are known."""

    program: RankProgram
    values: ValueTable
    transport: Transport
    sessions: SessionCalls
    lanes: Lanes | None

    @property
    def roles(self) -> Sequence[Role]:
        """The role of each action, in the order of the actions."""
        ...

    @property
    def works(self) -> Mapping[int, AnyCollective]:
        """Maps each tag to the collectives that run at the same time."""
        ...

    @property
    def cells(self) -> Mapping[str, Cell]:
        """Maps names to the values that have a place."""
        ...

    @property
    def scratch(self) -> Mapping[tuple[int, str], Bytes]:
        """Maps tag and side to the memory in which a collective packs."""
        ...

    @property
    def arenas(self) -> Mapping[str, tuple[int, int]]:
        """Maps each target to the address and the size of its arena."""
        ...
