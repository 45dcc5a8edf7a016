"""Mutated artifacts are refused, or give the same: a few of every kind here, any number by `python tests/fuzz/mutations.py COUNT`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutation_kinds import KINDS, build, run
from mutations import MUTATIONS, judge, told
from rows import of_today

A_KIND = 3


@pytest.mark.parametrize("name", of_today([*KINDS], 3))
def test_a_mutation_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    source = build(kind, tmp_path / "build")
    wanted = run(kind, source)
    ends: Counter[str] = Counter()
    names = [*MUTATIONS]
    first = 7 * list(KINDS).index(name)
    for at in range(first, first + len(names)):
        mutation = names[at % len(names)]
        end = judge(kind, source, wanted, mutation, f"{name} {at}")
        assert end in ("refused", "harmless", "none"), f"{mutation}: {end}"
        ends[end] += 1
        if ends["refused"] == A_KIND:
            break
    assert ends["refused"]
    print(f"{name}: {told(ends)}")
