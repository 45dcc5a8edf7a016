"""What torch's modules and functions do in their special cases, trained for five steps against torch: equal, or refused by name.

    python tests/fuzz/torch_semantics.py                   all cases of `torch_cases.py`, with a table
    python tests/fuzz/torch_semantics.py padding hook      the cases with one of these words in their names

The cases that are not refused are trained some at a time as one module, which torch exports once; where that is refused, fails, or gives
other numbers, each of them is tried alone. Losses, parameters and buffers are compared. The exit code is 1 where one differs silently,
a case is refused that should not be, or its refusal does not name what REFUSED says. One that is refused today may be equal one day.
"""

from __future__ import annotations

import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch
from partc.compiler.directives.recorder import Recorder
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.torch.torch_module import export
from partc.compiler.pipeline import STEP_ALONE, compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_trainer
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.errors import PartcError
from torch import nn
from torch_cases import CASES, REFUSED, batch

STEPS, TOGETHER = 5, 12
OPTION = {"lr": 0.05, "momentum": 0.9}
PLAN = "ranks: 1\ntrain: {loss: loss, optimizer: {type: momentum, lr: 0.05, momentum: 0.9}}\n"
NEAR, OF_CHANGE = 2e-6, 2e-4
"""What may differ: of a tensor's largest number, and of its largest change."""


class Together(nn.Module):
    """Cases as one module, whose losses are added up."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = list(names)
        for name in self.names:
            torch.manual_seed(len(name))
            self.add_module(_path(name), CASES[name]())
        self.anchor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        losses = [self.get_submodule(_path(name))(x, ids, label) for name in self.names]
        read = x.mean() + ids.float().mean() + label.float().mean()  # no input may be unused
        return torch.stack([*losses, self.anchor * read / 100]).sum()


def _path(name: str) -> str:
    return f"case{list(CASES).index(name)}"


def ends(names: Sequence[str], folder: Path) -> dict[str, str]:
    """By case how it ended: "equal", a refusal's text, or what differs; several cases that are refused are told the same."""
    module, want = Together(names), Together(names)
    given = {name: torch.from_numpy(value) for name, value in batch(0).items()}
    try:
        model = export(module, given, None, DimNames({}, set()), ["loss"], "model.py", Recorder(Path(__file__).parent))
        compile_source(Source(model), parse_plan(PLAN, "plan.yaml"), folder, kinds=STEP_ALONE)
        losses, after = _by_partc(folder)
    except (CompileError, PartcError) as error:
        return dict.fromkeys(names, f"refused: {error}")
    except Exception as error:
        return dict.fromkeys(names, f"fails: {type(error).__name__}: {error}")
    first = _tensors(want)
    try:
        expected = _by_torch(want)
    except Exception as error:
        return dict.fromkeys(names, f"torch itself fails: {type(error).__name__}: {error}")
    wrong: dict[str, list[str]] = {name: [] for name in names}
    for name, value in _tensors(want).items():
        have = after.get(name, first[name])
        bound = NEAR * max(1.0, _largest(value)) + OF_CHANGE * _largest(value - first[name])
        if not _largest(have - value) <= bound:
            owner = next((case for case in names if name.startswith(f"{_path(case)}.")), names[0])
            wrong[owner].append(f"{name.partition('.')[2]} off by {_largest(have - value):.2g}")
    if not np.allclose(losses, expected, rtol=1e-5, atol=1e-5):
        for name in names:
            wrong[name].append(f"loss {losses}, torch {expected}")
    return {name: f"differs: {'; '.join(texts[:3])}" if texts else "equal" for name, texts in wrong.items()}


def _by_partc(folder: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    with load_trainer(folder, LocalWorld(1).transport(0), threads=1) as trainer:
        losses = [float(trainer.train(batch(k))["loss"]) for k in range(STEPS)]
        return losses, {record.tensor: array.copy() for record, array in trainer.program.state.arrays()}


def _by_torch(module: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], **OPTION)
    losses = []
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = module(**{name: torch.from_numpy(value) for name, value in batch(k).items()})
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _tensors(module: nn.Module) -> Mapping[str, np.ndarray]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: one.detach().numpy().copy() for name, one in named if one.is_floating_point()}


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def judged(name: str, end: str) -> str:
    """What is wrong with how a case ended, "" where nothing is."""
    wanted = REFUSED.get(name, "")
    if end == "equal":
        return ""
    if not end.startswith("refused: "):
        return end
    return "" if wanted and wanted in end else end if not wanted else f"the refusal does not name {wanted}: {end}"


def all_ends(names: Sequence[str]) -> dict[str, str]:
    """By case how it ended, each alone where some together are not equal."""
    found: dict[str, str] = {}
    equal = [name for name in names if name not in REFUSED]
    groups = [equal[k : k + TOGETHER] for k in range(0, len(equal), TOGETHER)]
    for group in [*groups, *[[name] for name in names if name in REFUSED]]:
        with tempfile.TemporaryDirectory() as folder:
            together = _silent(group, folder)
        again = [name for name, end in together.items() if end != "equal"] if len(group) > 1 else []
        if again and any("loss" in together[name] or "differs" not in together[name] for name in again):
            again = list(group)
        for name in again:
            with tempfile.TemporaryDirectory() as folder:
                together |= _silent([name], folder)
        found |= together
        for name, end in together.items():
            print(f"{name:52} {' '.join(end.split())[:150]}", flush=True)
    return found


def _silent(names: Sequence[str], folder: str) -> dict[str, str]:
    """`ends`, without what torch prints of a failure."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return ends(names, Path(folder) / "build")


def main() -> int:
    """1 where a case ended otherwise than it should."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    words = sys.argv[1:]
    names = [name for name in CASES if not words or any(word in name for word in words)]
    found = all_ends(names)
    wrong = {name: text for name, end in found.items() if (text := judged(name, end))}
    refused = sum(end.startswith("refused") for end in found.values())
    silent = sum(end.startswith("differs") for end in found.values())
    print(
        f"\n{len(found)} cases: {sum(end == 'equal' for end in found.values())} equal, {refused} refused, {silent} differ silently"
    )
    for name, text in wrong.items():
        print(f"WRONG {name}: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
