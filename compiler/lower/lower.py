"""Pass: one program per rank of what `localize`, `differentiate` and `update` wrote; ranks that do the same share it.

What nothing reads falls away, and what the simplifier finds in a program that trains; the rank's place alone tells equal programs apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import LocalTensor, RankOp, RankProgram, read_names
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.lower.builders import ProgramBuilder
from partc.compiler.lower.early_pulls import pulls_first
from partc.compiler.lower.kernels import fit_kernels
from partc.compiler.lower.local_view import LocalView
from partc.compiler.rewrite.simplify_steps import simplify_steps

_HALVES = ("tensor(float16)", "tensor(bfloat16)")


def lower(program: Program) -> Program:
    """Fills `parts`, `events` and `groups`, and lists all values in `values`; warns of ranks with nothing to do."""
    local = program.local
    assert local is not None
    finished: dict[tuple[int, tuple[str, ...]], RankProgram] = {}
    simplified: dict[Hashable, tuple[RankOp, ...]] = {}
    parts: list[RankProgram] = []
    values = dict(local.comm.values.infos)
    for rank, builder in enumerate(local.comm.builders):
        outputs = _outputs(program, local, rank, builder)
        key = id(builder), tuple(held.name for held in outputs)
        if key not in finished:
            finished[key] = _finished(program, builder, outputs, local.inputs[rank], values, simplified)
        parts.append(_of_rank(finished[key], rank, outputs, local.inputs[rank]))
    idle = [part.rank for part in parts if not part.steps and not part.outputs]
    told = list(_idle(program, idle))
    return replace(
        program,
        local=None,
        values=values,
        parts=tuple(parts),
        events=tuple(local.comm.events),
        groups=dict(local.comm.groups),
        names={**local.totals, **local.comm.values.names},
        warnings=(*program.warnings, *told),
    )


def _outputs(program: Program, local: LocalView, rank: int, builder: ProgramBuilder) -> list[LocalTensor]:
    """The outputs of a rank: those of the model that are delivered to it, and those that passes add."""
    names = local.comm.values.names
    outputs = [
        LocalTensor(names[version], version, version.group.index(rank))
        for value in program.model.graph.outputs
        for version in local.versions.delivered.get(value, ())
        if rank in version.group
    ]
    return outputs + [replace(one, index=one.version.group.index(rank)) for one in builder.outputs.values()]


def _finished(
    program: Program,
    builder: ProgramBuilder,
    outputs: list[LocalTensor],
    inputs: Mapping[str, LocalTensor],
    values: dict[ir.Value, ValueInfo],
    simplified: dict[Hashable, tuple[RankOp, ...]],
) -> RankProgram:
    """The program of a builder's ranks, without the places that differ by rank; values that it adds are listed in `values`.

    `simplified` has by steps and what is read behind them the steps that are left: builders of other weights share them.
    """
    steps = tuple(builder.program)
    training = program.training
    if training:
        after = {held.name for held in outputs} | {one.next for one in builder.kept.values()}
        shapes = [
            builder.types[name][1] if name in builder.types else None for step in steps for name in read_names(step)
        ]
        key = steps, frozenset(after), tuple(shapes)
        if key not in simplified:
            simplified[key] = tuple(simplify_steps(steps, after, builder.types))
        steps = simplified[key]
    steps = tuple(pulls_first(steps))
    used = {name for step in steps for name in read_names(step)} | {held.name for held in outputs}
    weights = tuple(held for held in builder.weights.values() if held.name in used)
    kept = tuple(one for one in builder.kept.values() if one.name in used)
    if training and training.part is not ProgramKind.STEP:
        given = {one.name for one in kept}
        weights = tuple(held for held in weights if held.name not in given)
    constants = {name: array for name, array in builder.constants.items() if name in used}
    read = tuple(held for held in inputs.values() if held.name in used)
    found = RankProgram(
        builder.ranks[0],
        steps,
        read,
        weights,
        (),
        constants,
        builder.types,
        kept,
        tuple(builder.scalars),
        frozenset(builder.appended),
    )
    fits = program.plan.precision is not None or training is not None
    if not fits or not any(info.type in _HALVES for info in values.values()):
        return found
    return fit_kernels(found, program.model.graph.opset_imports.get("", 1), values, program.targets)


def _of_rank(
    like: RankProgram, rank: int, outputs: list[LocalTensor], inputs: Mapping[str, LocalTensor]
) -> RankProgram:
    """The program of one rank; what ranks of one builder have in common is one object in all of their programs."""
    return replace(
        like,
        rank=rank,
        inputs=tuple(inputs[held.name] for held in like.inputs),
        outputs=tuple({held.version.value: held for held in outputs}.values()),
    )


def _idle(program: Program, idle: list[int]) -> Iterator[str]:
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
