"""What is said of mistakes in a model.py's `shard` calls: each with its line, all of a call at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from shard_call_models import HEAD, INPUTS, NET, line, refused, write


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("shard(BasicBlock, ((8, 1),))", "shard got the class BasicBlock\n  help: make an instance of it"),
        ("shard(3, ((8, 1),))", "shard takes a module, a function or an op such as op.MatMul, but got 3"),
        (
            "model.block1.shard((1, 8))",
            "in_strategy is (1, 8), which has no tuple for each input\n"
            "  a strategy is a tuple with a tuple for each tensor, or None to derive it: ((4, 2), None)\n"
            "  help: write ((1, 8),) for one input",
        ),
        (
            "model.block1.shard(())",
            "in_strategy is (), which has no tuple for any input\n"
            "  a strategy is a tuple with a tuple for each tensor, or None to derive it: ((4, 2), None)",
        ),
        (
            "model.block1.shard(((0, 1.5),), level=3, device=1)",
            "device is 1\n  a device is 'cpu' or 'cuda', or 'Ascend' for the job's\n  help: write 'cpu', or leave it out\n"
            "model.py:N: level is 3\n  a level is 0, 1 or 2\n"
            "model.py:N: in_strategy[0], dim 0: expected at least 1 shard, but got 0\n"
            "  help: write 1 for an unsharded dim\n"
            "model.py:N: in_strategy[0], dim 1: expected a number of shards or a mesh axis, but got the number 1.5\n"
            "  a dim is cut into a number of shards, along a mesh axis, or along a list of them, major first; null: not at all",
        ),
        (
            'model.block1.shard(((8, 1),), device="Banana")',
            "device is 'Banana'\n  a device is 'cpu' or 'cuda', or 'Ascend' for the job's\n  help: write 'cpu', or leave it out",
        ),
        (
            'model.block1.shard((("dp", 2),))',
            "shard: the axis 'dp' and 2 shards are in one rule\n"
            "  a rule is spelled by mesh axes or by numbers of shards, not by both\n"
            "  help: beside mesh axes, 1 and null are an unsharded dim",
        ),
        (
            "model.block1.shard(((8, 1), None))",
            "in_strategy is for 2 tensors, but 'BasicBlock' is called with 1\n  help: write None for a tensor whose layout is derived",
        ),
        (
            "model.block1.shard(((8, 1),), ((8,),))",
            "out_strategy[0] [8] is for 1 dim, but the tensor has 2, [batch, 32]\n  help: write one entry for each dim",
        ),
        (
            "model.block1.shard(((8, 1),), parameter_plan={'self.block1.dense3.weight': (8, 1)})",
            "parameter_plan: BasicBlock has no parameter 'self.block1.dense3.weight'\n"
            "  a parameter is named from the module, 'dense2.weight', or as the caller sees it, 'self.block1.dense2.weight'\n"
            "  help: the nearest are 'dense1.weight', 'dense2.weight'",
        ),
        (
            "model.block1.shard(((8, 1),), parameter_plan={'dense1.bias': (8, 1), 'dense1.weight': (3, 5)})",
            "parameter_plan: [8, 1] is for another number of dims than 'dense1.bias' [32] has\n"
            "  help: write one entry for each dim\n"
            "model.py:N: parameter_plan: cannot cut 'dense1.weight' dim 0 (32) into 3\n"
            "  32 is not divisible by 3\n  help: choose a divisor, or 1 to leave it whole\n"
            "model.py:N: parameter_plan: cannot cut 'dense1.weight' dim 1 (32) into 5\n"
            "  32 is not divisible by 5\n  help: choose a divisor, or 1 to leave it whole",
        ),
        (
            "shard(len, ((8, 1),), parameter_plan={'w': (8,)})",
            "parameter_plan is only for modules\n  only modules have parameters\n"
            "  help: shard the module, or shard the tensor by in_strategy",
        ),
        (
            "shard(BasicBlock(), ((8, 1),))",
            "shard speaks of a BasicBlock that is not part of the model\n"
            "  help: shard a module that the model holds as an attribute",
        ),
        (
            "shard(lambda op, x: op.Relu(x), ((8, 1),))",
            "'function' is never called while the model is built\n  help: call what shard returns, in forward",
        ),
    ],
)
def test_mistakes(tmp_path: Path, call: str, message: str) -> None:
    said = refused(tmp_path, f"{NET}\nmodel = Net()\n{INPUTS}{call}\n")
    where = f"model.py:{line(tmp_path, call)}"
    assert said == f"{where}: {message.replace('model.py:N', where)}"


def test_shard_within_shard_is_refused(tmp_path: Path) -> None:
    law = "\n  regions of shard do not nest\n  help: shard one of the two; the plan's 'sharding' may speak of the other"
    text = f"{NET}\nmodel = Net()\n{INPUTS}model.block1.dense2.shard(((1, 8),))\nmodel.block1.shard(((8, 1),))\n"
    said = refused(tmp_path, text)
    inner, outer = line(tmp_path, "dense2.shard"), line(tmp_path, "block1.shard")
    assert (
        said == f"model.py:{inner}: shard of 'block1.dense2' is inside of 'block1', which model.py:{outer} shards{law}"
    )
    functions = """
def inner(op, x):
    return op.Relu(x)

def outer(op, x):
    return shard(inner, ((2, 1),))(op, op.Neg(x))

class Net(nn.Module):
    def forward(self, op, x):
        return shard(outer, ((4, 1),))(op, x)

model = Net()
inputs = {"x": [8, 3]}
"""
    said = refused(tmp_path, functions)
    inner, outer = line(tmp_path, "shard(inner"), line(tmp_path, "shard(outer")
    assert said == f"model.py:{inner}: shard of 'outer.inner' is inside of 'outer', which model.py:{outer} shards{law}"
    said = refused(tmp_path, functions.replace("shard(inner, ((2, 1),))(op, op.Neg(x))", "shard(op.Neg, ((2, 1),))(x)"))
    assert "shard of 'outer.Neg' is inside of 'outer'" in said
    said = refused(tmp_path, f"{NET}\nmodel = Net()\n{INPUTS}model.block1.shard(((1, 8),))\nmodel.shard(((8, 1),))\n")
    assert "shard of 'block1' is inside of the model, which model.py" in said


def test_functions_that_cannot_be_regions(tmp_path: Path) -> None:
    net = """
class Net(nn.Module):
    def forward(self, op, x):
        {body}

model = Net()
inputs = {{"x": [8, 3]}}
"""
    said = refused(tmp_path, net.format(body="return op.Relu(shard(lambda op, x: x, ((2, 1),))(op, x))"))
    assert said == "model.py:5: 'function' emits no op\n  help: shard what computes"
    said = refused(tmp_path, net.format(body="return shard(lambda op, x: op.Relu(x), ((2, 1, 1),))(op, x)"))
    assert said.startswith("model.py:5: in_strategy[0] [2, 1, 1] is for 3 dims, but the tensor has 2, [8, 3]")
    said = refused(tmp_path, net.format(body="return shard(lambda x: op.Relu(x), ((2, 1),))(x)"))
    assert said.startswith("model.py:5: 'function' is called without the op builder\n")
    body = (
        "yes = op.builder.subgraph(lambda o: shard(o.Neg, ((2, 1),))(x), [], [__import__('onnx_ir').Value(name='y')])"
    )
    said = refused(tmp_path, net.format(body=body))
    assert said.startswith("model.py:5: 'Neg' is called in a body of If, Loop or Scan, whose ops run whole\n")


def test_a_function_with_the_path_of_a_module(tmp_path: Path) -> None:
    text = """
def act(op, x):
    return op.Neg(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, op, x):
        return shard(act, ((2, 1),))(op, self.act(op, x))

model = Net()
inputs = {"x": [8, 3]}
"""
    said = refused(tmp_path, text)
    where = f"model.py:{line(tmp_path, 'shard(act')}"
    assert said == f"{where}: the function 'act' has the path of a module, 'act'\n  help: rename one of the two"


BLOCKS = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(32, 48, bias=False)
        self.out = nn.Linear(48, 32, bias=False)

    def forward(self, op, x):
        y = op.Reshape(self.q(op, x), op.Constant(value_ints=[0, 12, 4]))
        return self.out(op, op.Reshape(op.Softmax(y, axis=-1), op.Constant(value_ints=[0, 48])))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, op, x):
        return self.attention(op, x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.attention = Attention()

    def forward(self, op, x):
        for layer in self.layers:
            x = layer(op, x)
        return self.attention(op, x)

model = Net()
"""
HEADS = """ is cut into 8 along dim 1, but {0}attention.Reshape has 12 heads of 4 there
  12 is not divisible by 8: all of its 192*batch bytes are gathered on each rank, and every rank repeats what follows
"""


def compiled(folder: Path, ranks: int, **options: bool) -> tuple[str, ...]:
    text = HEAD + BLOCKS + INPUTS
    write(folder, text)
    (folder / "plan.yaml").write_text(f'ranks: {ranks}\nsharding:\n  "**.q": colwise\n  "**.out": rowwise\n')
    report = compile_model(folder / "model.py", folder / "plan.yaml", folder / "build", **options)
    return report.warnings


def test_heads_that_the_ranks_do_not_divide_are_told_once(tmp_path: Path) -> None:
    """In every layer the same: one message with its number. Strictly it is refused."""
    first, other = compiled(tmp_path, 8)
    where = f"{tmp_path / 'plan.yaml'}:3: "
    help = "  help: use 2, 3, 4, 6, 12 ranks for it"
    layer = f"{where}'layers.0.attention.q.Gemm'{HEADS.format('layers.0.')}"
    assert first == f"{layer}  and 2 more layers\n{help}"
    assert other == f"{where}'attention.q.Gemm'{HEADS.format('')}{help}"
    assert compiled(tmp_path, 4) == compiled(tmp_path, 6) == ()
    with pytest.raises(CompileError) as caught:
        compiled(tmp_path, 8, strict=True)
    assert str(caught.value) == f"{first}\n{other}"


def test_a_mistake_of_every_layer_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(tmp_path, 5)
    assert len(caught.value.problems) == 8
    lines = str(caught.value).splitlines()
    assert lines.count("  and 2 more layers") == 2
    assert sum("cannot cut" in line for line in lines) == 4
