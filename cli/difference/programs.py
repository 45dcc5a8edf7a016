"""Two artifacts compared program by program, at the same sizes of the symbols."""

from __future__ import annotations

from collections.abc import Mapping

from partc.cli.difference.compare import Difference, difference
from partc.cli.difference.facts import Facts, facts_of
from partc.cli.job.inputs import choose_sizes
from partc.compiler.cost.machine import Machine
from partc.runtime.artifact.legal_sizes import typical_sizes
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.errors import UsageError


def common_sizes(old: Artifact, new: Artifact, given: Mapping[str, int]) -> dict[str, int]:
    """The given sizes, else the first artifact's typical ones; UsageError where either forbids one."""
    typical = {**typical_sizes(new.manifest), **typical_sizes(old.manifest)}
    problems = [f"--set {name}: neither artifact has a symbol '{name}'" for name in given if name not in typical]
    sizes = {**typical, **given}
    for artifact in (old, new):
        own = {name: size for name, size in sizes.items() if name in artifact.manifest.symbols}
        problems += [f"{artifact.folder}: {text}" for text in choose_sizes(artifact.manifest.symbols, own)[1]]
    if problems:
        raise UsageError("\n".join([*problems, "  help: --set NAME=SIZE to a size that both artifacts allow"]))
    return sizes


def differences(
    old: Artifact, new: Artifact, sizes: Mapping[str, int], machine: Machine | None = None
) -> tuple[list[Difference], int]:
    """What differs between the programs of each name, and of how many values the size is not known."""
    found, unknown = [], 0
    for name in dict.fromkeys([*old.programs, *new.programs]):
        facts = [
            facts_of(one.program_named(name), sizes, machine) if name in one.programs else Facts() for one in (old, new)
        ]
        found.append(difference(name, *facts))
        unknown += max(one.unknown for one in facts)
    return found, unknown
