"""The agreement of all ranks that begins each step: begun with the step, or ahead, while the step before runs.

    agreement.announce(following)       # optional: what the step after the next one is given
    bindings, values = agreement.of(inputs)

A rank that knows what the next step is given tells the others its sizes as soon as all have agreed on this one, and goes on. When it
comes to the next step they have told theirs, too, unless one is a whole step behind: so ranks wait for each other's values, and hardly ever
for each other. Agreements have an order of their own, so that each rank may begin one ahead or not, and do other things with the
others between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..artifact.tensor import Value
from ..communication.transport import Agreements, Transport
from ..errors import UsageError
from .symbol_bindings import Binder, Bindings, ToldStep


class StepAgreement:
    """A rank's end of the agreements on the steps of one program. `ahead`: whether they may begin while the step before runs."""

    def __init__(self, binder: Binder, transport: Transport, ahead: bool) -> None:
        self.binder = binder
        self.transport = transport
        self.ahead = ahead
        self._agreements: Agreements
        self._announced: Mapping[str, object] | None = None
        self._told: ToldStep | None = None
        self._halt = False

    def open(self) -> None:
        """Make ready; collective, once, before the first step."""
        self._agreements = self.transport.agreements()

    def announce(self, inputs: Mapping[str, object]) -> None:
        """Says what the step after the next one is given."""
        self._announced = {**inputs} if self.ahead else None

    def halt(self, now: bool) -> None:
        """Says whether this rank wants no further step, with the next sizes that it tells."""
        self._halt = now

    def of(self, inputs: Mapping[str, object]) -> tuple[Bindings, Mapping[str, Value]]:
        """What all ranks have agreed upon for this step; then tells them the sizes of the next one, where that is announced."""
        announced, told = self._announced, self._told
        self._announced = self._told = None
        if told is None:
            told = self._tell(inputs)
        elif not told.is_of(inputs):
            raise UsageError(
                f"rank {self.transport.rank}: the inputs of a step are not those that were announced\n"
                "  help: call it with the very arrays that were announced, or announce nothing"
            )
        found = self.binder.bind(told, self.transport)
        if announced is not None:
            self._told = self._tell(announced)
        return found

    def reset(self) -> None:
        """Forget what has begun, after a failure."""
        self._announced = self._told = None

    def _tell(self, inputs: Mapping[str, object]) -> ToldStep:
        halt, self._halt = self._halt, False
        return self.binder.tell(inputs, self._agreements, halt)
