"""Stages that `partc plan --stages` proposes: along the data's way, even, each with the keys and values of its own layers."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from equivalence import same_as_whole
from onnx import TensorProto, helper, numpy_helper
from partc.cli.commands.plan import command
from partc.compiler import compile_model
from partc.compiler.analysis.shapes import shapes
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import run_passes
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.flow import Unit
from partc.compiler.proposal.propose import _placement, parsed, propose
from partc.compiler.proposal.stages import Stage, _partition, balanced_stages
from partc.compiler.start import start
from proposal_case import WIDTH, WORDS, Graph, source

HEADS, SIZE = 2, WIDTH // 2


def decoder(layers: int = 4, past: bool = True, first: int | None = None) -> onnx.ModelProto:
    """A step of a decoder: keys and values of all layers go in and out, and what is made of them stands first, the last layer's in front.

    `first`: the layer whose nodes on its cache stand at the very begin; the last one by default.
    """
    g = Graph()
    fed: dict[str, list[int | str]] = {"ids": ["batch", "seq"]}
    order = sorted(range(layers), key=lambda layer: layer != (layers - 1 if first is None else first))
    for k in order if past else []:
        for name in "kv":
            fed[f"past_{k}_{name}"] = ["batch", HEADS, "past", SIZE]
            g.node(f"layers.{k}.scaled_{name}", "Identity", f"past_{k}_{name}")
    cos = g.node("angles.Cos", "Cos", g.node("angles.Cast", "Cast", "ids", to=1))
    angles = g.node("layers.0.angles", "Unsqueeze", cos, g.integers("angle.axes", 2))
    split, joined = g.integers("split", 0, 0, HEADS, SIZE), g.integers("joined", 0, 0, WIDTH)
    x = g.node("embed.Gather", "Gather", g.weight("embed.weight", WORDS, WIDTH), "ids")
    outputs: dict[str, list[int | str]] = {}
    for k in range(layers):
        layer, heads = f"layers.{k}", {}
        turned = g.node(f"{layer}.turned", "Mul", g.norm(f"{layer}.norm", x), angles)
        for name in "qkv":
            made = g.linear(f"{layer}.{name}", turned, WIDTH, WIDTH)
            one = g.node(f"{layer}.{name}_split", "Reshape", made, split)
            heads[name] = g.node(f"{layer}.{name}_heads", "Transpose", one, perm=(0, 2, 1, 3))
        for name in "kv":
            output = f"present_{k}_{name}"
            before = [f"layers.{k}.scaled_{name}.out"] if past else []
            g.nodes.append(helper.make_node("Concat", [*before, heads[name]], [output], f"{layer}.join_{name}", axis=2))
            outputs[output] = ["batch", HEADS, "length", SIZE]
        keys = g.node(f"{layer}.keys", "Transpose", f"present_{k}_k", perm=(0, 1, 3, 2))
        shares = g.node(f"{layer}.shares", "Softmax", g.node(f"{layer}.scores", "MatMul", heads["q"], keys))
        mixed = g.node(f"{layer}.mix", "MatMul", shares, f"present_{k}_v")
        back = g.node(f"{layer}.back", "Transpose", mixed, perm=(0, 2, 1, 3))
        out = g.linear(f"{layer}.out", g.node(f"{layer}.joined", "Reshape", back, joined), WIDTH, WIDTH)
        x = g.node(f"add_{k}", "Add", x, out)  # of no module with weights
    logits = g.node("head.MatMul", "MatMul", g.norm("norm", x), g.weight("head.weight", WIDTH, WORDS))
    outputs = {logits: ["batch", "seq", WORDS], **outputs}
    graph = helper.make_graph(
        g.nodes,
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64 if name == "ids" else TensorProto.FLOAT, dims)
            for name, dims in fed.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def step(proto: onnx.ModelProto, batch: int = 2, seq: int = 3, past: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seq)
    sizes = {"batch": batch, "seq": seq, "past": past}
    found = {}
    for port in proto.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in port.type.tensor_type.shape.dim]
        whole = port.type.tensor_type.elem_type == TensorProto.INT64
        found[port.name] = random.integers(0, WORDS, shape) if whole else random.standard_normal(shape, np.float32)
    return found


def placed(text: str) -> Mapping[str, tuple[int, ...]]:
    return {rule.pattern: rule.ranks for rule in parse_plan(text, "plan.yaml").placement}


def against_the_way(program: Complete, each: int) -> list[str]:
    """The nodes that read from a later stage than theirs, where a stage has so many ranks."""
    at = {node: one.groups[0][0] // each for node, one in program.placement.items() if not one.follows}
    return [
        program.paths[node]
        for node in at
        for value in program.reads[node]
        if (producer := value.producer()) in at and at[producer] > at[node]
    ]


@pytest.mark.parametrize(("generates", "layers"), [(False, [0, 4]), (True, [2, 2])])
def test_a_large_table_weighs_nothing_where_steps_make_tokens(generates: bool, layers: list[int]) -> None:
    """A step reads a row of it a token."""
    proto, rows = decoder(), 100 * WORDS
    (table,) = (one for one in proto.graph.initializer if one.name == "embed.weight")
    table.CopyFrom(numpy_helper.from_array(np.zeros((rows, WIDTH), np.float32), table.name))
    program = run_passes(start(*parsed(source(proto), "ranks: 2\n", "plan.yaml")), shapes)
    stages = balanced_stages(program, 2, generates=generates)
    assert [sum(path.startswith("layers.") for path in one.paths) for one in stages] == layers
    assert "embed" in stages[0].paths[0]


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize(
    ("degrees", "sent"),
    [
        (Degrees(stages=2), {"Send": 2}),
        (Degrees(stages=4), {"Send": 4}),
        (Degrees(tp=2), {"AllReduce": 5, "Exchange": 1}),
        (Degrees(tp=2, stages=2), {"AllReduce": 5, "Exchange": 1, "Send": 2}),
    ],
    ids=["2 stages", "4 stages", "tp 2", "tp 2, 2 stages"],
)
def test_a_cache_stays_with_its_layer(degrees: Degrees, sent: Mapping[str, int], first: int) -> None:
    """Between stages goes the residual alone, and the logits go to rank 0; a cache never does."""
    proto = decoder(first=first)
    text, missing = propose(source(proto), "model.onnx", degrees)
    assert not missing
    program = same_as_whole(proto, text, step(proto), step(proto, past=0), rtol=1e-4, atol=1e-5)
    ops = [event.op_type for event in program.events]
    assert {op: ops.count(op) for op in ops} == sent
    assert not against_the_way(program, degrees.tp)
    assert not [event.name for event in program.events if "present" in event.name or "past" in event.name]


def test_stages_are_runs_of_layers() -> None:
    text, _ = propose(source(decoder()), "model.onnx", Degrees(stages=2))
    assert placed(text) == {
        "embed": (0,),
        "layers.[0-1]": (0,),
        "layers.[2-3]": (1,),
        "norm": (1,),
        "head": (1,),
    }
    assert '"present_*_k": producer' in text


def test_a_cache_that_is_cut_arrives_so() -> None:
    text, _ = propose(source(decoder()), "model.onnx", Degrees(tp=2))
    assert '"past_*_k": [null, tp, null, null]' in text
    assert '"present_*_v": cut' in text
    text, _ = propose(source(decoder()), "model.onnx", Degrees(tp=2, dp=2))
    assert '"past_*_k": [dp, tp, null, null]' in text
    assert "ids: [dp, null]" in text


def test_keys_and_values_of_a_first_step_stay_too() -> None:
    proto = decoder(2, past=False)
    text, _ = propose(source(proto), "model.onnx", Degrees(stages=2))
    assert '"present_*_v": producer' in text
    program = same_as_whole(proto, text, step(proto), rtol=1e-4, atol=1e-5)
    assert len(program.events) == 2


def chain(*nodes: tuple[str, str, str, str], outputs: tuple[str, ...]) -> onnx.ModelProto:
    """Products and the like one behind the other: the node's name, its op, what it reads, and its weight."""
    g = Graph()
    known = set[str]()
    for name, op, x, weight in nodes:
        if weight not in known:
            g.weight(weight, *((1,) if op == "Mul" else (WIDTH, WIDTH)))
            known.add(weight)
        g.node(name, op, x, weight)
    rows = ["batch", WIDTH]
    graph = helper.make_graph(
        g.nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, rows)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, rows) for name in outputs],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_result_that_is_read_on_is_no_cache() -> None:
    encoder = ("encoder.MatMul", "MatMul", "x", "we")
    pooler = ("pooler.MatMul", "MatMul", "encoder.MatMul.out", "wp")
    proto = chain(encoder, pooler, outputs=("encoder.MatMul.out", "pooler.MatMul.out"))
    plan, _ = propose(source(proto), "model.onnx", Degrees(stages=2))
    assert not parse_plan(plan, "plan.yaml").outputs


@pytest.mark.parametrize("op", ["MatMul", "Mul"])
def test_modules_that_are_called_in_turn_are_one_unit(op: str) -> None:
    """a, b, a, b: no order of the two is along the way. A small b, a Mul with one number, runs with its readers instead."""
    proto = chain(
        ("a.MatMul", "MatMul", "x", "wa"),
        ("b.first", op, "a.MatMul.out", "wb"),
        ("a.MatMul_1", "MatMul", "b.first.out", "wa"),
        ("b.second", op, "a.MatMul_1.out", "wb"),
        ("c.MatMul", "MatMul", "b.second.out", "wc"),
        ("d.MatMul", "MatMul", "c.MatMul.out", "wd"),
        outputs=("d.MatMul.out",),
    )
    text, _ = propose(source(proto), "model.onnx", Degrees(stages=2))
    x = np.random.default_rng(1).standard_normal((3, WIDTH), np.float32)
    program = same_as_whole(proto, text, {"x": x}, rtol=1e-4, atol=1e-4)
    assert not against_the_way(program, 1)
    assert len(program.events) == 2


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_are_within_a_tenth_of_equal_where_layers_allow_it(count: int) -> None:
    random = np.random.default_rng(count)
    for _ in range(100):
        costs = random.random(12) + 0.2
        costs = list(costs / costs.sum())
        crossing = [0, *map(int, random.integers(1, 100, 11))]
        begins = [0, *_partition(costs, crossing, count), 12]
        heaviest = max(sum(costs[a:b]) for a, b in itertools.pairwise(begins))
        least = _least(costs, count)
        assert heaviest <= max(least, 1.1 / count) + 1e-9


def _least(costs: list[float], count: int) -> float:
    """The least cost of the heaviest of so many runs, by trying all."""
    if count == 1:
        return sum(costs)
    return min(max(sum(costs[:k]), _least(costs[k:], count - 1)) for k in range(1, len(costs) - count + 2))


def test_a_weight_that_is_turned_counts_where_it_is_read() -> None:
    """As torch's exporter leaves a Linear: Transpose of the weight, which runs wherever it is read."""
    g = Graph()
    x = "x"
    for k in range(4):
        turned = g.node(f"layers.{k}.Transpose", "Transpose", g.weight(f"layers.{k}.weight", WIDTH, WIDTH), perm=(1, 0))
        x = g.node(f"layers.{k}.MatMul", "MatMul", x, turned)
    rows = ["batch", WIDTH]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, rows) for name in ("x", x)]
    graph = helper.make_graph(g.nodes, "g", ports[:1], ports[1:], g.weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    text, _ = propose(source(proto), "model.onnx", Degrees(stages=2))
    assert text.count("50 % of the cost: 50 % of the weights, 50 % of the operations") == 2
    assert placed(text) == {"layers.[0-1]": (0,), "layers.[2-3]": (1,)}


def test_a_layer_is_cut_only_where_no_more_crosses() -> None:
    """Whole layers are two thirds to one; behind the first sum of layer 0 stages are equal, and one value crosses as between layers."""
    g = Graph()

    def product(name: str, x: str) -> str:
        return g.node(f"{name}.MatMul", "MatMul", x, g.weight(f"{name}.weight", WIDTH, WIDTH))

    x = product("stem.b", product("stem.a", "x"))
    for k in range(2):
        for part in ("mix", "mlp"):
            x = g.node(f"layers.{k}.{part}_sum", "Add", x, product(f"layers.{k}.{part}", x))
    rows = ["batch", WIDTH]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, rows) for name in ("x", x)]
    graph = helper.make_graph(g.nodes, "g", ports[:1], ports[1:], g.weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    text, _ = propose(source(proto), "model.onnx", Degrees(stages=2))
    assert placed(text) == {
        "stem.a": (0,),
        "stem.b": (0,),
        "layers.0.mix": (0,),
        "layers.0.mlp": (1,),
        "layers.1": (1,),
    }
    rows = np.random.default_rng(0).standard_normal((3, WIDTH), np.float32)
    assert len(same_as_whole(proto, text, {"x": rows}, rtol=1e-4, atol=1e-4).events) == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_each_reader_of_a_shared_table_has_a_stage(tp: int) -> None:
    """An encoder and a decoder look their rows up in one table: the decoder's stand where they are read, first in the file or not."""
    g = Graph()
    table = g.weight("table", WORDS, WIDTH)
    second = g.node("decoder.embed.Gather", "Gather", table, "more")
    first = g.node("encoder.embed.Gather", "Gather", table, "ids")
    for k in range(2):
        first = g.node(f"encoder.add_{k}", "Add", first, g.linear(f"encoder.layers.{k}.mlp", first, WIDTH, WIDTH))
    x = g.node("decoder.join", "Add", second, first)
    for k in range(2):
        x = g.node(f"decoder.add_{k}", "Add", x, g.linear(f"decoder.layers.{k}.mlp", x, WIDTH, WIDTH))
    fed = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch"]) for name in ("ids", "more")]
    out = helper.make_tensor_value_info(x, TensorProto.FLOAT, ["batch", WIDTH])
    proto = helper.make_model(
        helper.make_graph(g.nodes, "g", fed, [out], g.weights),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    text, _ = propose(source(proto), "model.onnx", Degrees(tp=tp, stages=2))
    random = np.random.default_rng(0)
    program = same_as_whole(
        proto, text, {name: random.integers(0, WORDS, 3) for name in ("ids", "more")}, rtol=1e-4, atol=1e-4
    )
    at = {program.paths[node]: one.groups for node, one in program.placement.items() if node.op_type == "Gather"}
    stages = [tuple(range(k * tp, k * tp + tp)) for k in range(2)]
    assert at == {"encoder.embed.Gather": (stages[0],), "decoder.embed.Gather": (stages[1],)}
    assert "Reduce" not in [event.op_type for event in program.events]


def test_a_node_that_must_follow_is_placed_once() -> None:
    stages = [Stage((Unit(("a",)),), ("a", "b"), 0), Stage((Unit(("c",)),), ("c",), 4)]
    lines = [*_placement(Degrees(stages=2), stages, {"b": 1})]
    assert [line.strip() for line in lines if ":" in line and "#" not in line] == ["a: 0", "c: 1", "b: 1"]


def test_uneven_stages_are_said() -> None:
    said = "# The stages are not within 10 % of equal cost, since no closer cut sends as little: "
    assert said in propose(source(decoder(3)), "model.onnx", Degrees(stages=2))[0]
    assert said not in propose(source(decoder(4)), "model.onnx", Degrees(stages=2))[0]


PLACED = """
from partc.compiler import Input, Symbol, nn, place


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 30), nn.Linear(30, 12)
        self.relu = nn.ReLU()
        self.a.place(4)
        place(self.relu, [2, 3])
        place(self.b, 1)

    def forward(self, op, x):
        return self.relu(op, self.b(op, self.relu(op, self.a(op, x))))


model = Net()
inputs = {"x": Input([Symbol(), 12], "float32")}
"""


@pytest.mark.parametrize("asked", [("--tp", "2"), ("--dp", "2"), ("--stages", "2"), ("--tp", "2", "--stages", "2")])
def test_a_model_that_places_itself_is_placed_anew(asked: tuple[str, ...], tmp_path: Path) -> None:
    """Its own lines name ranks that the plan does not have; they decide nothing."""
    (tmp_path / "model.py").write_text(PLACED)
    done = CliRunner().invoke(command, [str(tmp_path / "model.py"), *asked, "-o", str(tmp_path / "plan.yaml")])
    assert done.exit_code == 0, done.output
    report = compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")
    assert {rank for placed in report.program.placement.values() for rank in placed.ranks} == {
        *range(report.program.plan.ranks)
    }


def test_a_starting_plan_has_the_ranks_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PLACED)
    done = CliRunner().invoke(command, [str(tmp_path / "model.py")])
    assert parse_plan(done.output, "plan.yaml").ranks == 5


def test_a_line_of_the_model_that_decides_must_name_ranks_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PLACED)
    (tmp_path / "plan.yaml").write_text("ranks: 2\nplacement: {a: 0}\n")
    with pytest.raises(CompileError, match=r"model.py:11: place of 'relu': rank 2, but there are 2 ranks") as error:
        compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")
    assert len(error.value.problems) == 1


def test_a_small_layer_that_is_sharded_has_a_stage() -> None:
    """Too small to be a unit of its own, its sharding alone would put it on all ranks, since it reads inputs alone."""
    g = Graph()
    x = g.node("body.0.MatMul", "MatMul", "x", g.weight("body.0.weight", 96, 96))
    x = g.node("body.1.MatMul", "MatMul", x, g.weight("body.1.weight", 96, 96))
    up = g.node("small.up.MatMul", "MatMul", "z", g.weight("small.up.weight", 4, 6))
    z = g.node("small.down.MatMul", "MatMul", g.node("small.act", "Relu", up), g.weight("small.down.weight", 6, 4))
    x = g.node("join", "Concat", x, z, axis=1)
    x = g.node("body.2.MatMul", "MatMul", x, g.weight("body.2.weight", 100, 96))
    x = g.node("body.3.MatMul", "MatMul", x, g.weight("body.3.weight", 96, 96))
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 96), ("z", 4), (x, 96))
    ]
    graph = helper.make_graph(g.nodes, "g", ports[:2], ports[2:], g.weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    text, _ = propose(source(proto), "model.onnx", Degrees(tp=2, stages=2))
    assert "small.up" in text.partition("sharding:")[2].partition("# outputs")[0]
    random = np.random.default_rng(0)
    fed = {"x": random.standard_normal((3, 96), np.float32), "z": random.standard_normal((3, 4), np.float32)}
    program = same_as_whole(proto, text, fed, rtol=1e-3, atol=1e-3)
    assert {len(placed.groups[0]) for node, placed in program.placement.items() if node.op_type == "MatMul"} == {2}
