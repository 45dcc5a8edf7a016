"""Copies of a training's state in the memory of its hosts: a job that is started again continues from them, else from disk.

Every rank writes the regions that it owns into a folder in memory of its host, as for a checkpoint, and sends the file to a rank one host
further. So any lost host, or several of which no two follow each other, leaves each file somewhere; on one host the copies outlive the
ranks alone. A copy is made beside the steps:

    step k        the state is copied, and a thread writes the file
    step k + 1    ranks exchange the sizes, and begin to send the files
    step k + 2    the files have arrived: each host gives the copy its name, and removes the one before

A copy is used only if all its files have one index, which names the step: never a mix of steps. Where a file is nowhere left, an older
copy or a checkpoint on disk is taken. A restarted job brings each host the files that it lacks, and then reads boxes as from any
checkpoint. If a copy cannot be written, memory being full, training continues without it.

    /dev/shm/partc-run-copies-5f0c.../step_00000120/    checkpoint.json, rank_0000.safetensors, ..
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from partc.runtime.artifact.format import StateRecord
from partc.runtime.artifact.tensors.dtypes import Array, Bytes
from pydantic import JsonValue

from ..checkpoint.index import INDEX, CheckpointFile, rank_tensors, read_index, step_folder, steps
from ..checkpoint.ownership import owners
from ..checkpoint.save import Save, index_of, outcome, succeeded
from ..communication.transport import Request, Transport
from ..errors import CheckpointError, PartcError, printable
from ..files.regular import read_regular
from ..files.replace import make_folder, move_folder, remove
from ..files.writers import new_file, write_new


class Copies:
    """The copies of one rank's training in `folder`, a private folder in its host's memory; every call is collective.

    `hosts`: the ranks of each folder, those of a host, by their lowest rank.
    """

    def __init__(self, folder: Path, transport: Transport) -> None:
        """Finds the hosts; CheckpointError on all ranks where a host has no such folder."""
        self.folder, self._transport, self.rank = folder, transport, transport.rank
        said = succeeded(folder, transport.all_gather_text(outcome(lambda: _identity(folder))[0]))
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(said):
            hosts.setdefault(host, []).append(rank)
        self.hosts = list(hosts.values())
        self._save: Save | None = None
        self._written: tuple[str, Exception | None] = "", None
        self._thread: threading.Thread | None = None
        self._file_records: list[str] = []
        """The record of each rank's file as JSON; empty where it has none."""
        self._moving: list[tuple[Request, str, Bytes]] = []
        """The messages under way, each with the name of the file and its bytes; no name for a file that is sent."""
        self._warned = False

        def clear() -> str:
            for place in folder.glob(".step_*") if self.is_first else ():
                remove(place)  # of ranks that were lost
            return ""

        succeeded(folder, transport.all_gather_text(outcome(clear)[0]))

    @property
    def is_first(self) -> bool:
        """Whether the rank is the lowest one of its host."""
        return any(host[0] == self.rank for host in self.hosts)

    @property
    def place(self) -> tuple[int, int]:
        """The index of this rank among the ranks of its host, and their number."""
        host = next(host for host in self.hosts if self.rank in host)
        return host.index(self.rank), len(host)

    def begin(
        self,
        step: int,
        pieces: Sequence[tuple[StateRecord, Array]],
        records: Sequence[StateRecord],
        meta: Mapping[str, JsonValue],
    ) -> None:
        """Begins a copy of the state after a step, once the last one is complete."""
        self.advance()  # a copy takes two turns
        self.advance()
        save = Save(self.folder, step, self.rank, (), records, meta)
        save.owned.update(owners(records))
        mine = {owned.value for some in save.owned.values() for owned in some if owned.rank == self.rank}
        save.pieces = [(record, array.copy()) for record, array in pieces if record.value in mine]
        self._save, self._file_records = save, []

        def write() -> str:
            make_folder(save.scratch, exist_ok=True)
            return save.write()

        def run() -> None:
            self._written = outcome(write)
            save.pieces = ()

        self._thread = threading.Thread(target=run, name=f"partc copy {self.rank}", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Takes the next turn of the copy that has begun: sends the files, or completes it."""
        save = self._save
        if save is None:
            return
        try:
            if self._thread is not None:
                self._send(save)
            else:
                self._complete(save)
        except CheckpointError as error:
            self._give_up(save, error)

    def _send(self, save: Save) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        text, failure = self._written
        self._file_records = succeeded(save.target, self._transport.all_gather_text(text), failure)
        self._remove_older(save.step)  # all ranks have completed the copy before this one
        tag = self._transport.tags
        for giver, taker in self._neighbours():
            said, name = self._file_records[giver], rank_tensors(giver)
            if not said:
                continue
            if taker == self.rank:
                buffer = np.empty(CheckpointFile.model_validate_json(said).bytes, np.uint8)
                self._moving.append((self._transport.irecv(buffer, giver, tag), name, buffer))
            elif giver == self.rank:
                buffer = _bytes_of(save.scratch / name)
                self._moving.append((self._transport.isend(buffer, taker, tag), "", buffer))

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        """Yields pairs of a rank and the rank one host further that keeps its file; none on a single host."""
        for place, host in enumerate(self.hosts if len(self.hosts) > 1 else ()):
            following = self.hosts[(place + 1) % len(self.hosts)]
            yield from ((rank, following[k % len(following)]) for k, rank in enumerate(host))

    def _complete(self, save: Save) -> None:
        moving, self._moving = self._moving, []
        for request, _, _ in moving:
            self._transport.wait(request, lambda: "the copy of another host's state")

        def write() -> str:
            for _, name, buffer in moving:
                if name:
                    _write(save.scratch / name, buffer)
            return ""

        self._agree(save, write)

        def commit() -> str:
            if self.is_first:
                index = index_of(save.step, save.records, save.owned, save.meta, self._file_records)
                write_new(save.scratch / INDEX, index.text().encode())
                if save.target.exists():
                    remove(save.target)
                move_folder(save.scratch, save.target)
            return ""

        self._agree(save, commit)
        self._save = None

    def _agree(self, save: Save, act: Callable[[], str]) -> None:
        text, failure = outcome(act)
        succeeded(save.target, self._transport.all_gather_text(text), failure)

    def _remove_older(self, step: int) -> None:
        """Removes all copies on this host but the newest before a step."""
        if self.is_first:
            older = [place for number, place in steps(self.folder) if number < step]
            for place in older[:-1]:
                remove(place)

    def _give_up(self, save: Save, error: CheckpointError) -> None:
        """Removes what there is of a copy that could not be made; rank 0 warns once."""
        self._save, self._moving = None, []
        self._transport.all_gather_text("")  # no rank writes any more
        if self.is_first and save.scratch.exists():
            remove(save.scratch)
        self._warn(str(error).partition("\n  help")[0].replace("\n", ";"))

    def _warn(self, reason: str) -> None:
        """Prints a warning on rank 0, the first time."""
        if self.rank == 0 and not self._warned:
            print(printable(f"warning: no copy of the state is kept in memory: {reason}"), file=sys.stderr)
        self._warned = True

    def newest(self, after: int) -> Path | None:
        """Returns the newest copy after a step of which each file is on some host; this host then has all files. None without one."""
        mine = json.dumps(_listed(self.folder)) if self.is_first else "{}"
        found = [json.loads(text) for text in self._transport.all_gather_text(mine)]
        for step in sorted({step for one in found for step in one if int(step) > after}, key=int, reverse=True):
            for seal in dict.fromkeys(one[step][0] for one in found if step in one):
                there = {rank: one[step] for rank, one in enumerate(found) if one.get(step, [""])[0] == seal}
                files = next(iter(there.values()))[2]
                if files.keys() == {name for _, names, _ in there.values() for name in names}:
                    return self._gathered(int(step), {rank: names for rank, (_, names, _) in there.items()}, files)
        return None

    def _gathered(self, step: int, names: Mapping[int, Sequence[str]], files: Mapping[str, int]) -> Path | None:
        """Brings each host the files of a copy that it lacks; None where a host has no room for them.

        `names`: the files of hosts, by their lowest rank; `files`: all of them, with their sizes.
        """
        place, failure = self.folder / step_folder(step), ""
        tag = self._transport.tags
        if self.is_first and self.rank not in names:
            remove(place)  # of other contents, or without an index
        # The index comes last: a folder without one is not a checkpoint.
        for name in sorted(files, key=lambda name: (name == INDEX, name)):
            giver = min(rank for rank, own in names.items() if name in own)
            for taker in (host[0] for host in self.hosts):
                if name in names.get(taker, ()):
                    continue
                if self.rank == giver:
                    buffer = _bytes_of(place / name)
                    self._transport.wait(self._transport.isend(buffer, taker, tag), lambda: "a copy for another host")
                elif self.rank == taker:
                    buffer = np.empty(files[name], np.uint8)
                    self._transport.wait(self._transport.irecv(buffer, giver, tag), lambda: "a copy from another host")
                    try:
                        make_folder(place, exist_ok=True)
                        _write(place / name, buffer)
                    except OSError as error:
                        failure = failure or f"rank {self.rank}: {error}"
        if failures := list(filter(None, self._transport.all_gather_text(failure))):
            self._warn(f"{place}: {failures[0]}")
            return None
        return place

    def end(self) -> None:
        """Removes all copies, at the end of a training."""
        if self._thread is not None:
            self._thread.join()
        self._save = self._thread = None
        self._transport.all_gather_text("")
        if self.is_first:
            remove(self.folder)


def _identity(folder: Path) -> str:
    """Creates the private folder where it is missing; returns what identifies it among all hosts. OSError where another user may write."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    about = os.lstat(folder)
    own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    if not stat.S_ISDIR(about.st_mode) or not own or about.st_mode & 0o077:
        raise PartcError(f"{folder}: is not a folder that this user alone may use")
    return f"{socket.gethostname()} {about.st_dev} {about.st_ino}"


def _bytes_of(file: Path) -> Bytes:
    return np.frombuffer(read_regular(file), np.uint8)


def _write(file: Path, data: Bytes) -> None:
    with new_file(file) as out:
        out.write(data.data)


def _listed(folder: Path) -> dict[str, tuple[str, list[str], dict[str, int]]]:
    """Maps each step's number to the last line of its index, the files that are there, and the sizes of all that belong to it."""
    by_step = {}
    for step, place in steps(folder):
        try:
            index = read_index(place)
            text = read_regular(place / INDEX)
        except (CheckpointError, OSError):
            continue
        sizes = {**{name: one.bytes for name, one in index.files.items()}, INDEX: len(text)}
        there = [name for name, size in sizes.items() if _has(place / name, size)]
        by_step[str(step)] = text.decode().splitlines()[-2], there, sizes
    return by_step


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
