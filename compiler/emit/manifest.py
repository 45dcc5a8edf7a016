"""The manifest of a program: the facts about an artifact that the runtime and `partc check` need in addition to the rank files.

It also lists the inputs that contain ids of rows, so that an id outside its table is refused before a step, with its record. An input is
followed through ops that move its elements (Cast, Reshape, Concat, ...) and through one selection of columns (Slice, Split, Gather by
constants) to the indices of a Gather from a weight. Ids that a model computes are checked by the Gather itself.

    y = table_3[x[:, 3]]    ->    x: column 3 along axis 1 holds ids of table_3
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import onnx_ir as ir
from partc.compiler.dims.facts import Facts
from partc.compiler.emit.names import Names
from partc.compiler.ir.computed import PART, PackedBox
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Call, Comm, Copy, Event, Op, RankTensor, State, Value
from partc.compiler.ir.sharded import Group, GroupFacts, ShardedValue, facts_of
from partc.compiler.ir.sized import sized_inputs
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import Shape
from partc.compiler.layout.layout import Layout
from partc.compiler.ops.node import axis_of, constant_ints, dims, operand, rank_of
from partc.compiler.training.microbatch_model import PART as NUMBER
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.format import IdsRecord, release
from partc.runtime.artifact.generation import DECODE, narrow
from partc.runtime.artifact.ranks import Grid, SharedRanks, order_text


def manifest_of(
    program: Complete,
    names: Names,
    files: Mapping[str, fmt.FileRecord],
    sources: Mapping[str, fmt.SourceRecord | None],
    rank_files: Sequence[str],
    is_main: bool = True,
) -> fmt.Manifest:
    """Returns the manifest of a program; `files` are the artifact's, `rank_files` the program's file of each rank."""
    model = sources["model"]
    assert model is not None
    before, sized, mesh = _given(program, names), sized_inputs(program), dict(program.plan.mesh)
    return fmt.Manifest(
        name=program_name(program),
        is_main=is_main,
        partc=release(),
        ranks=program.plan.ranks,
        mesh=mesh
        if math.prod(mesh.values()) == program.plan.ranks
        else {},  # not that of each group, or of the workers alone
        symbols={name: _law(program.symbols[name].facts) for name in sorted(program.symbols)},
        inputs=[
            *(
                _port(
                    program,
                    value,
                    [
                        (ranks, one)
                        for part, ranks in program.distinct_programs
                        for one in part.inputs
                        if one.version.value is value and one.value not in sized.get(part.rank, ())
                    ],
                )
                for value in program.model.graph.inputs
                if not _is_made(program, value)
            ),
            *_scalars(program, names),
        ],
        outputs=[
            _port(
                program,
                value,
                [
                    (ranks, one)
                    for part, ranks in program.distinct_programs
                    for one in part.outputs
                    if one.version.value is value
                ],
            )
            for value in (*program.model.graph.outputs, *_guards(program))
        ],
        transfers=[_transfer(program, names, event) for event in program.events if event.op_type == fmt.SEND],
        groups={name: [list(ranks) for ranks in sets] for name, sets in program.groups.items()},
        collectives=[
            _collective(program, names, event, before) for event in program.events if event.op_type != fmt.SEND
        ],
        rank_files=list(rank_files) if len(set(rank_files)) < len(rank_files) else [],
        stored=program.stored,
        state=_state(program, names),
        training=_training(program),
        generation=program.generation.record if program.generation is not None else None,
        files=dict(sorted(files.items())),
        model=model,
        plan=sources["plan"],
    )


def program_name(program: Complete) -> str:
    """Returns the program's name in the artifact."""
    if program.training is None and program.generation is None:
        return fmt.INFER
    name = program.kind.value or (fmt.TRAIN if program.training is not None else DECODE)
    return narrow(name, program.size) if program.size else name


def _training(program: Complete) -> fmt.TrainingRecord | None:
    """Returns the training record, which only the manifest of the step's program has."""
    if program.training is None or program.kind is not ProgramKind.STEP:
        return None
    parts = program.plan.pipeline.parts if program.plan.pipeline is not None else 0
    more = {"guard": guard_of(program), "parts": parts, "copies": program.plan.elastic.copies}
    return program.training.record().model_copy(update=more)


def guard_of(program: Complete) -> str:
    """Returns the name of the value that must be finite for a step to replace the ranks' state; empty if there is none."""
    if program.training is None or program.kind is not ProgramKind.STEP:
        return ""
    return "".join(name_of(value) for value in _guards(program) if value.name != fmt.GRADIENT_NORM)


def _guards(program: Complete) -> list[ir.Value]:
    """Returns the outputs, other than the model's, by which ranks decide whether a step is skipped."""
    outputs = {*program.model.graph.outputs}
    given = dict.fromkeys(one.version.value for part, _ in program.distinct_programs for one in part.outputs)
    return [value for value in given if value not in outputs]


def _is_made(program: Complete, value: ir.Value) -> bool:
    """Whether the step itself computes an input of a microbatch: the microbatch's number, or a value of the whole batch."""
    if program.tasks is None or any(
        held.version.value is value for part, _ in program.distinct_programs for held in part.inputs
    ):
        return False
    return value.name == NUMBER or any(
        value.name == str(made) for part, _ in program.distinct_programs for step in part.steps for made in step.makes
    )


def _scalars(program: Complete, names: Names) -> list[fmt.Port]:
    """Returns the ports of the scalars that every training step gets in addition to the model's inputs."""
    ranks: dict[str, list[int]] = {}
    for part, alike in program.distinct_programs:
        for value in part.scalars:
            ranks.setdefault(names[value], []).extend(alike)
    return [fmt.Port(name=name, type="tensor(float)", shape=[], ranks=sorted(some)) for name, some in ranks.items()]


def _state(program: Complete, names: Names) -> list[fmt.StateRecord]:
    """Returns one record for each state tensor and layout: its name in rank files, its kind, and the box of each rank."""
    by_key: dict[tuple[str, str, str, tuple[int, ...]], tuple[State, dict[ShardedValue, list[int]]]] = {}
    for part, ranks in program.distinct_programs:
        for one in part.state:
            after = "" if one.next is None else names[one.next]
            key = names[one.value], one.tensor, after, one.version.layout.shards
            by_key.setdefault(key, (one, {}))[1].setdefault(one.version, []).extend(ranks)
    return [_kept(program, key[0], key[2], first, holders) for key, (first, holders) in by_key.items()]


def _kept(
    program: Complete, name: str, after: str, first: State, holders: Mapping[ShardedValue, Sequence[int]]
) -> fmt.StateRecord:
    info = program.values[first.version.value]
    assert first.kind != "gradient", "the sums of microbatches' gradients are values of a step"
    part: PackedBox | None = first.version.value.meta.get(PART)
    ranks, boxes = _lying(holders, part)
    shape = info.shape if part is None else part.shape
    return fmt.StateRecord(
        value=name,
        next=after,
        tensor=first.tensor,
        kind=first.kind,
        type=info.type,
        shape=[dim for dim in shape or () if isinstance(dim, int)],
        ranks=ranks,
        boxes=boxes,
        parameter=first.parameter,
        initial=first.initial,
    )


def _lying(
    holders: Mapping[ShardedValue, Sequence[int]], part: PackedBox | None = None
) -> tuple[list[int], Sequence[fmt.Box] | None]:
    """Returns the ranks that have a tensor, ascending, and the box of each; None for the boxes if all ranks have the whole tensor.

    Ranks that form one grid have their boxes by its layout, so no box is made for each.
    """
    whole = part is None and all(copy.layout.is_replicated for copy in holders)
    within = () if part is None else tuple((*span, size) for span, size in zip(part.box, part.shape, strict=True))
    (copy, held), *others = holders.items()
    if not others and _rising(facts_of(copy.group)) and len(held) == len(copy.group):
        return _listed(facts_of(copy.group)), None if whole else Grid(copy.layout.mesh, copy.layout.cuts, within)
    at: dict[int, fmt.Box] = {}
    for copy, held in holders.items():
        grid, places = Grid(copy.layout.mesh, copy.layout.cuts, within), copy.places
        at |= {rank: grid[places[rank]] for rank in held}
    ranks = sorted(at)
    return ranks, None if whole else [at[rank] for rank in ranks]


@functools.lru_cache(maxsize=1024)
def _listed(facts: GroupFacts) -> SharedRanks:
    """Returns one list of the ranks of a group, shared by all tensors on it."""
    return SharedRanks(facts.group)


@functools.lru_cache(maxsize=1024)
def _rising(facts: GroupFacts) -> bool:
    return all(one < two for one, two in pairwise(facts.group))


def _law(facts: Facts) -> fmt.SymbolRecord:
    if facts.value is not None:
        return fmt.SymbolRecord(min=facts.value, max=facts.value, divisor=1, remainder=0)
    low = facts.min or 0
    if facts.divisor > 1 and low < facts.divisor + facts.remainder:  # a record's N begins at 1
        return fmt.SymbolRecord(min=low, max=facts.max, divisor=1, remainder=0)
    return fmt.SymbolRecord(min=low, max=facts.max, divisor=facts.divisor, remainder=facts.remainder)


def _port(program: Complete, value: ir.Value, held: Sequence[tuple[Group, RankTensor]]) -> fmt.Port:
    info = program.values[value]
    holders: dict[ShardedValue, list[int]] = {}
    for some, one in held:
        holders.setdefault(one.version, []).extend(some)
    ranks, boxes = _lying(holders) if holders else ([], None)
    name = name_of(value)
    return fmt.Port(
        name=name,
        type=info.type,
        shape=_shape(info.shape),
        ranks=ranks,
        boxes=boxes,
        labels=program.training.records.labels.get(name) if program.training and value.is_graph_input() else None,
        ids=looked_up(value) if value.is_graph_input() else [],
        batch_dim=program.batch_dims.get(value, 0) if value.is_graph_input() else 0,
    )


def _transfer(program: Complete, names: Names, event: Event) -> fmt.Transfer:
    source, target = event.ranks[0] if event.group else (event.ranks[0][0], event.ranks[1][0])
    return fmt.Transfer(
        tag=event.tag,
        value=names[event.output],
        source=source,
        target=target,
        type=program.values[event.value].type,
        shape=_shape(event.shape),
        bytes=event.bytes,
        cause=event.cause,
        group=event.group,
    )


def _given(program: Complete, names: Names) -> dict[int, list[str]]:
    """Maps each tag to the names of a collective's operands, if all ranks use the same names."""
    found: dict[int, set[tuple[str, ...]]] = {}
    for steps in {id(part.steps): part.steps for part, _ in program.distinct_programs}.values():
        for tag, given in _inputs_of_events(steps, names):
            found.setdefault(tag, set()).add(given)
    return {tag: [*one.pop()] for tag, one in found.items() if len(one) == 1}


def _inputs_of_events(steps: Sequence[Op], names: Names) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields the tag and inputs of each event to which a rank contributes; for a body those of every call. A copy has its source's name."""
    copied = _sources_of_copies(steps)
    for step in steps:
        if isinstance(step, Call):
            there = {own: names[copied.get(value, value)] for own, value in step.ends.items()}
            for tag, values in _event_inputs(step.body.steps):
                inside = (there.get(value) or f"{names[value]}.{step.microbatch}" for value in values)
                yield tag + step.microbatch, tuple(inside)
    yield from ((tag, tuple(names.of(values))) for tag, values in _event_inputs(steps))


def _event_inputs(steps: Sequence[Op]) -> Iterator[tuple[int, list[Value]]]:
    copied = _sources_of_copies(steps)
    for step in steps:
        if isinstance(step, Comm) and step.reads:
            yield step.tag, [copied.get(value, value) for value in step.reads]


def _sources_of_copies(steps: Sequence[Op]) -> dict[Value, Value]:
    return {step.output: step.source for step in steps if isinstance(step, Copy) and step.output.base is step.source}


def _collective(program: Complete, names: Names, event: Event, sources: Mapping[int, list[str]]) -> fmt.Collective:
    before, after = event.way or (None, None)
    return fmt.Collective(
        tag=event.tag,
        op=event.op_type,
        value=names[event.output],
        group=event.group,
        type=program.values[event.value].type,
        shape=_shape(event.shape),
        bytes=event.bytes,
        cause=event.cause,
        sources=sources.get(event.tag, []),
        given=_layout(before),
        made=_layout(after),
    )


def _layout(lying: tuple[Group, Layout] | None) -> fmt.LayoutRecord | None:
    if lying is None:
        return None
    group, layout = lying
    return fmt.LayoutRecord(
        ranks=order_text(group),
        mesh=list(layout.mesh),
        cuts=[list(axes) for axes in layout.cuts],
        partial=list(layout.partial),
    )


def _shape(shape: Shape | None) -> fmt.Shape:
    return None if shape is None else list(shape)


_MOVES = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
"""Ops whose output has elements of their first input alone."""
_KEEPS_DIMS = {"Cast", "Identity"}


@dataclass(frozen=True)
class _Elements:
    """Elements of an input: all of them, or those at `places` along `axis`. `intact`: whether the dims are still the input's."""

    axis: int = 0
    places: tuple[int, ...] | None = None
    intact: bool = True


def looked_up(value: ir.Value) -> list[IdsRecord]:
    """Returns a record for each table whose rows an input names, with the places of the ids; equal sizes and places share a record."""
    if value.dtype is None or not _is_id(value.dtype):
        return []
    found: dict[tuple[int, tuple[int, ...], int], ir.Value] = {}
    for elements, table, rows in _tables(value, _Elements(), set()):
        found.setdefault((elements.axis, elements.places or (), rows), table)
    return [
        IdsRecord(table=name_of(table), rows=rows, axis=axis, places=list(places))
        for (axis, places, rows), table in found.items()
    ]


def _tables(
    value: ir.Value, elements: _Elements, seen: set[tuple[ir.Value, _Elements]]
) -> Iterator[tuple[_Elements, ir.Value, int]]:
    if (value, elements) in seen:
        return
    seen.add((value, elements))
    for use in value.uses():
        node, k = use.node, use.idx
        if node.graph is None or value.graph is not node.graph:
            continue
        if node.op_type in ("Gather", "GatherBlockQuantized") and k == 1:
            yield from _rows(node, elements)
        if node.domain not in ("", "ai.onnx"):
            continue
        for after, out in _after(node, k, elements):
            yield from _tables(out, after, seen)


def _rows(node: ir.Node, elements: _Elements) -> Iterator[tuple[_Elements, ir.Value, int]]:
    """Yields the table that a Gather reads, if it is a weight with a known number of rows."""
    table = operand(node, 0)
    sizes = dims(table)
    if table is None or not table.is_initializer() or not sizes:
        return
    rows = sizes[axis_of(node, len(sizes), 0)]  # GatherBlockQuantized has `gather_axis`, of bytes always 0
    if isinstance(rows, int) and rows > 0:
        yield elements, table, rows


def _after(node: ir.Node, k: int, elements: _Elements) -> Iterator[tuple[_Elements, ir.Value]]:
    """Yields the outputs of a node that contain elements of its operand `k`, with these elements."""
    moved = replace(elements, intact=False)
    out = node.outputs[0]
    if node.op_type == "Concat" or (k == 0 and node.op_type in _MOVES):
        if out.dtype is None or _is_id(out.dtype):
            yield elements if node.op_type in _KEEPS_DIMS else moved, out
    elif k == 0 and elements.intact and elements.places is None:
        for axis, places, one in _selected(node):
            yield _Elements(axis, places, intact=False), one


def _selected(node: ir.Node) -> Iterator[tuple[int, tuple[int, ...], ir.Value]]:
    """Yields the axis, the selected places and the output of a selection with constant indices, for each output."""
    rank, sizes = rank_of(node.inputs[0]), dims(node.inputs[0])
    if not rank or sizes is None:
        return
    match node.op_type:
        case "Gather":
            axis, given = axis_of(node, rank, 0), constant_ints(node, 1)
            size = sizes[axis]
            if given and isinstance(size, int) and all(-size <= place < size for place in given):
                yield axis, tuple(sorted({place % size for place in given})), node.outputs[0]
        case "Split":
            axis, begin = axis_of(node, rank, 0), 0
            for out in node.outputs:
                extent = (dims(out) or (None,) * rank)[axis]
                if not isinstance(extent, int):
                    return
                yield axis, tuple(range(begin, begin + extent)), out
                begin += extent
        case "Slice":
            starts, ends, steps = (constant_ints(node, k) for k in (1, 2, 4))
            axes = constant_ints(node, 3) if operand(node, 3) is not None else tuple(range(len(starts or ())))
            if not starts or not ends or not axes or len(axes) != 1 or (operand(node, 4) is not None and not steps):
                return
            axis = axes[0] % rank
            size = sizes[axis]
            if isinstance(size, int) and (places := range(size)[starts[0] : ends[0] : (steps or (1,))[0]]):
                yield axis, tuple(sorted(places)), node.outputs[0]


def _is_id(dtype: ir.DataType) -> bool:
    """Whether numbers of this type can be ids without a change: a bool is cast to 0 or 1."""
    return dtype.is_integer() or dtype is ir.DataType.BOOL
