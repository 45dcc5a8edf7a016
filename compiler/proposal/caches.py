"""Finds caches: the outputs that stay on the ranks that compute them, and the inputs that arrive in the same layout, such as keys and
values.

The law. An output is a cache of an input if it is the input with more, or other, entries along one dim: made of this one input of its type
by ops that move elements alone. Keys and values without an input, those of a first step, are known by their reader: a product of two values
that are both no weights, of four dims or more. Every other output is a result, and goes to rank 0.

    present = Concat(past, Transpose(k))    (batch, heads, past + seq, size) of (batch, heads, past, size)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.program import Typed
from partc.compiler.ops.registry import entry_of
from partc.compiler.plan.pattern import compile_pattern, literal_pattern
from partc.compiler.proposal.linked import Place

_HEADS = 4
_ATTENDING: Mapping[tuple[str, str], Mapping[int, int]] = {
    ("", "Attention"): {1: 4, 2: 5},
    ("com.microsoft", "GroupQueryAttention"): {1: 3, 2: 4},
    ("com.microsoft", "MultiHeadAttention"): {1: 6, 2: 7},
}
"""Maps each op to the output that is a cache and the input that it continues."""


@dataclass(frozen=True)
class Cache:
    """An output that stays where it is made, and the input of which it is the next state, if there is one."""

    present: ir.Value
    past: ir.Value | None = None


def caches(program: Typed) -> list[Cache]:
    """The caches of a model in the order of its outputs; no two of one input."""
    graph = program.model.graph
    fed = [value for value in graph.inputs if not value.is_initializer()]
    pairs: list[Cache] = []
    taken: set[ir.Value] = set()
    for output in graph.outputs:
        sources = [value for value in fed if value in _moved_from(output) and _is_next(program, output, value)]
        if len(sources) == 1 and sources[0] not in taken:
            taken.add(sources[0])
            pairs.append(Cache(output, sources[0]))
        elif _is_attended(program, output):
            pairs.append(Cache(output))
    return pairs


def arriving(found: Iterable[Cache], sharded: Iterable[Place]) -> dict[ir.Value, int]:
    """Maps each input to the dim that is sharded both in it and in its output."""
    cut = {(value.name, dim) for value, dim in sharded}
    dims: dict[ir.Value, int] = {}
    for one in found:
        if one.past is not None:
            for dim in range(len(one.past.shape or ())):
                if (one.past.name, dim) in cut and (one.present.name, dim) in cut:
                    dims.setdefault(one.past, dim)
    return dims


def lengths(found: Iterable[Cache], program: Typed) -> list[str]:
    """The names of the dims along which caches grow: none of them has a record before the first step."""
    dims: dict[str, None] = {}
    for one in found:
        if one.past is not None:
            pairs = zip(program.values[one.past].shape or (), program.values[one.present].shape or (), strict=True)
            dims.update({mine: None for mine, made in pairs if mine != made and isinstance(mine, str)})
    return [dim for dim in dims if dim in program.symbols]


def alike(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """Few patterns for the chosen names: numbers in them become `*` where this matches nothing else among the names."""
    rows: dict[str, list[str]] = {}
    wanted, known = list(chosen), list(names)
    for name in wanted:
        rows.setdefault(_template(name), []).append(name)
    found: list[str] = []
    for template, some in rows.items():
        matches = compile_pattern(template).matches
        whole = len(some) > 1 and {name for name in known if matches(name)} <= {*wanted}
        found += [template] if whole else [literal_pattern(name) for name in some]
    return found


def _template(name: str) -> str:
    """A name with `*` for its numbers."""
    parts = [""]
    for letter in name:
        if letter.isdigit() == parts[-1].isdigit() and parts[-1]:
            parts[-1] += letter
        else:
            parts.append(letter)
    return "".join("*" if part.isdigit() else literal_pattern(part) for part in parts if part)


def _moved_from(output: ir.Value) -> set[ir.Value]:
    """The values without a producer whose elements are moved into an output."""
    seen: set[ir.Value] = set()
    waiting = [output]
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            waiting += _operands(value)
    return {value for value in seen if value.producer() is None}


def _operands(value: ir.Value) -> Iterator[ir.Value]:
    """The operands of its producer of which a value has elements."""
    node = value.producer()
    if node is None:
        return
    attending = _ATTENDING.get((node.domain.replace("ai.onnx", ""), node.op_type), {})
    entry = entry_of(node)
    moves = entry is not None and (entry.moves or entry.work.kernel == "scatter" or entry.op_type in ("Cast", "Where"))
    places = entry.notation.partial if entry is not None and moves and not entry.domain else ()
    if value.index() in attending:
        places = (attending[value.index() or 0],)
    for k, operand in enumerate(node.inputs):
        if operand is not None and (places is None or k in places):
            yield operand


def _is_next(program: Typed, output: ir.Value, value: ir.Value) -> bool:
    """Whether an output has the type of an input and its dims but for one."""
    one, other = program.values[output].shape, program.values[value].shape
    if one is None or other is None or len(one) != len(other) or len(one) < 2 or output.dtype != value.dtype:
        return False
    return sum(mine != yours for mine, yours in zip(one, other, strict=True)) <= 1


def _is_attended(program: Typed, output: ir.Value) -> bool:
    """Whether a product of two values, neither of them a weight, reads an output, through ops that move elements."""
    if output.shape is None or len(output.shape) < _HEADS:
        return False
    constants: set[ir.Value] = set(program.model.graph.initializers.values())
    waiting, seen = [output], {output}
    while waiting:
        value = waiting.pop()
        for node, k in value.uses():
            others = [one for j, one in enumerate(node.inputs) if j != k and one is not None and one not in constants]
            if node.op_type in ("MatMul", "Attention", "Einsum") and others:
                return True
            if any(value is one for out in node.outputs for one in _operands(out)) or node.op_type == "Mul":
                new = [out for out in node.outputs if out not in seen]
                seen.update(new)
                waiting += new
    return False
