"""Compiles a generated model with gigabytes of weights, against a plain copy of its weights file.

    python tests/benchmarks/compile_large.py [--gigabytes 4] [--ranks 4] [--repeat 3]

Prints the medians, their ratio (at most 2.0 wanted) and the compile's peak private memory, RssAnon (at most 700 MB wanted).
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

WIDTH = 4096


def generate(folder: Path, gigabytes: float) -> int:
    """A stack of MatMul and Relu of width 4096 with its weights in one external file; gives the number of layers."""
    layers = max(1, round(gigabytes * (1 << 30) / (WIDTH * WIDTH * 4)))
    nodes, weights = [], []
    block = np.random.default_rng(0).standard_normal(WIDTH * WIDTH, dtype=np.float32)
    with (folder / "model.data").open("wb") as data:
        for k in range(layers):
            block[0] = k
            tensor = onnx.TensorProto(
                name=f"w{k}", data_type=1, dims=[WIDTH, WIDTH], data_location=onnx.TensorProto.EXTERNAL
            )
            for key, text in (("location", "model.data"), ("offset", str(data.tell())), ("length", str(block.nbytes))):
                tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=text))
            data.write(block.data)
            weights.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"h{k}", f"w{k}"], [f"m{k}"], name=f"matmul{k}"))
            nodes.append(helper.make_node("Relu", [f"m{k}"], [f"h{k + 1}"], name=f"relu{k}"))
    x = helper.make_tensor_value_info("h0", 1, ["batch", WIDTH])
    y = helper.make_tensor_value_info(f"h{layers}", 1, ["batch", WIDTH])
    graph = helper.make_graph(nodes, "large", [x], [y], weights)
    onnx.save(
        helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 21)]), folder / "model.onnx"
    )
    return layers


def plan_text(layers: int, ranks: int) -> str:
    """Layers in equal runs over the ranks."""
    lines = [f"ranks: {ranks}", "placement:"]
    for rank in range(ranks):
        first, last = rank * layers // ranks, (rank + 1) * layers // ranks - 1
        lines += [f'  "matmul[{first}-{last}]": {rank}', f'  "relu[{first}-{last}]": {rank}']
    return "\n".join(lines) + "\n"


def run_watched(command: list[str]) -> tuple[float, float]:
    """Seconds and peak RssAnon in MB of a command."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0.0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.01):
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            for line in text.splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) / 1024)

    thread = threading.Thread(target=watch)
    thread.start()
    code = process.wait()
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    if code:
        raise SystemExit(f"{' '.join(command)} failed with {code}")
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work; a temporary folder otherwise")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        layers = generate(folder, options.gigabytes)
        (folder / "plan.yaml").write_text(plan_text(layers, options.ranks))
        partc = [
            sys.executable,
            "-m",
            "partc.cli",
            "compile",
            str(folder / "model.onnx"),
            "--plan",
            str(folder / "plan.yaml"),
            "-o",
            str(folder / "build"),
        ]
        copies, compiles, peaks = [], [], []
        for _ in range(options.repeat):
            start = time.perf_counter()
            shutil.copyfile(folder / "model.data", folder / "copy.data")
            copies.append(time.perf_counter() - start)
            (folder / "copy.data").unlink()
            shutil.rmtree(folder / "build", ignore_errors=True)
            seconds, peak = run_watched(partc)
            compiles.append(seconds)
            peaks.append(peak)
        size = (folder / "model.data").stat().st_size / (1 << 30)
        copy, compiled = statistics.median(copies), statistics.median(compiles)
        print(f"weights {size:.2f} GiB, {layers} layers over {options.ranks} ranks, medians of {options.repeat}")
        print(f"copy {copy:.2f} s, compile {compiled:.2f} s, ratio {compiled / copy:.2f} (at most 2.0 wanted)")
        print(f"peak RssAnon of the compile {max(peaks):.0f} MB (at most 700 wanted)")


if __name__ == "__main__":
    main()
