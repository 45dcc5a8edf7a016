"""A small decoder with past and present, as exporters write it, and the tokens that it makes by itself, one sequence after the other.

model = decoder()                                ids [batch, tokens], past_k.0 [batch, 4, past, 8], ...  ->  logits, present_k.0, ...
Unsharded(model).tokens([3, 1, 4], 20)           the likeliest tokens, with a past that grows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

HEADS, SIZE, VOCABULARY, MOST = 4, 8, 64, 256
WIDTH = HEADS * SIZE
CAUSAL_FORMS = ("less", "greater", "not greater")
"""The same mask in other words."""
OTHER_MASKS = ("prefix", "sinks", "own", "distance", "far", "all")
"""The first entries for all, the first ones beside a window, some tokens by themselves, a bias by the distance, such a bias of later
tokens, too, and no mask."""


@dataclass
class Build:
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    flat: bool = False

    def op(self, kind: str, path: str, *inputs: str, **attributes: Any) -> str:
        """A node, named after its path and its op, and what it makes."""
        name = f"{path}.{kind}"
        if name in {node.name for node in self.nodes}:
            name += f"_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """Random numbers, wide enough that two logits are seldom close."""
        return self.constant(name, self.rng.standard_normal(shape, np.float32) * np.float32(1.5 / shape[0] ** 0.5))

    def constant(self, name: str, numbers: Any) -> str:
        array = np.asarray(numbers)
        if name not in {one.name for one in self.weights}:
            self.weights.append(
                numpy_helper.from_array(array if array.dtype == np.float32 else array.astype(np.int64), name)
            )
        return name

    def axes(self, *dims: int) -> str:
        return self.constant(f"axes_{'_'.join(map(str, dims))}", list(dims))

    def linear(self, path: str, x: str, rows: int, columns: int) -> str:
        weight = self.weight(f"{path}.weight", rows, columns)
        if not self.flat:
            return self.op("MatMul", path, x, weight)
        table = self.op("Reshape", f"{path}.flat", x, self.constant(f"flat_{rows}", [-1, rows]))
        sizes = self.op("Shape", f"{path}.sizes", "ids")
        target = self.op("Concat", f"{path}.sizes", sizes, self.constant(f"columns_{columns}", [columns]), axis=0)
        return self.op("Reshape", path, self.op("MatMul", path, table, weight), target)

    def heads(self, path: str, x: str) -> str:
        split = self.op("Reshape", path, x, self.constant("split", [0, 0, -1, SIZE]))
        return self.op("Transpose", path, split, perm=[0, 2, 1, 3])


def decoder(
    layers: int = 2,
    inputs: Sequence[str] = (),
    rows: bool = True,
    fused: bool = False,
    window: int = 0,
    flat: bool = False,
    single: bool = False,
    normed: bool = False,
    behind: str = "",
) -> onnx.ModelProto:
    """The model. `inputs`: which of position_ids and attention_mask it is given; without them it counts from the length of its past, along
    rows that an Unsqueeze makes, or with `rows` False in a way that fits one sequence alone. `fused`: attention is ONNX's op, with two
    heads of queries for each of keys; `window`: how many tokens each sees, or all before it; `flat`: linears see a table of rows;
    `single`: what is fused is single ops, with repeated heads; `normed`: each head of keys has a norm, in single ops.
    `behind`: positions are what is behind the past of a mask's counts, as in OPT, or of a table, or a count that begins with the past.
    """
    build = Build(flat=flat)
    numbers, away = _positions(build, inputs, rows, window)
    numbers = _behind(build, behind) if behind else numbers
    tokens = build.op("Gather", "embed.tokens", build.weight("embed.tokens.weight", VOCABULARY, WIDTH), "ids")
    places = build.op("Gather", "embed.positions", build.weight("embed.positions.weight", MOST, WIDTH), numbers)
    h = build.op("Add", "embed", tokens, places)
    for layer in range(layers):
        h = _layer(build, layer, h, away, fused, single, normed)
    head = build.weight("head.weight", WIDTH, VOCABULARY)
    build.nodes.append(helper.make_node("MatMul", [h, head], ["logits"], "head.MatMul"))
    caches = [f"{side}.{layer}" for layer in range(layers) for side in "kv"]
    dims = {
        "ids": ["batch", "tokens"],
        "position_ids": ["batch", "tokens"],
        "attention_mask": ["batch", "past + tokens"],
    }
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, dims[name]) for name in ("ids", *inputs)]
    made = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", VOCABULARY])]
    for name in caches:
        for side, sizes, length in (("past", given, "past"), ("present", made, "past + tokens")):
            shape = ["batch", HEADS // 2 if fused else HEADS, length, SIZE]
            sizes.append(helper.make_tensor_value_info(f"{side}_{name}", TensorProto.FLOAT, shape))
    graph = helper.make_graph(build.nodes, "decoder", given, made, build.weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 23 if fused else 18)])


def _positions(build: Build, inputs: Sequence[str], rows: bool, window: int) -> tuple[str, str]:
    """The number of each token, and what is added to the scores of those that come later."""
    zero, one = build.constant("zero", 0), build.constant("one", 1)
    tokens = build.op("Squeeze", "count", build.op("Shape", "count", "ids", start=1, end=2), build.axes(0))
    past = build.op("Squeeze", "past", build.op("Shape", "past", "past_k.0", start=2, end=3), build.axes(0))
    steps = build.op("Add", "steps", build.op("Range", "steps", zero, tokens, one), past)
    entries = build.op("Range", "entries", zero, build.op("Add", "entries", past, tokens), one)
    if "position_ids" in inputs:
        numbers, inner = "position_ids", build.op("Unsqueeze", "queries", "position_ids", build.axes(1))
    elif rows:
        numbers = build.op("Unsqueeze", "numbers", steps, build.axes(0))
        inner = build.op("Unsqueeze", "queries", steps, build.axes(0, 1))
    else:
        numbers = build.op("Reshape", "numbers", steps, build.constant("as_row", [1, -1]))
        inner = build.op("Reshape", "queries", steps, build.constant("as_rows", [1, 1, -1]))
    queries = build.op("Unsqueeze", "queries", inner, build.axes(3))
    keys = build.op("Unsqueeze", "keys", entries, build.axes(0, 1, 2))
    seen = build.op("LessOrEqual", "mask", keys, queries)
    if window:
        first = build.op("Sub", "window", queries, build.constant("window", window))
        seen = build.op("And", "window", seen, build.op("Greater", "window", keys, first))
    if "attention_mask" in inputs:
        valid = build.op("Cast", "mask", "attention_mask", to=TensorProto.BOOL)
        seen = build.op("And", "mask", seen, build.op("Unsqueeze", "mask", valid, build.axes(1, 2)))
    none, never = build.constant("none", np.float32(0)), build.constant("never", np.float32(-1e9))
    return numbers, build.op("Where", "mask", seen, none, never)


def _behind(build: Build, of: str) -> str:
    """The number of each token, as one length for all sequences says it."""
    past, first = build.op("Shape", "behind", "past_k.0", start=2, end=3), build.axes(0)
    all_ = build.op("Add", "behind", past, build.op("Shape", "behind", "ids", start=1, end=2))
    batch, one = build.op("Shape", "behind", "ids", start=0, end=1), build.constant("one", 1)
    begin, end = (build.op("Squeeze", "behind", size, first) for size in (past, all_))
    if of == "count":
        return build.op("Unsqueeze", "behind", build.op("Range", "behind", begin, end, one), first)
    if of == "table":
        table = build.op("Range", "behind", build.constant("zero", 0), end, one)
        part = build.op("Slice", "behind", table, past, build.constant("no_end", [2**63 - 1]), first)
        return build.op("Unsqueeze", "behind", part, first)
    mask = build.op("Expand", "behind", one, build.op("Concat", "behind", batch, all_, axis=0))
    counts = build.op("Sub", "behind", build.op("CumSum", "behind", mask, one), one)
    return build.op(
        "Slice", "behind", counts, past, build.constant("no_end", [2**63 - 1]), build.axes(1), build.axes(1)
    )


def _layer(build: Build, layer: int, h: str, away: str, fused: bool, single: bool, normed: bool) -> str:
    """Attention over the cache, and two linears."""
    path = f"layers.{layer}"
    inside, kept = f"{path}.attention", WIDTH // 2 if fused else WIDTH
    rows = [build.linear(f"{path}.{name}", h, WIDTH, WIDTH if name == "q" else kept) for name in "qkv"]
    query, key, value = (build.heads(f"{path}.{name}", one) for name, one in zip("qkv", rows, strict=True))
    if normed:
        norm, two = f"{path}.k_norm", build.constant("two", np.float32(2))
        mean = build.op("ReduceMean", norm, build.op("Pow", norm, key, two), build.axes(-1))
        key = build.op("Div", norm, key, build.op("Sqrt", norm, mean))
    keys, values = f"present_k.{layer}", f"present_v.{layer}"
    for side, new in (("k", key), ("v", value)):
        ends = [f"past_{side}.{layer}", new], [f"present_{side}.{layer}"]
        build.nodes.append(helper.make_node("Concat", *ends, f"{path}.{side}.Concat", axis=-2))
    if fused:
        keys, values = (_twice(build, f"{path}.{side}", one) for side, one in (("k", keys), ("v", values)))
    if fused and not single:
        attended = build.op("Attention", inside, query, keys, values, away, scale=SIZE**-0.5)
    else:
        scores = build.op("MatMul", inside, query, build.op("Transpose", inside, keys, perm=[0, 1, 3, 2]))
        shares = build.op("Softmax", inside, build.op("Add", inside, scores, away), axis=-1)
        attended = build.op("MatMul", inside, shares, values)
    mixed = build.op("Transpose", inside, attended, perm=[0, 2, 1, 3])
    joined = build.op("Reshape", inside, mixed, build.constant("join", [0, 0, WIDTH]))
    h = build.op("Add", path, h, build.linear(f"{path}.o", joined, WIDTH, WIDTH))
    inner = build.op("Relu", f"{path}.up", build.linear(f"{path}.up", h, WIDTH, 2 * WIDTH))
    return build.op("Add", path, h, build.linear(f"{path}.down", inner, 2 * WIDTH, WIDTH))


def _twice(build: Build, path: str, heads: str) -> str:
    """Every head two times, as exporters repeat them."""
    apart = build.op("Unsqueeze", path, heads, build.axes(2))
    repeated = build.op("Expand", path, apart, build.constant("twice", [1, 1, 2, 1, 1]))
    return build.op("Reshape", path, repeated, build.constant("together", [0, HEADS, -1, SIZE]))


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


class Unsharded:
    """The model itself, a sequence at a time, with a past that grows."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = self.session.get_inputs()
        self.names = [one.name for one in given]
        self.heads = {one.name: one.shape[1] for one in given if one.name.startswith("past_")}

    def log_probabilities(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """By token that of each token of the vocabulary after it."""
        past = {name: np.zeros((1, heads, 0, SIZE), np.float32) for name, heads in self.heads.items()}
        (logits,) = self.session.run(["logits"], {"ids": np.asarray([tokens], np.int64), **past})
        scores = logits[0].astype(np.float64)
        return np.asarray(scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True)))

    def tokens(self, prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
        """The likeliest tokens behind a prompt."""
        past = {name: np.zeros((1, heads, 0, SIZE), np.float32) for name, heads in self.heads.items()}
        ids, found, before = np.asarray([prompt], np.int64), list[int](), 0
        while len(found) < count and not (found and found[-1] in stop):
            feeds = {"ids": ids, **past}
            if "position_ids" in self.names:
                feeds["position_ids"] = np.arange(before, before + ids.shape[1])[None]
            if "attention_mask" in self.names:
                feeds["attention_mask"] = np.ones((1, before + ids.shape[1]), np.int64)
            logits, *present = self.session.run(None, feeds)
            past, before = dict(zip(past, present, strict=True)), before + ids.shape[1]
            found.append(int(logits[0, -1].argmax()))
            ids = np.asarray([found[-1:]], np.int64)
        return found
