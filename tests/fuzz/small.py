"""The small model that fuzzing compiles, and artifacts of it, each made once in a process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

TEXT = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 5] y) {
    [up] h = MatMul(x, v)  [shift] s = Add(h, b)  [act] t = Tanh(s)  [down] d = MatMul(t, w)  [last] y = Add(d, c) }"""
SHAPES = {"v": (6, 12), "b": (12,), "w": (12, 5), "c": (5,)}


def proto() -> onnx.ModelProto:
    """The model: two layers."""
    found = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(5)
    for name, shape in SHAPES.items():
        found.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return found


@functools.cache
def model() -> bytes:
    """Its file."""
    data: bytes = proto().SerializeToString(deterministic=True)
    return data


@functools.cache
def artifact(kind: str) -> Path:
    """An artifact of a kind that `mutation_kinds.py` names, to be copied; it lies there until the process ends."""
    from mutation_kinds import KINDS, build

    folder = tempfile.TemporaryDirectory()
    _KEPT.append(folder)
    return build(KINDS[kind], Path(folder.name) / "build")


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
