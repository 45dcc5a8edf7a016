"""Pass: one program per rank, cut out of one global order, with every change of layout or group where its value is made.

The global order is the model's own topological order; what makes the other copies of a value stands right behind the node that makes
it, as one event that all its ranks see: a message's Send in one program and its Recv in the other, a collective in all of its
ranks'. Since every rank follows this one order, and waits for an event no earlier than it stands, the programs cannot deadlock, even
if a send waited for its receiver.

    order:   conv1.Conv@3   h: 3->4   conv2.Conv@4
    rank 3:  conv1.Conv  Send(h, 4)
    rank 4:  Recv(h, 3)  conv2.Conv
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import bodies
from partc.compiler.ir.program import CommOp, Group, LocalTensor, Program, RankOp, RankProgram, ShardedValue, captured
from partc.compiler.lower.builders import ProgramBuilder, ProgramBuilders
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.kept import keep_operands, operand_name
from partc.compiler.lower.versions import ValueVersions, can_share, find_versions, replicated_outputs
from partc.compiler.lower.written import is_written, write_forward
from partc.compiler.plan.matching import output_ranks
from partc.compiler.rewrite.simplify_steps import simplify_steps
from partc.compiler.tasks.differentiate import Backward, with_cotangents
from partc.compiler.tasks.localize import Localized, local_shape, local_value, localize
from partc.compiler.tasks.reduce_gradients import Gradient, GradientSums
from partc.compiler.tasks.update import Updates
from partc.compiler.training.config import ProgramKind


def partition(program: Program) -> Program:
    """Fills `parts`, `events` and `groups`; warns of ranks with nothing to do."""
    program, cotangents = with_cotangents(program)
    delivered, _ = output_ranks(program)
    copies = find_versions(program, delivered)
    drafts = ProgramBuilders(program.plan.ranks, {*program.own_names, *copies.names.values()})
    writer = CommLowering(program, drafts, copies.names)
    held = PortBuilder(program, copies, drafts)
    done: set[ShardedValue] = {home for defs in copies.defs.values() for home in defs}
    for value in (*program.model.graph.inputs,):
        held.inputs(value)
        _derive(copies, writer, value, done)
    for value in program.model.graph.initializers.values():
        _derive(copies, writer, value, done)
    emitted: dict[NodeOnGroup, list[tuple[Localized, Group]]] = {}
    for node in program.model.graph:
        for group in program.placement[node].groups:
            instance = NodeOnGroup(node, group)
            if is_written(node):
                emitted[instance] = []
                write_forward(writer, instance)
                continue
            keep_operands(writer, instance)
            operand = partial(operand_name, writer)
            locals_ = localize(program, instance, lambda copy: writer.names[copy], operand, writer.circles)
            emitted[instance] = [(_put(drafts, node, local, ranks), ranks) for local, ranks in locals_]
        for value in node.outputs:
            _derive(copies, writer, value, done)
    totals: dict[ShardedValue, str] = {}
    if program.training:
        gradients: list[Gradient] = []
        sums: GradientSums | None = None
        if program.training.part.backward:
            sums = GradientSums(program, cotangents, writer, drafts, program.training)
            Backward(program, cotangents, copies, writer, drafts, emitted, sums).run()
            sums.flush()
            gradients = sums.gradients
        updates = Updates(program, copies, writer, drafts)
        updates.write(gradients)
        updates.keep_sums(sums.kept if sums else [])
        named = {
            ShardedValue(cotangents[one.parameter], one.home.group, one.share.layout): one.name for one in gradients
        }
        totals = {**(sums.totals if sums else {}), **named}
    parts = tuple(held.part(rank, draft) for rank, draft in enumerate(drafts))
    idle = [part.rank for part in parts if not part.steps and not part.outputs]
    warnings = [f"{_ranks(idle)} nothing to do; place nodes there, or lower `ranks`"] if idle else []
    warnings += replicated_outputs(program, copies, [value for value, (_, cut) in delivered.items() if cut])
    return replace(
        program,
        parts=parts,
        events=tuple(writer.events),
        groups=dict(writer.groups),
        names={**totals, **writer.names},
        warnings=(*program.warnings, *warnings),
    )


def _put(drafts: ProgramBuilders, node: ir.Node, local: Localized, ranks: Group) -> Localized:
    """Writes a node's local form into the drafts of ranks; what it is there, under names that are free."""
    new = [
        draft
        for draft in drafts.of(ranks)
        if not local.types or not local.types.keys() <= draft.made.get(node, {}).keys()
    ]
    if not new:  # these ranks have it of a larger group
        (first, *_) = drafts.of(ranks)
        return local.renamed(first.made[node][next(iter(local.types))])
    names = {}
    for name in local.inner:
        free = drafts.free(tuple(rank for draft in new for rank in draft.ranks), name)
        if free != name:
            names[name] = free
    local = local.renamed(names)
    for draft in new:
        draft.made.setdefault(node, {}).update(dict.fromkeys(local.types, names))
        draft.steps += local.ops
        draft.constants |= local.constants
        draft.types |= local.types
    return local


def _derive(copies: ValueVersions, writer: CommLowering, value: ir.Value, done: set[ShardedValue]) -> None:
    """All copies of a value that its homes do not give, the settled ones first."""
    for home in copies.defs.get(value, ()):
        if (canonical := copies.canonical.get(home)) and canonical not in done:
            causes = copies.uses.get(value, {})
            cause = causes.get(canonical) or next(iter(causes.values()), "as the plan says")
            writer.make(home, canonical, cause)
            done.add(canonical)
    uses = copies.uses.get(value, {})
    for copy in sorted(uses, key=lambda copy: -len(copy.group)):
        if copy in done:
            continue
        there = next((one for one in done_of(value, copies, done) if _has(one, copy)), None)
        if there is not None and copy in copies.delivered.get(value, ()):
            writer.alike(there, copy)  # an output has the name that the user knows
        elif there is not None:
            writer.names[copy] = writer.names[there]
        else:
            writer.make(copies.definition_for(copy), copy, uses[copy], copy in copies.derived)
        done.add(copy)


def done_of(value: ir.Value, copies: ValueVersions, done: set[ShardedValue]) -> list[ShardedValue]:
    """The copies of a value that are there already."""
    canonical = (copies.canonical[home] for home in copies.defs.get(value, ()) if home in copies.canonical)
    return [one for one in (*copies.defs.get(value, ()), *canonical, *copies.uses.get(value, ())) if one in done]


def _has(there: ShardedValue, wanted: ShardedValue) -> bool:
    """Whether all ranks of a wanted copy hold just that already."""
    return set(wanted.group) <= set(there.group) and can_share(there, wanted)


class PortBuilder:
    """Inputs, weights and outputs of every rank."""

    def __init__(self, program: Program, copies: ValueVersions, drafts: ProgramBuilders) -> None:
        self.program, self.copies, self.drafts = program, copies, drafts
        self.read: list[dict[str, LocalTensor]] = [{} for _ in range(program.plan.ranks)]
        self.finished: dict[tuple[int, tuple[str, ...]], RankProgram] = {}
        graph = program.model.graph
        for value in graph.initializers.values():
            for home in copies.defs.get(value, ()):
                self._weight(home)

    def _weight(self, copy: ShardedValue) -> None:
        """A weight: ranks that hold the same shard hold it alike."""
        name = self._typed(copy)
        for place, ranks in copy.holders:
            held = LocalTensor(name, copy, place)
            for draft in self.drafts.of(ranks):
                draft.weights.setdefault(name, held)

    def _typed(self, copy: ShardedValue) -> str:
        name, shape = self.copies.names[copy], local_shape(self.program, copy)
        value = local_value(self.program, copy)
        for draft in self.drafts.of(copy.group):
            draft.types[name] = (value, shape)
        return name

    def inputs(self, value: ir.Value) -> None:
        """The ranks that a model input arrives on."""
        for home in self.copies.defs.get(value, ()):
            name = self._typed(home)
            for index, rank in enumerate(home.group):
                self.read[rank].setdefault(name, LocalTensor(name, home, index))

    def part(self, rank: int, draft: ProgramBuilder) -> RankProgram:
        """The finished program of a rank; what ranks of one draft have in common is one object in all of their parts."""
        outputs = [
            LocalTensor(self.copies.names[copy], copy, copy.group.index(rank))
            for value in self.program.model.graph.outputs
            for copy in self.copies.delivered.get(value, ())
            if rank in copy.group
        ]
        outputs += [replace(one, index=one.copy.group.index(rank)) for one in draft.outputs.values()]
        key = id(draft), tuple(held.name for held in outputs)
        if key not in self.finished:
            steps = tuple(draft.program)
            if self.program.training:
                after = {held.name for held in outputs} | {one.next for one in draft.kept.values()}
                steps = tuple(simplify_steps(steps, after, draft.types))
            used = {name for step in steps for name in read_names(step)} | {held.name for held in outputs}
            inputs = tuple(held for held in self.read[rank].values() if held.name in used)
            weights = tuple(held for held in draft.weights.values() if held.name in used)
            kept = tuple(one for one in draft.kept.values() if one.name in used)
            if self.program.training and self.program.training.part is not ProgramKind.STEP:
                given = {one.name for one in kept}
                weights = tuple(held for held in weights if held.name not in given)
            constants = {name: array for name, array in draft.constants.items() if name in used}
            self.finished[key] = RankProgram(
                rank, steps, inputs, weights, (), constants, draft.types, kept, tuple(draft.scalars)
            )
        like = self.finished[key]
        return replace(
            like,
            rank=rank,
            inputs=tuple(self.read[rank][held.name] for held in like.inputs),
            outputs=tuple({held.copy.value: held for held in outputs}.values()),
        )


def read_names(step: RankOp) -> list[str]:
    """The names that a step reads, those captured by bodies included."""
    if isinstance(step, CommOp):
        return list(step.inputs)
    names = [value.name or "" for value in step.node.inputs if value is not None]
    for body in bodies(step.node):
        names += [step.captured.get(value.name or "", value.name or "") for value in captured(body)]
    return names


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
