"""What onnxruntime is predicted to need is what it asks the system for."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from partc.compiler import compile_model
from partc.compiler.cost.memory import Pool, laid_out, memory_of_ranks, session_places
from partc.compiler.cost.sizes import Operand
from partc.runtime.artifact.liveness import Span
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.program.steps import Segment

RUN = """
import sys
import numpy as np
import onnxruntime
from onnx import parser
from partc.runtime.devices.devices import HOST
from partc.runtime.program.ort import new_session
onnxruntime.set_default_logger_severity(1)
model = parser.parse_model(sys.argv[1])
session = new_session(model.SerializeToString(), 1, HOST, {})
x = np.ones((64, 1000), np.float32)
for _ in range(3):
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, 1, x.shape, x.ctypes.data)
    y = np.empty((64, 1000), np.float32)
    binding.bind_output("y", "cpu", 0, 1, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)
"""
X = 64 * 1000 * 4
CASES = {
    "two at once": ("a = Softmax (x) b = Mul (a, x) y = Softmax (b)", 2 * X),
    "over the operand": ("a = Softmax (x) b = Sigmoid (a) c = Tanh (b) y = Softmax (c)", X),
    "views": (
        "a = Softmax (x) s = Constant <value_ints = [1000, 64]> () b = Reshape (a, s) c = Mul (b, b) y = Reshape (c, r)",
        2 * X,
    ),
    "a weight that is turned": ("b = Softmax (x) a = Transpose <perm = [1, 0]> (w) y = MatMul (a, b)", X),
    "a turn of a scan": (
        "y = Scan <num_scan_inputs = 1, body = turn (float[1000] v) => (float[1000] o) { e = Exp (v) t = Erf (e) o = Mul (t, e) }> (x)",
        8000,
    ),
    "a selection": ("a = Softmax (x) c = Greater (a, x) y = Where (c, a, x)", X + X // 4 + 2 * X),
}


@pytest.mark.parametrize("name", CASES)
def test_sessions_need_what_is_predicted(name: str) -> None:
    nodes, expected = CASES[name]
    head = 'ir_version: 10, opset_import: ["": 21]'
    weight = f"float[64, 64] w = {{{', '.join(map(str, range(64 * 64)))}}}"
    ports = f"(float[64, 1000] x) => (float[64, 1000] y) <int64[2] r = {{64, 1000}}, {weight}>"
    text = f"<{head}> g {ports} {{ {nodes} }}"
    model = parser.parse_model(text)
    shapes = dict.fromkeys("xabcy", (64, 1000)) | ({"b": (1000, 64), "c": (1000, 64)} if name == "views" else {})
    nodes_of = [node for node in model.graph.node if node.op_type != "Constant"]
    segment = Segment(nodes_of, ("x",), ("y",), ("r", "s", "w"))
    places = session_places(
        segment, lambda one: Operand(shapes.get(one), 1 if (one, name) == ("c", "a selection") else 4)
    )
    pool = Pool()
    assert (pool.hold(places), pool.hold(places)) == (expected, 0)
    done = subprocess.run([sys.executable, "-c", RUN, text], capture_output=True, text=True, check=True)
    allocated = sum(map(int, re.findall(r"Extended allocation by (\d+) bytes", done.stderr)))
    assert allocated == -(-expected // 256) * 256, "in whole blocks of 256 bytes"


def test_freed_memory_has_what_is_not_larger() -> None:
    rising, pool = [Span(str(k), k, k, (), bytes) for k, bytes in enumerate((2, 4, 8))], Pool()
    assert pool.hold(rising) == 14
    assert pool.hold(rising[::-1]) == 0
    together = [Span("a", 0, 2, (), 5), Span("b", 1, 2, (), 3), Span("c", 2, 2, (), None)]
    assert pool.hold(together) == 0, "5 takes all of 8, 3 all of 4"
    assert pool.hold([Span("a", 0, 0, (), 20)]) == 20
    assert pool.hold([Span("a", 0, 1, (), 9), Span("b", 1, 1, (), 11), Span("c", 2, 2, (), 20)]) == 0, (
        "a part of 20, then all"
    )


LOAD = """
import sys
from pathlib import Path
import numpy as np
from onnx import parser
from partc.runtime.devices.devices import HOST
from partc.runtime.program.ort import new_session
def bytes(key):
    rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(rows[key].split()[0])
text = '<ir_version: 10, opset_import: ["": 17]> g (float[2, 2] x) => (float[2, 2] y) { y = MatMul (x, x) }'
one = parser.parse_model(text)
new_session(one.SerializeToString(), 1, HOST, {}).run(None, {"x": np.ones((2, 2), np.float32)})
Path("/proc/self/clear_refs").write_text("5")
begin = bytes("VmRSS")
new_session(sys.argv[1], 1, HOST, {})
print(bytes("VmHWM") - begin)
"""
WIDE, NARROW = (512, 512), (512, 128)
WIDER = (128, 512)
CHAINS = [[WIDE], [WIDE, NARROW, WIDER, NARROW, WIDER], [WIDER, NARROW, WIDER, WIDE], [WIDE, WIDE], [WIDER, NARROW] * 5]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of a process's memory is to be had")
@pytest.mark.parametrize(("chain", "normalized"), [(chain, k % 2 == 0) for k, chain in enumerate(CHAINS)])
def test_weights_of_convolutions_are_laid_out_as_predicted(
    chain: list[tuple[int, int]], normalized: bool, tmp_path: Path
) -> None:
    nodes, tensors, last = list[onnx.NodeProto](), list[onnx.TensorProto](), "x"
    for k, (channels, filters) in enumerate(chain):
        weight = np.random.default_rng(k).standard_normal((filters, channels, 3, 3), np.float32)
        tensors.append(numpy_helper.from_array(weight, f"w{k}"))
        nodes.append(helper.make_node("Conv", [last, f"w{k}"], [last := f"c{k}"], pads=[1] * 4))
        if normalized:
            tensors += [numpy_helper.from_array(np.ones(filters, np.float32), f"{one}{k}") for one in "smbv"]
            nodes.append(helper.make_node("BatchNormalization", [last, *(f"{one}{k}" for one in "smbv")], [f"n{k}"]))
            nodes.append(helper.make_node("Relu", [f"n{k}"], [last := f"r{k}"]))
    (x, y) = (
        helper.make_tensor_value_info(name, 1, [1, size, 8, 8])
        for name, size in (("x", chain[0][0]), (last, chain[-1][1]))
    )
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=[helper.make_opsetid("", 17)], ir_version=10
    )
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=10_000)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "m.onnx")], capture_output=True, text=True, check=True
    )
    weights = {tensor.name: 4 * math.prod(tensor.dims) for tensor in tensors if tensor.name.startswith("w")}
    ratio = (laid_out(nodes, weights) + sum(weights.values())) / int(done.stdout)
    assert 0.6 < ratio < 1.5, (
        "what is freed meanwhile differs by process, from 0.75 to 1.3; each weight 3.8 times would be up to 1.9"
    )


def sessions_of(nodes: str, folder: Path) -> int:
    """The predicted bytes of the sessions of a model with a matrix of 1 MiB."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[8, 512] x) => (float[8, 512] y) {{ {nodes} }}'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((512, 512), np.float32), "w"))
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    (folder / "plan.yaml").write_text("ranks: 1\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    (memory,) = memory_of_ranks(open_artifact(folder / "build"), {})
    return memory.targets[0].sessions


def test_a_matrix_is_packed_once_for_each_product(tmp_path: Path) -> None:
    nodes = ["a = MatMul(x, w)", "b = Relu(a)", "t = Transpose<perm = [1, 0]>(w)", "c = MatMul(b, t)", "y = Relu(c)"]
    one = sessions_of("a = MatMul(x, w) y = Relu(a)", tmp_path / "one")
    two = sessions_of(" ".join(nodes), tmp_path / "two")
    assert 1 << 20 <= two - one < (1 << 20) + 200_000
