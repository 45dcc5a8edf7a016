"""The loop of steps that continues prompts, over all ranks of an artifact whose plan generates.

    with load_generator("build", MPI.COMM_WORLD) as generator:     # on every rank, with the same requests
        for token in generator.stream([1, 306, 4658]):
            ...
        answers = generator.run([Request([1, 306], max_tokens=50), Request([1, 15043], temperature=0.8, seed=7)])

Every rank has the same requests and sees the same tokens, so each finds out by itself what the next step is given; only a token that rank 0
draws is told to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..artifact.format import CACHE, PREFILL
from ..artifact.tensors.boxes import slices
from ..errors import ArtifactError, RankError
from ..execution.in_process import LocalProgram, load_local
from ..execution.inputs import Whole
from ..execution.program import Program, load
from ..units import count
from .draw import draw
from .request import Answer, Request, refuse_unfit
from .slots import NewToken, Slots, Step

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..artifact.format import StateRecord
    from ..artifact.generation import GenerationRecord
    from ..artifact.tensors.dtypes import Array
    from ..communication.transport import Transport, Vector


class Generator:
    """Makes tokens with a program, or with all ranks of one in this process; ArtifactError where its plan does not generate."""

    def __init__(self, program: Program | LocalProgram) -> None:
        if program.manifest.generation is None:
            fact = "the artifact makes no tokens"
            raise ArtifactError(f"{fact}\n  help: compile it with `generate: {{length: 4096}}` in the plan")
        self.program = program
        self.record: GenerationRecord = program.manifest.generation
        self._prefill = program.beside(PREFILL)
        ports = (*program.manifest.inputs, *self._prefill.manifest.inputs)
        self._cut = {port.name for port in ports if port.boxes is not None}

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to all requests, in their order; collective: each rank gives the same ones. InputError for any that cannot be met."""
        answers = [Answer() for _ in requests]
        for made in self.each(requests):
            answers[made.request].tokens.append(made.token)
            answers[made.request].finish = made.finish
        return answers

    def each(self, requests: Sequence[Request]) -> Iterator[NewToken]:
        """Every token as it is made, of all requests; otherwise as `run`. The ranks take all of them."""
        refuse_unfit(requests, self.record)
        return self._each(requests)

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[int]:
        """The tokens behind a prompt, as they are made; the options are those of `Request`."""
        return (one.token for one in self.each([Request(prompt, **options)]))

    def _each(self, requests: Sequence[Request]) -> Iterator[NewToken]:
        slots = Slots(self.record)
        for number, request in enumerate(requests):
            slots.admit(number, request)
        while (step := slots.next()) is not None:
            made = self.make(slots, step)
            if broken := sum(one.finish == "error" for one in made):
                fact = f"the logits of {count(broken, 'sequence')} are not finite"
                raise RankError(f"{fact}\n  help: look at the weights of the model")
            yield from made

    def make(self, slots: Slots, step: Step) -> list[NewToken]:
        """Runs a step of these slots, and gives the tokens that it makes; collective."""
        outputs = self._outputs(step)
        chosen = np.array(outputs[self.record.next], np.int64)
        self._draw(slots, outputs, chosen)
        found = chosen.tolist()
        if broken := slots.slots_of(found, self.record.vocabulary):
            self._clear(broken)
        return [*slots.take(found)]

    def _clear(self, broken: Sequence[int]) -> None:
        """Makes the caches of slots zeros: of what is not finite also the masked entries would spoil the next sequence there."""

        def write(record: StateRecord, array: Array) -> None:
            first = slices(record.shard(program.rank), record.shape)[0]
            for slot in broken:
                if first.start <= slot < first.stop:
                    array[slot - first.start] = 0

        for program in [self.program] if isinstance(self.program, Program) else self.program.ranks:
            program.state.fill(write, {one.tensor for one in program.state.records if one.kind == CACHE})

    def _draw(self, slots: Slots, outputs: dict[str, Any], chosen: Vector) -> None:
        """Draws those tokens that are not the likeliest: rank 0 does, and tells the others."""
        drawing = slots.drawing()
        if not drawing:
            return
        if (logits := outputs.get(self.record.logits)) is not None:
            for row, (request, number) in drawing.items():
                if chosen[row] < self.record.vocabulary:
                    chosen[row] = draw(np.asarray(logits)[row], request, number)
        elif isinstance(self.program, Program):
            chosen[[*drawing]] = -1
        if isinstance(self.program, Program):
            np.copyto(chosen, self.program.maxima(chosen))

    def _outputs(self, step: Step) -> dict[str, Any]:
        """What one of the two programs makes of a step."""
        record = self.record
        named = {record.tokens: step.tokens, record.count: step.count, record.position: step.position}
        if step.slots is not None:
            self._prefill.at_slots(step.slots)
        given = {name: Whole(array) if name in self._cut else array for name, array in named.items()}
        return (self.program if step.slots is None else self._prefill).step_of_all(given)

    def close(self) -> None:
        """Gives sessions and caches back."""
        self.program.close()
        self._release()

    def _release(self) -> None:
        if isinstance(self._prefill, Program):  # ranks that are threads end theirs together
            self._prefill.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.program.__exit__(kind, error, trace)
        self._release()


def load_generator(folder: str | Path, comm: MPI.Intracomm | Transport | None = None, **options: Any) -> Generator:
    """This rank's end of the generator in `folder`; collective over `comm`. The options are those of `load`."""
    return Generator(load(folder, comm, **options))


def load_local_generator(folder: str | Path, **options: Any) -> Generator:
    """The generator with all ranks as threads of this process; the options are those of `load_local`."""
    return Generator(load_local(folder, **options))
