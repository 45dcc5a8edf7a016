"""A small encoder with a decoder as exporters write both in one file, and the tokens that it makes by itself.

    input_ids [batch, entries], encoder_attention_mask [batch, entries], or features [batch, 10, 32];  ids [batch, tokens], past_k.0, ..
        ->  logits, present_k.0, .., cross_k.0 [batch, 4, entries, 8], ..

The decoder's positions are a bias of its scores by distance, a table's rows by head, as in T5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from decoder_layouts import STAGES, TENSOR
from decoders import HEADS, SIZE, VOCABULARY, WIDTH, Build
from onnx import TensorProto, helper

ENTRIES, BUCKETS, START = 10, 12, 1
_CROSS = TENSOR.replace('  "layers.*.up": colwise\n  "layers.*.down": rowwise\n', "")
_CROSS += "".join(f'  "layers.*.cross.{name}": {"rowwise" if name == "o" else "colwise"}\n' for name in "qkvo")
_STAGES = STAGES.replace("placement:\n", 'placement:\n  "encoder.*": {first}\n  "bias": {first}\n')
LAYOUTS = {
    "one rank": "ranks: 1\n",
    "tensor parallel": f"ranks: 2\nmesh: {{tp: 2}}\n{_CROSS}",
    "stages": "ranks: 2\n" + _STAGES.format(first=0, second=1),
    "data parallel": "ranks: 2\ndataset: data_parallel\n",
    "tensor parallel stages": "ranks: 4\nmesh: {pp: 2, tp: 2}\n"
    + _CROSS
    + _STAGES.format(first="{pp: 0}", second="{pp: 1}"),
}


def encoder_decoder(features: bool = False, layers: int = 2) -> onnx.ModelProto:
    """The model; of `features`, an array of one size, or of tokens, of which a mask says how many are meant."""
    build = Build()
    float_, int_ = TensorProto.FLOAT, TensorProto.INT64
    values = {
        "input_ids": (int_, ["batch", "entries"]),
        "encoder_attention_mask": (int_, ["batch", "entries"]),
        "features": (float_, ["batch", ENTRIES, WIDTH]),
        "ids": (int_, ["batch", "tokens"]),
    }
    chosen = ("features", "ids") if features else ("input_ids", "encoder_attention_mask", "ids")
    given = [helper.make_tensor_value_info(name, *values[name]) for name in chosen]
    none, never = build.constant("none", np.float32(0)), build.constant("never", np.float32(-1e9))
    states, unseen = "features", ""
    if not features:
        states = build.op(
            "Gather", "encoder.embed", build.weight("encoder.embed.weight", VOCABULARY, WIDTH), "input_ids"
        )
        meant = build.op("Cast", "encoder.mask", "encoder_attention_mask", to=TensorProto.BOOL)
        unseen = build.op(
            "Where", "encoder.mask", build.op("Unsqueeze", "encoder.mask", meant, build.axes(1, 2)), none, never
        )
    states = _attend(build, "encoder", states, states, unseen)
    h = build.op("Gather", "embed.tokens", build.weight("embed.tokens.weight", VOCABULARY, WIDTH), "ids")
    bias = _bias(build, none, never)
    made = [helper.make_tensor_value_info("logits", float_, ["batch", "tokens", VOCABULARY])]
    crossing = []
    for layer in range(layers):
        for side in "kv":
            shape = ["batch", HEADS, "past", SIZE]
            given.append(helper.make_tensor_value_info(f"past_{side}.{layer}", float_, shape))
            made.append(
                helper.make_tensor_value_info(f"present_{side}.{layer}", float_, [*shape[:2], "past + tokens", SIZE])
            )
            entries = ENTRIES if features else "entries"
            crossing.append(helper.make_tensor_value_info(f"cross_{side}.{layer}", float_, [*shape[:2], entries, SIZE]))
        h = _attend(build, f"layers.{layer}", h, h, bias, ("past", "present", layer))
        h = _attend(build, f"layers.{layer}.cross", h, states, unseen, ("", "cross", layer))
    head = build.weight("head.weight", WIDTH, VOCABULARY)
    build.nodes.append(helper.make_node("MatMul", [h, head], ["logits"], "head.MatMul"))
    graph = helper.make_graph(build.nodes, "encoder_decoder", given, [*made, *crossing], build.weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def _bias(build: Build, none: str, never: str) -> str:
    """What is added to the scores of a step's tokens: by distance and head, and nothing of later ones."""
    zero, one = build.constant("zero", 0), build.constant("one", 1)
    tokens = build.op("Squeeze", "count", build.op("Shape", "count", "ids", start=1, end=2), build.axes(0))
    past = build.op("Squeeze", "past", build.op("Shape", "past", "past_k.0", start=2, end=3), build.axes(0))
    steps = build.op("Unsqueeze", "bias", build.op("Range", "steps", zero, tokens, one), build.axes(1))
    entries = build.op("Range", "entries", zero, build.op("Add", "entries", past, tokens), one)
    keys = build.op("Unsqueeze", "bias", entries, build.axes(0))
    distance = build.op("Sub", "bias", build.op("Add", "bias", steps, past), keys)
    bucket = build.op("Min", "bias", build.op("Max", "bias", distance, zero), build.constant("last", BUCKETS - 1))
    rows = build.op("Gather", "bias", build.weight("bias.weight", BUCKETS, HEADS), bucket)
    by_head = build.op("Unsqueeze", "bias", build.op("Transpose", "bias", rows, perm=[2, 0, 1]), build.axes(0))
    later = build.op("Unsqueeze", "mask", build.op("Less", "mask", distance, zero), build.axes(0, 1))
    return build.op("Add", "mask", by_head, build.op("Where", "mask", later, never, none))


def _attend(build: Build, path: str, h: str, states: str, away: str, caches: tuple[str, str, int] | None = None) -> str:
    """Attention of `h` to `states`; `caches`: how the past of its keys and values is called, and what is kept of them, of which layer."""
    rows = {"q": h, "k": states, "v": states}
    heads = {
        side: build.heads(f"{path}.{side}", build.linear(f"{path}.{side}", row, WIDTH, WIDTH))
        for side, row in rows.items()
    }
    for side in "kv" if caches is not None else "":
        past, kept, layer = caches  # type: ignore[misc]
        ends = [f"{past}_{side}.{layer}", heads[side]] if past else [heads[side]]
        kind = {"axis": -2} if past else {}
        node = helper.make_node(
            "Concat" if past else "Identity", ends, [f"{kept}_{side}.{layer}"], f"{path}.{side}.kept", **kind
        )
        build.nodes.append(node)
        heads[side] = node.output[0]
    scores = build.op(
        "MatMul", f"{path}.scores", heads["q"], build.op("Transpose", f"{path}.scores", heads["k"], perm=[0, 1, 3, 2])
    )
    scores = build.op("Mul", f"{path}.scores", scores, build.constant("scale", np.float32(SIZE**-0.5)))
    scores = build.op("Add", f"{path}.scores", scores, away) if away else scores
    mixed = build.op("MatMul", f"{path}.scores", build.op("Softmax", f"{path}.scores", scores, axis=-1), heads["v"])
    turned = build.op("Transpose", f"{path}.scores", mixed, perm=[0, 2, 1, 3])
    joined = build.op("Reshape", f"{path}.scores", turned, build.constant("join", [0, 0, WIDTH]))
    return build.op("Add", path, h, build.linear(f"{path}.o", joined, WIDTH, WIDTH))


class Unsharded:
    """The model itself, a sequence at a time, with a past that grows; its encoder runs in each step."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        data = model.SerializeToString()
        self.session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.pasts = [one.name for one in self.session.get_inputs() if one.name.startswith("past_")]

    def tokens(self, given: Any, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens behind a prompt, where the encoder is given this."""
        array = np.asarray(given)[None]
        encoded = {"features": array}
        if array.dtype.kind == "i":
            encoded = {"input_ids": array, "encoder_attention_mask": np.ones_like(array)}
        past = {name: np.zeros((1, HEADS, 0, SIZE), np.float32) for name in self.pasts}
        ids, found = np.asarray([prompt], np.int64), list[int]()
        while len(found) < count:
            logits, *rest = self.session.run(None, {"ids": ids, **encoded, **past})
            past = dict(zip(past, rest, strict=False))
            found.append(int(logits[0, -1].argmax()))
            ids = np.asarray([found[-1:]], np.int64)
        return found
