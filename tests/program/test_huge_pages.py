"""Memory that is there goes into huge pages; what is hardly there stays as it is, and no number changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from partc.runtime.execution.memory.huge_pages import HUGE

SMAPS = Path("/proc/self/smaps_rollup")
ALONE = """
import json
from pathlib import Path
import numpy as np
from partc.runtime.execution.memory.huge_pages import HUGE, use_huge_pages

def in_smaps(name):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

touched, untouched = np.arange(8 * HUGE // 8), np.empty(64 * HUGE, np.uint8)
untouched[:: 8 * HUGE] = 7
before = in_smaps("Rss")
made = use_huge_pages()
same = np.array_equal(touched, np.arange(8 * HUGE // 8)) and untouched[:: 8 * HUGE].tolist() == [7] * 8
print(json.dumps([made, in_smaps("AnonHugePages"), in_smaps("Rss") - before, bool(same)]))
"""


@pytest.mark.skipif(not SMAPS.exists(), reason="not Linux")
def test_memory_that_is_there_becomes_huge_pages_and_hardly_more_of_it() -> None:
    """In a process of its own, as no other memory of it is to grow meanwhile."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=120)
    made, huge, grown, same = json.loads(done.stdout)
    assert same
    if not made:
        pytest.skip("this system makes no huge pages of pages that are there")
    assert huge >= 6 * HUGE
    assert grown < 2 * HUGE
