"""Computes the lifetimes of the values of a rank's program, in step numbers, by which values share the arena, and steps drop values.

A value that is there when a Loop begins, and that a turn reads, lives to the end of the Loop.

A value lives from the step that makes it, posts its receive or begins its collective, to its last reader. A run of copies counts as one
point in time: its results live from its first step, its sources to its last. A collective reads its input until it is finished; a Send, an
Exchange, and a collective without a result on this rank read it until the messages have left, which is waited for as late as possible.

If a collective's input has no later reader, and its output is as large, both share one place in memory: AllReduce and Broadcast work in
place, and a collective of one rank then does nothing. The same holds for a sum to which the tasks of the microbatches add one after
another, and for a shard of a parameter whose last reader is an update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from .flat_buffers import run_ends
from .memory_plan import Lifetime
from .steps import Segment, Send, StartCollective, Step, WaitCollective, bodies_of


@dataclass
class LiveRange:
    """The steps in which a value is made (`born`), in which each use of it ends, and in which a send of it begins."""

    born: int
    ends: list[int] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)


def live_ranges(steps: Sequence[Step], outputs: Iterable[str]) -> dict[str, LiveRange]:
    """Returns the live range of every value of a program; an output of the program is used until its end."""
    finishes = {step.call.tag: index for index, step in enumerate(steps) if isinstance(step, WaitCollective)}
    runs = run_ends(steps)
    ranges: dict[str, LiveRange] = {}
    for index, step in enumerate(steps):
        begin, last = runs.get(index, (index, index))
        for name, end in _uses(step, last, finishes):
            ranges.setdefault(name, LiveRange(begin)).ends.append(end)
        leaving = _leaving(step)
        if leaving is not None:
            ranges[leaving].sends.append(index)
    for name in outputs:
        ranges.setdefault(name, LiveRange(0)).ends.append(len(steps))
    for begin, last in bodies_of(steps):  # the next turn reads again what was there before the first
        for span in ranges.values():
            if span.born <= begin < max(span.ends) < last:
                span.ends.append(last)
    return ranges


def merged_ranges(live_ranges: Mapping[str, LiveRange], members: Mapping[str, str]) -> dict[str, LiveRange]:
    """Returns the live ranges with those of the values in a flat buffer merged into one; `members` maps values to their buffers."""
    ranges: dict[str, LiveRange] = {}
    for name, span in live_ranges.items():
        whole = ranges.setdefault(members.get(name, name), LiveRange(span.born))
        whole.born = min(whole.born, span.born)
        whole.ends += span.ends
        whole.sends += span.sends
    return ranges


def in_place_aliases(
    steps: Sequence[Step],
    live_ranges: Mapping[str, LiveRange],
    slots: Collection[str],
    excluded: Collection[int] = (),
    are_alike: Callable[[str, str], bool] = lambda one, two: False,
    renewed: Mapping[int, Sequence[tuple[str, str]]] = MappingProxyType({}),
) -> dict[str, str]:
    """Maps each value that reuses the memory of its operand to the value that first had that memory.

    These are outputs of collectives, except those whose tags are `excluded`, sums of tasks, and an update's results for shards (`renewed`,
    by step); the last two need operands that `are_alike` in type and shape. For y = AllReduce(x): {"y": "x"}.
    """
    finishes = {step.call.tag: index for index, step in enumerate(steps) if isinstance(step, WaitCollective)}
    aliases: dict[str, str] = {}
    for index, step in enumerate(steps):
        for term, made in step.sums if isinstance(step, Segment) and step.task else renewed.get(index, ()):
            ends = live_ranges[term].ends if term in slots and made in slots and are_alike(term, made) else ()
            if ends and max(ends) == index and not live_ranges[term].sends:
                aliases[made] = aliases.get(term, term)
        if not isinstance(step, StartCollective) or step.call.tag in excluded:
            continue
        kind = step.call.kind
        if not kind.keeps_size and (len(step.ranks) > 1 or kind.boxes):
            continue  # the output is not as large as the input
        source, result = (None, None) if step.call.parts else (step.call.source, step.call.result)
        if source not in slots or result not in slots or source is None or result is None:
            continue
        others = list(live_ranges[source].ends)
        others.remove(finishes[step.call.tag])
        if not live_ranges[source].sends and all(end < index for end in others):
            aliases[result] = aliases.get(source, source)
    return aliases


def lifetimes(
    live_ranges: Mapping[str, LiveRange], in_place_aliases: Mapping[str, str], sizes: Mapping[str, int]
) -> list[Lifetime]:
    """Returns the bytes and lifetime of every value that has a place of its own, including the values that reuse the place later."""
    shared: dict[str, list[str]] = {}
    for name in sizes:
        shared.setdefault(in_place_aliases.get(name, name), []).append(name)
    return [
        Lifetime(
            name,
            max(sizes[one] for one in names),
            min(live_ranges[one].born for one in names),
            max(end for one in names for end in live_ranges[one].ends),
            tuple(sorted({send for one in names for send in live_ranges[one].sends})),
        )
        for name, names in shared.items()
    ]


def _uses(step: Step, index: int, finishes: Mapping[int, int]) -> Iterator[tuple[str, int]]:
    """Yields the values that a step reads and makes, each with the step in which this use ends."""
    end = index
    if isinstance(step, StartCollective) and not step.call.kind.boxes:
        end = finishes.get(step.call.tag, index)
    yield from ((name, end) for name in step.reads)
    yield from ((name, index) for name in step.makes)


def _leaving(step: Step) -> str | None:
    """Returns the value that a step sends, which must not change until the send is complete; None if it sends nothing."""
    if isinstance(step, Send):
        return step.value
    if isinstance(step, StartCollective) and step.call.leaves:
        return step.call.source
    return None
