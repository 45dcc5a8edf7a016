"""Summarizes many paths in few patterns: runs of numbers become `*` or a range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from partc.compiler.plan.pattern import compile_pattern, literal_pattern


def template(path: str) -> str:
    """The path with `*` for every part that is a number: what alike modules have in common."""
    return ".".join("*" if part.isdigit() else literal_pattern(part) for part in path.split("."))


def patterns(chosen: Sequence[str], covered: Callable[[str], bool]) -> list[str]:
    """Patterns that match the chosen paths; `covered` says whether a pattern matches nothing else that matters."""
    alike: dict[str, list[str]] = {}
    for path in chosen:
        alike.setdefault(template(path), []).append(path)
    chosen_patterns: list[str] = []
    for common, paths in alike.items():
        if len(paths) > 1 and covered(common):
            chosen_patterns.append(common)
        else:
            chosen_patterns += _ranged(paths)
    return chosen_patterns


def among(paths: Iterable[str], chosen: Iterable[str]) -> Callable[[str], bool]:
    """Whether all of `paths` that a pattern matches are inside of chosen modules."""
    known, modules = list(paths), {*chosen}
    allowed = {path for path in known if not modules.isdisjoint(accumulate(path.split("."), "{}.{}".format))}

    def covered(pattern: str) -> bool:
        matches = compile_pattern(pattern).matches
        return all(path in allowed for path in known if matches(path))

    return covered


def _ranged(paths: Sequence[str]) -> list[str]:
    """One pattern with ranges where the paths differ in one number, else each path by itself."""
    parts = [path.split(".") for path in paths]
    if len(paths) > 1 and len({len(one) for one in parts}) == 1:
        differing = [k for k, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
        if len(differing) == 1 and all(one[differing[0]].isdigit() for one in parts):
            k = differing[0]
            ranges = _ranges(sorted({int(one[k]) for one in parts}))
            return [".".join(f"[{ranges}]" if at == k else literal_pattern(part) for at, part in enumerate(parts[0]))]
    return [literal_pattern(path) for path in paths]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
