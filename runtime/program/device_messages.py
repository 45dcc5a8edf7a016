"""Messages and collectives of values that stay on devices: a rank's file copies them to the host and back, and here those copies fall away.

    rank 0                                  rank 1
    %h = Copy(%h.cuda) {to: cpu}            Recv(%h)                                    in the files
    Send(%h)                                %h.cuda = Copy(%h) {to: cuda}

    Send(%h.cuda)                           Recv(%h.cuda)                               where both ranks can

A rank can send a value of a device that was copied for it, and receive one that is read by a copy to a device alone; the same holds for all
operands and results of a collective. Whether the others can, the ranks tell each other while they load (`agreed`). Steps keep their
numbers: a copy without a reader becomes a copy of its source to itself, which moves nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from partc.runtime.artifact.comm.collective_node import CollectiveCall
from partc.runtime.artifact.tensors.dtypes import dense

from ..artifact.format import ALL_GATHER, ALL_REDUCE, CACHE, CPU, REDUCE_SCATTER, SUM, Shape
from ..devices.devices import Devices
from .rank_file import RankFile
from .steps import Collective, Copy, PostRecv, Send, StartCollective, Step, Update, WaitCollective, WaitRecv
from .value_table import locations

ON_CPU = "cpu"
"""The name of a device that runs on the CPU, of which any number of ranks may have one."""
_COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
_SUMMED = ("float", "double", "int32", "int64", "uint32", "uint64")
"""Types whose sums a device computes as the host does: that sums floats of less than 32 bits in float32."""


@dataclass(frozen=True)
class DeviceEnds:
    """The messages and collectives that a rank can have on its device, which has a `name`; no name for a rank without such a device.

    `sends` and `receives` map a peer to the tags of messages, in the order in which they begin. `lacks`: what a device lacks to be one.
    """

    name: str = ""
    sends: Mapping[int, Sequence[int]] = field(default_factory=dict)
    receives: Mapping[int, Sequence[int]] = field(default_factory=dict)
    collectives: Collection[int] = ()
    lacks: str = ""

    def text(self) -> str:
        """The ends as a text for the other ranks."""
        ends = [[*self.sends.items()], [*self.receives.items()], [*self.collectives]]
        return json.dumps([self.name, *ends, self.lacks])

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Returns the ends that another rank wrote."""
        name, sends, receives, collectives, lacks = json.loads(text)
        return cls(name, dict(sends), dict(receives), frozenset(collectives), lacks)


@dataclass(frozen=True)
class _Ends:
    """The copies between a rank's targets, by the values at their ends on the host."""

    file: RankFile
    to_host: Mapping[str, int]
    """Maps each value to the step that copies it to the host from another target."""
    from_host: Mapping[str, int]
    """Maps each value with one reader, a copy to another target than the host, to that step."""

    @classmethod
    def of(cls, file: RankFile, devices: Devices, known: Collection[str]) -> Self:
        """Finds them; `known`: the values whose shapes are known."""
        targets = locations(file, devices)
        readers = Counter(name for step in file.steps for name in step.reads)
        readers.update(name for _, name in file.replaced_by_copy)
        readers.update(file.outputs)
        to_host, from_host = dict[str, int](), dict[str, int]()
        for index, step in enumerate(file.steps):
            if not isinstance(step, Copy) or step.source not in known:
                continue
            to = devices.target(step.to)
            if to == CPU and step.source in targets:
                to_host[step.result] = index
            elif to != CPU and step.source not in targets and readers[step.source] == 1:
                from_host[step.source] = index
        return cls(file, to_host, from_host)

    def source(self, name: str, end: int) -> str | None:
        """Returns the value on a device of which `name` is a copy, if it is still the same until the step `end`; else None."""
        if name not in self.to_host:
            return None
        begin, steps = self.to_host[name], self.file.steps
        step = steps[begin]
        assert isinstance(step, Copy)
        kind = next((one.kind for one in self.file.state if one.value == step.source), "")
        if kind == CACHE or (kind and any(isinstance(one, Update) for one in steps[begin:end])):
            return None
        return step.source

    def result(self, name: str) -> str | None:
        """Returns the value on a device that is the only reader of `name`; else None."""
        step = self.file.steps[self.from_host[name]] if name in self.from_host else None
        return step.result if isinstance(step, Copy) else None

    def renamed(self, step: Step, ends: Mapping[int, int]) -> dict[str, str]:
        """Maps all operands and results of a message or collective to values on a device; empty if one of them has none."""
        if isinstance(step, Send):
            names = {step.value: self.source(step.value, len(self.file.steps))}
        elif isinstance(step, PostRecv):
            names = {step.value: self.result(step.value)}
        elif isinstance(step, StartCollective):
            names = {name: self.source(name, ends.get(step.call.tag, len(self.file.steps))) for name in step.reads}
            names |= {name: self.result(name) for name in step.makes}
        else:
            names = {}
        found = {name: other for name, other in names.items() if other is not None}
        return found if len(found) == len(names) else {}


def device_ends(file: RankFile, devices: Devices, shapes: Mapping[str, Shape], promises: Collection[int]) -> DeviceEnds:
    """Returns what a rank can send and receive on its device. `promises`: the tags of values of known shape."""
    copies = _Ends.of(file, devices, shapes)
    sends, receives, collectives = dict[int, list[int]](), dict[int, list[int]](), list[int]()
    for step, tag, _ in _possible(file, copies):
        if tag not in promises:
            continue
        match step:
            case Send():
                sends.setdefault(step.peer, []).append(tag)
            case PostRecv():
                receives.setdefault(step.peer, []).append(tag)
            case _:
                collectives.append(tag)
    return DeviceEnds(sends=sends, receives=receives, collectives=collectives)


def _possible(file: RankFile, copies: _Ends) -> Iterator[tuple[Step, int, dict[str, str]]]:
    """Yields each message and collective that can be a device's, with its tag and the values on the device."""
    ends = {step.call.tag: index for index, step in enumerate(file.steps) if isinstance(step, WaitCollective)}
    readers = Counter(name for step in file.steps for name in step.reads)
    for step in file.steps:
        if isinstance(step, StartCollective):
            call = step.call
            axis = call.axis if call.kind.splits or call.kind.joins else 0
            type = dense(file.collectives[call.tag].type)
            reduced = not call.kind.reduces or (type is not None and type.name in _SUMMED and call.reduce == SUM)
            if call.op not in _COLLECTIVES or axis or not reduced or len(step.ranks) < 2:
                continue
        names = copies.renamed(step, ends)
        if isinstance(step, StartCollective) and names and not _fits(file, step.call, names, readers):
            continue
        if names:
            yield step, step.call.tag if isinstance(step, Collective) else step.tag, names  # type: ignore[union-attr]


def _fits(file: RankFile, call: CollectiveCall, names: Mapping[str, str], readers: Mapping[str, int]) -> bool:
    """Whether the values of an AllReduce of several are adjacent on the device as updates need them, and nothing else reads its operands,
    whose place the results take. `readers`: the number of readers of each value.
    """
    if not call.in_one_buffer:
        return True
    sources, results = ([names[name] for name in some] for some in (call.inputs, call.outputs))
    listed, kept = [[*row.members] for row in file.buffers], {one.value for one in file.state}
    if any(readers[name] > 1 or name in kept or any(name in row for row in listed) for name in sources):
        return False
    return all(_adjacent(row, results) for row in listed if not {*row}.isdisjoint(results))


def _adjacent(row: list[str], results: list[str]) -> bool:
    """Whether the members of a row follow each other among the results."""
    at = results.index(row[0]) if row[0] in results else len(results)
    return results[at : at + len(row)] == row


def agreed(rank: int, rows: Sequence[DeviceEnds], file: RankFile) -> frozenset[int]:
    """Returns the tags of a rank's messages and collectives that all their ranks can have on devices. `rows`: what each rank can.

    Messages of two ranks are only those that they begin in the same order, since those between devices have no tags.
    """
    of_cpu, tags = rows[rank].name == ON_CPU, set[int]()
    rows = [row if row.name and (row.name == ON_CPU) == of_cpu else DeviceEnds() for row in rows]
    own = rows[rank]
    pairs = [(own.sends.get(peer, ()), rows[peer].receives.get(rank, ())) for peer in own.sends]
    pairs += [(rows[peer].sends.get(rank, ()), own.receives.get(peer, ())) for peer in own.receives]
    for sent, received in pairs:
        both = {*sent}.intersection(received)
        if [tag for tag in sent if tag in both] == [tag for tag in received if tag in both]:
            tags |= both
    starts = [step for step in file.steps if isinstance(step, StartCollective)]
    tags.update(step.call.tag for step in starts if all(step.call.tag in rows[one].collectives for one in step.ranks))
    return frozenset(tags)


def on_devices(file: RankFile, devices: Devices, shapes: Mapping[str, Shape], tags: Collection[int]) -> RankFile:
    """Returns the file with the messages and collectives of these tags on its device."""
    copies = _Ends.of(file, devices, shapes)
    chosen = {tag: names for _, tag, names in _possible(file, copies) if tag in tags}
    target = devices.target(next(iter(locations(file, devices).values()), CPU))
    calls = dict[int, CollectiveCall]()  # a start and its wait have one call
    steps = [_moved(step, chosen, target, calls) for step in file.steps]
    readers = Counter(name for step in steps for name in step.reads)
    readers.update(file.outputs)
    readers.update(name for _, name in file.replaced_by_copy)
    received = {name: other for names in chosen.values() for name, other in names.items() if name in copies.from_host}
    for index, step in enumerate(steps):
        if not isinstance(step, Copy):
            continue
        if step.source in received:
            steps[index] = replace(step, source=step.result)
        elif step.result in copies.to_host and not readers[step.result]:
            steps[index] = replace(step, result=step.source, to=target)
    adjacent = [name for call in calls.values() if call.in_one_buffer for name in call.outputs]
    buffers = [row for row in file.buffers if {*row.members}.isdisjoint(adjacent)]  # the AllReduce's buffer has these
    return replace(file, steps=steps, buffers=buffers)


def _moved(step: Step, chosen: Mapping[int, Mapping[str, str]], target: str, calls: dict[int, CollectiveCall]) -> Step:
    """Returns a step with its values on a device, if its tag is among the chosen ones."""
    if isinstance(step, Send | PostRecv | WaitRecv) and step.tag in chosen:
        return replace(step, value=chosen[step.tag][step.value], target=target)
    if isinstance(step, StartCollective | WaitCollective) and (names := chosen.get(step.call.tag)):
        call = calls.setdefault(step.call.tag, step.call.renamed(names, step.call.tag, step.call.path))
        return replace(step, call=call, target=target)
    return step
