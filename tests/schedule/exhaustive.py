"""The least time of small cases, by trying all orders: what `auto` and `lower_bound` are held against."""

from __future__ import annotations

from collections.abc import Sequence

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.memory import change
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def least_time(stages: Stages, microbatches: int, costs: Costs, limits: Sequence[float]) -> float:
    """The least total of all rows that keep to the limits, B and W apart wherever they can be. Each stage has one home.

    Tasks are appended to rows one by one, each as early as it can run; microbatches of a stage in their order, since they are alike. A
    state is given up where one with the same tasks done was at least as early in everything.
    """
    kinds = [(s, k) for s in range(len(stages)) for k in Kind if k is not Kind.WEIGHT or stages.splittable[s]]
    best = float("inf")
    seen: dict[object, list[tuple[float, ...]]] = {}

    def time(task: Task) -> float:
        return costs.time(task, stages.splittable[task.stage])

    readers: dict[tuple[int, Kind], list[tuple[int, Kind]]] = {kind: [] for kind in kinds}
    for s, kind in kinds:
        for need in stages.needs(Task(s, kind, 0)):
            readers[need.stage, need.kind].append((s, kind))

    def read_later(task: Task, count: dict[tuple[int, Kind], int]) -> bool:
        return any(count[reader] <= task.microbatch for reader in readers[task.stage, task.kind])

    def go_on(
        count: dict[tuple[int, Kind], int], free: list[float], ended: dict[Task, float], used: list[float]
    ) -> None:
        nonlocal best
        if all(n == microbatches for n in count.values()):
            best = min(best, max(free))
            return
        left = list(free)
        for (s, kind), n in count.items():
            left[stages.stage_ranks[s][0]] += (microbatches - n) * time(Task(s, kind, 0))
        if max(left) >= best - 1e-9:
            return
        open_ends = sorted((task, end) for task, end in ended.items() if read_later(task, count))
        key = tuple(count.values()), tuple(task for task, _ in open_ends)
        times = (*free, *(end for _, end in open_ends))
        if any(all(a <= b + 1e-9 for a, b in zip(other, times, strict=True)) for other in seen.get(key, ())):
            return
        seen.setdefault(key, []).append(times)
        options = []
        for s, kind in kinds:
            task, (home,) = Task(s, kind, count[s, kind]), stages.stage_ranks[s]
            more = change(task, stages.splittable[s], costs)
            needs = stages.needs(task)
            if task.microbatch == microbatches or any(need not in ended for need in needs):
                continue
            if more > 0 and used[home] + more > limits[home] + 1e-9:
                continue
            begin = max([free[home], *(ended[n] + costs.travel(stages, s, n.stage) for n in needs)])
            options.append((begin, task, home, more))
        for begin, task, home, more in sorted(options):
            end = begin + time(task)
            go_on(
                {**count, (task.stage, task.kind): task.microbatch + 1},
                [end if h == home else one for h, one in enumerate(free)],
                {**ended, task: end},
                [one + more if h == home else one for h, one in enumerate(used)],
            )

    go_on(dict.fromkeys(kinds, 0), [0.0] * stages.rows, {}, [0.0] * stages.rows)
    return best
