"""Pass: builds one program per rank from the ops of `localize`, `differentiate` and `update`; ranks with the same ops share it.

What nothing reads falls away, and what the simplifier finds in a program that trains; the rank's place alone tells equal programs apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias, TypeVar

import onnx_ir as ir
from partc.compiler.ir.constants import Constant
from partc.compiler.ir.program import Lowered
from partc.compiler.ir.programs import Comm, Compute, RankProgram, RankTensor, State, Value, needed
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue, lowest, members, ranks_of
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.lower.job import Job, Transfer
from partc.compiler.lower.kernels import columns_of_vectors, fit_kernels
from partc.compiler.lower.local_view import Localized
from partc.compiler.rewrite.simplify import simplify
from partc.runtime.artifact.format import PULL
from partc.runtime.spellings import first_free, numbered


def hoist_pulls(steps: Iterable[Compute | Comm]) -> list[Compute | Comm]:
    """The ops in order; those that no Pull needs come after the Pulls that follow them up to the next event of another kind.

        Pull a, Relu a, Pull b, MatMul, AllReduce      ->      Pull a, Pull b, Relu a, MatMul, AllReduce

    So the readers of their rows are one segment, and no rank computes between two Pulls while the others wait for its ids. Events keep
    their order, which is the same on all ranks.
    """
    ordered: list[Compute | Comm] = []
    waiting: list[Compute | Comm] = []
    for step in steps:
        if isinstance(step, Compute):
            waiting.append(step)
            continue
        first, waiting = _divided(waiting, step) if _is_pull(step) else (waiting, [])
        at = _before_pulls(ordered, first) if _is_pull(step) else len(ordered)
        ordered[at:at] = first
        ordered.append(step)
    return [*ordered, *waiting]


def _is_pull(step: Compute | Comm) -> bool:
    return isinstance(step, Comm) and step.op_type == PULL


def _before_pulls(found: Sequence[Compute | Comm], needed: Iterable[Compute | Comm]) -> int:
    """The index before the last Pulls at which ops can be inserted: after the ops whose results they read."""
    read = {value for step in needed for value in step.reads}
    at = len(found)
    while at and _is_pull(found[at - 1]) and read.isdisjoint(found[at - 1].makes):
        at -= 1
    return at


def _divided(
    waiting: Iterable[Compute | Comm], pull: Compute | Comm
) -> tuple[list[Compute | Comm], list[Compute | Comm]]:
    """The ops that a Pull needs, and the others."""
    wanted = {*pull.reads}
    needed: list[Compute | Comm] = []
    others: list[Compute | Comm] = []
    for step in reversed([*waiting]):
        if wanted.isdisjoint(step.makes):
            others.append(step)
        else:
            wanted.update(step.reads)
            needed.append(step)
    return needed[::-1], others[::-1]


_Simplified: TypeAlias = tuple[tuple[Compute | Comm, ...], frozenset[Value]]
"""The steps that are left of some, and the values that these read."""
_Kept: TypeAlias = dict[tuple[State, ...], tuple[State, ...]]
"""The state of ranks: equal tuples are one object."""
_HALVES = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def lower(program: Localized) -> Lowered:
    """Fills `parts`, `events` and `groups`, and lists all values in `values`; warns of ranks with nothing to do."""
    local = program.local
    simplified: dict[Hashable, _Simplified] = {}
    states: _Kept = {}
    parts: dict[int, RankProgram] = {}
    values = dict(local.comm.values.infos)
    delivered = [
        version for value in program.model.graph.outputs for version in local.versions.delivered.get(value, ())
    ]
    finished, at = Finished(local.comm.job), local.comm.values.at
    for distinct in finished.programs(version.group for version in delivered):
        here = [version for version in delivered if distinct.ranks & ranks_of(version.group)]
        outputs = [(finished.value(at[version]), version) for version in here] + [*distinct.outputs.items()]
        rank_program = _finished(program, distinct, outputs, values, simplified, states)
        read = [(held.value, held.version) for held in rank_program.inputs]
        given = {version.value: (value, version) for value, version in outputs}.values()
        ends = [[(value, version, version.places) for value, version in some] for some in (read, given)]
        for rank in members(distinct.ranks):
            inputs, results = [
                tuple([RankTensor(value, of, place[rank]) for value, of, place in some]) for some in ends
            ]
            parts[rank] = replace(rank_program, rank=rank, inputs=inputs, outputs=results)
    idle = [rank for rank, part in sorted(parts.items()) if not part.steps and not part.outputs]
    warnings = list(_idle(program, idle))
    return program.into(
        Lowered,
        values=values,
        parts=tuple(parts[rank] for rank in range(program.plan.ranks)),
        events=tuple([replace(event, output=finished.value(event.output)) for event in local.comm.events]),
        groups=dict(local.comm.groups),
        at={version: finished.value(value) for version, value in {**local.totals, **at}.items()},
        warnings=(*program.warnings, *warnings),
    )


def _finished(
    program: Localized,
    rank_program: DistinctProgram,
    outputs: Sequence[tuple[Value, ShardedValue]],
    values: dict[ir.Value, ValueInfo],
    simplified: dict[Hashable, _Simplified],
    states: _Kept,
) -> RankProgram:
    """A distinct program as its lowest rank has it, without outputs; values that it adds are listed in `values`.

    `simplified` has by steps and what is read behind them the steps that are left, in order: programs with other weights share them.
    """
    steps = tuple(rank_program.steps)
    training, rank = program.training, lowest(rank_program.ranks)
    delivered = {value for value, _ in outputs}
    after = delivered | {state.next for state in rank_program.state.values() if state.next is not None}
    key = steps, frozenset(after)
    if key not in simplified:
        wanted = needed(steps, after, rank_program.concatenated)
        left = tuple(columns_of_vectors(hoist_pulls(simplify(wanted, after) if training else wanted)))
        simplified[key] = left, frozenset([value for step in left for value in step.reads])
    steps, read = simplified[key]
    used = read | delivered
    weights = tuple([held for held in rank_program.weights.values() if held.value in used])
    kept = tuple([state for state in rank_program.state.values() if state.value in used])
    if training and program.kind is not ProgramKind.STEP:
        begun = {state.value for state in kept}
        weights = tuple([held for held in weights if held.value not in begun])
    completed = RankProgram(
        rank,
        steps,
        tuple([RankTensor(value, of, of.places[rank]) for value, of in rank_program.inputs.items() if value in used]),
        weights,
        (),
        states.setdefault(kept, kept),
        tuple(rank_program.scalars),
        frozenset(rank_program.concatenated),
    )
    # onnxruntime writes Casts of float16 itself, which do where a plan asks for no precision
    halves = _HALVES if program.plan.precision is not None or training is not None else _HALVES[:1]
    types = {info.type for info in values.values()}
    kinds = [kind for kind in halves if f"tensor({kind.name.lower()})" in types]
    if not kinds:
        return completed
    return fit_kernels(completed, kinds, program.model.graph.opset_imports.get("", 1), values, program.targets)


def _idle(program: Localized, idle: list[int]) -> Iterator[str]:
    """Warnings of ranks with nothing to do."""
    roles = {rank: name for name, ranks in program.plan.roles.items() for rank in ranks}
    working = [rank for rank in idle if rank not in roles]
    if working:
        yield f"{_ranks(working)} nothing to do; place nodes there, or lower `ranks`"
    for name in dict.fromkeys(roles[rank] for rank in idle if rank in roles):
        serving = [rank for rank in idle if roles.get(rank) == name]
        yield (
            f"{_ranks(serving)} the role '{name}' and no parameter; give it some, `placement: {{embedding: {{role: {name}}}}}`, "
            "or take the role out"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def names_of(job: Job) -> dict[Value, str]:
    """The names of the values that a job has made, in the order in which they were made: each from its hint.

    Values of the model and their versions have their own names. Another value has a name that the model does not have, and that nothing
    else on its ranks has: `h.shape'` where the model has an `h.shape`. Values on other ranks may have the same name.
    """
    names: dict[Value, str] = {}
    taken: dict[str, Ranks] = {}
    for value, ranks in job.created.items():
        first = job.derived(value.hint if value.base is None else f"{names.get(value.base) or value.base}{value.hint}")

        def is_taken(name: str, ranks: Ranks = ranks) -> bool:
            return name in job.reserved or bool(taken.get(name, 0) & ranks)

        def others(first: str, value: Value = value) -> Iterable[str]:
            return chain(map(job.derived, value.others), numbered(first, ".", 2))

        name = names[value] = first_free(first, is_taken, others)
        taken[name] = taken.get(name, 0) | ranks
    return names


@dataclass
class DistinctProgram:
    """The ops and records that some ranks have, and no others."""

    ranks: Ranks
    steps: list[Compute | Comm] = field(default_factory=list)
    inputs: dict[Value, ShardedValue] = field(default_factory=dict)
    weights: dict[Value, RankTensor] = field(default_factory=dict)
    state: dict[Value, State] = field(default_factory=dict)
    scalars: dict[Value, None] = field(default_factory=dict)
    outputs: dict[Value, ShardedValue] = field(default_factory=dict)
    concatenated: dict[Value, None] = field(default_factory=dict)


T = TypeVar("T")
_RECORDS = ("inputs", "weights", "state", "scalars", "outputs", "concatenated")


class Finished:
    """A job whose values have their names: each is one that is called so, and ops are over these.

    A value that is a constant on some ranks is one of its own there, and so are ops that read it.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.names = job, names_of(job)
        self._values: dict[tuple[Value, int], Value] = {}
        self._ops: dict[Hashable, Compute | Comm] = {}

    def value(self, value: Value, constants: Mapping[Value, Constant] | None = None) -> Value:
        """The value with its name; a constant where it is one of the `constants`."""
        constant = constants.get(value) if constants else None
        key = value, id(constant)
        if key not in self._values:
            of, shape = (value.of, value.shape) if self.job.listed.ranks(value) else (None, None)
            self._values[key] = Value(self._name(value), of=of, shape=shape, constant=constant)
        return self._values[key]

    def _name(self, value: Value) -> str:
        own = value.hint if value.base is None else f"{self._name(value.base)}{value.hint}"
        return self.names.get(value, own)

    def programs(self, groups: Iterable[Group]) -> list[DistinctProgram]:
        """The distinct programs by their lowest rank; ranks that differ in being among one of `groups` are apart, too."""
        job, sharing = self.job, dict[Ranks, list[DistinctProgram]]()
        programs = [DistinctProgram(ranks) for ranks in job.distinct(groups)]
        constants = {one.ranks: dict[Value, Constant]() for one in programs}

        def those(ranks: Ranks) -> list[DistinctProgram]:
            if ranks not in sharing:
                sharing[ranks] = [one for one in programs if one.ranks & ranks]
            return sharing[ranks]

        for value, constant, ranks in job.constants:
            for program in those(ranks):
                constants[program.ranks][value] = constant
        somewhere = {value for value, _, _ in job.constants}
        for step, ranks in job.program:
            if isinstance(step, Transfer):
                for program in those(ranks):
                    program.steps += [self._op(each, constants[program.ranks]) for each in step.seen_by(program.ranks)]
            elif somewhere.isdisjoint(step.reads) and somewhere.isdisjoint(step.makes):
                same = self._op(step, {})
                for program in those(ranks):
                    program.steps.append(same)
            else:
                for program in those(ranks):
                    program.steps.append(self._op(step, constants[program.ranks]))
        for records in _RECORDS:
            for value, item, ranks in getattr(job, records):
                differs = value in somewhere or (isinstance(item, State) and item.next in somewhere)
                shared = None if differs else self._listed(value, item, {})
                for program in those(ranks):
                    own, listed = shared or self._listed(value, item, constants[program.ranks])
                    getattr(program, records)[own] = listed
        return programs

    def _listed(self, value: Value, item: T, constants: Mapping[Value, Constant]) -> tuple[Value, T]:
        """A value with its name, and what is listed of it over values with names."""
        own = self.value(value, constants)
        if isinstance(item, State):
            after = None if item.next is None else self.value(item.next, constants)
            return own, replace(item, value=own, next=after)
        return own, replace(item, value=own) if isinstance(item, RankTensor) else item

    def _op(self, step: Compute | Comm, constants: Mapping[Value, Constant]) -> Compute | Comm:
        """An op over values with names."""
        read = [constants[one] for one in (*step.reads, *step.makes) if one in constants]
        key = step, tuple(map(id, read))
        if key not in self._ops:
            inputs, outputs = (
                tuple([None if one is None else self.value(one, constants) for one in some])
                for some in (step.inputs, step.outputs)
            )
            if isinstance(step, Comm):
                self._ops[key] = replace(step, inputs=inputs, outputs=outputs)
            else:
                label = step.label if isinstance(step.label, str) else self.value(step.label)
                captured = {name: self.value(one, constants) for name, one in step.captured.items()}
                self._ops[key] = replace(step, inputs=inputs, outputs=outputs, captured=captured, label=label)
        return self._ops[key]
