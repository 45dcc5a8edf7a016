"""The agreement of all ranks that begins each step: begun with the step, or ahead, while the step before runs.

    agreement.announce(following)       # optional: what the step after the next one is given
    bindings, values = agreement.of(inputs)

A rank that knows the inputs of the next step sends the others its sizes as soon as all have agreed on this one, and goes on. When it
comes to the next step they have told theirs, too, unless one is a whole step behind: so ranks wait for each other's values, and hardly ever
for each other. Agreements have an order of their own, so that each rank may begin one ahead or not, and do other things with the
others between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from partc.runtime.artifact.tensors.tensor import Value

from ..communication.transport import Agreements, Transport
from ..errors import UsageError
from .symbol_bindings import AnnouncedStep, Binder, Bindings


class StepAgreement:
    """A rank's end of the agreements on the steps of one program. `ahead`: whether they may begin while the step before runs."""

    def __init__(self, binder: Binder, transport: Transport, ahead: bool) -> None:
        self.binder = binder
        self.transport = transport
        self.ahead = ahead
        self._agreements: Agreements | None = None
        self._announced: Mapping[str, object] | None = None
        self._told: AnnouncedStep | None = None
        self._halt = False
        self._request = 0

    def open(self) -> None:
        """Make ready; collective, once, before the first step."""
        if self.transport.size > 1:
            self._agreements = self.transport.agreements()

    def announce(self, inputs: Mapping[str, object]) -> None:
        """Says what the step after the next one is given."""
        self._announced = {**inputs} if self.ahead else None

    def halt(self, now: bool) -> None:
        """Says whether this rank wants no further step, with the next sizes that it sends."""
        self._halt = now

    def request(self, number: int) -> None:
        """Sends a number with the next sizes: all ranks know the largest, `requested`, once they agree on that step."""
        self._request = number

    @property
    def requested(self) -> int:
        """The largest number that ranks have sent with the last step."""
        return self.binder.request

    @property
    def sizes(self) -> Bindings:
        """The values to which the inputs of the last step have bound their symbols."""
        return self.binder.sizes

    def of(self, inputs: Mapping[str, object]) -> tuple[Bindings, Mapping[str, Value]]:
        """The bindings and inputs that all ranks agreed on for this step; then sends the sizes of the next step, if it is announced.

        Where a rank has sent a request, there may be no next step, and all ranks leave it to begin with an agreement of its own.
        """
        announced, told = self._announced, self._told
        self._announced = self._told = None
        if told is None:
            told = self._send(inputs)
        elif not told.is_of(inputs):
            raise UsageError(
                f"rank {self.transport.rank}: the inputs of a step are not those that were announced\n"
                "  help: call it with the very arrays that were announced, or announce nothing"
            )
        found = self.binder.bind(told, self.transport)
        if announced is not None and not self.requested:
            self._told = self._send(announced)
        return found

    def of_all(self, inputs: Mapping[str, object]) -> tuple[Bindings, Mapping[str, Value]]:
        """The bindings and inputs of a step that all ranks are given alike: nothing is sent, and nothing waited for."""
        self.transport.count_step()
        return self.binder.of_all(inputs)

    def reset(self) -> None:
        """Forget what has begun, after a failure."""
        self._announced = self._told = None

    def _send(self, inputs: Mapping[str, object]) -> AnnouncedStep:
        halt, self._halt = self._halt, False
        return self.binder.announce(inputs, self._agreements, halt, self._request)
