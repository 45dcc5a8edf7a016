"""Faults planted in the runtime, one at a time, each of which some seed must find: what the simulation is worth.

Several of them give right results on ranks as threads, whose sends are copies: ordinary tests do not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from partc.runtime import Program
from partc.runtime.communication.collective import nothing
from partc.runtime.execution import recover
from partc.runtime.execution.memory import layout
from partc.runtime.execution.moves import CollectiveCalls, MessageCalls
from partc.runtime.execution.program import StepAgreement
from partc.runtime.execution.step_plan import StepPlan
from partc.runtime.execution.symbol_bindings import Binder
from partc.runtime.lookups.lookup import Lookup
from partc.runtime.program import memory_plan as buffers
from partc.runtime.program.steps import Send, StartCollective, WaitRecv

from .session import Session


@dataclass(frozen=True)
class Planted:
    """A fault: the sample that meets it, words of the problem that it makes, and what plants it."""

    name: str
    sample: str
    words: str
    plant: Callable[[Session, pytest.MonkeyPatch], None]


def _no_wait_for_a_receive(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MessageCalls, "receive", lambda self, step: nothing)


def _no_wait_for_a_collective(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CollectiveCalls, "finish", lambda self, step: nothing)


def _no_wait_for_a_send(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MessageCalls, "sent", lambda self, index: nothing)


def _memory_of_sends_is_shared(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buffers._Plan, "in_flight", lambda self, life: [])


def _memory_of_receives_is_shared(session: Session, patch: pytest.MonkeyPatch) -> None:
    """Between its posting and its wait, the memory of a receive counts as free."""
    lives = buffers.assign

    def late(given: list[buffers.Lifetime]) -> buffers.Arena:
        return lives([replace(one, born=max(one.born, one.died - 1), sends=()) for one in given])

    patch.setattr(layout, "assign", late)


def _tags_are_swapped(session: Session, patch: pytest.MonkeyPatch) -> None:
    """On rank 0 the first two tags of what goes to one peer."""
    begin = StepPlan.__init__

    def swapped(
        self: StepPlan, program: Any, bindings: Any, transport: Any, wire: Mapping[int, int], *rest: Any
    ) -> None:
        a, b = sorted(
            one.tag for one in session.programs[0][0].manifest.transfers if (one.source, one.target) == (0, 1)
        )[:2]
        table = {**wire, a: wire[b], b: wire[a]} if transport.rank == 0 else wire
        begin(self, program, bindings, transport, table, *rest)

    patch.setattr(StepPlan, "__init__", swapped)


def _collectives_are_swapped(session: Session, patch: pytest.MonkeyPatch) -> None:
    """On rank 1 the first two collectives begin in the other order."""
    plan = StepPlan._plan

    def swapped(self: StepPlan, *given: Any) -> None:
        plan(self, *given)
        if self.transport.rank == 1:
            steps = self.program.steps
            a, b = [
                at
                for at, (index, _) in enumerate(self.actions)
                if index >= 0 and isinstance(steps[index], StartCollective)
            ][:2]
            self.actions[a], self.actions[b] = self.actions[b], self.actions[a]

    patch.setattr(StepPlan, "_plan", swapped)


def _a_rank_waits_before_it_sends(session: Session, patch: pytest.MonkeyPatch) -> None:
    """On rank 0 the first send comes after the wait that follows it."""
    plan = StepPlan._plan

    def later(self: StepPlan, *given: Any) -> None:
        plan(self, *given)
        if self.transport.rank == 0:
            kinds = [type(self.program.steps[index]) for index, _ in self.actions]
            first = kinds.index(Send)
            self.actions.insert(kinds.index(WaitRecv, first), self.actions.pop(first))

    patch.setattr(StepPlan, "_plan", later)


def _failures_are_not_told(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Program, "_fail", lambda self, error: None)
    for transport in session.transports:
        patch.setattr(transport, "leave", lambda message: None)


def _no_agreement_on_one_rank(session: Session, patch: pytest.MonkeyPatch) -> None:
    announce, bind = Binder.announce, Binder.bind

    def alone(self: Binder, inputs: Any, agreements: Any, *rest: Any) -> Any:
        own = SimpleNamespace(begin=lambda vector: lambda: vector)
        return announce(self, inputs, own if self.rank == 1 else agreements, *rest)

    def bound(self: Binder, *rest: Any) -> Any:
        bindings, values = bind(self, *rest)
        return {"B": 3, **bindings}, values

    patch.setattr(Binder, "announce", alone)
    patch.setattr(Binder, "bind", bound)


def _state_is_not_what_it_was(session: Session, patch: pytest.MonkeyPatch) -> None:
    """A rank changes a parameter by the last bit after an update."""
    update = StepPlan._update

    def wrong(self: StepPlan, index: int) -> Callable[[], object]:
        act = update(self, index)

        def more() -> None:
            act()
            if self.transport.rank == 1:
                array = self.program.state.arrays()[0][1].reshape(-1)
                array[0] = np.nextafter(array[0], np.float32(9))

        return more

    patch.setattr(StepPlan, "_update", wrong)


def _a_loss_is_not_told(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepAgreement, "halt", lambda self, now: None)


def _no_stand_ins(session: Session, patch: pytest.MonkeyPatch) -> None:
    """A rank whose op fails in a step that is given up takes no part in the rest of it."""
    patch.setattr(recover, "_stand_in", lambda schedule, at, again: None)


def _stand_ins_of_any_shape(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recover, "_provide", lambda schedule, name, shape, again: None)


def _no_wait_in_a_lookup(session: Session, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookup, "_wait", lambda self, request: None)


PLANTED = (
    Planted("no wait for a receive", "placed", "", _no_wait_for_a_receive),
    Planted("no wait for a collective", "data parallel", "", _no_wait_for_a_collective),
    Planted("no wait for a send", "placed", "never waited for", _no_wait_for_a_send),
    Planted("memory of sends is shared", "placed", "before end of the Send", _memory_of_sends_is_shared),
    Planted("memory of receives is shared", "placed", "", _memory_of_receives_is_shared),
    Planted("tags are swapped", "few tags", "", _tags_are_swapped),
    Planted("collectives are swapped", "data parallel", "different collectives", _collectives_are_swapped),
    Planted("a rank waits before it sends", "few tags", "no rank can go on", _a_rank_waits_before_it_sends),
    Planted("failures are not told", "pipeline", "no rank can go on", _failures_are_not_told),
    Planted("no agreement on one rank", "placed", "", _no_agreement_on_one_rank),
    Planted("a loss is not told", "pipeline", "is given nan", _a_loss_is_not_told),
    Planted("no stand-ins", "placed, served", "no rank can go on", _no_stand_ins),
    Planted("stand-ins of any shape", "objects, served", "", _stand_ins_of_any_shape),
    Planted("no wait in a lookup", "looked up", "", _no_wait_in_a_lookup),
    Planted("state is not what it was", "sharded state", "differ", _state_is_not_what_it_was),
)
