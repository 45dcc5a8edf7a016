"""Proves that tokens in folded order meet only ops to which all places of tokens are alike, and only tokens in the same order.

A Gather with the metadata `partc.order` puts the dim of its axis into folded order, or back; its indices are made of that order's table.
From there the checker follows the dim along the letters of the nodes' factors (`artifact/graph/factors.py`), through the forward pass:

    %ids.fold = Gather(%ids, %order)   fold 2      %x = Add(%tokens, %places)   abc,abc->abc      b of both is folded, or b of neither

A Slice with `kept` takes a rank's shard, whose place the layouts prove. A dim without a letter depends on all places of its operand, so the
op must be one that has no order: a Softmax, a sum.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from onnx import ModelProto, NodeProto, numpy_helper
from partc.runtime.artifact.format import DOMAIN, FACTORS, HOP, KEPT_ORDER, ORDER, PHASE, Manifest
from partc.runtime.artifact.graph.factors import WHOLE, Factors, read_factors
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of
from partc.runtime.artifact.graph.rank_constants import constant_of, group_of, is_rank_constant
from partc.runtime.artifact.tensors.folded import chunks
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"
_WITHOUT_ORDER = ("LogSoftmax", "Shape", "Size", "Softmax")
_VIEWS = ("Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze")
"""Ops that change no order; where their factors lack a letter, next to a dim of 1, the order of the result is not known."""
_MADE_IN_ORDER = ("CumSum", "Range", "Trilu")
"""Ops whose result is in natural order, whatever they read."""


def check_orders(manifest: Manifest, models: Mapping[int, ModelProto]) -> Iterator[Violation]:
    """Yields a violation for each op that depends on the places of tokens in folded order, and for each Gather of another order."""
    for file, ranks in manifest.by_file(models).items():
        model = models[ranks[0]]
        if any(metadata_of(node, ORDER) for node in model.graph.node):
            yield from _Orders(file, model, ranks[0], manifest.groups_of(ranks[0])).violations()


Order: TypeAlias = list[bool | None]


class _Orders:
    """The order of dims of a file's values: `folded` or `natural` by dim; values that are absent have an unknown order."""

    def __init__(self, file: str, model: ModelProto, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
        self.file, self.nodes, self.rank, self.groups = file, model.graph.node, rank, groups
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.constants = {one.name: one for one in model.graph.initializer}
        self.sizes = {name: dims for name, (_, dims) in declared_types(model).items() if dims is not None}
        inputs = (*model.graph.input, *model.graph.initializer)
        self.orders: dict[str, Order] = {one.name: [False] * len(self.sizes.get(one.name, ())) for one in inputs}
        """Maps values to whether each of their dims is in folded order; None where it is not known."""

    def violations(self) -> Iterator[Violation]:
        """Yields the violations in the order of the nodes."""
        for node in self.nodes:
            if metadata_of(node, PHASE) or metadata_of(node, HOP) or (node.domain == DOMAIN and not node.input):
                continue
            if fact := self.follow(node):
                yield Violation(self.file, fact, node_title(node), path_of(node), _AGAIN)

    def follow(self, node: NodeProto) -> str:
        """Finds the order of a node's results; returns what is wrong, or an empty text."""
        read_orders = [self.orders.get(name) for name in node.input]
        first = read_orders[0] if read_orders else None
        text = metadata_of(node, ORDER)
        if text and text != KEPT_ORDER:
            word, _, ranks = text.partition(" ")
            axis = integer_of(node, "axis", 0)
            if first is not None and axis < len(first):
                self.orders[node.output[0]] = [word == "fold" if dim == axis else one for dim, one in enumerate(first)]
                if first[axis] is (word == "fold"):
                    there = "folded" if first[axis] else "natural"
                    return f"it puts tokens into {'natural' if word == 'back' else 'folded'} order, and they are in {there} order"
            table = chunks(int(ranks)) if ranks.isdecimal() else []
            table = sorted(range(len(table)), key=table.__getitem__) if word == "back" else table
            return "" if self._is_of(node.input[1], table) else f"its indices are not of the order '{text}'"
        if node.domain == DOMAIN or text:  # the same dims, in other shards
            if text or (first is not None and len(node.input) == len(node.output)):
                self.orders |= {
                    out: list(one) for out, one in zip(node.output, read_orders, strict=False) if one is not None
                }
            return ""
        if node.op_type in _MADE_IN_ORDER and not any(any(one) for one in read_orders if one):
            self.orders |= {out: [False] * len(self.sizes[out]) for out in node.output if out in self.sizes}
            return ""
        return self._pass(node, read_orders)

    def _pass(self, node: NodeProto, read_orders: list[Order | None]) -> str:
        """Follows dims along letters."""
        try:
            factors = read_factors(text) if (text := metadata_of(node, FACTORS)) else _alike(node, read_orders)
        except ValueError:
            return ""  # told with the shards' places
        by_letter = dict[str, tuple[bool, str]]()
        for name, letters, one in zip(node.input, factors.inputs if factors else (), read_orders, strict=False):
            for dim, folded in enumerate(one or ()):
                letter = letters[dim] if letters and dim < len(letters) else WHOLE
                if folded is None or self._size(name, dim) == 1:
                    continue
                if letter == WHOLE:
                    if folded and node.op_type not in (*_WITHOUT_ORDER, *_VIEWS):
                        return self._unaware(node, name, dim)
                    continue
                there, other = by_letter.setdefault(letter, (folded, name))
                if there is not folded and not (self._is_uniform(name) or self._is_uniform(other)):
                    orders = ("folded", "natural") if folded else ("natural", "folded")
                    return f"its operand '{name}' has tokens in {orders[0]} order in dim {dim}, and '{other}' in {orders[1]} order"
                by_letter[letter] = (there or folded, other)
        if factors is None:
            dims = [
                (name, one.index(True))
                for name, one in zip(node.input, read_orders, strict=True)
                if one and True in one
            ]
            return self._unaware(node, *dims[0]) if dims and node.op_type not in (*_WITHOUT_ORDER, *_VIEWS) else ""
        if node.op_type in _WITHOUT_ORDER[1:3]:
            return ""
        if node.op_type == "Reshape" and (factors.outputs[0] or "").count(WHOLE) == 1:
            pairs = zip(read_orders[0] or (), factors.inputs[0] or "", strict=False)
            joined = [folded for folded, letter in pairs if letter == WHOLE]
            if None not in joined:  # tokens and dims that they are joined with
                by_letter[WHOLE] = any(joined), node.input[0]
        for out, letters in zip(node.output, factors.outputs, strict=False):
            if letters is not None:
                rest = read_orders[0] if node.op_type in _WITHOUT_ORDER and read_orders[0] else ()
                self.orders[out] = [
                    rest[dim] if letter == WHOLE and dim < len(rest) else by_letter.get(letter, (None, ""))[0]
                    for dim, letter in enumerate(letters)
                ]
        return ""

    def _unaware(self, node: NodeProto, name: str, dim: int) -> str:
        return f"it reads '{name}', whose tokens are in folded order in dim {dim}, and {node.op_type} depends on the places of tokens"

    def _size(self, name: str, dim: int) -> int | str | None:
        sizes = self.sizes.get(name, ())
        return sizes[dim] if dim < len(sizes) else None

    def _is_uniform(self, name: str) -> bool:
        """Whether a value repeats one element along its dims."""
        maker = self.makers.get(name)
        return maker is not None and maker.op_type in ("ConstantOfShape", "Expand")

    def _is_of(self, name: str, table: list[int]) -> bool:
        """Whether indices are made of an order's table: by arithmetic that looks chunks up in it, or as a constant, whole or a shard."""
        if (indices := self._constant(name)) is not None:
            return any(
                indices == [chunk * run + k for chunk in table for k in range(run)][begin : begin + len(indices)]
                for count in {1, len(table) // 2}
                for run in [len(indices) * count // len(table)]
                for begin in range(0, len(indices) * count, len(indices))
            )
        waiting, seen = [name], set[str]()
        while waiting:
            if self._constant(one := waiting.pop()) == table:
                return True
            maker = self.makers.get(one)
            more = {*(maker.input if maker is not None and maker.op_type != "Shape" else ())} - seen
            seen |= more
            waiting += more
        return False

    def _constant(self, name: str) -> list[int] | None:
        """The elements of a constant vector on the rank; None for other values."""
        if (tensor := self.constants.get(name)) is not None:
            array = numpy_helper.to_array(tensor)
        elif (maker := self.makers.get(name)) is not None and is_rank_constant(maker):
            try:
                array = constant_of(maker, self.groups[group_of(maker)].index(self.rank))
            except (KeyError, ValueError):
                return None  # told with the constants
        else:
            return None
        return [int(number) for number in array] if array.ndim == 1 and array.dtype.kind == "i" else None


def _alike(node: NodeProto, given: list[Order | None]) -> Factors | None:
    """The factors of an Identity, of which files say none."""
    letters = string.ascii_letters[: len(given[0] or ())] if given else ""
    return Factors((letters,), (letters,)) if node.op_type == "Identity" and given[0] is not None else None
