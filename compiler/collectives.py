"""Collectives in a `model.py`: a function that is written for one rank's shards, and the collectives that its ranks call inside it.

    from partc.compiler.collectives import all_reduce, local_map

    def normalized(op, x):                                # x is the shard of one rank
        total = all_reduce(op.ReduceSum(x), axis="dp")
        return op.Div(x, total)

    y = local_map(normalized, in_specs=(("dp", None),), out_specs=("dp", None))(op, x)

Axes are those of the plan's mesh. A spec says of a tensor, per dim, which axis cuts it, as the cuts of `shard` do; None for the whole
tensor: every rank has all of it. The meaning is that of the function run once for each coordinate of the axes, on its shards, and of the
results joined as `out_specs` says; on one rank an axis has one coordinate. A result that a spec leaves uncut along an axis must be the same
along it, which is proven: it is made of whole values and of results of all_reduce, all_gather and broadcast.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.directives.recorder import calling_line
from partc.compiler.directives.traced import within_scope
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import INSIDE
from partc.compiler.ops.families.control.local_map import AXIS_INDEX, COLLECTIVES, ENTER, LEAVE, LINE
from partc.compiler.ops.rule import OWN

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "broadcast",
    "gather",
    "local_map",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send_recv",
]

Axis: TypeAlias = str
Spec: TypeAlias = Sequence[Any] | None
_LAW = 'a spec has one entry for each dim: a mesh axis, a tuple of axes, or None; ("dp", None)'


@dataclass
class _Map:
    """A local map whose function is being called: its axes, and by value inside the axes along which ranks differ."""

    op: OpBuilder
    axes: tuple[str, ...]
    where: str
    key: str
    varying: dict[ir.Value, frozenset[str]] = field(default_factory=dict)


_open: ContextVar[_Map | None] = ContextVar("partc_local_map", default=None)


def local_map(
    fn: Callable[..., Any] | None = None, *, in_specs: Sequence[Spec], out_specs: Any, axes: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function as one of global values: called with `op` first, it runs `fn` on each rank's shards.

    `in_specs` has one spec for each tensor, `out_specs` one, or a list of one for each result. `axes` names further axes that
    `fn` uses. Without `fn` a decorator. Raises CompileError, all violations at once.
    """
    where = calling_line(sys._getframe(1))
    if fn is None:
        return functools.partial(local_map, in_specs=in_specs, out_specs=out_specs, axes=axes)
    several = isinstance(out_specs, list)
    problems: list[Problem] = []
    inputs = [_spec(one, f"in_specs[{k}]", where, problems) for k, one in enumerate(in_specs)]
    outputs = [
        _spec(one, f"out_specs[{k}]", where, problems) for k, one in enumerate(out_specs if several else [out_specs])
    ]
    named = tuple(dict.fromkeys(axis for spec in (*inputs, *outputs) for dim in spec or () for axis in dim)) + tuple(
        axes
    )
    if not named:
        problems.append(
            Problem(where, "local_map names no mesh axis", _LAW, 'cut a tensor by one, or write axes=["dp"]')
        )
    if problems:
        raise CompileError(problems)
    used = tuple(dict.fromkeys(named))

    @functools.wraps(fn)
    def mapped(op: OpBuilder, *arguments: Any) -> Any:
        _check_call(op, arguments, inputs, where)
        graph = op.builder.graph
        scope = ".".join(part for part in op.builder._scope_names()[1:] if part)
        local = _Map(op, used, where, f"{where}|{scope}|{graph.num_nodes()}|{','.join(used)}")
        before = graph.num_nodes()
        name = str(getattr(fn, "__name__", ""))
        with _calling(local), within_scope(op.builder, name if name.isidentifier() else "local_map"):
            shards = [_border(local, ENTER, x, spec) for x, spec in zip(arguments, inputs, strict=True)]
            results = fn(op, *shards)
            values = list(results) if isinstance(results, list | tuple) else [results]
            _follow(local, list(graph)[before:], problems)
            problems.extend(_wrong_results(local, values, outputs))
            if problems:
                raise CompileError(problems)
            left = [_border(local, LEAVE, y, spec) for y, spec in zip(values, outputs, strict=True)]
        for node in list(graph)[before:]:
            node.metadata_props[INSIDE] = local.key
        return left[0] if not isinstance(results, list | tuple) else type(results)(left)

    return mapped


def all_reduce(x: ir.Value, reduce: str = "sum", *, axis: Axis = "") -> ir.Value:
    """On every rank the element-wise sum, max or min of what the ranks along the axis have."""
    if reduce not in ("sum", "max", "min"):
        line = calling_line(sys._getframe(1))
        raise CompileError(Problem(line, f"the reduction is {reduce!r}", help="it is one of 'sum', 'max', 'min'"))
    return _emit("AllReduce", x, axis, reduce=reduce)


def all_gather(x: ir.Value, dim: int = 0, *, axis: Axis = "") -> ir.Value:
    """On every rank what all ranks along the axis have, joined along `dim`."""
    return _emit("AllGather", x, axis, dim=dim)


def reduce_scatter(x: ir.Value, dim: int = 0, *, axis: Axis = "") -> ir.Value:
    """The sum of what the ranks have, of which each gets its shard along `dim`."""
    return _emit("ReduceScatter", x, axis, dim=dim)


def all_to_all(x: ir.Value, split_dim: int, concat_dim: int, *, axis: Axis = "") -> ir.Value:
    """A shard along `split_dim` to each rank, in order; what comes is joined along `concat_dim`."""
    return _emit("AllToAll", x, axis, dim=split_dim, to=concat_dim)


def broadcast(x: ir.Value, root: int = 0, *, axis: Axis = "") -> ir.Value:
    """On every rank what the `root`-th along the axis has."""
    return _emit("Broadcast", x, axis, root=root)


def reduce(x: ir.Value, root: int = 0, *, axis: Axis = "") -> ir.Value:
    """On the `root`-th rank the sum of what all have; zeros on the others."""
    return _emit("Reduce", x, axis, root=root)


def gather(x: ir.Value, dim: int = 0, root: int = 0, *, axis: Axis = "") -> ir.Value:
    """On the `root`-th rank what all have, joined along `dim`; zeros of that shape on the others."""
    return _emit("Gather", x, axis, dim=dim, root=root)


def scatter(x: ir.Value, dim: int = 0, root: int = 0, *, axis: Axis = "") -> ir.Value:
    """On each rank its shard, along `dim`, of what the `root`-th has."""
    return _emit("Scatter", x, axis, dim=dim, root=root)


def send_recv(x: ir.Value, pairs: Sequence[tuple[int, int]], *, axis: Axis = "") -> ir.Value:
    """What the first of a pair has, on the second; zeros where nothing comes. No rank sends, or gets, twice."""
    line = calling_line(sys._getframe(1))
    if isinstance(pairs, str) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        problem = Problem(line, f"send_recv: pairs is {pairs!r}", help="write send_recv(x, [(0, 1)], axis='dp')")
        raise CompileError(problem)
    for who, places in (("sends", [a for a, _ in pairs]), ("gets a value", [b for _, b in pairs])):
        if twice := [place for k, place in enumerate(places) if place in places[:k]]:
            law = "a rank sends one value and gets one"
            raise CompileError(
                Problem(line, f"send_recv: place {twice[0]} {who} twice", law, "send again in a call of its own")
            )
    return _emit("SendRecv", x, axis, sources=[a for a, _ in pairs], targets=[b for _, b in pairs])


def axis_index(axis: Axis) -> ir.Value:
    """The rank's place along the axis, a number of int64."""
    return _emit(AXIS_INDEX, None, axis)


def _emit(op_type: str, x: ir.Value | None, axis: str, **attributes: Any) -> ir.Value:
    local, line = _open.get(), calling_line(sys._getframe(2))
    name = sys._getframe(1).f_code.co_name
    if local is None:
        fact, law = f"{name} is called outside of a local map", "a collective takes the shards of ranks"
        raise CompileError(Problem(line, fact, law, "call it in a function that `local_map` runs"))
    for key, operand in attributes.items():
        if key in ("dim", "to", "root") and (isinstance(operand, bool) or not isinstance(operand, int)):
            fact, law = (
                f"{name}: a dim or root is {operand!r}",
                "dims and roots are integers, an axis is given by its name",
            )
            raise CompileError(Problem(line, fact, law, f"write {name}(x, ..., axis={axis or operand!r})"))
    if not axis:
        raise CompileError(
            Problem(line, f"{name}: no axis is given", help=f"write {name}(..., axis={local.axes[0]!r})")
        )
    if axis not in local.axes:
        law = f"the local map at {local.where} has {', '.join(repr(known) for known in local.axes)}"
        raise CompileError(
            Problem(line, f"{name}: no axis '{axis}' here", law, f'write axes=["{axis}"] there, or another axis here')
        )
    if x is not None and not isinstance(x, ir.Value):
        raise CompileError(Problem(line, f"{name} takes a tensor, but got {x!r}"))
    attributes = {key: value for key, value in attributes.items() if value != []}
    operand = [] if x is None else [x]
    made: ir.Value = getattr(local.op, op_type)(*operand, _domain=OWN, _version=1, axis=axis, size=1, **attributes)
    node = made.producer()
    assert node is not None
    node.metadata_props[LINE] = line
    return made


def _border(local: _Map, op_type: str, x: ir.Value, spec: tuple[tuple[str, ...], ...] | None) -> ir.Value:
    said = {"spec": [",".join(dim) for dim in spec]} if spec else {}
    crossed: ir.Value = getattr(local.op, op_type)(x, _domain=OWN, _version=1, axes=list(local.axes), **said)
    node = crossed.producer()
    assert node is not None
    node.metadata_props[LINE] = local.where
    rank = len(spec) if spec is not None else len(x.shape) if x.shape is not None else None
    crossed.type, crossed.shape = x.type, None if rank is None else ir.Shape([None] * rank)
    if op_type == ENTER:
        local.varying[crossed] = frozenset(axis for dim in spec or () for axis in dim)
    return crossed


def _follow(local: _Map, nodes: Sequence[ir.Node], problems: list[Problem]) -> None:
    """Along which axes ranks differ in what nodes make; what they read from outside enters as an argument."""
    inside = {out for node in nodes for out in node.outputs}
    reported: set[ir.Value] = set()
    for node in nodes:
        axes: frozenset[str] = frozenset()
        for value in node.inputs:
            if value is None:
                continue
            maker = value.producer()
            outside = value.is_graph_input() or (
                value not in inside and maker is not None and maker.op_type != "Constant"
            )
            if outside and node.op_type != ENTER and value not in reported:
                reported.add(value)
                fact = f"{node.op_type} reads '{value.name}', which is made outside of the local map"
                law, help = "inside, a value is one rank's", "hand it in as an argument, with a spec"
                problems.append(Problem(local.where, fact, law, help))
            axes |= local.varying.get(value, frozenset())
        if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
            problems.append(
                Problem(
                    local.where, f"{node.op_type} is called in a local map", "its ops have no bodies", "call it outside"
                )
            )
        axis = node.attributes.get_string("axis", "") if node.domain == OWN else ""
        if node.domain == OWN and node.op_type in COLLECTIVES:
            axes = axes - {axis} if COLLECTIVES[node.op_type].same else axes | {axis}
        elif node.domain == OWN and node.op_type == AXIS_INDEX:
            axes |= {axis}
        elif node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial"):
            axes = frozenset(local.axes)
        for out in node.outputs:
            local.varying.setdefault(out, axes)


def _wrong_results(
    local: _Map, values: Sequence[Any], specs: Sequence[tuple[tuple[str, ...], ...] | None]
) -> Iterator[Problem]:
    if len(values) != len(specs):
        yield Problem(local.where, f"out_specs has {len(specs)} specs, and the function gives {len(values)} results")
        return
    for k, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if not isinstance(value, ir.Value):
            yield Problem(local.where, f"result {k} is {value!r}, which is not a value of the graph")
            continue
        if spec is not None and value.shape is not None and len(value.shape) != len(spec):
            yield Problem(
                local.where, f"out_specs[{k}] has {len(spec)} entries, and the result {len(value.shape)} dims", _LAW
            )
        cut = {axis for dim in spec or () for axis in dim}
        if missing := sorted(local.varying.get(value, frozenset()) - cut):
            fact = f"result {k} may differ along '{missing[0]}', and its spec does not cut it by '{missing[0]}'"
            law = "a result that is not cut along an axis is the same there"
            yield Problem(
                local.where, fact, law, f"all_reduce, all_gather or broadcast it, or name '{missing[0]}' in its spec"
            )


def _check_call(
    op: object, arguments: Sequence[object], specs: Sequence[tuple[tuple[str, ...], ...] | None], where: str
) -> None:
    problems = []
    if not isinstance(op, OpBuilder):
        law = "what it runs is traced: its first argument is the op builder of forward"
        problems.append(Problem(where, "a local map is called without the op builder", law, "call it with op first"))
    elif op.builder.parent is not None:
        problems.append(Problem(where, "a local map is called in a body of If, Loop or Scan", help="call it outside"))
    if _open.get() is not None:
        problems.append(
            Problem(where, "a local map is called within another", "local maps do not nest", "call the function itself")
        )
    if len(arguments) != len(specs):
        fact = f"in_specs has {len(specs)} specs, and the call gives {len(arguments)} tensors"
        problems.append(Problem(where, fact, help="write one for each, None for a whole one"))
    for k, x in enumerate(arguments):
        spec = specs[k] if k < len(specs) else None
        if not isinstance(x, ir.Value):
            problems.append(Problem(where, f"argument {k} is {x!r}, which is not a value of the graph"))
        elif spec is not None and x.shape is not None and len(x.shape) != len(spec):
            fact = f"in_specs[{k}] has {len(spec)} entries, and the tensor {len(x.shape)} dims"
            problems.append(Problem(where, fact, _LAW))
    if problems:
        raise CompileError(problems)


def _spec(spec: Spec, name: str, where: str, problems: list[Problem]) -> tuple[tuple[str, ...], ...] | None:
    if spec is None:
        return None
    dims: list[tuple[str, ...]] = []
    wrong = isinstance(spec, str | Mapping) or not isinstance(spec, Sequence)
    for entry in () if wrong else spec:
        names = (
            ()
            if entry is None
            else (entry,)
            if isinstance(entry, str)
            else tuple(entry)
            if isinstance(entry, tuple)
            else (0,)
        )
        wrong = wrong or not all(isinstance(one, str) and one.isidentifier() for one in names)
        dims.append(names)
    flat = [axis for dim in dims for axis in dim]
    if wrong or len(set(flat)) < len(flat):
        problems.append(Problem(where, f"{name} is {spec!r}", _LAW, "name an axis once in a spec"))
    return tuple(dims)


@contextmanager
def _calling(one: _Map) -> Iterator[None]:
    token = _open.set(one)
    try:
        yield
    finally:
        _open.reset(token)
