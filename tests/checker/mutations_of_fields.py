"""Mutations of any field: of the manifest, of communication nodes, of what files say of themselves, of weights' headers."""

from __future__ import annotations

import json
from collections.abc import Callable

from mutations_of_calls import Draft
from odd_values import FLOATS, INTS, change
from onnx import AttributeProto, NodeProto
from partc.runtime.artifact.format import CUT


def field(section: str | None = None) -> Callable[[Draft], bool]:
    """Any field of the manifest, or of one section of it, such as `training` or `state`."""

    def mutate(draft: Draft) -> bool:
        if section is not None and not draft.manifest.get(section):
            return False
        before = json.dumps(draft.manifest)
        change(draft.chance, draft.manifest, *([] if section is None else [section]))
        return json.dumps(draft.manifest) != before

    return mutate


def call_attribute(draft: Draft) -> bool:
    """Any attribute of a communication node of one file is another one, or away."""
    nodes = [node for _, node in draft.calls() if node.attribute]
    if not nodes:
        return False
    node = draft.chance.choice(nodes)
    found = draft.chance.choice(list(node.attribute))
    before = found.SerializeToString(deterministic=True)
    match found.type:
        case _ if draft.chance.random() < 0.1:
            node.attribute.remove(found)
            return True
        case AttributeProto.INT:
            found.i = draft.chance.choice([found.i + 1, found.i - 1, *INTS])
        case AttributeProto.INTS:
            numbers = list(found.ints) or [0]
            numbers[draft.chance.randrange(len(numbers))] += draft.chance.choice([-1, 1, 2])
            found.ints[:] = numbers
        case _:
            found.s = draft.chance.choice(
                [b"max", b"min", b"sum", b"", b"\xff", *(name.encode() for name in draft.manifest["groups"])]
            )
    return found.SerializeToString(deterministic=True) != before


def _cut_node(draft: Draft) -> NodeProto | None:
    """A node of one of several files, which is sharded over their ranks: what all ranks run alike no file can contradict."""
    file = draft.file()
    others = {
        name
        for other, model in draft.models.items()
        if other != file
        for node in model.graph.node
        for name in node.output
    }
    nodes = [
        node
        for node in draft.models[file].graph.node
        if any(one.key == CUT for one in node.metadata_props) and not others.isdisjoint(node.output)
    ]
    return draft.chance.choice(nodes) if nodes else None


def operand(draft: Draft) -> bool:
    """A node that is cut reads something else on the ranks of one file."""
    node = _cut_node(draft)
    if node is None or not node.input:
        return False
    at = draft.chance.randrange(len(node.input))
    names = [
        name
        for model in draft.models.values()
        for one in model.graph.node
        for name in one.input
        if name != node.input[at]
    ]
    node.input[at] = draft.chance.choice(sorted({*names}))
    return True


def another_op(draft: Draft) -> bool:
    """A node that is cut is another one on the ranks of one file."""
    node = _cut_node(draft)
    if node is None:
        return False
    alike = [("Tanh", "Relu", "Sigmoid", "Exp"), ("Add", "Sub", "Mul", "Div"), ("ReduceSum", "ReduceMean", "ReduceMax")]
    others = [op for ops in alike if node.op_type in ops for op in ops if op != node.op_type]
    if not others:
        return False
    node.op_type = draft.chance.choice(others)
    return True


def attribute(draft: Draft) -> bool:
    """A node that is cut has another attribute on the ranks of one file."""
    node = _cut_node(draft)
    if node is None or not node.attribute:
        return False
    found = draft.chance.choice(list(node.attribute))
    before = found.SerializeToString(deterministic=True)
    if found.type == AttributeProto.INT:
        found.i = draft.chance.choice([1 - found.i, *INTS])
    elif found.type == AttributeProto.FLOAT:
        found.f = draft.chance.choice([2 * found.f, *FLOATS[:4]])
    return found.SerializeToString(deterministic=True) != before


def said_of_itself(draft: Draft) -> bool:
    """A rank file says that it is another's, or a weight that it is another shard."""
    model = draft.models[draft.file()]
    entries = [entry for tensor in model.graph.initializer for entry in tensor.metadata_props] + list(
        model.metadata_props
    )
    if not entries:
        return False
    entry = draft.chance.choice(entries)
    entry.value = draft.chance.choice(["0", "1", "v", "w[0:6, 0:5]", "0" * 16, entry.value + "0"])
    return True


def header(draft: Draft) -> bool:
    """A field of the header of a weights file."""
    files = sorted(draft.folder.rglob("*.safetensors")) if draft.folder is not None else []
    if not files:
        return False
    path = draft.chance.choice(files)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    before = json.dumps(head)
    change(draft.chance, head)
    text = json.dumps(head, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return json.dumps(head) != before
