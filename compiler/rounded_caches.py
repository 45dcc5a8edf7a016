"""Rounds the new keys and values of a decoder whose plan has `generate: {cache: int8}`, with measured scales.

    present = Concat(past, k)     ->     present = Concat(past, rounded(k))           `rewrite/generation/rounding.py`

A scale is that of a channel of a head, for all entries: the largest number that a few hundred tokens have there, and a quarter more, is
127. The tokens are drawn from the whole vocabulary by a fixed seed, and are at positions all over the plan's length, since a rotation moves
numbers from a channel to another one. A number beyond is rounded to the largest one.

onnxruntime runs the model as it is loaded, on weights that are mapped where the file has them in the model's type, else in memory at once.

The source is rewritten before any pass, so `partc verify` compares with the rounded model on one rank, and ranks have the same bits in any
layout: each has its heads' scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.torch.compare_with_torch import free_memory
from partc.compiler.frontend.torch.graph_sessions import GraphSessions, NotRunError
from partc.compiler.ir.graph import name_of
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.rewrite.generation.attended_caches import append_apart
from partc.compiler.rewrite.generation.caches import OPSET, Append, appends_of, ids_of
from partc.compiler.rewrite.generation.encoder import Encoder
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.positions import MASK, ROWS
from partc.compiler.rewrite.generation.rounding import MOST, round_entries
from partc.compiler.rewrite.opset import converted
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.units import size_text

Numbers: TypeAlias = npt.NDArray[np.float32]
_PLACES, _TOKENS, _LONGEST_PAST = 6, 64, 2048
"""The number of parts of a sequence that are measured, the tokens of each, and the longest past before one."""
_MARGIN, _LEAST = 1.25, 2.0**-10
"""A scale in terms of the largest number, and the least one in terms of the largest one of its head."""


def round_caches(source: Source, rules: GenerateRules, name: str) -> Source:
    """The source with rounded keys and values; CompileError where its caches are other ones, or cannot be measured."""
    where, law = rules.where("cache"), "the scales of caches in int8 are measured with the model itself"
    if source.absent:
        raise CompileError(Problem(where, f"{name} has no weights", law, "leave out 'cache', or compile with weights"))
    weights = (value.const_value for value in source.model.graph.initializers.values())
    needed, free = sum(tensor.nbytes for tensor in weights if tensor is not None), free_memory()
    if needed > free:
        fact = f"the weights are {size_text(needed)}, and {size_text(free)} of memory are free"
        raise CompileError(Problem(where, fact, law, "leave out 'cache', or compile on a machine with more memory"))
    model = converted(source.model.clone(), name, OPSET)
    model.opset_imports[""] = max(OPSET, model.opset_imports.get("", OPSET))
    append_apart(model, name)
    if Encoder.of(model.graph, rules, name) is not None:
        raise CompileError(
            Problem(where, f"{name} has an encoder", "caches of a decoder alone are kept in int8", "leave out 'cache'")
        )
    appends = appends_of(model.graph, name, rules.where())
    odd = [one for one in appends if not _is_plain(one)]
    if odd:
        fact = f"'{odd[0].past.name}' is not [batch, heads, entries, size] of floats, with numbers for heads and size"
        raise CompileError(Problem(where, fact, "a scale is that of a channel of a head", "leave out 'cache'"))
    ids = ids_of(model.graph, rules.where())
    graph = GraphSessions(model)
    try:
        if why := graph.refused():
            raise NotRunError(why)
        largest = _largest(graph, ids, appends, rules)
    except NotRunError as error:
        raise CompileError(
            Problem(where, f"onnxruntime cannot run the model: {error}", law, "leave out 'cache'")
        ) from error
    build = NodeBuilder(model.graph, "cache")
    for cache, most in zip(appends, largest, strict=True):
        if not np.isfinite(most).all():
            fact = f"'{cache.present.name}' has numbers that are not finite"
            raise CompileError(Problem(where, fact, law, "leave out 'cache'"))
        new = cache.append.inputs[1]
        assert new is not None
        new.type = cache.past.type
        scale = build.constant(f"{cache.past.name}.scale", _scales(most))
        rounded = round_entries(build, new, scale)
        rounded.type, rounded.shape = new.type, new.shape
        build.put(before=cache.append)
        cache.append.replace_input_with(1, rounded)
    return replace(source, model=model, quantized=True)


def _is_plain(append: Append) -> bool:
    shape, floats = append.past.shape or (), (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    sizes = [shape[k] for k in (1, 3)] if len(shape) == 4 else []
    return (
        bool(sizes)
        and all(isinstance(size, int) for size in sizes)
        and append.axis == 2
        and append.past.dtype in floats
    )


def _scales(largest: Numbers) -> Numbers:
    """The scales [1, heads, 1, size] of the largest numbers [heads, size]."""
    of_head = largest.max(axis=-1, keepdims=True)
    largest = np.maximum(largest, np.where(of_head > 0, of_head, 1) * _LEAST)
    scales: Numbers = (largest * (_MARGIN / MOST)).astype(np.float32)
    return scales[None, :, None]


def _largest(graph: GraphSessions, ids: ir.Value, appends: Sequence[Append], rules: GenerateRules) -> list[Numbers]:
    """For each cache the largest magnitudes of new entries, [heads, size].

    Each part of the sequence has an empty past where positions are an input, else entries of the first part as its past.
    """
    inputs = {str(one.name): one for one in graph.model.graph.inputs}
    sizes = [[int(str((one.past.shape or ())[k])) for k in (1, 3)] for one in appends]
    magnitudes: list[Numbers] = [np.zeros(size, np.float32) for size in sizes]
    entries: list[Numbers] = [np.zeros([1, heads, 0, size], np.float32) for heads, size in sizes]
    tokens, rng = min(_TOKENS, rules.length), np.random.default_rng(0)
    last = rules.length - tokens if ROWS in inputs else min(rules.length - tokens, _LONGEST_PAST)
    for begin in sorted({*np.linspace(0, last, _PLACES).astype(int).tolist()}):
        past = 0 if ROWS in inputs else begin
        feeds: dict[str, Array] = {
            name_of(ids): rng.integers(0, graph.rows(name_of(ids)) or 2, (1, tokens)),
            ROWS: np.arange(begin, begin + tokens)[None],
            MASK: np.ones((1, past + tokens)),
            **{
                name_of(one.past): np.take(held, np.arange(past) % max(1, held.shape[2]), axis=2)
                for one, held in zip(appends, entries, strict=True)
            },
        }
        kinds = {name: value.dtype.numpy() for name, value in inputs.items() if value.dtype is not None}
        try:
            outputs = graph.run(
                {name: array.astype(kinds[name]) for name, array in feeds.items() if name in kinds},
                [name_of(one.present) for one in appends],
            )
        except NotRunError:
            if not begin:
                raise
            break  # longer than the model's sequences: the passes say so
        entries = [array.astype(np.float32) for array in outputs.values()]
        magnitudes = [
            np.maximum(most, np.abs(new[0, :, past:]).max(axis=1))
            for most, new in zip(magnitudes, entries, strict=True)
        ]
    return magnitudes
