"""A model.py written into a folder and loaded: `HEAD` comes before its text, `WHOLE` is a small one with its inputs."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from partc.compiler.errors import CompileError
from partc.compiler.frontend.python import load_python
from partc.compiler.frontend.source import Source

HEAD = "from partc.compiler import Input, Symbol, nn, place\n"
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 7)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, op, x):
        return self.fc2(op, op.Relu(self.fc1(op, x)))
"""
WHOLE = f'{NET}\nmodel = Net()\ninputs = {{"x": ["batch", 5]}}\n'


def write(folder: Path, text: str, **siblings: str) -> Path:
    for name, content in siblings.items():
        (folder / f"{name}.py").write_text(HEAD + dedent(content))
    path = folder / "model.py"
    path.write_text(HEAD + dedent(text))
    return path


def load(folder: Path, text: str, **siblings: str) -> Source:
    return load_python(write(folder, text, **siblings))


def refused(folder: Path, text: str, **siblings: str) -> str:
    with pytest.raises(CompileError) as caught:
        load(folder, text, **siblings)
    return str(caught.value)
