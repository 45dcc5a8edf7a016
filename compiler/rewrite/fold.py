"""Puts the tokens of a model into folded order, in which the work of causal attention is even over ranks.

A dim is cut into 2p chunks, and rank r of p has chunks r and 2p-1-r. The whole dim is permuted so, therefore each rank has one run of it:

    p = 2    natural 0 1 2 3    folded 0 3 | 1 2

Dims of tokens are found by the factors of the op table, from the tokens of inputs on: equal letters are dims that correspond. An op treats
the places of a dim alike if a rank may run it unchanged on any run of the dim: elementwise ops, products, norms; also a Softmax over keys.
Any other op (Range, Trilu, CumSum, a Slice along tokens) gets the natural order, and so does all that it is computed from; its result is
folded where others read it. So positions, masks of positions and shifted labels are right:

    ids -> Gather(fold) -> Embedding -> ...    Range(0, seq) -> Gather(fold) -> LessOrEqual -> mask    ... logits -> Gather(back)

A model whose attention feeds an op that needs the natural order is refused, and one that merges tokens with a dim major to them otherwise
than `joined_tokens.py` does. The chunks of a dim scale with it, so a dim that merges the tokens with dims minor to them is folded, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.ir.graph import CONTEXT, FOLDED, ContextMark, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ir.value_info import Dim, ValueInfo
from partc.compiler.ops.families.shapes.joined import JOINED, TOKENS, is_joined
from partc.compiler.ops.registry import rule_of
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.rewrite.token_dims import At, TokenDims, is_size
from partc.runtime.artifact.format import ORDER
from partc.runtime.artifact.tensors.folded import chunks


def in_folded_order(array: npt.NDArray[Any], ranks: int, dims: Iterable[int]) -> npt.NDArray[Any]:
    """Returns an array with dims in folded order."""
    for dim in dims:
        parts = np.split(array, 2 * ranks, dim)
        array = np.concatenate([parts[chunk] for chunk in chunks(ranks)], dim)
    return array


class Folding:
    """The dims of tokens of a graph, which become folded over `ranks` ranks; `where`: the plan's line.

    `tokens`: maps inputs to their dim of tokens.
    """

    def __init__(
        self, rewriting: Rewriting[Typed], axis: str, ranks: int, where: str, tokens: Mapping[ir.Value, int]
    ) -> None:
        self.work, self.axis, self.ranks, self.where = rewriting, axis, ranks, where
        self.graph = TokenDims(rewriting, {})
        self.rules = self.graph.rules
        self.joined = self.graph.of({joined for joined, _ in self._joined()})
        self.dims = self._dims(tokens)
        self.moved: dict[tuple[ir.Value, bool], ir.Value] = {}
        self.orders: dict[tuple[Dim, bool], ir.Value] = {}

    def fold(self, attentions: Collection[ir.Node]) -> list[ir.Node]:
        """Folds the graph, or returns the ops that need tokens in natural order after `attentions`."""
        natural = self._natural()
        folded = {node for node in self.rules if node not in natural}
        met = [
            value.producer() for node in folded for value in node.inputs if value is not None and value in self.joined
        ]
        if causes := dict.fromkeys(natural[node] for node in (*attentions, *met) if node in natural):
            return [*causes]
        for node in [*self.work.graph]:
            for k, value in enumerate(node.inputs) if node in folded else ():
                if value is not None and value in self.dims and value.producer() not in folded:
                    node.replace_input_with(k, self._reordered(value, node, back=False))
            for out in node.outputs if node in folded else ():
                if out in self.dims and out not in self.joined:
                    out.meta[FOLDED] = self.ranks, self.dims[out]
        for k, value in enumerate(self.work.graph.outputs):
            maker = value.producer()
            if value in self.dims and maker is not None and maker in folded:
                self.work.graph.outputs[k] = self._returned(value, maker)
        return []

    def _dims(self, tokens: Mapping[ir.Value, int]) -> dict[ir.Value, tuple[int, ...]]:
        """Maps each value to its dims that correspond to tokens of an input, joined ones among them."""
        ends, pairs = {self.graph.root(at) for at in tokens.items()}, [*self._joined()]
        count = 0
        while count < (count := len(ends)):
            ends |= {root for pair in pairs if not ends.isdisjoint(pair) for root in pair}
        return self.graph.of(ends)

    def _joined(self) -> Iterator[tuple[At, At]]:
        """Yields a joined dim and the tokens in it, each by the dim that stands for all that correspond."""
        for node, rule in self.rules.items():
            if is_joined(node):
                roots = {letter: self.graph.root(at) for at, letter in self.graph.letters(node, rule)}
                yield roots[JOINED], roots[TOKENS]

    def _natural(self) -> dict[ir.Node, ir.Node]:
        """Maps each node that needs the natural order to the op that does not know another: itself, or one that is computed from it."""
        causes = dict[ir.Node, ir.Node]()
        for node in reversed([*self.rules]):
            if not self.graph.is_alike(node, self.dims):
                causes[node] = node
            for out in node.outputs if node not in causes else ():
                for use in out.uses() if out in self.dims else ():
                    if is_size(use.node):
                        continue
                    if use.node not in self.rules:  # a body
                        causes.setdefault(node, node)
                    elif use.node in causes:
                        causes.setdefault(node, causes[use.node])
        return causes

    def _reordered(self, value: ir.Value, node: ir.Node, *, back: bool) -> ir.Value:
        """Returns a value in the other order, with the nodes that make it before `node`."""
        if (value, back) not in self.moved:
            reordered = value
            for dim in self.dims[value]:
                order = self._order(value, dim, node, back)
                source, reordered = (
                    reordered,
                    self.work.like(value, self.work.free(f"{name_of(value)}.{'back' if back else 'fold'}")),
                )
                if not back:
                    reordered.meta[FOLDED] = self.ranks, tuple(one for one in self.dims[value] if one <= dim)
                gather = self._put(node, "Gather", [source, order], reordered, axis=dim)
                gather.metadata_props[ORDER] = f"{'back' if back else 'fold'} {self.ranks}"
                rows, ids = (rule_of(gather).inputs[k] or "" for k in (0, 1))
                from_input = not back and value.is_graph_input()
                gather.meta[CONTEXT] = ContextMark(
                    self.axis, rows[dim], ids if from_input else "", f"{self.where} context", from_input
                )
            self.moved[value, back] = reordered
        return self.moved[value, back]

    def _returned(self, value: ir.Value, maker: ir.Node) -> ir.Value:
        """Returns an output of the graph in natural order; its name goes from the folded value to it."""
        name, end = name_of(value), [*self.work.graph][-1]
        before = {*self.work.graph}
        leaving = self._reordered(value, end, back=True)
        nodes = [node for node in self.work.graph if node not in before]
        self.work.graph.insert_after(end, nodes)
        value.name, leaving.name = self.work.free(f"{name}.folded"), name
        return leaving

    def _order(self, value: ir.Value, dim: int, node: ir.Node, back: bool) -> ir.Value:
        """Returns the natural places of a dim's entries in folded order, or, with `back`, the reverse; written before `node`."""
        size, table = self.graph.shape(value)[dim], np.array(chunks(self.ranks))
        table = np.argsort(table) if back else table
        if (size, back) in self.orders:
            return self.orders[size, back]
        word = f"{name_of(value)}.{'back' if back else 'fold'}"
        if isinstance(size, int):
            places = np.concatenate([np.split(np.arange(size), len(table))[chunk] for chunk in table])
            self.orders[size, back] = self.work.constant(self.work.free(f"{word}.order"), places)
            return self.orders[size, back]

        def add(
            op_type: str, part: str, *inputs: ir.Value, dims: tuple[Dim, ...] = (size,), entry: str = "", **more: int
        ) -> ir.Value:
            shape = [value.shape[dim] if one is size and value.shape is not None else one for one in dims]
            kind = ir.TensorType(ir.DataType.INT64)
            out = ir.Value(name=self.work.free(f"{word}.{part}"), type=kind, shape=ir.Shape(shape))
            self.work.values[out] = ValueInfo("tensor(int64)", dims, 8)
            if entry:
                out.metadata_props[SYM_DATA_KEY] = json.dumps([entry])
            self._put(node, op_type, inputs, out, **more)
            return out

        def number(part: str, numbers: int | list[int]) -> ir.Value:
            return self.work.constant(self.work.free(f"{word}.{part}"), numbers)

        count = add("Shape", "shape", value, dims=(1,), entry=size, start=dim, end=dim + 1)
        length = add("Div", "length", count, number("chunks", [len(table)]), dims=(1,), entry=f"({size})/{len(table)}")
        end = add("Squeeze", "count", count, number("axis", [0]), dims=(), entry=size)
        natural = add("Range", "places", number("start", 0), end, number("step", 1))
        chunk = add("Gather", "chunk", number("table", [*map(int, table)]), add("Div", "own", natural, length), axis=0)
        begin = add("Mul", "begin", chunk, length)
        self.orders[size, back] = add("Add", "order", begin, add("Mod", "rest", natural, length))
        return self.orders[size, back]

    def _put(self, before: ir.Node, op_type: str, inputs: Collection[ir.Value], out: ir.Value, **more: Any) -> ir.Node:
        node = self.work.put(before, op_type, [*inputs], [out], f".{name_of(out)}", **more)
        node.meta.pop(CONTEXT, None)
        return node
