"""Memory that is there goes into huge pages; what is hardly there stays as it is, and no number changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.runtime.execution.memory.huge_pages import HUGE, use_huge_pages

SMAPS = Path("/proc/self/smaps_rollup")


def in_smaps(name: str) -> int:
    """Bytes of this process by a name of /proc."""
    lines = SMAPS.read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.skipif(not SMAPS.exists(), reason="not Linux")
def test_memory_that_is_there_becomes_huge_pages_and_hardly_more_of_it() -> None:
    touched, untouched = np.arange(8 * HUGE // 8), np.empty(64 * HUGE, np.uint8)
    untouched[:: 8 * HUGE] = 7
    before = in_smaps("Rss")
    if not use_huge_pages():
        pytest.skip("this system makes no huge pages of pages that are there")
    assert in_smaps("AnonHugePages") >= 6 * HUGE
    assert in_smaps("Rss") - before < 2 * HUGE
    assert np.array_equal(touched, np.arange(8 * HUGE // 8))
    assert untouched[:: 8 * HUGE].tolist() == [7] * 8
