"""The most memory of its own that this process takes, if it is a rank of a job; each rank of `predicted_memory.py` imports this first.

From just before the program is laid out to its end; written to $MEASURED/RANK.txt in bytes.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

KEYS = ("RssAnon", "RssShmem", "RssFile", "VmHWM")
EVERY = 0.001
"""Seconds between two looks."""


def now() -> dict[str, int]:
    """The process's bytes by kind."""
    rows = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {key: 1024 * int(rest.split()[0]) for key, _, rest in rows if key in KEYS}


def mapped(folder: str) -> int:
    """The resident bytes of files in a folder."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = len(words) > 5 and words[5].startswith(folder)
        elif inside and words[0] == "Rss:":
            total += 1024 * int(words[1])
    return total


class Watch:
    """Looks at the memory again and again."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        _one_session()
        Path("/proc/self/clear_refs").write_text("5")
        self.begin = now()
        self.most = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            found = now()
            self.most = max(self.most, found["RssAnon"] + found["RssShmem"])
            time.sleep(EVERY)

    def peak(self) -> int:
        """The most so far: what was seen, or what the system counted at its peak without the pages of files that there are now."""
        end = now()
        counted = end["VmHWM"] - end["RssFile"]
        return max(self.most, counted) - self.begin["RssAnon"] - self.begin["RssShmem"] + mapped(self.folder)


def _one_session() -> None:
    """Loads what a process loads once, of onnxruntime and of modules that are imported late."""
    import numpy as np
    import numpy.random
    import onnxruntime
    from onnx import parser

    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2, 2] x) => (float[2, 2] y) { y = MatMul (x, x) }'
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones((2, 2), np.float32)})


def install(out: Path) -> None:
    """Watches this process from the first program on; each that is closed writes what has been seen."""
    from partc.runtime.execution import program as programs

    lower, close = programs.lower_rank_program, programs.Program.close
    watches: list[Watch] = []

    def lowered(artifact: Any, *rest: Any) -> Any:
        if not watches:
            watches.append(Watch(str(artifact.folder.resolve())))
        return lower(artifact, *rest)

    def closed(self: Any) -> None:
        (out / f"{self.rank}.txt").write_text(str(watches[0].peak()))
        close(self)

    programs.lower_rank_program, programs.Program.close = lowered, closed  # type: ignore[method-assign]


if "MEASURED" in os.environ:
    install(Path(os.environ["MEASURED"]))
