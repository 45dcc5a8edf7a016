"""The loop of steps that continues prompts, over all ranks of an artifact whose plan generates.

    with load_generator("build", MPI.COMM_WORLD) as generator:     # on every rank, with the same requests
        for token in generator.stream([1, 306, 4658]):
            ...
        answers = generator.run([Request([1, 306], max_tokens=50), Request([1, 15043], temperature=0.8, seed=7)])

Every rank has the same requests and sees the same tokens, so each derives the inputs of the next step by itself; only a token that is drawn
is sent to the others (`sampling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..artifact.format import CACHE, StateRecord
from ..artifact.generation import DECODE, ENCODE, PREFILL, GenerationRecord, kind_and_size
from ..artifact.tensors.boxes import full_region, region
from ..artifact.tensors.dtypes import Array
from ..communication.transport import Agreements, Transport, Vector
from ..errors import ArtifactError, RankError
from ..execution.in_process import LocalProgram, load_local
from ..execution.inputs import SameArrays, Whole
from ..execution.memory.huge_pages import huge_pages
from ..execution.program import Outputs, Program, load
from ..units import count
from .adapters import AdapterChange, write_adapter
from .draw import Scratch
from .prefixes import Copy
from .request import Answer, NewToken, Request, refuse_unfit
from .row_bits import least_rows
from .sampling import Draws, LogitShards
from .scores import scores_of
from .slots import Slots, Step
from .turns import Turns

if TYPE_CHECKING:
    from mpi4py import MPI


class Generator:
    """Generates tokens with a program, or with all ranks of one in this process; raises ArtifactError if its plan does not generate."""

    def __init__(self, program: Program | LocalProgram) -> None:
        if program.manifest.generation is None:
            fact = "the artifact makes no tokens"
            raise ArtifactError(f"{fact}\n  help: compile it with `generate: {{length: 4096}}` in the plan")
        self.program = program
        self.record: GenerationRecord = program.manifest.generation
        names = [PREFILL, *([] if self.record.encoder is None else [ENCODE]), *self.record.narrow]
        self._beside = {name: program.sibling_program(name) for name in names}
        self._programs = {DECODE: program, **self._beside}
        self._ports = {name: {port.name for port in one.manifest.inputs} for name, one in self._programs.items()}
        ports = [port for one in self._programs.values() for port in one.manifest.inputs]
        self._cut = {port.name for port in ports if port.boxes is not None}
        self._scratch = Scratch(self.record.vocabulary)
        self._shards = {
            name: LogitShards.of(port)
            for name, one in self._programs.items()
            for port in one.manifest.outputs
            if port.name == self.record.logits
        }
        """Maps each program to the shards of its logits."""
        self._embeddings = {
            name: port
            for name, one in self._programs.items()
            for port in one.manifest.outputs
            if self.record.embedding is not None and port.name == self.record.embedding.output
        }
        """Maps each program to the output with its embeddings."""
        self._several = isinstance(program, Program) and program.size > 1
        self._huge_pages = huge_pages()
        self._tokens: list[Agreements] = []
        """For each group, the agreement on the tokens of a step, if groups take turns on several ranks."""
        self._decodes: dict[tuple[int, int], tuple[Array, SameArrays]] = {}
        """Maps each group and number of rows to the tokens of a decode, and to its inputs."""
        least = least_rows(self.record)
        self.least_rows = program.largest(least) if isinstance(program, Program) and self._several else least
        """The fewest rows of a step."""
        on_devices = int(any(rank.state.targets for rank in self._ranks))
        self._on_host = not (
            program.largest(on_devices) if isinstance(program, Program) and self._several else on_devices
        )
        if self.record.groups > 1 and isinstance(program, Program) and self._several:
            self._tokens = [program.agreements() for _ in range(self.record.groups)]

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns the answers to all requests, in order; collective, with equal requests. Raises InputError if one cannot be met."""
        answers = [Answer() for _ in requests]
        for made in self.each(requests):
            answers[made.request].add(made)
        return answers

    def each(self, requests: Sequence[Request]) -> Iterator[NewToken]:
        """Yields every token of all requests as it is made; otherwise like `run`. All ranks must iterate to the end."""
        refuse_unfit(requests, self.record)
        return self._each(requests)

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[int]:
        """Yields the tokens after a prompt, as they are made; the options are those of `Request`."""
        return (one.token for one in self.each([Request(prompt, **options)]))

    def _each(self, requests: Sequence[Request]) -> Iterator[NewToken]:
        slots = self.slots()
        for number, request in enumerate(requests):
            slots.admit(number, request)
        turns = Turns(self, slots)
        while (made := turns.next()) is not None:
            if broken := sum(one.finish == "error" for one in made):
                fact = f"the logits of {count(broken, 'sequence')} are not finite"
                raise RankError(f"{fact}\n  help: look at the weights of the model")
            yield from made

    def slots(self, shares: bool = True) -> Slots:
        """Returns slots without sequences; `shares`: whether prompts share entries of slots, if all caches are on the host."""
        return Slots(self.record, self.least_rows, shares, self._on_host)

    def begin(self, slots: Slots, step: Step) -> Callable[[], list[NewToken]]:
        """Runs this rank's part of a step; returns a function that waits for its tokens and returns them. Both are collective."""
        if step.copies:
            self._copy(step.copies)
        outputs = self._outputs(step)
        next(self._huge_pages, None)
        if step.encoded is not None:
            return lambda: slots.take(step, [])
        # where groups take turns the last stage has them
        results: object = None
        for one in outputs.values():
            results = one.get(self.record.next, results)
        drawing, scores, embedding = step.drawing(), step.has_scores, step.embedding_rows
        pooled = self._pooled(step, outputs, embedding) if embedding else None
        if isinstance(results, np.ndarray) and not (drawing or scores or embedding or self._tokens):
            found = results.tolist()
            return lambda: self._taken(slots, step, found)
        chosen = np.full(step.results, -1, np.int64) if results is None else np.array(results, np.int64)
        logits = self._logits(step, outputs, scores) if drawing or scores else {}
        draws = Draws(self._shards[step.program], drawing, logits, self._scratch) if drawing else None
        together = draws is not None and self._several and draws.shards.is_sharded
        if draws is not None and not together:
            draws.finish(chosen)  # each rank its own rows
        agreed = None
        if self._tokens:
            told = [draws.shard_vector()] if draws is not None and together else []
            agreed = self._tokens[step.group].begin(np.concatenate([chosen, *told]))

        def taken() -> list[NewToken]:
            numbers = None if agreed is None else agreed()
            if numbers is not None:
                np.copyto(chosen, numbers[: chosen.size])
            if draws is not None and together:
                draws.finish(chosen, self._agree(step.group), None if numbers is None else numbers[chosen.size :])
            elif draws is not None and self._several and numbers is None:
                np.copyto(chosen, self._agree(step.group)(chosen))
            tokens = chosen.tolist()
            agree = self._agree(step.group) if self._several else None
            further: dict[str, Any] = {}
            if pooled is not None:
                numbers = (agree(pooled.reshape(-1)) if agree else pooled).reshape(pooled.shape).astype(np.uint32)
                further["pooled"] = dict(zip(embedding, numbers.view(np.float32).astype(np.float64), strict=False))
            if scored := step.scored(tokens, self.record.vocabulary) if scores else {}:
                further["scores"] = scores_of(self._shards[step.program], scored, logits, self._scratch, agree)
            return self._taken(slots, step, tokens, **further)

        return taken

    def _taken(self, slots: Slots, step: Step, chosen: Sequence[int], **given: Any) -> list[NewToken]:
        """Returns the tokens of a step from the number chosen for each row; `given`: the other arguments of `Slots.take`."""
        if broken := step.slots_of(chosen, self.record.vocabulary):
            self._clear(broken)
        return slots.take(step, chosen, **given)

    def _pooled(self, step: Step, outputs: Mapping[int, Outputs], rows: Sequence[int]) -> Vector:
        """Returns the embeddings of rows as far as this process has them: the bits of float32 as integers, -1 for those of another rank.

        The number of rows is padded to a power of two, so that there are few sizes.
        """
        port = self._embeddings[step.program]
        shape = [int(dim) for dim in port.shape or ()]
        pooled = np.full((1 << (len(rows) - 1).bit_length(), shape[1]), -1, np.int64)
        for rank, one in outputs.items():
            if port.name in one:
                box = port.box(rank)
                here = full_region(shape) if box is None else region(box, shape)
                (begin, first), (end, last) = here.begin, here.end
                bits = np.ascontiguousarray(one[port.name], np.float32).view(np.uint32)
                for place, row in enumerate(rows):
                    if begin <= row < end:
                        pooled[place, first:last] = bits[row - begin]
        return pooled

    def _agree(self, group: int) -> Callable[[Vector], Vector]:
        """Returns a function of the maxima of all ranks' numbers, in the order of the steps of a group."""
        if self._tokens:
            return lambda numbers: self._tokens[group].begin(numbers)()
        assert isinstance(self.program, Program)
        return self.program.maxima

    def _clear(self, broken: Sequence[int]) -> None:
        """Sets the caches of slots to zeros: values that are not finite would spoil the next sequence there even if masked."""

        def write(rows: Mapping[int, Array]) -> None:
            for slot in broken:
                if slot in rows:
                    rows[slot].fill(0)

        self._write(write)

    def _copy(self, copies: Sequence[Copy]) -> None:
        """Copies the first entries of slots into other slots of the same run, which the same ranks have."""
        room = self.record.room_for_entries

        def write(rows: Mapping[int, Array]) -> None:
            for copy in copies:
                if copy.source in rows:
                    source, target = rows[copy.source], rows[copy.target]
                    # a cache whose other dims have the same size is copied whole: what lies behind the entries is never read
                    grows = [dim for dim, size in enumerate(source.shape) if size == room]
                    entries = (
                        (*(slice(None),) * grows[0], slice(self.record.first_entries(copy.count)))
                        if len(grows) == 1
                        else ...
                    )
                    target[entries] = source[entries]

        self._write(write)

    def load_adapter(self, place: int, change: AdapterChange) -> str:
        """Writes an adapter into a place of the stacks; returns the reason if a rank failed, empty if all have written it. Collective."""
        problem = ""
        try:
            write_adapter(self._ranks, place, change)
        except (OSError, ValueError) as error:
            problem = f"{change.file}: {error}"
            if self._several and isinstance(self.program, Program):
                problem = f"rank {self.program.rank}: {problem}"
        if self._several and isinstance(self.program, Program):
            problem = next(filter(None, self.program.all_gather_text(problem)), "")
        return problem

    def _write(self, write: Callable[[Mapping[int, Array]], None]) -> None:
        """Calls `write` with each cache of this process's ranks, as a mapping from slots to rows."""

        def rows(record: StateRecord, array: Array) -> None:
            begin, _, of = record.shard(program.rank)[0]
            write(dict(enumerate(array, self.record.slots * begin // of)))

        for program in self._ranks:
            program.state.fill(rows, {one.tensor for one in program.state.records if one.kind == CACHE})

    @property
    def _ranks(self) -> Sequence[Program]:
        """The ranks of this process."""
        return [self.program] if isinstance(self.program, Program) else self.program.ranks

    def _logits(self, step: Step, outputs: Mapping[int, Outputs], scores: bool) -> dict[int, Array]:
        """Maps each rank of this process to the logits of a step, which stay until its tokens are taken."""
        logits = {
            rank: np.asarray(one[self.record.logits]) for rank, one in outputs.items() if self.record.logits in one
        }
        if self.record.groups > 1 and (scores or (self._tokens and self._shards[step.program].is_sharded)):
            for rank, array in logits.items():  # steps of other groups begin before
                use = f"logits of group {step.group}, rank {rank}"
                kept = self._scratch.of(use, array.size, array.dtype.type).reshape(array.shape)
                np.copyto(kept, array)
                logits[rank] = kept
        return logits

    def _outputs(self, step: Step) -> dict[int, Outputs]:
        """Runs a step of one of the programs; maps each rank of this process to its results."""
        program, inputs = self._programs[step.program], self._inputs(step)
        if step.slots is not None:
            program.at_slots(step.slots)
        elif self.record.groups > 1:
            program.at_slots(self.record.slots_of(step.group))
        if isinstance(program, Program):
            return {program.rank: program.step_of_all(inputs)}
        return dict(enumerate(program.step_of_all(inputs)))

    def _inputs(self, step: Step) -> Mapping[str, object]:
        """Maps names to the inputs of a step; those of a group's decodes are the same object as long as their arrays are."""
        record, encoder = self.record, self.record.encoder
        key = step.group, len(step.tokens)
        tokens, same = self._decodes.get(key, (None, {}))
        if step.tokens is tokens:
            return same
        named = {record.tokens: step.tokens, record.count: step.count, record.position: step.position}
        if encoder is not None and step.encoded is not None:
            named = {encoder.input: step.encoded}
        if encoder is not None and step.lengths is not None:
            named[encoder.count] = step.lengths
        if record.adapter and record.adapter in self._ports[step.program]:
            named[record.adapter] = step.adapters
        if record.draft is not None and step.encoded is None:
            named[record.draft.scored] = step.scored_tokens
        given = {name: Whole(array) if name in self._cut else array for name, array in named.items()}
        if kind_and_size(step.program)[0] != DECODE:
            return given
        # the tokens are those of steps before, and no others
        self._decodes[key] = step.tokens, SameArrays(given)
        return self._decodes[key][1]

    def close(self) -> None:
        """Releases sessions and caches."""
        self.program.close()
        self._release()

    def _release(self) -> None:
        for program in self._beside.values():
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
    """Returns this rank's end of the generator in `folder`; collective over `comm`. The options are those of `load`."""
    return Generator(load(folder, comm, **options))


def load_local_generator(folder: str | Path, **options: Any) -> Generator:
    """Returns the generator with all ranks as threads of this process; the options are those of `load_local`."""
    return Generator(load_local(folder, **options))
