"""The checkpoints of a training: the state of its ranks is written to folders and read from them. Every call is collective.

Nothing is loaded from a checkpoint before all of it has been verified. So a checkpoint that is refused leaves everything as it was.

Runs an action on every rank with one outcome: if it fails on any rank, all ranks raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from ..artifact.format import OF_A_PLAN, StateRecord
from ..artifact.tensors.dtypes import Array
from ..checkpoint.background import BackgroundSave
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.compatibility import OPTIMIZER, check_compatible, fits, is_weights_file, matching_weights
from ..checkpoint.early_verification import EarlyVerification
from ..checkpoint.index import ADAPTER, CheckpointIndex
from ..checkpoint.lock import Lock
from ..checkpoint.newest import take_newest_intact
from ..checkpoint.run_list import Retention
from ..checkpoint.save import Save, save
from ..checkpoint.verification import Verification
from ..errors import ArtifactError, CheckpointError, DamagedError, PartcError, RankError, UsageError
from ..execution.program import Program
from .copies import Copies
from .ema import Averages

Result = TypeVar("Result")


class Checkpoints:
    """The checkpoints of one rank's program. `source`: the checkpoint that was loaded last."""

    def __init__(
        self,
        program: Program,
        optimizer: str,
        ahead: EarlyVerification | None = None,
        averages: Averages | None = None,
    ) -> None:
        self.source: Path | None = None
        self._ahead = ahead
        self._program, self._optimizer = program, optimizer
        self._kept, self._averages = program.manifest.state, averages
        self._claimed: set[Path] = set()
        self._ours: set[Path] = set()
        """The folders to which this run has written, now or before it was resumed."""
        self._locks: dict[Path, Lock] = {}
        self.copies: Copies | None = None
        self.saving: BackgroundSave | None = None
        """The save in the background that has not been finished."""

    def save(
        self,
        folder: Path,
        step: int,
        meta: Mapping[str, JsonValue],
        keep: int | None,
        best: int | None,
        background: bool = False,
    ) -> Path:
        """Writes a checkpoint into a folder shared by all ranks, and returns its path; in the `background` complete after `finish`."""
        self.finish()
        self.claim(folder)
        share, rank = self._program.all_gather_text, self._program.rank
        arrays, records, known = self._state(meta)
        lock, retention = self._locks.get(folder), Retention(keep, best, folder.resolve() in self._ours)
        if background:
            one = Save(folder, step, rank, arrays, records, known, retention, lock)
            self.saving = BackgroundSave(one, self._program.manifest.ranks, share)
            return self.saving.path
        path = save(folder, step, rank, arrays, records, known, share, retention, lock)
        self._ours.add(folder.resolve())
        return path

    def _state(
        self, meta: Mapping[str, JsonValue]
    ) -> tuple[Sequence[tuple[StateRecord, Array]], list[StateRecord], dict[str, JsonValue]]:
        """Returns this rank's tensors, the records of all ranks, and the metadata of a checkpoint."""
        arrays, records = self._program.state.arrays(), [*self._kept]
        if self._averages is not None:
            arrays, records = [*arrays, *self._averages.arrays()], [*records, *self._averages.records]
        known: dict[str, JsonValue] = {OPTIMIZER: self._optimizer, **meta}
        if (training := self._program.manifest.training) is not None and training.adapter:
            known[ADAPTER] = {**training.adapter}
        return arrays, records, known

    def keep_copies(self, folder: Path) -> Copies:
        """Prepares copies of the state in memory, in a folder of each host; CheckpointError on all ranks where a host cannot have it."""
        self.copies = Copies(folder, self._program.transport)
        return self.copies

    def _is_copy(self, path: Path) -> bool:
        """Whether a checkpoint's path is that of a copy in memory."""
        return self.copies is not None and path.parent == self.copies.folder

    def copy(self, step: int, meta: Mapping[str, JsonValue]) -> None:
        """Begins a copy of the state in memory."""
        assert self.copies is not None
        self.copies.begin(step, *self._state(meta))

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save in the background has failed."""
        return self.saving is not None and self.saving.has_failed

    def finish(self) -> None:
        """Waits for a save in the background, if there is one; collective. Raises CheckpointError on all ranks if it failed."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            self._ours.add(saving.finish(self._program.all_gather_text).parent.resolve())

    def claim(self, folder: Path) -> None:
        """Takes the lock of a folder until `release`; raises CheckpointError if another job has it."""
        if folder in self._claimed:
            return

        def take() -> None:
            if self._program.rank == 0:
                self._locks[folder] = Lock(folder)

        self._together(take)
        self._claimed.add(folder)

    def release(self) -> None:
        """Releases all locks, and ends a verification or a save that is still running."""
        if self._ahead is not None:
            self._ahead.close()
        if self.saving is not None:
            self.saving.give_up()
            self.saving = None
        for folder in [*self._locks]:  # another thread of the process may close the same trainer
            if (lock := self._locks.pop(folder, None)) is not None:
                lock.release()
        self._claimed.clear()

    def load(self, path: Path, option: str, averaged: bool = False) -> CheckpointIndex:
        """Loads all tensors from the checkpoint at a path, and returns its index. `option`: the command line's option for another path.

        With `averaged`, parameters are loaded from the checkpoint's moving averages.
        """

        self.finish()

        def take(place: Path) -> CheckpointIndex:
            whole = self._together(lambda: Checkpoint.at(place))
            checkpoint = self._together(whole.averaged) if averaged else whole
            self._together(lambda: check_compatible(checkpoint, self._kept, self._optimizer))
            held = checkpoint.index.tensors
            self._read(
                checkpoint,
                {one.tensor for one in self._kept if one.kind not in OF_A_PLAN or fits(one, held.get(one.tensor))},
            )
            return checkpoint.index

        self.source, index = take_newest_intact(path, take, option, self._program.rank, self._program.all_gather_text)
        if not self._is_copy(self.source):
            self._ours.add(self.source.parent.resolve())
        return index

    def load_weights(
        self, path: Path, strict: bool, option: str, only: Callable[[str], bool] | None = None
    ) -> frozenset[str]:
        """Loads weights, or those that `only` selects, from a checkpoint or a safetensors file; returns the names of the loaded tensors."""

        self.finish()
        kept = [one for one in self._kept if only is None or only(one.tensor)]

        def take(whole: Checkpoint) -> frozenset[str]:
            source = whole if only is None else whole.only(only)
            names = self._together(lambda: matching_weights(source, kept, strict))
            self._read(source, names)
            return names

        def take_checkpoint(place: Path) -> frozenset[str]:
            return take(self._together(lambda: Checkpoint.at(place)))

        if self._together(lambda: is_weights_file(path)):
            return take(self._together(lambda: Checkpoint.of_file(path)))
        self.source, names = take_newest_intact(
            path, take_checkpoint, option, self._program.rank, self._program.all_gather_text
        )
        return names

    def _read(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        """Loads these tensors into the state, once the ranks together have verified the checkpoint."""
        wanted, rank = frozenset(names), self._program.rank
        share = rank, self._program.manifest.ranks
        if self._is_copy(checkpoint.path):
            assert self.copies is not None
            share = self.copies.place  # each host has files of its own

        def prove() -> None:
            begun = self._ahead and self._ahead.take(checkpoint)
            with begun or Verification(checkpoint, *share) as proof:
                if problems := proof.problems():
                    raise DamagedError(problems)

        def fill() -> None:
            self._program.state.fill(lambda record, array: checkpoint.load_into(record, rank, array), wanted)

        def fill_averages() -> None:
            assert self._averages is not None
            for record, array in self._averages.arrays():
                if record.tensor in checkpoint.index.tensors:
                    checkpoint.load_into(record, rank, array)

        self._together(prove)
        self._together(fill)
        if self._averages is not None:
            self._averages.begin()
            self._together(fill_averages)

    def _together(self, action: Callable[[], Result]) -> Result:
        """Returns the action's result if it succeeds on every rank; else raises the same failure on all."""
        return together(action, self._program.all_gather_text)


_KINDS: tuple[type[PartcError], ...] = (DamagedError, CheckpointError, ArtifactError, UsageError)


def together(action: Callable[[], Result], share: Callable[[str], Sequence[str]]) -> Result:
    """Returns the action's result if it succeeds on every rank; collective.

    Errors of partc are merged into one that all ranks raise: it has the class of the first failing rank's error, and each line of that
    class's errors once. Any other error is raised by the rank that had it, and the other ranks raise a RankError.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes = [json.loads(text) for text in share(json.dumps(_words(failure)))]
    if not any(outcomes):
        return result  # type: ignore[return-value]
    strange = [(rank, words) for rank, words in enumerate(outcomes) if words and words[0] is None]
    if strange:
        if failure is not None and _words(failure)[0] is None:
            raise failure
        rank, words = strange[0]
        raise RankError(f"rank {rank} failed: {words[1]}")
    first = next(words[0] for words in outcomes if words)
    texts = dict.fromkeys(text for words in outcomes if words and words[0] == first for text in words[1:])
    if first == DamagedError.__name__:
        raise DamagedError(list(texts))
    kind = next(one for one in _KINDS if one.__name__ == first)
    raise kind("\n".join(texts))


def _words(failure: Exception | None) -> list[str | None]:
    """Converts an error to the texts that ranks exchange: the name of its class, None if it is not partc's, and its text."""
    match failure:
        case None:
            return []
        case DamagedError():
            return [DamagedError.__name__, *failure.problems]
        case _:
            for kind in _KINDS:
                if type(failure) is kind:
                    return [kind.__name__, str(failure)]
            return [None, f"{type(failure).__name__}: {failure}"]
