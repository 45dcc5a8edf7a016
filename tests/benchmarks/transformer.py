"""A transformer cut over two MPI ranks against the same network whole, in PyTorch with gloo, and in JAX; one thread a rank.

    python tests/benchmarks/transformer.py --torch-python VENV/bin/python --jax-python VENV/bin/python
    python tests/benchmarks/transformer.py --torch-python "" --jax-python "" --busy 1    beside one busy process, without peers

6 layers of width 512 with 8 heads, batch 4, sequence 128, float32. All sides are measured in one run, in turns, from the call to
the output in hand on rank 0; a peer whose interpreter is not given is left out. Wanted of the medians' ratios: at most 0.55
against the whole model on one onnxruntime thread, 0.40 against PyTorch, 0.95 against JAX.
"""

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from network import Sizes, generate, plan
from turns import Side, busy

HERE = Path(__file__).parent
WANTED = {"whole": 0.55, "torch": 0.40, "jax": 0.95}


def mpi_command(ranks: int, *arguments: str) -> list[str]:
    """The command that starts a script of this interpreter on so many ranks."""
    launcher = Path(sys.executable).parent / "mpiexec"
    return [str(launcher), "--oversubscribe", "-n", str(ranks), sys.executable, *arguments]


ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def available(python: str | None, module: str, option: str) -> bool:
    """Whether an interpreter has a module; says so where it has not, or is not given."""
    if not python:
        print(f"without {module}: no interpreter is given ({option})")
        return False
    try:
        code = subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode
    except OSError as error:
        print(f"without {module}: {python} cannot be started ({error.strerror})")
        return False
    if code:
        print(f"without {module}: {python} has no module '{module}'")
    return code == 0


def torch_side(python: str, folder: Path, options: argparse.Namespace) -> Side:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, str(HERE / "transformer_torch.py"), str(folder)]
    command += ["--layers", str(options.layers), "--heads", str(options.heads)]
    common = {
        "WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    environments = [common | {"RANK": str(rank)} for rank in range(options.ranks)]
    return Side("torch", [command] * options.ranks, environments)


def jax_side(python: str, folder: Path, options: argparse.Namespace) -> Side:
    command = [python, str(HERE / "transformer_jax.py"), str(folder), "--devices", str(options.ranks)]
    return Side("jax", [[*command, "--layers", str(options.layers), "--heads", str(options.heads)]])


def whole_side(folder: Path) -> Side:
    return Side("whole", [[sys.executable, str(Path(__file__)), "--whole", str(folder)]])


def serve_whole(folder: Path) -> None:
    from turns import serve, told

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), settings, providers=["CPUExecutionProvider"])
    x = np.load(folder / "x.npy")
    np.save(folder / "whole.npy", session.run(None, {"x": x})[0])
    serve(lambda: session.run(None, {"x": x}), told())


def compare(folder: Path, sides: list[Side]) -> None:
    whole = np.load(folder / "whole.npy")
    for side in sides:
        if (folder / f"{side.name}.npy").exists() and side.name != "whole":
            difference = np.abs(np.load(folder / f"{side.name}.npy") - whole).max() / np.abs(whole).max()
            print(f"  {side.name:6} differs from the whole model by {difference:.1e} of its largest value")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 512), ("heads", 8), ("batch", 4), ("sequence", 128), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=5, help="of a side in a turn")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0, help="so many processes beside that compute without end")
    parser.add_argument("--torch-python", default=sys.executable if importlib.util.find_spec("torch") else None)
    parser.add_argument("--jax-python", default=sys.executable if importlib.util.find_spec("jax") else None)
    parser.add_argument("--whole", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.whole:
        serve_whole(options.whole)
        return
    with busy(options.busy):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """All sides in turns."""
    from partc.compiler import compile_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = generate(folder, Sizes(options.layers, options.width, options.heads, options.sequence))
        (folder / "plan.yaml").write_text(plan(options.ranks))
        compile_model(model, folder / "plan.yaml", folder / "build")
        x = np.random.default_rng(1).standard_normal((options.batch, options.sequence, options.width), dtype=np.float32)
        np.save(folder / "x.npy", x)
        script = str(HERE / "transformer_partc.py")
        sides = [whole_side(folder), Side("partc", [mpi_command(options.ranks, script, name)], [ROOT])]
        if available(options.torch_python, "torch", "--torch-python"):
            sides.append(torch_side(options.torch_python, folder, options))
        if available(options.jax_python, "jax", "--jax-python"):
            sides.append(jax_side(options.jax_python, folder, options))
        for turn in range(options.turns + 1):
            for side in sides:
                times = side.turn(options.steps)
                side.times += times if turn else []
        print(
            f"{options.layers} layers of width {options.width}, {options.heads} heads, batch {options.batch}, "
            f"sequence {options.sequence}, {options.ranks} ranks on {os.cpu_count()} cores, one thread a rank"
        )
        medians = {side.name: statistics.median(side.times) for side in sides}
        for side in sides:
            ratio = medians["partc"] / medians[side.name]
            wanted = (
                f"   partc / {side.name} = {ratio:.3f} (at most {WANTED[side.name]} wanted)"
                if side.name in WANTED
                else ""
            )
            print(f"  {side.name:6} {1e3 * medians[side.name]:7.2f} ms, fastest {1e3 * min(side.times):7.2f}{wanted}")
        compare(folder, sides)
        for side in sides:
            side.close()
        watched = Side("watched", [mpi_command(options.ranks, script, name, "--shares")], [ROOT])
        watched.turn(options.steps * options.turns)
        print(f"  partc:  {watched.close()}")


if __name__ == "__main__":
    main()
