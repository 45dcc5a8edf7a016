"""What is said of values that keys of precision, targets, servers and tables do not take: where, what, why and the remedy, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from training_equivalence import from_text

TRAIN = "train:\n  loss: {type: softmax_cross_entropy, logits: y, labels: labels}\n  optimizer: {type: sgd, lr: 0.5}\n"
NET = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch] ids) => (float[batch, 12] y) {
    [look_up] x = Gather(table, ids)
    [head] y = MatMul(x, w)
}"""
VALUES = {
    "precision: float16": ["got the string 'float16'", "help: write precision: {compute: float16}"],
    "precision: bf16": ["got the string 'bf16'", "help: write precision: {compute: bfloat16}"],
    'placement: {"fc": "cuda:0"}': ["expected a rank", "help: write target: {fc: cuda}; a placement is a rank"],
    "symbols: 3": ["'symbols': expected a mapping", "help: write symbols: {batch: {divisor: 2, max: 64}}"],
    "pipeline: 4": ["'pipeline': expected a mapping", "help: write pipeline: {microbatches: 4}"],
    "precision: {compute: float32, keep: head}": [
        "'float16' or 'bfloat16'",
        "without 'precision'",
        "write keep: [head]",
    ],
    "target: {a: tpu, b: cuda:1, c: 7}": ["'tpu' is no target", "write cuda; the number", "the number 7"],
    f"mesh: {{{', '.join(f'a{k}: 1' for k in range(65))}}}": [
        "the mesh has 65 axes",
        "at most 64",
        "leave out axes of size 1",
    ],
    "roles: [1]": ["'roles': expected a mapping", "help: write roles: {ps: [2, 3]}"],
}
PARAMETERS = {
    "{initial: normal}": ["got the string 'normal'", "help: write initial: {normal: 0.01, seed: 7}"],
    "{initial: {constant: .nan}}": ["'initial', 'constant': expected a finite number"],
    "{initial: {uniform: [1]}}": ["a list of 1", "write {uniform: 0.1}"],
    "{initial: {uniform: [2, 1]}}": ["2 is above 1"],
    "{initial: {uniform: [a, 1]}}": ["expected a finite number, but got the string 'a'"],
    "{initial: {uniform: -3}}": ["-3 is below zero"],
    "{initial: {normal: 1, std: 2}}": ["unknown key 'std'", "the nearest is 'seed'"],
    "{lr: fast}": ["expected a number, but got the string 'fast'"],
    "{frozen: true, optimizer: adam}": ["frozen, and 'optimizer'", "a frozen parameter has no update"],
    "{frozen: true, staleness: 1}": ["frozen, and 'staleness'"],
}


def said(text: str) -> str:
    with pytest.raises(CompileError) as caught:
        parse_plan("ranks: 4\n" + text, "plan.yaml")
    return str(caught.value)


@pytest.mark.parametrize("line", VALUES)
def test_a_value_of_another_kind(line: str) -> None:
    found = said(line)
    assert found.startswith("plan.yaml:2: ")
    assert [part for part in VALUES[line] if part not in found] == [], found


def test_all_values_of_parameters_at_once() -> None:
    lines = "".join(f"    p{k}: {value}\n" for k, value in enumerate(PARAMETERS))
    found = said(f"{TRAIN}  parameters:\n{lines}")
    for k, parts in enumerate(PARAMETERS.values()):
        (one,) = (part for part in found.split("plan.yaml:") if f"parameters 'p{k}'" in part)
        assert one.startswith(f"{k + 6}: ")
        assert [part for part in parts if part not in one] == [], one


def test_an_optimizer_of_some_parameters_has_the_common_rate() -> None:
    rules = parse_plan(f"ranks: 1\n{TRAIN}  parameters: {{table: {{optimizer: lazy_ftrl}}}}\n", "plan.yaml").train
    assert rules is not None
    own = rules.parameters["table"].optimizer
    assert own is not None
    assert own.lr == 0.5


OF_TRAINING = {
    "clip: 1.5": [
        "plan.yaml:5: 'train.clip'",
        "help: write clip: {norm: 1.5}, the largest global norm, or {value: 1.5}",
    ],
    "metrics: [accuracy, {type: top_k, k: 3}]": ["a list of metrics has names alone", "write {top_k: {...}}"],
    "clip: yes": ["'train.clip'", "help: write clip: {norm: 1.0}"],
    "checkpoint: here": ["'train.checkpoint'", "help: write checkpoint: {folder: checkpoints, every: 100}"],
    "batch: 8\n  accumulate: 3": [
        "plan.yaml:5: a batch of 8 records cannot be divided into 3 microbatches",
        "choose batch: 6 or 9, or another 'accumulate'",
    ],
    "batch: 2\npipeline: {microbatches: 4}": ["a batch of 2 records", "choose batch: 4, or another 'microbatches'"],
}


@pytest.mark.parametrize("line", OF_TRAINING)
def test_a_value_of_a_training(line: str) -> None:
    found = said(f"{TRAIN}  {line}\n").replace("plan.yaml:6: a batch", "plan.yaml:5: a batch")
    assert [part for part in OF_TRAINING[line] if part not in found] == [], found


REFUSED = {
    "  parameters: {'?able.w': {lr: 2}}": ["plan.yaml:5: '?able.w' matches no parameter"],
    "placement: {'*.look_up': 0, deep: 1}": ["plan.yaml:5: 'deep' matches no module or node"],
    '  parameters: {"**": {frozen: true}}': [
        "plan.yaml:5: no trainable parameter changes the loss\n  all 2 parameters are frozen",
        "help: freeze fewer",
    ],
    "  metrics: [wer]": ["plan.yaml:5: 'wer' is no metric", "help: name one of them, or compute it in the model"],
    "  metrics: [l1_los]": ["help: say 'mae'"],
    "  parameters: {nope: {lr: 2}}": ["plan.yaml:5: 'nope' matches no parameter", "`partc plan MODEL` lists all names"],
    "  on_nonfinite: skip\n  parameters: {'*': {staleness: 1}}": ["plan.yaml:6: 'table' is updated late"],
    "  parameters: {table: {optimizer: lazy_adam}}\nsharding: {look_up: {in: [[2, 1], null]}}": [
        "plan.yaml:5: the rows of 'table' are cut",
        "let ranks pull its rows",
    ],
    "roles: {ps: 1}\nplacement: {tabel: {role: ps}}": [
        "'tabel' matches no parameter, and no module or node that has parameters"
    ],
}
WARNED = {
    "roles: {ps: 1}\n" + TRAIN: "rank 1 has the role 'ps' and no parameter",
    TRAIN
    + '  parameters: {"**.bias": {weight_decay: 0}}\n': "'**.bias' matches no parameter of the model, and changes nothing",
    "precision: {compute: float16, messages: bfloat16}\n": "'precision.messages' is of a training, and there is no 'train'",
}


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (
            "  data: {}",
            ["plan.yaml:5: ", "'train.data': {} is neither a path", "help: write a path, or {input: path}"],
        ),
        (
            "  data: {buckets: [64, 8]}",
            ["plan.yaml:5: ", "write lengths that rise", "it names no data", "length: field"],
        ),
        ("placement: {'[01]': 0}", ["plan.yaml:5: placement of '[01]'", "write [0-1] or {0,1} for the digits"]),
    ],
)
def test_what_no_plan_may_say(more: str, parts: list[str]) -> None:
    with pytest.raises(CompileError) as caught:
        parse_plan(f"ranks: 2\n{TRAIN}{more}\n", "plan.yaml")
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("more", REFUSED)
def test_what_the_model_does_not_have(more: str, tmp_path: Path) -> None:
    plan = parse_plan(f"ranks: 2\n{TRAIN}{more}\n", "plan.yaml")
    with pytest.raises(CompileError) as caught:
        compile_source(from_text(NET, {"table": (8, 6), "w": (6, 12)}), plan, tmp_path / "build")
    found = str(caught.value)
    assert [part for part in REFUSED[more] if part not in found] == [], found
    assert "loss." not in found


@pytest.mark.parametrize("text", WARNED)
def test_what_changes_nothing_is_said(text: str, tmp_path: Path) -> None:
    plan = parse_plan(f"ranks: 2\n{text}", "plan.yaml")
    report = compile_source(from_text(NET, {"table": (8, 6), "w": (6, 12)}), plan, tmp_path / "build")
    assert any(WARNED[text] in warning for warning in report.warnings), report.warnings
