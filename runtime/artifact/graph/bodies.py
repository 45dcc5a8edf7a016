"""Bodies in which ranks communicate: an If or Loop of a rank file, and the same nodes in one list between borders.

    z = Loop <body = (i, on, h) => (on', h') { ... }> (n, c, x)      i, on, h = Begin(n, c, x)   ...   z = End(on', h')
    z = If <then_branch = () => (a) { ... }, else_branch = () => (b) { ... }> (c)
                                              Begin(c)   ...   Otherwise(a)   ...   z = End(b)

The file has the standard's form. All that reads files has the list (`opened`), in which a node has its number in run lists, and a body's
communication stands in the rank's one order. A node has these bodies if its metadata name the group whose ranks run them together, and the
tags of its borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.runtime.artifact.format import (
    BEGIN,
    DOMAIN,
    END,
    GROUP,
    GROUP_OF_BODY,
    KIND,
    OTHERWISE,
    TAG,
    TAGS_OF_BODY,
)
from partc.runtime.artifact.graph.onnx_graph import LARGEST_MODEL, integer_of, metadata_of, text_of
from partc.runtime.files.regular import read_regular

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

BORDERS = (BEGIN, OTHERWISE, END)
_BRANCHES = ("then_branch", "else_branch")
_BODIES = {"If": _BRANCHES, "Loop": ("body",)}


def read_model(file: Path) -> ModelProto:
    """Reads a model without its external weights, bodies in which ranks communicate between borders.

    OSError where the file cannot be read, DecodeError where it is not a model.
    """
    import onnx

    return opened(onnx.load_model_from_string(read_regular(file, LARGEST_MODEL)))


def is_border(node: NodeProto) -> bool:
    """Whether a node is a border of a body."""
    return node.domain == DOMAIN and node.op_type in BORDERS


def opened(model: ModelProto) -> ModelProto:
    """Returns the model with the nodes of such bodies in its main list, between borders; the model itself if it has none."""
    if not any(map(_tags, model.graph.node)):
        return model
    import onnx

    found = onnx.ModelProto()
    found.CopyFrom(model)
    del found.graph.node[:]
    found.graph.node.extend(_listed(model.graph.node, found.graph))
    return found


@dataclass
class _Open:
    """The borders so far of a node with bodies, and the nodes between them."""

    borders: list[NodeProto]
    parts: list[list[NodeProto]]


def closed(nodes: Iterable[NodeProto], types: Mapping[str, ValueInfoProto]) -> tuple[list[NodeProto], set[str]]:
    """Returns nodes with those between borders as bodies, and the names of the values inside; `types` maps values to their types."""
    open_, inside = [_Open([], [[]])], set[str]()
    for node in nodes:
        if not is_border(node):
            open_[-1].parts[-1].append(node)
        elif node.op_type == BEGIN:
            open_.append(_Open([node], [[]]))
        else:
            open_[-1].borders.append(node)
            if node.op_type == OTHERWISE:
                open_[-1].parts.append([])
            else:
                one = open_.pop()
                open_[-1].parts[-1].append(_with_bodies(one, types, inside))
    return open_[0].parts[0], inside


def _with_bodies(frame: _Open, types: Mapping[str, ValueInfoProto], inside: set[str]) -> NodeProto:
    import onnx

    begin, *ends = frame.borders
    kind = text_of(begin, KIND)
    inputs = list(begin.output)
    node = onnx.NodeProto(op_type=kind, name=begin.name, input=begin.input, output=ends[-1].output)
    for word, part, end in zip(_BODIES[kind], frame.parts, ends, strict=True):
        made = {name for inner in part for name in inner.output if name}
        inside.update(made, inputs)
        graph = onnx.GraphProto(name=f"{begin.name}.{word}", node=part)
        graph.input.extend(types[name] for name in inputs)
        graph.output.extend(types[name] for name in end.input)
        graph.value_info.extend(types[name] for name in sorted(made.difference(end.input)) if name in types)
        node.attribute.append(onnx.helper.make_attribute(word, graph))
    node.metadata_props.extend(begin.metadata_props)
    node.metadata_props.add(key=GROUP_OF_BODY, value=text_of(begin, GROUP))
    tags = " ".join(str(integer_of(border, TAG, -1)) for border in frame.borders)
    node.metadata_props.add(key=TAGS_OF_BODY, value=tags)
    return node


def _listed(nodes: Iterable[NodeProto], graph: GraphProto) -> list[NodeProto]:
    """The nodes with those of bodies between borders; their types are added to the graph."""
    listed: list[NodeProto] = []
    for node in nodes:
        tags = _tags(node)
        if not tags:
            listed.append(node)
            continue
        by_name = {one.name: one.g for one in node.attribute}
        bodies = [by_name[word] for word in _BODIES[node.op_type]]
        for body in bodies:
            graph.value_info.extend([*body.input, *body.value_info, *body.output])
        group = metadata_of(node, GROUP_OF_BODY)
        listed.append(_border(node, BEGIN, node.input, [one.name for one in bodies[0].input], tags[0], group))
        for at, body in enumerate(bodies):
            listed += _listed(body.node, graph)
            given = [value.name for value in body.output]
            last = body is bodies[-1]
            made = node.output if last else ()
            listed.append(_border(node, END if last else OTHERWISE, given, made, tags[at + 1], group))
    return listed


def _border(
    node: NodeProto, op_type: str, inputs: Iterable[str], outputs: Iterable[str], tag: int, group: str
) -> NodeProto:
    import onnx

    attributes: dict[str, Any] = {GROUP: group, KIND: node.op_type, TAG: tag}
    name = node.name if op_type == BEGIN else f"{node.name}.{op_type.lower()}"
    border = onnx.helper.make_node(op_type, list(inputs), list(outputs), name, domain=DOMAIN, **attributes)
    kept = (GROUP_OF_BODY, TAGS_OF_BODY)
    border.metadata_props.extend(one for one in node.metadata_props if one.key not in kept)
    return border


def _tags(node: NodeProto) -> list[int]:
    """The tags of the borders of a node with such bodies; none of any other node."""
    if node.domain or node.op_type not in _BODIES:
        return []
    said = {one.key: one.value for one in node.metadata_props}
    names = tuple(one.name for one in node.attribute if one.HasField("g"))
    texts = said.get(TAGS_OF_BODY, "").split()
    sound = sorted(names) == sorted(_BODIES[node.op_type]) and len(texts) == 1 + len(names) and GROUP_OF_BODY in said
    return [int(text) for text in texts] if sound and all(text.isdecimal() for text in texts) else []
