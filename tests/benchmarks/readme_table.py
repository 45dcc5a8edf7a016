"""The table of benchmarks in README.md of this folder, with the figures of this machine: one after the other, rows at the end.

    python tests/benchmarks/readme_table.py --jax-python VENV/bin/python --cache exports
    python tests/benchmarks/readme_table.py --quick                  # small sizes, to see that all run; the figures mean nothing
    python tests/benchmarks/readme_table.py --only cut_cost,mlp_placed

The machine should be idle. A benchmark's whole output is printed as it comes, with the seconds that it took. A figure whose benchmark
lacks something, such as PyTorch or an interpreter with JAX, is a dash, and so is one that failed; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RATIO = r"ratio ([\d.]+)"
MODEL_ROWS = r"(?m)^(?:mlp|lenet|gpt\d+|resnet|dlrm) +[\d.]+ +[\d.]+ +([\d.]+)"
"""A row of a table by model: the times of both sides, and their ratio."""


@dataclass(frozen=True)
class Figure:
    """A row of the table: what is measured, the pattern of its numbers in the benchmark's output, and the text around them."""

    what: str
    pattern: str
    text: str = "{} times its time"

    def row(self, script: str, output: str) -> str:
        """The row of README, with the numbers of all matches in order."""
        found = [number for match in re.finditer(self.pattern, output) for number in match.groups() if number]
        shown = "-" if not found else self.text.format(", ".join(found))
        return f"| {f'`{script}.py`: ' if script else ''}{self.what} | {shown} |"


@dataclass(frozen=True)
class Benchmark:
    """A script, its arguments in full and small size, its figures, and the modules that it cannot do without."""

    script: str
    figures: tuple[Figure, ...]
    full: str = ""
    quick: str = ""
    needs: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark(
        "mlp_placed",
        (Figure("24 layers of width 1024 over 4 MPI ranks against the unsharded model", RATIO),),
        quick="--layers 4 --width 64 --steps 2 --turns 1",
    ),
    Benchmark(
        "cut_cost",
        (Figure("one segment boundary on small tensors, with its send", r"(-?[\d.]+) us a cut", "{} us"),),
        quick="--layers 4 --steps 5 --turns 1",
    ),
    Benchmark(
        "compile_large",
        (
            Figure("compile of 4 GB of weights against a plain copy", RATIO),
            Figure("the same, private memory", r"compile (\d+) MB", "{} MB"),
        ),
        quick="--gigabytes 0.2 --ranks 2 --repeat 1",
    ),
    Benchmark(
        "compile_nodes",
        (Figure("compile of 20,000 nodes with dynamic shapes over 8 ranks", r"took ([\d.]+) s", "{} s"),),
        quick="--nodes 160",
    ),
    Benchmark(
        "transformer",
        (
            Figure(
                "6 layers of width 512 over 2 ranks against the unsharded model on one thread",
                r"partc / whole = ([\d.]+)",
            ),
            Figure("the same against PyTorch with gloo", r"partc / torch = ([\d.]+)"),
            Figure("the same against JAX on two CPU devices", r"partc / jax = ([\d.]+)"),
        ),
        "JAX",
        "JAX --layers 1 --width 64 --sequence 16 --steps 1 --turns 1",
    ),
    Benchmark(
        "exported_models",
        (
            Figure(
                "Llama, GPT-2, BERT, T5, ViT, CLIP, Mixtral, Phi-3 as torch exports them, tensor parallel",
                r"(?m)^(\w+ +\d+ \w+ +\d+  .*)  \[\d+ s\]$",
                "{}",
            ),
        ),
        "--cache CACHE --opsets 21 --sizes dynamic",
        "--cache CACHE --opsets 21 --sizes dynamic --models gpt2",
        ("torch", "transformers"),
    ),
    Benchmark(
        "changing_batch",
        (Figure("a batch size that changes every step against a fixed one; the same with four sizes", RATIO),),
        quick="--layers 1 --width 64 --sequence 16 --turns 1",
    ),
    Benchmark(
        "compile_gpt",
        (
            Figure(
                "48 layers over 8 ranks, shapes only, against JAX's tracing and compiling",
                r"analysing for 8 ranks takes ([\d.]+)",
            ),
            Figure("the same over 512 ranks against 8", r"analysing for 512 ranks takes ([\d.]+)"),
        ),
        "JAX",
        "JAX --layers 1 --repeat 1",
    ),
    Benchmark(
        "compile_training",
        (
            Figure(
                "the training of a 24-layer GPT over 4,096 ranks (dp x tp) against 8, without and with ZeRO",
                r"4,096 ranks take ([\d.]+) times",
                "{} times its CPU time",
            ),
            Figure("the same, bytes", r"and ([\d.]+) times the bytes", "{} times its bytes"),
        ),
        "--ranks 8,4096",
        "--ranks 8,4096 --layers 1",
    ),
    Benchmark(
        "train_one_rank",
        (
            Figure(
                "forward, backward and update on one rank against PyTorch eager: "
                "MLP, LeNet, GPT of width 256 and 768, ResNet-18, DLRM",
                MODEL_ROWS,
            ),
        ),
        quick="lenet --turns 1",
        needs=("torch",),
    ),
    Benchmark(
        "train_data_parallel",
        (
            Figure(
                "a step on 2 ranks against PyTorch DDP with gloo: MLP, LeNet, GPT of width 256 and 768",
                MODEL_ROWS,
            ),
        ),
        "--turns 6",
        "lenet --steps 1 --turns 1",
        ("torch",),
    ),
    Benchmark(
        "train_lenet_placed",
        (Figure("an epoch of LeNet over 5 ranks on 2 cores against PyTorch on one thread", r"\), ratio ([\d.]+)"),),
        quick="--records 320 --steps 2 --turns 1",
        needs=("torch",),
    ),
    Benchmark(
        "train_buckets",
        (
            Figure(
                "gradients in buckets of 10 MB against one bucket (63 MB)",
                r"bucket_mb +10:.* ([\d.]+) of the first",
            ),
        ),
        "--sizes 1000 10 --turns 6",
        "--model lenet --sizes 1000 10 --steps 1 --turns 1",
    ),
    Benchmark(
        "train_memory",
        (
            Figure(
                "peak memory of training on one rank against PyTorch: "
                "MLP, LeNet, GPT of width 256 and 768, ResNet-18, DLRM",
                r"partc / torch = ([\d.]+) of the peak",
                "{} times its peak",
            ),
        ),
        "--steps 10",
        "lenet --steps 2",
        ("torch",),
    ),
    Benchmark(
        "predicted_memory",
        (
            Figure(
                "peak memory that `partc inspect` predicts of the largest rank against the measured one: "
                "LeNet in training, GPT in inference, in training and in stages, wide & deep, ResNet-18",
                r"predicted / measured = ([\d.]+) of the largest rank",
                "{} times",
            ),
        ),
        "",
        "lenet --steps 2",
    ),
    Benchmark(
        "train_pipeline",
        (
            Figure(
                "a GPT of 12 layers in 2 stages, 8 microbatches, against one rank: 1F1B and ZB-H1",
                r"a  \w+: ([\d.]+) .* as fast as one rank",
                "{} times as fast",
            ),
            Figure("1F1B against PyTorch's", r"b  1f1b: ([\d.]+)"),
        ),
        "--only a,b",
        "--only a,b --layers 2 --width 32 --heads 2 --batch 4 --seq 8 --microbatches 2 --steps 1 --turns 1",
        ("torch",),
    ),
    Benchmark(
        "target_overlap",
        (
            Figure(
                "two branches on two targets, both on the CPU, at once",
                r"both branches: ([\d.]+)",
                "{} times their sum",
            ),
        ),
    ),
    Benchmark(
        "train_tables",
        (
            Figure(
                "a step of a model with 8 tables of 100,000 rows and lazy Adam against PyTorch's SparseAdam",
                r"torch sparse .*ratio ([\d.]+),",
            ),
            Figure("the same against dense gradients and Adam", r"torch dense .*ratio ([\d.]+),"),
        ),
        "--optimizer lazy_adam",
        "--optimizer lazy_adam --rows 100 --turns 1",
        ("torch",),
    ),
    Benchmark(
        "update_rows",
        (
            Figure(
                "the update of 2,048 rows against PyTorch: Adam in tables of 100,000 x 64 and 1,000,000 x 16, SGD",
                RATIO,
            ),
        ),
        needs=("torch",),
    ),
    Benchmark(
        "pull",
        (
            Figure(
                "a Pull of 16,384 skewed ids from 2 ranks against np.unique of them; a Push back",
                r" ms: +([\d.]+) of it",
            ),
        ),
    ),
    Benchmark(
        "generate_ranks",
        (
            Figure(
                "tokens a second of a decoder of width 1024 with 16 sequences over 2 ranks against one: tensor parallel; "
                "stages whose groups of slots take turns",
                r"(?m)^(?:tp|2 stages) .*tokens/s +([\d.]+) times",
                "{} times as many",
            ),
        ),
        quick="--width 128 --layers 2 --slots 4 --tokens 4 --rounds 1",
        needs=("torch", "transformers"),
    ),
)


def rows_of(one: Benchmark, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Runs a benchmark; its rows of the table, and whether it ended well or could not run for lack of a module."""
    missing = [name for name in one.needs if importlib.util.find_spec(name) is None]
    words = (one.quick if options.quick else one.full).replace("CACHE", str(options.cache or HERE)).split()
    jax = ["--jax-python", options.jax_python] if options.jax_python else []
    arguments = [part for word in words for part in (jax if word == "JAX" else [word])]
    if "--cache" in arguments and options.cache is None:
        missing.append("--cache")
    print(f"\n== {one.script} {' '.join(arguments)}", flush=True)
    output, fine, start = "", True, time.perf_counter()
    if missing:
        print(f"left out, without {', '.join(missing)}")
    else:
        process = subprocess.Popen(
            [sys.executable, str(HERE / f"{one.script}.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            output += line
        fine = process.wait() == 0
        print(
            f"-- {time.perf_counter() - start:.0f} s{'' if fine else f', exit code {process.returncode}'}", flush=True
        )
    return [figure.row("" if k else one.script, output) for k, figure in enumerate(one.figures)], fine


def machine(jax_python: str | None) -> str:
    """What the figures depend on beside the code: the processor, its vectors, its cores, and versions of what is measured."""
    facts = Path("/proc/cpuinfo").read_text()
    model = re.search(r"(?m)^model name\s*:\s*(.*)$", facts)
    vectors = "AVX-512" if "avx512f" in facts else "AVX2" if "avx2" in facts else "no AVX2"
    found = [name for name in ("onnxruntime", "torch") if importlib.util.find_spec(name)]
    versions = [f"{name} {importlib.import_module(name).__version__}" for name in found]
    if jax_python:
        script = "import jax; print('jax', jax.__version__)"
        versions.append(subprocess.run([jax_python, "-c", script], capture_output=True, text=True).stdout.strip())
    where = f"{len(os.sched_getaffinity(0))} cores of {model[1] if model else platform.machine()} ({vectors})"
    return f"{where}; {', '.join(versions)}; load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(one.script for one in BENCHMARKS), help="scripts, with commas between"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all run")
    parser.add_argument("--jax-python", default=None, help="an interpreter with JAX")
    parser.add_argument("--cache", type=Path, default=None, help="where exported_models.py keeps its exports")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in {one.script for one in BENCHMARKS}]:
        parser.error(f"there is no benchmark {', '.join(unknown)}")
    print(machine(options.jax_python))
    start = time.perf_counter()
    found = [rows_of(one, options) for one in BENCHMARKS if one.script in names]
    print(f"\n{time.perf_counter() - start:.0f} s in all; {machine(options.jax_python)}\n")
    print("\n".join(["| benchmark | figure |", "|---|---|", *(row for rows, _ in found for row in rows)]))
    sys.exit(not all(fine for _, fine in found))


if __name__ == "__main__":
    main()
