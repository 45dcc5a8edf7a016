"""Verifies a checkpoint before it is needed: it is hashed while programs are loaded, since cores are idle during that time."""

from __future__ import annotations

from pathlib import Path

from ..errors import PartcError
from .checkpoint import Checkpoint
from .newest import candidates
from .verification import Verification


class EarlyVerification:
    """Starts early to verify the checkpoint that a path most likely means; has no verification if that checkpoint cannot be opened."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._begun: tuple[Checkpoint, Verification] | None = None
        try:
            checkpoint = Checkpoint.at(next(candidates(path)))
        except (PartcError, OSError):
            return
        self._begun = checkpoint, Verification(checkpoint, rank, ranks)

    def take(self, checkpoint: Checkpoint) -> Verification | None:
        """Returns the verification if it is for this checkpoint with this index, else None."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        found, proof = begun
        if (found.path, found.index) == (checkpoint.path, checkpoint.index):
            return proof
        proof.close()
        return None

    def close(self) -> None:
        """Ends a verification that `take` has not returned."""
        if self._begun is not None:
            self._begun[1].close()
            self._begun = None
