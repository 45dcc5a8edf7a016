"""Everything that runs on a GPU, on this machine's: the numbers against those of the CPU, and figures.

    python tests/benchmarks/on_gpu.py                 the whole check; refuses where there is no GPU
    python tests/benchmarks/on_gpu.py --on cpu        the same with every target on the CPU, to try the script

Networks are trained by plans with all on the GPU, the optimizer on the CPU, tables on the CPU, data parallel over ranks that share
the GPU, with and without targets. Losses must be within 1e-3 of those that one rank learns on the CPU, tensors within 1e-3 of the largest
change and step. Lines say per case how far both are, the time of a step, copies and bytes by target, how long both targets worked at once,
and what the GPUs hold. A model is then run in one session of onnxruntime and by partc.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from partc.cli.output.targets import counted, line
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.devices.device_memory import refuse_missing
from partc.runtime.devices.devices import devices_from
from partc.runtime.errors import PartcError
from partc.runtime.units import size_text
from training_equivalence import fed, source_of, tensors
from training_models import Model, dlrm, gpt, mlp, resnet

ADAMW = "{type: adamw, lr: 0.003}"
TRAIN = "train: {{loss: {{type: softmax_cross_entropy, logits: y, labels: labels}}, optimizer: {}}}\n"


OF_MODEL = "train: {{loss: loss, optimizer: {}}}\n"


@dataclass(frozen=True)
class Case:
    """A network with a plan; `name` says what is tried."""

    name: str
    made: Any
    sizes: Mapping[str, int]
    plan: str
    optimizer: str = ADAMW
    device: bool = False
    """Whether the plan has no targets, and the job makes the GPU the default."""


def cases() -> Iterator[Case]:
    """All cases."""
    small, text, rows = {"batch": 64}, {"batch": 8, "seq": 64}, {"batch": 256}
    on_cpu = ADAMW.replace("{", "{target: cpu, ")
    yield Case("mlp, all on cuda", mlp, small, "ranks: 1\ntarget: cuda\n")
    yield Case("mlp, no targets, --device cuda", mlp, small, "ranks: 1\n", device=True)
    yield Case("mlp, optimizer on cpu", mlp, small, "ranks: 1\ntarget: cuda\n", on_cpu)
    yield Case("resnet, all on cuda", lambda: resnet(16, 32), {"batch": 16}, "ranks: 1\ntarget: cuda\n")
    yield Case("gpt, all on cuda", gpt, text, "ranks: 1\ntarget: cuda\n")
    yield Case("gpt, optimizer on cpu", gpt, text, "ranks: 1\ntarget: cuda\n", on_cpu)
    data = "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\ntarget: cuda\n"
    yield Case("gpt, 2 ranks, data parallel", gpt, text, data)
    yield Case("gpt, 2 ranks, ZeRO on cpu", gpt, text, data, on_cpu.replace("{", "{shard: true, ", 1))
    yield Case("dlrm, all on cuda", dlrm, rows, "ranks: 1\ntarget: cuda\n")
    tables = 'ranks: 1\ntarget: {"**": cuda, "**.table*": cpu}\n'
    yield Case("dlrm, tables on cpu", dlrm, rows, tables)


def learned(case: Case, folder: Path, devices: Mapping[str, str], batches: list[Any]) -> tuple[Any, ...]:
    """Losses, tensors before and after, the median of the later steps, and what targets did."""
    times, losses = [], []
    with load_local(folder, devices=devices) as ranks:
        before = tensors(ranks)
        profiler = ranks.ranks[0].record_times()
        for step, batch in enumerate(batches):
            begin = time.perf_counter()
            losses.append(float(np.asarray(ranks({**fed(ranks, step), **batch})["loss"])))
            times.append(time.perf_counter() - begin)
        counts = counted([one.counts.text() for one in ranks.ranks])
        overlap = statistics.median(one.overlap for one in profiler._steps)
        return losses, before, tensors(ranks), statistics.median(times[2:]), counts, overlap, memory()


def memory() -> str:
    """What nvidia-smi says that this machine's GPUs hold; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return size_text(sum(int(one) for one in found if one.isdecimal()) << 20)


def tried(case: Case, scratch: Path, count: int, cuda: str) -> bool:
    """Runs a case in both ways and prints its line; whether it is equal."""
    one: Model = case.made()
    random = np.random.default_rng(1)
    batches = [one.feeds(random, **case.sizes) for _ in range(count)]
    train = TRAIN if "labels" in batches[0] else OF_MODEL
    compile_source(source_of(one), parse_plan("ranks: 1\n" + train.format(ADAMW), "plan.yaml"), scratch / "whole")
    want = learned(case, scratch / "whole", {}, batches)
    text = case.plan + train.format(case.optimizer)
    compile_source(source_of(case.made()), parse_plan(text, "plan.yaml"), scratch / "build")
    devices = {"cuda": cuda, **({"device": "cuda"} if case.device else {})}
    have = learned(case, scratch / "build", devices, batches)
    loss = max(abs(a - b) for a, b in zip(want[0], have[0], strict=True))
    far = 0.0
    for name, array in want[2].items():
        change = float(np.abs(array - want[1][name]).max(initial=0.0)) or 1.0
        far = max(far, float(np.abs(array - have[2][name]).max(initial=0.0)) / change)
    good = loss <= 1e-3 and far <= 1e-3 * count
    print(f"{'ok ' if good else 'BAD'} {case.name:34} loss {loss:.1e}, tensors {far:.1e} of the largest change apart")
    print(
        f"    {have[3] * 1e3:.2f} ms a step ({want[3] * 1e3:.2f} on one CPU rank), both targets {have[5] * 1e3:.2f} ms"
    )
    print(f"    {line(have[4]) if have[4] else 'no copies'}{f'; GPUs hold {have[6]}' if have[6] else ''}")
    return good


def beside_one_session(scratch: Path, cuda: str) -> None:
    """The forward pass of a GPT by one session of onnxruntime, and by partc."""
    import onnx_ir as ir
    import onnxruntime

    one = gpt(width=512, layers=4)
    source = source_of(one)
    path = scratch / "whole.onnx"
    ir.save(source.model, path)
    compile_source(source, parse_plan("ranks: 1\ntarget: cuda\n", "plan.yaml"), scratch / "forward")
    x = {"x": one.feeds(np.random.default_rng(0), batch=8, seq=128)["x"]}
    providers = devices_from({"cuda": cuda}).of("cuda").providers
    session = onnxruntime.InferenceSession(path, providers=providers, enable_fallback=0)
    with load_local(scratch / "forward", devices={"cuda": cuda}) as program:
        for name, run in (("one session", lambda: session.run(None, x)), ("partc", lambda: program(x))):
            times = []
            for _ in range(20):
                begin = time.perf_counter()
                run()
                times.append(time.perf_counter() - begin)
            print(f"forward pass of a GPT, {name:12} {statistics.median(times[3:]) * 1e3:.2f} ms")


def main() -> int:
    """Runs all cases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="cuda", choices=["cuda", "cpu"], help="what the target cuda is")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    given = parser.parse_args()
    try:
        refuse_missing(devices_from({"cuda": given.on}), ["cuda"], "on_gpu.py")
    except PartcError as error:
        print(f"{error}\n  this script measures a GPU; with --on cpu it runs the same cases without one")
        return 2
    good = True
    for case in cases():
        if given.only in case.name:
            with tempfile.TemporaryDirectory() as scratch:
                good &= tried(case, Path(scratch), given.steps, given.on)
    if not given.only:
        with tempfile.TemporaryDirectory() as scratch:
            beside_one_session(Path(scratch), given.on)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
