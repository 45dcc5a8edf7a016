"""`partc inspect` knows the size of every value of every sample, but for what a step reads of a decoder's caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from partc.cli.output.stats import typical_sizes
from partc.runtime.execution.memory.needed import rank_memory
from sample_plans import PLANS, compiled

READS_AS_MUCH_AS_IS_VALID = ("gpt/generate",)
"""Plans with several slots: a step reads of each cache as many entries as the longest sequence has, a number that no symbol names."""


@pytest.mark.parametrize("plan", PLANS)
def test_no_value_of_a_sample_is_left_out(plan: str, tmp_path: Path) -> None:
    artifact = compiled(plan, tmp_path / "build")
    sizes = typical_sizes(artifact.manifest)
    for program in artifact.programs:
        beside = artifact if program == artifact.programs[0] else artifact.beside(program)
        needed = [rank_memory(beside, rank, sizes) for rank in range(artifact.manifest.ranks)]
        unknown = {rank for rank, one in enumerate(needed) if one.unknown}
        assert unknown == ({*range(artifact.manifest.ranks)} if plan in READS_AS_MUCH_AS_IS_VALID else set())
        assert all(one.peak > 0 for one in needed)
