"""The origin's networks in a model.py, and how tests of `shard` load one and find its lines."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from partc.compiler.errors import CompileError
from partc.compiler.load.python import load_python
from partc.compiler.load.source import Source

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
