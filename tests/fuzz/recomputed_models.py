"""Known models with and without recompute: after three steps losses and all tensors are those of one rank without microbatches.

    python tests/fuzz/recomputed_models.py [--only gpt]

Each plan runs with 1, 2 and 4 microbatches, with and without recompute; how far losses and tensors are from the whole is printed, of their
largest numbers. A batch normalization takes its statistics of microbatches, so one rank with as many microbatches is the whole there.
Networks are the MLP, LeNet, a GPT whose table is tied to its head, with a dropout in each layer, and ResNet-18, small.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from partc.compiler.frontend.source import Source
from partc.runtime.checker.check import check_artifact

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from training_equivalence import Run, run, source_of
from training_models import Model, gpt, lenet, mlp, resnet

COUNTS, STEPS, BOUND = (1, 2, 4), 3, 1e-5
STAGES = "'layers.[0-1]': FIRST, tokens: FIRST, positions: FIRST, 'layers.[2-3]': SECOND, norm: SECOND, head: SECOND"
LABELS = "{type: softmax_cross_entropy, logits: y, labels: labels}"


@dataclass(frozen=True)
class Case:
    """A model, the sizes of its batch, plans for it, and what is recomputed; `dropped`: with a dropout behind each Gelu."""

    model: Callable[[], Model]
    sizes: dict[str, int]
    plans: tuple[str, ...]
    recompute: str
    more: str = ""
    dropped: bool = False


def staged(first: str, second: str) -> str:
    """Two stages of the GPT."""
    return f"placement: {{{STAGES.replace('FIRST', first).replace('SECOND', second)}}}\n"


CASES = {
    "mlp": Case(
        lambda: mlp(24, 12),
        {"batch": 8},
        ("ranks: 1\n", "ranks: 2\nplacement: {layers.0: 0, 'layers.[1-2]': 1, Relu: 0, Relu_1: 1}\n"),
        "'layers.0, Relu, layers.1'",
    ),
    "lenet": Case(
        lenet,
        {"batch": 8},
        ("ranks: 1\n", "ranks: 2\nplacement: {'conv*': 0, 'fc*': 1}\n"),
        "['conv1, relu.Relu, pool.MaxPool', 'conv2, relu.Relu_1, pool.MaxPool_1', 'fc1, relu.Relu_2, fc2']",
    ),
    "gpt": Case(
        lambda: gpt(24, 4, 2, 30, 8),
        {"batch": 4, "seq": 6},
        (
            "ranks: 1\n",
            "ranks: 2\n" + staged("0", "1"),
            "ranks: 4\nmesh: {pp: 2, tp: 2}\nsharding: {'layers.*.*.project': colwise, 'layers.*.*.out': rowwise}\n"
            + staged("{pp: 0}", "{pp: 1}"),
        ),
        "['layers.*']",
        dropped=True,
    ),
    "resnet": Case(
        lambda: resnet(4, 16),
        {"batch": 8},
        ("ranks: 1\n", "ranks: 2\nplacement: {conv1: 0, bn1: 0, 'stages.[0-1]': 0, 'stages.[2-3]': 1, fc: 1}\n"),
        "['stages.*.*']",
        ", statistics: microbatch",
    ),
}


def source(case: Case, model: Model) -> Source:
    """The model with its dropouts."""
    found = source_of(model)
    if case.dropped:
        graph = found.model.graph
        for name, array in (("ratio", np.array(0.3, np.float32)), ("on", np.array(True))):
            value = ir.Value(name=name, const_value=ir.tensor(array), shape=ir.Shape([]))
            value.dtype = ir.DataType.from_numpy(array.dtype)
            graph.register_initializer(value)
        for node in [node for node in graph if node.op_type == "Gelu"]:
            made = node.outputs[0]
            drop = ir.Node("", "Dropout", [made, graph.initializers["ratio"], graph.initializers["on"]])
            drop.name = drop.outputs[0].name = f"{node.name}.drop"
            drop.outputs[0].type, drop.outputs[0].shape = made.type, made.shape
            drop.metadata_props.update(node.metadata_props)
            ir.convenience.replace_all_uses_with(made, drop.outputs[0])
            drop.replace_input_with(0, made)
            graph.insert_after(node, drop)
    return found


def apart(have: Run, want: Run) -> float:
    """The largest difference of losses and tensors, of their largest numbers."""
    losses = [abs(one["loss"] / other["loss"] - 1) for one, other in zip(have.outputs, want.outputs, strict=True)]
    arrays = [
        np.abs(have.after[name] - array).max() / max(np.abs(array).max(), 1e-9) for name, array in want.after.items()
    ]
    return float(max(*losses, *arrays))


def compared(name: str, case: Case, folder: Path) -> None:
    """All runs of a model against the whole."""
    model = case.model()
    given = source(case, model).model
    rng = np.random.default_rng(0)
    steps = [model.feeds(rng, **case.sizes) for _ in range(STEPS)]
    text = f"train:\n  loss: {LABELS}\n  optimizer: {{type: momentum, lr: 0.05}}\n"

    def ran(plan: str, count: int, recompute: str, place: str) -> Run:
        again = f", recompute: {recompute}" if recompute else ""
        said = (
            f"{plan}symbols: {{batch: {{divisor: 4}}}}\n{text}pipeline: {{microbatches: {count}{again}{case.more}}}\n"
        )
        found = run(Source(given.clone()), said, folder / place, steps)
        assert check_artifact(folder / place) == []
        assert not [one for one in found.program.warnings if "recompute" in one], found.program.warnings
        return found

    wholes = {count: ran(case.plans[0], count, "", f"whole{count}") for count in (COUNTS if case.more else (1,))}
    for k, plan in enumerate(case.plans):
        for count in COUNTS:
            whole = wholes.get(count, wholes[1])
            found = [
                apart(ran(plan, count, recompute, f"{k}.{count}.{bool(recompute)}"), whole)
                for recompute in ("", case.recompute)
            ]
            first = plan.splitlines()[0]
            print(f"{name}, {first}, {count} microbatches: by {found[0]:.1e} without, {found[1]:.1e} with", flush=True)
            assert max(found) < BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*CASES])
    only = parser.parse_args().only
    for name, case in CASES.items():
        if only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                compared(name, case, Path(folder))


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    main()
