"""Splits attention that appends to its own cache into an append and an attention, so that rewrites of `Concat(past, new)` apply to it.

    y, present_k, present_v = Attention(q, k, v, mask, past_k, past_v)
 ->  present_k = Concat(past_k, k)    present_v = Concat(past_v, v)    y = Attention(q, present_k, present_v, mask)

    y, present_k, present_v = GroupQueryAttention(q, k, v, past_k, past_v, seqlens, total, cos, sin)
 ->  the same for its heads, with RotaryEmbedding by the positions after the past

Causal or windowed attention gets a mask: entry <= past + n for the n-th token of a step, and with a window entry > past + n - window.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import drop_unread, name_of
from partc.compiler.rewrite.generation.node_builder import NodeBuilder

_APPENDING = {("", "Attention"): 4, ("com.microsoft", "GroupQueryAttention"): 3}
"""Maps each op to the index of its operand for the past keys; the past values are the next operand."""
_LEFT_OUT = ("smooth_softmax", "k_quant_type", "v_quant_type", "qk_output")
_TURNED, _SEQUENCE = (0, 2, 1, 3), 2


def append_apart(model: ir.Model, name: str) -> None:
    """Splits every such node of a model of opset 23 or later. Raises CompileError with all nodes for which it cannot."""
    problems, graph = list[Problem](), model.graph
    appending = [node for node in graph if (node.domain.replace("ai.onnx", ""), node.op_type) in _APPENDING]
    if any(node.inputs[0] is None or node.inputs[0].shape is None for node in appending):
        infer_shapes(model, {})
    for node in appending:
        at = _APPENDING[node.domain.replace("ai.onnx", ""), node.op_type]
        if len(node.inputs) < at + 2 or node.inputs[at] is None or len(node.outputs) < 3:
            continue
        _know_size(node, at)
        if odd := _left_out(node):
            fact = f"{node.op_type} '{node.name}' has {odd}"
            help_ = "export the model with keys and values that a Concat appends"
            problems.append(Problem(name, fact, "generation has no form for it", help_))
            continue
        _Attended(graph, node, at).rewrite()
    if problems:
        raise CompileError(problems)
    drop_unread(graph)


def _know_size(node: ir.Node, at: int) -> None:
    """Replaces a symbol in the last dim of past and present by its size; files for caches of any element type have such symbols."""
    pasts, query = node.inputs[at : at + 2], node.inputs[0]
    if node.op_type == "Attention" or query is None or query.shape is None or not isinstance(query.shape[-1], int):
        return
    heads = node.attributes.get_int("num_heads", 0)
    heads += 0 if node.inputs[1] is not None else 2 * node.attributes.get_int("kv_num_heads", 0)
    if not heads or query.shape[-1] % heads:
        return
    for value in (*pasts, *node.outputs[1:3]):
        if (
            value is not None
            and value.shape is not None
            and len(value.shape) == 4
            and not isinstance(value.shape[3], int)
        ):
            value.shape = ir.Shape([*value.shape[:3], query.shape[-1] // heads])


def _left_out(node: ir.Node) -> str:
    """Returns the features of a node that the split form lacks; empty where there are none."""
    past = node.inputs[_APPENDING[node.domain.replace("ai.onnx", ""), node.op_type]]
    if past is None or past.shape is None or len(past.shape) != 4 or not isinstance(past.shape[3], int):
        return "a past that is not [batch, heads, past, size] with a number for its size"
    set_ = [key for key in _LEFT_OUT if key in node.attributes and node.attributes[key].value not in (0, "NONE")]
    given = [] if node.op_type == "Attention" else [k for k in range(9, len(node.inputs)) if node.inputs[k] is not None]
    if given:
        set_.append(f"an operand {given[0]}")
    if any(out.uses() or out.is_graph_output() for out in node.outputs[3:]):
        set_.append("its scores as an output")
    return ", ".join(set_)


class _Attended:
    """One node with its past keys and values, and the ops that replace it."""

    def __init__(self, graph: ir.Graph, node: ir.Node, at: int) -> None:
        self.graph, self.node, self.at = graph, node, at
        self.build = NodeBuilder(graph, (node.name or name_of(node.outputs[0])).replace("/", "."))
        past = node.inputs[at]
        assert past is not None
        assert past.shape is not None
        assert isinstance(past.shape[3], int)
        self.size = past.shape[3]
        self.flat = node.op_type != "Attention" or "q_num_heads" in node.attributes
        self.attributes = node.attributes

    def rewrite(self) -> None:
        """Replaces the node by the split form."""
        build, node, keys = self.build, self.node, self.node.op_type != "Attention"
        query, key, value = (self._heads(k) for k in range(3))
        self._count(query)
        if self.attributes.get_int("do_rotary", 0):
            query, key = self._turned(query), self._turned(key)
        presents = []
        for k, new in enumerate((key, value)):
            joined = build.op("append", "Concat", [node.inputs[self.at + k], new], axis=_SEQUENCE)
            joined.type, joined.shape = node.outputs[k + 1].type, node.outputs[k + 1].shape
            presents.append(joined)
        given = node.inputs[3] if not keys else None
        attended = build.op("attend", "Attention", [query, *presents, self._mask(given)])
        for attribute in ("scale", "softcap"):
            if self.attributes.get_float(attribute, 0.0):
                attended.producer().attributes.add(self.attributes[attribute])  # type: ignore[union-attr]
        if self.flat:
            back = build.op("back", "Transpose", [attended], perm=_TURNED)
            attended = build.op("joined", "Reshape", [back, build.constant("joined_to", [0, 0, -1])])
        build.put(before=node)
        for old, made in zip(node.outputs, (attended, *presents), strict=False):
            name, old.name = old.name, None
            made.name, made.type, made.shape = name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def _heads(self, k: int) -> ir.Value:
        """Returns queries, keys or values (k = 0, 1, 2) by head: [batch, heads, tokens, size]."""
        value, word = self.node.inputs[k], "qkv"[k]
        if not self.flat:
            assert value is not None
            return value
        names = ("q_num_heads", "kv_num_heads") if self.node.op_type == "Attention" else ("num_heads", "kv_num_heads")
        queries, heads = self.attributes[names[0]].as_int(), self.attributes[names[k > 0]].as_int()
        if self.node.op_type != "Attention" and self.node.inputs[1] is None:  # queries, keys and values in one operand
            begin = self.size * (0, queries, queries + heads)[k]
            ends = [
                self.build.constant(f"{word}_{end}", [at])
                for end, at in (("begin", begin), ("end", begin + self.size * heads))
            ]
            value = self.build.op(word, "Slice", [self.node.inputs[0], *ends, self.build.constant("last_dim", [2])])
        parted = self.build.op(
            f"{word}_parted", "Reshape", [value, self.build.constant(f"{word}_to", [0, 0, heads, -1])]
        )
        return self.build.op(f"{word}_heads", "Transpose", [parted], perm=_TURNED)

    def _count(self, query: ir.Value) -> None:
        """Adds `numbers`, the position of each token of the step in its sequence, and `entries`, the numbers of all entries."""
        build, none = self.build, self.build.constant("no_axes", [0])
        zero, unit = build.constant("zero", 0), build.constant("one", 1)
        ids = self._ids()
        source, axis = (query, 2) if ids is None else (ids, 1)  # a count from ids needs no other ops for its proof
        before, new = (
            build.op(word, "Squeeze", [build.op(f"{word}_1", "Shape", [value], start=dim, end=dim + 1), none])
            for word, value, dim in (("past", self.node.inputs[self.at], 2), ("tokens", source, axis))
        )
        self.numbers = build.op("numbers", "Add", [build.op("steps", "Range", [zero, new, unit]), before])
        self.entries = build.op("entries", "Range", [zero, build.op("all", "Add", [before, new]), unit])

    def _ids(self) -> ir.Value | None:
        """Returns the model's input [batch, tokens] whose symbols equal those of the queries; None where there is none."""
        query = self.node.inputs[0]
        dims = None if query is None or query.shape is None else [query.shape[0], query.shape[-2]]
        if dims is None or any(getattr(dim, "value", dim) is None for dim in dims):
            return None
        inputs = (value for value in self.graph.inputs if value.dtype in (ir.DataType.INT64, ir.DataType.INT32))
        return next((value for value in inputs if value.shape is not None and [*value.shape] == dims), None)

    def _turned(self, value: ir.Value) -> ir.Value:
        """Returns queries or keys, rotated by the angles of their positions."""
        build = self.build
        rows = build.op("rows", "Unsqueeze", [self.numbers, build.constant("first", [0])])
        cosines, sines = self.node.inputs[7], self.node.inputs[8]
        angles = [build.op(word, "Gather", [table, rows], axis=0) for word, table in (("cos", cosines), ("sin", sines))]
        interleaved = self.attributes.get_int("rotary_interleaved", 0)
        return build.op("rotated", "RotaryEmbedding", [value, *angles], interleaved=interleaved)

    def _mask(self, own_mask: ir.Value | None) -> ir.Value | None:
        """Returns the mask of entries that a token attends, combined with the model's own mask `own_mask`."""
        build, grouped = self.build, self.node.op_type != "Attention"
        window = self.attributes.get_int("local_window_size", -1)
        if not grouped and not self.attributes.get_int("is_causal", 0):
            return own_mask
        numbers = build.op("queries", "Unsqueeze", [self.numbers, build.constant("queries_at", [0, 1, 3])])
        entries = build.op("keys", "Unsqueeze", [self.entries, build.constant("keys_at", [0, 1, 2])])
        seen = build.op("is_before", "LessOrEqual", [entries, numbers])
        if window >= 0:
            first = build.op("first_seen", "Sub", [numbers, build.constant("window", window - 1)])
            seen = build.op("is_seen", "And", [seen, build.op("is_near", "GreaterOrEqual", [entries, first])])
        if own_mask is None:
            return seen
        if own_mask.dtype is ir.DataType.BOOL:
            return build.op("mask", "And", [seen, own_mask])
        return build.op(
            "mask",
            "Where",
            [seen, own_mask, build.op("never", "CastLike", [build.constant("far", -(1 << 30)), own_mask])],
        )
