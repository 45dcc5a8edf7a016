"""The decoder of `tests/generation/decoders.py` with its mask written otherwise, or another mask.

with_mask(decoder(), "prefix")    all tokens see the first three entries, also tokens before them
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CAUSAL = ("less", "greater", "not greater")
"""The same mask in other words."""
OTHER = ("prefix", "sinks", "own", "distance", "far", "all")
"""The first entries for all, the first ones beside a window, some tokens by themselves, a bias by the distance, such a bias of later
tokens, too, and no mask."""


def with_mask(model: onnx.ModelProto, form: str) -> onnx.ModelProto:
    """The model, whose mask is changed in place."""
    nodes = {node.name: node for node in model.graph.node}
    before, where = nodes["mask.LessOrEqual"], nodes["mask.Where"]
    keys, queries = before.input
    seen, added = where.input[0], list[onnx.NodeProto]()

    def op(kind: str, *inputs: str, **attributes: object) -> str:
        made = f"mask.{kind}_{len(added)}_of_form"
        added.append(helper.make_node(kind, inputs, [made], made, **attributes))
        return made

    def number(name: str, value: object) -> str:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    match form:
        case "less":
            before.op_type, before.input[1] = "Less", op("Add", queries, "one")
        case "greater":
            before.op_type, before.input[:] = "GreaterOrEqual", [queries, keys]
        case "not greater":
            before.op_type, before.output[0] = "Greater", "mask.later"
            added.append(helper.make_node("Not", ["mask.later"], ["mask.LessOrEqual"], "mask.Not"))
        case "prefix":
            where.input[0] = op("Or", seen, op("Less", keys, number("first", 3)))
        case "sinks":
            where.input[0] = op("Or", seen, op("And", before.output[0], op("Less", keys, number("first", 2))))
        case "own":
            few = op("Less", op("Unsqueeze", "ids", number("of_ids", [1, 3])), number("few", 32))
            where.input[0] = op("And", seen, op("Or", few, op("Equal", keys, queries)))
        case "distance" | "far":
            away = op("Cast", op("Sub", keys, queries), to=TensorProto.FLOAT)
            where.input[1] = op("Mul", away, number("slope", np.float32(0.1)))
            where.input[2] = op("Neg", where.input[1]) if form == "far" else where.input[2]
        case "all":
            before.input[1] = keys
    made = {"ids"} | {one.name for one in (*model.graph.initializer, *model.graph.input)}
    left, ordered = [*model.graph.node, *added], list[onnx.NodeProto]()
    while left:
        ready = next(node for node in left if all(name in made for name in node.input))
        left.remove(ready)
        ordered.append(ready)
        made.update(ready.output)
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    return model
