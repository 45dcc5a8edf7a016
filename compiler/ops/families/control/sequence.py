"""Sequences, optionals and strings, which are never sharded, and the reversal of sequences that are in one tensor."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.families.shapes.concat import but_axes
from partc.compiler.ops.node import axis_of, rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule

op(
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceMap",
    "SplitToSequence",
    "ConcatFromSequence",
    why="a sequence has no dims",
    rounds="exact",
)


op("SequenceLength", why="a sequence has no dims", stops_gradient=True)


op("Optional", "OptionalGetElement", why="an optional has no dims")


op("OptionalHasElement", why="an optional has no dims", stops_gradient=True)


op(
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "RegexFullMatch",
    why="strings do not travel between ranks",
    stops_gradient=True,
)


op("TfIdfVectorizer", why="its input is a list of words", stops_gradient=True)


reverse_sequence = op(
    "ReverseSequence",
    factors="bt,b->bt",
    linear="joint",
    partial=(0,),
    remarks="the time axis is replicated",
    precision="follow",
    kernel="layout",
)


@reverse_sequence.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    letters = but_axes(rank, (axis_of(node, rank, 0, "time_axis"),))
    batch = letters[axis_of(node, rank, 1, "batch_axis")]
    return Rule((letters, batch), (letters,))


@reverse_sequence.gradient
def _(g: GradientBuilder, dy: str, x: str, lengths: str) -> str:
    """dX = dY reversed once more."""
    axes = {name: g.attribute(name) for name in ("batch_axis", "time_axis") if name in g.node.attributes}
    return str(g.ReverseSequence(dy, lengths, **axes))
