"""The order of a rank's ops with the fewest changes of target, among those in which they can run.

Between two events or tasks ops move; the events themselves, and calls of tasks, keep their places, and so does the global order. All ready
ops of the current target come first, in their order; then the copies that are ready, then the ops of another target, and updates
when nothing else is ready: nobody waits for them. Of the targets with which to begin the one with the fewest runs is taken. An update stays
behind what reads the tensor that it replaces and behind what makes the guard, and updates of one target keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from partc.compiler.ir.programs import Compute, Copy, Op, Value
from partc.runtime.artifact.format import OPTIMIZER


def in_runs(steps: Iterable[Op], updated: Collection[Value] = (), guard: Value | None = None) -> list[Op]:
    """The ops in order; `updated` are the tensors of the state that updates replace in their place, if `guard` is finite."""
    ordered: list[Op] = []
    window: list[Compute | Copy] = []
    current = ""
    for step in steps:
        if isinstance(step, Compute | Copy):
            window.append(step)
            continue
        some, current = _ordered(window, updated, guard, current)
        ordered += [*some, step]
        window = []
    return [*ordered, *_ordered(window, updated, guard, current)[0]]


def _ordered(
    window: Sequence[Compute | Copy], updated: Collection[Value], guard: Value | None, current: str
) -> tuple[list[Compute | Copy], str]:
    """The ops of a window, and the target of the last."""
    targets = list(dict.fromkeys(step.target for step in window if isinstance(step, Compute)))
    if not targets:
        return list(window), current
    if len(targets) == 1 and not any(isinstance(step, Copy) for step in window):
        return list(window), targets[0]
    before, after = _graph(window, updated, guard)
    begins = dict.fromkeys((*([current] if current in targets else ()), *targets))
    tried = [_listed(window, before, after, begin) for begin in begins]
    _, order, last = min(tried, key=lambda one: one[0])
    return [window[at] for at in order], last


def _graph(
    window: Sequence[Compute | Copy], updated: Collection[Value], guard: Value | None
) -> tuple[list[int], list[list[int]]]:
    """Maps each op to the number of ops that must come before it, and to the ops that come after it."""
    makers: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    after: list[set[int]] = [set() for _ in window]
    last: dict[str, int] = {}
    for at, step in enumerate(window):
        for value in step.reads:
            if value in makers:
                after[makers[value]].add(at)
        if _is_update(step):
            for value in step.reads:
                if value in updated:
                    for reader in readers.get(value, ()):
                        after[reader].add(at)
            if step.target in last:
                after[last[step.target]].add(at)
            last[step.target] = at
        for value in step.reads:
            readers.setdefault(value, []).append(at)
        makers |= dict.fromkeys(step.makes, at)
    if guard is not None and guard in makers:
        # Only what replaces a tensor of the state waits for the guard: what merges rows may come before it.
        replacing = (at for at, step in enumerate(window) if _is_update(step) and not {*step.reads}.isdisjoint(updated))
        after[makers[guard]].update(replacing)
    before = [0] * len(window)
    for some in after:
        for at in some:
            before[at] += 1
    return before, [sorted(some) for some in after]


def _is_update(step: Compute | Copy) -> bool:
    return isinstance(step, Compute) and step.node.domain == OPTIMIZER


def _listed(
    window: Sequence[Compute | Copy], before: Sequence[int], after: Sequence[Sequence[int]], begin: str
) -> tuple[int, list[int], str]:
    """The number of runs, the order, and the last target, of all orders that begin with a target."""
    waiting = list(before)
    copies: list[int] = []
    updates: list[int] = []
    ready: dict[str, list[int]] = {}
    order: list[int] = []

    def done(at: int) -> None:
        order.append(at)
        for other in after[at]:
            waiting[other] -= 1
            if not waiting[other]:
                put(other)

    def put(at: int) -> None:
        step = window[at]
        if isinstance(step, Copy):
            heapq.heappush(copies, at)
        elif _is_update(step):
            updates.append(at)
        else:
            heapq.heappush(ready.setdefault(step.target, []), at)

    for at, count in enumerate(before):
        if not count:
            put(at)
    runs, current = 0, begin
    while len(order) < len(window):
        while copies:
            done(heapq.heappop(copies))
        if len(order) == len(window):
            break
        runs += 1
        if not any(ready.values()):
            own = [at for at in updates if window[at].target == current] or updates
            current = window[min(own)].target
            while own := [at for at in updates if window[at].target == current]:
                updates.remove(min(own))
                done(min(own))
            continue
        if not ready.get(current):
            current = min((some[0], target) for target, some in ready.items() if some)[1]
        some = ready[current]
        while some:
            done(heapq.heappop(some))
    return runs, order, current
