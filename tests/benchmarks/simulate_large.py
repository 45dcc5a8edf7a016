"""A 48-layer GPT compiled for 4,096 ranks and simulated: CPU seconds, the largest memory, and what the artifact has beside its weights.

    python tests/benchmarks/simulate_large.py [--layers 48] [--width 256] [--dp 512] [--tp 8]

Each part runs in a process of its own. Wanted: the artifact takes at most what its weights take, and a tenth more; the simulation takes
less than the compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from network import Sizes, generate, plan
from partc.compiler.cost.machine import Curve, Link, Machine, Processor

HERE = Path(__file__).parent
MIB = 1 << 20


def cluster() -> Machine:
    """A device for each rank, and links of 100 GB/s."""

    def curve(speed: float, least: float) -> Curve:
        return Curve(((1e3, least), (1e12, least + 1e12 / speed)))

    processor = Processor(20e-6, 200e-6, {"matmul": curve(5e13, 2e-6)}, {"elementwise": curve(1e12, 2e-6)})
    link = Link("default", 2, 1, 1.0, 2e-6, curve(1e11, 5e-6), curve(1e11, 1e-5))
    return Machine("", 0, {"cpu": processor}, [link])


def compiled(folder: Path) -> dict[str, float]:
    """Compiles what lies in the folder."""
    from partc.compiler.pipeline import compile_model

    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return {}


def played(folder: Path) -> dict[str, float]:
    """Simulates the artifact in the folder."""
    from partc.compiler.cost.step import simulated
    from partc.runtime import open_artifact
    from partc.runtime.artifact.legal_sizes import typical_sizes

    artifact = open_artifact(folder / "build", trust=True)
    found = simulated(artifact, cluster(), {"batch": typical_sizes(artifact.manifest)["batch"]})
    return {"step": found.played.seconds, "classes": len(found.played.classes), "files": len(found.files)}


def part(folder: Path, name: str) -> dict[str, float]:
    """What a part says, run in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--part", str(folder), name], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def bytes_of(folder: Path) -> int:
    """The bytes of all files in a folder, links left out."""
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file() and not one.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("layers", 48), ("width", 256), ("heads", 16), ("sequence", 64), ("vocabulary", 1024))
    for name, default in (*sizes, ("dp", 512), ("tp", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        begun = time.process_time(), time.perf_counter()
        found = {"compile": compiled, "simulate": played}[options.part[1]](Path(options.part[0]))
        cpu, clock = time.process_time() - begun[0], time.perf_counter() - begun[1]
        status = Path("/proc/self/status").read_text()
        peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])  # getrusage's has the most of who started this, too
        print(json.dumps({"cpu": cpu, "clock": clock, "peak": peak, **found}))
        return
    ranks = options.dp * options.tp
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, Sizes(*(getattr(options, one) for one, _ in sizes)))
        text = plan(ranks, f"dp: {options.dp}, tp: {options.tp}", head=True) + 'outputs: {"**": cut}\n'
        text = text.replace("divisor: 64", f"divisor: {options.dp}")
        (folder / "plan.yaml").write_text(text)
        model = bytes_of(folder)
        print(f"a GPT of {options.layers} layers for {ranks:,} ranks, {os.cpu_count()} cores", flush=True)
        for what in ("compile", "simulate"):
            row = part(folder, what)
            more = {key: round(value, 4) for key, value in row.items() if key not in ("cpu", "clock", "peak")} or ""
            print(
                f"  {what:9} {row['cpu']:6.2f} s of CPU, {row['clock']:6.2f} s by the clock, {row['peak'] / MIB:,.0f} MiB {more}",
                flush=True,
            )
        built = bytes_of(folder / "build")
        print(
            f"  model {model / MIB:.1f} MiB, artifact {built / MIB:.1f} MiB, {built / model:.2f} of it; load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
