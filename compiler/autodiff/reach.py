"""Finds where gradients flow: from the loss back to trainable parameters."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.graph import OF_ALL_TURNS, STOPS_GRADIENT, Reads
from partc.compiler.ir.training import Training
from partc.compiler.ops.registry import stops_gradient


def trained_values(reads: Reads, training: Training) -> set[ir.Value]:
    """The values that change with a trainable parameter; `reads` are those of the graph's nodes, in order."""
    trained = {value for value, how in training.parameters.items() if not how.frozen}
    last = [node.inputs for node in reads if OF_ALL_TURNS in node.meta]
    while True:
        for node, read in reads.items():
            if not stops_gradient(node) and any(value in trained for value in read):
                trained.update(
                    value for value in node.outputs if value.dtype is None or value.dtype.is_floating_point()
                )
        begun = {state for made, state, _ in last if made in trained and state is not None}
        if begun <= trained:
            return trained
        trained |= begun  # a state of a Loop changes with what a turn makes of it


def followed_values(reads: Reads, training: Training) -> set[ir.Value]:
    """The values that torch would follow back to a trainable parameter, through whatever ops but those that a model marks."""
    found = {value for value, how in training.parameters.items() if not how.frozen}
    for node, read in reads.items():
        if STOPS_GRADIENT not in node.metadata_props and not found.isdisjoint(read):
            found.update(node.outputs)
    return found


def flowing(reads: Reads, training: Training) -> set[ir.Node]:
    """The nodes through which a gradient flows from the loss; `reads` are those of the graph's nodes, in order."""
    trained, reaching = trained_values(reads, training), {training.loss}
    passed: set[ir.Node] = set()
    for node, read in reversed(reads.items()):
        if stops_gradient(node) or reaching.isdisjoint(node.outputs):
            continue
        reaching.update(read)
        if not trained.isdisjoint(read):
            passed.add(node)
    return passed
