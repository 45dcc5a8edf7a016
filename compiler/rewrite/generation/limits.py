"""What of a plan a decoder cannot meet: a `length` beyond its positions, before a step reads behind a table's end, and unknown tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.declared import Declared
from partc.compiler.ir.graph import name_of
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.rewrite.generation.positions import copies_of


def refuse_beyond_positions(
    graph: ir.Graph, rows: Iterable[ir.Value], tokens: str, declared: Declared, rules: GenerateRules
) -> None:
    """CompileError where the tables that `rows`, the positions of tokens, look up are shorter than the plan's `length`, or the most
    `tokens` that the model declares are fewer.
    """
    said = declared.symbols.get(tokens)
    most, law = declared.decoding.longest, "each token of a sequence has a position of its own"
    limits = [(said.max, f"the model has {said.max} positions", law)] if said is not None and said.max else []
    limits += [(size, f"the table of positions '{name}' has {size}", law) for name, size in _tables(graph, rows)]
    if most:
        changing = f"beyond {most} tokens the frequencies of the model's {declared.decoding.positions} positions change"
        limits = [(most, changing, "the keys in a cache stay as they were rotated"), *limits]
    size, fact, law = min(limits, default=(rules.length, "", ""), key=lambda one: one[0])
    if size < rules.length:
        fact = f"{fact}, and 'length' is {rules.length}"
        raise CompileError(Problem(rules.where("length"), fact, law, f"write length: {size} or less"))


def refuse_unknown_tokens(vocabulary: int, rules: GenerateRules) -> None:
    """CompileError where a sequence is to stop at what is not a token of the model."""
    if outside := [token for token in rules.stop or () if not 0 <= token < vocabulary]:
        fact = (
            f"{', '.join(map(str, outside))} {'is not a token' if len(outside) == 1 else 'are not tokens'} of the model"
        )
        help_ = "write the tokens behind which a sequence ends, or leave out 'stop'"
        raise CompileError(Problem(rules.where("stop"), fact, f"its tokens are 0 to {vocabulary - 1}", help_))


def _tables(graph: ir.Graph, rows: Iterable[ir.Value]) -> Iterator[tuple[str, int]]:
    """The weights of which rows are looked up by positions, each with their number."""
    indices = {copy for value in rows for copy in copies_of(value)}
    for node in graph:
        if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0 or node.inputs[1] not in indices:
            continue
        table = node.inputs[0]
        if table is not None and table.is_initializer() and table.shape is not None and len(table.shape) > 1:
            size = table.shape[0]
            if isinstance(size, int):
                yield name_of(table), size
