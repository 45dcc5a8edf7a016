"""Estimates a candidate without compiling it: the work of its nodes, its collectives and messages, and the memory of a rank.

    step        the tasks of all microbatches by their schedule + gradients + update; if ranks share cores, at least the work of all ranks
                on these cores: a rank that waits leaves its core to others
    task        F, B and W of one microbatch in one stage: nodes in their shards, AllReduces of a sharded layer forward and backward; each
                ends a session, and one of the backward pass also ends a second one that runs meanwhile
    schedule    as `schedule.simulate` plays it; beyond twice as many microbatches as groups each further one adds as much as the last
    gradients   AllReduces over dp of a rank's gradients; with ZeRO ReduceScatters, and AllGathers of parameters: with several microbatches
                after all tasks, else the part of the former that does not overlap the backward pass
    stored      parameters in shards: AllGathers of units in the tasks, twice but for tables and the unit that the backward pass reads
                first, and ReduceScatters of units, while the tasks compute
    update      of all parameters of a rank; with ZeRO or stored ones of its shards, and of parameters that are not divided

The estimates rank candidates: the best ones are compiled, and their schedules are simulated.

The collectives for a model's gradients follow from the buckets that the compiler would fill:

    AllReduce       parameters of which each rank updates all, until they fill a bucket
    ReduceScatter   with a sharded optimizer, parameters whose dim 0 is divided, together; one that is divided along another dim, alone
    AllGather       the updated shards of these

Parameters are reduced in the order in which a backward pass reaches them, the last first.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import onnx_ir as ir
from partc.compiler.cost.machine import FALLBACK, Link, Machine, Processor
from partc.compiler.cost.memory import session_bytes
from partc.compiler.cost.price import function_seconds
from partc.compiler.cost.sizes import Operand
from partc.compiler.ir.graph import name_of
from partc.compiler.plan.precision import GradientMessages, MessageRules
from partc.compiler.plan.stored import EVERY, StoredRule
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.flow import stored_bytes
from partc.compiler.proposal.linked import Place
from partc.compiler.schedule.costs import Costs, StageCost
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import Precedence, precedence, simulate
from partc.compiler.schedule.stages import chain
from partc.compiler.schedulers.choose import NAMED
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.work import ModelWork, Work
from partc.compiler.sharding.values.operands import divided_dim
from partc.compiler.tasks.buckets import Filling
from partc.compiler.training.optimizer_functions import FAMILIES, function, variant
from partc.compiler.training.trainable import trainable_names
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, CPU, REDUCE_SCATTER
from partc.runtime.artifact.stored_readers import FORMS
from partc.runtime.updates.updater import SHARD

_Kind: TypeAlias = tuple[int | None, tuple[int, ...], float]
"""The sharded dim of a parameter, its shape and the bytes of an element."""
Parameter: TypeAlias = tuple[ir.Value, tuple[int, ...], float]
"""A parameter, its shape and the bytes of an element."""
Calls = Counter[tuple[str, float]]
"""Counts collectives by op and by the bytes that a rank contributes."""


class Reductions:
    """The collectives for the gradients of a model's trainable weights; `limit`: the bytes that fill a bucket."""

    def __init__(self, model: ir.Model, limit: int) -> None:
        self.limit = limit
        read = (value for node in model.graph for value in node.inputs if value is not None and value.is_initializer())
        names = frozenset(trainable_names(model))
        tensors = {value: value.const_value for value in read if value.const_value is not None}
        self.parameters = [
            (value, tuple(tensor.shape.numpy()), float(tensor.dtype.itemsize))
            for value, tensor in reversed(tensors.items())
            if value.name in names
        ]
        self._calls: dict[Hashable, Calls] = {}

    @cached_property
    def mean(self) -> float:
        """The mean bytes of a bucket."""
        calls = self.calls((), 1, 1, False)
        return max(1.0, sum(bytes * many for (_, bytes), many in calls.items()) / max(1, calls.total()))

    @cached_property
    def units(self) -> StoredUnits:
        """The units of these parameters if ranks store them in shards."""
        return StoredUnits(self.parameters)

    def calls(self, places: Sequence[tuple[ir.Value, int]], tp: int, dp: int, zero: bool) -> Calls:
        """Returns the collectives of a step, with the dims at these places sharded over `tp`, and the optimizer over `dp` if `zero`."""
        cut, over = tuple(places) if tp > 1 else (), dp if zero else 1
        if (key := (cut, tp, over)) not in self._calls:
            at = dict(cut)
            self._calls[key] = self._counted(
                [(at.get(value), shape, item) for value, shape, item in self.parameters], tp, over
            )
        return self._calls[key]

    def _counted(self, kinds: Sequence[_Kind], tp: int, over: int) -> Calls:
        calls, filling = Calls(), Filling[str](self.limit)

        def fill(op: str, bytes: float) -> None:
            if (full := filling.add(op, bytes)) is not None:
                calls[op, full] += 1

        for at, shape, item in kinds:
            dim, bytes = _divided(at, shape, item, tp, over)
            if dim is None:
                fill(ALL_REDUCE, bytes)
            elif dim == 0:
                fill(REDUCE_SCATTER, bytes)
                fill(ALL_GATHER, bytes / over)
            else:
                calls[REDUCE_SCATTER, bytes] += 1
                calls[ALL_GATHER, bytes / over] += 1
        calls.update(filling.open.items())
        return calls


_SCRATCH = 1.25
"""The memory that a gather of several parameters has while it is under way, in units."""


class StoredUnits:
    """The messages and the bytes of parameters that ranks store in shards, all of a model's, in the units of the pattern for all.

    `parameters`: those of `Reductions`, in the order of a backward pass.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        rule = StoredRule(EVERY, True, None, "")
        self.units: dict[str, list[Parameter]] = {}
        for one in parameters:
            self.units.setdefault(rule.unit_of(name_of(one[0])), []).append(one)

    def calls(self, places: Sequence[Place], tp: int, dp: int, by_microbatch: bool) -> Calls:
        """Returns the collectives of a step, or of a microbatch.

        The parameters of a unit that the backward pass reads are gathered again, but not if all is one microbatch and the backward pass
        begins with the unit.
        """
        counts, at = Calls(), dict(places) if tp > 1 else {}
        for k, members in enumerate(self.units.values()):
            whole, again = dict[object, float](), dict[object, float]()
            for value, shape, item in members:
                dim, bytes = _divided(at.get(value), shape, item, tp, dp)
                kind: object = dim if dim in (0, None) else value
                whole[kind] = whole.get(kind, 0.0) + bytes
                if dim is not None and (k > 0 or by_microbatch) and _is_read_again(value):
                    again[kind] = again.get(kind, 0.0) + bytes
            for kind, bytes in whole.items():
                counts[ALL_REDUCE if kind is None else REDUCE_SCATTER, bytes] += 1
            gathered = [bytes for kind, bytes in whole.items() if kind is not None]
            counts.update((ALL_GATHER, bytes / dp) for bytes in (*gathered, *again.values()))
        return counts

    def bytes(self, places: Sequence[Place], tp: int, dp: int) -> tuple[float, float]:
        """Returns the bytes of parameters that no rank can have a shard of, and the most bytes of units at once: two units as gathered, the
        gradients of two, and the scratch of one.
        """
        whole, sizes, at = 0.0, [0.0], dict(places) if tp > 1 else {}
        for members in self.units.values():
            parts = [_divided(at.get(value), shape, item, tp, dp) for value, shape, item in members]
            sizes.append(sum(bytes for dim, bytes in parts if dim is not None))
            whole += sum(bytes for dim, bytes in parts if dim is None)
        return whole, 2 * max(map(sum, itertools.pairwise(sizes)), default=0.0) + _SCRATCH * max(sizes)


def _is_read_again(value: ir.Value) -> bool:
    """Whether a backward pass reads a parameter: a product with what depends on other parameters does, a table and a term do not."""

    def needs(node: ir.Node) -> bool:
        if node.op_type in FORMS:
            return any(needs(use.node) for use in node.outputs[0].uses())
        others = (one for one in node.inputs if one is not None and one is not value)
        return node.op_type not in ("Add", "Gather") and any(one.producer() is not None for one in others)

    return any(needs(use.node) for use in value.uses())


def _divided(at: int | None, shape: tuple[int, ...], item: float, tp: int, over: int) -> tuple[int | None, float]:
    """Returns the dim of a parameter that `over` ranks divide, or None, and its bytes on a rank of `tp`, which divide dim `at`."""
    dim = divided_dim(shape, [tp if dim == at else 1 for dim in range(len(shape))], over)
    return dim, item * math.prod(shape) / (1 if at is None else tp)


_FORWARD_ACTIVATIONS = 0.1
"""The share of all activations that a forward pass alone has in memory at one time."""
_USUAL, _ITEM = "Adam", 4
"""The function that stands for an update with several functions, and the bytes of an element."""


_PACKED = 12
"""The bytes of gradients that are read and written to send them in eight bits, in units of their bytes."""
_BESIDE_SUMS = 0.4
"""The approximate share of reductions that overlaps a backward pass whose ranks wait for sums of layers: reductions queue after these."""
_NUMBER = 8
"""The bytes of a number of rows, which ranks tell each other before a Route."""
_SPLIT = ("zb_h1", "zbv")
"""Schedules whose gradients of weights fill idle time."""


@dataclass(frozen=True)
class Estimate:
    """The seconds of a step, and the bytes of the rank that has most."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Sharding:
    """The nodes and weights of a model that are sharded over `tp`, and the bytes of each AllReduce, forward and backward."""

    nodes: frozenset[ir.Node] = frozenset()
    weights: float = 0.0
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, work: ModelWork, places: tuple[Place, ...]) -> Sharding:
        """Returns the sharding of the dims at these places: a node that reads such a dim and makes none sums over it."""
        cut = {value for value, _ in places}
        nodes, forward, backward = set(), [], dict[ir.Value, float]()
        for node, own in work.around(cut):
            reads = [value for value in node.inputs if value in cut]
            makes = any(value in cut for value in node.outputs)
            nodes.add(node)
            if reads and not makes:
                forward.append(work.bytes(node.outputs[0]))
            if makes and own.cost.is_product:
                given = [value for value in node.inputs if value is not None and value not in cut]
                backward.update((value, work.bytes(value)) for value in given if not value.is_initializer())
        weights = sum(stored_bytes(value) for value in cut if value.is_initializer())
        return cls(frozenset(nodes), float(weights), tuple(forward), tuple(backward.values()), places)


@dataclass(frozen=True)
class StageWork:
    """A stage's share of a model's work, and the bytes that it receives."""

    work: float = 1.0
    arriving: float = 0.0


class Estimates:
    """Estimates of a model's candidates on a machine whose ranks are on `hosts`; `optimizer` is None without training."""

    def __init__(
        self,
        work: ModelWork,
        machine: Machine,
        hosts: int = 1,
        optimizer: Optimizer | None = None,
        bucket: int = 0,
        messages: MessageRules | None = None,
    ) -> None:
        self.work, self.machine, self.optimizer = work, machine, optimizer
        self.messages = messages
        self.reductions = Reductions(work.program.model, bucket)
        self.hosts = hosts
        self._processors: dict[int, Processor] = {}
        graph = work.program.model.graph
        self.weights = float(sum(map(stored_bytes, graph.initializers.values())))
        self.backward = 1.0
        """The measured time of a backward pass, relative to its estimate."""
        self._updates: dict[object, float] = {}
        self._tasks: dict[object, tuple[float, float, float]] = {}
        self._all_sums: dict[object, float] = {}
        self._all_reduced: dict[object, tuple[float, float]] = {}
        self._schedules: dict[object, float] = {}
        self._orders: dict[object, tuple[Schedule, Precedence]] = {}
        self._counted: dict[frozenset[ir.Node], Counter[tuple[Work, bool]]] = {}

    @property
    def slots(self) -> int | None:
        """The tensors that the optimizer keeps of a parameter; None without training."""
        return None if self.optimizer is None else len(self.optimizer.slots)

    @property
    def gradients(self) -> GradientMessages | None:
        """The form of gradients in eight bits; None in float32."""
        return None if self.messages is None else self.messages.gradients

    def of(self, one: Candidate, sharding: Sharding, parts: Sequence[StageWork] = (StageWork(),)) -> Estimate:
        """Returns the estimate of a candidate with this sharding over `tp`; `parts`: the share of each stage."""
        return Estimate(self.seconds(one, sharding, parts), self.bytes(one, sharding))

    def seconds(self, candidate: Candidate, sharding: Sharding, parts: Sequence[StageWork] = (StageWork(),)) -> float:
        degrees, count, groups = candidate.degrees, candidate.microbatches, candidate.degrees.stages
        forward, backward, weights = self.task(sharding, degrees.shards * count, degrees.tp, degrees.ranks)
        backward *= self.backward if self.slots is not None else 0.0
        again = forward if self.slots is not None and candidate.recompute else 0.0
        shared = self.turns(degrees.ranks)
        processor = self.processor(degrees.ranks)
        sums = self._sums(sharding, candidate) + self.routed(candidate) + self.attended(candidate)
        sessions = (3 if candidate.schedule in _SPLIT else 2) * candidate.stages_each
        apart = self._apart(sharding, candidate) / groups * processor.session
        work = (forward + again + backward) / groups + sessions * processor.session + apart
        weights = min(backward, weights) if candidate.schedule in _SPLIT else 0.0
        waits = (apart + sums / groups) / candidate.stages_each / (2 if self.slots is not None else 1)
        costs = [
            StageCost(
                part.work * forward + processor.session + waits,
                part.work * (again + backward - weights) + processor.session + waits,
                part.work * weights + processor.session if candidate.schedule in _SPLIT else 0.0,
            )
            for part in parts
        ]
        least = count * (shared * work + sums / groups)
        agreed = self.machine.links[0].collective(ALL_REDUCE, degrees.ranks, 0)
        step = processor.step + agreed + max(self._scheduled(candidate, costs, parts), least)
        update = self._updated(candidate, sharding)
        overlap = self.link(degrees.tp, degrees.shards).overlap
        if candidate.stored:
            sent, first = self._stored(candidate, sharding)
            computing = count * shared * (forward + again + backward) / groups
            return step + update + sent - min(overlap * (sent - first), computing)
        reduced, gathered = self._reduced(candidate, sharding)
        if count > 1:  # behind the last task: shards are updated while others are reduced or gathered
            return step + reduced + gathered + update - min(overlap * (reduced + gathered), update)
        # what is reduced first is updated, and gathered, meanwhile
        hidden = min(overlap * reduced * (_BESIDE_SUMS if degrees.tp > 1 else 1.0), shared * backward / groups + update)
        return step + update + reduced - hidden + gathered - min(overlap * gathered, update)

    def _scheduled(self, candidate: Candidate, costs: Sequence[StageCost], parts: Sequence[StageWork]) -> float:
        """Returns the seconds of the tasks of all microbatches."""
        degrees, count, most = candidate.degrees, candidate.microbatches, 2 * candidate.degrees.stages
        if candidate.stages == 1:
            return count * (costs[0].forward + (costs[0].full_backward if self.slots is not None else 0.0))
        link = self.link(degrees.tp * degrees.shards, 2)
        sends = [link.send(part.arriving / degrees.shards / count) + link.wake for part in parts]
        if (key := (candidate.schedule, candidate.stage_groups, count, *sends, *costs)) not in self._schedules:
            totals = [self._total(candidate, min(count, some), costs, sends) for some in (degrees.stages, most)]
            more = max(0, count - most) / degrees.stages * (totals[1] - totals[0])
            self._schedules[key] = totals[1] + more
        return self._schedules[key]

    def _total(self, one: Candidate, count: int, costs: Sequence[StageCost], sends: Sequence[float]) -> float:
        """Returns the simulated seconds of the tasks of `count` microbatches."""
        if (key := (one.schedule, one.stage_groups, count)) not in self._orders:
            stages = chain(one.stage_groups, self.slots is not None)
            schedule = NAMED[one.schedule or "gpipe"].make(stages, count)
            self._orders[key] = schedule, precedence(schedule)
        schedule, known = self._orders[key]
        messages = {(stage - 1, stage): seconds for stage, seconds in enumerate(sends)}
        return simulate(schedule, Costs(tuple(costs), messages=messages), known).total

    def _updated(self, candidate: Candidate, sharding: Sharding) -> float:
        """Returns the seconds of a stage's update; if shards are updated, also of all parameters not divided by dp."""
        degrees, own = candidate.degrees, self._own(sharding, candidate)
        if candidate.shards_update and degrees.dp > 1:
            whole = self.reductions.calls(sharding.places, degrees.tp, degrees.dp, True)
            rest = sum(bytes * many for (op, bytes), many in whole.items() if op == ALL_REDUCE)
            own += rest * (degrees.dp - 1) / degrees.stages
        return self._update(candidate, own)

    def _reduced(self, candidate: Candidate, sharding: Sharding) -> tuple[float, float]:
        """Returns the seconds in which a stage's gradients are reduced, and in which the updated shards are gathered."""
        degrees = candidate.degrees
        if self.slots is None or degrees.shards == 1:
            return 0.0, 0.0
        key = candidate.zero, sharding.nodes, degrees.tp, degrees.dp, degrees.cp
        if key not in self._all_reduced:
            calls = self.reductions.calls(sharding.places, degrees.tp, degrees.dp, candidate.zero)
            gathers = Calls({call: many for call, many in calls.items() if call[0] == ALL_GATHER})
            each = self.processor(degrees.ranks).session  # a collective that begins ends the session of what it is of
            before = calls - gathers
            taken = self._taken(before, degrees) + each * sum(before.values()), self._taken(gathers, degrees)
            self._all_reduced[key] = taken
        own = 1 - self._not_reduced(sharding, degrees)
        reduced, gathered = (own * seconds for seconds in self._all_reduced[key])
        return reduced / degrees.stages, gathered / degrees.stages

    def _not_reduced(self, sharding: Sharding, degrees: Degrees) -> float:
        """Returns the share of the gradients' bytes that is not sent, since each expert's gradient is complete on the ranks that have it.

        Of an expert dp / ep ranks have copies, whose gradients are reduced.
        """
        if degrees.ep == 1:
            return 0.0
        experts, copies = self._expert_weights(degrees), degrees.dp // degrees.ep
        whole = self.weights - sharding.weights + sharding.weights / degrees.tp
        sent = (copies - 1) / copies / degrees.ep / ((degrees.dp - 1) / degrees.dp)
        return experts / max(1.0, whole) * (1 - sent)

    def _taken(self, calls: Calls, degrees: Degrees) -> float:
        """Returns the seconds of collectives over the ranks of dp, and of cp, with the packing before and the unpacking after them."""
        copy = self.processor(degrees.ranks).kernel(FALLBACK).streamed
        copied = {REDUCE_SCATTER: 1 + 1 / degrees.dp, ALL_GATHER: 1 + degrees.dp, ALL_REDUCE: 0.0}
        link, total = self.link(degrees.tp, degrees.shards), 0.0
        for (op, bytes), many in calls.items():
            if self.gradients is not None and op != ALL_GATHER:
                total += many * (copy(_PACKED * bytes) + self._summed(op, bytes, degrees.shards, link))
            else:
                total += many * (copy(2 * bytes * copied[op]) + link.collective(op, degrees.shards, bytes))
        return total

    def _summed(self, op: str, bytes: float, ranks: int, link: Link) -> float:
        """Returns the seconds in which partial gradients become sums (`op`), in the form in which they are sent."""
        if (packing := self.gradients) is None:
            return link.collective(op, ranks, bytes)
        parts = bytes / _ITEM, bytes / packing.block
        ops = [(ALL_TO_ALL, part) for part in parts]
        ops += [(ALL_GATHER, part / ranks) for part in parts if op == ALL_REDUCE]
        return sum(link.collective(sent, ranks, part) for sent, part in ops)

    def _stored(self, candidate: Candidate, sharding: Sharding) -> tuple[float, float]:
        """Returns the seconds of a step's gathers of a stage's units and of the reductions of their gradients, and of these the seconds of
        the first gather of each task, before which no op of the task can run.
        """
        degrees, several = candidate.degrees, candidate.microbatches > 1
        if (key := ("stored", sharding.nodes, degrees.tp, degrees.dp, degrees.cp, several)) not in self._all_reduced:
            calls = self.reductions.units.calls(sharding.places, degrees.tp, degrees.dp, several)
            taken = self._taken(calls, degrees) + self.processor(degrees.ranks).session * sum(calls.values())
            self._all_reduced[key] = taken, taken / max(1, sum(calls.values()))
        taken, mean = self._all_reduced[key]
        sent, tasks = candidate.microbatches * taken / degrees.stages, 2 * candidate.microbatches if several else 1
        return sent, min(sent, tasks * mean)

    def calibrate(self, seconds: float) -> None:
        """Sets `backward` from the measured seconds of an unsharded model's step on one rank: the backward pass gets the error."""
        forward, backward, _ = self.task(Sharding(), 1, 1, 1)
        if self.slots is not None and backward > 0:
            processor = self.processor(1)
            beside = processor.step + processor.session + self._updated(Candidate(Degrees()), Sharding())
            self.backward = max(0.0, (seconds - beside - forward) / backward)

    def processor(self, ranks: int) -> Processor:
        """Returns the speeds of a rank, with `ranks` ranks on the machine."""
        busy = self.machine.busy(ranks, self.hosts)
        if busy not in self._processors:
            self._processors[busy] = self.machine.among(busy).processor(CPU)
        return self._processors[busy]

    def task(self, sharding: Sharding, records: int, shards: int, ranks: int) -> tuple[float, float, float]:
        """Returns the seconds of all nodes forward, backward, and the part of the latter for gradients of weights, which zb_h1 uses to fill
        waits.

        They are those of one of `shards` shards of the records, and of sharded layers.
        """
        processor = self.processor(ranks)
        key = sharding.nodes, records, shards, id(processor)
        if key not in self._tasks:
            forward = backward = weights = 0.0
            for (work, is_sharded), many in self.counted(sharding).items():
                own = shards if is_sharded else 1
                seconds = many * work.seconds(processor, records, own)
                forward += seconds
                backward += many * work.backward(processor, records, own)
                weights += seconds if work.cost.is_product and work.weights else 0.0
            self._tasks[key] = forward, backward, weights
        return self._tasks[key]

    def bytes(self, candidate: Candidate, sharding: Sharding) -> float:
        """Returns the bytes of parameters with gradients and slots, and of the values saved for microbatches in progress."""
        degrees = candidate.degrees
        own = self._own(sharding, candidate)
        ahead = degrees.stages - 1  # a loop has a group's later stages to run before its first backward pass
        more = 0.0 if candidate.schedule == "zbv" else ahead * (1 - 1 / candidate.stages_each)
        under_way = min(candidate.microbatches, degrees.stages + more)
        part = degrees.shards * candidate.microbatches * degrees.stages
        made_bytes = self._made(sharding, degrees.tp)
        nodes = len(self.work.of) / degrees.stages
        if self.slots is None:
            return own + made_bytes * _FORWARD_ACTIVATIONS / part + session_bytes(nodes, nodes * candidate.microbatches)
        nodes *= 4 if candidate.recompute else 3
        slots = self.slots / (degrees.dp if candidate.zero else 1)
        held = own * (2 + slots)
        if candidate.stored:
            whole, most = self.reductions.units.bytes(sharding.places, degrees.tp, degrees.dp)
            held = (whole + (own * degrees.stages - whole) / degrees.dp) / degrees.stages * (2 + self.slots) + most
        if self.gradients is not None and self.gradients.keep_rest and degrees.shards > 1:
            held += own * (2 if candidate.stored and candidate.microbatches > 1 else 1)  # whole gradients are added up
        kept = made_bytes * (_FORWARD_ACTIVATIONS * 2 if candidate.recompute else 1.0)
        sessions = session_bytes(nodes, nodes * candidate.microbatches)
        return held + kept * under_way / part + sessions

    def _own(self, sharding: Sharding, one: Candidate) -> float:
        """Returns the bytes of a rank's parameters."""
        degrees = one.degrees
        others = self._expert_weights(degrees) * (1 - 1 / degrees.ep)
        return (self.weights - sharding.weights + sharding.weights / degrees.tp - others) / degrees.stages

    def _expert_weights(self, degrees: Degrees) -> float:
        """Returns the bytes of all experts' matrices, of a shard of each if `tp` shards layers."""
        return sum(one.weights for one in self.work.experts) / degrees.tp

    def routed(self, candidate: Candidate) -> float:
        """Returns the seconds in which one microbatch's rows go to the ranks of their experts and come back, forward and backward.

        Each layer's ranks first tell each other their numbers of rows, once for both passes.
        """
        degrees, records = candidate.degrees, candidate.degrees.shards * candidate.microbatches
        if degrees.ep == 1:
            return 0.0
        link, passes = self.link(degrees.tp * degrees.cp, degrees.ep), 1 if self.slots is None else 2

        def sent(*parts: float) -> float:
            return sum(link.collective(ALL_TO_ALL, degrees.ep, part) + link.wake for part in parts)

        packing = None if self.messages is None else self.messages.rows

        def row(bytes: float) -> float:
            return sent(bytes) if packing is None else sent(bytes / _ITEM, bytes / packing.block)

        rows = (row(layer.entering / records) + row(layer.leaving / records) for layer in self.work.experts)
        counts = (sent(_NUMBER * layer.count) for layer in self.work.experts)
        return passes * sum(rows) + sum(counts)

    def attended(self, candidate: Candidate) -> float:
        """Returns the seconds in which one microbatch's keys and values go to the ranks of their sequence, forward and backward."""
        degrees = candidate.degrees
        if degrees.cp == 1:
            return 0.0
        link, parts = self.link(degrees.tp, degrees.cp), degrees.dp * degrees.tp * candidate.microbatches
        copy = self.processor(degrees.ranks).kernel(FALLBACK).streamed

        def sent(bytes: float) -> float:
            """The seconds of all tokens, which are packed or unpacked, since they are not the first dim."""
            ops = ((ALL_GATHER, bytes / degrees.cp), (REDUCE_SCATTER, bytes))[: 1 if self.slots is None else 2]
            return sum(link.collective(op, degrees.cp, own) + link.wake + copy(2 * bytes) for op, own in ops)

        return sum(sent(bytes / parts) for bytes in self.work.keys_and_values)

    def counted(self, sharding: Sharding) -> Counter[tuple[Work, bool]]:
        """Counts nodes by their work, and by whether they are sharded."""
        if sharding.nodes not in self._counted:
            self._counted[sharding.nodes] = self.work.counted(sharding.nodes)
        return self._counted[sharding.nodes]

    def _made(self, sharding: Sharding, shards: int) -> float:
        some = self.counted(sharding).items()
        return sum(many * one.output_elements / (shards if cut else 1) for (one, cut), many in some)

    def turns(self, ranks: int) -> float:
        """The factor by which a rank is slower because it shares its host's cores."""
        cores = self.machine.cores * self.hosts
        return max(1.0, ranks / cores) if cores else 1.0

    def link(self, stride: int, count: int) -> Link:
        """Returns the link between `count` ranks that are `stride` apart."""
        return self.machine.link([stride * k for k in range(max(2, count))])

    def _sums(self, sharding: Sharding, candidate: Candidate) -> float:
        """Returns the seconds of the AllReduces over `tp` of all layers for one microbatch."""
        degrees = candidate.degrees
        if degrees.tp == 1:
            return 0.0
        link, records = self.link(1, degrees.tp), degrees.shards * candidate.microbatches
        given = [*sharding.forward]
        if self.slots is not None:
            given += [*sharding.backward, *(sharding.forward if candidate.recompute else ())]
        key = sharding.nodes, degrees.tp, records, candidate.recompute
        if key not in self._all_sums:
            sizes = Counter(given)
            some = (
                many * (link.collective(ALL_REDUCE, degrees.tp, size / records) + link.wake)
                for size, many in sizes.items()
            )
            self._all_sums[key] = sum(some)
        return self._all_sums[key]

    def _apart(self, sharding: Sharding, candidate: Candidate) -> int:
        """Returns the number of sessions that communication adds.

        One ends at each Route and Return, and where keys or values are sent; one comes after each sum over `tp`, and one of weights'
        gradients in the backward pass.
        """
        sent = 2 * len(self.work.experts) * (candidate.degrees.ep > 1)
        sent += len(self.work.keys_and_values) * (candidate.degrees.cp > 1)
        routed = sent * (1 + (self.slots is not None))
        if candidate.degrees.tp == 1:
            return routed
        forward = len(sharding.forward) * (2 if candidate.recompute and self.slots is not None else 1)
        return routed + forward + 2 * len(sharding.backward) * (self.slots is not None)

    def after(self, candidate: Candidate, own: float, beside: int = 1) -> float:
        """Returns the seconds of the reduction and update of `own` bytes of parameters; `beside`: the number of tp ranks that have the
        same.
        """
        if self.slots is None:
            return 0.0
        update, count = self._update(candidate, own), candidate.degrees.shards * beside
        link, many = self.link(1 if beside > 1 else candidate.degrees.tp, count), max(1.0, own / self.reductions.mean)
        if candidate.shards_update:
            reduced = self._summed(REDUCE_SCATTER, own / many, count, link)
            return update + many * (reduced + link.collective(ALL_GATHER, count, own / many / count))
        return update + many * self._summed(ALL_REDUCE, own / many, count, link)

    def _update(self, candidate: Candidate, own: float) -> float:
        """Returns the seconds of the update of `own` bytes of parameters, by the optimizer's function."""
        if self.optimizer is None:
            return 0.0
        trained = sum(item * math.prod(shape) for _, shape, item in self.reductions.parameters)
        updated = own / max(1.0, self.weights) * trained / (candidate.degrees.dp if candidate.shards_update else 1)
        processor = self.processor(candidate.degrees.ranks)
        if (key := (updated, id(processor))) not in self._updates:
            form = self.optimizer.form
            family = form.function if form.function in FAMILIES else _USUAL
            decayed = self.optimizer.weight_decay > 0 and FAMILIES[family].decays
            update = function(variant(family, decayed=decayed))
            tensors = {"parameter", "gradient", *self.optimizer.slots}
            flat = max(2, round(updated / _ITEM))
            operands = [Operand((flat if name in tensors else 1,), _ITEM) for name in update.input]
            self._updates[key] = function_seconds(update, operands, processor, SHARD)
        return self.turns(candidate.degrees.ranks) * self._updates[key]
