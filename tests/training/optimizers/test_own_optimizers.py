"""Parameters with an optimizer of their own: torch's steps with several optimizers, every plan equal to the whole, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import training_models as models
from mutated import change_file, change_manifest
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Compute
from partc.compiler.plan.read import parse_plan
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS
from partc.runtime.artifact.training.scalars import scalars
from partc.runtime.checker.check import check_artifact
from rows import of_today
from small_training import DATA_PARALLEL, PERCEPTRON, compiled
from training_equivalence import run, same_tensors, source_of
from training_plans_case import BLOCKS, CROSS_ENTROPY, batches, learns, sizes_of

STEPS, RATE = 8, 0.01
OWN = """
  parameters:
    "**.bias": {weight_decay: 0}
    "layers.1.*": {optimizer: {type: adagrad, lr: 0.05, initial_accumulator: 0.1}}
    "layers.2.*": {optimizer: {type: adam, betas: [0.6, 0.9], weight_decay: 0.1}, lr: 0.5}
    "layers.2.bias": {optimizer: sgd}
"""
SEVERAL = f"""train:
  {CROSS_ENTROPY}
  optimizer: {{type: adam, lr: {RATE}, eps: 0.0001, weight_decay: 0.05}}
  schedule: {{type: cosine, steps: {STEPS}, minimum: 0.001}}
  clip: {{norm: 0.3}}{OWN}"""


def test_several_optimizers_take_torchs_steps(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from training_torch import TorchStep

    one = models.mlp(width=9, inputs=6)
    random = np.random.default_rng(3)
    steps = [one.feeds(random, batch=6) for _ in range(STEPS)]
    have = run(source_of(one), f"ranks: 1\n{SEVERAL}", tmp_path / "build", steps)
    parameters = {name: value for name, value in have.before.items() if name.endswith(("weight", "bias"))}
    other = TorchStep(one, parameters)
    p = dict(other.module.named_parameters())
    adam, adagrad = torch.optim.Adam, torch.optim.Adagrad
    # weight decay of biases is 0 by the first pattern: the later ones say nothing of it.
    optimizers: list[Any] = [
        adam([p["layers.0.weight"]], RATE, eps=1e-4, weight_decay=0.05),
        adam([p["layers.0.bias"]], RATE, eps=1e-4),
        adagrad([p["layers.1.weight"], p["layers.1.bias"]], 0.05, initial_accumulator_value=0.1),
        adam([p["layers.2.weight"]], RATE / 2, betas=(0.6, 0.9), weight_decay=0.1),
        torch.optim.SGD([p["layers.2.bias"]], RATE / 2),
    ]
    starts = [one.param_groups[0]["lr"] for one in optimizers]
    for k, (given, step) in enumerate(zip(have.outputs, steps, strict=True)):
        loss = other({name: torch.from_numpy(array) for name, array in step.items()})
        np.testing.assert_allclose(given["loss"], loss.numpy(), rtol=5e-5, err_msg=f"step {k}")
        torch.nn.utils.clip_grad_norm_(list(p.values()), 0.3)
        share = 0.1 + 0.9 * (1 + np.cos(np.pi * k / STEPS)) / 2
        for one_of, start in zip(optimizers, starts, strict=True):
            one_of.param_groups[0]["lr"] = start * share
            one_of.step()
    want = {name: value.detach().numpy().copy() for name, value in p.items()}
    same_tensors({name: have.after[name] for name in want}, want, have.before, 5e-4)
    record = have.program.training.record() if have.program.training else None
    assert record is not None
    assert {name: (one.type, one.hyper) for name, one in record.optimizer.others.items()} == {
        "adagrad": ("adagrad", {"initial_accumulator": 0.1, "eps": 1e-10}),
        "adam_2": ("adam", {"beta1": 0.6, "beta2": 0.9, "eps": 1e-8, "nesterov": False}),
        "sgd": ("sgd", {}),
    }
    assert record.optimizer.types == "adam, adagrad, sgd"
    assert record.scalars == ["lr", "bias1", "bias2", "adam_2.bias1", "adam_2.bias2"]
    found = scalars(record.scalars, 1, {**record.optimizer.numbers, "lr": 0.5})
    assert list(found.values()) == [np.float32(x) for x in (0.5, 1 - 0.81, 1 - 0.999**2, 1 - 0.36, 1 - 0.81)]


MIXED = f"""train:
  {CROSS_ENTROPY}
  optimizer: {{type: adamw, lr: 0.01, eps: 0.01SHARD}}
  clip: {{norm: 0.5}}
  parameters:
    "tokens*": {{optimizer: {{type: adagrad, lr: 0.02, initial_accumulator: 0.01}}}}
    "**.project*": {{optimizer: {{type: lamb, eps: 0.01, betas: [0.8, 0.9]}}, weight_decay: 0.1}}
    "**.out*": {{optimizer: {{type: lars, lr: 2.0}}}}
    "**.mlp.project*": {{optimizer: {{type: adafactor, d: 2.0}}}}
    "head*": {{optimizer: momentum}}
    "positions*": {{optimizer: {{type: ftrl, lr: 0.05, l1: 0.001}}}}
    "norm*": {{optimizer: {{type: rmsprop, eps: 0.01, centered: true, momentum: 0.5}}}}
"""
PLANS = {
    "dp": f"ranks: 2\n{batches(2)}",
    "dp x tp": "ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 4}}\n"
    "dataset: {x: [dp, null], labels: [dp, null]}\n"
    f"sharding: {{{BLOCKS}, tokens: {{parameters: {{weight: [tp, null]}}}}, head: colwise}}\n",
    "placed": "ranks: 3\nplacement: {tokens: 0, positions: 1, layers.0: 2, norm: 1, head: 0}\n",
}


@pytest.mark.parametrize(
    ("plan", "shard", "more"),
    of_today(
        [
            ("dp", "", "  on_nonfinite: skip\n"),
            ("dp x tp", ", shard: true", "  accumulate: 2\n"),
            ("placed", "", "  accumulate: 2\n"),
        ],
        1,
    ),
)
def test_every_plan_learns_as_the_whole(plan: str, shard: str, more: str, tmp_path: Path) -> None:
    name = "gpt of one block"
    train = MIXED.replace("SHARD", shard)
    program = learns(name, PLANS[plan], sizes_of(name, 4, 8), tmp_path, train + more, atol=5e-4)
    assert program.training is not None
    assert list(program.training.others) == ["adagrad", "ftrl", "lamb", "lars", "adafactor", "rmsprop", "momentum"]


REFUSED = {
    "optimizer: adagrat": f"there is no type 'adagrat'\n  the types are {', '.join(OPTIMIZERS)}\n  help: the nearest is 'adagrad'",
    "optimizer: {type: adagrad, momentum: 0.9}": "unknown key 'momentum'\n  help: write 'type: momentum'",
    "optimizer: {lr: 0.1}": "'type' is missing\n  help: write optimizer: {type: adam, betas: [0.9, 0.95]}",
    "optimizer: {type: adam, shard: dp}": "'shard' applies to all parameters; it cannot be set for a pattern\n"
    "  help: write it in train.optimizer",
    "optimizer: {type: adam, target: cpu}": "'target' applies to all parameters; it cannot be set for a pattern\n"
    "  help: write it in train.optimizer",
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_no_optimizer_is(rule: str) -> None:
    train = "train:\n  loss: loss\n  optimizer: {type: sgd, lr: 0.1}\n  parameters:\n    fc*:\n      RULE\n"
    with pytest.raises(CompileError) as caught:
        parse_plan(f"ranks: 1\n{train.replace('RULE', rule)}", "plan.yaml")
    assert str(caught.value) == f"plan.yaml:7: parameters 'fc*', 'optimizer': {REFUSED[rule]}"


def test_ftrl_has_one_rate_for_all_steps(tmp_path: Path) -> None:
    plan = f"""ranks: 1
train:
  {CROSS_ENTROPY}
  optimizer: OPTIMIZER
  schedule: {{type: cosine, steps: 4}}
  parameters: {{"layers.0.*": {{optimizer: {{type: ftrl, lr: 0.2}}, lr: FACTOR}}}}
"""
    with pytest.raises(CompileError) as caught:
        parse_plan(plan.replace("OPTIMIZER", "{type: ftrl, lr: 0.1}").replace("FACTOR", "1"), "plan.yaml")
    assert (
        str(caught.value)
        == """plan.yaml:5: 'train': the rate of ftrl is the same in all steps
  what it keeps of a parameter is in proportion to 1/lr
  help: leave 'schedule' out, or give ftrl to some parameters only, under 'parameters'"""
    )
    source, sgd = source_of(models.mlp(width=9, inputs=6)), plan.replace("OPTIMIZER", "{type: sgd, lr: 0.1}")
    with pytest.raises(CompileError) as caught:
        run(source, sgd.replace("FACTOR", "0"), tmp_path / "build", [])
    assert (
        str(caught.value)
        == """plan.yaml:2: the learning rate of 'layers.0.weight' is 0
  ftrl divides by its rate
  help: write layers.0.weight: {frozen: true}"""
    )
    program = run(source, sgd.replace("FACTOR", "0.5"), tmp_path / "build", []).program
    rates = {node.attributes["rate"].as_float() for node in updates(program) if node.op_type == "Ftrl"}
    assert rates == {0.1}


def updates(program: Complete) -> list[ir.Node]:
    """The optimizer's nodes of the first rank."""
    steps = (step for step in program.parts[0].steps if isinstance(step, Compute))
    return [step.node for step in steps if step.node.domain == "partc.optimizer"]


def test_rates_are_in_proportion(tmp_path: Path) -> None:
    plan = f"""ranks: 1
train:
  {CROSS_ENTROPY}
  optimizer: {{type: sgd, lr: 0}}
  parameters: {{"layers.0.*": {{optimizer: adam}}, "layers.1.*": {{optimizer: {{type: adagrad, lr: 0.1}}}}}}
"""
    with pytest.raises(CompileError) as caught:
        run(source_of(models.mlp(width=9, inputs=6)), plan, tmp_path / "build", [])
    assert (
        str(caught.value)
        == """plan.yaml:5: 'layers.1.*': the optimizer's 'lr' is 0.1, and that of train.optimizer 0
  a schedule gives the rate of train.optimizer, which others follow in proportion of their 'lr'
  help: give train.optimizer an 'lr' above 0, and freeze what it must not change"""
    )


def test_the_checker_knows_whose_number_is_whose(tmp_path: Path) -> None:
    """Of two Adams each update has the numbers of its own, and reads the bias corrections of its own."""
    own = "{type: adam, lr: 0.1}, parameters: {second: {optimizer: {type: adam, betas: [0.5, 0.75]}}}"
    out = compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL, own)
    assert check_artifact(out) == []

    def other_beta(manifest: dict[str, Any]) -> None:
        manifest["training"]["optimizer"]["others"]["adam_2"]["hyper"]["beta1"] = 0.7

    def others_corrections(model: onnx.ModelProto) -> None:
        (node,) = (one for one in model.graph.node if one.name == "second.update")
        node.input[:] = ["adam_2.bias1" if name == "bias1" else name.removeprefix("adam_2.") for name in node.input]

    change_file(out, "rank_0000.onnx", others_corrections)
    assert "it reads scalars of the training's optimizer, and its numbers are those of the optimizer 'adam_2'" in texts(
        out
    )
    change_manifest(out, other_beta)
    assert "its beta1 is 0.5, and that of the optimizer 'adam_2' 0.7" in texts(out)


def texts(folder: Path) -> str:
    return "\n".join(map(str, check_artifact(folder)))
