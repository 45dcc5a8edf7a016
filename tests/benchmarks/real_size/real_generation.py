"""Tokens, loading and memory at real size: partc against transformers, llama.cpp and onnxruntime-genai.

    python tests/benchmarks/real_size/real_generation.py [--shape middle] [--files FOLDER] [--peers-python VENV/bin/python]
        [--sides partc_int4,llama,genai] [--turns 5] [--tokens]

Makes a Llama with random weights (`1b`: the shape of Llama-3.2-1B) as bfloat16, compiles it for 8 slots in float32 and in four bits, and
makes the peers' files, all of which stay in FOLDER. Each side is a process of one thread; they take turns. Printed are medians of CPU
milliseconds, of memory and disk MiB, and ratios: float32 to transformers, four bits to llama.cpp and genai. `--tokens` compares 100
tokens of 8 prompts in float32 with those of transformers. The peers' interpreter has `onnxruntime-genai xllamacpp gguf` and may lack torch,
since this one makes their files with the peers' packages; a side that it lacks is left out. The sides of 1b need 6 GB each in float32, 2
in four bits: choose them by `--sides`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from real_models import SHAPES  # noqa: E402
from real_side import LENGTH, MEASURES, SLOTS  # noqa: E402
from transformer import available  # noqa: E402
from turns import Side  # noqa: E402

PEERS = {"transformers": "transformers", "llama": "xllamacpp, gguf", "genai": "onnxruntime_genai"}
"""Modules of each peer."""
AGAINST = {"partc": ["transformers"], "partc_int4": ["llama", "genai"]}


def made(target: Path, *command: str, packages: str = "") -> Path:
    """A file or folder that a command makes, unless it is there; `packages`: a folder of packages that it reads first."""
    if not target.exists():
        environment = {**os.environ, "PYTHONPATH": packages} if packages else None
        subprocess.run([*command, str(target)], check=True, stdout=subprocess.DEVNULL, env=environment)
    return target


def packages_of(python: str) -> str:
    """The folder of an interpreter's packages; "" of this one's."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = python == sys.executable
    return (
        "" if own else subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


def files_of(name: str, shape: str, files: Path, peers: str) -> Path:
    """The model of a side."""
    models = str(HERE / "real_models.py")
    folder = made(files / shape, sys.executable, models, "folder", shape)
    if name in ("llama", "genai"):
        kind = "gguf" if name == "llama" else name
        made_by = [sys.executable, models, kind, str(folder)]
        return made(files / f"{shape}.{kind}", *made_by, packages=packages_of(peers))
    if name == "transformers":
        return folder
    partc = [sys.executable, "-m", "partc.cli"]
    bits = ["--quantize", "4"] if name == "partc_int4" else []
    options = ["--generate", str(LENGTH), "--slots", str(SLOTS), *bits, "-q", "--no-compare", "-o"]
    plan = made(files / f"{shape}.{name}.yaml", *partc, "plan", str(folder), *options)
    return made(files / f"{shape}.{name}", *partc, "compile", str(folder), "--plan", str(plan), *options[-3:])


def bytes_of(model: Path) -> int:
    return sum(file.stat().st_size for file in ([model] if model.is_file() else model.rglob("*")) if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="middle")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-real-size")
    parser.add_argument("--sides", default=",".join([*AGAINST, *PEERS]))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", action="store_true", help="compare tokens of float32")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter with the peers")
    options = parser.parse_args()
    options.files.mkdir(parents=True, exist_ok=True)
    sides, rows = dict[str, Side](), dict[str, dict[str, float]]()
    for name in options.sides.split(","):
        peer = name in PEERS
        if peer and not available(options.peers_python, PEERS[name], "--peers-python"):
            continue
        python = options.peers_python if peer else sys.executable
        model = files_of(name, options.shape, options.files, options.peers_python)
        loads = []
        for _ in range(options.turns):
            sides[name] = Side(name, [[python, str(HERE / "real_side.py"), name.partition("_")[0], str(model)]])
            loads += sides[name].last
            if len(loads) < options.turns:
                sides[name].close()
        rows[name] = {"load": 1e3 * statistics.median(loads), "disk": bytes_of(model) / 2**20}
    for side in sides.values():
        side.turn(len(MEASURES) + 1)
    for number, measure in enumerate(MEASURES):
        times = {name: list[float]() for name in sides}
        for turn in range(options.turns + 1):
            for name, side in sides.items():
                times[name] += side.turn(number) if turn else side.turn(number)[:0]
        for name, found in times.items():
            rows[name][measure] = 1e3 * statistics.median(found)
    for name, side in sides.items():
        rows[name]["memory"] = side.turn(len(MEASURES))[0] / 2**20
    print(f"{options.shape}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; CPU ms, MiB")
    pairs = [(ours, peer) for ours, peers in AGAINST.items() for peer in peers if {ours, peer} <= rows.keys()]
    print(f"{'':14}" + "".join(f"{name:>14}" for name in rows) + "".join(f"  {ours} / {peer}" for ours, peer in pairs))
    for measure in ("load", *MEASURES, "memory", "disk"):
        ratios = [f"{rows[ours][measure] / rows[peer][measure]:{len(ours + peer) + 5}.2f}" for ours, peer in pairs]
        print(f"{measure:14}" + "".join(f"{row[measure]:14.1f}" for row in rows.values()) + "".join(ratios))
    if options.tokens:
        ours, theirs = (sides[name].turn(len(MEASURES) + 2) for name in ("partc", "transformers"))
        print(
            f"tokens: {sum(map(float.__eq__, map(float, ours), map(float, theirs)))} of {len(theirs)} are transformers'"
        )
    for side in sides.values():
        side.close()


if __name__ == "__main__":
    main()
