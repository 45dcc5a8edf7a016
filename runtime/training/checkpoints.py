"""The checkpoints of a training: what its ranks keep is written to folders and read from them. Every call is collective.

Nothing is taken from a checkpoint before all of it was found to be as it was written. So one that is refused leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from ..artifact.format import SCALE
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.compatibility import OPTIMIZER, check_compatible, is_weights_file, matching_weights
from ..checkpoint.early_verification import EarlyVerification
from ..checkpoint.index import CheckpointIndex
from ..checkpoint.lock import Lock
from ..checkpoint.newest import take_whole
from ..checkpoint.save import save
from ..checkpoint.verification import Verification
from ..errors import DamagedError
from ..execution.program import Program
from ..job.agree import together

Result = TypeVar("Result")


class Checkpoints:
    """The checkpoints of one rank's program. `source`: the checkpoint that was loaded last."""

    def __init__(self, program: Program, optimizer: str, ahead: EarlyVerification | None = None) -> None:
        self.source: Path | None = None
        self._ahead = ahead
        self._program, self._optimizer = program, optimizer
        self._kept = program.manifest.state
        self._claimed: set[Path] = set()
        self._ours: set[Path] = set()
        """The folders to which this run has written, now or before it was resumed."""
        self._locks: dict[Path, Lock] = {}

    def save(self, folder: Path, step: int, meta: Mapping[str, JsonValue], keep: int | None) -> Path:
        """Writes a checkpoint into a folder that all ranks share; its path."""
        self.claim(folder)
        state, share, rank = self._program.state, self._program.all_gather_text, self._program.rank
        known: dict[str, JsonValue] = {OPTIMIZER: self._optimizer, **meta}
        lock, goes_on = self._locks.get(folder), folder.resolve() in self._ours
        path = save(folder, step, rank, state.arrays(), self._kept, known, share, keep, lock, goes_on)
        self._ours.add(folder.resolve())
        return path

    def claim(self, folder: Path) -> None:
        """Takes the lock of a folder until `release`; CheckpointError where another job has it."""
        if folder in self._claimed:
            return

        def take() -> None:
            if self._program.rank == 0:
                self._locks[folder] = Lock(folder)

        self._together(take)
        self._claimed.add(folder)

    def release(self) -> None:
        """Releases all locks and ends a verification that is still running."""
        if self._ahead is not None:
            self._ahead.close()
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()
        self._claimed.clear()

    def load(self, path: Path, option: str) -> CheckpointIndex:
        """Loads all tensors from the checkpoint that a path means, and returns its index. `option`: the command line's for another path."""

        def take(place: Path) -> CheckpointIndex:
            checkpoint = self._together(lambda: Checkpoint.at(place))
            self._together(lambda: check_compatible(checkpoint, self._kept, self._optimizer))
            held = checkpoint.index.tensors
            self._read(checkpoint, {one.tensor for one in self._kept if one.kind != SCALE or one.tensor in held})
            return checkpoint.index

        self.source, index = take_whole(path, take, option, self._program.rank, self._program.all_gather_text)
        self._ours.add(self.source.parent.resolve())
        return index

    def load_weights(self, path: Path, strict: bool, option: str) -> frozenset[str]:
        """Loads weights from a checkpoint or a safetensors file; the names of the loaded tensors."""

        def take(source: Checkpoint) -> frozenset[str]:
            names = self._together(lambda: matching_weights(source, self._kept, strict))
            self._read(source, names)
            return names

        def take_checkpoint(place: Path) -> frozenset[str]:
            return take(self._together(lambda: Checkpoint.at(place)))

        if self._together(lambda: is_weights_file(path)):
            return take(self._together(lambda: Checkpoint.of_file(path)))
        self.source, names = take_whole(
            path, take_checkpoint, option, self._program.rank, self._program.all_gather_text
        )
        return names

    def _read(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        """Loads these tensors into the state, once the ranks together have verified the checkpoint."""
        wanted, rank = frozenset(names), self._program.rank

        def prove() -> None:
            begun = self._ahead and self._ahead.take(checkpoint)
            with begun or Verification(checkpoint, rank, self._program.manifest.ranks) as proof:
                if problems := proof.problems():
                    raise DamagedError(problems)

        def fill() -> None:
            self._program.state.fill(lambda record, array: checkpoint.load_into(record, rank, array), wanted)

        self._together(prove)
        self._together(fill)

    def _together(self, action: Callable[[], Result]) -> Result:
        """The action's result where it succeeds on every rank; else the same failure on all."""
        return together(action, self._program.all_gather_text)
