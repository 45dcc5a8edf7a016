"""The manifest of a program: what the runtime and `partc check` know of an artifact beside the rank files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import onnx_ir as ir
from partc.compiler.dims.facts import Facts
from partc.compiler.layouts.layout import Layout
from partc.compiler.program import PART, Comm, Event, Group, Held, Kept, PartOf, Program, Shape
from partc.compiler.training.training import Part
from partc.runtime import format as fmt


def manifest_of(
    program: Program,
    files: Mapping[str, fmt.FileRecord],
    sources: Mapping[str, fmt.SourceRecord | None],
    programs: Sequence[str],
) -> fmt.Manifest:
    """The index of the artifact whose files are these; `programs` are the ranks' files."""
    model = sources["model"]
    assert model is not None
    given = _given(program)
    return fmt.Manifest(
        format=1,
        partc=version("partc"),
        ranks=program.plan.ranks,
        symbols={name: _symbol(program, name) for name in sorted(program.symbols)},
        inputs=[
            *(
                _port(
                    program,
                    value,
                    [(p.rank, one) for p in program.parts for one in p.inputs if one.copy.value is value],
                )
                for value in program.model.graph.inputs
            ),
            *_scalars(program),
        ],
        outputs=[
            _port(
                program, value, [(p.rank, one) for p in program.parts for one in p.outputs if one.copy.value is value]
            )
            for value in (*program.model.graph.outputs, *_guards(program))
        ],
        transfers=[_transfer(program, event) for event in program.events if event.op_type == fmt.SEND],
        groups={name: [list(ranks) for ranks in sets] for name, sets in program.groups.items()},
        collectives=[_collective(program, event, given) for event in program.events if event.op_type != fmt.SEND],
        programs=list(programs) if len(set(programs)) < len(programs) else [],
        state=_state(program),
        training=_training(program),
        files=dict(sorted(files.items())),
        model=model,
        plan=sources["plan"],
    )


def _training(program: Program) -> fmt.TrainingRecord | None:
    """How it is trained, of the program that the others are inside of."""
    if program.training is None or program.training.part is not Part.STEP:
        return None
    symbols = {name: _law(info.whole) for name, info in sorted(program.symbols.items()) if info.whole is not None}
    guard = "".join(str(value.name) for value in _guards(program))
    return program.training.record().model_copy(update={"symbols": symbols, "guard": guard})


def _guards(program: Program) -> list[ir.Value]:
    """What ranks give besides the outputs of the model: by what they see whether a step changes anything."""
    outputs = {*program.model.graph.outputs}
    given = dict.fromkeys(one.copy.value for part in program.parts for one in part.outputs)
    return [value for value in given if value not in outputs]


def _scalars(program: Program) -> list[fmt.Port]:
    """What every step of training is given beside the model's inputs."""
    names = dict.fromkeys(name for part in program.parts for name in part.scalars)
    return [
        fmt.Port(name=name, type="tensor(float)", shape=[], ranks=[p.rank for p in program.parts if name in p.scalars])
        for name in names
    ]


def _state(program: Program) -> list[fmt.StateRecord]:
    """What ranks keep, one record for each name in rank files, what it holds, and into which pieces it is cut."""
    found: dict[tuple[str, str, str, tuple[int, ...]], list[tuple[int, Kept]]] = {}
    for part in program.parts:
        for one in part.kept:
            layout = one.held.copy.layout
            cut = tuple(layout.pieces(dim) for dim in range(len(layout.cuts)))
            found.setdefault((one.held.name, one.tensor, one.next, cut), []).append((part.rank, one))
    return [_kept(program, name, tensor, following, held) for (name, tensor, following, _), held in found.items()]


def _kept(
    program: Program, name: str, tensor: str, following: str, held: Sequence[tuple[int, Kept]]
) -> fmt.StateRecord:
    first = held[0][1]
    info = program.values[first.held.copy.value]
    part: PartOf | None = None if first.kind == "gradient" else first.held.copy.value.meta.get(PART)
    whole = part is None and all(one.held.copy.layout.is_whole for _, one in held)
    boxes = [] if whole else [_box(replace(one.held, index=one.held.copy.group.index(rank))) for rank, one in held]
    shape = info.shape if part is None else part.shape
    return fmt.StateRecord(
        value=name,
        next=following,
        tensor=tensor,
        kind=first.kind,
        type=info.type,
        shape=[dim for dim in shape or () if isinstance(dim, int)],
        ranks=[rank for rank, _ in held],
        boxes=None if whole else [box if part is None else _within(part, box) for box in boxes],
        parameter=first.parameter,
        initial=first.initial,
    )


def _symbol(program: Program, name: str) -> fmt.SymbolRecord:
    return _law(program.symbols[name].facts)


def _law(facts: Facts) -> fmt.SymbolRecord:
    if facts.value is not None:
        return fmt.SymbolRecord(min=facts.value, max=facts.value, divisor=1, remainder=0)
    low = facts.min or 0
    if facts.divisor > 1 and low < facts.divisor + facts.remainder:  # a record's N begins at 1
        return fmt.SymbolRecord(min=low, max=facts.max, divisor=1, remainder=0)
    return fmt.SymbolRecord(min=low, max=facts.max, divisor=facts.divisor, remainder=facts.remainder)


def _port(program: Program, value: ir.Value, held: Sequence[tuple[int, Held]]) -> fmt.Port:
    info = program.values[value]
    whole = all(one.copy.layout.is_whole for _, one in held)
    boxes = None if whole else [_box(one) for _, one in held]
    return fmt.Port(
        name=value.name or "",
        type=info.type,
        shape=_shape(info.shape),
        ranks=[r for r, _ in held],
        boxes=boxes,
        labels=program.training.labels.get(value.name or "") if program.training and value.is_graph_input() else None,
    )


def _box(held: Held) -> list[list[int]]:
    layout = held.copy.layout
    return [[number, number + 1, layout.pieces(dim)] for dim, number in enumerate(layout.piece(held.index))]


def _within(part: PartOf, box: list[list[int]]) -> list[list[int]]:
    """A box of a part, as one of the packed whole."""
    found = []
    for (start, stop), size, (begin, end, pieces) in zip(part.box, part.shape, box, strict=True):
        edges = [start * pieces + (stop - start) * edge for edge in (begin, end)]
        shared = math.gcd(*edges, size * pieces)
        found.append([*(edge // shared for edge in edges), size * pieces // shared])
    return found


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
        for step in steps:
            if isinstance(step, Comm) and step.inputs:
                found.setdefault(step.tag, set()).add(step.inputs)
    return {tag: [*names.pop()] for tag, names in found.items() if len(names) == 1}


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
        ranks=fmt.order_text(group),
        mesh=list(layout.mesh),
        cuts=[list(axes) for axes in layout.cuts],
        partial=list(layout.partial),
    )


def _shape(shape: Shape | None) -> fmt.Shape:
    return None if shape is None else list(shape)
