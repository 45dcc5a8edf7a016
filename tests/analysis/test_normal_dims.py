"""The normal form of dims: named cases, sound by enumeration, and what it spares compiled models."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import compiled, model, same_as_whole
from onnx import TensorProto, helper, numpy_helper
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import normal_dim
from partc.compiler.dims.symbol import Symbol
from partc.runtime.artifact.dim_expression import parse
from sympy.functions.elementary.miscellaneous import MinMaxBase

KNOWN = {
    "batch": Symbol(divisor=2).facts(),
    "seq": Symbol(max=7).facts(),
    "odd": Symbol(divisor=8, remainder=1).facts(),
    "n": Facts(),
    "m": Facts(),
}
"""What is known; n and m may be 0. Other names may be any number."""

CASES = {
    "64*n*m/(16*n*m)": "4",
    "Min(7, seq)": "seq",
    "Max(1, seq)": "seq",
    "Max(1, n)": "Max(1, n)",
    "Max(0, n - 1)": "Max(0, n - 1)",
    "Max(seq, 9, n)": "Max(9, n)",
    "floor(batch/2) + 1": "batch/2 + 1",
    "floor(n/2)": "floor(n/2)",
    "floor((2*n + 2*m)/2)": "m + n",
    "floor(n*m/(2*m))": "floor(n/2)",
    "2*floor(batch/2)": "batch",
    "floor(odd/8)": "odd/8 - 1/8",
    "-floor(-n/3)": "floor(n/3 + 2/3)",
    "ceiling(n/3)": "floor(n/3 + 2/3)",
    "floor((n - 3)/2) + 1": "floor(n/2 + 1/2) - 1",
    "floor(floor(batch/2)/2)": "floor(batch/4)",
    "Mod(batch, 2)": "0",
    "Mod(seq, 8)": "seq",
    "Mod(odd + 3, 8)": "4",
    "4*(n + m) - 4*m": "4*n",
    "Abs(n)": "n",
    "Max(0, other)": "Max(0, other)",
}


@pytest.mark.parametrize(("text", "want"), CASES.items())
def test_normal_form(text: str, want: str) -> None:
    assert str(normal_dim(ir.SymbolicDim(text), KNOWN)) == want


def test_a_constant_is_a_number() -> None:
    assert normal_dim(ir.SymbolicDim("4"), {}) == 4
    assert isinstance(normal_dim(ir.SymbolicDim("n/n + 3"), {}), int)


TERMS = ["n", "2*n + 3", "n - m", "batch", "batch/2", "odd", "3*odd + batch", "seq", "7 - seq", "n*seq"]


@pytest.mark.parametrize(
    "function", ["floor(({0})/3)", "ceiling(({0})/4)", "Mod({0}, 8)", "Max({0}, {1})", "Min({0}, {1})"]
)
def test_the_normal_form_is_equal_for_every_legal_size(function: str) -> None:
    sizes = {name: [v for v in range(18) if facts.contains(v)] for name, facts in KNOWN.items()}
    sizes |= {"n": [0, 1, 5], "m": [0, 2]}
    bindings = [
        dict(zip(sizes, row, strict=True)) for row in itertools.islice(itertools.product(*sizes.values()), 0, None, 7)
    ]
    for first, second in itertools.product(TERMS, TERMS if "{1}" in function else TERMS[:1]):
        text = function.format(first, second)
        have, want = parse(str(normal_dim(ir.SymbolicDim(text), KNOWN))), parse(text)
        assert all(have(binding) == want(binding) for binding in bindings), text


def test_sympy_compares_no_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would compare each two of a Max, for seconds where there are many and for nothing: `normal` knows more."""
    compared = []
    monkeypatch.setattr(MinMaxBase, "_find_localzeros", lambda values, **_: compared.append(values) or set(values))
    names = [f"of_many_{k}" for k in range(24)]
    assert str(normal_dim(ir.SymbolicDim(f"Max(3, {', '.join(names)}, {names[0]}, 2)"), {})).count(",") == 24
    ends = extents("x", b=0, s=1, t=2)
    nodes = [
        *ends,
        helper.make_node("Concat", ["b", "s", "t"], ["sizes"], "sizes", axis=0),
        *(helper.make_node(f"Reduce{one}", ["sizes"], [one], one, keepdims=1) for one in ("Max", "Min")),
        *(helper.make_node(one, ["b", "s", "t"], [f"own{one}"], f"own{one}") for one in ("Max", "Min")),
        helper.make_node("Slice", ["x", "Min", "ownMax", "axis"], ["part"], "part"),
        helper.make_node("Split", ["part"], ["first", "y"], "split", axis=1, num_outputs=2),
    ]
    proto = exported(nodes, {"x": ["batch", "rows", "columns"]}, [integers("axis", 1)])
    program = compiled(proto, 'ranks: 1\nplacement: {"**": 0}\n', tmp_path / "build", check=False)
    dims = [str(dim) for value, info in program.values.items() if value.name == "y" for dim in info.shape or ()]
    assert "Max" in dims[1] or "Min" in dims[1], dims
    assert not compared


def weight(name: str, *shape: int) -> onnx.TensorProto:
    random = np.random.default_rng(0)
    return numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)


def integers(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def exported(
    nodes: list[onnx.NodeProto], inputs: dict[str, list[object]], weights: list[onnx.TensorProto]
) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "main", ports, [out], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def extents(value: str, **names: int) -> list[onnx.NodeProto]:
    return [helper.make_node("Shape", [value], [name], name, start=axis, end=axis + 1) for name, axis in names.items()]


def grouped_heads() -> onnx.ModelProto:
    """Keys of grouped queries as an exporter writes them: a Reshape with -1 heads, then an Expand that names the number."""
    constants = [integers(f"c{n}", n) for n in (2, 4, 8, 32)]
    return exported(
        [
            helper.make_node("MatMul", ["x", "w"], ["k"], "k_proj"),
            *extents("x", b=0, s=1),
            helper.make_node("Concat", ["b", "s", "minus", "c32"], ["t1"], "t1", axis=0),
            helper.make_node("Reshape", ["k", "t1"], ["k4"], "view"),
            helper.make_node("Transpose", ["k4"], ["kt"], "turn", perm=[0, 2, 1, 3]),
            helper.make_node("Unsqueeze", ["kt", "c2"], ["ku"], "apart"),
            helper.make_node("Concat", ["b", "c4", "c2", "s", "c32"], ["t2"], "t2", axis=0),
            helper.make_node("Expand", ["ku", "t2"], ["ke"], "expand"),
            helper.make_node("Concat", ["b", "c8", "s", "c32"], ["t3"], "t3", axis=0),
            helper.make_node("Reshape", ["ke", "t3"], ["y"], "merge"),
        ],
        {"x": ["batch", "seq", 64]},
        [weight("w", 64, 128), integers("minus", -1), *constants],
    )


def test_heads_that_a_reshape_leaves_open_are_not_gathered() -> None:
    step = {"x": np.random.default_rng(1).standard_normal((3, 5, 64)).astype(np.float32)}
    plan = "ranks: 2\nsharding: {k_proj: colwise}\nsymbols: {batch: {unique: true}}\noutputs: cut\n"
    program = same_as_whole(grouped_heads(), plan, step, rtol=1e-5, atol=1e-5)
    assert [event.op_type for event in program.events] == []


def test_a_cache_is_not_gathered() -> None:
    proto = exported(
        [
            helper.make_node("MatMul", ["x", "w"], ["k"], "k_proj"),
            *extents("x", b=0, s=1),
            helper.make_node("Concat", ["b", "s", "minus", "c16"], ["t"], "t", axis=0),
            helper.make_node("Reshape", ["k", "t"], ["k4"], "view"),
            helper.make_node("Transpose", ["k4"], ["kt"], "turn", perm=[0, 2, 1, 3]),
            helper.make_node("Concat", ["past", "kt"], ["y"], "cat", axis=2),
        ],
        {"x": ["batch", "t", 64], "past": ["batch", 2, "past", 16]},
        [weight("w", 64, 32), integers("minus", -1), integers("c16", 16)],
    )
    random = np.random.default_rng(1)
    step = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in (("x", (2, 3, 64)), ("past", (2, 2, 5, 16)))
    }
    plan = "ranks: 2\ndataset: {past: [1, 2, 1, 1]}\noutputs: cut\nsharding: {k_proj: colwise}\n"
    program = same_as_whole(proto, plan, step, rtol=1e-5, atol=1e-5)
    assert [event.op_type for event in program.events] == []


def test_learned_positions_keep_batch_and_sequence() -> None:
    proto = exported(
        [
            *extents("x", b=0, s=1),
            helper.make_node("Slice", ["table", "c0", "s", "c0"], ["pos"], "pos"),
            helper.make_node("Add", ["x", "pos"], ["e"], "add"),
            helper.make_node("MatMul", ["e", "w1"], ["q"], "q_proj"),
            helper.make_node("Concat", ["b", "s", "minus", "c32"], ["t"], "t", axis=0),
            helper.make_node("Reshape", ["q", "t"], ["q4"], "view"),
            helper.make_node("Relu", ["q4"], ["r"], "relu"),
            helper.make_node("Concat", ["b", "s", "minus"], ["t2"], "t2", axis=0),
            helper.make_node("Reshape", ["r", "t2"], ["q3"], "view2"),
            helper.make_node("MatMul", ["q3", "w2"], ["y"], "o_proj"),
        ],
        {"x": ["batch", "seq", 64]},
        [
            weight("table", 9, 64),
            weight("w1", 64, 128),
            weight("w2", 128, 64),
            integers("c0", 0),
            integers("minus", -1),
            integers("c32", 32),
        ],
    )
    plan = "ranks: 2\nsharding: {q_proj: colwise, o_proj: rowwise}\nsymbols: {seq: {max: 9}}\n"
    steps = [{"x": np.ones((2, seq, 64), np.float32)} for seq in (9, 4)]
    program = same_as_whole(proto, plan, *steps, rtol=1e-5, atol=1e-5)
    assert [event.op_type for event in program.events] == ["Reduce"]


def test_an_inferred_size_that_is_a_number_trains(tmp_path: Path) -> None:
    proto = model(
        """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, seq, 2, 3] x) => (float[batch, seq, 4] y) <float[6, 4] w = {0}, int64[3] flat = {0, 0, -1}> {
        [a] h = Reshape(x, flat)
        [b] y = MatMul(h, w)
    }""".replace("w = {0}", "w = {" + ", ".join(["0.5"] * 24) + "}")
    )
    program = compiled(proto, "ranks: 1\n", tmp_path / "build")
    assert [info.shape for value, info in program.values.items() if value.name == "h"] == [("batch", "seq", 6)]
