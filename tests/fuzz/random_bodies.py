"""Random loops and branches in each other, written out turn by turn, against onnxruntime on the loops themselves.

python tests/fuzz/random_bodies.py 1000 [SEED]
python tests/fuzz/random_bodies.py 100 [SEED] --cut    turns and branches that only the run knows, their products sharded over two ranks
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.unroll import MOST_NODES, _Unrolling
from partc.runtime import load_local

sys.path.append(str(Path(__file__).parents[1] / "support"))

from equivalence import compiled, counted

ROWS, COLUMNS = 2, 4
DEEPEST = 3


@dataclass
class Drawn:
    """A model in the making: `known` are the float values of shape (2, 4) that nodes may read, `number` the integer of the turn."""

    rng: np.random.Generator
    opset: int
    names: int = 0
    unknown: bool = False
    """Whether only the run knows turns and branches."""
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def name(self, word: str) -> str:
        self.names += 1
        return f"{word}{self.names}"

    def weight(self, *shape: int) -> str:
        name = self.name("w")
        array = (self.rng.normal(size=shape) / 2).astype(np.float32)
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def integer(self, value: int, kind: type = np.int64) -> str:
        name = self.name("k")
        self.initializers.append(numpy_helper.from_array(np.array(value, kind), name))
        return name

    def nodes(self, known: list[str], turn: str, depth: int) -> tuple[list[onnx.NodeProto], str]:
        """Some nodes, and the value of the last."""
        known, made = list(known), list[onnx.NodeProto]()
        for _ in range(self.rng.integers(1, 4)):
            kinds = ["plain", "plain", "turn"] + (["if", "loop", "while", "scan"] if depth < DEEPEST else [])
            kind = str(self.rng.choice(kinds))
            x, out = str(self.rng.choice(known)), self.name("v")
            made += getattr(self, f"_{kind}")(x, out, known, turn, depth)
            known.append(out)
        return made, known[-1]

    def _plain(self, x: str, out: str, known: list[str], turn: str, depth: int) -> list[onnx.NodeProto]:
        if self.rng.random() < 0.5:
            return [
                helper.make_node(str(self.rng.choice(["Tanh", "Sin", "Neg", "Identity"])), [x], [out], name=f"n{out}")
            ]
        return [helper.make_node("MatMul", [x, self.weight(COLUMNS, COLUMNS)], [out], name=f"n{out}")]

    def _turn(self, x: str, out: str, known: list[str], turn: str, depth: int) -> list[onnx.NodeProto]:
        cast = self.name("f")
        return [
            helper.make_node("Cast", [turn], [cast], to=TensorProto.FLOAT),
            helper.make_node("Add", [x, cast], [out]),
        ]

    def _if(self, x: str, out: str, known: list[str], turn: str, depth: int) -> list[onnx.NodeProto]:
        condition, branches = self.name("c"), {}
        for branch in ("then_branch", "else_branch"):
            nodes, last = self.nodes(known, turn, depth + 1)
            end = self.name("e")
            nodes.append(helper.make_node("Identity", [last], [end]))
            branches[branch] = helper.make_graph(nodes, branch, [], [_port(end)])
        unknown = self.rng.random() < (0.8 if self.unknown else 0.2)
        compare = helper.make_node("Less", [turn, self.integer(int(self.rng.integers(0, 3)))], [condition])
        if unknown:
            total = self.name("s")
            compare = helper.make_node("Less", [total, self.weight()], [condition])
            total_of = helper.make_node("ReduceSum", [x], [total], keepdims=0)
            return [total_of, compare, helper.make_node("If", [condition], [out], **branches)]
        return [compare, helper.make_node("If", [condition], [out], name=f"if{out}", **branches)]

    def _loop(self, x: str, out: str, known: list[str], turn: str, depth: int) -> list[onnx.NodeProto]:
        i, on, state, stays, end = (self.name(word) for word in ("i", "on", "a", "stays", "e"))
        nodes, last = self.nodes([*known, state], i, depth + 1)
        nodes += [helper.make_node("Identity", [last], [end]), helper.make_node("Identity", [on], [stays])]
        outs, ports, more = [out], [], []
        if self.rng.random() < 0.5:
            stacked, total = self.name("t"), self.name("r")
            nodes.append(helper.make_node("Neg", [end], [stacked]))
            ports.append(_port(stacked))
            first, lost = self.name("v"), self.name("z")
            outs = [first, total]
            more = [
                helper.make_node("Gather", [total, self.integer(0)], [lost], axis=0),
                helper.make_node("Add", [lost, first], [out]),
            ]
        body = helper.make_graph(
            nodes,
            "turn",
            [_port(i, TensorProto.INT64, []), _port(on, TensorProto.BOOL, []), _port(state)],
            [_port(stays, TensorProto.BOOL, []), _port(end), *ports],
        )
        count = "count" if self.unknown and self.rng.random() < 0.6 else self.integer(int(self.rng.integers(1, 4)))
        return [helper.make_node("Loop", [count, "", x], outs, name=f"loop{out}", body=body), *more]

    def _while(self, x: str, out: str, known: list[str], turn: str, depth: int) -> list[onnx.NodeProto]:
        i, on, k, state, more, k2, end = (self.name(word) for word in ("i", "on", "k", "a", "more", "k", "e"))
        nodes, last = self.nodes([*known, state], k, depth + 1)
        nodes += [
            helper.make_node("Identity", [last], [end]),
            helper.make_node("Add", [k, self.integer(int(self.rng.integers(1, 3)))], [k2]),
            helper.make_node("Less", [k2, self.integer(int(self.rng.integers(0, 5)))], [more]),
        ]
        if self.unknown:
            counts, largest, small, low = more, self.name("s"), self.name("c"), self.name("a")
            more = self.name("more")
            nodes += [
                helper.make_node("Abs", [end], [low]),
                helper.make_node("ReduceMax", [low], [largest], keepdims=0),
                helper.make_node("Less", [largest, self.weight()], [small]),
                helper.make_node("Or", [small, counts], [more])
                if self.rng.random() < 0.1
                else helper.make_node("And", [small, counts], [more]),
            ]
        body = helper.make_graph(
            nodes,
            "turn",
            [
                _port(i, TensorProto.INT64, []),
                _port(on, TensorProto.BOOL, []),
                _port(k, TensorProto.INT64, []),
                _port(state),
            ],
            [_port(more, TensorProto.BOOL, []), _port(k2, TensorProto.INT64, []), _port(end)],
        )
        begin = self.integer(int(self.rng.random() < 0.8), np.bool_)
        return [
            helper.make_node(
                "Loop", ["", begin, self.integer(0), x], [self.name("q"), out], name=f"while{out}", body=body
            )
        ]

    def _scan(self, x: str, out: str, known: list[str], turn: str, depth: int) -> list[onnx.NodeProto]:
        count, axis, turned = int(self.rng.integers(1, 4)), int(self.rng.integers(-3, 3)), int(self.rng.integers(0, 2))
        shape = [ROWS, COLUMNS]
        shape.insert(axis % 3, count)
        state, element, end, stacked = (self.name(word) for word in ("a", "x", "e", "t"))
        nodes, last = self.nodes([*known, state, element], turn, depth + 1)
        nodes += [helper.make_node("Identity", [last], [end]), helper.make_node("Neg", [element], [stacked])]
        body = helper.make_graph(nodes, "turn", [_port(state), _port(element)], [_port(end), _port(stacked)])
        to, total, lost, first = int(self.rng.integers(-3, 3)), self.name("r"), self.name("z"), self.name("v")
        scan = helper.make_node(
            "Scan", [x, self.weight(*shape)], [first, total], name=f"scan{out}", body=body, num_scan_inputs=1,
            scan_input_axes=[axis], scan_input_directions=[turned], scan_output_axes=[to],
            scan_output_directions=[int(self.rng.integers(0, 2))],
        )  # fmt: skip
        rest = [
            helper.make_node("Gather", [total, self.integer(0)], [lost], axis=to),
            helper.make_node("Add", [lost, first], [out]),
        ]
        return [scan, *rest]


def _port(name: str, kind: int = TensorProto.FLOAT, shape: list[int] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        name, kind, [ROWS, COLUMNS] if shape is None and kind == TensorProto.FLOAT else shape
    )


def drawn(seed: int, unknown: bool = False) -> onnx.ModelProto:
    """A random model of loops and branches; `unknown`: whether only the run knows turns and branches."""
    work = Drawn(np.random.default_rng(seed), 21, unknown=unknown)
    nodes, last = work.nodes(["x"], work.integer(1), 0)
    more, last = work.nodes([last, "x"], work.integer(0), 0)
    nodes += [*more, helper.make_node("Identity", [last], ["y"])]
    inputs = [_port("x"), *([_port("count", TensorProto.INT64, [])] if unknown else [])]
    graph = helper.make_graph(nodes, "net", inputs, [_port("y")], work.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", work.opset)], ir_version=10)


def different(seed: int) -> tuple[str, int]:
    """How the model written out differs from the loops, empty where it does not; and the number of its nodes."""
    proto = drawn(seed)
    x = np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    want = _outputs(proto, x)
    work = _Unrolling(from_proto(proto, Path("model.onnx")), unstacks=seed % 2 == 1)
    have = _outputs(ir.serde.serialize_model(work.model), x)
    count = work.model.graph.num_nodes()
    if have.shape != want.shape or not np.allclose(have, want, rtol=1e-4, atol=1e-4, equal_nan=True):
        return f"seed {seed}: {np.abs(have - want).max() if have.shape == want.shape else have.shape}", count
    left = [node.op_type for node in work.model.graph if node.op_type in ("Scan", "Loop")]
    return (f"seed {seed}: {left} of known turns" if left and count < MOST_NODES else ""), count


def differs_cut(seed: int, folder: Path) -> tuple[str, int]:
    """How the model differs on two ranks, with products in bodies sharded, empty where it does not; and its Begins."""
    proto, rng = drawn(seed, unknown=True), np.random.default_rng(seed)
    work = _Unrolling(from_proto(proto, Path("model.onnx")), keeps=True, unstacks=True)
    products = [node for node in work.graph if node.op_type == "MatMul" and node in work.origins]
    paths = [work.paths[node] for node in products if node.inputs[1] is not None and node.inputs[1].is_initializer()]
    rules = ", ".join(f'"{path}": {rng.choice(["colwise", "rowwise"])}' for path in paths)
    try:
        program = compiled(proto, f"ranks: 2\nsharding: {{{rules}}}\n", folder / str(seed))
    except CompileError as error:  # a product of constants has no parameter, and one that nothing reads is gone
        known = ("no parameter inside", "matches no module or node")
        return "" if any(words in str(error) for words in known) else f"seed {seed}: {error}", 0
    begins = counted(program).get("Begin", 0)
    with load_local(folder / str(seed), stall=10) as ranks:
        for count in (2, 1, 3):
            x = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
            want, have = _outputs(proto, x, count), ranks({"x": x, "count": np.array(count)})["y"]
            if not np.allclose(have, want, rtol=1e-3, atol=1e-3, equal_nan=True):
                return f"seed {seed}: {np.abs(have - want).max()} with {count} turns", begins
    return "", begins


def _outputs(proto: onnx.ModelProto, x: np.ndarray, count: int | None = None) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": x} | ({} if count is None else {"count": np.array(count)}))[0])


if __name__ == "__main__":
    cut = "--cut" in sys.argv
    number, first = (int(one) for one in [*(one for one in sys.argv[1:] if one != "--cut"), "0"][:2])
    wrong = begins = 0
    with tempfile.TemporaryDirectory() as name:
        for seed in range(first, first + number):
            text, count = differs_cut(seed, Path(name)) if cut else different(seed)
            wrong, begins = wrong + bool(text), begins + count
            if text:
                print(text, flush=True)
    print(f"{number} models, {wrong} wrong{f', {begins} bodies that ranks run together' if cut else ''}")
