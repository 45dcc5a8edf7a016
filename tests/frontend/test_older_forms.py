"""Sparse weights and ops of opset 6 are read as what they mean; what cannot be is refused with the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend.older_forms import _CONVERSIONS
from partc.compiler.frontend.onnx_file import from_proto

RNG = np.random.default_rng(3)
Shape = Sequence[int | str]


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def model(
    nodes: Sequence[onnx.NodeProto], shape: Shape, weights: Mapping[str, np.ndarray], opset: int = 6
) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    ports += [helper.make_tensor_value_info(name, TensorProto.FLOAT, one.shape) for name, one in weights.items()]
    graph = helper.make_graph(
        nodes,
        "old",
        ports,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(one, name) for name, one in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)


def result(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """What onnxruntime makes of the model as it is read."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    read = ir.serde.serialize_model(from_proto(proto, Path("old.onnx"))).SerializeToString()
    return onnxruntime.InferenceSession(read, options).run(None, {"x": x})[0]


X, SQUARE, C, LAST = floats(2, 3, 4, 5), floats(2, 3, 3, 3), floats(3), floats(5)
PER_CHANNEL = C[:, None, None]
VARIANCE = np.abs(floats(3)) + 0.5
NORMAL = {"s": C, "b": floats(3), "m": floats(3), "v": VARIANCE}
NORMED = (X - NORMAL["m"][:, None, None]) / np.sqrt(VARIANCE[:, None, None] + 1e-3) * PER_CHANNEL
ROWS, GEMM, BIAS = floats(2, 8), floats(5, 8), floats(5)
node = helper.make_node
CASES: dict[str, tuple[Any, ...]] = {
    "a channel": ([node("Add", ["x", "k"], ["y"], broadcast=1, axis=1)], X, {"k": C}, X + PER_CHANNEL),
    "sizes that fit in two ways": (
        [node("Relu", ["x"], ["h"]), node("Mul", ["h", "k"], ["y"], broadcast=1, axis=1)],
        SQUARE,
        {"k": C},
        np.maximum(SQUARE, 0) * PER_CHANNEL,
    ),
    "records": (
        [node("Sub", ["x", "k"], ["y"], broadcast=1, axis=0)],
        SQUARE[:, :, 0, 0].T,
        {"k": C},
        SQUARE[:, :, 0, 0].T - C[:, None],
    ),
    "dims in the middle": (
        [node("Div", ["x", "k"], ["y"], broadcast=1, axis=1)],
        X,
        {"k": floats(3, 4) + 9},
        None,
    ),
    "the last dim": ([node("Add", ["x", "k"], ["y"], broadcast=1)], X, {"k": LAST}, X + LAST),
    "counted from the end": ([node("Add", ["x", "k"], ["y"], broadcast=1, axis=-1)], X, {"k": LAST}, X + LAST),
    "a slope a channel": (
        [node("PRelu", ["x", "k"], ["y"])],
        SQUARE,
        {"k": C},
        np.where(SQUARE < 0, SQUARE * PER_CHANNEL, SQUARE),
    ),
    "one slope": (
        [node("PRelu", ["x", "k"], ["y"])],
        SQUARE,
        {"k": C[:1]},
        np.where(SQUARE < 0, SQUARE * C[0], SQUARE),
    ),
    "normalization": (
        [
            node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n"], is_test=1, epsilon=1e-3),
            node("Dropout", ["n"], ["y"], is_test=1, ratio=0.5),
        ],
        X,
        NORMAL,
        NORMED + NORMAL["b"][:, None, None],
    ),
    "a linear layer": (
        [node("Gemm", ["x", "w", "b"], ["y"], transB=1, broadcast=1)],
        ROWS,
        {"w": GEMM, "b": BIAS},
        ROWS @ GEMM.T + BIAS,
    ),
    "a larger picture": (
        [node("Upsample", ["x"], ["y"], height_scale=2.0, width_scale=3.0)],
        X,
        {},
        X.repeat(2, 2).repeat(3, 3),
    ),
    "a recurrent layer": (
        [node("RNN", ["x", "w", "r"], ["h"], hidden_size=2, output_sequence=1), node("Identity", ["h"], ["y"])],
        X[0, :, :, :],
        {"w": floats(1, 2, 5), "r": np.zeros((1, 2, 2), np.float32)},
        None,
    ),
}
CASES["dims in the middle"] = (*CASES["dims in the middle"][:3], X / CASES["dims in the middle"][2]["k"][:, :, None])
CASES["a recurrent layer"] = (
    *CASES["a recurrent layer"][:3],
    np.tanh(X[0] @ CASES["a recurrent layer"][2]["w"][0].T)[:, None],
)


@pytest.mark.parametrize("name", CASES)
def test_ops_of_opset_6_mean_what_they_meant(name: str) -> None:
    nodes, x, weights, wanted = CASES[name]
    shape = ["batch", *x.shape[1:]] if name != "records" else x.shape
    np.testing.assert_allclose(result(model(nodes, shape, weights), x), wanted, rtol=1e-5, atol=1e-5)


def test_every_op_that_opset_7_has_anew_is_converted() -> None:
    versions: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions.setdefault(schema.name, set()).add(schema.since_version)
    assert {op for op, known in versions.items() if 7 in known and min(known) < 7} == set(_CONVERSIONS)


@pytest.mark.parametrize(
    ("nodes", "fact"),
    [
        ([node("Dropout", ["x"], ["y"], "drop")], "Dropout 'drop' of opset 6: it is in training mode"),
        (
            [node("Add", ["x", "k"], ["y"], "add", broadcast=1, axis=3)],
            "'k' of rank 2 does not fit 'x' of rank 4 at axis 3",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(nodes: list[onnx.NodeProto], fact: str) -> None:
    with pytest.raises(CompileError, match=fact):
        from_proto(model(nodes, X.shape, {"k": floats(4, 5)}), Path("old.onnx"))


def sparse(indices: np.ndarray, dims: Sequence[int] = (4, 3), count: int = 3) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.array([1.5, -2, 3], np.float32)[:count], "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(indices, "at"), list(dims))


WHERE = np.array([[0, 1], [1, 1], [2, 2]])
DENSE = np.zeros((4, 3), np.float32)
DENSE[tuple(WHERE.T)] = [1.5, -2, 3]


@pytest.mark.parametrize("indices", [WHERE, np.array([1, 4, 8])])
def test_sparse_weights_and_constants_are_dense(indices: np.ndarray) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Constant", [], ["c"], sparse_value=sparse(np.array([2]), (3,), 1)),
        node("Add", ["h", "c"], ["y"]),
    ]
    proto = model(nodes, ["batch", 4], {}, opset=17)
    proto.ir_version = 8
    proto.graph.sparse_initializer.append(sparse(indices))
    x = floats(5, 4)
    np.testing.assert_allclose(result(proto, x), x @ DENSE + [0, 0, 1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("tensor", "fact"),
    [
        (sparse(WHERE, (1 << 20, 1 << 20)), "the sparse weight 'w' has .* elements; a model has 2,147,483,648 bytes"),
        (sparse(np.array([1, 4, 12])), r"the sparse weight 'w' has an index outside of \[4, 3\]"),
        (sparse(np.array([1, 4])), r"the sparse weight 'w' has 3 values and indices of shape \[2\]"),
    ],
)
def test_broken_sparse_weights_are_refused(tensor: onnx.SparseTensorProto, fact: str) -> None:
    proto = model([node("MatMul", ["x", "w"], ["y"])], ["batch", 4], {}, opset=17)
    proto.graph.sparse_initializer.append(tensor)
    with pytest.raises(CompileError, match=fact):
        from_proto(proto, Path("old.onnx"))
