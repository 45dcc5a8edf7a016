"""Two ranks at real size in four bits against llama.cpp with two threads, and the tokens of all layouts.

    python tests/benchmarks/real_size/real_ranks.py [--shape middle] [--files FOLDER] [--peers-python VENV/bin/python] [--turns 5]
        [--tokens float32,int4] [--no-times]

16 sequences, decode alone: wall-clock milliseconds a token, tensor parallel over two MPI ranks and in two stages whose groups of slots
take turns, one thread a rank; sides in turns, medians. `--tokens`: 8 prompts of 4 to 67 tokens are continued by 100 tokens, each by itself
and all at once, on 1, 2 and 8 slots, tp 2 and 2 stages. Printed are how many tokens are those of transformers in float32, and in four
bits those of 1 slot. Models and artifacts stay in FOLDER, where artifacts refer to the weights of the model in float32.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import real_side  # noqa: E402
from real_models import SHAPES  # noqa: E402
from turns import Side, answer, told  # noqa: E402

SLOTS, TOKENS, COMPARED, VOCABULARY = 16, 32, 100, 32000
RANKS = {"tp 2": ["--tp", "2"], "2 stages": ["--stages", "2"]}
COMPANIES = {f"{slots} slot{'s' * (slots > 1)}": ["--slots", str(slots)] for slots in (1, 2, 8)}
COMPANIES |= {name: ["--slots", "8", *cut] for name, cut in RANKS.items()}


def side(name: str, path: str) -> None:
    """A measured program: one of the ranks, or llama.cpp; answers with the seconds of a token."""
    comm = None
    if name == "llama":
        generate = real_side.llama(path, SLOTS, threads=2)()
    else:
        from mpi4py import MPI
        from partc.runtime import Request, load_generator

        comm = MPI.COMM_WORLD
        generator = load_generator(path, comm, threads=1)

        def generate(prompts: real_side.Prompts, count: int) -> real_side.Prompts:
            requests = [Request(prompt, max_tokens=count, ignore_end=True) for prompt in prompts]
            return [[*one.tokens] for one in generator.run(requests)]

    draw = random.Random(0)

    def seconds(count: int) -> float:
        from time import perf_counter

        prompts = [[draw.randrange(3, VOCABULARY) for _ in range(4)] for _ in range(SLOTS)]
        begin = perf_counter()
        generate(prompts, count)
        return perf_counter() - begin

    leads = comm is None or comm.rank == 0
    seconds(2)
    if leads:
        answer([])
    turns = told() if leads else iter(int, None)
    for turn in turns:
        if comm is not None and comm.bcast(turn + 1 if leads else None) == 0:
            break
        took = (seconds(1 + TOKENS) - seconds(1)) / TOKENS / SLOTS
        if leads:
            answer([took])
    if comm is not None and leads:
        comm.bcast(0)


def tokens_of(name: str, path: str) -> None:
    """Prints the tokens of all prompts: each by itself, and of partc also all at once."""
    draw = random.Random(7)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(4 + 9 * index)] for index in range(8)]
    if name == "transformers":
        generate = real_side.transformers(path)()
        print(json.dumps([[generate([prompt], COMPARED)[0] for prompt in prompts]]))
        return
    from partc.runtime import Request
    from partc.runtime.generation.generator import load_local_generator

    with load_local_generator(path, threads=1) as generator:
        requests = [Request(prompt, max_tokens=COMPARED, ignore_end=True) for prompt in prompts]
        alone = [[*generator.run([one])[0].tokens] for one in requests]
        print(json.dumps([alone, [[*one.tokens] for one in generator.run(requests)]]))


def compiled(options: argparse.Namespace, bits: str, name: str, layout: list[str]) -> Path:
    """The artifact of a layout."""
    from real_generation import made

    folder = made(options.files / options.shape, sys.executable, str(HERE / "real_models.py"), "folder", options.shape)
    stem, partc = f"{options.shape}.{bits}.{name.replace(' ', '')}", [sys.executable, "-m", "partc.cli"]
    quantized = ["--quantize", "4"] if bits == "int4" else []
    written = [] if quantized else ["--by-reference"]
    asked = ["--generate", str(real_side.LENGTH), *layout, *quantized, "-q", "--no-compare", "-o"]
    plan = made(options.files / f"{stem}.yaml", *partc, "plan", str(folder), *asked)
    return made(
        options.files / stem, *partc, "compile", str(folder), "--plan", str(plan), *written, "-q", "--no-compare", "-o"
    )


def print_times(options: argparse.Namespace) -> None:
    from real_generation import files_of
    from transformer import ROOT, available, mpi_command

    builds = {
        name: compiled(options, "int4", f"{name} of {SLOTS}", ["--slots", str(SLOTS), *cut])
        for name, cut in RANKS.items()
    }
    sides = {
        name: Side(name, [mpi_command(2, __file__, "--side", "partc", str(build))], [ROOT])
        for name, build in builds.items()
    }
    if available(options.peers_python, "xllamacpp, gguf", "--peers-python"):
        model = str(files_of("llama", options.shape, options.files, options.peers_python))
        sides["llama"] = Side("llama", [[options.peers_python, __file__, "--side", "llama", model]])
    times = {name: list[float]() for name in sides}
    for turn in range(options.turns + 1):
        for name, one in sides.items():
            times[name] += one.turn(0)[: min(turn, 1)]
    medians = {name: 1e3 * statistics.median(some) for name, some in times.items()}
    print(
        f"{options.shape}, {SLOTS} sequences, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms a token of each"
    )
    for name, took in medians.items():
        against = f"   {took / medians['llama']:.2f} of llama.cpp" if "llama" in medians else ""
        print(f"{name:14}{took:10.2f}{against}", flush=True)
    for one in sides.values():
        one.close()


def print_tokens(options: argparse.Namespace, bits: str) -> None:
    def answers(name: str, path: Path) -> list[list[list[int]]]:
        command = [sys.executable, __file__, "--side", f"tokens {name}", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
        return found

    builds = {name: compiled(options, bits, name, layout) for name, layout in COMPANIES.items()}
    whose, wanted = "1 slot's", None
    if bits == "float32":
        whose, (wanted,) = "transformers'", answers("transformers", options.files / options.shape)
    for name, build in builds.items():
        alone, together = answers("partc", build)
        wanted = wanted or alone
        for company, some in (("alone", alone), ("at once", together)):
            pairs = [pair for one, two in zip(some, wanted, strict=True) for pair in zip(one, two, strict=True)]
            same = sum(one == two for one, two in pairs)
            print(f"{bits}, {name:9} {company:8} {same} of {len(pairs)} tokens are {whose}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="middle")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-real-size")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter with xllamacpp and gguf")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", default="", help="compare tokens: float32, int4, or both")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        name, path = options.side
        tokens_of(name.removeprefix("tokens "), path) if name.startswith("tokens ") else side(name, path)
        return
    options.files.mkdir(parents=True, exist_ok=True)
    if not options.no_times:
        print_times(options)
    for bits in filter(None, options.tokens.split(",")):
        print_tokens(options, bits)


if __name__ == "__main__":
    main()
