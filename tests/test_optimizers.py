"""Optimizers: twenty steps equal torch's or the formulas, in stock onnxruntime; pieces of a flat buffer equal the whole bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from partc.compiler.errors import CompileError
from partc.compiler.training.optimizer_functions import FAMILIES, function, functions, ir_functions, variant
from partc.compiler.training.optimizers import OPTIMIZERS, Optimizer, clip_scale, optimizer, sum_of_squares
from partc.runtime.training.schedule import SCALARS, scalars
from partc.runtime.training.update import flat_model, is_elementwise, is_in_place

Array = npt.NDArray[Any]
Options = Mapping[str, object]
Tensors = dict[str, Array]

STEPS = 20
SHAPES = ((3, 5), (7,), (2, 3, 1, 4), (), (33, 17))
ADAM: Options = {"lr": 0.01}

CASES: list[tuple[str, Options]] = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.03, "weight_decay": 0.2}),
    ("momentum", {"lr": 0.1}),
    ("momentum", {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.1}),
    ("momentum", {"lr": 0.02, "momentum": 0}),
    ("nesterov", {"lr": 0.1}),
    ("nesterov", {"lr": 0.02, "momentum": 0.7, "weight_decay": 0.1}),
    ("adagrad", {"lr": 0.1}),
    ("adagrad", {"lr": 0.05, "initial_accumulator": 0.3, "eps": 1e-3, "weight_decay": 0.1}),
    ("adam", ADAM),
    ("adam", {"lr": 0.003, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.3}),
    ("adamw", ADAM),
    ("adamw", {"lr": 0.02, "betas": [0.5, 0.99], "weight_decay": 0.0}),
    ("adamw", {"lr": 0.05, "weight_decay": 0.4}),
    ("adam_weight_decay", ADAM),
    ("adam_weight_decay", {"lr": 0.02, "betas": [0.8, 0.98], "eps": 1e-4, "weight_decay": 0.3}),
    ("lamb", ADAM),
    ("lamb", {"lr": 0.02, "betas": [0.8, 0.98], "eps": 1e-4, "weight_decay": 0.3}),
    ("lamb", {"lr": 0.02, "weight_decay": 0.1, "max_ratio": 0.2}),
]


def drawn(shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def gradients(shape: tuple[int, ...], dtype: type = np.float32) -> Iterator[Array]:
    """Gradients of a wide spread, some of them 0."""
    for step in range(STEPS):
        g = drawn(shape, 100 + step, dtype)
        yield np.asarray(np.where(np.abs(g) < 0.1, 0, g * g * g), dtype)


def model_of(
    chosen: Optimizer,
    shape: tuple[int, ...],
    *,
    scaled: bool = False,
    dtype: ir.DataType = ir.DataType.FLOAT,
    **more: Any,
) -> onnx.ModelProto:
    """A model whose outputs are one parameter's update."""

    def tensor(name: str) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    parameter, gradient, *slots = (tensor(name) for name in ("w", "w.grad", *(f"w.{slot}" for slot in chosen.slots)))
    fed_values = [
        ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
        for name in (*chosen.scalars, *(["scale"] if scaled else []))
    ]
    outputs = [tensor(f"{value.name}.next") for value in (parameter, *slots)]
    named = {value.name or "": value for value in fed_values}
    nodes = chosen.update(parameter, gradient, slots, named, outputs, **more).nodes
    called = ir_functions({node.op_type for node in nodes})
    graph = ir.Graph(
        [parameter, gradient, *slots, *fed_values],
        outputs,
        nodes=nodes,
        opset_imports={"": 21, "partc.optimizer": 1},
        name="update",
    )
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10, functions=called))
    onnx.checker.check_model(proto)
    return proto


def fed(names: tuple[str, ...], step: int, hyper: Mapping[str, float]) -> Tensors:
    return {name: np.asarray(value) for name, value in scalars(names, step, hyper).items()}


def session_of(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def trained(
    chosen: Optimizer,
    shape: tuple[int, ...],
    *,
    scale: float | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT,
    **more: Any,
) -> Tensors:
    """The parameter and slots after the steps."""
    element = np.float32 if dtype == ir.DataType.FLOAT else np.float64
    session = session_of(model_of(chosen, shape, scaled=scale is not None, dtype=dtype, **more).SerializeToString())
    state: Tensors = {"w": drawn(shape, 1, element)}
    state |= {f"w.{slot}": np.full(shape, chosen.initial(slot), element) for slot in chosen.slots}
    names = (*chosen.scalars, *([] if scale is None else ["scale"]))
    for step, g in enumerate(gradients(shape, element)):
        hyper = {**chosen.hyper, "lr": chosen.lr, **({} if scale is None else {"scale": scale})}
        made = session.run(None, {**state, "w.grad": g, **fed(names, step, hyper)})
        state = dict(zip(state, made, strict=True))
    return state


def formula(chosen: Optimizer, shape: tuple[int, ...], change: Callable[[Array], Array] = lambda g: g) -> Tensors:
    """The same in float64, straight from the papers; `change` is applied to gradients first."""
    h, lr, wd = chosen.hyper, chosen.lr, chosen.weight_decay
    w = drawn(shape, 1).astype(np.float64)
    kept = {slot: np.full(shape, chosen.initial(slot)) for slot in chosen.slots}
    coupled = chosen.type in ("sgd", "momentum", "nesterov", "adagrad", "adam")
    for t, gradient in enumerate(gradients(shape), 1):
        g = change(gradient.astype(np.float64)) + (wd * w if coupled else 0)
        match chosen.type:
            case "sgd":
                w = w - lr * g
            case "momentum" | "nesterov":
                m = kept["momentum"] = h["momentum"] * kept["momentum"] + g
                w = w - lr * (g + h["momentum"] * m if chosen.type == "nesterov" else m)
            case "adagrad":
                kept["sum"] = kept["sum"] + g**2
                w = w - lr * g / (np.sqrt(kept["sum"]) + h["eps"])
            case _:
                b1, b2 = h["beta1"], h["beta2"]
                m = kept["exp_avg"] = b1 * kept["exp_avg"] + (1 - b1) * g
                v = kept["exp_avg_sq"] = b2 * kept["exp_avg_sq"] + (1 - b2) * g**2
                if chosen.type != "adam_weight_decay":
                    m, v = m / (1 - b1**t), v / (1 - b2**t)
                d = m / (np.sqrt(v) + h["eps"]) + (0 if coupled else wd * w)
                ratio = 1.0
                if chosen.type == "lamb":
                    norms = np.linalg.norm(np.ravel(w)), np.linalg.norm(np.ravel(d))
                    ratio = min(norms[0] / norms[1], h["max_ratio"]) if min(norms) > 0 else 1.0
                w = w - lr * ratio * d
    return {"w": w, **{f"w.{slot}": value for slot, value in kept.items()}}


def assert_close(found: Tensors, wanted: Tensors, tolerance: float = 1e-6) -> None:
    """Equal within the tolerance of each tensor's largest element."""
    assert list(found) == list(wanted)
    for name, value in found.items():
        np.testing.assert_allclose(
            value, wanted[name], rtol=0, atol=tolerance * max(float(np.abs(wanted[name]).max()), 1e-3), err_msg=name
        )


@pytest.mark.parametrize(
    ("type", "options"), CASES, ids=lambda x: x if isinstance(x, str) else ",".join(map(str, x.values()))
)
def test_twenty_steps_are_the_formula(type: str, options: Options) -> None:
    chosen = optimizer(type, options)
    for shape in SHAPES:
        assert_close(trained(chosen, shape), formula(chosen, shape), 2e-6)


@pytest.mark.parametrize(
    ("type", "options"), CASES, ids=lambda x: x if isinstance(x, str) else ",".join(map(str, x.values()))
)
def test_float64_is_the_formula(type: str, options: Options) -> None:
    chosen = optimizer(type, options)
    assert trained(chosen, (3, 5), dtype=ir.DataType.DOUBLE)["w"].dtype == np.float64


@pytest.mark.parametrize(
    ("type", "options"), [case for case in CASES if case[0] not in ("lamb", "adam_weight_decay")], ids=str
)
def test_twenty_steps_are_torchs(type: str, options: Options) -> None:
    torch = pytest.importorskip("torch")
    chosen = optimizer(type, options)
    given = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    optim, more, names = {
        "sgd": (torch.optim.SGD, (), {}),
        "momentum": (torch.optim.SGD, ("momentum",), {"momentum": "momentum_buffer"}),
        "nesterov": (torch.optim.SGD, ("momentum",), {"momentum": "momentum_buffer"}),
        "adagrad": (torch.optim.Adagrad, ("eps",), {}),
        "adam": (torch.optim.Adam, ("eps",), {}),
        "adamw": (torch.optim.AdamW, ("eps",), {}),
    }[type]
    given |= {name: chosen.hyper[name] for name in more}
    if type == "nesterov":
        given["nesterov"] = True
    if type == "adagrad":
        given["initial_accumulator_value"] = chosen.hyper["initial_accumulator"]
    if "beta1" in chosen.hyper:
        given["betas"] = (chosen.hyper["beta1"], chosen.hyper["beta2"])
    for shape in SHAPES:
        weight = torch.nn.Parameter(torch.from_numpy(drawn(shape, 1)))
        stepped = optim([weight], **given)
        for g in gradients(shape):
            weight.grad = torch.from_numpy(g)
            stepped.step()
        state = stepped.state[weight]
        wanted = {"w": weight.detach().numpy()}
        for slot in chosen.slots:
            held = state.get(names.get(slot, slot))
            wanted[f"w.{slot}"] = formula(chosen, shape)[f"w.{slot}"] if held is None else held.numpy()
        assert_close(trained(chosen, shape), wanted, 1e-6)
