"""The theorem of training: after the same steps, a compiled model on all ranks has the losses and the tensors of the whole model on one.

The whole is compiled for one rank, whose programs have no communication; `test_training_torch.py` holds that against torch.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.ir.program import Complete
from partc.compiler.ir.training import ProgramKind
from partc.compiler.pipeline import STEP_ALONE, compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.verify import VARIABLE
from partc.runtime import load_local
from partc.runtime.artifact.format import StateRecord
from partc.runtime.artifact.tensors.boxes import slices
from partc.runtime.artifact.training.lr_schedule import rate_of
from partc.runtime.artifact.training.scalars import scalars
from partc.runtime.checker.check import check_artifact
from partc.runtime.execution.in_process import LocalProgram
from partc.runtime.execution.in_process import joined_output as whole_output
from partc.runtime.execution.inputs import Whole
from training_models import CrossEntropy, Model

Tensors = dict[str, np.ndarray]
T = TypeVar("T")

FLOAT_STEPS = 3.4
"""What rounding may do to a number in some steps, in units of its type (`eps`)."""


def source_of(one: Model) -> Source:
    """A model whose input is `x` and output `y`, so that names are those of the network; or with the `loss` that it makes itself."""
    if not isinstance(one.module, CrossEntropy):
        return Source(trace(one.module, one.inputs, ["loss"], one.name))
    given = next(iter(inspect.signature(one.module.net.forward).parameters.keys() - {"op"}))
    model = trace(one.module.net, [replace(one.inputs[0], name=given)], ["y"], one.name)
    model.graph.inputs[0].name = "x"
    return Source(model)


def from_text(
    text: str, weights: Mapping[str, tuple[int, ...]], seed: int = 4, dtype: npt.DTypeLike = np.float32
) -> Source:
    """A model of ONNX text with seeded weights of these shapes."""
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(seed)
    for name, shape in weights.items():
        array = (random.standard_normal(shape) / 2).astype(np.float32).astype(dtype)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return Source(from_proto(proto, Path("model.onnx")))


def train_whole(plan: str) -> str:
    """The plan with the training of another one, on one rank."""
    return "ranks: 1\n" + plan[plan.index("train:") :]


def verifies_all() -> bool:
    """Whether the test verifies after every pass today; on these days its programs of a training are all compiled and checked, too."""
    return os.environ.get(VARIABLE) != "last"


def kinds_of_today() -> tuple[ProgramKind, ...]:
    """The programs of a training that a test does not evaluate: the step, and on some days also the evaluations."""
    return tuple(ProgramKind) if verifies_all() else STEP_ALONE


@dataclass(frozen=True)
class Run:
    """What every step gave, and all tensors before the first and after the last, whole, by their global names."""

    outputs: list[dict[str, Any]]
    before: Tensors
    after: Tensors
    program: Complete


def run(
    source: Source,
    plan: str,
    out: Path,
    steps: Sequence[Mapping[str, Any]],
    start: Mapping[str, np.ndarray] | None = None,
    evaluates: bool = False,
    **how: Any,
) -> Run:
    """Compiles, as `how` says, and takes the steps on in-process ranks; `start` are weights to begin with.

    `evaluates`: then what the program `evaluate` makes of each step's batch is in the outputs, too.
    """
    how = {"kinds": tuple(ProgramKind) if evaluates else kinds_of_today(), **how}
    program = compile_source(source, parse_plan(plan, "plan.yaml"), out, **how).program
    with load_local(out, devices={"cuda": "cpu"}) as ranks:
        if start is not None:
            put(ranks, start)
        before = tensors(ranks)
        given = [ranks({**fed(ranks, k), **step}) for k, step in enumerate(steps)]
        given += evaluated(ranks, steps) if evaluates else []
        return Run(given, before, tensors(ranks), program)


def reference(train: Callable[..., T]) -> Callable[[Source, str, Sequence[Mapping[str, Any]]], T]:
    """The training of a source by a plan in these steps, once for all that is compared with it.

    Its numbers alone are wanted: of its programs only the step is compiled, and neither verified nor opened. `train` is called with the
    source, the plan, a folder, the steps, and how it compiles.
    """
    known: dict[bytes, T] = {}

    def trained(source: Source, plan: str, steps: Sequence[Mapping[str, Any]]) -> T:
        arrays = [{name: np.asarray(value) for name, value in step.items()} for step in steps]
        given = [(name, one.dtype.str, one.shape, one.tobytes()) for step in arrays for name, one in step.items()]
        model = ir.serde.serialize_model(source.model).SerializeToString()
        key = hashlib.sha256(repr((model, source.declared, plan, len(steps), given)).encode()).digest()
        if key not in known:
            with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {VARIABLE: "0"}):
                known[key] = train(source, plan, Path(folder), steps, check=False, kinds=STEP_ALONE)
        return known[key]

    return trained


run_whole = reference(run)
"""The run on one rank, by a plan for one."""


def evaluated(ranks: LocalProgram, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the program `evaluate` makes of batches beside a training, twice each: another step plan may use the memory between."""
    others = ranks._all([partial(one.sibling_program, "evaluate") for one in ranks.ranks])
    manifest = others[0].manifest
    cut = {port.name for port in manifest.inputs if port.boxes is not None}
    found = []
    for step in [*steps, *steps]:
        given = {name: Whole(value) if name in cut else value for name, value in step.items()}
        made = ranks._all([partial(one, given) for one in others])
        found.append({port.name: whole_output(port, made) for port in manifest.outputs if port.ranks})
    ranks._all([one.release for one in others])
    return found


def trained(
    source: Source,
    plan: str,
    out: Path,
    steps: Sequence[Mapping[str, Any]],
    start: Mapping[str, np.ndarray] | None = None,
) -> tuple[list[dict[str, Any]], Tensors, Complete]:
    """What every step gives, all tensors after the last, and the program."""
    found = run(source, plan, out, steps, start)
    return found.outputs, found.after, found.program


def fed(ranks: LocalProgram, step: int) -> dict[str, np.ndarray]:
    """The numbers of a step that the loop gives."""
    record = ranks.manifest.training
    assert record is not None
    hyper = record.optimizer.numbers
    rate = rate_of(record.settings.schedule, hyper["lr"])
    names = [name for name in record.scalars if name != "step"]
    found = {name: np.array(value) for name, value in scalars(names, step, {**hyper, "lr": rate(step)}).items()}
    found["step"] = np.array(step, np.int64)
    ports = {port.name: port for port in ranks.inputs}
    return {name: value for name, value in found.items() if name in ports}


def tensors(ranks: LocalProgram) -> Tensors:
    """All tensors that ranks keep, whole; whatever several ranks have of one must be the same bits, however it lies."""
    found: Tensors = {}
    there: dict[str, np.ndarray] = {}
    for rank in ranks.ranks:
        for record, array in rank.state.arrays():
            name, box = record.tensor, record.box(rank.rank)
            whole = found.setdefault(name, np.zeros(record.shape, array.dtype))
            known = there.setdefault(name, np.zeros(record.shape, bool))
            place = ... if box is None else slices(box, record.shape)
            same = np.array_equal(np.where(known[place], whole[place], array), array, equal_nan=True)
            assert same, f"{name}: copies differ on rank {rank.rank}"
            whole[place], known[place] = array, True
    assert all(known.all() for known in there.values())
    return found


def put(ranks: LocalProgram, start: Mapping[str, np.ndarray]) -> None:
    """Gives every rank its shards of some tensors."""
    for rank in ranks.ranks:

        def write(record: StateRecord, array: Any, rank: int = rank.rank) -> None:
            box = record.box(rank)
            whole = start[record.tensor]
            np.copyto(array, whole if box is None else whole[slices(box, whole.shape)])

        rank.state.fill(write, start)


def same_training(
    source: Callable[[], Source],
    plan: str,
    folder: Path,
    steps: Sequence[Mapping[str, Any]],
    *,
    rtol: float,
    atol: float,
    whole: Run | None = None,
) -> Complete:
    """Trains whole and cut; losses and all tensors are compared, and the checker accepts the artifact, where that is the test's day.

    `source()` gives the model anew.

    Gives the compiled program.

    `atol` of a tensor is of the largest change that the steps made of it, so that a small learning rate hides no wrong gradient.
    `whole` is the run to compare with, where it is another than that on one rank by the same `train`.
    """
    want = whole or run_whole(source(), train_whole(plan), steps)
    have = run(
        source(), plan, folder / "cut", steps, check=False
    )  # what a compile proves is a part of the check that follows
    violations = check_artifact(folder / "cut") if verifies_all() else []
    assert not violations, "\n".join(map(str, violations))
    for k, (one, other) in enumerate(zip(have.outputs, want.outputs, strict=True)):
        guards = {name for name in {*one, *other} if name.startswith("gradients.")}  # named by the number of ranks
        assert one.keys() - guards == other.keys() - guards
        for name in other.keys() - guards:
            np.testing.assert_allclose(one[name], other[name], rtol=rtol, atol=rtol, err_msg=f"step {k}: {name}")
    same_tensors(have.after, want.after, want.before, atol)
    return have.program


def same_tensors(have: Tensors, want: Tensors, before: Tensors, atol: float) -> None:
    """Compares tensors after some steps; `atol` is of a tensor's largest change, and of a thousandth of that of all tensors."""
    assert have.keys() == want.keys()
    changes = {name: _largest(value - before[name]) for name, value in want.items()}
    least = max(changes.values(), default=0.0) / 1000
    for name, value in want.items():
        bound = atol * max(changes[name], least) + FLOAT_STEPS * float(
            np.finfo(value.dtype).eps if value.dtype.kind == "f" else 0
        ) * _largest(value)
        np.testing.assert_allclose(have[name], value, rtol=0, atol=bound, err_msg=name)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))
