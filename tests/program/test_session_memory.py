"""What onnxruntime takes inside of a session is what it asks the system for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from onnx import parser
from partc.runtime.artifact.liveness import Span
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.program.session_memory import OwnArena, SharedArena, inside
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
    "a selection": ("a = Softmax (x) c = Greater (a, x) y = Where (c, a, x)", X + X // 4 + 2 * X),
}


@pytest.mark.parametrize("name", CASES)
def test_the_arena_grows_as_predicted(name: str) -> None:
    nodes, expected = CASES[name]
    head = 'ir_version: 10, opset_import: ["": 21]'
    weight = f"float[64, 64] w = {{{', '.join(map(str, range(64 * 64)))}}}"
    ports = f"(float[64, 1000] x) => (float[64, 1000] y) <int64[2] r = {{64, 1000}}, {weight}>"
    text = f"<{head}> g {ports} {{ {nodes} }}"
    model = parser.parse_model(text)
    shapes = dict.fromkeys("xabcy", (64, 1000)) | ({"b": (1000, 64), "c": (1000, 64)} if name == "views" else {})
    kinds = {"c": "bool"} if name == "a selection" else {}
    known = {one: (BY_NAME[kinds.get(one, "float")], shape) for one, shape in shapes.items()}
    nodes_of = [node for node in model.graph.node if node.op_type != "Constant"]
    segment = Segment(nodes_of, ("x",), ("y",), ("r", "s", "w"))
    arena = SharedArena()
    for _ in range(3):
        places = inside(segment, known.get)
        arena.run(places)
    assert all(place.bytes is not None for place in places)
    assert arena.bytes == expected
    done = subprocess.run([sys.executable, "-c", RUN, text], capture_output=True, text=True, check=True)
    assert sum(map(int, re.findall(r"Extended allocation by (\d+) bytes", done.stderr))) == expected


def test_an_arena_of_values_that_grow_asks_for_twice_as_much_each_time() -> None:
    arena, mib = OwnArena(), 1 << 20
    for bytes, used in ((mib // 2, mib // 2), (mib // 4, mib // 2), (3 * mib, 7 * mib)):
        arena.run([Span("x", 0, 1, (), bytes)])
        assert arena.bytes == used
    assert [block.size // mib for block in arena.blocks] == [1, 2, 4]
