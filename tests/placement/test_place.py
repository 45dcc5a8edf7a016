"""Where nodes run: the plan's rules, which node follows which, and how many transfers come of it."""

from pathlib import Path

import numpy as np
import pytest
from equivalence import compiled, model, same_as_whole
from partc.compiler.errors import CompileError

CHAIN = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 5] x) => (float[batch, 5] y) {
    [a] h1 = Relu(x)
    [b] h2 = Neg(h1)
    [c] h3 = Exp(h2)
    [d] y = Add(h3, h1)
}"""


def transfers(program) -> list[tuple[str, int, int]]:
    return [(e.value.name, e.ranks[0][0], e.ranks[1][0]) for e in program.events]


def plan(ranks: int, **placement: int) -> str:
    return "\n".join([f"ranks: {ranks}", "placement:", *(f"  {name}: {rank}" for name, rank in placement.items()), ""])


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ({"a": 0, "b": 0, "c": 0, "d": 0}, []),
        ({"a": 1, "d": 1}, [("y", 1, 0)]),
        ({"a": 0, "d": 1}, [("h1", 0, 1), ("y", 1, 0)]),
        ({"a": 0, "c": 1, "d": 1}, [("h1", 0, 1), ("y", 1, 0)]),
        ({"a": 0, "b": 1, "c": 2, "d": 2}, [("h1", 0, 1), ("h1", 0, 2), ("h2", 1, 2), ("y", 2, 0)]),
        ({"c": 2}, [("y", 2, 0)]),
    ],
)
def test_chain(rules: dict[str, int], want: list[tuple[str, int, int]], tmp_path: Path) -> None:
    text = plan(3, **rules)
    x = np.random.default_rng(0).standard_normal((7, 5), dtype=np.float32)
    program = same_as_whole(model(CHAIN), text, {"x": x}, {"x": x[:3]}, rtol=0, atol=0)
    assert sorted(transfers(program)) == sorted(want)


def test_one_send_per_value_and_rank(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[3, 5] x) => (float[3, 5] y, float[3, 5] z) {
        [a] h = Relu(x)
        [b] s = Add(h, h)
        [c] t = Mul(h, s)
        [d] y = Sub(t, h)
        [e] z = Neg(h)
    }"""
    program = same_as_whole(
        model(text), plan(3, a=0, b=1, c=1, d=1, e=2), {"x": np.ones((3, 5), np.float32)}, rtol=0, atol=0
    )
    assert sorted(transfers(program)) == [("h", 0, 1), ("h", 0, 2), ("y", 1, 0), ("z", 2, 0)]


def test_an_output_that_is_an_input_elsewhere(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[3, 5] x) => (float[3, 5] h, float[3, 5] y) {
        [a] h = Relu(x)
        [b] y = Neg(h)
    }"""
    program = same_as_whole(model(text), plan(3, a=1, b=2), {"x": np.ones((3, 5), np.float32)}, rtol=0, atol=0)
    assert sorted(transfers(program)) == [("h", 1, 0), ("h", 1, 2), ("y", 2, 0)]


def test_a_body_captures_values_of_other_ranks(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[3, 5] x, bool c) => (float[3, 5] y) {
        [a] h = Relu(x)
        [b] g = Neg(x)
        [i] y = If(c) <
            then_branch = t () => (float[3, 5] p) { p = Add(h, g) },
            else_branch = e () => (float[3, 5] q) { q = Sub(h, g) }
        >
    }"""
    x = np.random.default_rng(1).standard_normal((3, 5), dtype=np.float32)
    steps = [{"x": x, "c": np.array(flag)} for flag in (True, False)]
    program = same_as_whole(model(text), plan(3, a=0, b=1, i=2), *steps, rtol=0, atol=0)
    assert sorted(transfers(program)) == [("g", 1, 2), ("h", 0, 2), ("y", 2, 0)]


SHAPES = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 2, 3] y) <int64[1] zero = {0}, int64[2] tail = {2, 3}> {
    [a] h = Relu(x)
    [s] shape = Shape(h)
    [g] batch = Gather(shape, zero)
    [k] target = Concat <axis = 0> (batch, tail)
    [b] n = Neg(x)
    [r] y = Reshape(n, target)
}"""


def test_shape_arithmetic_is_sent_as_a_shape_where_its_value_is_not(tmp_path: Path) -> None:
    x = np.random.default_rng(2).standard_normal((7, 6), dtype=np.float32)
    program = same_as_whole(model(SHAPES), plan(2, a=0, b=1, r=1), {"x": x}, {"x": x[:2]}, rtol=0, atol=0)
    assert transfers(program) == [("shape", 0, 1), ("y", 1, 0)]


def test_shape_arithmetic_follows_its_reader_where_its_value_is(tmp_path: Path) -> None:
    text = SHAPES.replace("Neg(x)", "Neg(h)")
    x = np.random.default_rng(2).standard_normal((7, 6), dtype=np.float32)
    program = same_as_whole(model(text), plan(2, a=0, s=0, g=0, k=0, b=1, r=1), {"x": x}, rtol=0, atol=0)
    assert transfers(program) == [("h", 0, 1), ("y", 1, 0)]


def test_constants_are_on_every_rank_that_reads_them(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[3, 5] x) => (float[3, 5] y) <float[5, 5] w> {
        [t] wt = Transpose(w)
        [a] h = MatMul(x, wt)
        [b] y = MatMul(h, wt)
    }"""
    proto = model(
        text.replace("<float[5, 5] w>", "<float[5, 5] w = {" + ", ".join(str(float(k)) for k in range(25)) + "}>")
    )
    program = same_as_whole(proto, plan(2, t=0, a=0, b=1), {"x": np.ones((3, 5), np.float32)}, rtol=0, atol=0)
    assert transfers(program) == [("h", 0, 1), ("y", 1, 0)]
    assert [len(part.weights) for part in program.parts] == [1, 1]


def test_a_free_chain_moves_to_its_readers_where_that_saves_a_transfer(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[4, 6] x) => (float[4, 2] y) {
        [a] h = Relu(x)
        [n] m = Neg(h)
        [s] p, q, r = Split <axis = 1, num_outputs = 3> (m)
        [b] u = Add(p, q)
        [c] y = Add(u, r)
    }"""
    program = same_as_whole(model(text), plan(2, a=0, b=1, c=1), {"x": np.ones((4, 6), np.float32)}, rtol=0, atol=0)
    assert len(program.events) == 2


def test_outputs_go_where_the_plan_says(tmp_path: Path) -> None:
    text = plan(3, a=1, b=2, c=2, d=2)
    for rule, want in [
        ("outputs: 1", [("y", 2, 1)]),
        ("outputs: {y: [0, 1]}", [("y", 2, 0), ("y", 2, 1)]),
        ("outputs: {y: producer}", []),
    ]:
        program = same_as_whole(model(CHAIN), text + rule + "\n", {"x": np.ones((2, 5), np.float32)}, rtol=0, atol=0)
        assert [t for t in transfers(program) if t[0] == "y"] == want


def test_a_rank_without_work_is_a_warning(tmp_path: Path) -> None:
    program = compiled(model(CHAIN), plan(4, a=0, b=2, c=2, d=2), tmp_path / "build")
    assert program.warnings == ("ranks 1, 3 have nothing to do; place nodes there, or lower `ranks`",)


def test_all_wrong_rules_are_named_at_once(tmp_path: Path) -> None:
    text = "ranks: 2\nplacement:\n  aa: 0\n  b: 1\n  nothing.at.all: 0\noutputs:\n  z: 0\n"
    with pytest.raises(CompileError) as error:
        compiled(model(CHAIN), text, tmp_path / "build")
    assert [problem.where for problem in error.value.problems] == ["plan.yaml:3", "plan.yaml:5", "plan.yaml:7"]
    assert "'a'" in error.value.problems[0].help
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("pattern", ["node_relu_7", "node_relu*", "node_[qr]elu_[7-8]"])
def test_a_node_is_spoken_of_by_its_own_name_where_no_path_matches(pattern: str) -> None:
    """A file of torch's has paths by its modules; Netron shows the names."""
    proto = model(CHAIN.replace("[a]", "[node_relu_7]").replace("[b]", "[node_neg]"))
    for node in proto.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.0', 'call']")
    x = np.random.default_rng(0).standard_normal((7, 5), dtype=np.float32)
    text = f"ranks: 2\nplacement: {{layers: 0, '{pattern}': 1}}\n"
    program = same_as_whole(proto, text, {"x": x}, rtol=0, atol=0)
    assert [program.paths[node] for node, placed in program.placement.items() if placed.ranks == (1,)] == [
        "layers.0.Relu"
    ]
