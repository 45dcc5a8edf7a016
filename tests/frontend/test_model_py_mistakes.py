"""Mistakes of a model.py: each is reported with its line, the fact and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_py import refused
from partc.compiler.errors import CompileError
from partc.compiler.frontend.python import load_python

HELP = '  help: write inputs = {"x": Input(["batch", 1, 28, 28], "float32")}, one entry for each argument of forward'
PLAIN = "class Net(nn.Module):\n    def forward(self, op, x):\n        return op.Neg(x)\n"

MISTAKES = {
    "nothing": (
        "x = 3",
        "model.py: neither a model nor build is defined\n  help: define `model = ...`, or `def build(): return ...`",
    ),
    "class only": (PLAIN, "model.py: neither a model nor build is defined\n  help: write `model = Net()`"),
    "both": (
        "model = 3\ndef build():\n    return 3",
        "model.py:2: both a model and, at model.py:3, build are defined\n  help: keep one of them",
    ),
    "arguments": (
        "def build(width, depth, *more, mode=3):\n    pass",
        "model.py:2: build needs arguments: width, depth\n  help: add defaults; build is called without arguments",
    ),
    "build no function": (
        "build = 3",
        "model.py:2: build is 3, not a function\n  help: define `model = ...`, or `def build(): return ...`",
    ),
    "wrong type": (
        "model = [3]",
        "model.py:2: model is a list\n  help: a model is an onnx.ModelProto, an onnx_ir.Model, an nn.Module of partc.compiler "
        "or onnxscript, or a torch.nn.Module",
    ),
    "build gives nothing": (
        "def build():\n    nn.Linear(3, 4)",
        "model.py:2: what build returns is a NoneType\n  help: a model is an onnx.ModelProto, an onnx_ir.Model, an nn.Module of "
        "partc.compiler or onnxscript, or a torch.nn.Module",
    ),
    "class": (f"{PLAIN}model = Net", "model.py:5: model is the class Net\n  help: make an instance of it: Net()"),
    "tuple": (
        "def build():\n    return 1, 2, 3",
        "model.py:2: build returns a tuple of 3\n  help: return the model, or (module, inputs)",
    ),
    "inputs twice": (
        f"{PLAIN}inputs = [[3]]\ndef build():\n    return Net(), [[3]]",
        "model.py:6: build returns inputs, and model.py:5 defines them too\n  help: keep one of them",
    ),
    "no inputs": (
        f"{PLAIN}model = Net()",
        "model.py:5: the module's inputs are not declared\n"
        '  help: write inputs = {"x": Input(["batch", 1, 28, 28], "float32")}, or return (module, inputs) from build',
    ),
    "unknown input": (
        f'{PLAIN}model = Net()\ninputs = {{"y": [3], "x": [3]}}',
        f"model.py:6: inputs names 'y', but forward takes 'x'\n{HELP}",
    ),
    "missing input": (
        f'{PLAIN.replace("x):", "x, z, w=None):")}model = Net()\ninputs = {{"x": [3]}}',
        f"model.py:6: forward takes 'z', which inputs does not name\n{HELP}",
    ),
    "too many inputs": (
        f"{PLAIN}model = Net()\ninputs = [[3], [4]]",
        f"model.py:6: inputs has 2 entries, but forward takes 1: 'x'\n{HELP}",
    ),
    "inputs no dict": (f"{PLAIN}model = Net()\ninputs = 3", f"model.py:6: inputs is a dict of names, got int\n{HELP}"),
    "input no shape": (
        f'{PLAIN}model = Net()\ninputs = {{"x": 3}}',
        f"model.py:6: input 'x' is 3, which is neither an Input nor a shape\n{HELP}",
    ),
    "dims and dtype": (
        f'{PLAIN}model = Net()\ninputs = {{"x": Input([-1, 2.5, True, ""], "float31")}}',
        "model.py:6: input 'x', dim 0: a dim is at least 0, got -1; a dynamic dim has a name, such as 'batch'\n"
        "model.py:6: input 'x', dim 1: a dim is an int, a name or a Symbol, got 2.5 of type float\n"
        "model.py:6: input 'x', dim 2: a dim is an int, a name or a Symbol, got True\n"
        "model.py:6: input 'x', dim 3: a dim's name is empty\n"
        "model.py:6: input 'x': unknown dtype 'float31'\n"
        "  help: dtypes are written as in numpy: float32, int64, bool, bfloat16",
    ),
    "outputs": (
        f'{PLAIN}model = Net()\ninputs = [[3]]\noutputs = ["a", "b"]',
        "model.py:5: outputs names 2 values (a, b), but forward returns 1\n"
        "  help: write one name for each value that forward returns",
    ),
    "outputs no list": (
        f'{PLAIN}model = Net()\ninputs = [[3]]\noutputs = "a"',
        "model.py:7: outputs is 'a', not a list of names\n  help: write outputs = [\"logits\"]",
    ),
    "output named as input": (
        f'{PLAIN}model = Net()\ninputs = [[3]]\noutputs = ["x"]',
        "model.py:5: 'x' names an output and an input or weight\n  help: rename one",
    ),
    "forward returns nothing": (
        f"{PLAIN.replace('return ', '')}model = Net()\ninputs = [[3]]",
        "model.py:5: forward returns None, which is not a value of the graph\n"
        "  help: return a value, a tuple of values, or a dict of them by name",
    ),
    "symbol unused": (
        f"{PLAIN}wide = Symbol()\nmodel = Net()\ninputs = [['n', 'm']]",
        "model.py:5: the Symbol 'wide' is used by no input\n  help: the dims of the inputs are m, n",
    ),
    "placed elsewhere": (
        f"{PLAIN}model = Net()\ninputs = [[3]]\nplace(nn.ReLU(), 3)\nplace(nn.Tanh(), 3)",
        "model.py:7: place speaks of a ReLU that is not part of the model\n"
        "  help: place a module that the model holds as an attribute\n"
        "model.py:8: place speaks of a Tanh that is not part of the model\n"
        "  help: place a module that the model holds as an attribute",
    ),
    "place at nothing": (
        "model = place(3, 1)",
        "model.py:2: place takes a module, a function, an op such as op.MatMul or a pattern, but got 3\n"
        "  help: write place(self.fc1, 0), or place('layers.*', 0)",
    ),
    "list of modules": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = [nn.Linear(5, 7)]\n"
        "    def forward(self, op, x):\n        return self.layers[0](op, x)\n"
        "model = Net()\ninputs = [[3, 5]]",
        "\n".join(
            f"model.py:8: the parameter '{name}' {shape}, which Gemm uses, belongs to no module of the model\n"
            "  help: make modules and parameters in __init__ and keep them as attributes; lists of modules are nn.ModuleList"
            for name, shape in (("weight", [7, 5]), ("bias", [7]))
        ),
    ),
    "no values": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.w = nn.Parameter([3])\n"
        "    def forward(self, op, x):\n        return op.Mul(x, self.w)\nmodel = Net()\ninputs = [[3]]",
        "model.py:8: the parameter 'w' [3] has no values\n"
        "  help: pass data= or init=, such as nn.Parameter(shape, init=nn.init.normal(0.02))",
    ),
    "raises": (
        "def f():\n    return nn.Conv2d(3, 4, 5, groups=2)\nmodel = f()",
        "model.py:3: ValueError: in_channels 3 is not divisible by groups 2\n  return nn.Conv2d(3, 4, 5, groups=2)",
    ),
    "forward raises": (
        f"{PLAIN.replace('op.Neg(x)', 'op.Neg(x) + self.gain')}model = Net()\ninputs = [[3]]",
        "model.py:4: AttributeError: 'Net' object has no attribute 'gain'\n  return op.Neg(x) + self.gain",
    ),
    "syntax": ("x = = 3", "model.py:2: SyntaxError: invalid syntax\n  x = = 3"),
    "exit": (
        "import sys\nsys.exit(3)",
        "model.py:3: the file ends the program: SystemExit(3)\n  sys.exit(3)\n"
        "  help: guard what is not the model with `if __name__ == '__main__':`",
    ),
    "unknown op": (
        f"{PLAIN.replace('Neg', 'Negate')}model = Net()\ninputs = [[3]]",
        "model.py:5: onnxruntime does not know the op Negate (1 times, first 'Negate_node_0')\n"
        "  help: decompose it into standard ops, or define it as a model-local function",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_whole(tmp_path: Path, mistake: str) -> None:
    text, message = MISTAKES[mistake]
    assert refused(tmp_path, text) == message


def test_a_mistake_in_a_sibling_names_both_lines(tmp_path: Path) -> None:
    message = refused(tmp_path, "import layers\nmodel = layers.f(1)", layers="def f(n):\n    return n / 0")
    assert message == "layers.py:3: ZeroDivisionError: division by zero\n  return n / 0\n  reached from model.py:3"
    message = refused(tmp_path, "import broken", broken="def f(:\n    pass")
    assert message.startswith("broken.py:2: SyntaxError: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"nowhere\.py: no such file"):
        load_python(tmp_path / "nowhere.py")
