"""The origin's networks in a model.py, and how tests of `shard` load one and find its lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import onnx_ir as ir
import pytest
from equivalence import same, whole_outputs
from partc.compiler.errors import CompileError
from partc.compiler.frontend.python import load_python
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import Report, compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local

HEAD = "from partc.compiler import Input, nn, shard\n"
NET = """
class BasicBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense1 = nn.Linear(32, 32)
        self.gelu = nn.GELU()
        self.dense2 = nn.Linear(32, 32)

    def forward(self, op, x):
        x = self.dense1(op, x)
        x = self.gelu(op, x)
        x = self.dense2(op, x)
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = BasicBlock()
        self.block2 = BasicBlock()
        self.block3 = BasicBlock()

    def forward(self, op, x):
        x = self.block1(op, x)
        x = self.block2(op, x)
        x = self.block3(op, x)
        return x
"""
INPUTS = 'inputs = {"x": Input(["batch", 32])}\n'
DENSE_RELU = """
def dense_relu(op, x, weight, bias):
    x = op.MatMul(x, weight)
    x = op.Add(x, bias)
    x = op.Relu(x)
    return x
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(HEAD + dedent(text))
    return path


def load(folder: Path, text: str) -> Source:
    return load_python(write(folder, text))


def refused(folder: Path, text: str) -> str:
    with pytest.raises(CompileError) as caught:
        load(folder, text)
    return str(caught.value)


def line(folder: Path, text: str) -> int:
    """The line of model.py that has this text."""
    lines = (folder / "model.py").read_text().splitlines()
    (found,) = [number for number, each in enumerate(lines, 1) if text in each]
    return found


def compiled(folder: Path, text: str, plan: str) -> Report:
    """Compiles the model.py in memory by the text of a plan into `build` beside it."""
    return compile_source(load(folder, text), parse_plan(plan, "plan.yaml"), folder / "build", "model.py")


def said_by_compile(folder: Path, text: str, plan: str) -> str:
    with pytest.raises(CompileError) as caught:
        compiled(folder, text, plan)
    return str(caught.value)


def same_on_all_ranks(
    folder: Path, text: str, plan: str, *steps: Mapping[str, Any], rtol: float, atol: float
) -> Complete:
    """Compiles the model.py and compares every step's outputs, on in-process ranks, with those of the whole model."""
    report = compiled(folder, text, plan)
    proto = ir.to_proto(load(folder, text).model)
    with load_local(report.out, devices={"cuda": "cpu"}) as ranks:
        for inputs in steps:
            want, have = whole_outputs(proto, inputs), ranks(inputs)
            assert set(have) == set(want)
            for output, value in want.items():
                same(have[output], value, output, rtol, atol)
    return report.program


def collectives(program: Complete) -> list[tuple[str, str, tuple[tuple[int, ...], ...]]]:
    """Every message and collective: the op, the value, the ranks."""
    return [(event.op_type, event.value.name or "", event.ranks) for event in program.events]
