"""What a compile costs, counted and not timed: the Python calls of each pass, and the bytes that are written.

    python tests/support/compile_cost.py     a table by pass, exact on any machine, idle or not

A count repeats where seconds do not, so a budget can stand in a file: `tests/emit/compile_budget.json` has one for each of `MODELS`.
The models are counted in a process of their own (`counted`), in the order of `MODELS`, each behind a compile of a smaller one of its kind,
which imports modules and fills caches.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "benchmarks"))

_TRAIN = """train:
  loss: {type: softmax_cross_entropy, logits: head.MatMul.out, labels: labels, axis: 2}
  optimizer: {type: adamw, lr: 0.001, weight_decay: 0.1}
  clip: {norm: 1.0}
"""


@dataclass(frozen=True)
class Counted:
    """Model and plan of a given size, written into a folder."""

    write: Callable[[Path, int], tuple[Path, Path]]
    size: int
    """The number of layers that is counted; a process is warmed up by one of 1."""


def _gpt(folder: Path, layers: int, plan: str, tail: str = "") -> tuple[Path, Path]:
    from network import Sizes, generate

    (folder / "plan.yaml").write_text(plan + tail)
    return generate(folder, Sizes(layers, 64, 16, 16, 64, stored=True)), folder / "plan.yaml"


def _inference(folder: Path, layers: int) -> tuple[Path, Path]:
    from network import plan

    return _gpt(folder, layers, plan(8, head=True), 'outputs: {"**": cut}\n')


def _training(folder: Path, layers: int) -> tuple[Path, Path]:
    from network import plan

    text = plan(8, "dp: 2, tp: 4", head=True).replace("divisor: 64", "divisor: 2")
    return _gpt(
        folder,
        layers,
        text.replace("dataset: data_parallel", "dataset: {ids: [dp, null], labels: [dp, null]}"),
        _TRAIN,
    )


def _stages(folder: Path, ranks: int) -> tuple[Path, Path]:
    """A GPT of 2 layers in as many stages, in 1F1B."""
    from network import plan

    stages = "".join(f'  "h.{k}": {{pp: {k}}}\n' for k in range(2))
    text = plan(ranks, f"pp: 2, dp: {ranks // 2}").partition("sharding")[0].replace("divisor: 64", f"divisor: {ranks}")
    text += f"placement:\n  tokens: {{pp: 0}}\n  positions: {{pp: 0}}\n{stages}  norm: {{pp: 1}}\n  head: {{pp: 1}}\n"
    return _gpt(
        folder,
        2,
        text.replace("dataset: data_parallel", "dataset: {ids: [dp, null], labels: [dp, null]}"),
        "pipeline: {microbatches: 2, schedule: 1f1b}\n" + _TRAIN,
    )


def calls_in_stages(ranks: int, folder: Path) -> int:
    """Python calls of a compile of a training in stages over so many ranks, in this process."""
    return _compiled(_stages, ranks, folder)["calls"]


def _lenet(folder: Path, layers: int) -> tuple[Path, Path]:
    return ROOT / "samples/lenet/model.py", ROOT / "samples/lenet/plan.yaml"


MODELS = {
    "lenet": Counted(_lenet, 1),
    "gpt_inference": Counted(_inference, 3),
    "gpt_training": Counted(_training, 2),
}


def _compiled(write: Callable[[Path, int], tuple[Path, Path]], size: int, folder: Path) -> dict[str, int]:
    """Calls of Python functions by pass, the sum as `calls`, and the bytes of the artifact as `bytes`."""
    from partc.compiler.pipeline import compile_model

    folder.mkdir()
    model, plan = write(folder, size)
    profiler = cProfile.Profile(builtins=False)
    begun: list[tuple[str, int]] = []

    def reached(step: str) -> None:
        profiler.disable()
        begun.append((step, sum(entry.callcount for entry in profiler.getstats())))
        profiler.enable()

    reached("plan")
    compile_model(model, plan, folder / "build", watch=reached)
    profiler.disable()
    reached("end")
    profiler.disable()
    calls: dict[str, int] = {}
    for (step, first), (_, last) in itertools.pairwise(begun):
        calls[step] = calls.get(step, 0) + last - first
    written = sum(path.stat().st_size for path in (folder / "build").rglob("*") if path.is_file())
    return {**calls, "calls": begun[-1][1], "bytes": written}


def counted() -> dict[str, dict[str, int]]:
    """The costs of `MODELS`, by name, in a process of their own: what ran before in this one does not matter."""
    # what the process does not share with its parent: hashes, and laws that tests ask for in all compiles
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PARTC_")}
    done = subprocess.run(
        [sys.executable, __file__, "--once"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _rows(found: dict[str, dict[str, int]]) -> Iterator[str]:
    yield f"{'':24}" + "".join(f"{name:>16}" for name in found)
    for step in dict.fromkeys(step for costs in found.values() for step in costs):
        yield f"{step:24}" + "".join(f"{costs.get(step, 0):16,}" for costs in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    if not parser.parse_args().once:
        print("\n".join(_rows(counted())))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            _compiled(model.write, 1, Path(folder) / f"{name}_warm")
            found[name] = _compiled(model.write, model.size, Path(folder) / name)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
