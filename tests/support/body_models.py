"""Models of branches and loops of which only the run knows the branch or the turns, and plans that shard what is in them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper
from partc.runtime.artifact.graph.onnx_graph import all_nodes

HEAD = '<ir_version: 8, opset_import: ["" : {opset}]>\n'
WIDTH, HIDDEN = 8, 12
BLOCK = """[up] u = MatMul(h, W)
        [act] a = Tanh(u)
        [down] d = MatMul(a, V)"""
WHILE = f"""net (float[batch, 8] x, float tolerance) => (float[batch, 8] y, int64 n) <int64 most = {{40}}, int64 zero = {{0}}> {{
    [refine] n, y = Loop <body = turn (int64 i, bool on, int64 k, float[batch, 8] h)
        => (bool more, int64 k2, float[batch, 8] h2) {{
        one = Constant <value_int = 1> ()
        k2 = Add(k, one)
        {BLOCK}
        [add] s = Add(d, h)
        half = Constant <value_float = 0.5> ()
        h2 = Mul(s, half)
        e = Sub(h2, h)
        ea = Abs(e)
        em = ReduceMax <keepdims = 0> (ea)
        more = Greater(em, tolerance) }}> (most, , zero, x)
}}"""
BRANCHES = f"""net (float[batch, 8] h, float limit) => (float[batch, 8] y, float[batch, 12] z) {{
    m = ReduceMax <keepdims = 0> (h)
    c = Greater(m, limit)
    [choose] r, z = If (c) <then_branch = one () => (float[batch, 8] d, float[batch, 12] a) {{
        {BLOCK} }}, else_branch = two () => (float[batch, 8] e, float[batch, 12] q) {{
        [up2] g = MatMul(h, W)
        [act2] q = Relu(g)
        [neg] e = Neg(h) }}>
    [last] y = Add(r, h)
}}"""
NESTED = f"""net (float[batch, 8] x, int64 turns, float limit) => (float[batch, 8] a, float[batch, 8] b, float[turns, batch, 8] all) {{
    [outer] a, b, all = Loop <body = turn (int64 i, bool on, float[batch, 8] p, float[batch, 8] h)
        => (bool on2, float[batch, 8] h3, float[batch, 8] q, float[batch, 8] seen) {{
        on2 = Identity(on)
        h3 = Identity(h)
        total = ReduceMax <keepdims = 0> (p)
        c = Greater(total, limit)
        [inner] q = If (c) <then_branch = one () => (float[batch, 8] d) {{
            {BLOCK} }}, else_branch = two () => (float[batch, 8] e) {{ e = Tanh(p) }}>
        seen = Add(q, p) }}> (turns, , x, x)
}}"""
SCAN = """net (float[batch, 8] x, float[batch, time, 8] xs) => (float[batch, 8] y, float[batch, time, 8] all) {
    [rnn] y, all = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1], scan_input_directions = [DIRECTION],
        scan_output_directions = [DIRECTION],
        body = cell (float[batch, 8] s, float[batch, 8] h) => (float[batch, 8] t, float[batch, 8] out) {
        [up] u = MatMul(h, W)
        [act] a = Tanh(u)
        [down] d = MatMul(a, V)
        [mix] m = Add(d, s)
        t = Tanh(m)
        out = Neg(t) }> (x, xs)
}"""
WEIGHTS = {"W": (WIDTH, HIDDEN), "V": (HIDDEN, WIDTH)}


def plan(name: str, ranks: int, batched: str = "x") -> str:
    """Tensor parallel ranks, on four of them two groups of records; `name`: the module of the body."""
    rules = f'sharding: {{"{name}.*.up*": colwise, "{name}.*.down": rowwise}}\n'
    if ranks == 2:
        return f"ranks: 2\nmesh: {{tp: 2}}\n{rules}"
    ports = ", ".join(f"{port}: [dp, null]" for port in batched.split())
    return f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: {{{ports}}}\n{rules}"


def weighed(text: str, weights: dict[str, tuple[int, ...]], opset: int = 21) -> onnx.ModelProto:
    """A model of a text with seeded weights."""
    proto, rng = onnx.parser.parse_model(HEAD.format(opset=opset) + text), np.random.default_rng(3)
    for node in all_nodes(proto.graph.node):
        node.name = node.name.replace("__", ".")  # the parser's names have no dots
    for name, shape in weights.items():
        array = (rng.normal(size=shape) / 4).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto)
    return proto
