"""Inputs of which a rank reads the sizes alone: nobody feeds them, for all ranks agree on the symbols of a step.

    rank 1:  %n = Shape(%past_0) {start: 2, end: 3}     past_0 (batch, 4, past, 8) is fed on rank 0, and past is known everywhere

Not in a program that trains or that is in tasks. What alone tells a symbol is fed where it is read.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.dims.reading import read
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, RankProgram, read_names

SIZES = ("Shape", "Size")


def sized_inputs(program: Program) -> dict[int, frozenset[str]]:
    """By rank the names of the inputs that are not fed there."""
    if program.training is not None or any(part.bodies for part in program.parts):
        return {}
    alone: dict[int, set[str]] = {}
    known: dict[int, set[str]] = {}
    for part in program.parts:
        key = id(part.steps)
        if key not in known:
            known[key] = _for_sizes_alone(part)
        alone[part.rank] = {
            held.name for held in part.inputs if held.name in known[key] and _is_plain(program, held.version.value)
        }
    while True:
        fed = {one.version.value for part in program.parts for one in part.inputs if one.name not in alone[part.rank]}
        told = {dim for value in fed for dim in program.values[value].shape or () if isinstance(dim, str)}
        kept = {
            part.rank: {
                one.name
                for one in part.inputs
                if one.name in alone[part.rank] and _symbols(program, one.version.value) <= told
            }
            for part in program.parts
        }
        if kept == alone:
            return {rank: frozenset(names) for rank, names in alone.items() if names}
        alone = kept


def _for_sizes_alone(part: RankProgram) -> set[str]:
    """The inputs of a program that nothing but Shape and Size reads."""
    inputs = {held.name for held in part.inputs} - {held.name for held in part.outputs}
    for step in part.steps:
        sizes = isinstance(step, ComputeOp) and step.node.op_type in SIZES and step.node.domain in ("", "ai.onnx")
        if not sizes:
            inputs.difference_update(read_names(step))
    return inputs


def _is_plain(program: Program, value: ir.Value) -> bool:
    """Whether a value is a tensor of numbers whose shape is known."""
    info = program.values[value]
    return info.is_tensor and info.shape is not None and info.item_bytes is not None


def _symbols(program: Program, value: ir.Value) -> set[str]:
    """The symbols in the dims of a value."""
    found = set()
    for dim in program.values[value].shape or ():
        if isinstance(dim, str):
            expression = read(dim)
            found |= {dim} if expression is None else {str(symbol) for symbol in expression.free_symbols}
    return found
