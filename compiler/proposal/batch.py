"""A proposal's facts about dims: the batch that it shards, which is the first dim of most inputs; and the minimum sizes that the model
needs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.analysis.shapes import shapes
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Source
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Typed
from partc.compiler.pipeline import run_passes
from partc.compiler.plan.read import parse_plan
from partc.compiler.rewrite.context import attentions
from partc.compiler.start import start


@dataclass
class Batch:
    """The dim that records are counted by: which inputs have it first, what is promised of it, names given to dims without one."""

    inputs: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)


def batch_of(source: Source, dp: int) -> Batch:
    """The batch: the first dim that most inputs have; its symbol is promised to be divisible by `dp`."""
    batch = Batch()
    if dp < 2:
        return batch
    graph = source.model.graph
    tensors = [v for v in graph.inputs if v.name not in graph.initializers and v.shape is not None and len(v.shape)]
    if not tensors:
        raise CompileError(Problem(graph.name or "the model", "no input has a dim that could be the batch"))
    dims = [value.shape[0] for value in tensors if value.shape is not None]
    firsts = [dim if isinstance(dim, int) else dim.value for dim in dims]
    most = collections.Counter(firsts).most_common(1)[0][0]
    for value, first in zip(tensors, firsts, strict=True):
        (batch.inputs if first == most else batch.others).append(name_of(value))
        batch.ranks[name_of(value)] = len(value.shape or ())
    if isinstance(most, int):
        if most % dp:
            fact = f"'{batch.inputs[0]}' has {most} records, which is not divisible by {dp}"
            raise CompileError(
                Problem(batch.inputs[0], fact, help="export the model with a dynamic batch, or choose another --dp")
            )
        return batch
    if most is None:
        most = "batch"
        batch.names = {(name, 0): most for name in batch.inputs}
    batch.symbols[most] = _divided(source.declared.symbols, most, dp)
    return batch


def _divided(symbols: Mapping[str, Symbol], name: str, dp: int, option: str = "--dp") -> Symbol:
    given = symbols.get(name, Symbol())
    try:
        return dataclasses.replace(given, divisor=math.lcm(given.divisor, dp), remainder=given.remainder)
    except ValueError as error:
        fact = f"'{name}' cannot be divisible by {dp}: {error}"
        raise CompileError(Problem(name, fact, help=f"choose another {option}")) from None


def with_tokens(source: Source, program: Typed, batch: Batch, cp: int) -> Batch:
    """Returns the batch with the numbers of tokens of attentions promised to be divisible by `cp`; CompileError if `program` has none."""
    found, lengths = attentions(program)
    if not found:
        law = "an attention is a product with keys, elementwise ops, a Softmax over them, and a product with values"
        name = program.model.graph.name or "the model"
        raise CompileError(Problem(name, "no attention is recognized", law, "leave out --context"))
    known, own = {**source.declared.symbols, **batch.symbols}, dict(batch.symbols)
    for length in lengths:
        if isinstance(length, str) and length in program.symbols:
            own[length] = _divided(known, length, cp, "--context")
    return dataclasses.replace(batch, symbols=own)


def least_sizes(source: Source, name: str) -> tuple[dict[str, Symbol], dict[str, str]]:
    """The model's own symbols with the least sizes that it needs, and why; without these where its shapes cannot be inferred."""
    symbols = dict(source.declared.symbols)
    if not any(isinstance(dim, ir.SymbolicDim) for value in source.model.graph.inputs for dim in value.shape or ()):
        return symbols, {}
    plan = parse_plan(f"ranks: {source.declared.least_ranks}\n", name)
    try:
        program = run_passes(start(dataclasses.replace(source, model=source.model.clone()), plan, name), shapes)
    except CompileError:
        return symbols, {}
    return with_least_sizes(program, symbols, {})


def with_least_sizes(
    program: Typed, symbols: Mapping[str, Symbol], names: Mapping[tuple[str, int], str]
) -> tuple[dict[str, Symbol], dict[str, str]]:
    """The symbols with the least sizes that the model needs, and why, by the names that dims have in a plan, `names` before their own."""
    raised, because = dict(symbols), dict[str, str]()
    for value in program.model.graph.inputs:
        for k, dim in enumerate(value.shape or ()):
            own_name = str(dim if isinstance(dim, int) else dim.value)
            info = program.symbols.get(own_name)
            if info is None or not info.because:
                continue
            name = names.get((name_of(value), k)) or own_name
            own = raised.get(name, Symbol())
            raised[name] = dataclasses.replace(own, min=max(own.min, info.facts.min or 1))
            because[name] = info.because
    return raised, because
