"""The loop of steps that continues prompts, over all ranks of an artifact whose plan generates.

    with load_generator("build", MPI.COMM_WORLD) as generator:     # on every rank, with the same requests
        for token in generator.stream([1, 306, 4658]):
            ...
        answers = generator.run([Request([1, 306], max_tokens=50), Request([1, 15043], temperature=0.8, seed=7)])

Every rank has the same requests and sees the same tokens, so each finds out by itself what the next step is given; only a token that rank 0
draws is told to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..artifact.format import CACHE, ENCODE, PREFILL
from ..errors import ArtifactError, RankError
from ..execution.in_process import LocalProgram, load_local
from ..execution.inputs import Whole
from ..execution.program import Program, load
from ..units import count
from .draw import draw
from .request import Answer, Request, refuse_unfit
from .slots import NewToken, Slots, Step
from .turns import Turns

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..artifact.format import StateRecord
    from ..artifact.generation import GenerationRecord
    from ..artifact.tensors.dtypes import Array
    from ..communication.transport import Agreements, Transport, Vector


class Generator:
    """Makes tokens with a program, or with all ranks of one in this process; ArtifactError where its plan does not generate."""

    def __init__(self, program: Program | LocalProgram) -> None:
        if program.manifest.generation is None:
            fact = "the artifact makes no tokens"
            raise ArtifactError(f"{fact}\n  help: compile it with `generate: {{length: 4096}}` in the plan")
        self.program = program
        self.record: GenerationRecord = program.manifest.generation
        self._prefill = program.beside(PREFILL)
        self._encode = None if self.record.encoder is None else program.beside(ENCODE)
        programs = [program, *self._beside]
        ports = [port for one in programs for port in one.manifest.inputs]
        self._cut = {port.name for port in ports if port.boxes is not None}
        self._tokens: list[Agreements] = []
        """By group what tells all ranks the tokens of a step, where groups take turns on several ranks."""
        if self.record.groups > 1 and isinstance(program, Program) and program.size > 1:
            self._tokens = [program.agreements() for _ in range(self.record.groups)]

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
        turns = Turns(self, slots)
        while (made := turns.next()) is not None:
            if broken := sum(one.finish == "error" for one in made):
                fact = f"the logits of {count(broken, 'sequence')} are not finite"
                raise RankError(f"{fact}\n  help: look at the weights of the model")
            yield from made

    def begin(self, slots: Slots, step: Step) -> Callable[[], list[NewToken]]:
        """Runs this rank's part of a step of these slots; what comes back waits for its tokens, and gives them. Both are collective."""
        outputs = self._outputs(step)
        if step.encoded is not None:
            return lambda: [*slots.take(step, [])]
        made = outputs.get(self.record.next)  # where groups take turns the last stage has it
        chosen = np.full(len(step.tokens), -1, np.int64) if made is None else np.array(made, np.int64)
        drawn = self._draw(step, outputs, chosen)
        agreed = self._tokens[step.group].begin(chosen) if self._tokens else None

        def taken() -> list[NewToken]:
            if agreed is not None:
                np.copyto(chosen, agreed())
            elif drawn and isinstance(self.program, Program):
                np.copyto(chosen, self.program.maxima(chosen))
            found = chosen.tolist()
            if broken := step.slots_of(found, self.record.vocabulary):
                self._clear(broken)
            return [*slots.take(step, found)]

        return taken

    def _clear(self, broken: Sequence[int]) -> None:
        """Makes the caches of slots zeros: of what is not finite also the masked entries would spoil the next sequence there."""

        def write(record: StateRecord, array: Array) -> None:
            begin, _, of = record.shard(program.rank)[0]
            first = self.record.slots * begin // of
            for slot in broken:
                if first <= slot < first + len(array):
                    array[slot - first] = 0

        for program in [self.program] if isinstance(self.program, Program) else self.program.ranks:
            program.state.fill(write, {one.tensor for one in program.state.records if one.kind == CACHE})

    def _draw(self, step: Step, outputs: dict[str, Any], chosen: Vector) -> bool:
        """Draws those tokens that are not the likeliest, where the logits are; -1 on the other ranks. Whether there are any."""
        drawing = step.drawing()
        if not drawing:
            return False
        if (logits := outputs.get(self.record.logits)) is not None:
            for row, (request, number) in drawing.items():
                if chosen[row] < self.record.vocabulary:
                    chosen[row] = draw(np.asarray(logits)[row], request, number)
        elif isinstance(self.program, Program):
            chosen[[*drawing]] = -1
        return True

    def _outputs(self, step: Step) -> dict[str, Any]:
        """What one of the programs makes of a step."""
        record, encoder = self.record, self.record.encoder
        named = {record.tokens: step.tokens, record.count: step.count, record.position: step.position}
        program = self.program if step.slots is None else self._prefill
        if encoder is not None and step.encoded is not None and self._encode is not None:
            program, named = self._encode, {encoder.input: step.encoded}
        if encoder is not None and step.lengths is not None:
            named[encoder.count] = step.lengths
        if step.slots is not None:
            program.at_slots(step.slots)
        elif record.groups > 1:
            program.at_slots(record.slots_of(step.group))
        return program.step_of_all(
            {name: Whole(array) if name in self._cut else array for name, array in named.items()}
        )

    @property
    def _beside(self) -> list[Program | LocalProgram]:
        """The programs beside the main one."""
        return [self._prefill] if self._encode is None else [self._prefill, self._encode]

    def close(self) -> None:
        """Gives sessions and caches back."""
        self.program.close()
        self._release()

    def _release(self) -> None:
        for program in self._beside:
            if isinstance(program, Program):  # ranks that are threads end theirs together
                program.release()

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
