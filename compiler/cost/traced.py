"""The measured actions of an artifact's ranks, from a trace; they replace a machine's figures.

Times are medians over the steps of the trace. A computation takes what its span does. A message or a collective takes the time from when
all others have begun it, and the rank waits for it, to the end of the wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from partc.compiler.cost.play import Action, Begin, Class, Communicate, Compute, Finish, Receive, Send
from partc.runtime.artifact.trace import CATEGORIES, STEP, Span, Trace, read_trace
from partc.runtime.errors import UsageError
from partc.runtime.units import count

_WARM = 3
"""So many first steps are left out where there are more."""
_NAMED = 3
_AGAIN = "measure again: `partc run build/ --random 7 --repeat 20 --profile x.trace.json`"


@dataclass(frozen=True)
class Traced:
    """Maps each rank and name to the spans of an action, by step; and each rank to the seconds of a step outside its actions.

    `step`: the median seconds of a step, of the rank that takes longest. `share`: the part of an action's times that are below the one that
    is taken of it, a half for the median.
    """

    where: str
    spans: Mapping[tuple[int, str], Mapping[int, Span]]
    rest: Mapping[int, float]
    ranks: int
    steps: int
    step: float
    share: float = 0.5

    def refuse_other(self, ranks: int) -> None:
        """UsageError where the trace is of an artifact of another number of ranks, which is known before any rank file is read."""
        if ranks != self.ranks:
            raise self._other(f"it has {count(self.ranks, 'rank')}, and this artifact {ranks}")

    def _other(self, fact: str) -> UsageError:
        help = "give the trace of a run of this very artifact, by `partc run build/ --profile x.trace.json`"
        return UsageError(f"{self.where}: is the trace of another artifact: {fact}\n  help: {help}")

    def calibrated(self, classes: Sequence[Class]) -> list[Class]:
        """The classes with what was measured; UsageError where the trace is of another artifact."""
        self.refuse_other(sum(len(one.ranks) for one in classes))
        wanted = {
            (one.ranks[0], action.what)
            for one in classes
            for action in one.actions
            if action.path or (isinstance(action, Communicate) and action.op)  # others have no span in a trace
        }
        missing = sorted({what for rank, what in wanted if (rank, what) not in self.spans})
        if missing:
            more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise self._other(f"actions of this artifact are not in it: {'; '.join(missing[:_NAMED])}{more}")
        begins: dict[int, list[Mapping[int, Span]]] = defaultdict(list)
        for one in classes:
            for action in one.actions:
                if isinstance(action, Send | Begin) and (one.ranks[0], action.what) in self.spans:
                    begins[action.tag].append(self.spans[one.ranks[0], action.what])
        return [
            replace(one, actions=[self._of(one.ranks[0], action, begins) for action in one.actions]) for one in classes
        ]

    def _of(self, rank: int, action: Action, begins: Mapping[int, Sequence[Mapping[int, Span]]]) -> Action:
        spans = self.spans.get((rank, action.what))
        if spans is None:
            seconds = self.rest.get(rank, 0.0) if isinstance(action, Compute) else 0.0
        elif isinstance(action, Receive | Finish):
            seconds = self._taken(_left(spans, begins.get(action.tag, ())))
        else:
            seconds = self._taken(one.seconds for one in spans.values())
        measured = replace(action, seconds=seconds)
        return replace(measured, travel=0.0) if isinstance(measured, Communicate) else measured

    def _taken(self, times: Iterable[float]) -> float:
        ordered = sorted(times)
        return ordered[int(self.share * (len(ordered) - 1))]


def _left(waits: Mapping[int, Span], begins: Sequence[Mapping[int, Span]]) -> Iterator[float]:
    """Maps each step to the seconds between the time when the others have begun, while this rank waits, and the end of its wait."""
    for step, wait in waits.items():
        begun = [one[step].begin + one[step].seconds for one in begins if step in one]
        yield max(0.0, wait.begin + wait.seconds - max([wait.begin, *begun]))


def read_traced(path: Path, share: float = 0.5) -> Traced:
    """What a trace measured, of each action the time that a `share` are below.

    UsageError where it is not a trace, or was cut short before any step of all ranks had ended.
    """
    trace = read_trace(path)
    steps = _ended_steps(trace)
    if not steps:
        cut = ", for it was cut short" if not trace.is_complete else ""
        raise UsageError(f"{path}: has no step that all ranks have ended{cut}\n  help: {_AGAIN}")
    kept = {*(steps[_WARM:] or steps)}
    spans: dict[tuple[int, str], dict[int, Span]] = defaultdict(dict)
    wholes: dict[tuple[int, int], float] = {}
    inside: dict[tuple[int, int], float] = defaultdict(float)
    for span in trace.spans:
        step = span.about["step"]
        if step not in kept:
            continue
        if span.category == STEP:
            wholes[span.rank, step] = span.seconds
        elif span.category in CATEGORIES:
            spans[span.rank, span.name][step] = span
            inside[span.rank, step] += span.seconds
    ranks = {rank for rank, _ in wholes}
    rest = {
        rank: median(max(0.0, wholes[rank, step] - inside[rank, step]) for step in kept if (rank, step) in wholes)
        for rank in ranks
    }
    longest = median(max(wholes[rank, step] for rank in ranks) for step in kept)
    return Traced(str(path), spans, rest, trace.ranks, len(kept), longest, share)


def _ended_steps(trace: Trace) -> list[int]:
    """The steps that every rank has ended that does anything; ranks follow each other in the file, so of one that was cut short before the
    last rank's spans there are none, else not the last one of that rank."""
    ends: dict[int, set[int]] = defaultdict(set)
    for one in trace.spans:
        if one.category == STEP:
            ends[one.rank].add(one.about["step"])
    if not ends:
        return []
    if not trace.is_complete:
        last = trace.spans[-1]
        if last.rank < trace.ranks - 1:
            return []
        ends[last.rank].discard(last.about["step"])
    return sorted(set.intersection(*ends.values()))
