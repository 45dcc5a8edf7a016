"""Sets of a program's nodes on stages, and what each set takes: a rank runs it behind all before and before all behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from partc.cli.simulation.known_program import Layers, Mask, Program, Seconds, bits_of, rising


class Placed:
    """The nodes of a program on so many stages, by what a plan places there; `stages`: those that may have a path, of most paths one."""

    def __init__(self, program: Program, count: int, stages: Callable[[str], range]) -> None:
        self.program, self.count, self.trains = program, count, bool(program.updated)
        of_path = {path: stages(path) if count > 1 else range(1) for path in {*program.paths}}
        self.stage = np.array(
            [some[0] if len(some := of_path[path]) == 1 else -1 for path in program.paths], dtype=np.intp
        )
        self._bits = [bits_of(program.repeated & (self.stage == one)) for one in range(count)]
        self.own = [program.mask(bits) for bits in self._bits]
        """By stage its nodes."""
        makers = [program.maker[name] for name in sorted(program.updated) if name in program.maker]
        self.gradients = [[at for at in makers if self.stage[at] == one] for one in range(count)]
        """By stage the nodes that make gradients of parameters there."""
        self.forward = [program.mask(bits & program.forward) for bits in self._bits]
        """By stage those of the task forward."""
        self.back, self.early = list[Mask](), list[Mask]()
        """By stage those of the task back behind a later stage, and those of them before an earlier one; of the first all."""
        self.late = list[Mask]()
        """By stage those of the task back before no earlier one; of the first none."""
        self.way = list[Mask]()
        """What is between values that follow each other on the way: of stages forward, of the last, and of stages back."""
        self.first = list[Mask]()
        """By stage those on which all gradients of its parameters depend."""
        self.crossing = list[tuple[Sequence[str], Sequence[str]]]()
        """By stage but the last one the values of which the next one reads, and those of the next one that it reads itself."""
        self.waits = list[Mask]()
        """By stage what depends on what a later stage sends back; of the last on what the stage before it sends."""
        self.is_chain = self._follow()

    def _follow(self) -> bool:
        """Follows values from stage to stage; whether there is a way."""
        program, last, own = self.program, self.count - 1, self._bits
        every, forward = (1 << len(program.nodes)) - 1, program.forward
        back = every & ~forward
        for stage, bits in enumerate(own):
            later = forward & sum(own[stage + 1 :])
            if any(program.before[at] & later for at in rising(bits & forward)):
                return False
        turns = [(stage, stage + 1, forward) for stage in range(last)]
        turns += [(stage, stage - 1, back) for stage in range(last, 0, -1)] if self.trains else []
        behind, waits = every, dict[int, int]()
        for stage, following, side in turns:
            if stage == last:
                waits[last] = behind
            some, wanted = own[stage] & side & behind, own[following] & side
            end = next((at for at in reversed(rising(some)) if program.behind[at] & wanted), None)
            if end is None:
                return False
            self.way.append(program.mask(own[stage] & behind & (program.before[end] | 1 << end)))
            behind = program.behind[end]
            if side == back:
                waits[following] = behind
        waits.setdefault(last, behind)
        self.way.append(program.mask(own[0 if self.trains else last] & behind))
        self.waits = [program.mask(waits.get(stage, 0)) for stage in range(self.count)]
        for stage in range(last):
            pairs = (stage, stage + 1, forward), (stage + 1, stage, back)
            sent, returned = (self._crossing(own[a] & side, own[b] & side) for a, b, side in pairs)
            self.crossing.append((sent, returned))
        for stage, makers in enumerate(self.gradients):
            common = own[stage] if makers else 0
            for at in makers:
                common &= program.before[at] | 1 << at
            self.first.append(program.mask(common))
        for stage in range(self.count):
            bits = own[stage] & back & waits.get(stage, 0)
            earlier = own[stage - 1] & back if stage else 0
            early = sum(1 << at for at in rising(bits) if program.behind[at] & earlier) if stage else bits
            late = sum(1 << at for at in rising(own[stage] & back) if not program.behind[at] & earlier) if stage else 0
            for found, nodes in ((self.back, bits), (self.early, early), (self.late, late)):
                found.append(program.mask(nodes))
        return True

    def _crossing(self, makers: int, readers: int) -> list[str]:
        """The values that some nodes make and others read."""
        read = {name for at in rising(readers) for name in self.program.reads[at]}
        return [name for at in rising(makers) for name in self.program.makes[at] if name in read]

    @cached_property
    def of_weights(self) -> Mask:
        """The nodes on which only nodes of the same stage depend."""
        found = np.zeros(len(self.program.nodes), dtype=bool)
        for bits in self._bits:
            for at in rising(bits):
                found[at] = not self.program.behind[at] & ~bits
        return found


class Shared:
    """The sums of layers on stages: of those whose maker and readers are on one stage, and that no message may take along."""

    def __init__(self, placed: Placed, layers: Layers) -> None:
        program = placed.program
        readers = [
            [at for name in program.makes[one.node] for at in program.readers.get(name, ())] for one in layers.sums
        ]
        some = [
            (one, read)
            for one, read in zip(layers.sums, readers, strict=True)
            if read
            and {int(placed.stage[at]) for at in (one.node, *read)} in [{stage} for stage in range(placed.count)]
        ]
        self.sums = [one for one, _ in some]
        self.nodes = np.array([one.node for one in self.sums], dtype=np.intp)
        self.free = np.zeros((len(some), len(program.nodes)), dtype=bool)
        """By sum the nodes that a rank may run meanwhile."""
        self.read = np.zeros_like(self.free)
        """By sum its readers."""
        for k, (one, read) in enumerate(some):
            bits = program.before[one.node] | 1 << one.node
            for at in read:
                bits |= program.behind[at] | 1 << at
                self.read[k, at] = True
            stage = placed.stage[one.node]
            if program.forward >> one.node & 1:
                bits |= program.backward
            self.free[k] = ~program.mask(bits) & ((placed.stage == stage) | (placed.stage == -1))
        self._program = program
        self._inside: dict[bytes, tuple[NDArray[np.intp], int]] = {}

    def inside(self, nodes: Mask) -> tuple[NDArray[np.intp], int]:
        """The sums between these nodes, and how many of them follow each other."""
        key = nodes.tobytes()
        if key not in self._inside:
            some = np.flatnonzero(nodes[self.nodes] & (self.read & nodes).any(axis=1))
            lengths = dict[int, int]()
            for at in (int(self.nodes[k]) for k in some):
                before = self._program.before[at]
                lengths[at] = 1 + max((many for one, many in lengths.items() if before >> one & 1), default=0)
            self._inside[key] = some, max(lengths.values(), default=0)
        return self._inside[key]

    def seconds(self, parts: int, of: Callable[[float], float]) -> Seconds:
        """By sum its seconds for one of so many parts of the batch; `of`: those of so many bytes."""
        known = {one.bytes: of(one.bytes(parts)) for one in self.sums}
        return np.array([known[one.bytes] for one in self.sums])


class Sets:
    """Sets of nodes, each of which a rank runs behind all before and before all behind it: what they take, set by set.

    `filling`: the nodes that a rank may run while it waits for a sum, if not any.
    """

    def __init__(
        self, placed: Placed, shared: Shared | None, sets: Sequence[Mask], filling: Mask | None = None
    ) -> None:
        self.program, self.count = placed.program, len(sets)
        self.nodes = _pairs(sets)
        self.transposes = _pairs([self.program.in_task(nodes) for nodes in sets])
        self.is_empty = np.array([not nodes.any() for nodes in sets], dtype=bool)
        inside = [shared.inside(nodes) for nodes in sets] if shared is not None else []
        self.many = np.array([many for _, many in inside] or [0] * self.count)
        self.sums = np.concatenate([some for some, _ in inside] or [np.zeros(0, dtype=np.intp)])
        self.set_of = np.repeat(np.arange(self.count), [len(some) for some, _ in inside] or [0] * self.count)
        every = np.zeros((0, len(self.program.nodes)), dtype=bool) if shared is None else shared.free[self.sums]
        self.free = every if filling is None else every & filling
        self.columns = np.flatnonzero(self.free.any(axis=0))
        self.free = self.free[:, self.columns].astype(float)
        self.filling = np.array([self.free[self.set_of == one].any(axis=0) for one in range(self.count)], dtype=float)

    def took(self, priced: Priced, added: float = 0.0) -> Seconds:
        """By set its seconds at least; `added`: the seconds of what a rank may run beside them, too."""
        seconds = _by_set(self.nodes, priced.least, self.count)
        most = priced.most[self.columns]
        if priced.adding is not None:
            seconds += _by_set(self.nodes, priced.adding, self.count)
            seconds += _by_set(self.transposes, priced.least, self.count)
            most = np.where(self.program.repeated[self.columns], most, 0.0)
        if len(self.sums):
            under_way = priced.overlap * priced.sums[self.sums]

            def by_set(amounts: Seconds) -> Seconds:
                return np.bincount(self.set_of, weights=amounts, minlength=self.count).astype(np.float64)

            each = by_set(np.maximum(0.0, under_way - self.free @ most - added))
            together = by_set(under_way) - self.filling @ most - added
            # what runs meanwhile is a session of its own
            chained = self.many / np.maximum(1, np.bincount(self.set_of, minlength=self.count))
            apart = by_set(np.minimum(under_way, priced.session)) * chained
            seconds += np.maximum(np.maximum(each, together), apart)
            seconds += by_set((1 - priced.overlap) * priced.sums[self.sums])
        return np.where(self.is_empty, 0.0, seconds + (1 + self.many) * priced.session)


@dataclass(frozen=True)
class Priced:
    """Nodes at sizes: by node its seconds at least and at most; by sum its seconds, of which a share, `overlap`, go on by themselves."""

    least: Seconds
    most: Seconds
    sums: Seconds
    overlap: float
    session: float
    adding: Seconds | None
    """By node what each of several microbatches adds."""


def _pairs(sets: Sequence[Mask]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The nodes of all sets, and the set of each."""
    found = [np.flatnonzero(nodes) for nodes in sets]
    return np.concatenate(found), np.repeat(np.arange(len(sets)), [len(some) for some in found])


def _by_set(pairs: tuple[NDArray[np.intp], NDArray[np.intp]], seconds: Seconds, count: int) -> Seconds:
    nodes, set_of = pairs
    return np.bincount(set_of, weights=seconds[nodes], minlength=count).astype(np.float64)
