"""Symbolic shapes, what the plan's Symbols promise of them, and steps that keep or break the promises."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, model, same_as_whole
from partc.compiler.analysis.shape_rules import CORRECTIONS
from partc.compiler.dims.expression import facts_of
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Typed
from partc.runtime import load_local
from partc.runtime.errors import InputError

DIGITS = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 1, 28, 28] x) => (float[r, c] y, float[s, t] z) <int64[2] flat = {-1, 784}, int64[2] rows = {-1, 49}> {
    [a] h = Reshape(x, flat)
    [b] y = Relu(h)
    [c] z = Reshape(h, rows)
}"""


def facts(program: Typed, name: str) -> list[str]:
    (info,) = [info for value, info in program.values.items() if value.name == name]
    known = {symbol: info.facts for symbol, info in program.symbols.items()}
    assert info.shape is not None
    return [str(facts_of(dim, known)) for dim in info.shape]


def test_facts_go_through_reshape(tmp_path: Path) -> None:
    program = compiled(model(DIGITS), "ranks: 1\nsymbols: {batch: {divisor: 64}}\n", tmp_path / "build")
    assert facts(program, "y") == ["[64,inf]|64N", "784"]
    assert facts(program, "z") == ["[1024,inf]|1024N", "49"]


PAIR = """<ir_version: 10, opset_import: ["" : 21]>
main (float[b, 5] x, float[c, 5] m) => (float[b, 5] y, float[c, 5] z) {
    [a] y = Relu(x)
    [b] z = Neg(m)
}"""


def test_one_compile_serves_all_legal_sizes_and_no_other(tmp_path: Path) -> None:
    text = "ranks: 2\nsymbols: {batch: {divisor: 8, max: 512}}\nplacement: {a: 1}\n"
    compiled(model(DIGITS), text, tmp_path / "build")
    with load_local(tmp_path / "build") as ranks:
        for batch in (8, 16, 64, 512, 8):
            assert ranks({"x": np.ones((batch, 1, 28, 28), np.float32)})["y"].shape == (batch, 784)
        for batch in (12, 520, 0, 4):
            with pytest.raises(InputError, match=f"input 'x' axis 0 is {batch}") as error:
                ranks({"x": np.ones((batch, 1, 28, 28), np.float32)})
            assert "8*N" in str(error.value)
        assert ranks({"x": np.ones((24, 1, 28, 28), np.float32)})["y"].shape == (24, 784)


@pytest.mark.parametrize(("unique", "names"), [("false", {"batch", "batch_m_0"}), ("true", {"batch"})])
def test_uses_of_a_symbol_are_equal_only_if_it_is_unique(unique: str, names: set[str], tmp_path: Path) -> None:
    proto = model(PAIR.replace("float[b, 5] x", "float[p, 5] x").replace("float[c, 5] m", "float[q, 5] m"))
    text = f"""ranks: 2
symbols: {{batch: {{divisor: 4, unique: {unique}}}}}
inputs: {{x: [batch, 5], m: [batch, 5]}}
placement: {{a: 0, b: 1}}
"""
    program = compiled(proto, text, tmp_path / "build")
    assert set(program.symbols) == names
    with load_local(tmp_path / "build") as ranks:
        different = {"x": np.ones((4, 5), np.float32), "m": np.ones((8, 5), np.float32)}
        if unique == "true":
            with pytest.raises(InputError, match="must be equal"):
                ranks(different)
        else:
            assert ranks(different)["z"].shape == (8, 5)
        with pytest.raises(InputError, match="4\\*N"):
            ranks({"x": np.ones((6, 5), np.float32), "m": np.ones((6, 5), np.float32)})


def test_a_dim_that_the_model_names_twice_is_one(tmp_path: Path) -> None:
    proto = model(PAIR.replace("[c, 5]", "[b, 5]"))
    program = compiled(proto, "ranks: 2\nsymbols: {n: {divisor: 2}}\ninputs: {x: [n, 5]}\n", tmp_path / "build")
    assert list(program.symbols) == ["n"]


def test_names_of_dims_become_identifiers(tmp_path: Path) -> None:
    proto = model(PAIR)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch size"
    proto.graph.input[1].type.tensor_type.shape.dim[0].ClearField("dim_param")
    x, m = np.ones((3, 5), np.float32), np.ones((2, 5), np.float32)
    program = same_as_whole(proto, "ranks: 2\nplacement: {a: 1}\n", {"x": x, "m": m}, rtol=0, atol=0)
    assert set(program.symbols) == {"batch_size", "m_dim_0"}


@pytest.mark.parametrize("name", ["Max(n", "batch size", "n +", "in"])
def test_dims_may_be_named_by_any_text_in_training_too(name: str, tmp_path: Path) -> None:
    proto = model("""<ir_version: 10, opset_import: ["" : 21]>
        main (float[b, 5] x, float[b, c] m) => (float[b, 5] y) <float[5] w = {1, 2, 3, 4, 5}> {
            h = Mul(x, w)  s = ReduceSum(m)  y = Add(h, s) }""")
    for port in proto.graph.input:
        port.type.tensor_type.shape.dim[0].dim_param = name
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_value = -1
    loss = "{type: mean_squared, prediction: y, target: goal}"
    plan = "ranks: 2\ndataset: data_parallel\nsymbols: {SYMBOL: {divisor: 2}}\n"
    plan += f"train: {{loss: {loss}, optimizer: {{type: sgd, lr: 0.1}}}}\n"
    symbol = {"Max(n": "Max_n", "batch size": "batch_size", "n +": "n", "in": "dim_in"}[name]
    program = compiled(proto, plan.replace("SYMBOL", symbol), tmp_path / "build")
    assert set(program.symbols) == {symbol, "m_dim_1"}


POOLED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[n, 1, SIZE, 8] x) => (float[n, 1, r, s] y) {
    [a] h = Relu(x)  [pool] y = MaxPool <kernel_shape = [WIDE, 2], strides = [2, 2]> (h) }"""


def test_a_window_larger_than_a_fixed_dim() -> None:
    proto = model(POOLED.replace("SIZE", "1").replace("WIDE", "2"))
    x = np.arange(16, dtype=np.float32).reshape(2, 1, 1, 8)
    same_as_whole(proto, "ranks: 2\nplacement: {pool: 1}\n", {"x": x}, rtol=0, atol=0)


def test_windows_that_leave_a_negative_size_are_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        compiled(model(POOLED.replace("SIZE", "1").replace("WIDE", "5")), "ranks: 1\n", tmp_path / "build")
    assert "MaxPool 'pool' makes 'y' of [n,1,-1,4]" in str(error.value)
    assert "it reads 'h' of [n,1,1,8]" in str(error.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("symbols: {bach: {divisor: 8}}", ["plan.yaml:2", "no input has a dim 'bach'", "say 'batch'"]),
        ("inputs: {y: [batch, 1, 28, 28]}", ["plan.yaml:2", "the model has no input 'y'"]),
        ("inputs: {x: [batch, 784]}", ["plan.yaml:2", "has 4 dims in the model and 2 in the plan"]),
        ("inputs: {x: [batch, 3, 28, 28]}", ["plan.yaml:2", "dim 1 of input 'x' is 1 in the model and 3 in the plan"]),
        ("symbols: {batch: {divisor: 0}}", ["plan.yaml:2", "divisor"]),
        ("symbols: {batch: {divisor: 8, remainder: 8}}", ["plan.yaml:2", "remainder"]),
    ],
)
def test_plans_that_contradict_the_inputs(plan: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        compiled(model(DIGITS), f"ranks: 1\n{plan}\n", tmp_path / "build")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("key", ["inputs: {m: [8, 3]}", "batch_dims: {m: 0}", "dataset: {m: [2, 1]}"])
def test_an_input_that_a_training_does_not_read_is_left_out(key: str, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[8, 3] x, float[8, 3] m) => (float[8, 2] y, float[8, 3] z)
        <float[3, 2] a = {1,2,3,4,5,6}> { y = MatMul(x, a)  z = Neg(m) }"""
    compiled(model(text), f"ranks: 2\n{key}\n", tmp_path / "infer")
    train = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.1}}\n"
    with pytest.raises(CompileError) as error:
        compiled(model(text), f"ranks: 2\n{key}\n{train}", tmp_path / "train")
    assert "plan.yaml:2: the training has no input 'm'" in str(error.value)
    assert "inputs that neither the loss nor a metric reads are left out" in str(error.value)


def test_a_loss_of_parameters_alone_is_told_to_read_no_input(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[n, 3] x) => (float[n, 2] y, float loss) <float[3, 2] a = {1,2,3,4,5,6}>
        { y = MatMul(x, a)  s = Mul(a, a)  loss = ReduceSum<keepdims = 0>(s) }"""
    plan = "ranks: 1\nsymbols: {n: {divisor: 2}}\ntrain: {loss: loss, optimizer: {type: sgd, lr: 0.1}}\n"
    with pytest.raises(CompileError, match="depend on parameters alone"):
        compiled(model(text), plan, tmp_path / "build")


def test_a_wrong_declared_shape_harms_nobody() -> None:
    proto = model("""<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 6] x) => (float[batch, 6] y) {
        [a] h = Relu(x)
        [b] y = Neg(h)
    }""")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("h", 1, ["nothing", 9]))
    same_as_whole(proto, "ranks: 2\nplacement: {a: 0, b: 1}\n", {"x": np.ones((3, 6), np.float32)}, rtol=0, atol=0)


def test_shapes_that_only_a_run_tells() -> None:
    proto = model(
        """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 6] x) => (float[k] y) {
        [a] flags = Greater(x, x0)
        [b] where = NonZero(flags)
        [c] t = Transpose <perm = [1, 0]> (where)
        [d] g = GatherND(x, t)
        [e] y = Neg(g)
    }""".replace("(float[k] y) {", "(float[k] y) <float[1] x0 = {0.5}> {")
    )
    random = np.random.default_rng(0)
    steps = [{"x": random.random((n, 6), dtype=np.float32)} for n in (3, 1, 8)] + [{"x": np.zeros((2, 6), np.float32)}]
    program = same_as_whole(proto, "ranks: 2\nplacement: {a: 0, b: 1, c: 0, d: 1, e: 0}\n", *steps, rtol=0, atol=0)
    assert {e.value.name for e in program.events} == {"flags", "where", "t", "g"}


SLICES = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, s] x) => (float[batch, k] y) <int64[1] start = {0}, int64[1] end = {5}, int64[1] axis = {1}> {
    [a] h = Slice(x, start, end, axis)
    [b] y = Neg(h)
}"""


def test_a_slice_may_end_beyond_its_dim(tmp_path: Path) -> None:
    text = "ranks: 2\nplacement: {a: 1, b: 0}\n"
    steps = [{"x": np.ones((2, n), np.float32)} for n in (3, 5, 9)]
    program = same_as_whole(model(SLICES), text, *steps, rtol=0, atol=0)
    assert [info.shape for value, info in program.values.items() if value.name == "h"] == [("batch", "Min(5, s)")]
    proven = compiled(model(SLICES), text + "symbols: {s: {min: 5}}\n", tmp_path / "build")
    assert [info.shape for value, info in proven.values.items() if value.name == "h"] == [("batch", 5)]


@pytest.mark.parametrize(
    ("promise", "shape"),
    [("", None), ("symbols: {p: {}, q: {}}", ("Max(p, q)", 5)), ("symbols: {p: {min: 2}}", ("p", 5))],
)
def test_unequal_dynamic_dims_broadcast(promise: str, shape: tuple[object, ...] | None) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[p, 5] x, float[q, 5] m) => (float[k, 5] y) {
        [a] h = Add(x, m)
        [b] y = Neg(h)
    }"""
    plan = f"ranks: 2\nplacement: {{a: 1, b: 0}}\n{promise}\n"
    sizes = [(4, 4), (4, 1)] + ([(1, 4)] if shape != ("p", 5) else []) + ([] if promise else [(1, 0)])
    steps = [{"x": np.ones((p, 5), np.float32), "m": np.ones((q, 5), np.float32)} for p, q in sizes]
    program = same_as_whole(model(text), plan, *steps, rtol=0, atol=0)
    assert [info.shape for value, info in program.values.items() if value.name == "h"] == [shape]


def test_a_shape_rule_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise IndexError("no such dim")

    monkeypatch.setitem(CORRECTIONS, ("", "Tanh"), fails)
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[4, 3] x) => (float[4, 3] y) { [first] h = Tanh (x) [second] y = Relu (h) }"""
    program = compiled(model(text), "ranks: 2\nplacement: {second: 1}\n", tmp_path)
    assert program.warnings == ("first: the shape rule of Tanh failed (no such dim); sizes behind it count as unknown",)
