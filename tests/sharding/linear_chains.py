"""Models whose sums are made as terms on several ranks and pass through linear ops: blocks as of GPT-J, and random chains.

`costs` are the collectives and messages of a program with their bytes at one size of the symbols; `at_once` compiles as if no sum passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from partc.compiler import pipeline
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.plan.read import parse_plan
from partc.compiler.sharding.values.sums import defer_all_reduce
from sharded_models import BLOCK, BLOCK_WEIGHTS, with_weights

TWO_BRANCHES = BLOCK.replace(
    "[res1] h = Add(x, o)\n    [norm2] m = LayerNormalization(h, g2, b2)\n    [up] u = MatMul(m, up_w)",
    "[up] u = MatMul(n, up_w)",
).replace(
    "[bias] d2 = Add(d, down_b)\n    [res2] y = Add(h, d2)",
    "[bias] d2 = Add(d, down_b)\n    [ob] o3 = Add(o, o_b)\n    [res1] h = Add(x, o3)\n    [res2] y = Add(h, d2)",
)
STYLES = "wq: colwise, wk: colwise, wv: colwise, wo: rowwise, up: colwise, down: rowwise"


def parallel_block(biases: bool = True) -> onnx.ModelProto:
    """`x + attn(ln(x)) + mlp(ln(x))`."""
    shapes = {name: shape for name, shape in BLOCK_WEIGHTS.items() if name not in ("g2", "b2")} | {"o_b": (24,)}
    text = TWO_BRANCHES
    if not biases:
        text = text.replace("d2 = Add(d, down_b)", "d2 = Identity(d)").replace("o3 = Add(o, o_b)", "o3 = Identity(o)")
        shapes = {name: shape for name, shape in shapes.items() if name not in ("down_b", "o_b")}
    return with_weights(text, shapes)


def passes(proto: onnx.ModelProto, plan: str) -> Complete:
    """The program after all passes."""
    source = Source(from_proto(proto, Path("model.onnx")))
    return pipeline.step_program(source, parse_plan(plan, "plan.yaml"), "model")


@contextmanager
def at_once() -> Iterator[None]:
    """Sums are reduced where they are made."""
    before = pipeline.PASSES
    pipeline.PASSES = tuple(step for step in before if step is not defer_all_reduce)
    try:
        yield
    finally:
        pipeline.PASSES = before


def costs(program: Complete, size: int = 24) -> tuple[int, int]:
    """How many collectives and messages there are, and their bytes where every symbol is `size`."""
    known = dict.fromkeys(program.symbols, Facts.constant(size))
    amounts = [facts_of(event.bytes, known).max or 0 for event in program.events if event.bytes != "unknown"]
    return len(program.events), sum(amounts)


def kinds(program: Complete, backward: bool | None = None) -> Counter[str]:
    """The ops of all communication of more than a number; of one pass, if `backward` says which."""
    events = [event for event in program.events if event.shape != ()]
    return Counter(event.op_type for event in events if backward is None or (".grad" in event.name) is backward)


WIDTH = 12
LINEAR = ("Neg", "Identity", "scale", "share", "bias", "turn", "flat", "split", "half", "double", "mean", "pick", "pad")
BENT = ("Tanh", "Relu", "norm")


@dataclass
class Chain:
    """A model of values of [batch, 12] in the making, and which of its nodes are cut in what they sum over."""

    draw: st.DrawFn
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: object) -> str:
        at = len(self.nodes)
        made = [f"v{at}" if k == 0 else f"v{at}.{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, made, f"n{at}", **attributes))
        return made[0]

    def array(self, numbers: np.ndarray | int | list[int]) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(numbers), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def table(self, *shape: int) -> str:
        random = np.random.default_rng(len(self.weights))
        return self.array((random.standard_normal(shape) / 4).astype(np.float32))

    def product(self, value: str) -> str:
        """Columns, then rows."""
        wide = self.add("MatMul", [value, self.table(WIDTH, 24)])
        self.columns.append(self.nodes[-1].name)
        bent = self.add(self.draw(st.sampled_from(["Tanh", "Relu"])), [wide])
        made = self.add("MatMul", [bent, self.table(24, WIDTH)])
        self.rows.append(self.nodes[-1].name)
        return made

    def linear(self, value: str) -> str:
        number = self.array(np.array(3, np.float32))
        match self.draw(st.sampled_from(LINEAR)):
            case "scale":
                return self.add("Mul", [value, self.draw(st.sampled_from([number, self.table(WIDTH)]))])
            case "share":
                return self.add("Div", [value, number])
            case "bias":
                return self.add(self.draw(st.sampled_from(["Add", "Sub"])), [value, self.table(WIDTH)])
            case "turn":
                return self.add("Transpose", [self.add("Transpose", [value], perm=[1, 0])], perm=[1, 0])
            case "flat":
                apart = self.add("Reshape", [value, self.array([0, 3, 4])])
                return self.add("Reshape", [apart, self.array([0, WIDTH])])
            case "split":
                self.add("Split", [value], 2, axis=1, num_outputs=2)
                first, second = self.nodes[-1].output
                return self.add("Concat", [second, first], axis=1)
            case "half":
                part = self.add("Slice", [value, self.array([0]), self.array([6]), self.array([1])])
                return self.add("Concat", [part, part], axis=1)
            case "double":
                return self.add("Cast", [self.add("Cast", [value], to=TensorProto.DOUBLE)], to=TensorProto.FLOAT)
            case "mean":
                return self.add("Sub", [value, self.add("ReduceMean", [value, self.array([1])], keepdims=1)])
            case "pick":
                return self.add("Gather", [value, self.array([*range(1, WIDTH), 0])], axis=1)
            case "pad":
                part = self.add("Slice", [value, self.array([0]), self.array([9]), self.array([1])])
                return self.add("Pad", [part, self.array([0, 0, 0, 3])])
            case op:
                return self.add(op, [value])

    def bent(self, value: str) -> str:
        match self.draw(st.sampled_from(BENT)):
            case "norm":
                return self.add("LayerNormalization", [value, self.table(WIDTH)])
            case op:
                return self.add(op, [value])

    def join(self, one: str, other: str) -> str:
        match self.draw(st.sampled_from(["Add", "Sub", "Sum", "Where", "Max", "Mul", "Mean"])):
            case "Where":
                flags = self.array(np.arange(WIDTH) % 3 == 0)
                return self.add("Where", [flags, one, other])
            case op:
                return self.add(op, [one, other])


@st.composite
def chains(draw: st.DrawFn) -> tuple[onnx.ModelProto, str]:
    """A model from x [batch, 12] to y, and the start of a plan that cuts its products."""
    chain = Chain(draw)
    known = ["x"]
    for _ in range(draw(st.integers(2, 5))):
        value = chain.product(draw(st.sampled_from(known[-2:])))
        for _ in range(draw(st.integers(0, 2))):
            value = chain.linear(value)
        if draw(st.integers(0, 3)):
            value = chain.join(*draw(st.permutations([value, draw(st.sampled_from(known[-3:]))])))
        known.append(value if draw(st.integers(0, 2)) else chain.bent(value))
    y = chain.add("Sum", known[-draw(st.integers(1, 3)) :])
    chain.nodes[-1].output[0] = "y"
    outputs = ["y", *(name for name in known[1:] if name != y and draw(st.integers(0, 7)) == 0)]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in outputs]
    graph = helper.make_graph(
        chain.nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        ports,
        chain.weights,
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    return model, _plan(draw, chain)


def _plan(draw: st.DrawFn, chain: Chain) -> str:
    mesh, ranks = draw(st.sampled_from([("", 2), ("", 3), ("", 6), ("{dp: 2, tp: 2}", 4), ("{tp: 3, dp: 2}", 6)]))
    lines = [
        f"ranks: {ranks}",
        "symbols: {batch: {divisor: 6}}",
        f"outputs: {draw(st.sampled_from(['cut', '[0]', 'producer']))}",
    ]
    if mesh:
        lines += [f"mesh: {mesh}", "dataset: {x: [dp, null]}"]
    lines.append("sharding:")
    for style, names in (("rowwise", chain.rows), ("colwise", chain.columns)):
        lines += [f"  {name}: {style}" for name in names if draw(st.integers(0, 9))]
    if draw(st.integers(0, 4)) == 0:
        node = draw(st.sampled_from(chain.nodes)).name
        lines.append(f"  {node}: replicate" if node not in (*chain.rows, *chain.columns) else "")
    if not mesh and draw(st.integers(0, 4)) == 0:
        lines += ["placement:", f"  {draw(st.sampled_from(chain.nodes)).name}: {ranks - 1}"]
    return "\n".join([*(line for line in lines if line), ""])
