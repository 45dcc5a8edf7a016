"""Plants a difference between a torch module and its exported graph, or its training: the comparisons with torch must find each.

    python tests/fuzz/planted_differences.py            all, with the module or the tensor that each message names
    python tests/fuzz/planted_differences.py gelu eps   those whose names have one of these words

Differences of forward are planted in a graph that was exported, and `compare_graph` looks for them. Differences of a training are planted
in the graph, in partc's own tables or in the module, and `partc verify` looks for them. Without a difference both find none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
from partc.cli.comparison import verify_training
from partc.cli.comparison.verdict import Case, Verdict
from partc.compiler.directives.recorder import Recorder
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.torch.compare_with_torch import compare_graph
from partc.compiler.frontend.torch.torch_model import TorchModel, torch_model_of
from partc.compiler.frontend.torch.torch_module import export
from partc.compiler.ir.graph import STOPS_GRADIENT, UNBIASED
from partc.compiler.ops.registry import entries
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.plan.training.losses import MeanSquared
from partc.compiler.training.optimizer_functions import FAMILIES, function
from torch import nn


class Norm(nn.Module):
    """Root mean square, with an epsilon that ordinary numbers do not show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7)


class Attention(nn.Module):
    """Causal attention with a head of its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (self.q(x) @ self.k(x).mT) / 8**0.5
        return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ self.v(x)


class Scaled(nn.Module):
    """A factor near 1, a difference, a quotient and a bound."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x * 1.00005 - x.mean(-1, keepdim=True), max=2.5) / (1.5 + x.abs())


class Net(nn.Module):
    """A block of a decoder with a table, norms, attention and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.norm, self.attention, self.layer_norm, self.scaled = Norm(), Attention(), nn.LayerNorm(8), Scaled()
        self.up, self.gelu, self.down, self.leaky = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LeakyReLU(0.02)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[1])) + self.norm(x)
        h = h + self.attention(self.layer_norm(h))
        return self.scaled(h + self.leaky(self.down(self.gelu(self.up(h)))))


class Learner(nn.Module):
    """What a training may get wrong: statistics, a stopped gradient, a table with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.norm, self.head = (
            nn.Embedding(7, 4),
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.body(self.words(ids).mean(1))))
        return self.head(h) - self.head(h.detach() * 0.5)


@cache
def exported(kind: type[nn.Module]) -> tuple[ir.Model, TorchModel]:
    """A module's graph, and the module with its inputs."""
    torch.manual_seed(3)
    module = kind().train(kind is Learner)
    inputs: dict[str, object] = {"ids": torch.zeros(2, 5, dtype=torch.int64)}
    dims: dict[str, object] = {"ids": {0: "batch", 1: "seq"} if kind is Net else {0: "batch"}}
    if kind is Net:
        inputs["x"], dims["x"] = torch.zeros(2, 5, 8), {0: "batch", 1: "seq"}
    model = export(module, inputs, dims, DimNames({}, set()), ["y"], "model.py", Recorder(Path()))
    torch_model = torch_model_of(model)
    assert torch_model is not None
    return model, torch_model


Change = Callable[[ir.Model], None]


def node(model: ir.Model, op_type: str, module: str = "") -> ir.Node:
    """The first node of a type in a module."""
    return next(one for one in model.graph if one.op_type == op_type and (one.name or "").startswith(module))


def _constant(model: ir.Model, one: ir.Node, place: int, array: np.ndarray) -> None:
    value = ir.Value(name=f"planted_{place}", const_value=ir.Tensor(array, name=f"planted_{place}"))
    value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
    model.graph.register_initializer(value)
    one.replace_input_with(place, value)


def without(op_type: str, module: str, keep: int = 0) -> Change:
    """Takes a node out: what reads it reads one of its operands."""

    def change(model: ir.Model) -> None:
        one = node(model, op_type, module)
        kept = one.inputs[keep]
        assert kept is not None
        one.outputs[0].replace_all_uses_with(kept)

    return change


def swapped(op_type: str, module: str) -> Change:
    """Exchanges the operands of a node."""

    def change(model: ir.Model) -> None:
        one = node(model, op_type, module)
        first, second = one.inputs[:2]
        one.replace_input_with(0, second)
        one.replace_input_with(1, first)

    return change


def attribute(op_type: str, module: str, **said: int | float | str) -> Change:
    """Gives a node other attributes."""

    def change(model: ir.Model) -> None:
        for attr in ir.convenience.convert_attributes(said):
            node(model, op_type, module).attributes[attr.name] = attr

    return change


def scaled(op_type: str, module: str, place: int, factor: float) -> Change:
    """Multiplies a constant operand."""

    def change(model: ir.Model) -> None:
        one = node(model, op_type, module)
        value = one.inputs[place]
        assert value is not None
        assert value.const_value is not None
        array = value.const_value.numpy()
        _constant(model, one, place, (array * factor).astype(array.dtype))

    return change


def weight(name: str, act: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Changes a weight."""

    def change(model: ir.Model) -> None:
        value = model.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = ir.Tensor(np.ascontiguousarray(act(value.const_value.numpy())), name=name)

    return change


def _future(model: ir.Model) -> None:
    """Each position sees the next one."""
    one = node(model, "Trilu")
    _constant(model, one, 1, np.array(1, np.int64))


def _fixed_size(model: ir.Model) -> None:
    """A sum over positions is of so many as the export had."""
    one = next(
        one for one in model.graph if one.op_type == "Add" and not (one.name or "").startswith(("norm", "attention"))
    )
    shape = ir.Value(name="planted_shape", const_value=ir.Tensor(np.array([-1, 7, 8], np.int64), name="planted_shape"))
    shape.type, shape.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([3])
    model.graph.register_initializer(shape)
    reshape = ir.node("Reshape", [one.inputs[0], shape])
    model.graph.insert_before(one, reshape)
    one.replace_input_with(0, reshape.outputs[0])


FORWARD: dict[str, Change] = {
    "eps of 1e-7 dropped": without("Add", "norm"),
    "factor of 1.00005 dropped": without("Mul", "scaled"),
    "operands of a difference swapped": swapped("Sub", "scaled"),
    "operands of a quotient swapped": swapped("Div", "scaled"),
    "bound of a clamp": scaled("Clip", "scaled", 2, 1.01),
    "bias dropped": weight("up.bias", np.zeros_like),
    "weight transposed": weight("down.weight", np.transpose),
    "gelu by tanh": attribute("Gelu", "gelu", approximate="tanh"),
    "slope of a leaky relu": attribute("LeakyRelu", "leaky", alpha=0.01),
    "causal mask off by one": _future,
    "axis of a softmax": attribute("Softmax", "attention", axis=1),
    "scale of attention": scaled("Div", "attention", 1, 1.1),
    "epsilon of a layer norm": attribute("LayerNormalization", "layer_norm", epsilon=1e-3),
    "rows of a table shifted": weight("words.weight", lambda array: np.roll(array, 1, 0)),
    "one row of a table": weight("words.weight", lambda array: array * (np.arange(11) != 0)[:, None]),
    "positions shifted": weight("places.weight", lambda array: np.roll(array, 1, 0)),
    "size of the export": _fixed_size,
}
"""By name a change of the exported graph of `Net`."""


def _unmarked(model: ir.Model) -> None:
    for one in model.graph:
        one.metadata_props.pop(STOPS_GRADIENT, None)


def _biased(model: ir.Model) -> None:
    node(model, "BatchNormalization").meta.pop(UNBIASED)


@contextmanager
def changed(model: TorchModel, change: Change) -> Iterator[ir.Model]:
    """A copy of the graph of `Learner` with a change."""
    graph = exported(Learner)[0].clone()
    change(graph)
    yield graph


@contextmanager
def _formula(name: str, old: str, new: str) -> Iterator[None]:
    """Another formula of an optimizer's function."""
    row = FAMILIES[name]
    assert old in row.body, row.body
    function.cache_clear()
    with mock.patch.dict(FAMILIES, {name: replace(row, body=row.body.replace(old, new))}):
        yield
    function.cache_clear()


@contextmanager
def padding(model: TorchModel) -> Iterator[None]:
    """Torch gives the first row of the table no gradient."""
    words = model.module.get_submodule("words")
    words.padding_idx = 0  # type: ignore[assignment]
    yield
    words.padding_idx = None  # type: ignore[assignment]


@contextmanager
def hook(model: TorchModel) -> Iterator[None]:
    """Torch changes the gradient of a parameter."""
    handle = model.module.get_parameter("body.weight").register_hook(lambda gradient: gradient * 0.5)
    yield
    handle.remove()


@contextmanager
def _gradient_of_tanh(model: TorchModel) -> Iterator[None]:
    """The gradient of tanh is dy."""
    op = next(one for one in entries() if one.name == "Tanh")
    wrong = replace(op.gradients, rule=lambda g, dy, x: dy)
    before = op.gradients
    object.__setattr__(op, "gradients", wrong)
    yield
    object.__setattr__(op, "gradients", before)


@contextmanager
def _reduction(model: TorchModel) -> Iterator[None]:
    right = MeanSquared.add
    with mock.patch.object(
        MeanSquared, "add", lambda self, to, shards: right(self.model_copy(update={"reduction": "sum"}), to, shards)
    ):
        yield


@dataclass(frozen=True)
class Learned:
    """A difference of a training: of the graph, or while it is trained, with an optimizer of the plan."""

    change: Change = lambda model: None
    within: Callable[[TorchModel], object] | None = None
    optimizer: str = "{type: momentum, lr: 0.1}"


TRAINED: dict[str, Learned] = {
    "stopped gradient dropped": Learned(_unmarked),
    "momentum of a batch norm": Learned(attribute("BatchNormalization", "norm", momentum=0.8)),
    "running variance over n": Learned(_biased),
    "padding row trained": Learned(within=padding),
    "hook of a parameter dropped": Learned(within=hook),
    "gradient of tanh": Learned(within=_gradient_of_tanh),
    "sum in place of a mean": Learned(within=_reduction),
    "formula of momentum": Learned(
        within=lambda model: _formula("Momentum", "change = Mul (momentum_next, rate)", "change = Mul (g, rate)")
    ),
    "correction of adam's bias": Learned(
        within=lambda model: _formula("Adam", "step = Mul (rate, correction)", "step = Mul (rate, @1)"),
        optimizer="{type: adam, lr: 0.1}",
    ),
    "decay of adamw": Learned(
        within=lambda model: _formula("AdamW", "lost = Mul (rate, @weight_decay)", "lost = Mul (@weight_decay, @1)"),
        optimizer="{type: adamw, lr: 0.1, weight_decay: 0.3}",
    ),
}
"""By name a difference in the training of `Learner`."""


def planted_forward(name: str) -> str:
    """What the comparison says of a changed graph; empty where it finds no difference."""
    model, torch_model = exported(Net)
    graph = model.clone()
    FORWARD.get(name, lambda model: None)(graph)
    try:
        compare_graph(graph, torch_model)
    except CompileError as error:
        return str(error)
    return ""


def planted_training(name: str, folder: Path) -> str:
    """The tensors of a training that `partc verify` finds different; empty where there is none."""
    learned = TRAINED.get(name, Learned())
    model, torch_model = exported(Learner)
    graph = model.clone()
    learned.change(graph)
    within = learned.within(torch_model) if learned.within is not None else mock.patch.dict({}, {})
    with within:  # type: ignore[attr-defined]
        found = verdict(graph, torch_model, learned.optimizer, folder)
    return ", ".join(row.name for row in found.rows if not row.passed)


def verdict(graph: ir.Model, torch_model: TorchModel, optimizer: str, folder: Path) -> Verdict:
    """A training of `Learner` on one rank, compared with torch's."""
    loss = "{type: mean_squared, prediction: y, target: label}"
    plan = parse_plan(f"ranks: 1\ntrain:\n  loss: {loss}\n  optimizer: {optimizer}\n", "plan.yaml")
    (folder / "plan.yaml").write_text(f"ranks: 1\ntrain:\n  loss: {loss}\n  optimizer: {optimizer}\n")
    source = Source(graph)
    report = compile_source(Source(graph.clone()), plan, folder / "build")
    random = np.random.default_rng(5)
    values = {"ids": random.integers(0, 7, (6, 5)), "label": random.standard_normal((6, 3)).astype(np.float32)}
    values["ids"][:, 3] = 0
    case = Case(Path("model.py"), folder / "plan.yaml", report, values, folder, False, source, {}, torch_model)
    return verify_training.verdict(case, None, None)


def main(words: list[str]) -> int:
    """Plants each difference; how many are not found."""
    missed = 0
    for name in ["no difference", *FORWARD, *TRAINED]:
        if words and not any(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            told = planted_training(name, Path(folder)) if name in TRAINED else planted_forward(name)
            if name == "no difference":
                told += planted_training(name, Path(folder))
        wrong = bool(told) is (name == "no difference")
        missed += wrong
        print(f"{'MISSED' if wrong else 'found' if told else 'equal':6} {name:34} {' '.join(told.split())[:150]}")
    print(f"{len(FORWARD) + len(TRAINED)} differences, {missed} missed")
    return missed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(min(main(sys.argv[1:]), 1))
