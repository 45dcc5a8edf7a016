"""Selects the weights that `--only` names by patterns, as a plan does: for example a model's adapters, without the base model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


def weights_of(patterns: Sequence[str], names: Collection[str], where: str, help: str = "") -> Callable[[str], bool]:
    """Returns a function: whether any of the patterns matches a name.

    Raises UsageError with all texts that are not patterns, or match none of `names`. `where`: the title of these names' owner. `help`: the
    remedy where no name resembles a pattern.
    """
    from partc.compiler.plan.pattern import compile_pattern
    from partc.runtime.errors import UsageError
    from partc.runtime.spellings import nearest

    matching, problems = [], []
    for pattern in patterns:
        try:
            matching.append(compile_pattern(pattern).matches)
        except ValueError as error:
            problems.append(f"--only: '{pattern}' is not a pattern: {error}")
            continue
        if not any(map(matching[-1], names)):
            close = ", ".join(f"'{name}'" for name in nearest(pattern, names))
            remedy = f"the nearest names are {close}" if close else help
            problems.append(
                f"--only: '{pattern}' matches no weight of {where}" + (f"\n  help: {remedy}" if remedy else "")
            )
    if problems:
        raise UsageError("\n".join(problems))
    return lambda name: any(matches(name) for matches in matching)
