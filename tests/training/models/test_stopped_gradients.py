"""What takes no gradient in torch takes none here: `detach`, `.data` and blocks `with torch.no_grad()`, held against torch's autograd.

A `torch.autograd.Function` has a backward that no graph has: to train through one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from partc.compiler import nn
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import Recorder
from partc.compiler.emit.whole import write_exported
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.inputs import DimNames, Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.ir.graph import STOPS_GRADIENT
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from rows import of_today
from training_equivalence import run

torch = pytest.importorskip("torch")
functional = torch.nn.functional

BATCH, WIDTH = 6, 4
TRAIN = """train:
  loss: loss
  optimizer: {type: momentum, lr: 0.2, momentum: 0.9}
"""
ENCODER, HEAD = "'{encoder,cases.*.encoder}'", "'{head,cases.*.head}'"
PLANS = {
    "one": "ranks: 1\n",
    "dp": "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n",
    "tp": f"ranks: 2\nmesh: {{tp: 2}}\nsharding: {{{ENCODER}: colwise, {HEAD}: rowwise}}\n",
    "stages": f"ranks: 2\nplacement: {{{ENCODER}: 0, {HEAD}: 1}}\n"
    "symbols: {batch: {divisor: 2}}\npipeline: {microbatches: 2}\n",
}


class _Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """An encoder and a head, of which a case makes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)


class Residual(_Net):
    """A gradient that goes through one of two ways."""

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.encoder(x))
        return (h.detach() * self.head(h) - x).square().mean()


class SameOps(_Net):
    """A product of a detached value, and the same one of the value itself."""

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        return (torch.sigmoid(h * 2) + torch.tanh(self.head(torch.sigmoid(h.detach() * 2)))).square().mean()


class Inferred(_Net):
    """A target made in a block of inference."""

    def forward(self, x: Any) -> Any:
        with torch.inference_mode():
            wanted = torch.tanh(self.encoder(x))
        return (self.head(self.encoder(x)) - wanted).square().mean()


class Weight(_Net):
    """A weight that learns from one of its two readers."""

    def forward(self, x: Any) -> Any:
        h = functional.linear(self.encoder(x), self.encoder.weight.detach())
        return (self.head(h) - x).square().mean()


class Data(_Net):
    """A scale taken from `.data`."""

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        return (self.head(h / (1 + h.data.abs())) - x).square().mean()


class Target(_Net):
    """A target network: the encoder itself, and a layer that only a block without gradients reads, which stays."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            wanted = self.target(torch.tanh(self.encoder(x * 2)))
            with torch.enable_grad():
                scale = self.head(x)
            wanted = wanted * 2
        return (self.head(self.encoder(x)) - wanted).square().mean() + 0.1 * scale.square().mean()


class Distilled(_Net):
    """A student's divergence from a teacher that learns by another term."""

    def forward(self, x: Any) -> Any:
        taught, student = self.encoder(x), self.head(x)
        soft = functional.kl_div(student.log_softmax(-1), taught.softmax(-1).detach(), reduction="none").sum(-1).mean()
        return soft + (taught - x).square().mean()


class Quantized(_Net):
    """A vector quantization, straight through, with its codes' and its commitment's losses."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.nn.Embedding(5, WIDTH)

    def forward(self, x: Any) -> Any:
        z = self.encoder(x)
        distances = (z[:, None] - self.codes.weight[None]).square().sum(-1)
        q = self.codes(distances.argmin(-1))
        losses = (q - z.detach()).square().mean() + 0.25 * (z - q.detach()).square().mean()
        return (self.head(z + (q - z).detach()) - x).square().mean() + losses


class Branches(_Net):
    """A branch that detaches what it reads; `exports` chooses the form of which torch makes an If."""

    exports = True

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        ways = (lambda h: h * h.detach()), (lambda h: torch.tanh(h.detach()) + h)
        h = torch.cond(x.sum() > 0, *ways, (h,)) if self.exports else ways[int(x.sum() <= 0)](h)
        return (self.head(h) - x).square().mean()


class Blocks(_Net):
    """A branch with a block without gradients, in which a block has them on again."""

    exports = True

    def first(self, h: Any) -> Any:
        with torch.no_grad():
            wanted = torch.tanh(self.encoder(h))
            with torch.enable_grad():
                scale = self.head(wanted)
            wanted = wanted * 2
        return h * wanted + scale

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        ways = self.first, lambda h: torch.tanh(h)
        h = torch.cond(x.sum() > -1000, *ways, (h,)) if self.exports else ways[0](h)
        return (self.head(h) - x).square().mean()


class InferredBlocks(_Net):
    """A branch with a block of inference, in which nothing turns gradients on but a block that ends the inference."""

    exports = True

    def first(self, h: Any) -> Any:
        with torch.inference_mode():
            with torch.enable_grad():
                wanted = torch.tanh(self.encoder(h))
            with torch.inference_mode(False):
                scale = self.head(h)
            wanted = wanted.abs()
        return scale * (h + wanted)

    @torch.inference_mode()  # type: ignore[misc, untyped-decorator]
    def second(self, h: Any) -> Any:
        return torch.tanh(self.encoder(h))

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        ways = self.first, lambda h: h + self.second(h)
        for above in (-1000, 1000):
            h = torch.cond(x.sum() > above, *ways, (h,)) if self.exports else ways[above > 0](h)
        return (self.head(h) - x).square().mean()


class Padded(_Net):
    """A table whose padding row has no gradient, a bound at which there is none, and the first of equal maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(6, WIDTH, padding_idx=1)

    def forward(self, x: Any) -> Any:
        rows = self.words((x * 4).abs().long() % 3)
        h = functional.relu6(self.head(self.encoder(x * 0) - self.encoder.bias) - self.head.bias + x)
        first = torch.stack([h, h * 2 - h], 1).max(1).values
        return (first + rows.sum(1)).square().mean()


class Cases(torch.nn.Module):  # type: ignore[misc, name-defined]
    """All cases, each with its own parameters; the loss is the sum of theirs."""

    def __init__(self) -> None:
        super().__init__()
        own = (Residual, SameOps, Inferred, Weight, Data, Target, Distilled, Quantized, Padded)
        self.cases = torch.nn.ModuleDict({case.__name__: case() for case in own})

    def forward(self, x: Any) -> Any:
        return torch.stack([case(x) for case in self.cases.values()]).sum()


def exported(module: Any) -> Source:
    from partc.compiler.frontend.torch.torch_module import export

    inputs = {"x": Input(["batch", WIDTH])}
    return Source(export(module, inputs, None, DimNames({}, set()), ["loss"], "model.py:1", Recorder(Path())))


@cache
def exported_once(case: Callable[[], Any]) -> ir.Model:
    """A case's export, which is the same for all plans; who compiles takes a clone."""
    torch.manual_seed(4)
    return exported(case()).model


def by_torch(module: Any, steps: list[dict[str, np.ndarray]]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of torch's own training, and the parameters after it."""
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.2, momentum=0.9)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(torch.from_numpy(step["x"]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}


def learns_alike(
    source: Source, module: Any, plan: str, folder: Path, count: int, start: Mapping[str, np.ndarray] | None = None
) -> None:
    """Steps of both, from the module's weights, give the same losses and parameters."""
    rng = np.random.default_rng(7)
    steps = [{"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)} for _ in range(count)]
    have = run(source, PLANS[plan] + TRAIN, folder, steps, start)
    first = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
    losses, wanted = by_torch(module, steps)
    np.testing.assert_allclose([float(one["loss"]) for one in have.outputs], losses, rtol=1e-5)
    for name, tensor in wanted.items():
        np.testing.assert_allclose(have.after.get(name, first[name]), tensor, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("plan", of_today(["dp", "tp", "stages"], 1))
def test_modules_learn_as_in_torch(plan: str, tmp_path: Path) -> None:
    """Marks are of the single-device model, which a plan does not see; a parameter's name tells the case that learns otherwise."""
    source = Source(exported_once(Cases).clone())
    torch.manual_seed(4)
    learns_alike(source, Cases(), plan, tmp_path / "build", 3)


@pytest.mark.parametrize(
    ("case", "plan"),
    of_today(
        [
            *((Branches, "one"), (Blocks, "tp"), (InferredBlocks, "one")),
            *((Branches, "tp"), (Blocks, "one"), (InferredBlocks, "tp")),
        ],
        2,
    ),
)
def test_a_branch_learns_as_in_torch(case: Callable[[], Any], plan: str, tmp_path: Path) -> None:
    source = Source(exported_once(case).clone())
    torch.manual_seed(4)
    module = case()
    assert [node.op_type for node in source.model.graph if node.op_type in ("If", "Identity")] in (["If"], ["If", "If"])
    module.exports = False
    learns_alike(source, module, plan, tmp_path / "build", 3)


def test_a_file_of_partc_keeps_the_marks(tmp_path: Path) -> None:
    write_exported(Source(exported_once(Cases).clone()), tmp_path / "model.onnx")
    torch.manual_seed(4)
    learns_alike(load(tmp_path / "model.onnx"), Cases(), "one", tmp_path / "build", 3)


class _Traced(nn.Module):
    """`Residual` in layers of partc."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, op: Any, x: Any) -> Any:
        h = op.Tanh(self.encoder(op, x))
        off = op.Sub(op.Mul(nn.stop_gradient(op, h), self.head(op, h)), x)
        return op.ReduceMean(op.Mul(off, off), keepdims=0)


def test_layers_of_partc_stop_gradients_by_a_function(tmp_path: Path) -> None:
    torch.manual_seed(4)
    module = Residual()
    source = Source(trace(_Traced(), [Spec("x", ("batch", WIDTH), ir.DataType.FLOAT)], ["loss"], "model.py"))
    start = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
    learns_alike(source, module, "one", tmp_path / "build", 3, start)


def test_marks_stand_only_where_a_gradient_would_go_on() -> None:
    """Tables of angles, and what is far inside of a block, have none: their patterns are found as before."""

    class Net(_Net):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                angles = torch.sin(x * 3) + x.detach()
                taught = torch.tanh(self.encoder(x)).relu() * 2
            return (self.head(x) * angles - taught).square().mean()

    copies = [node for node in exported(Net()).model.graph if node.op_type == "Identity"]
    assert [node.name for node in copies if STOPS_GRADIENT in node.metadata_props] == ["encoder.Identity"]
    assert len(copies) == 1


def test_a_module_has_its_own_forward_after_an_export() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
    before = torch.nn.Sequential.forward
    exported(module)
    assert torch.nn.Sequential.forward is before
    exported(Residual())
    assert "forward" in vars(Residual)
    assert torch.is_grad_enabled()


class Hooked(_Net):
    """A hook of a gradient, one of a parameter, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda dy: dy * 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.count += 1
        h = self.encoder(x) + self.count
        if h.requires_grad:
            h.register_hook(lambda dy: -dy)
        return self.head(h).square().mean()


@pytest.mark.parametrize("by_bytecode", [False, True])
def test_a_file_of_partc_keeps_why_it_is_not_trained(
    by_bytecode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all reasons at once; it infers as before. Where torch cannot trace a forward as it runs it reads its bytecode."""

    def fail(*arguments: object) -> None:
        raise RuntimeError

    if by_bytecode:
        strategies = pytest.importorskip("torch.onnx._internal.exporter._capture_strategies")
        monkeypatch.setattr(strategies.TorchExportNonStrictStrategy, "_capture", fail)
    write_exported(exported(Hooked()), tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    with pytest.raises(CompileError) as refused:
        run(source, PLANS["one"] + TRAIN, tmp_path / "build", [])
    assert [problem.fact for problem in refused.value.problems] == [
        "has a hook of its gradient (register_hook)",
        "forward registers a hook of a tensor's gradient (Tensor.register_hook)",
        "the forward of Hooked changes this buffer",
    ]
    assert refused.value.problems[0].where == "'head.weight'"
    (warning,) = compile_source(source, parse_plan(PLANS["one"], "plan.yaml"), tmp_path / "infer").warnings
    assert warning.startswith("the module's forward changes 'count', and its graph does not")


class _Rounded(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Rounds, straight through."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        with torch.no_grad():
            return torch.round(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy


class OwnBackward(_Net):
    """A gradient that flows by a backward of its own, and one beside it."""

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        return (self.head(_Rounded.apply(h)) - x + _Rounded.apply(x) * h.detach()).square().mean()


def test_a_backward_of_its_own_is_refused(tmp_path: Path) -> None:
    source = exported(OwnBackward())
    with pytest.raises(CompileError) as refused:
        run(source, PLANS["one"] + TRAIN, tmp_path / "build", [])
    assert str(refused.value) == (
        "Identity: a gradient flows through the torch.autograd.Function '_Rounded'\n"
        "  its backward is Python, and a gradient would be that of the ops of its forward\n"
        "  help: write it in torch's operators, straight through as `x + (f(x) - x).detach()`, or freeze the parameters before it"
    )


def test_a_backward_of_its_own_behind_frozen_parameters_is_not_asked(tmp_path: Path) -> None:
    torch.manual_seed(4)
    module = OwnBackward()
    module.encoder.requires_grad_(False)
    learns_alike(exported(module), module, "dp", tmp_path / "build", 3)
    assert torch.autograd.Function.apply.__qualname__ == "Function.apply"
