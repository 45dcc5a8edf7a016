"""The proof of a checkpoint, begun before it is asked for: it is hashed while the programs are loaded, which leaves cores idle."""

from __future__ import annotations

from pathlib import Path

from ..errors import PartcError
from .checkpoint import Checkpoint
from .hashes import Proof
from .newest import candidates


class EarlyProof:
    """A rank's proof of the checkpoint that a path most likely means; of none where that cannot be opened, which is told later."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._begun: tuple[Checkpoint, Proof] | None = None
        try:
            checkpoint = Checkpoint.at(next(candidates(path)))
        except (PartcError, OSError):
            return
        self._begun = checkpoint, Proof(checkpoint, rank, ranks)

    def take(self, checkpoint: Checkpoint) -> Proof | None:
        """The proof, where it is of this checkpoint, as its index is now."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        found, proof = begun
        if (found.path, found.index) == (checkpoint.path, checkpoint.index):
            return proof
        proof.close()
        return None

    def close(self) -> None:
        """Gives up what nobody has taken."""
        if self._begun is not None:
            self._begun[1].close()
            self._begun = None
