"""The memory of a class of ranks over a step: what is held at each action, and which values are the largest where it is most.

The curve is that of `partc inspect`'s figures before arenas are laid out: its most is below the peak, which also counts what arenas keep.
"""

from __future__ import annotations

from collections.abc import Mapping

from partc.compiler.cost.memory import RankMemory, memory_over_step
from partc.runtime.artifact.manifest import Artifact

_LARGEST = 12


def memory_curve(artifact: Artifact, memory: RankMemory, sizes: Mapping[str, int]) -> dict[str, object]:
    """The curve of the rank whose memory is given: bytes kept through the step, and by action those that come and go."""
    steps, lives = memory_over_step(artifact, memory.rank, sizes)
    kept = sum(one.resident + one.inputs_outputs for one in memory.targets)
    most = max(range(len(steps)), key=lambda at: steps[at].between + steps[at].inside, default=0)
    there = sorted(
        (one for one in lives if one.born <= most <= max([one.died, *one.sends]) and one.bytes),
        key=lambda one: (-one.bytes, one.name),
    )
    return {
        "kept": kept,
        "between": [one.between for one in steps],
        "inside": [one.inside for one in steps],
        "what": [one.what for one in steps],
        "most": most,
        "values": [[one.name, one.bytes, one.born, one.died] for one in there[:_LARGEST]],
        "others": len(there[_LARGEST:]),
    }
