"""Memory that is there goes into huge pages; what is hardly there stays as it is, and no number changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from partc.cli.__main__ import _asks_for_huge_pages
from partc.runtime.execution.memory.huge_pages import HUGE

SMAPS = Path("/proc/self/smaps_rollup")
ALONE = """
import json
import mmap
from pathlib import Path
import numpy as np
from partc.runtime.execution.memory.huge_pages import HUGE, STEPS, huge_pages

def in_smaps(name):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

def memory(pages, dtype):  # numpy asks for huge pages itself
    own = mmap.mmap(-1, pages * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(own, dtype)

touched, untouched = memory(9, np.int64), memory(64, np.uint8)
touched[:] = np.arange(touched.size)
untouched[:: 8 * HUGE] = 7
before, huge = in_smaps("Rss"), in_smaps("AnonHugePages")
made = [*huge_pages()]
assert len(made) <= STEPS
found = [sum(made), in_smaps("AnonHugePages") - huge, in_smaps("Rss") - before]
same = np.array_equal(touched, np.arange(touched.size)) and untouched[:: 8 * HUGE].tolist() == [7] * 8
print(json.dumps([*found, bool(same)]))
"""
BEGINS = """
import json
import os
import sys
from partc.cli.__main__ import _begin_with_huge_pages

_begin_with_huge_pages()
print(json.dumps([sys.argv[1:], os.environ.get("GLIBC_TUNABLES", "")]))
"""


@pytest.mark.skipif(not SMAPS.exists(), reason="not Linux")
def test_memory_that_is_there_becomes_huge_pages_and_hardly_more_of_it() -> None:
    """In a process of its own, as no other memory of it is to grow meanwhile."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=120)
    made, huge, grown, same = json.loads(done.stdout)
    assert same
    if not made:
        pytest.skip("this system makes no huge pages of pages that are there")
    assert huge >= 8 * HUGE
    assert grown < 2 * HUGE


@pytest.mark.skipif(not _asks_for_huge_pages(), reason="no huge pages are asked for here")
@pytest.mark.parametrize("tunables", [None, "glibc.malloc.check=0", "glibc.malloc.hugetlb=0"])
@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_commands_that_make_tokens_begin_with_huge_pages(command: str, tunables: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    line = [sys.executable, "-c", BEGINS, command, "a b"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120, env=environment)
    begins_anew = command == "generate" and tunables != "glibc.malloc.hugetlb=0"
    own = [*([tunables] if tunables else []), *(["glibc.malloc.hugetlb=1"] if begins_anew else [])]
    assert json.loads(done.stdout) == [[command, "a b"], ":".join(own)]
