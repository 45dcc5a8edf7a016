"""Inputs of which a rank reads only the sizes: they are not fed to it, since all ranks agree on the symbols of a step.

    rank 1:  %n = Shape(%past_0) {start: 2, end: 3}     past_0 (batch, 4, past, 8) is fed on rank 0, and past is known everywhere

Does not apply to programs that train or that consist of tasks. An input that is the only one with some symbol is fed where it is read.
"""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir
from partc.compiler.dims.reading import read
from partc.compiler.ir.program import Lowered
from partc.compiler.ir.programs import Compute, RankProgram, Value

SIZES = ("Shape", "Size")


def sized_inputs(program: Lowered) -> dict[int, frozenset[Value]]:
    """Maps each rank to the inputs that are not fed there."""
    if program.training is not None or any(part.bodies for part in program.parts):
        return {}
    alone: dict[int, set[Value]] = {}
    known: dict[Hashable, set[Value]] = {}
    for part in program.parts:
        key = part.share_key
        if key not in known:
            known[key] = _for_sizes_alone(part)
        alone[part.rank] = {
            held.value for held in part.inputs if held.value in known[key] and _is_plain(program, held.version.value)
        }
    while True:
        fed = {one.version.value for part in program.parts for one in part.inputs if one.value not in alone[part.rank]}
        told = {dim for value in fed for dim in program.values[value].shape or () if isinstance(dim, str)}
        kept = {
            part.rank: {
                one.value
                for one in part.inputs
                if one.value in alone[part.rank] and _symbols(program, one.version.value) <= told
            }
            for part in program.parts
        }
        if kept == alone:
            return {rank: frozenset(values) for rank, values in alone.items() if values}
        alone = kept


def _for_sizes_alone(part: RankProgram) -> set[Value]:
    """Returns the inputs of a program that only Shape and Size nodes read."""
    inputs = {held.value for held in part.inputs} - {held.value for held in part.outputs}
    for step in part.steps:
        if not inputs:
            break
        if not isinstance(step, Compute) or not step.is_op(*SIZES):
            inputs.difference_update(step.reads)
    return inputs


def _is_plain(program: Lowered, value: ir.Value) -> bool:
    """Whether a value is a tensor of numbers whose shape is known."""
    info = program.values[value]
    return info.is_tensor and info.shape is not None and info.item_bytes is not None


def _symbols(program: Lowered, value: ir.Value) -> set[str]:
    """The symbols in the dims of a value."""
    found = set()
    for dim in program.values[value].shape or ():
        if isinstance(dim, str):
            expression = read(dim)
            found |= {dim} if expression is None else {str(symbol) for symbol in expression.free_symbols}
    return found
