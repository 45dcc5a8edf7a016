"""Numbers of a whole batch that follow from its inputs alone: in parts they are the batch's, whoever reads them and whatever they read."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_in_parts import HEAD, LOSSES, PLANS, close, numbers, start_of, train, trained, trained_whole
from dealt import dealt
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from rows import of_today
from trainer_case import on_all
from training_equivalence import from_text

MODEL = (
    HEAD
    + """m (float[batch, 6] x, int64[batch] label, float[batch] t, float[batch, 3] e) => (float loss METRICS)
<float[6, 5] w> {
    [up] y = MatMul (x, w)
    [entropy] own = SoftmaxCrossEntropyLoss <ignore_index = -1, reduction = "sum"> (y, label)
    NUMBERS
    [end] loss = LOSS
}"""
)
READS = {
    "sum": "NAME = ReduceSum <keepdims = 0> (t)",
    "mean": "NAME = ReduceMean <keepdims = 0> (e)",
    "largest": "NAME = ReduceMax <keepdims = 0> (t)",
    "size": "NAME_size = Size (e)\n    NAME = Cast <to = 1> (NAME_size)",
    "shape": "NAME_shape = Shape <end = 1> (e)\n    NAME_cast = Cast <to = 1> (NAME_shape)\n    NAME = Squeeze (NAME_cast)",
    "ones": """NAME_shape = Shape (e)
    NAME_all = ConstantOfShape <value = float[1] {0.5}> (NAME_shape)
    NAME = ReduceSum <keepdims = 0> (NAME_all)""",
}
TOGETHER = [*((one,) for one in READS), ("size", "sum"), ("sum", "largest", "shape")]
USES = {
    "a metric": ("Identity (own)", "NAME"),
    "what the loss is divided by": ("Div (own, NAME)", None),
    "both": ("Div (own, NAME)", "NAME"),
    "a metric of it": ("Div (own, NAME)", "NAME_more"),
}
PLANNED = ("parts", "ranks", "stages")
PLACED = (
    "ranks: 2\nplacement: {up: 0, entropy: 1, end: 1}\n"
    "pipeline: {microbatches: 4, schedule: gpipe}\nsymbols: {batch: {divisor: 16}}\n"
)


def _model(reads: tuple[str, ...], use: str) -> tuple[str, str]:
    """The text of a model with numbers of these kinds, and the names of its metrics."""
    loss, metric = USES[use]
    lines, told, last = [], [], "own"
    for k, read in enumerate(reads):
        name = f"n{k}"
        lines.append(READS[read].replace("NAME", name))
        if metric == "NAME_more":
            lines.append(f"{name}_more = Add ({name}, {name})")
        told += [metric.replace("NAME", name)] if metric else []
        lines.append(f"{name}_loss = {loss.replace('own', last).replace('NAME', name)}")
        last = f"{name}_loss"
    text = MODEL.replace("METRICS", "".join(f", float {name}" for name in told))
    text = text.replace("NUMBERS", "\n    ".join(lines)).replace("LOSS", f"Identity ({last})")
    return text, f"  metrics: [{', '.join(told)}]\n" if told else ""


@pytest.mark.parametrize(
    ("reads", "use", "planned"),
    [
        *of_today([(reads, "both", PLANNED[(k + j) % 3]) for j in range(3) for k, reads in enumerate(TOGETHER)], 8),
        *of_today(
            [
                (reads, use, PLANNED[k % 3])
                for k, reads in enumerate(TOGETHER)
                for j, use in enumerate(USES)
                if use != "both" and k % 3 == min(j, 2)
            ],
            3,
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else " and ".join(one),
)
def test_they_are_the_batchs(reads: tuple[str, ...], use: str, planned: str, tmp_path: Path) -> None:
    """Each number, in a metric and in the loss at once, each day under another plan; another use of it under one of them."""
    text, metrics = _model(reads, use)
    given = numbers(LOSSES["ignored"]) | {"t": numbers()["x"][:, 0] + 4, "e": numbers()["x"][:, 1:4] + 4}
    want = trained_whole(from_text(text, {"w": (6, 5)}), PLANS[1] + train("loss", 1, more=metrics), [given])
    texts = {
        "parts": PLANS[1] + train("loss", 4, more=metrics),
        "ranks": PLANS[2] + train("loss", 2, more=metrics),
        "stages": PLACED + train("loss", 1, more=metrics).replace("  accumulate: 1\n", ""),
    }
    have = trained(tmp_path / planned, from_text(text, {"w": (6, 5)}), texts[planned], [given])
    close(have, want, start_of({"w": (6, 5)}, text))
    if (
        use == "both" and planned == "parts" and "largest" not in reads
    ):  # of one size, what is no sum of its parts' is named in a warning
        fixed = from_text(text.replace("batch", "4"), {"w": (6, 5)})
        close(
            trained(tmp_path / "fixed", fixed, PLANS[1] + train("loss", 4, more=metrics), [given]),
            want,
            start_of({"w": (6, 5)}, text),
        )


@pytest.mark.parametrize(
    ("reads", "use"),
    [*dealt([("mean",), ("ones",)], USES), (("sum", "largest", "size"), "both")],
    ids=lambda one: one if isinstance(one, str) else " and ".join(one),
)
def test_evaluations_read_what_a_step_is_fed(reads: tuple[str, ...], use: str, tmp_path: Path) -> None:
    """On the same ranks, in microbatches and whole, with the same numbers."""
    text, metrics = _model(reads, use)
    given = numbers(LOSSES["ignored"]) | {"t": numbers()["x"][:, 0] + 4, "e": numbers()["x"][:, 1:4] + 4}
    plan = PLACED + train("loss", 1, more=metrics).replace("  accumulate: 1\n", "")
    compile_source(from_text(text, {"w": (6, 5)}), parse_plan(plan, "plan.yaml"), tmp_path)

    def act(trainer: Trainer) -> tuple[dict[str, float], dict[str, float]]:
        batches = [({port.name: given[port.name] for port in trainer.inputs}, 16)]
        streamed = trainer.evaluate(batches)
        assert trainer._evaluation is not None
        assert trainer._evaluation._streamed is not None
        trainer._evaluation._streamed = None
        return streamed, trainer.evaluate(batches)

    streamed, whole = on_all(tmp_path, 2, act)[0]
    assert streamed == pytest.approx(whole, rel=1e-6)
