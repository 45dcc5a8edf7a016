"""`vmap`: turns a function of one record into a function of a batch of records, as in JAX and torch.

    def attend(op, q, k, v):                       # of one record: (tokens, size)
        weights = op.Softmax(op.MatMul(q, op.Transpose(k, perm=[1, 0])), axis=-1)
        return op.MatMul(weights, v)

    y = nn.vmap(nn.vmap(attend))(op, q, k, v)      # over records and heads: (batch, heads, tokens, size)

The function is called once, with values of one record, and its nodes are then rewritten for all records (`batching.py`). It may call
modules, read parameters and call `vmap` itself; values that are not its arguments are the same for all records.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder
from partc.compiler.directives.recorder import calling_line
from partc.compiler.directives.traced import within_vmap
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import take_out
from partc.compiler.nn.batching import Batch, NotBatchedError

Axes: TypeAlias = "int | Sequence[int | None] | None"
_SCOPES = ("pkg.onnxscript.name_scopes", "pkg.onnxscript.class_hierarchy")
_LAW = "an entry for each argument: the dim of its records, or None for one that all records share"


def vmap(f: Callable[..., Any], in_axes: Axes = 0, out_axes: int | Sequence[int] = 0) -> Callable[..., Any]:
    """Returns a function that takes the op builder and batched arguments, and returns the results of `f` for all records.

    `in_axes`: the dim of the records in each argument, or one number for all arguments; None for an argument that all records share.
    `out_axes`: the dim of the records in each result, or one number for all results. Raises CompileError if these do not fit the arguments,
    or if `f` has a node that cannot be computed for several records.
    """
    where = calling_line(sys._getframe(1))

    @functools.wraps(f)
    def of_all(op: OpBuilder, *arguments: Any) -> Any:
        axes = _axes(arguments, in_axes, where)
        size = _size(arguments, axes, where)
        builder = op.builder
        records = [
            argument if axis is None else _record(argument, axis, f"record{k}")
            for k, (argument, axis) in enumerate(zip(arguments, axes, strict=True))
        ]
        ports = [record for record, axis in zip(records, axes, strict=True) if axis is not None]
        graph = ir.Graph(ports, [], nodes=[], opset_imports=dict(builder.graph.opset_imports), name="record")
        inner = GraphBuilder(graph, parent=builder)
        inner._scope_stack = list(builder._scope_stack)
        with within_vmap(where):
            results = f(inner.op, *records)
        several = isinstance(results, list | tuple)
        outputs = list(results) if several else [results]
        batch = Batch(op, size)
        for record, argument, axis in zip(records, arguments, axes, strict=True):
            if axis is not None:
                batch.take(record, _moved(op, argument, axis, 0))
        try:
            for node in graph:
                with _within_module_of(builder, node):
                    batch.node(node)
        except NotBatchedError as error:
            raise CompileError(Problem(where, *error.args)) from None
        places = _out_axes(outputs, out_axes, where)
        joined = [_moved(op, batch.spread(one), 0, place) for one, place in zip(outputs, places, strict=True)]
        for node in reversed(list(graph)):  # what it reads is read by the nodes of all records now
            take_out(graph, node)
        return type(results)(joined) if several else joined[0]

    return of_all


@contextmanager
def _within_module_of(builder: GraphBuilder, node: ir.Node) -> Iterator[None]:
    """A context in which new nodes belong to the module of the traced `node`."""
    names, classes = (ast.literal_eval(node.metadata_props.get(key, "[]")) for key in _SCOPES)
    outside, builder._scope_stack = builder._scope_stack, list(zip(names, classes, strict=True))
    try:
        yield
    finally:
        builder._scope_stack = outside


def _axes(arguments: Sequence[object], in_axes: Axes, where: str) -> list[int | None]:
    """Returns each argument's dim of the records, counted from 0, or None; raises CompileError if `in_axes` does not fit."""
    if isinstance(in_axes, list | tuple):
        if len(in_axes) != len(arguments):
            fact = f"in_axes is {tuple(in_axes)}, and the function is called with {len(arguments)} arguments"
            raise CompileError(Problem(where, fact, _LAW, f"write in_axes={(0,) * len(arguments)}"))
        axes = list(in_axes)
    else:
        axes = [in_axes if isinstance(argument, ir.Value) else None for argument in arguments]
    problems = list(_wrong_axes(arguments, axes, where))
    if not problems and all(axis is None for axis in axes):
        fact = f"in_axes is {in_axes!r}: no argument has records"
        problems.append(
            Problem(where, fact, "the results have as many records as an argument has", "name a dim of one")
        )
    if problems:
        raise CompileError(problems)
    return [
        axis if axis is None else axis % len(_shape(argument)) for argument, axis in zip(arguments, axes, strict=True)
    ]


def _wrong_axes(arguments: Sequence[object], axes: Sequence[object], where: str) -> Iterator[Problem]:
    for k, (argument, axis) in enumerate(zip(arguments, axes, strict=True)):
        if axis is None:
            continue
        if isinstance(axis, bool) or not isinstance(axis, int):
            yield Problem(where, f"in_axes[{k}] is {axis!r}", _LAW, "write a number, or None")
        elif not isinstance(argument, ir.Value) or argument.shape is None:
            fact = (
                f"argument {k} is {argument!r}"
                if not isinstance(argument, ir.Value)
                else f"argument {k} has no known rank"
            )
            yield Problem(where, fact, "records are along a dim of a value", f"write None for in_axes[{k}]")
        elif not -len(argument.shape) <= axis < len(argument.shape):
            rank = len(argument.shape)
            fact = f"in_axes[{k}] is {axis}, and argument {k} has {rank} dim{'s' * (rank != 1)}, {list(argument.shape)}"
            yield Problem(where, fact, f"a dim is from {-rank} to {rank - 1}", "name one that it has, or None")


def _size(arguments: Sequence[Any], axes: Sequence[int | None], where: str) -> int | ir.SymbolicDim:
    """Returns the number of records; raises CompileError if arguments have different numbers."""
    sizes = [
        (k, _shape(value)[axis])
        for k, (value, axis) in enumerate(zip(arguments, axes, strict=True))
        if axis is not None
    ]
    first, size = sizes[0]
    for k, other in sizes[1:]:
        if isinstance(other, int) != isinstance(size, int) or str(other) != str(size):
            fact = (
                f"argument {first} has {size} records along dim {axes[first]}, argument {k} {other} along dim {axes[k]}"
            )
            law = "each record has one part of every argument with records"
            raise CompileError(Problem(where, fact, law, f"correct in_axes, or write None for in_axes[{k}]"))
    return size


def _out_axes(results: Sequence[object], out_axes: int | Sequence[int], where: str) -> list[int]:
    """Returns each result's dim of the records, counted from 0; raises CompileError if `out_axes` does not fit."""
    if wrong := [one for one in results if not isinstance(one, ir.Value)]:
        raise CompileError(
            Problem(where, f"the function returns {wrong[0]!r}", "vmap gives values, or a tuple of them")
        )
    axes = list(out_axes) if isinstance(out_axes, list | tuple) else [out_axes] * len(results)
    if len(axes) != len(results):
        fact = f"out_axes is {tuple(axes)}, and the function returns {len(results)} values"
        raise CompileError(Problem(where, fact, "an entry for each result", f"write out_axes={(0,) * len(results)}"))
    dims_of_results = []
    for k, (axis, value) in enumerate(zip(axes, results, strict=True)):
        rank = len(_shape(value)) + 1
        if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
            fact = (
                f"out_axes[{k}] is {axis!r}, and result {k} has {rank} dim{'s' * (rank != 1)} with that of the records"
            )
            raise CompileError(Problem(where, fact, f"a dim is from {-rank} to {rank - 1}", "name one that it has"))
        dims_of_results.append(axis % rank)
    return dims_of_results


def _shape(value: Any) -> ir.Shape:
    shape: ir.Shape | None = value.shape
    if shape is None:
        raise ValueError(f"'{value.name}' has no known rank, which vmap needs")
    return shape


def _record(value: ir.Value, axis: int, name: str) -> ir.Value:
    """Returns a new value of one record: `value` without its dim `axis`."""
    sizes = [size for k, size in enumerate(_shape(value)) if k != axis]
    return ir.Value(name=name, type=value.type, shape=ir.Shape(sizes))


def _moved(op: OpBuilder, value: ir.Value, source: int, target: int) -> ir.Value:
    """Moves dim `source` of a value to `target`."""
    if source == target:
        return value
    order = [k for k in range(len(_shape(value))) if k != source]
    order.insert(target, source)
    moved: ir.Value = op.Transpose(value, perm=order)
    return moved
