"""The states of a decoder: tensors of fixed size that each token replaces, of a state space, a convolution or linear attention.

    present_0_conv = f(past_0_conv, h)    ->    begun = Where(position == 0, 0, state)    next = Where(count > 0, f(begun, h), begun)

The law. A state is an input `past..` with an output `present..` of the same name after that prefix, the same type and the same size; its
dims are the batch and numbers. A slot begins with zeros, and a slot without a token in a step keeps its state. A step has one token of
each sequence, since a padding token would change a state.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.graph import name_of
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.generation.positions import Positions


def states_of(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Maps each state of a decoder to the output that replaces it."""
    outputs, states = {value.name: value for value in graph.outputs}, dict[ir.Value, ir.Value]()
    for value in graph.inputs:
        present = outputs.get(f"present{name_of(value).removeprefix('past')}")
        if present is None or present.dtype != value.dtype or present.shape is None or value.shape is None:
            continue
        batch, *sizes = value.shape
        fits = sizes and not isinstance(batch, int) and all(isinstance(size, int) for size in sizes)
        if fits and [*present.shape[1:]] == sizes:
            states[value] = present
    return states


def renew(
    build: NodeBuilder, state: ir.Value, present: ir.Value, rows: int, positions: Positions
) -> tuple[ir.Value, ir.Value]:
    """Replaces a state by a cache of `rows` rows; returns the cache, and the value that replaces it after a step."""
    graph, kind, sizes = build.graph, state.dtype, [int(str(size)) for size in (state.shape or ())[1:]]
    assert kind is not None
    zeros = ir.tensor(np.broadcast_to(np.zeros((), kind.numpy()), (rows, *sizes)), name=state.name)
    none, cache = build.constant("none", 0), ir.val(state.name, const_value=zeros)
    for reader in [reader for reader, _ in state.uses() if reader.op_type == "Shape"]:
        positions.measure(reader, (rows, *sizes))  # else each stage that needs the batch size would read the state
    graph.inputs.remove(state)
    graph.register_initializer(cache)
    axes = build.constant(f"state_axes_{len(sizes)}", [*range(1, 1 + len(sizes))])
    is_first = build.op("is_first", "Unsqueeze", [build.op("begins", "Equal", [positions.position, none]), axes])
    begun = build.op("begun", "Where", [is_first, build.op("no_state", "Cast", [none], to=kind.value), cache])
    build.put(before=graph[0])
    ir.convenience.replace_all_uses_with(state, begun)
    is_meant = build.op("is_meant", "Unsqueeze", [build.op("has_token", "Greater", [positions.count, none]), axes])
    following = build.op("next_state", "Where", [is_meant, present, begun])
    build.put(after=graph[-1])
    begun.type = following.type = cache.type
    following.name, present.name = present.name, following.name
    graph.outputs.remove(present)
    return cache, following
