"""Models learn under plans what they learn whole: batches, tensors and vocabularies cut, layers placed, stages, and all of it together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dealt import dealt
from rows import of_today
from training_equivalence import from_text, same_tensors, same_training, train_whole, trained
from training_plans_case import BLOCKS, CROSS_ENTROPY, SGD, batches, learns, sizes_of, small


@pytest.mark.parametrize(("name", "ranks"), of_today(dealt(["mlp", "lenet", "gpt of one block", "dlrm"], [2, 3]), 1))
def test_data_parallel(name: str, ranks: int, tmp_path: Path) -> None:
    learns(name, f"ranks: {ranks}\n{batches(ranks)}", sizes_of(name, 2 * ranks, ranks, 3 * ranks), tmp_path)


@pytest.mark.parametrize(("name", "ranks"), of_today([("gpt of one block", 2), ("gpt", 3), ("gpt of one block", 4)], 1))
def test_tensor_parallel(name: str, ranks: int, tmp_path: Path) -> None:
    learns(name, f"ranks: {ranks}\nsharding: {{{BLOCKS}}}\n", sizes_of(name, 2, 1, 3), tmp_path)


@pytest.mark.parametrize(
    "cut",
    of_today(
        [
            "tokens: {parameters: {weight: [3, 1]}}",
            "tokens: {parameters: {weight: [1, 3]}}",
            "head: colwise",
            "tokens: {parameters: {weight: [3, 1]}}, positions: {parameters: {weight: [1, 3]}}, head: colwise",
        ],
        1,
    ),
)
def test_tables_and_heads_cut(cut: str, tmp_path: Path) -> None:
    name = "gpt of one block"
    learns(name, f"ranks: 3\nsharding: {{{cut}}}\n", sizes_of(name, 2, 1), tmp_path)


@pytest.mark.parametrize(("name", "dp", "tp"), of_today([("gpt of one block", 2, 3), ("gpt", 2, 2)], 1))
def test_data_and_tensor_parallel(name: str, dp: int, tp: int, tmp_path: Path) -> None:
    plan = f"""ranks: {dp * tp}
mesh: {{dp: {dp}, tp: {tp}}}
symbols: {{batch: {{divisor: {dp}}}}}
dataset: {{x: [dp, null], labels: [dp, null]}}
sharding: {{{BLOCKS}, tokens: {{parameters: {{weight: [tp, null]}}}}, head: colwise}}
"""
    learns(name, plan, sizes_of(name, 2 * dp, dp), tmp_path)


PLACED = {
    "lenet": ["conv1: 3, conv2: 4, fc1: 0, fc2: 1, fc3: 2", "conv2: 4, fc1: [0, 1, 2], fc3: 3", "loss: 4"],
    "gpt": ["tokens: 0, positions: 1, layers.0: 2, layers.1: 3, norm: 4, head: 0", "layers.1: [1, 3]"],
    "dlrm": ['"tables.0": 4, "tables.1": 3, "tables.2": [1, 2], bottom: 0, top: 2'],
}


@pytest.mark.parametrize(
    ("name", "placement"), of_today([(name, one) for name, many in PLACED.items() for one in many], 1)
)
def test_placed_with_batches_of_any_size(name: str, placement: str, tmp_path: Path) -> None:
    learns(name, f"ranks: 5\nplacement: {{{placement}}}\n", sizes_of(name, 3, 1, 4), tmp_path)


STAGES = {
    "tensor parallel": ("gpt", "layers.0: [0, 1], layers.1: [2, 3], head: [2, 3]", BLOCKS),
    "of 3 and 2": ("gpt", "layers.0: [0, 1, 2], layers.1: [3, 4], tokens: 4", BLOCKS),
    "data parallel": ("mlp", "layers.0: [0, 1], layers.1: [2, 3], layers.2: [2, 3]", '"layers.[0-1]": {in: [[2, 1]]}'),
    "data parallel, then tensor parallel": (
        "mlp",
        "layers.0: [0, 1], layers.1: [2, 3, 4], layers.2: [2, 3, 4]",
        '"layers.0": {in: [[2, 1]]}, "layers.1": colwise, "layers.2": rowwise',
    ),
    "that overlap": ("mlp", "layers.0: [0, 1], layers.1: [1, 2, 3, 4], layers.2: [2, 0]", '"layers.1": {in: [[4, 1]]}'),
}


@pytest.mark.parametrize("stages", of_today([*STAGES], 1))
def test_stages(stages: str, tmp_path: Path) -> None:
    name, placement, sharding = STAGES[stages]
    plan = f"""ranks: 5
symbols: {{batch: {{divisor: 4}}}}
placement: {{{placement}}}
sharding: {{{sharding}}}
"""
    learns(name, plan, sizes_of(name, 8, 4), tmp_path)


NORMED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 3, 5, 5] x) => (float[batch, 6] y)
<float[4] mean1 = {0.1, 0, -0.1, 0}, float[4] var1 = {1, 2, 1, 0.5},
 float[6] mean2 = {0, 0, 0, 0, 0, 1}, float[6] var2 = {1, 1, 1, 1, 1, 3}> {
    [conv1] a = Conv<pads = [1, 1, 1, 1]>(x, k1)
    [norm1] b = BatchNormalization<epsilon = 0.01, momentum = 0.7>(a, s1, b1, mean1, var1)
    [act1] c = Relu(b)
    [conv2] d = Conv(c, k2)
    [norm2] e = BatchNormalization<epsilon = 0.01>(d, s2, b2, mean2, var2)
    [act2] f = Tanh(e)
    [pool] g = GlobalAveragePool(f)
    [flat] y = Flatten(g)
}"""
NORMED_SHAPES = {"k1": (4, 3, 3, 3), "s1": (4,), "b1": (4,), "k2": (6, 4, 2, 2), "s2": (6,), "b2": (6,)}


@pytest.mark.parametrize(
    "plan",
    of_today(
        [
            f"ranks: 3\n{batches(3)}",
            "ranks: 2\nplacement: {conv1: 1, norm1: 0, norm2: 1}\n",
            "ranks: 2\nsharding: {conv2: {in: [null, [2, 1, 1, 1]]}}\n",
            "ranks: 5\nsymbols: {batch: {divisor: 6}}\nplacement: {conv1: [0, 1], norm1: [0, 1], conv2: [2, 3, 4], norm2: [2, 3, 4]}\n"
            "sharding: {conv1: {in: [[2, 1, 1, 1], null]}, conv2: {in: [[3, 1, 1, 1], null]}}\n",
        ],
        2,
    ),
)
def test_normalization_by_the_whole_batch(plan: str, tmp_path: Path) -> None:
    """The statistics, of the batch and running, are those of all ranks' rows together."""
    source = from_text(NORMED, NORMED_SHAPES)
    random = np.random.default_rng(2)
    steps = [
        {"x": random.standard_normal((n, 3, 5, 5), np.float32), "labels": random.integers(0, 6, n)} for n in (12, 6)
    ]
    same_training(lambda: source, plan + SGD, tmp_path, steps, rtol=1e-5, atol=5e-4)


DROPPED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 4, 6] x) => (float[batch, 4, 6] y) <float ratio = {0.4}> {
    [up] a = MatMul(x, w1)
    [drop1] b = Dropout(a, ratio)
    [act] c = Tanh(b)
    [down] d = MatMul(c, w2)
    [drop2] y = Dropout(d, ratio)
}"""


@pytest.mark.parametrize(
    "plan",
    of_today(
        [
            f"ranks: 3\n{batches(3)}",
            "ranks: 3\nsharding: {up: colwise, down: rowwise}\n",
            "ranks: 4\nplacement: {up: 0, drop1: 1, down: [2, 3]}\n",
            "ranks: 6\nmesh: {dp: 3, tp: 2}\nsymbols: {batch: {divisor: 3}}\ndataset: {x: [dp, null, null], target: [dp, null, null]}\n"
            "sharding: {up: colwise, down: rowwise}\n",
        ],
        2,
    ),
)
def test_dropout_draws_the_same_masks(plan: str, tmp_path: Path) -> None:
    source = from_text(DROPPED, {"w1": (6, 12), "w2": (12, 6)})
    train = SGD.replace(CROSS_ENTROPY, "loss: {type: mean_squared, prediction: y, target: target}\n  seed: 5")
    random = np.random.default_rng(2)
    steps = [{name: random.standard_normal((n, 4, 6), np.float32) for name in ("x", "target")} for n in (6, 3)]
    same_training(lambda: source, plan + train, tmp_path, steps, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "plan"),
    of_today(
        dealt(
            ["ignore_index: 3", "label_smoothing: 0.1, ignore_index: 0", "reduction: sum"],
            [f"ranks: 3\n{batches(3)}", "ranks: 5\nplacement: {layers.0: [0, 1], layers.2: 4}\n"],
        ),
        1,
    ),
)
def test_losses_and_accuracy(more: str, plan: str, tmp_path: Path) -> None:
    options = "weights: [1, 2, 3, 0.5, 1, 1, 4, 1, 0.25, 1]"
    train = f"{SGD.replace('labels}', f'labels, {options}, {more}}}')}  metrics: [accuracy, top_k]\n"
    learns("mlp", plan, sizes_of("mlp", 9, 3), tmp_path, train)


@pytest.mark.parametrize("ranks", [3])
def test_a_sum_over_ranks_is_a_gradient_times_ranks(ranks: int, tmp_path: Path) -> None:
    one, source = small("mlp")
    steps = [one.feeds(np.random.default_rng(7), batch=2 * ranks)]
    changes, losses = [], []
    for k, options in enumerate(("labels}", "labels, reduction: sum_over_ranks}")):
        plan = f"ranks: {ranks}\n{batches(ranks)}{SGD.replace('labels}', options)}"
        _, start, _ = trained(source, plan, tmp_path / f"{k}", [])
        given, after, _ = trained(source, plan, tmp_path / f"{k}", steps)
        losses.append(given[0]["loss"])
        changes.append({name: after[name] - start[name] for name in after})
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    for name, change in changes[0].items():
        assert np.abs(change).max() > 1e-5, name
        np.testing.assert_allclose(changes[1][name], ranks * change, rtol=1e-4, atol=1e-6, err_msg=name)


CLIPPED = {
    "data parallel": f"ranks: 3\n{batches(3)}",
    "tensor parallel": f"ranks: 3\nsharding: {{{BLOCKS}, head: colwise}}\n",
    "both": f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: {{x: [dp, null], labels: [dp, null]}}\n"
    f"sharding: {{{BLOCKS}}}\n",
    "placed": "ranks: 4\nplacement: {tokens: 0, layers.0: 1, layers.1: [2, 3], head: [0, 3]}\n",
}


@pytest.mark.parametrize(
    ("cut", "clip"),
    of_today(
        [
            ("data parallel", "{norm: 0.05}"),
            ("tensor parallel", "{value: 0.003}"),
            ("both", "{norm: 0.05}"),
            ("placed", "{norm: 0.2, value: 0.003}"),
        ],
        1,
    ),
)
def test_clipped_by_the_norm_of_all_gradients(cut: str, clip: str, tmp_path: Path) -> None:
    name = "gpt" if cut == "placed" else "gpt of one block"
    learns(name, CLIPPED[cut], sizes_of(name, 6, 12), tmp_path, f"{SGD}  clip: {clip}\n")


OPTIMIZERS = [
    "type: sgd, lr: 0.5, weight_decay: 0.1",
    "type: momentum, lr: 0.2, weight_decay: 0.1",
    "type: nesterov, lr: 0.2",
    "type: adagrad, lr: 0.05, eps: 0.01",
    "type: adam, lr: 0.05, eps: 0.01, weight_decay: 0.1",
    "type: adamw, lr: 0.05, eps: 0.01, weight_decay: 0.1",
    "type: adam_weight_decay, lr: 0.05, eps: 0.01, weight_decay: 0.1",
    "type: lamb, lr: 0.05, eps: 0.01, weight_decay: 0.1",
    "type: lars, lr: 5.0, trust_coefficient: 0.01, weight_decay: 0.1",
    "type: adafactor, lr: 0.05, weight_decay: 0.1, shard: true",
]


SOME = [one for one in OPTIMIZERS if one.startswith(("type: momentum", "type: adam,", "type: lamb", "type: adafactor"))]
"""A slot, two of them, norms of whole parameters, and slots of rows and columns; the formulas of the others are of this kind."""
TENSOR = "ranks: 3\nsharding: {layers.0: colwise, layers.1: rowwise}\n"
STAGED = "ranks: 4\nplacement: {layers.0: [0, 1], layers.1: [2, 3]}\nsharding: {layers.0: colwise, layers.1: colwise}\n"


@pytest.mark.parametrize(
    ("options", "plan"),
    of_today(
        [
            *dealt(OPTIMIZERS, [f"ranks: 3\n{batches(3)}", TENSOR]),
            *((one, TENSOR) for one in SOME if OPTIMIZERS.index(one) % 2 == 0),
            *((one, STAGED) for one in SOME),
        ],
        4,
    ),
)
def test_optimizers(options: str, plan: str, tmp_path: Path) -> None:
    train = f"""train:
  {CROSS_ENTROPY}
  optimizer: {{{options}}}
  schedule: {{type: cosine, steps: 3, warmup: 1}}
  parameters: {{"**.bias": {{weight_decay: 0}}, layers.2.*: {{lr: 0.5}}}}
"""
    learns("mlp", plan, sizes_of("mlp", 6, 3, 9, 6), tmp_path, train, atol=5e-4)


@pytest.mark.parametrize("plan", [f"ranks: 3\n{batches(3)}", "ranks: 4\nplacement: {layers.0: [0, 1], layers.2: 3}\n"])
def test_frozen_parameters_stay(plan: str, tmp_path: Path) -> None:
    train = f'{SGD}  parameters: {{"layers.0.*": {{frozen: true}}, layers.1.bias: {{frozen: true}}}}\n'
    learns("mlp", plan, sizes_of("mlp", 6, 3), tmp_path, train)
    _, source = small("mlp")
    one = small("mlp")[0]
    _, start, _ = trained(source, plan + train, tmp_path / "none", [])
    _, after, program = trained(source, plan + train, tmp_path / "one", [one.feeds(np.random.default_rng(0), batch=6)])
    kept = {name for name in after if after[name].tobytes() == start[name].tobytes()}
    assert kept == {"layers.0.weight", "layers.0.bias", "layers.1.bias"}
    assert not any(event.name.startswith("layers.0") for event in program.events)
    made = {str(one) for part in program.parts for step in part.steps for one in step.makes}
    assert "layers.1.weight.next" in made
    assert not made & {"layers.0.weight.next", "layers.0.weight.grad", "layers.1.bias.next", "x.grad"}


APART = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 4] y) {
    [first] a = MatMul(x, used)
    [apart] b = MatMul(x, unused)
    [best] c = ArgMax<axis = 1, keepdims = 1>(b)
    [number] d = Cast<to = 1>(c)
    [join] y = Add(a, d)
}"""


@pytest.mark.parametrize("plan", [f"ranks: 2\n{batches(2)}", "ranks: 2\nplacement: {first: 0, apart: 1}\n"])
def test_a_parameter_that_no_gradient_reaches_stays(plan: str, tmp_path: Path) -> None:
    source = from_text(APART, {"used": (6, 4), "unused": (6, 4)})
    random = np.random.default_rng(2)
    steps: list[dict[str, Any]] = [
        {"x": random.standard_normal((n, 6), np.float32), "labels": random.integers(0, 4, n)} for n in (6, 4)
    ]
    same_training(lambda: source, plan + SGD, tmp_path, steps, rtol=1e-5, atol=1e-4)
    _, start, _ = trained(source, plan + SGD, tmp_path / "none", [])
    _, after, _ = trained(source, plan + SGD, tmp_path / "one", steps)
    assert start["unused"].tobytes() == after["unused"].tobytes()
    assert np.abs(start["used"] - after["used"]).max() > 1e-3


def test_the_comparison_sees_a_wrong_gradient(tmp_path: Path) -> None:
    """A learning rate that differs by a thousandth is told apart."""
    one, source = small("mlp")
    steps = [one.feeds(np.random.default_rng(7), batch=4)]
    plan = f"ranks: 2\n{batches(2)}{SGD}"
    _, start, _ = trained(source, plan, tmp_path / "start", [])
    _, whole, _ = trained(source, train_whole(plan), tmp_path / "whole", steps)
    _, cut, _ = trained(source, plan.replace("lr: 0.5", "lr: 0.4995"), tmp_path / "cut", steps)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same_tensors(cut, whole, start, 1e-4)
