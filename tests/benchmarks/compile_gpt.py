"""The compile time of a 48-layer GPT over 8 and over 512 ranks, against JAX tracing and compiling it for 8 devices.

    python tests/benchmarks/compile_gpt.py [--jax-python VENV/bin/python]

Shapes only. The passes never read a weight, so they are measured on the network in full size, whose weights are a file of the
right length that is one hole; what is written is measured on the same network with a narrow width, which has as many nodes,
weights and ranks and next to no bytes. 512 ranks are a mesh of 64 x 8. All in CPU seconds, medians of `--repeat` in turns, in
processes of their own, imports left out; by the clock too, as JAX compiles on several threads. Wanted: analysing for 8 ranks at
most 0.15 of JAX, for 512 at most 1.4 times 8.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from network import Sizes, generate, plan
from transformer import available

HERE = Path(__file__).parent
MESHES = {8: "", 512: "dp: 64, tp: 8"}


def compile_once(folder: Path, ranks: int, write: bool) -> None:
    """In a process of its own: analyses or compiles, prints the seconds and what came out."""
    from partc.compiler.pipeline import analyse, compile_model

    text = plan(ranks, MESHES.get(ranks, ""), head=True) + 'outputs: {"**": cut}\n'
    (folder / "plan.yaml").write_text(text)
    cpu, clock = time.process_time(), time.perf_counter()
    if write:
        program = compile_model(folder / "model.onnx", folder / "plan.yaml", folder / f"build{ranks}").program
    else:
        program = analyse(folder / "model.onnx", folder / "plan.yaml")
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    counts = Counter(event.op_type for event in program.events)
    files = len([*(folder / f"build{ranks}").glob("rank_*.onnx")]) if write else 0
    print(json.dumps({"cpu": cpu, "clock": clock, "files": files, "nodes": len(program.model.graph), **counts}))


def run(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 48), ("width", 1600), ("heads", 16), ("sequence", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--narrow", type=int, default=64, help="the width of the network that is written")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--jax-python", default=None)
    parser.add_argument("--once", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        compile_once(Path(options.once[0]), int(options.once[1]), options.once[2] == "write")
        return
    with tempfile.TemporaryDirectory() as name:
        wide, narrow = Path(name) / "wide", Path(name) / "narrow"
        wide.mkdir()
        narrow.mkdir()
        generate(wide, Sizes(options.layers, options.width, options.heads, options.sequence, options.vocabulary, False))
        generate(narrow, Sizes(options.layers, options.narrow, options.heads, 16, 64))
        commands = {}
        for ranks in MESHES:
            for folder, what in ((wide, "analyse"), (narrow, "write")):
                script = [sys.executable, str(Path(__file__)), "--once", str(folder), str(ranks), what]
                commands[f"{what} for {ranks} ranks"] = script
        if available(options.jax_python, "jax", "--jax-python"):
            script = [options.jax_python, str(HERE / "transformer_jax.py"), "-", "--compile", "--devices", "8"]
            sizes = ("layers", "width", "heads", "sequence", "vocabulary")
            commands["JAX for 8 devices"] = script + [
                part for s in sizes for part in (f"--{s}", str(getattr(options, s)))
            ]
        found: dict[str, list[dict[str, float]]] = {what: [] for what in commands}
        for _ in range(options.repeat):
            for what, command in commands.items():
                found[what].append(run(command))
        medians = {what: statistics.median(row["cpu"] for row in rows) for what, rows in found.items()}
        print(
            f"GPT of {options.layers} layers, {found['analyse for 8 ranks'][0]['nodes']} nodes, medians of {options.repeat}"
        )
        for what, rows in found.items():
            others = {key: value for key, value in rows[0].items() if key not in ("cpu", "clock", "nodes") and value}
            clock = statistics.median(row["clock"] for row in rows)
            print(f"  {what:24} {medians[what]:6.2f} s of CPU, {clock:6.2f} s by the clock   {others}")
        eight, many = medians["analyse for 8 ranks"], medians["analyse for 512 ranks"]
        print(f"  analysing for 512 ranks takes {many / eight:.2f} times 8 ranks (at most 1.4 wanted)")
        written = medians["write for 512 ranks"] / medians["write for 8 ranks"]
        print(f"  compiling and writing for 512 ranks takes {written:.2f} times 8 ranks")
        if jax := medians.get("JAX for 8 devices"):
            print(f"  analysing for 8 ranks takes {eight / jax:.2f} times JAX (at most 0.15 wanted)")
            print(f"  compiling and writing for 8 ranks takes {medians['write for 8 ranks'] / jax:.2f} times JAX")


if __name__ == "__main__":
    main()
