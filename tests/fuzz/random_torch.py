"""Random trainings against PyTorch itself: a random module, task and layout learn what autograd and torch.optim make of the same module.

    python tests/fuzz/random_torch.py --cases 2000 --seed 1
    python tests/fuzz/random_torch.py --case 17 --seed 1       one, with its module and its plans

A case is a network of `torch_networks.py`, exported as a `model.py` would be, and a task and layouts of `torch_plans.py`. It trains some
steps on ranks that are threads, its state often going through a checkpoint into another layout on the way. Every loss, every parameter and
running statistic, and the loss of an evaluation, are compared with `torch_reference.py`, whose gradients are float64. `partc check` must
accept the artifacts.

What may differ, of the largest change of a tensor: EXACT where the model is float64 (rates, factors of moments and the loss are float32
there, too), ROUNDED where it is float32, and beyond it some times (TIMES) what torch's own rounding makes: in float32, or of float64 from
parameters that are off by float32's rounding. Adam makes much of a bias before a BatchNorm, whose gradient is rounding alone, and steps
that are too large of any. In 16 bits it may be so many times as far off as torch's own autocast is, or some units of the type. A training
that stops at a loss that is no number does in torch, too.

Refusals are counted by what they say, and judged by REASONABLE: what is not there is a refusal that a user would call unreasonable.
"""

from __future__ import annotations

import random
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pool
import torch
from partc.compiler.directives.recorder import Recorder
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.torch.torch_module import export
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer, load_trainer
from partc.runtime.artifact.tensors.boxes import slices
from partc.runtime.checker.check import check_artifact
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.errors import NonFiniteError, PartcError
from partc.runtime.execution.inputs import shard
from torch_networks import Network, grown
from torch_plans import Layout, Task, drawn_layout, drawn_task
from torch_reference import Reference

SECONDS = 400.0
NETS = 24
"""How many networks there are to a seed."""
EXACT, ROUNDED = 5e-6, 2e-3
LOSS, LOSS_ROUNDED = 1e-6, 1e-4
TIMES, UNITS = 6.0, {"float16": 2.0**-10, "bfloat16": 2.0**-7}
REASONABLE: dict[str, str] = {}
"""By the beginning of a refusal why a user would expect it."""
Tensors = dict[str, np.ndarray]
_EXPORTED: dict[str, tuple[Network, Source]] = {}


@dataclass(frozen=True)
class Case:
    """A network with a task, and the layouts in which it is trained one after the other."""

    name: str
    net: Network
    source: Source
    task: Task
    layouts: list[Layout]
    turn: int
    """The step before which the second layout takes over."""
    seed: int

    def batches(self) -> list[Tensors]:
        """Every step's inputs and labels."""
        task = self.task
        return self._made(self.seed, task.sizes, task.lengths, task.scales, task.empty)

    def held_out(self) -> list[Tensors]:
        """Batches to evaluate, of several sizes and lengths, one of them without a label that counts."""
        task, unit = self.task, min(self.task.sizes)
        made = self._made(self.seed + 50, (2 * unit, unit, unit), (task.lengths[0], 6, task.lengths[-1]), (1.0,) * 3, 0)
        if "ignore_index" in task.loss:
            made[1]["label"][:] = -1
        return made

    def _made(
        self, seed: int, sizes: Sequence[int], lengths: Sequence[int], scales: Sequence[float], empty: int
    ) -> list[Tensors]:
        task, net, found = self.task, self.net, []
        for k, (size, length, scale) in enumerate(zip(sizes, lengths, scales, strict=True)):
            batch = net.batch(size, seed + k, length)
            if "ignore_index" in task.loss:
                labels = batch["label"]
                labels[np.random.default_rng(seed + 100 + k).random(labels.shape) < 0.3] = -1
                labels[:empty] = -1
                labels.reshape(-1)[-1] = 1
            if "x" in batch:
                batch["x"] = batch["x"] * np.asarray(scale, batch["x"].dtype)
            found.append({name: batch[name] for name in (*net.inputs, task.labels)})
        return found

    def __str__(self) -> str:
        plans = "\n---\n".join(layout.text(self.task) for layout in self.layouts)
        return f"network {self.name}, {self.net.family}, turn {self.turn}:\n{self.net.module}\n{self.task}\n{plans}"


def exported(name: str) -> tuple[Network, Source]:
    """A network by its name, and the model that partc's frontend makes of it."""
    if name not in _EXPORTED:
        net = grown(random.Random(name))
        sample = net.batch(4, 0, 6)
        inputs = {one: torch.from_numpy(sample[one]) for one in net.inputs}
        dims = {one: {0: "batch", **({1: "seq"} if net.length else {})} for one in net.inputs}
        model = export(net.module, inputs, dims, DimNames({}, set()), ["y"], "model.py", Recorder(Path()))
        _EXPORTED[name] = net, Source(model)
    return _EXPORTED[name]


def drawn(chance: random.Random) -> Case:
    """The case that chance says."""
    name = f"{sys.argv[sys.argv.index('--seed') + 1] if '--seed' in sys.argv else 0} net {chance.randrange(NETS)}"
    net, source = exported(name)
    task = drawn_task(chance, net)
    layouts = [drawn_layout(chance, net, task) for _ in range(2 if chance.random() < 0.3 else 1)]
    turn = chance.randrange(1, len(task.sizes)) if len(layouts) > 1 else 0
    return Case(name, net, source, task, layouts, turn, chance.randrange(1 << 20))


def on_all(ranks: int, build: Path, act: Callable[[Trainer], Any]) -> list[Any]:
    """What every rank's trainer gives, each a thread."""
    world = LocalWorld(ranks)

    def rank(number: int) -> Any:
        try:
            with load_trainer(build, world.transport(number), threads=1, devices={"cuda": "cpu"}) as trainer:
                return act(trainer)
        except Exception as error:
            world.fail(f"rank {number} failed: {error}")
            raise

    with ThreadPoolExecutor(ranks) as threads:
        jobs = [threads.submit(rank, number) for number in range(ranks)]
    errors = [error for job in jobs if (error := job.exception()) is not None]
    if errors:
        raise next((one for one in errors if not str(one).startswith("rank ")), errors[0])
    return [job.result() for job in jobs]


def whole(shards: Sequence[list[tuple[Any, int, np.ndarray]]]) -> Tensors:
    """All tensors of the state; what several ranks have of one must be the same bits."""
    found: Tensors = {}
    there: dict[str, np.ndarray] = {}
    for record, rank, array in (one for some in shards for one in some):
        box = record.box(rank)
        all_ = found.setdefault(record.tensor, np.zeros(record.shape, array.dtype))
        known = there.setdefault(record.tensor, np.zeros(record.shape, bool))
        place = ... if box is None else slices(box, record.shape)
        if not np.array_equal(np.where(known[place], all_[place], array), array, equal_nan=True):
            off = _largest(np.where(known[place], all_[place], array).astype(np.float64) - array)
            raise pool.Wrong("copies differ", f"{record.tensor} on rank {rank}, by {off:.3g} of {_largest(array):.3g}")
        all_[place], known[place] = array, True
    return found


@dataclass(frozen=True)
class Trained:
    """What partc gave: all losses, that of an evaluation, the tensors before the first step and after the last."""

    losses: list[float]
    evaluated: float
    before: Tensors
    after: Tensors


def state(trainer: Trainer) -> list[tuple[Any, int, np.ndarray]]:
    """This rank's shards."""
    return [(record, trainer.rank, array.copy()) for record, array in trainer.program.state.arrays()]


def trained(case: Case, folder: Path) -> Trained:
    """Compiles, checks and trains."""
    batches, held_out = case.batches(), case.held_out()
    losses: list[float] = []
    evaluated = 0.0
    before: Tensors = {}
    after: Tensors = {}
    for number, layout in enumerate(case.layouts):
        build = folder / f"build{number}"
        compile_source(case.source, parse_plan(layout.text(case.task), "plan.yaml"), build)
        if problems := check_artifact(build):
            raise pool.Wrong("refused by check", "\n".join(map(str, problems[:4])))
        turn = len(batches) if len(case.layouts) == 1 else case.turn
        some = batches[turn:] if number else batches[:turn]
        last = number == len(case.layouts) - 1

        def act(trainer: Trainer, some: list[Tensors] = some, number: int = number, last: bool = last) -> Any:
            if number:
                trainer.load(folder / "kept")
            begun = state(trainer)
            told = []
            for batch in some:
                told.append(trainer.train(cut(trainer, batch)).get("loss"))
            if not last:
                trainer.save(folder / "kept")
            found = trainer.evaluate((cut(trainer, batch), len(batch[case.task.labels])) for batch in held_out)
            return begun, [float(one) for one in told if one is not None], state(trainer), found.get("loss")

        given = on_all(layout.ranks, build, act)
        losses += next(one for _, one, _, _ in given if one)
        before = before or whole([one for one, _, _, _ in given])
        after = whole([one for _, _, one, _ in given])
        evaluated = next(one for _, _, _, one in given if one is not None)
    return Trained(losses, evaluated, before, after)


def cut(trainer: Trainer, batch: Tensors) -> dict[str, Any]:
    """A rank's shards of a batch."""
    return {port.name: shard(port, trainer.rank, batch[port.name]) for port in trainer.inputs}


def compare(case: Case, have: Trained) -> None:
    """Raises Wrong where PyTorch learns something else."""
    own = {name for name, one in case.net.module.state_dict().items() if one.is_floating_point()}
    start = {name: have.before[name] for name in have.before if name in own}
    want = Reference(case.net, case.task, start)
    first = want.tensors()
    exact = case.net.double and not case.task.precision
    low = Reference(case.net, case.task, _off(start) if exact else start, low=not exact)
    losses, rough = [], []
    for batch in case.batches():
        losses.append(want.step(batch))
        rough.append(low.step(batch))
    last = want.tensors()
    missing = [
        name for name, value in last.items() if name not in have.after and not np.array_equal(value, first[name])
    ]
    if missing:
        raise pool.Wrong("different", f"not in the artifact: {missing}")
    usual = low.tensors()
    if case.task.precision:
        _roughly(case, have, (losses, last), (rough, usual), first)
        return
    bound = LOSS if case.net.double else LOSS_ROUNDED
    for k, (one, other, third) in enumerate(zip(have.losses, losses, rough, strict=True)):
        if not _near(one, other, bound, third):
            raise pool.Wrong("different", f"loss of step {k}: {one} and {other}")
    one, other = have.evaluated, want.evaluated(case.held_out())
    if not _near(one, other, bound, low.evaluated(case.held_out())):
        raise pool.Wrong("different", f"loss of the evaluation: {one} and {other}")
    changes = {name: _largest(value - first[name]) for name, value in last.items()}
    least = max(changes.values()) / 1000
    worst = []
    for name in sorted(last.keys() & have.after.keys()):
        off = _largest(have.after[name] - last[name])
        eps = float(np.finfo(have.after[name].dtype).eps)
        bound = (EXACT if case.net.double else ROUNDED) * max(changes[name], least) + 8 * eps * _largest(last[name])
        if not off <= bound + TIMES * _largest(usual[name] - last[name]):
            worst.append(f"{name}: off by {off:.3g}, changed by {changes[name]:.3g}")
    if worst:
        raise pool.Wrong("different", "\n".join(worst))


def _off(start: Tensors) -> Tensors:
    """Tensors that are off by the rounding of float32."""
    random = np.random.default_rng(0)
    unit = float(np.finfo(np.float32).epsneg)
    return {name: value * (1 + unit * random.standard_normal(value.shape)) for name, value in start.items()}


def _near(one: float, other: float, bound: float, rough: float) -> bool:
    """Whether two losses are alike, of which `other` is torch's in float64, and `rough` with float32's rounding; or none is a number."""
    if not np.isfinite(other):
        return not np.isfinite(one)
    return bool(abs(one - other) <= bound * max(abs(other), 1e-2) + TIMES * abs(rough - other))


def stops_too(case: Case) -> bool:
    """Whether torch, too, gets a loss that is no number."""
    start = {
        name: one.detach().numpy() for name, one in case.net.module.state_dict().items() if one.is_floating_point()
    }
    both = [Reference(case.net, case.task, start, low=low) for low in (False, not case.net.double)]
    return any(not np.isfinite(one.step(batch)) for batch in case.batches() for one in both)


def _roughly(
    case: Case, have: Trained, want: tuple[list[float], Tensors], rough: tuple[list[float], Tensors], first: Tensors
) -> None:
    """Compares what 16 bits make of it, by how far torch's own 16 bits are from float64."""
    assert case.task.precision is not None
    unit = UNITS[str(case.task.precision["compute"])]
    for k, (one, other, low) in enumerate(zip(have.losses, want[0], rough[0], strict=True)):
        if not (np.isfinite(one) and np.isfinite(low)):
            if np.isfinite(one) != np.isfinite(low):
                raise pool.Wrong("different", f"loss of step {k}: {one}, torch in 16 bits {low}")
            continue
        if not abs(one - other) <= TIMES * abs(low - other) + 8 * unit * max(abs(other), 0.1):
            raise pool.Wrong("different", f"loss of step {k}: {one}, float64 {other}, torch in 16 bits {low}")
    for name in sorted(want[1].keys() & have.after.keys()):
        change = max(_largest(want[1][name] - first[name]), _largest(rough[1][name] - first[name]))
        off, usual = _largest(have.after[name] - want[1][name]), _largest(rough[1][name] - want[1][name])
        if not off <= TIMES * usual + 16 * unit * max(change, 1e-5):
            raise pool.Wrong(
                "different", f"{name}: off by {off:.3g}, torch in 16 bits by {usual:.3g}, change {change:.3g}"
            )


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def work(chance: random.Random, folder: Path) -> str:
    """Runs a case on both sides; gives why it is refused, or ''."""
    torch.set_num_threads(1)
    case = drawn(chance)
    if "--case" in sys.argv:
        print(case)
    try:
        compare(case, trained(case, folder))
    except CompileError as error:
        return f"{error}\n{case}" if "a bug in partc" in str(error) else str(error)
    except pool.Wrong as wrong:
        raise pool.Wrong(wrong.end, f"{wrong.text}\n{case}") from None
    except NonFiniteError as error:
        if not stops_too(case):
            raise pool.Wrong("different", f"{error}, and torch gets a number\n{case}") from error
    except PartcError as error:
        raise pool.Wrong("refused by the runtime", f"{error}\n{case}") from error
    except Exception as error:
        raise pool.Wrong("traceback", f"{traceback.format_exc()[-2500:]}\n{case}") from error
    return ""


def reason(text: str) -> str:
    """What all refusals of one kind have in common: the fact without its names and numbers."""
    line = text.strip().splitlines()[0].split(": ", 1)[-1]
    judged = "expected" if any(line.startswith(one) for one in REASONABLE) else "unreasonable"
    return f"{judged}: " + re.sub(r"'[^']*'|\b[nvwb]?\d[\d.]*\b|\(.*?\)", "_", line)[:100]


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=SECONDS, reason=reason)
