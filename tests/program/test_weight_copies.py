"""Rewrites that spare copies of weights: the same bits, and the table of a Gather and the matrix of a product stay as the file has them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser
from partc.runtime.artifact.format import STORED
from partc.runtime.program.ort import quiet_session
from partc.runtime.program.weight_copies import multiply_by_transposed, read_narrow

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
net (int64[n] ids, bool some) => (float[n, 8] y, float[n, 6] z, float[6, 8] kept, float[8] picked) {
  rows = Gather(table, ids)
  turned = Transpose<perm: ints = [1, 0]>(table)
  up = MatMul(rows, turned)
  again = Transpose(matrix)
  y = MatMul(up, again)
  kept = Identity(again)
  square = Transpose<perm: ints = [0, 1]>(matrix)
  z = MatMul(y, square)
  picked = If(some) <
    then_branch = one () => (float[8] a) { first = Constant<value_int: int = 0>() a = Gather(again, first) },
    else_branch = two () => (float[8] b) { first = Constant<value_int: int = 1>() b = Gather(again, first) }
  >
}"""


def stored(folder: Path, kind: type[np.generic]) -> onnx.ModelProto:
    """The model with both weights in `weights`, in elements of this kind."""
    proto = parser.parse_model(MODEL)
    rng, offset = np.random.default_rng(2), 0
    with (folder / "weights").open("wb") as file:
        for name, shape in (("table", (6, 6)), ("matrix", (8, 6))):
            data = rng.normal(size=shape).astype(kind).tobytes()
            tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", "weights"), ("offset", offset), ("length", len(data))):
                tensor.external_data.add(key=key, value=str(value))
            if kind is not np.float32:
                tensor.metadata_props.add(key=STORED, value=np.dtype(kind).name)
            proto.graph.initializer.append(tensor)
            offset += file.write(data)
    return proto


def widened(proto: onnx.ModelProto, folder: Path, kind: type[np.generic]) -> onnx.ModelProto:
    """The same model with its weights inside, in float32."""
    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    data = np.fromfile(folder / "weights", kind).astype(np.float32)
    for tensor in plain.graph.initializer:
        count = int(np.prod(tensor.dims))
        tensor.CopyFrom(onnx.numpy_helper.from_array(data[:count].reshape(tuple(tensor.dims)), tensor.name))
        data = data[count:]
    return plain


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_keep_their_bits(kind: type[np.generic], tmp_path: Path) -> None:
    proto = stored(tmp_path, kind)
    plain = widened(proto, tmp_path, kind)
    multiply_by_transposed(proto)
    read_narrow(proto.graph)
    types = [node.op_type for node in proto.graph.node]
    assert types.count("FusedMatMul") == 2
    assert types.count("Transpose") == 2  # one is read by others, the other does not turn
    names = ["y", "z", "kept", "picked"]
    for some in (True, False):
        feeds = {"ids": np.array([3, 0, 5]), "some": np.array(some)}
        want = quiet_session(plain.SerializeToString()).run(names, feeds)
        have = quiet_session(proto.SerializeToString(), str(tmp_path)).run(names, feeds)
        assert [one.tobytes() for one in have] == [one.tobytes() for one in want]


def test_a_table_is_read_as_the_file_has_it(tmp_path: Path) -> None:
    proto = stored(tmp_path, ml_dtypes.bfloat16)
    read_narrow(proto.graph)
    (gather,) = (node for node in proto.graph.node if node.op_type == "Gather")
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    assert kinds == {"table.narrow": TensorProto.BFLOAT16, "matrix.narrow": TensorProto.BFLOAT16}
    assert gather.input[0] == "table.narrow"
