"""The cores that a process may use: those of its affinity, or fewer where a cgroup above it limits their time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from partc.runtime.job import machine

OWN = "/sys/fs/cgroup/pod/own/cpu.max"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({OWN: "max 100000"}, 8),
        ({OWN: "250000 100000"}, 2),
        ({OWN: "50000 100000"}, 1),
        ({OWN: "900000 100000"}, 8),
        ({OWN: "max 100000", "/sys/fs/cgroup/pod/cpu.max": "300000 100000"}, 3),
        ({OWN: "400000 100000", "/sys/fs/cgroup/cpu.max": "500000 100000"}, 4),
        ({OWN: ""}, 8),
    ],
)
def test_the_smallest_limit_counts(files: Mapping[str, str], cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/self/cgroup": "1:cpu:/other\n0::/pod/own\n", **files}
    monkeypatch.setattr(machine, "usable_cores", lambda: frozenset(range(8)))
    monkeypatch.setattr(machine, "text_of_system", lambda path: texts.get(str(path), ""))
    assert machine.core_limit() == cores


def test_this_machine_gives_at_least_one() -> None:
    assert 1 <= machine.core_limit() <= len(machine.usable_cores())
