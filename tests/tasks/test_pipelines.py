"""A batch that runs as microbatches through stages gives what it gives as a whole: losses, metrics and all tensors, for every schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_in_parts import (
    LOSSES,
    MEASURED,
    NET,
    PLANS,
    WEIGHTS,
    close,
    numbers,
    start_of,
    train,
    trained,
    trained_whole,
)
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from pipelines_case import CLASSES, pipeline, placed, small_gpt
from rows import of_today
from training_equivalence import from_text, source_of
from training_models import Model, dlrm, lenet

STAGED = "ranks: 2\nsymbols: {batch: {divisor: 16}}\nplacement: {up: 0, bend: 0, down: 1, add: 1}\n"
THREE = "ranks: 3\nplacement: {up: 0, bend: 1, down: 2, add: 2}\n"
LOOP = "ranks: 2\nplacement: {up: 0, bend: 1, down: 0, add: 1}\n"
VEE = "ranks: 2\nplacement: {up: 0, bend: 1, down: 1, add: 0}\n"
CLIP = "  clip: {norm: 0.3}\n"


@pytest.mark.parametrize(
    ("name", "plan", "schedule", "count"),
    of_today(
        [
            *[(name, STAGED, "1f1b", 4) for name in ("mean", "ignored", "sum", "chances")],
            ("both, smoothed", STAGED, "zb_h1", 8),
            ("both, smoothed", THREE, "1f1b", 2),
            ("ignored", THREE, "zb_h1", 4),
            ("weights", LOOP, "interleaved", 4),
            ("both, smoothed", VEE, "auto", 8),
            ("sum", VEE, "gpipe", 2),
            ("both, smoothed", VEE, "zbv", 4),
            ("mean", VEE, "['0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1', '1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1']", 2),
            ("mean", STAGED, "['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']", 2),
            ("both, smoothed", PLANS[1], "auto", 8),
            ("both, smoothed", PLANS[2], "1f1b", 4),
            ("mean", STAGED, "1f1b", 1),
        ],
        6,
    ),
)
def test_microbatches_are_as_the_whole(name: str, plan: str, schedule: str, count: int, tmp_path: Path) -> None:
    """Labels are unevenly spread, and the first microbatch has none at all."""
    loss = LOSSES[name]
    measured = MEASURED if "label" in loss and "binary" not in loss else ""
    text = train(loss, 1, "{type: momentum, lr: 0.3}", measured + CLIP)
    steps = [numbers(loss)] * 3
    want = trained_whole(from_text(NET, WEIGHTS), "ranks: 1\n" + text, steps)
    have = trained(tmp_path / "build", from_text(NET, WEIGHTS), plan + text + pipeline(count, schedule), steps)
    close(have, want, start_of(), 2e-6)


BLOCKS = "sharding: {'layers.*.*.project': colwise, 'layers.*.*.out': rowwise}\n"
PIPES = "mesh: {pp: 2, AXIS: 2}\nplacement: {'layers.0': {pp: 0}, tokens: {pp: 0}, positions: {pp: 0}, REST}\n"
REST = "'layers.1': {pp: 1}, norm: {pp: 1}, head: {pp: 1}"


MODELS: dict[str, tuple[Callable[[], Model], dict[str, int], str]] = {
    "gpt": (partial(small_gpt, 4), {"batch": 8, "seq": 6}, CLASSES),
    "gpt of two blocks": (partial(small_gpt, 2), {"batch": 8, "seq": 6}, CLASSES),
    "lenet": (lenet, {"batch": 8}, "{type: softmax_cross_entropy, logits: y, labels: labels}"),
    "dlrm": (lambda: dlrm(3, 50, 8, 13, 16), {"batch": 8}, "loss"),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """By model its source, three batches, and what one rank makes of them."""
    return {}


@pytest.mark.parametrize(
    ("name", "plan", "schedule", "counts", "shared"),
    of_today(
        [
            ("gpt", "ranks: 2\n" + placed("0 1 0 1"), "interleaved", (2,), ""),
            ("gpt", "ranks: 2\n" + placed("0 1 1 0"), "zbv", (2,), ""),
            (
                "gpt of two blocks",
                "ranks: 4\n" + PIPES.replace("AXIS", "tp").replace("REST", REST) + BLOCKS,
                "zb_h1",
                (4,),
                "",
            ),
            (
                "gpt of two blocks",
                "ranks: 4\ndataset: {x: [dp, null], labels: [dp, null]}\nsymbols: {batch: {divisor: 8}}\n"
                + PIPES.replace("AXIS", "dp").replace("REST", REST),
                "1f1b",
                (4,),
                ", shard: dp",
            ),
            ("lenet", "ranks: 5\nplacement: {conv1: 3, conv2: 4, fc1: 0, fc2: 1, fc3: 2}\n", "1f1b", (4,), ""),
            ("dlrm", "ranks: 2\nplacement: {top: 1}\n", "", (4,), ""),
        ],
        2,
    ),
)
def test_models_learn_alike(
    name: str,
    plan: str,
    schedule: str,
    counts: tuple[int, ...],
    shared: str,
    models: dict[str, Any],
    tmp_path: Path,
) -> None:
    def training(optimizer: str) -> str:
        return train(MODELS[name][2], 1, optimizer, "  clip: {norm: 1.0}\n")

    if name not in models:
        make, sizes, _ = MODELS[name]
        model = make()
        rng = np.random.default_rng(0)
        feeds = [model.feeds(rng, **sizes) for _ in range(2)]
        source = source_of(model).model
        given = Source(source.clone())
        whole = trained_whole(given, "ranks: 1\n" + training("{type: momentum, lr: 0.1}"), feeds)
        models[name] = source, feeds, whole
    source, feeds, whole = models[name]
    for count in counts:
        text = plan + training(f"{{type: momentum, lr: 0.1{shared}}}") + pipeline(count, schedule)
        have = trained(tmp_path / f"build{count}", Source(source.clone()), text, feeds)
        for one, other in zip(have[0], whole[0], strict=True):
            assert one == pytest.approx(other, rel=1e-6)
        for tensor, array in whole[1].items():
            np.testing.assert_allclose(have[1][tensor], array, rtol=0, atol=1e-6 * np.abs(array).max(), err_msg=tensor)


MASKED = {
    "stages": "placement: {up: 0, bend: 0, drop: 0, down: 1, add: 1}\n",
    "cut behind": "placement: {up: 0, bend: 0, drop: 0, down: [1, 2], add: [1, 2]}\ndataset: data_parallel\n",
    "cut inside": "sharding: {up: {in: [[2, 1], [1, 1]]}}\n",
    "cut itself": "sharding: {drop: {in: [[2, 1]]}}\n",
}


@pytest.mark.parametrize("name", of_today([*MASKED], 2))
def test_masks_are_those_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    """Dropout draws by the place in the batch, so a microbatch has its share of the masks, of as many pieces as any input lies in."""
    net = NET.replace("[bend] b = Tanh (a)", "[bend] h = Tanh (a) [drop] b = Dropout (h, ratio, on)").replace(
        "float[5] shift>", "float[5] shift, float ratio = {0.4}, bool on = {1}>"
    )
    steps = [numbers("label")] * 2
    text = train(LOSSES["mean"], 1)
    whole = trained_whole(from_text(net, WEIGHTS), "ranks: 1\n" + text, steps)
    plan = f"ranks: {2 + ('[1, 2]' in MASKED[name])}\nsymbols: {{batch: {{divisor: 8}}}}\n{MASKED[name]}{text}"
    close(trained(tmp_path / "build", from_text(net, WEIGHTS), plan + pipeline(4), steps), whole, start_of(), 2e-6)


TIED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 5] y) <float[6, 6] w, float[6] gain, float[6, 5] v> {
    [up] a = MatMul (x, w)
    [scale] b = Mul (a, gain)
    [again] c = MatMul (b, w)
    [rescale] d = Mul (c, gain)
    [down] y = MatMul (d, v)
}"""


@pytest.mark.parametrize(("schedule", "second"), [("1f1b", "1"), ("zb_h1", "1"), ("1f1b", "[1, 2]")])
def test_gradients_of_a_weight_of_two_stages_meet_once(schedule: str, second: str, tmp_path: Path) -> None:
    """Also where the second is a group, of which one rank hands on the sum."""
    weights = {"w": (6, 6), "gain": (6,), "v": (6, 5)}
    steps = [numbers("label")] * 2
    text = train(LOSSES["mean"], 1, "{type: momentum, lr: 0.1}", CLIP)
    whole = trained_whole(from_text(TIED, weights), "ranks: 1\n" + text, steps)
    plan = "ranks: 3\nplacement: {up: 0, scale: 0, again: 1, rescale: 1, down: 1}\n".replace(" 1", f" {second}") + text
    have = trained(tmp_path / "build", from_text(TIED, weights), plan + pipeline(4, schedule), steps)
    close(have, whole, start_of(weights, TIED), 2e-6)


def test_ranks_without_a_stage_are_told_the_numbers_of_the_batch(tmp_path: Path) -> None:
    text, steps = train(LOSSES["weights"], 1), [numbers("label")]
    whole = trained_whole(from_text(NET, WEIGHTS), "ranks: 1\n" + text, steps)
    plan = STAGED.replace("ranks: 2", "ranks: 4") + text + pipeline(2)
    close(trained(tmp_path / "build", from_text(NET, WEIGHTS), plan, steps), whole, start_of(), 2e-6)


def test_only_the_models_own_inputs_are_asked_for(tmp_path: Path) -> None:
    plan = STAGED + train(LOSSES["weights"], 1) + pipeline(2)
    compile_source(from_text(NET, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    ports = {port.name for port in open_artifact(tmp_path / "build").manifest.inputs}
    assert {"x", "label"} <= ports
    assert "loss.weight_sum" not in ports


def test_a_message_has_one_name_on_both_ranks(tmp_path: Path) -> None:
    """Also where the name that a microbatch would get is that of another value on one of them."""

    def source() -> Source:
        given = from_text(NET, WEIGHTS)
        (made,) = (node.outputs[0] for node in given.model.graph if node.name == "down")
        made.name = "b.0"
        return given

    text, steps = train(LOSSES["mean"], 1), [numbers("label")]
    whole = trained_whole(source(), "ranks: 1\n" + text, steps)
    have = trained(tmp_path / "build", source(), STAGED + text + pipeline(2), steps)
    close(have, whole, start_of(), 2e-6)


NORMALIZED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 5] y)
<float[6, 8] w, float[8] gain, float[8] bias, float[8] mean, float[8] var = {1, 1, 1, 1, 1, 1, 1, 1}, float[8, 5] v> {
    [up] a = MatMul (x, w)
    [bn] b, m1, v1 = BatchNormalization <training_mode = 1, momentum = 0.9> (a, gain, bias, mean, var)
    [down] y = MatMul (b, v)
}"""
EPSILON, MOMENTUM, RATE = (float(np.float32(number)) for number in (1e-5, 1 - np.float32(0.9), 0.1))
"""Attributes of ONNX and the numbers of a step have 32 bits."""


@pytest.mark.parametrize(
    ("placed", "dtype", "bound"),
    [("ranks: 2\nplacement: {up: 0, bn: 0, down: 1}\n", "float32", 2e-6), ("ranks: 1\n", "float64", 1e-14)],
)
def test_statistics_are_of_microbatches_and_move_once_a_step(
    placed: str, dtype: str, bound: float, tmp_path: Path
) -> None:
    """As a loop over microbatches does in torch, which replaces running statistics by the mean of what each makes of them."""
    torch = pytest.importorskip("torch")
    learned = {"w": (6, 8), "gain": (8,), "bias": (8,), "v": (8, 5)}
    loss = LOSSES["squares"]
    plan = placed + train(loss, 1, "{type: sgd, lr: 0.1}")
    text = NORMALIZED if dtype == "float32" else NORMALIZED.replace("float[", "double[")
    source = from_text(text, {**learned, "mean": (8,)}, dtype=dtype)
    refused = parse_plan(plan + pipeline(4), "plan.yaml")
    with pytest.raises(CompileError, match=r"(?s)bn \(.*statistics: microbatch"):
        compile_source(Source(source.model.clone()), refused, tmp_path / "refused")
    steps = [{name: one.astype(dtype) if one.dtype == np.float32 else one for name, one in numbers(loss).items()}] * 2
    first = {name: value.const_value.numpy().copy() for name, value in source.model.graph.initializers.items()}
    _, have = trained(tmp_path / "build", source, plan + pipeline(4, "1f1b", ", statistics: microbatch"), steps)
    want = {name: torch.tensor(array, requires_grad=name in learned) for name, array in first.items()}
    for step in steps:
        made = []
        for k in range(4):
            x, t = (torch.tensor(step[name][4 * k : 4 * k + 4]) for name in ("x", "t"))
            mean, var = want["mean"].clone(), want["var"].clone()
            given = x @ want["w"], mean, var, want["gain"], want["bias"]
            b = torch.nn.functional.batch_norm(*given, True, MOMENTUM, EPSILON)
            (torch.nn.functional.mse_loss(b @ want["v"], t) / 4).backward()
            a = (x @ want["w"]).detach()  # ONNX's running variance is of the population, torch's of the sample
            made.append((mean, (1 - MOMENTUM) * want["var"] + MOMENTUM * a.var(0, unbiased=False)))
        with torch.no_grad():
            want["mean"], want["var"] = (sum(some) / 4 for some in zip(*made, strict=True))
            for name in learned:
                want[name] -= RATE * want[name].grad
                want[name].grad = None
    for name, tensor in want.items():
        np.testing.assert_allclose(have[name], tensor.detach().numpy(), rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (THREE + pipeline(2, "interleaved"), ["interleaved does not fit", "rank 0, rank 1, rank 2", "1f1b"]),
        (LOOP + pipeline(2, "1f1b"), ["1f1b does not fit", "interleaved or auto"]),
        (STAGED + pipeline(2, "1f2b"), ["'1f2b' is not known", "1f1b"]),
        (STAGED + pipeline(2, "['0F0 0F1 0B0 0B1', '1F0 1B0 1F1']"), ["1B1"]),
        (STAGED + pipeline(0), ["expected at least 1, but got 0"]),
        (STAGED.replace("divisor: 16", "min: 6, max: 6") + pipeline(4), ["no batch of 'batch'", "4 parts"]),
        (STAGED + pipeline(2, "auto", ", memory: 0.1 microbatches"), ["memory"]),
        (STAGED + pipeline(2).replace("microbatches", "microbatch"), ["unknown key 'microbatch'"]),
    ],
)
def test_what_does_not_fit_is_refused(plan: str, words: list[str], tmp_path: Path) -> None:
    def compiled() -> None:
        parsed = parse_plan(plan + train(LOSSES["mean"], 1), "plan.yaml")
        compile_source(from_text(NET, WEIGHTS), parsed, tmp_path / "build")

    with pytest.raises(CompileError) as error:
        compiled()
    for word in ("plan.yaml:", *words):
        assert word in str(error.value)
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("key", ["recompute: ['*']", "statistics: microbatch"])
def test_what_only_training_has_is_refused_without_it(key: str) -> None:
    with pytest.raises(CompileError, match=rf"plan.yaml:.*'{key.split(':')[0]}' without 'train'"):
        parse_plan(STAGED + pipeline(2, "1f1b", f", {key}"), "plan.yaml")


def test_messages_and_rows_are_counted(tmp_path: Path) -> None:
    """An edge has a message per microbatch and direction, of the bytes of a microbatch; the dump shows the rows."""
    plan = STAGED + train(LOSSES["mean"], 1) + pipeline(4)
    compile_source(from_text(NET, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    manifest = open_artifact(tmp_path / "build").manifest
    assert [(one.source, one.target, one.bytes) for one in manifest.transfers if "b." in one.value][:2] == [
        (0, 1, "8*batch"),
        (0, 1, "8*batch"),
    ]
    assert len([one for one in manifest.transfers if one.bytes == "8*batch"]) == 8
    text = (tmp_path / "build" / "ir" / "schedule.txt").read_text()
    assert "rank 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3" in text
    assert "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3" in text


def test_ranks_that_compute_alike_are_given_other_outputs(tmp_path: Path) -> None:
    """The loss goes to one of three ranks, all of which do the same up to it."""
    plan = "ranks: 3\nsymbols: {batch: {divisor: 12}}\ndataset: data_parallel\n" + train(
        "{type: mean_squared, prediction: y, target: t}", 2
    )
    program = compile_source(from_text(NET, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build").program
    assert check(tmp_path / "build").violations == []
    assert [bool(part.outputs) for part in program.parts] == [True, False, False]
