"""`place`: with it a `model.py` declares where a module, a function, a single op or the matches of a pattern run.

    self.fc1.place("MS_WORKER", 0)                   # as in MindSpore: the role, the rank
    self.conv1 = place(nn.Conv2d(1, 6, 5), rank=3)
    place(self.layers, [0, 1])                       # a group of ranks; {"pp": 1}: a slice of the plan's mesh
    place("layers.[0-5].*", 0)
    place(op.MatMul, 2)(x, weight)                   # an op; a function: place(attend, [0, 1])(op, x)
    place(self.table, role="ps")                     # ranks of a role of the plan have its parameters, and do not run it
    place(self.conv2, device="cpu")                  # a kind of device, wherever it is placed

Where two calls speak of a node the later wins, and the plan wins over both. Ranks are held against the plan when it compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

from partc.compiler.directives.calls import PlaceCall, is_module
from partc.compiler.directives.recorder import calling_line, recorder
from partc.compiler.directives.traced import traced, wrong_device
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.declared import On
from partc.compiler.plan.target import named_target

Target = TypeVar("Target")
Ranks: TypeAlias = int | Sequence[int] | Mapping[str, int]
"""A rank, ranks in order that are a group, or coordinates along axes of the plan's mesh."""
ROLE = "MS_WORKER"
_LAW = "a place is a rank, a list of ranks, or a slice of the plan's mesh: 3, [0, 1], {'pp': 1}"


def place(
    target: Target,
    *where: Ranks | str,
    role: str | None = None,
    rank: Ranks | None = None,
    rank_id: int | None = None,
    device: str | None = None,
) -> Target:
    """Places `target` on ranks, `place(target, 3)` or `place(target, "MS_WORKER", 3)`, and returns it.

    A module or pattern is handed back itself, of a function or an op the one to be called instead. `role` is "MS_WORKER" or left out;
    without a rank it may be a role of the plan, whose ranks then serve the parameters. `rank_id` is another name of `rank`. `device`,
    `cpu` or `cuda`, is the kind of device that runs it within its rank, and may stand without a rank. Raises CompileError with all that
    is wrong.
    """
    line = calling_line(sys._getframe(1))
    problems = [*_wrong_target(target, line), *wrong_device(device, line)]
    ranks_given = [*where, *(one for one in (rank, rank_id) if one is not None)]
    if role is None and len(ranks_given) > 1 and isinstance(ranks_given[0], str):
        role, ranks_given = ranks_given[0], ranks_given[1:]
    serves = isinstance(role, str) and role not in ("", ROLE) and not ranks_given
    if role not in (None, ROLE) and not serves:
        law = f"ranks that are given run operators, which is the role '{ROLE}'; a role of the plan has ranks of its own"
        problems.append(
            Problem(line, f"role is {role!r}", law, f"write '{ROLE}', or the role without ranks: role=\"ps\"")
        )
    if len(ranks_given) > 1 or (not ranks_given and device is None and not serves):
        fact = (
            "place is given no rank" if not ranks_given else f"place is given {len(ranks_given)} ranks: {ranks_given}"
        )
        problems.append(Problem(line, fact, _LAW, "write the ranks of a group as one list" if ranks_given else ""))
    problems += [problem for one in ranks_given[:1] for problem in _wrong_place(one, line)]
    if problems:
        raise CompileError(problems)
    on: On | None = () if serves else None
    if ranks_given:
        ranks = cast(Ranks, ranks_given[0])
        on = ranks if isinstance(ranks, int) else dict(ranks) if isinstance(ranks, Mapping) else tuple(ranks)
    call = PlaceCall(target, line, on)
    call.role = role if serves and role is not None else ""
    call.device = named_target(device)
    if record := recorder():
        record.calls.append(call)
    if is_module(target) or isinstance(target, str):
        return target
    return cast(Target, traced(call, cast("Callable[..., object]", target)))


def _wrong_target(target: object, line: str) -> Iterator[Problem]:
    if isinstance(target, type):
        fact = f"place takes a module, but got the class {target.__name__}"
        yield Problem(line, fact, help=f"make an instance of it: {target.__name__}()")
    elif isinstance(target, str):
        if not target:
            yield Problem(line, "place got an empty pattern", help="write '**' for the whole model")
    elif not is_module(target) and not callable(target):
        fact = f"place takes a module, a function, an op such as op.MatMul or a pattern, but got {target!r}"
        yield Problem(line, fact, help="write place(self.fc1, 0), or place('layers.*', 0)")


def _wrong_place(place: object, line: str) -> Iterator[Problem]:
    if isinstance(place, Mapping):
        wrong = [axis for axis, at in place.items() if not isinstance(axis, str) or not _is_rank(at)]
        if wrong or not place:
            yield Problem(line, f"place is given {place!r}", _LAW)
    elif isinstance(place, list | tuple | range):
        ranks = list(place)
        if twice := [rank for k, rank in enumerate(ranks) if rank in ranks[:k]]:
            yield Problem(line, f"place is given {ranks}, where rank {twice[0]} stands twice", help="name it once")
        elif not ranks or not all(map(_is_rank, ranks)):
            yield Problem(line, f"place is given {ranks}", _LAW, "name at least one rank" if not ranks else "")
    elif not _is_rank(place):
        yield Problem(line, f"place is given {place!r}", _LAW, "a rank is 0 or more" if isinstance(place, int) else "")


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
