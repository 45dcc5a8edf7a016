"""`partc inspect` knows the size of every value of every sample, and how large those may become that grow with a decoder's sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from partc.cli.output.stats import typical_sizes
from partc.runtime.execution.memory.needed import rank_memory
from sample_plans import PLANS, compiled


@pytest.mark.parametrize("plan", PLANS)
def test_no_value_of_a_sample_is_left_out(plan: str, tmp_path: Path) -> None:
    artifact = compiled(plan, tmp_path / "build")
    sizes = typical_sizes(artifact.manifest)
    for program in artifact.programs:
        beside = artifact if program == artifact.programs[0] else artifact.beside(program)
        needed = [rank_memory(beside, rank, sizes) for rank in range(artifact.manifest.ranks)]
        assert not any(one.unknown for one in needed)
        assert all(one.peak > 0 for one in needed)
