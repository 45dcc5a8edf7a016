"""Twenty steps of an optimizer, as its functions make them in stock onnxruntime and as the papers' formulas do in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.training.optimizer_functions import functions
from partc.compiler.training.optimizers import update_steps
from partc.runtime.artifact.training.scalars import scalars

Array = npt.NDArray[Any]
Options = Mapping[str, object]
Tensors = dict[str, Array]

STEPS = 20
UNCOUPLED = ("adamw", "adam_weight_decay", "lamb", "lars", "adafactor")
"""Types whose weight decay is no part of the gradient."""

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
    ("row_adagrad", {"lr": 0.1}),
    ("row_adagrad", {"lr": 0.05, "initial_accumulator": 0.3, "eps": 1e-3, "weight_decay": 0.1}),
    ("rmsprop", {"lr": 0.01}),
    ("rmsprop", {"lr": 0.003, "alpha": 0.8, "eps": 1e-3, "centered": True, "weight_decay": 0.3}),
    ("rmsprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-4, "momentum": 0.5}),
    ("rmsprop", {"lr": 0.003, "alpha": 0.8, "eps": 1e-2, "momentum": 0.9, "centered": True}),
    ("ftrl", {"lr": 0.1}),
    ("ftrl", {"lr": 0.05, "l1": 0.5, "l2": 0.02, "initial_accumulator": 0.3, "weight_decay": 0.1}),
    ("ftrl", {"lr": 0.2, "lr_power": -0.75, "l1": 0.1}),
    ("ftrl", {"lr": 0.02, "lr_power": 0, "l2": 0.1}),
    ("adam", {"lr": 0.01}),
    ("adam", {"lr": 0.003, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.3}),
    ("adam", {"lr": 0.01, "nesterov": True}),
    ("adam", {"lr": 0.003, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.3, "nesterov": True}),
    ("adamw", {"lr": 0.01}),
    ("adamw", {"lr": 0.02, "betas": [0.5, 0.99], "weight_decay": 0.0}),
    ("adamw", {"lr": 0.05, "weight_decay": 0.4}),
    ("adam_weight_decay", {"lr": 0.01}),
    ("adam_weight_decay", {"lr": 0.02, "betas": [0.8, 0.98], "eps": 1e-4, "weight_decay": 0.3}),
    ("lamb", {"lr": 0.01}),
    ("lamb", {"lr": 0.02, "betas": [0.8, 0.98], "eps": 1e-4, "weight_decay": 0.3}),
    ("lamb", {"lr": 0.02, "weight_decay": 0.1, "max_ratio": 0.2}),
    ("lars", {"lr": 2.0}),
    ("lars", {"lr": 0.5, "momentum": 0.5, "trust_coefficient": 0.02, "eps": 1e-3, "weight_decay": 0.3}),
    ("adafactor", {"lr": 0.01}),
    ("adafactor", {"lr": 0.05, "beta2_decay": -0.5, "eps": [1e-3, 0.1], "d": 1.5, "weight_decay": 0.1}),
]


def case_name(case: object) -> str:
    """The name of a case among tests."""
    return " ".join(map(str, case.values())) if isinstance(case, Mapping) else str(case)


def drawn(shape: tuple[int, ...], seed: int) -> Array:
    """Normal float32 numbers."""
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def gradients(shape: tuple[int, ...]) -> Iterator[Array]:
    """Gradients of a wide spread, some of them 0."""
    for step in range(STEPS):
        g = drawn(shape, 100 + step)
        yield np.asarray(np.where(np.abs(g) < 0.1, 0, g * g * g), np.float32)


def fed(names: tuple[str, ...], step: int, hyper: Mapping[str, float]) -> Tensors:
    """The scalars of a step as onnxruntime takes them."""
    return {name: np.asarray(value) for name, value in scalars(names, step, hyper).items()}


def session_of(model: bytes) -> onnxruntime.InferenceSession:
    """A session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def operands(
    chosen: Optimizer,
    shape: tuple[int, ...] | None = None,
    *,
    scaled: bool = False,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> tuple[ir.Value, ir.Value, list[ir.Value], dict[str, ir.Value], list[ir.Value]]:
    """What `Optimizer.update` takes for a parameter `w`."""

    def tensor(name: str, ones: tuple[int, ...] = ()) -> ir.Value:
        dims = None if shape is None else ir.Shape(slot_shape(shape, ones))
        return ir.Value(name=name, shape=dims, type=ir.TensorType(dtype))

    slots = chosen.slots_of(len(shape or ()))
    names = (*chosen.scalars, *(["scale"] if scaled else []))
    single = ir.TensorType(ir.DataType.FLOAT)
    return (
        tensor("w"),
        tensor("w.grad"),
        [tensor(f"w.{slot}", ones) for slot, ones in slots.items()],
        {name: ir.Value(name=name, shape=ir.Shape([]), type=single) for name in names},
        [tensor("w.next"), *(tensor(f"w.{slot}.next", ones) for slot, ones in slots.items())],
    )


def model_of(chosen: Optimizer, shape: tuple[int, ...], opset: int = 21, **more: Any) -> onnx.ModelProto:
    """A checked model whose outputs are one parameter's update; `more` goes to `operands` and to `update_steps`."""
    given = operands(chosen, shape, **{key: more.pop(key) for key in ("scaled", "dtype") if key in more})
    parameter, gradient, slots, singles, outputs = given
    steps = update_steps(chosen, *given, shape=shape, **more)
    nodes = [step for step in steps if isinstance(step, ir.Node)]
    graph = ir.Graph(
        [parameter, gradient, *slots, *singles.values()],
        outputs,
        nodes=nodes,
        opset_imports={"": opset, "partc.optimizer": 1},
        name="update",
    )
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    proto.functions.extend(functions({node.op_type for node in nodes}, opset))
    onnx.checker.check_model(proto)
    return proto


def trained(
    chosen: Optimizer,
    shape: tuple[int, ...],
    *,
    scale: float | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT,
    **more: Any,
) -> Tensors:
    """The parameter and its slots after the steps."""
    element = dtype.numpy()
    session = session_of(model_of(chosen, shape, scaled=scale is not None, dtype=dtype, **more).SerializeToString())
    state: Tensors = {"w": drawn(shape, 1).astype(element)}
    state |= {f"w.{slot}": value.astype(element) for slot, value in begun(chosen, shape).items()}
    names = (*chosen.scalars, *([] if scale is None else ["scale"]))
    hyper = {**chosen.hyper, "lr": chosen.lr, **({} if scale is None else {"scale": scale})}
    for step, g in enumerate(gradients(shape)):
        made = session.run(None, {**state, "w.grad": g.astype(element), **fed(names, step, hyper)})
        state = dict(zip(state, made, strict=True))
    return state


def slot_shape(shape: tuple[int, ...], ones: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a slot that has one element along some dims."""
    return tuple(1 if dim - len(shape) in ones else size for dim, size in enumerate(shape))


def begun(chosen: Optimizer, shape: tuple[int, ...]) -> Tensors:
    """The slots of a parameter before the first step."""
    slots = chosen.slots_of(len(shape)).items()
    return {slot: np.full(slot_shape(shape, ones), chosen.initial(slot)) for slot, ones in slots}


def formula(chosen: Optimizer, shape: tuple[int, ...], change: Callable[[Array], Array] = lambda g: g) -> Tensors:
    """The same in float64; `change` is applied to gradients first."""
    h, lr, wd = chosen.hyper, chosen.lr, chosen.weight_decay
    w = drawn(shape, 1).astype(np.float64)
    kept = begun(chosen, shape)
    coupled = chosen.type not in UNCOUPLED
    for t, gradient in enumerate(gradients(shape), 1):
        g = change(gradient.astype(np.float64)) + (wd * w if coupled else 0)
        match chosen.type.removeprefix("lazy_"):
            case "sgd":
                w = w - lr * g
            case "momentum" | "nesterov":
                m = kept["momentum"] = h["momentum"] * kept["momentum"] + g
                w = w - lr * (g + h["momentum"] * m if chosen.type == "nesterov" else m)
            case "rmsprop":
                v = kept["square_avg"] = h["alpha"] * kept["square_avg"] + (1 - h["alpha"]) * g**2
                if h["centered"]:
                    a = kept["grad_avg"] = h["alpha"] * kept["grad_avg"] + (1 - h["alpha"]) * g
                    v = v - a**2
                d = g / (np.sqrt(v) + h["eps"])
                if h["momentum"]:
                    d = kept["momentum"] = h["momentum"] * kept["momentum"] + d
                w = w - lr * d
            case "ftrl":
                n, p, z = kept["accumulator"], h["lr_power"], kept["linear"]
                more = kept["accumulator"] = n + g**2
                z = kept["linear"] = z + g - (more**-p - n**-p) / lr * w
                quadratic = 1 / (more**p * lr) + 2 * h["l2"]
                w = np.where(np.abs(z) > h["l1"], (np.sign(z) * h["l1"] - z) / quadratic, 0)
            case "lars":
                norms = np.linalg.norm(np.ravel(w)), np.linalg.norm(np.ravel(g))
                ratio = (
                    h["trust_coefficient"] * norms[0] / (norms[1] + wd * norms[0] + h["eps"]) if min(norms) > 0 else 1.0
                )
                m = kept["momentum"] = h["momentum"] * kept["momentum"] + lr * ratio * (g + wd * w)
                w = w - m
            case "adafactor":
                forget, size = t ** h["beta2_decay"], max(h["eps2"], np.sqrt(np.mean(w**2)))
                for name, axis in (("row_var", -1), ("col_var", -2)) if w.ndim > 1 else ():
                    kept[name] = kept[name] + forget * (np.mean(g**2, axis=axis, keepdims=True) - kept[name])
                if w.ndim > 1:
                    v = kept["row_var"] @ kept["col_var"]
                    v = v / np.maximum(np.mean(kept["row_var"], axis=-2, keepdims=True), h["eps1"])
                else:
                    v = kept["variance"] = kept["variance"] + forget * (g**2 - kept["variance"])
                d = g / np.sqrt(np.maximum(v, h["eps1"] ** 2))
                step = min(lr, t**-0.5) * size / max(1.0, np.sqrt(np.mean(d**2)) / h["d"])
                w = w * (1 - lr * wd) - step * d
            case "row_adagrad":
                axes = tuple(range(1, g.ndim)) or ()
                kept["sum"] = kept["sum"] + (np.mean(g**2, axis=axes, keepdims=True) if axes else g**2)
                w = w - lr * g / (np.sqrt(kept["sum"]) + h["eps"])
            case "adagrad":
                kept["sum"] = kept["sum"] + g**2
                w = w - lr * g / (np.sqrt(kept["sum"]) + h["eps"])
            case _:
                b1, b2 = h["beta1"], h["beta2"]
                m = kept["exp_avg"] = b1 * kept["exp_avg"] + (1 - b1) * g
                v = kept["exp_avg_sq"] = b2 * kept["exp_avg_sq"] + (1 - b2) * g**2
                if h.get("nesterov"):
                    m = b1 * m + (1 - b1) * g
                if chosen.type != "adam_weight_decay":
                    m, v = m / (1 - b1**t), v / (1 - b2**t)
                d = m / (np.sqrt(v) + h["eps"]) + (0 if coupled else wd * w)
                ratio = 1.0
                if chosen.type == "lamb":
                    norms = np.linalg.norm(np.ravel(w)), np.linalg.norm(np.ravel(d))
                    ratio = min(norms[0] / norms[1], h["max_ratio"]) if min(norms) > 0 else 1.0
                w = w - lr * ratio * d
    return {"w": w, **{f"w.{slot}": value for slot, value in kept.items()}}


def assert_close(found: Tensors, wanted: Tensors, tolerance: float) -> None:
    """Equal within the tolerance of each tensor's largest element."""
    assert list(found) == list(wanted)
    for name, value in found.items():
        largest = max(float(np.abs(wanted[name]).max()), 1e-3)
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=tolerance * largest, err_msg=name)
