"""Proves that nodes that are one function have one gradient: in equal layers, on whichever ranks and stages they are.

The nodes of a file that have one source are a function: their ops, attributes, the constants and the types of what they read and make, and
how they are cut. Its gradient is made of the nodes of the backward pass that have that source. Two gradients are compared where they read
the same places of equal functions and make the same types; which gradients are asked of a function, and what is shared with another node,
may differ, and then nothing is said.

    layers.0.gelu: Gelu(x)    g * (0.5 * (1 + Erf(x * 0.7071)) + ...)
    layers.1.gelu: Gelu(y)    h * (0.6 * (1 + Erf(y * 0.7071)) + ...)     another constant: one of them is wrong
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partc.runtime.artifact.format import CUT, PHASE
from partc.runtime.artifact.graph.onnx_graph import metadata_of, node_title, source_path
from partc.runtime.checker.subject import CONSTANT, NamedNode
from partc.runtime.errors import Violation

_BACKWARD = "backward"


@dataclass
class Gradient:
    """The gradient of a function in the first file that has it."""

    source: str
    file: str
    nodes: Counter[Hashable]


def check_gradients(
    nodes: Iterable[NamedNode], known: dict[Hashable, Gradient], integers: Mapping[str, bytes]
) -> Iterator[Violation]:
    """Gradients of a file's nodes that differ from those of equal functions; `known` are those of files that have been looked at.

    `integers`: the numbers of the file's own tensors of integers, such as the bounds of a Slice, which the model may have as weights.
    """
    functions = defaultdict[str, tuple[list[NamedNode], list[NamedNode]]](lambda: ([], []))
    for one in nodes:
        phase = metadata_of(one.node, PHASE)
        if source_path(one.node) and phase in ("", _BACKWARD):
            functions[source_path(one.node)][phase == _BACKWARD].append(one)
    for source, (forward, backward) in functions.items():
        if forward and backward and not _is_number(forward[-1]):
            yield from _compare(source, forward, backward, known, integers)


def _compare(
    source: str,
    forward: Sequence[NamedNode],
    backward: Sequence[NamedNode],
    known: dict[Hashable, Gradient],
    integers: Mapping[str, bytes],
) -> Iterator[Violation]:
    types = forward[0].types
    places: dict[str, int] = {}
    for one in forward:
        for name in (*one.node.input, *one.node.output):
            places.setdefault(name, len(places))
    function = tuple(
        (
            _content(one, integers),
            *((places[name], str(types.get(name))) for name in (*one.node.input, *one.node.output)),
            _sharded(one),
        )
        for one in forward
    )
    made = [
        ((tuple((places.get(name, -1), str(types.get(name))) for name in (*one.node.input, "", *one.node.output))), one)
        for one in backward
    ]
    contents: dict[Hashable, NamedNode] = {(form, _content(one, integers)): one for form, one in made}
    nodes = Counter[Hashable]((form, _content(one, integers)) for form, one in made)
    own = Gradient(source, forward[0].file, nodes)
    first = known.setdefault((function, frozenset(Counter(form for form, _ in made).items())), own)
    for other in nodes - first.nodes:
        there = f"'{first.source}'" + (f" in {first.file}" if first.file != own.file else "")
        fact = f"it is another node than in the gradient of {there}, and both are gradients of one function"
        yield Violation(own.file, fact, node_title(contents[other].node), source, "compile the model again")
        return


def _is_number(one: NamedNode) -> bool:
    """Whether a node makes one number, such as a loss, whose gradient begins with how much it counts."""
    types = (one.types.get(name) for name in one.node.output)
    return all(isinstance(each, tuple) and each[1] == [] for each in types)


def _content(one: NamedNode, integers: Mapping[str, bytes]) -> Hashable:
    """What a node computes of its operands."""
    operands = zip(one.node.input, one.operands, strict=False)
    constants = tuple(origin if origin[0] is CONSTANT else integers.get(name) for name, origin in operands)
    return one.node.domain, one.node.op_type, frozenset(one.attributes.items()), constants


def _sharded(one: NamedNode) -> tuple[str, ...]:
    """The factors that are cut, without what has cut them."""
    return tuple(part.partition(" by ")[0] for part in metadata_of(one.node, CUT).split(", "))
