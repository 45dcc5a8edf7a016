"""The dims of a graph's values that correspond, along equal letters of the op table's rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import onnx_ir as ir
from partc.compiler.ir.program import Typed
from partc.compiler.ir.sized import SIZES
from partc.compiler.ir.value_info import Dim
from partc.compiler.ops.families.neural.ring import is_ring
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.rewrite.rewriting import Rewriting

_SYMMETRIC = ("LogSoftmax", "RingAttention", "Softmax")
"""Ops that treat all entries of a dim alike, although no rank may have a part of it."""
_SIZED = ("ConstantOfShape", "Expand", "ExpertMatMul", "ExpertMatMulNBits", "Gather", "GatherElements", "Gemm", "OneHot", "Reshape",
          "Squeeze", "Unsqueeze")  # fmt: skip
"""Ops whose local form differs from the node in sizes and offsets of other dims alone: each entry of a dim of the output is alike."""

At = tuple[ir.Value, int]
"""A dim of a value."""


class TokenDims:
    """Dims in sets that correspond. `rules`: maps nodes to their rules, but for nodes that read sizes alone; `views` has other rules."""

    def __init__(self, work: Rewriting[Typed], views: Mapping[ir.Node, Rule]) -> None:
        self.work = work
        self.rules = {node: views.get(node) or rule_of(node) for node in work.graph if not is_size(node)}
        self.parents = dict[At, At]()
        for node, rule in self.rules.items():
            by_letter = dict[str, At]()
            for at, letter in self.letters(node, rule):
                if letter != WHOLE:
                    self.parents[self.root(at)] = self.root(by_letter.setdefault(letter, at))
            if is_ring(node) and len(node.inputs) > 3:  # keys of its mask
                query, mask = node.inputs[0], node.inputs[3]
                last = len(self.shape(mask)) - 1
                if query is not None and mask is not None and self.shape(mask)[last] != 1:
                    self.parents[self.root((mask, last))] = self.root((query, 2))

    def root(self, at: At) -> At:
        """Returns the dim that stands for all dims that correspond to one."""
        parents = self.parents
        while (parent := parents.setdefault(at, at)) is not at:
            parents[at], at = parents[parent], parents[parent]
        return at

    def of(self, roots: Collection[At]) -> dict[ir.Value, tuple[int, ...]]:
        """Maps values to those of their dims that correspond to one of the roots."""
        found = dict[ir.Value, tuple[int, ...]]()
        for value, dim in [*self.parents]:
            if self.root((value, dim)) in roots:
                found[value] = tuple(sorted({*found.get(value, ()), dim}))
        return found

    def shape(self, value: ir.Value | None) -> tuple[Dim, ...]:
        """Returns the shape of a value; empty if it is not known."""
        return () if value is None else self.work.values[value].shape or ()

    def letters(self, node: ir.Node, rule: Rule) -> Iterator[tuple[At, str]]:
        """Yields each dim of a node's operands that is not 1, with its letter."""
        sides = (*zip(node.inputs, rule.inputs, strict=False), *zip(node.outputs, rule.outputs, strict=False))
        for value, letters in sides:
            for dim, size in enumerate(self.shape(value) if value is not None else ()):
                if value is not None and size != 1:
                    yield (value, dim), letters[dim] if letters else WHOLE

    def is_alike(self, node: ir.Node, dims: Mapping[ir.Value, Collection[int]]) -> bool:
        """Whether a node treats all places of these dims alike: a rank may run it unchanged on any of them."""
        rule = self.rules[node]
        output_letters = {letter for letters in rule.outputs for letter in letters or ""}
        reduces = node.op_type.startswith("Reduce") and node.domain == ""

        def fits(letter: str) -> bool:
            if letter == WHOLE or letter in rule.replicated:
                return node.op_type in _SYMMETRIC or (reduces and letter != WHOLE)
            if rule.joined:
                return letter in rule.joined[:2] or letter not in rule.joined
            if rule.local is None or reduces:
                return letter not in rule.units
            return node.op_type in _SIZED and letter in output_letters and letter not in rule.units

        return all(fits(letter) for (value, dim), letter in self.letters(node, rule) if dim in dims.get(value, ()))


def is_size(node: ir.Node) -> bool:
    """Whether a node reads its operand's size alone."""
    return node.op_type in SIZES and node.domain in ("", "ai.onnx")
