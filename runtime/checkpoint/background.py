"""Saves a checkpoint while training continues: a step waits only for a copy of the rank's tensors in memory; a thread writes it to files.

Ranks that write in the background cannot use collectives. So each rank leaves a file `rank_0001.written` in the hidden folder of the save,
with the size and hash of its tensor file, or the reason why it could not be written. Rank 0's thread waits for the files of all ranks and
then renames the folder to the checkpoint's name, as a save in the foreground does. So a crash at any moment leaves the previous checkpoint
intact. All ranks learn together in `finish` whether the save has succeeded.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

from ..errors import CheckpointError
from ..files.regular import read_regular
from ..files.replace import remove_file
from ..files.writers import new_file
from .save import Save, Share, on_all_ranks, outcome, succeeded

_LOOK = 0.01
"""Seconds between two checks for the `.written` files of other ranks."""


class BackgroundSave:
    """A save in progress."""

    def __init__(self, save: Save, ranks: int, share: Share) -> None:
        """Begins the save; collective. CheckpointError on all ranks where the folder cannot be written."""
        try:
            on_all_ranks(save.target, share, save.begin)
            on_all_ranks(save.target, share, save.find)
        except CheckpointError:
            save.discard()
            save.release()
            raise
        self._save, self._ranks, self._ended = save, ranks, threading.Event()
        self._written, self._outcome = threading.Event(), ""
        mine = {owned.value for some in save.owned.values() for owned in some if owned.rank == save.rank}
        save.pieces = [(record, array.copy()) for record, array in save.pieces if record.value in mine]
        self._said: tuple[str, ...] = ()
        """The outcomes of writing all ranks' files, exchanged in `finish`."""
        self._failure: Exception | None = None
        self._refused: Exception | None = None
        """The error for which this rank could not write its own file."""
        self._thread = threading.Thread(target=self._run, name=f"partc save {save.rank}", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The folder that the checkpoint gets."""
        return self._save.target

    @property
    def is_complete(self) -> bool:
        """On rank 0, whether the checkpoint is complete; on other ranks, whether the rank's own file is written."""
        return not self._thread.is_alive() and self._failure is None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the checkpoint could not be written; only rank 0 learns of other ranks' failures before `finish`."""
        return self._failure is not None or self._refused is not None

    def finish(self, share: Share) -> Path:
        """Waits for the save and returns the folder of the complete checkpoint; collective.

        CheckpointError on all ranks where any rank failed.
        """
        self._written.wait()
        self._said = tuple(share(self._outcome))
        self._thread.join()
        told = share(str(self._failure or ""))[0]  # rank 0 knows the failures of all ranks
        self._save.release()
        if told:
            self._save.discard()
            raise CheckpointError(told) from self._failure
        return self._save.target

    def give_up(self) -> None:
        """Ends the save without the other ranks, which may be gone. A checkpoint that is about to be renamed may still get its name."""
        self._ended.set()
        self._thread.join()
        self._save.release()

    def _run(self) -> None:
        self._outcome, self._refused = outcome(self._save.write)
        self._save.pieces = ()
        try:
            with contextlib.suppress(OSError), new_file(self._word(self._save.rank)) as out:
                out.write(json.dumps(self._outcome).encode() + b"\n")
            self._written.set()  # from here on rank 0 removes the `.written` files
            if self._save.rank == 0:
                told = succeeded(
                    self._save.target, [self._wait_for(rank) for rank in range(self._ranks)], self._refused
                )
                for rank in range(self._ranks):
                    remove_file(self._word(rank))
                succeeded(self._save.target, [outcome(lambda: self._save.commit(told))[0]])
        except Exception as error:
            self._failure = error
        finally:
            self._written.set()

    def _word(self, rank: int) -> Path:
        return self._save.scratch / f"rank_{rank:04d}.written"

    def _wait_for(self, rank: int) -> str:
        while not self._ended.is_set():
            if self._said:
                return self._said[rank]
            try:
                text = read_regular(self._word(rank))
            except FileNotFoundError:
                text = b""
            if text.endswith(b"\n"):
                return str(json.loads(text))
            time.sleep(_LOOK)
        raise CheckpointError(f"{self._save.target}: was not written: training ended meanwhile")
