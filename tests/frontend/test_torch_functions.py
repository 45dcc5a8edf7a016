"""`shard` and `place` of functions that a torch model's forward calls: regions, `torch.func.vmap` inside of them, refusals."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "partc[torch]"')

from partc.compiler.errors import CompileError  # noqa: E402
from partc.compiler.frontend.python import load_python  # noqa: E402
from rows import of_today  # noqa: E402
from training_equivalence import run  # noqa: E402

ATTENTION = """
import torch
from partc.compiler import Input, place, shard

def one(q, k, v):
    return torch.softmax(q @ k.T / 2.0, -1) @ v

def attend(q, k, v):
    return torch.func.vmap(torch.func.vmap(one))(q, k, v)

def mix(x):
    return torch.func.vmap(lambda row: torch.tanh(row @ row.T / 4.0) @ row)(x)

{functions}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(mix(x)).chunk(3, -1))
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2).mean(1))

torch.manual_seed(0)
model, inputs, outputs = Net(), {{"x": Input(["batch", 5, 8], "float32")}}, ["y"]
"""
TRAIN = "train:\n  loss: {type: mse, prediction: y, target: t}\n  optimizer: {type: sgd, lr: 0.1}\n"
CASES = {
    "heads on 2 ranks": (2, "attend = shard(attend, in_strategy=((1, 2, 1, 1),) * 3)", {"attend": "1, 2, 1, 1"}),
    "records on 2 ranks": (2, "mix = shard(mix, in_strategy=((2, 1, 1),))", {"mix": "2, 1, 1"}),
    "both on 4 ranks": (
        4,
        "attend = shard(attend, in_strategy=((2, 2, 1, 1),) * 3)\nmix = shard(mix, in_strategy=((4, 1, 1),))",
        {"attend": "2, 2, 1, 1", "mix": "4, 1, 1"},
    ),
    "the products of vmap by a plan": (2, "", {"MatMul_2": "1, 2, 1, 1"}),
}
PLANS = {"the products of vmap by a plan": "sharding: {MatMul_2: {in: [[1, 2, 1, 1], [1, 2, 1, 1]]}}\n"}


def written(folder: Path, text: str) -> Path:
    (folder / "model.py").write_text(text)
    return folder / "model.py"


@pytest.mark.parametrize("case", [*of_today([*CASES][:2], 1), *[*CASES][2:]])  # the third has both of the first two
def test_a_function_with_vmap_inside_trains_as_torch_does(case: str, tmp_path: Path) -> None:
    ranks, functions, strategies = CASES[case]
    source = load_python(written(tmp_path, ATTENTION.format(functions=functions)))
    draw = np.random.default_rng(3)
    steps = [
        {"x": draw.standard_normal((4, 5, 8), np.float32), "t": draw.standard_normal((4, 3), np.float32)}
        for _ in range(3)
    ]
    plan = f"ranks: {ranks}\nsymbols: {{batch: {{divisor: 4}}}}\n{PLANS.get(case, '')}{TRAIN}"
    have = run(source, plan, tmp_path / "cut", steps)

    values: dict[str, object] = {}
    exec(compile(ATTENTION.format(functions=""), "model.py", "exec"), values)  # the model as torch has it
    net = values["model"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # type: ignore[attr-defined]
    for k, step in enumerate(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(torch.tensor(step["x"])), torch.tensor(step["t"]))  # type: ignore[operator]
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(have.outputs[k]["loss"], loss.item(), rtol=1e-5)
    for name, parameter in net.named_parameters():  # type: ignore[attr-defined]
        np.testing.assert_allclose(have.after[name], parameter.detach().numpy(), rtol=0, atol=1e-6, err_msg=name)
    text = (tmp_path / "cut" / "ir" / "step_parallel_begin.ir").read_text()
    for name, strategy in strategies.items():
        assert re.search(rf"%{name}(\.\w+)? = .*in_strategy: \(\({strategy}\)", text), name


TWICE = """
import torch
from partc.compiler import Input, place, shard

def scaled(x, factor, unused=None):
    return x * factor, {{"sum": (x * factor).sum(-1)}}

def inner(x):
    return torch.relu(x)

{functions}

class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        {module}

    def forward(self, x):
        return {inside}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Inner()

    def forward(self, x):
        y, more = scaled(self.block(x), torch.exp(x))
        z, _ = scaled(y, 2.0, unused=x)
        return z + more["sum"][:, None]

model, inputs, outputs = Net(), {{"x": Input([4, 4], "float32")}}, ["y"]
"""


def model_of(functions: str = "", module: str = "pass", inside: str = "inner(self.fc(x))") -> str:
    return TWICE.format(functions=functions, module=module, inside=inside)


def test_calls_are_regions_below_the_module_that_calls(tmp_path: Path) -> None:
    source = load_python(written(tmp_path, model_of("scaled, inner = place(scaled, 1), place(inner, [0, 1])")))
    assert sorted(one.pattern for one in source.declared.placements) == ["block.inner", "scaled", "scaled_1"]
    names = [node.name for node in source.model.graph]
    assert "block.inner.Relu" in names
    assert [name for name in names if name.startswith("scaled.")] == ["scaled.Mul", "scaled.ReduceSum"]
    assert all(node.op_type != "Identity" for node in source.model.graph)


def test_a_module_that_a_function_calls_is_placed_below_it(tmp_path: Path) -> None:
    functions = "call = place(lambda fc, x: fc(x), 0)"
    text = model_of(functions, "place(self.fc, 1)", "call(self.fc, x)")
    placed = load_python(written(tmp_path, text)).declared.placements
    assert sorted(one.pattern for one in placed) == ["block.function", "block.function.fc"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            model_of(
                "inner = shard(inner, in_strategy=((2, 1),))\nwhole = shard(lambda x: inner(x), in_strategy=((2, 1),))",
                inside="whole(x)",
            ),
            "shard of 'inner' is inside of 'function'",
        ),
        (
            model_of(
                "call = shard(lambda fc, x: fc(x), in_strategy=((2, 1),))",
                "shard(self.fc, in_strategy=((2, 1),))",
                "call(self.fc, x)",
            ),
            "shard of 'block.function.fc' is inside of 'block.function'",
        ),
        (
            model_of("inner = shard(inner, in_strategy=((2,),))", inside="torch.func.vmap(inner)(x)"),
            "'inner' is called inside of torch.func.vmap",
        ),
        (
            model_of("inner = shard(inner, in_strategy=((2, 1), (1, 1)))"),
            "in_strategy is for 2 tensors, but 'inner' is called with 1",
        ),
        (model_of("inner = shard(inner, in_strategy=((2, 1, 1),))"), "is for 3 dims, but the tensor has 2"),
        (model_of("lost = shard(inner, in_strategy=((2, 1),))"), "'inner' is never called while the model is built"),
        (
            model_of("inner = shard(lambda x: 3, in_strategy=((2, 1),))", inside="x * inner(x)"),
            "'function' returns no tensor",
        ),
    ],
    ids=["nested", "a module inside", "inside of vmap", "number of tensors", "dims", "never called", "no tensor"],
)
def test_what_is_no_region_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as refused:
        load_python(written(tmp_path, text))
    assert message in str(refused.value)
    assert "model.py:" in str(refused.value)


def test_outside_of_a_compile_the_function_is_called_as_it_is() -> None:
    values: dict[str, object] = {}
    exec(compile(model_of("inner = shard(inner, in_strategy=((2, 1),))"), "model.py", "exec"), values)
    assert values["model"](torch.ones(4, 4)).shape == (4, 4)  # type: ignore[operator]
