"""Optimizers: twenty steps equal torch's and the formulas, and what cannot be is told whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizer_case import (
    CASES,
    Options,
    assert_close,
    case_name,
    drawn,
    formula,
    gradients,
    model_of,
    operands,
    session_of,
    trained,
)
from partc.compiler.errors import CompileError
from partc.compiler.plan.training.optimizer_kind import Option
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS
from partc.compiler.training.optimizer_functions import function, functions
from partc.compiler.training.optimizers import clip_scale, update_steps
from partc.runtime.artifact.training.scalars import SCALARS
from partc.runtime.updates.updater import flat_model
from plan_values import optimizer

SHAPES = ((3, 5), (7,), (2, 3, 1, 4), (), (33, 17))
IN_TORCH = [
    case
    for case in CASES
    if case[0] in ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "adafactor")
    and "nesterov" not in case[1]
]

EXACT = {"trust_coefficient": 2**-8, "lr": 2**-4, "eps": 2**-10, "weight_decay": 0.125}


def exact(key: str, option: Option) -> object:
    """A number that float32 holds exactly, so that what is left is the error of float64."""
    if key in ("lr_power", "beta2_decay"):
        return {"lr_power": -0.75, "beta2_decay": 0}[key]
    if key == "eps" and isinstance(option.default, tuple):
        return [2**-20, 2**-10]
    shares = [0.5, 0.5] if isinstance(option.default, tuple) else 0.5 if option.below == 1 else option.default
    return EXACT.get(key, True if option.default is False else shares)


@pytest.mark.parametrize(("type", "options"), CASES, ids=case_name)
def test_twenty_steps_are_the_formula(type: str, options: Options) -> None:
    chosen = optimizer(type, options)
    for shape in SHAPES:
        assert_close(trained(chosen, shape), formula(chosen, shape), 1e-6)


@pytest.mark.parametrize(("type", "options"), IN_TORCH, ids=case_name)
def test_twenty_steps_are_torchs(type: str, options: Options) -> None:
    torch = pytest.importorskip("torch")
    chosen = optimizer(type, options)
    h = chosen.hyper
    moments = {"betas": (h.get("beta1"), h.get("beta2")), "eps": h.get("eps")}
    optim, given = {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": h.get("momentum")}),
        "nesterov": (torch.optim.SGD, {"momentum": h.get("momentum"), "nesterov": True}),
        "adagrad": (
            torch.optim.Adagrad,
            {"eps": h.get("eps"), "initial_accumulator_value": h.get("initial_accumulator")},
        ),
        "rmsprop": (
            torch.optim.RMSprop,
            {key: h.get(key) for key in ("alpha", "eps", "momentum")} | {"centered": bool(h.get("centered"))},
        ),
        "adam": (torch.optim.Adam, moments),
        "adamw": (torch.optim.AdamW, moments),
        "adafactor": (
            torch.optim.Adafactor,
            {"beta2_decay": h.get("beta2_decay"), "eps": (h.get("eps1"), h.get("eps2")), "d": h.get("d")},
        ),
    }[type]
    for shape in SHAPES:
        weight = torch.nn.Parameter(torch.from_numpy(drawn(shape, 1)))
        stepped = optim([weight], lr=chosen.lr, weight_decay=chosen.weight_decay, **given)
        for g in gradients(shape):
            weight.grad = torch.from_numpy(g)
            stepped.step()
        wanted = {"w": weight.detach().numpy()}
        for slot in chosen.slots_of(len(shape)):
            # torch keeps no momentum of 0: its buffer would be the gradient itself.
            held = stepped.state[weight].get({"momentum": "momentum_buffer"}.get(slot, slot))
            wanted[f"w.{slot}"] = formula(chosen, shape)[f"w.{slot}"] if held is None else held.numpy()
        assert_close(trained(chosen, shape), wanted, 1e-6)


@pytest.mark.parametrize("type", OPTIMIZERS)
def test_float64_is_as_exact_as_float64(type: str) -> None:
    chosen = optimizer(type, {key: exact(key, option) for key, option in OPTIMIZERS[type].options.items()})
    assert_close(trained(chosen, (3, 5), dtype=ir.DataType.DOUBLE), formula(chosen, (3, 5)), 1e-13)


@pytest.mark.parametrize(("type", "options"), CASES, ids=case_name)
def test_gradients_are_scaled_then_clipped(type: str, options: Options) -> None:
    chosen = optimizer(type, options)
    scaled = formula(chosen, (5, 3), lambda g: 0.3 * g)
    assert_close(trained(chosen, (5, 3), scale=0.3), scaled, 2e-6)
    clipped = formula(chosen, (5, 3), lambda g: np.clip(0.3 * g, -0.1, 0.1))
    assert_close(trained(chosen, (5, 3), scale=0.3, clip_value=0.1), clipped, 2e-6)
    alone = formula(chosen, (5, 3), lambda g: np.clip(g, -0.1, 0.1))
    assert_close(trained(chosen, (5, 3), clip_value=0.1), alone, 2e-6)


@pytest.mark.parametrize("type", OPTIMIZERS)
def test_a_parameter_may_have_its_own_rate_and_decay(type: str) -> None:
    chosen = optimizer(type, {"lr": 0.02, "weight_decay": 0.3})
    wanted = formula(chosen.model_copy(update={"lr": 0.01, "weight_decay": 0.05}), (4, 3))
    assert_close(trained(chosen, (4, 3), lr_multiplier=0.5, weight_decay=0.05), wanted, 1e-6)
    assert_close(
        trained(chosen, (4, 3), weight_decay=0.0),
        formula(chosen.model_copy(update={"weight_decay": 0.0}), (4, 3)),
        1e-6,
    )


@pytest.mark.parametrize("count", [1, 3])
def test_the_norm_of_all_gradients_is_clipped(count: int) -> None:
    kind = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=f"g{k}", shape=ir.Shape([k + 2, 3]), type=kind) for k in range(count)]
    total, scale = (ir.Value(name=name, shape=ir.Shape([]), type=kind) for name in ("total", "scale"))
    squares = [
        ir.Node("", "ReduceSumSquare", [one], [ir.AttrInt64("keepdims", 0)], name=f"{one.name}.square")
        for one in inputs
    ]
    added = ir.Node("", "Sum", [node.outputs[0] for node in squares], outputs=[total])
    nodes = [*squares, added, clip_scale(total, scale, 0.5)]
    graph = ir.Graph(inputs, [scale], nodes=nodes, opset_imports={"": 21, "partc.optimizer": 1}, name="clip")
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    proto.functions.extend(functions(["ClipScale"]))
    onnx.checker.check_model(proto)
    session = session_of(proto.SerializeToString())
    arrays = {f"g{k}": drawn((k + 2, 3), k) for k in range(count)}
    norm = float(np.linalg.norm(np.concatenate([array.ravel() for array in arrays.values()])))
    assert norm > 0.5
    assert session.run(None, arrays)[0] == pytest.approx(0.5 / (norm + 1e-6), rel=1e-6)
    assert session.run(None, {name: array * 1e-3 for name, array in arrays.items()})[0] == 1


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_of_the_norm_is_torchs(max_norm: float) -> None:
    torch = pytest.importorskip("torch")
    array = drawn((7, 5), 1)
    parameter = torch.nn.Parameter(torch.zeros(7, 5))
    parameter.grad = torch.from_numpy(array.copy())
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    session = session_of(flat_model(function("ClipScale"), {"max_norm": max_norm}))
    (scale,) = session.run(None, {"total": np.asarray([np.sum(array * array)], np.float32)})
    np.testing.assert_allclose(array * scale, parameter.grad.numpy(), rtol=1e-6)


def test_slots_begin_as_the_optimizer_says() -> None:
    adam = optimizer("adam", {"lr": 1})
    assert adam.slots == ("exp_avg", "exp_avg_sq")
    assert adam.initial("exp_avg") == 0
    assert optimizer("adagrad", {"lr": 1, "initial_accumulator": 0.5}).initial("sum") == 0.5
    with pytest.raises(KeyError, match="sgd has no slot 'sum'"):
        optimizer("sgd", {"lr": 1}).initial("sum")


def test_the_runtime_feeds_the_scalars_of_all_optimizers() -> None:
    assert {name for kind in OPTIMIZERS.values() for name in kind.scalars} | {"scale"} == set(SCALARS)


def test_ftrl_is_0_until_its_linear_term_passes_l1() -> None:
    """TensorFlow's law, exactly: no number near 0, also where the parameter begins with another one."""
    chosen = optimizer("ftrl", {"lr": 0.1, "l1": 1.0, "l2": 0.25})
    session = session_of(model_of(chosen, (4,)).SerializeToString())
    state = [np.zeros(4, np.float32), np.full(4, chosen.initial("accumulator"), np.float32), np.zeros(4, np.float32)]
    seen = set()
    for _ in range(12):
        g = np.array([0.25, -0.25, 0.125, 0.0], np.float32)
        state = session.run(None, dict(zip(("w", "w.accumulator", "w.linear", "w.grad"), [*state, g], strict=True)))
        w, _, z = state
        np.testing.assert_array_equal(w == 0, np.abs(z) <= 1)
        assert not np.any(w * z > 0)
        seen.update((k, bool(zero)) for k, zero in enumerate(w == 0))
    assert seen >= {(0, True), (0, False), (1, True), (1, False), (2, True), (3, True)}
    assert (3, False) not in seen


def test_what_a_truth_value_and_a_power_must_be() -> None:
    with pytest.raises(CompileError, match=r"optimizer\.centered: expected true or false, but got the number 1"):
        optimizer("rmsprop", {"lr": 0.1, "centered": 1})
    with pytest.raises(CompileError, match=r"optimizer\.lr_power: expected at most 0, but got 0\.5"):
        optimizer("ftrl", {"lr": 0.1, "lr_power": 0.5})


def test_all_wrong_options_are_told_at_once() -> None:
    options: dict[str, Any] = {"betas": [0.9, 1.0], "eps": 0, "weight_decy": 1, "weight_decay": True}
    options |= {"beta1": 0.9, "momentum": 0.9, "zoom": 2}
    with pytest.raises(CompileError) as raised:
        optimizer("adam", options)
    assert [line.removeprefix("plan.yaml: ") for line in str(raised.value).splitlines()] == [
        "optimizer: 'lr' is missing",
        "  help: lr: The learning rate.",
        "optimizer.weight_decay: expected a number, but got true",
        "optimizer.betas.1: expected a number below 1, but got 1.0",
        "optimizer.eps: expected a number above 0, but got 0",
        "optimizer: unknown key 'weight_decy'",
        "  help: the nearest is 'weight_decay'",
        "optimizer: unknown key 'beta1'",
        "  help: write 'betas: [0.9, 0.999]'",
        "optimizer: unknown key 'momentum'",
        "  help: write 'type: momentum'",
        "optimizer: unknown key 'zoom'",
        "  help: the keys here are type, lr, weight_decay, betas, eps, nesterov, shard, target",
    ]


@pytest.mark.parametrize(
    ("type", "lines"),
    [
        (
            "adamv",
            ["there is no type 'adamv'", f"  the types are {', '.join(OPTIMIZERS)}", "  help: the nearest is 'adam'"],
        ),
        (3, ["expected a name, but got the number 3"]),
    ],
)
def test_unknown_types_are_told(type: object, lines: list[str]) -> None:
    with pytest.raises(CompileError) as raised:
        optimizer(type, {})
    assert [line.removeprefix("plan.yaml: optimizer: ") for line in str(raised.value).splitlines()] == lines


def test_other_types_of_parameters_are_refused() -> None:
    chosen = optimizer("sgd", {"lr": 1})
    with pytest.raises(CompileError, match="parameter 'w': its type is float16, which no optimizer updates"):
        model_of(chosen, (3,), dtype=ir.DataType.FLOAT16)
    parameter, *rest = operands(chosen)
    parameter.type = None
    with pytest.raises(CompileError, match="its type is unknown"):
        update_steps(chosen, parameter, *rest)
