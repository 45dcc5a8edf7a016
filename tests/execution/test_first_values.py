"""What a rank keeps begins with its first values, and takes no pages for zeros before they are written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ALONE = """
import json
from pathlib import Path
import numpy as np
from onnx import ModelProto
from partc.runtime.artifact.format import StateRecord
from partc.runtime.execution.state import make_state

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12

def record(name, shape, **fields):
    return StateRecord(value=name, next=name + ".next", tensor=name, shape=shape, type="tensor(float)", ranks=[0], **fields)

records = [
    record("cache", [8, 4, 2048, 256], kind="cache"),
    record("few", [300], kind="cache"),
    record("ones", [5, 3], kind="optimizer", parameter="w", initial=1.0),
]
used = [np.full(300, 7, np.float32) for _ in range(100)]
del used
before = resident()
state = make_state(records, 0, [], ModelProto(), Path(), {})
grown = resident() - before
arrays = {one.value: array for one, array in state.arrays()}
print(json.dumps([grown, *(float(abs(arrays[name]).max()) for name in ("cache", "few")), arrays["ones"].tolist()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_caches_take_no_pages_before_they_are_written() -> None:
    """In a process of its own: 64 MB of a cache, and small memory that was in use before."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=120)
    grown, cache, few, ones = json.loads(done.stdout)
    assert grown < 8 << 20
    assert (cache, few) == (0, 0)
    assert ones == [[1.0] * 3] * 5
