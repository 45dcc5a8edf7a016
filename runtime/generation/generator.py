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

from ..artifact.format import PREFILL
from ..errors import ArtifactError, RankError
from ..execution.in_process import LocalProgram, load_local
from ..execution.inputs import Whole
from ..execution.program import Program, load
from .draw import draw
from .request import Answer, Request, refuse_unfit
from .slots import NewToken, Slots, Step

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..artifact.generation import GenerationRecord
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
        self._cut = {port.name for port in program.manifest.inputs if port.boxes is not None}

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to all requests, in their order; collective: each rank gives the same ones. InputError for any that cannot be met."""
        slots = self._slots(requests)
        for _ in self._steps(slots):
            pass
        return slots.answers

    def each(self, requests: Sequence[Request]) -> Iterator[NewToken]:
        """Every token as it is made, of all requests; otherwise as `run`. The ranks take all of them."""
        return self._steps(self._slots(requests))

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[int]:
        """The tokens behind a prompt, as they are made; the options are those of `Request`."""
        return (one.token for one in self.each([Request(prompt, **options)]))

    def _slots(self, requests: Sequence[Request]) -> Slots:
        refuse_unfit(requests, self.record)
        return Slots(self.record, requests)

    def _steps(self, slots: Slots) -> Iterator[NewToken]:
        while (step := slots.next()) is not None:
            outputs = self._outputs(step)
            chosen = np.array(outputs[self.record.next], np.int64)
            if wrong := [int(one) for one in chosen if one >= self.record.vocabulary]:
                raise RankError(
                    f"the logits of {len(wrong)} sequences are not finite\n  help: look at the weights of the model"
                )
            self._draw(slots, outputs, chosen)
            yield from slots.take(chosen.tolist())

    def _draw(self, slots: Slots, outputs: dict[str, Any], chosen: Vector) -> None:
        """Draws those tokens that are not the likeliest: rank 0 does, and tells the others."""
        drawing = slots.drawing()
        if not drawing:
            return
        if (logits := outputs.get(self.record.logits)) is not None:
            for row, (request, number) in drawing.items():
                chosen[row] = draw(np.asarray(logits)[row], request, number)
        elif isinstance(self.program, Program):
            chosen[[*drawing]] = -1
        if isinstance(self.program, Program):
            np.copyto(chosen, self.program.maxima(chosen))

    def _outputs(self, step: Step) -> dict[str, Any]:
        """What one of the two programs makes of a step."""
        record = self.record
        named = {record.tokens: step.tokens, record.position: step.position}
        if step.slots is not None:
            named[record.count] = step.count
            self._prefill.at_slots(step.slots)
        given = {name: Whole(array) if name in self._cut else array for name, array in named.items()}
        return (self.program if step.slots is None else self._prefill)(given)

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
