"""The manifest of a program: what the runtime and `partc check` know of an artifact beside the rank files."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import onnx_ir as ir
from partc.compiler.dims.facts import Facts
from partc.compiler.emit.looked_up import looked_up
from partc.compiler.ir.packed import PART, PackedBox
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import CommOp, CopyOp, Event, LocalTensor, RankOp, StateTensor, TaskCall, made_names
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.ir.sized import sized_inputs
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import Shape
from partc.compiler.layout.layout import Layout
from partc.compiler.training.in_parts import PART as NUMBER
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.ranks import Grid, order_text
from partc.runtime.artifact.release import release


def manifest_of(
    program: Program,
    files: Mapping[str, fmt.FileRecord],
    sources: Mapping[str, fmt.SourceRecord | None],
    rank_files: Sequence[str],
    is_main: bool = True,
) -> fmt.Manifest:
    """What the index of an artifact says of a program; `files` are the artifact's, `rank_files` the program's by rank."""
    model = sources["model"]
    assert model is not None
    given, sized = _given(program), sized_inputs(program)
    return fmt.Manifest(
        name=program_name(program),
        is_main=is_main,
        partc=release(),
        ranks=program.plan.ranks,
        symbols={name: _symbol(program, name) for name in sorted(program.symbols)},
        inputs=[
            *(
                _port(
                    program,
                    value,
                    [
                        (p.rank, one)
                        for p in program.parts
                        for one in p.inputs
                        if one.version.value is value and one.name not in sized.get(p.rank, ())
                    ],
                )
                for value in program.model.graph.inputs
                if not _is_made(program, value)
            ),
            *_scalars(program),
        ],
        outputs=[
            _port(
                program,
                value,
                [(p.rank, one) for p in program.parts for one in p.outputs if one.version.value is value],
            )
            for value in (*program.model.graph.outputs, *_guards(program))
        ],
        transfers=[_transfer(program, event) for event in program.events if event.op_type == fmt.SEND],
        groups={name: [list(ranks) for ranks in sets] for name, sets in program.groups.items()},
        collectives=[_collective(program, event, given) for event in program.events if event.op_type != fmt.SEND],
        rank_files=list(rank_files) if len(set(rank_files)) < len(rank_files) else [],
        state=_state(program),
        training=_training(program),
        files=dict(sorted(files.items())),
        model=model,
        plan=sources["plan"],
    )


def program_name(program: Program) -> str:
    """What the program is called in the artifact."""
    kind = program.training.part if program.training is not None else None
    return fmt.INFER if kind is None else kind.value or fmt.TRAIN


def _training(program: Program) -> fmt.TrainingRecord | None:
    """The training record, in the manifest of the step's program alone."""
    if program.training is None or program.training.part is not ProgramKind.STEP:
        return None
    guard = "".join(str(value.name) for value in _guards(program))
    return program.training.record().model_copy(update={"guard": guard})


def _guards(program: Program) -> list[ir.Value]:
    """The outputs besides the model's by which ranks decide whether a step is skipped."""
    outputs = {*program.model.graph.outputs}
    given = dict.fromkeys(one.version.value for part in program.parts for one in part.outputs)
    return [value for value in given if value not in outputs]


def _is_made(program: Program, value: ir.Value) -> bool:
    """Whether an input of a microbatch is made by the step itself: its number, or one of the whole batch."""
    if program.schedule is None or any(held.version.value is value for part in program.parts for held in part.inputs):
        return False
    return value.name == NUMBER or any(value.name in made_names(step) for part in program.parts for step in part.steps)


def _scalars(program: Program) -> list[fmt.Port]:
    """What every step of training is given beside the model's inputs."""
    names = dict.fromkeys(name for part in program.parts for name in part.scalars)
    return [
        fmt.Port(name=name, type="tensor(float)", shape=[], ranks=[p.rank for p in program.parts if name in p.scalars])
        for name in names
    ]


def _state(program: Program) -> list[fmt.StateRecord]:
    """One record for each state tensor and layout: its name in rank files, its kind, and the box that each rank holds."""
    found: dict[tuple[str, str, str, tuple[int, ...]], tuple[StateTensor, dict[ShardedValue, list[int]]]] = {}
    for part, ranks in program.alike:
        for one in part.kept:
            layout = one.version.layout
            cut = layout.shards
            key = one.name, one.tensor, one.next, cut
            found.setdefault(key, (one, {}))[1].setdefault(one.version, []).extend(ranks)
    return [_kept(program, first, holders) for first, holders in found.values()]


def _kept(program: Program, first: StateTensor, holders: Mapping[ShardedValue, Sequence[int]]) -> fmt.StateRecord:
    info = program.values[first.version.value]
    assert first.kind != "gradient", "the sums of microbatches' gradients are values of a step"
    part: PackedBox | None = first.version.value.meta.get(PART)
    ranks, boxes = _lying(holders, part)
    shape = info.shape if part is None else part.shape
    return fmt.StateRecord(
        value=first.name,
        next=first.next,
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
    """The ranks that hold a tensor, ascending, and the box of each; None where all hold the whole tensor.

    Ranks that are one grid have their boxes by its layout, so that nothing is made for each.
    """
    whole = part is None and all(copy.layout.is_replicated for copy in holders)
    within = () if part is None else tuple((*span, size) for span, size in zip(part.box, part.shape, strict=True))
    (copy, held), *others = holders.items()
    if not others and _rising(copy.group) and len(held) == len(copy.group):
        return _listed(copy.group), None if whole else Grid(copy.layout.mesh, copy.layout.cuts, within)
    at: dict[int, fmt.Box] = {}
    for copy, held in holders.items():
        grid, places = Grid(copy.layout.mesh, copy.layout.cuts, within), _places(copy.group)
        at |= {rank: grid[places[rank]] for rank in held}
    ranks = sorted(at)
    return ranks, None if whole else [at[rank] for rank in ranks]


@functools.lru_cache(maxsize=1024)
def _listed(group: Group) -> list[int]:
    """One list for all that the ranks of a group hold."""
    return list(group)


@functools.lru_cache(maxsize=1024)
def _rising(group: Group) -> bool:
    return all(one < two for one, two in pairwise(group))


@functools.lru_cache(maxsize=1024)
def _places(group: Group) -> dict[int, int]:
    return {rank: place for place, rank in enumerate(group)}


def _symbol(program: Program, name: str) -> fmt.SymbolRecord:
    return _law(program.symbols[name].facts)


def _law(facts: Facts) -> fmt.SymbolRecord:
    if facts.value is not None:
        return fmt.SymbolRecord(min=facts.value, max=facts.value, divisor=1, remainder=0)
    low = facts.min or 0
    if facts.divisor > 1 and low < facts.divisor + facts.remainder:  # a record's N begins at 1
        return fmt.SymbolRecord(min=low, max=facts.max, divisor=1, remainder=0)
    return fmt.SymbolRecord(min=low, max=facts.max, divisor=facts.divisor, remainder=facts.remainder)


def _port(program: Program, value: ir.Value, held: Sequence[tuple[int, LocalTensor]]) -> fmt.Port:
    info = program.values[value]
    holders: dict[ShardedValue, list[int]] = {}
    for rank, one in held:
        holders.setdefault(one.version, []).append(rank)
    ranks, boxes = _lying(holders) if holders else ([], None)
    return fmt.Port(
        name=value.name or "",
        type=info.type,
        shape=_shape(info.shape),
        ranks=ranks,
        boxes=boxes,
        labels=program.training.labels.get(value.name or "") if program.training and value.is_graph_input() else None,
        ids=looked_up(value) if value.is_graph_input() else [],
    )


def _transfer(program: Program, event: Event) -> fmt.Transfer:
    (source,), (target,) = event.ranks
    return fmt.Transfer(
        tag=event.tag,
        value=event.name,
        source=source,
        target=target,
        type=program.values[event.value].type,
        shape=_shape(event.shape),
        bytes=event.bytes,
        cause=event.cause,
    )


def _given(program: Program) -> dict[int, list[str]]:
    """By tag the names of what ranks give in a collective, where all of them call it alike."""
    found: dict[int, set[tuple[str, ...]]] = {}
    for steps in {id(part.steps): part.steps for part in program.parts}.values():
        for tag, names in _inputs_of_events(steps):
            found.setdefault(tag, set()).add(names)
    return {tag: [*names.pop()] for tag, names in found.items() if len(names) == 1}


def _inputs_of_events(steps: Sequence[RankOp]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Tag and inputs of each event that a rank gives something, in a body those of every call; a copy by the value's own name."""
    own = {step.made: step.source for step in steps if isinstance(step, CopyOp) and len(step.source) < len(step.made)}
    for step in steps:
        if isinstance(step, CommOp) and step.inputs:
            yield step.tag, tuple(own.get(name, name) for name in step.inputs if name)
        elif isinstance(step, TaskCall):
            names = step.names
            for tag, inputs in _inputs_of_events(step.body.steps):
                yield tag + step.microbatch, tuple(names[name] for name in inputs)


def _collective(program: Program, event: Event, sources: Mapping[int, list[str]]) -> fmt.Collective:
    given, made = event.way or (None, None)
    return fmt.Collective(
        tag=event.tag,
        op=event.op_type,
        value=event.name,
        group=event.group,
        type=program.values[event.value].type,
        shape=_shape(event.shape),
        bytes=event.bytes,
        cause=event.cause,
        sources=sources.get(event.tag, []),
        given=_layout(given),
        made=_layout(made),
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
