"""What steps of a decoder make anew: step plans, sessions, bindings of sessions, and memory that Python and NumPy ask for.

    python tests/generation/step_allocations.py [--steps 1000]

Prints a row for each layout with 50 requests in eight slots, of which three of five draw their tokens. `largest` is the most bytes
beyond what was there before a step, at any moment of it, of all steps; `kept` is what all of them leave behind. Memory that onnxruntime
takes inside of a session is not seen.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
from decoder_layouts import LAYOUTS
from onnx import helper, numpy_helper
from partc.compiler.pipeline import compile_model
from partc.runtime import ContinuousBatch, Request, load_local_generator
from partc.runtime.execution.step_plan import StepPlan

REQUESTS, VOCABULARY = 50, 20_000
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {},
    {"temperature": 0.1, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
)
"""How requests take their tokens."""
PLANS = {
    "one rank": LAYOUTS["one rank"] + "generate: {slots: 8, length: 200, chunk: 16}\n",
    "tensor parallel": LAYOUTS["tensor parallel"] + "generate: {slots: 8, length: 200, chunk: 16}\n",
    "stages": LAYOUTS["stages"] + "generate: {slots: 8, groups: 2, length: 200, chunk: 16}\n",
}


@dataclass
class Made:
    """What some steps have made anew; `largest` and `kept` are bytes."""

    steps: int = 0
    plans: int = 0
    sessions: int = 0
    bindings: int = 0
    largest: int = 0
    kept: int = 0


def wide(model: onnx.ModelProto) -> onnx.ModelProto:
    """A decoder with so many tokens that the scores of all of them are far above what a step may ask for."""
    for name, axis in (("embed.tokens.weight", 0), ("head.weight", 1)):
        weight = next(one for one in model.graph.initializer if one.name == name)
        array = numpy_helper.to_array(weight)
        shape = [*array.shape]
        shape[axis] = VOCABULARY
        weight.CopyFrom(numpy_helper.from_array(np.resize(array, shape), name))
    logits = next(port for port in model.graph.output if port.name == "logits")
    dims = ["batch", "tokens", VOCABULARY]
    logits.CopyFrom(helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, dims))
    return model


@contextmanager
def counting(made: Made) -> Iterator[None]:
    """Counts plans, sessions and bindings."""
    plan = StepPlan.__init__

    def planned(self: StepPlan, *args: Any, **options: Any) -> None:
        made.plans += 1
        plan(self, *args, **options)

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            made.sessions += 1
            super().__init__(*args, **options)

        def io_binding(self) -> Any:
            made.bindings += 1
            return super().io_binding()

    with patch.object(StepPlan, "__init__", planned), patch.object(onnxruntime, "InferenceSession", Session):
        yield


def made_by_steps(folder: Path, steps: int) -> tuple[Made, Made]:
    """What loading an artifact and warming it up makes, and what steps with 50 requests make after that."""
    before, rng = Made(), np.random.default_rng(3)
    with counting(before), load_local_generator(folder) as generator:
        batch = ContinuousBatch(generator)
        batch.warm_up()
        most = min(160, steps // 2)
        for number in range(REQUESTS):
            prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 40))).tolist()
            count, kind = int(rng.integers(most - most // 8, most)), KINDS[number % len(KINDS)]
            batch.admit(number, Request(prompt, max_tokens=count, seed=number, **kind))
        for _ in range(10):
            batch.step()
        found = Made(plans=-before.plans, sessions=-before.sessions, bindings=-before.bindings)
        gc.collect()
        tracemalloc.start()
        try:
            begun = tracemalloc.get_traced_memory()[0]
            while found.steps < steps and not batch.idle:
                there = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                batch.step()
                found.steps += 1
                found.largest = max(found.largest, tracemalloc.get_traced_memory()[1] - there)
            gc.collect()
            found.kept = tracemalloc.get_traced_memory()[0] - begun
        finally:
            tracemalloc.stop()
        found.plans, found.sessions = found.plans + before.plans, found.sessions + before.sessions
        found.bindings += before.bindings
    return before, found


def compiled(folder: Path, layout: str, model: onnx.ModelProto) -> Path:
    """The artifact of a wide decoder in a layout of `PLANS`."""
    onnx.save(wide(model), folder / "model.onnx")
    (folder / "plan.yaml").write_text(PLANS[layout])
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


if __name__ == "__main__":
    from decoders import decoder

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    for layout in PLANS:
        with tempfile.TemporaryDirectory() as name:
            _, made = made_by_steps(compiled(Path(name), layout, decoder(fused=True)), asked.steps)
            print(f"{layout:16}", made, flush=True)
