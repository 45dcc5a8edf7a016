"""Models of Hugging Face as torch exports them, cut over two ranks: collectives against the ideal, results against the model.

    python tests/benchmarks/exported_models.py --cache FOLDER [--models llama,gpt2] [--opsets 18,21,23] [--train]

Needs torch and transformers; nothing is fetched, weights are random. Every model of `exported_zoo.py` is exported by
`torch.onnx.export` at each opset, with static and with dynamic batch and sequence, compiled with its tensor-parallel plan, and run
on ranks in this process. Exports are kept in the cache. With `--train`, two steps of gradient descent from the `.onnx` file are
compared with torch's: the losses, and all parameters that have torch's names.
"""

import argparse
import collections
import contextlib
import io
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exported_zoo import ZOO, Case

RANKS = 2


def export(name: str, opset: int, dynamic: bool, cache: Path) -> tuple[Path, Case]:
    """The exported file, made if the cache has none, and its case."""
    torch.manual_seed(0)
    case = ZOO[name]()
    case.module.eval()
    with torch.no_grad():
        for parameter in case.module.parameters():  # exporters merge weights that are equal: zero biases, scales of one
            parameter += 0.02 * torch.randn(parameter.shape)
    path = cache / f"{name}-{opset}-{'dynamic' if dynamic else 'static'}.onnx"
    if not path.exists():
        with _quiet():
            torch.onnx.export(
                case.module,
                (),
                str(path),
                kwargs=case.inputs,
                dynamic_shapes=case.dynamic if dynamic else None,
                output_names=case.outputs,
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    return path, case


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def plan_of(case: Case, dynamic: bool, train: str = "") -> str:
    symbols = f"symbols: {{{case.symbols}}}\n" if dynamic and case.symbols else ""
    return f"ranks: {RANKS}\n{symbols}{case.arrives}sharding:\n{case.sharding}{train}"


def compile_and_compare(path: Path, case: Case, dynamic: bool) -> tuple[str, str]:
    """The collectives, and whether the results are the model's."""
    from partc.compiler import compile_model
    from partc.runtime import load_local

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.yaml").write_text(plan_of(case, dynamic))
        report = compile_model(path, folder / "plan.yaml", folder / "build")
        counts = collections.Counter(event.op_type for event in report.program.events)
        inputs = {port.name: case.inputs[port.name].numpy() for port in report.manifest.inputs}
        with load_local(report.out) as program:
            have = program(inputs)
    want, note = reference(path, case, inputs, [port.name for port in report.manifest.outputs])
    error = max(float(np.abs(np.asarray(have[key]) - value).max()) for key, value in want.items())
    return ", ".join(f"{count} {op}" for op, count in sorted(counts.items())), f"{error:.1e}{note}"


def reference(path: Path, case: Case, inputs: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], str]:
    """What onnxruntime makes of the whole file; where it refuses that, what torch makes of the module."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    try:
        return dict(zip(names, session.run(names, inputs), strict=True)), ""
    except Exception:
        made = case.module(**case.inputs)
        tensors = made if isinstance(made, tuple) else (made,)
        want = {name: tensor.detach().numpy() for name, tensor in zip(case.outputs, tensors, strict=True)}
        return want, " (of torch: onnxruntime refuses the whole file)"


_TRAIN = """\
train:
  loss: {{type: softmax_cross_entropy, logits: {logits}, labels: labels}}
  optimizer: {{type: sgd, lr: 0.1}}
"""


def train_and_compare(path: Path, case: Case, dynamic: bool) -> str:
    """Two steps from the file against two of torch: the largest difference of losses and of parameters."""
    from partc.runtime.checkpoint.checkpoint import Checkpoint

    logits = case.module(**case.inputs)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(2))
    names = parameters_in(path, case.module)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.yaml").write_text(plan_of(case, dynamic, _TRAIN.format(logits=case.outputs[0])))
        batch = {key: value.numpy() for key, value in case.inputs.items()} | {"labels": labels.numpy()}
        np.savez(folder / "data.npz", **batch)
        _partc("compile", path, "--plan", folder / "plan.yaml", "-o", folder / "build")
        told = ("--metrics", folder / "told.jsonl", "--log", 1, "--checkpoint", folder / "kept", "--save", 2)
        size = ("--batch", len(labels), "--steps", 2)
        _partc("train", folder / "build", "--data", folder / "data.npz", *size, *told, "--in-process")
        rows = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
        have = [row["loss"] for row in rows if "loss" in row]
        checkpoint = Checkpoint.open(folder / "kept")
        trained = {name: checkpoint.read(name) for name in checkpoint.index.tensors}
    optimizer = torch.optim.SGD(case.module.parameters(), lr=0.1)
    want = []
    for _ in range(2):
        made = case.module(**case.inputs)
        loss = torch.nn.functional.cross_entropy(made.reshape(-1, made.shape[-1]), labels.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    parameters = dict(case.module.named_parameters())
    worst, held = 0.0, 0
    for name, (own, turned) in names.items():
        if name in trained:
            tensor = parameters[own].detach().numpy()
            worst = max(worst, float(np.abs(trained[name] - (tensor.T if turned else tensor)).max()))
            held += 1
    losses = max(abs(one - other) for one, other in zip(have, want, strict=True))
    return f"loss {losses:.1e}, {held} of {len(parameters)} parameters {worst:.1e}"


def parameters_in(path: Path, module: torch.nn.Module) -> dict[str, tuple[str, bool]]:
    """By weight of the file the parameter that it is, and whether it is transposed; by its name, else by its numbers."""
    import onnx
    from onnx import numpy_helper

    parameters = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    found: dict[str, tuple[str, bool]] = {}
    for weight in onnx.load(path).graph.initializer:
        array = numpy_helper.to_array(weight)
        for name, tensor in parameters.items():
            if weight.name == name and array.shape == tensor.shape:
                found[weight.name] = (name, False)
            elif weight.name not in parameters and array.ndim == 2 and np.array_equal(array, tensor.T):
                found[weight.name] = (name, True)
    return found


def _partc(*words: object) -> None:
    done = subprocess.run([sys.executable, "-m", "partc.cli", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--opsets", default="18,21,23")
    parser.add_argument("--sizes", default="static,dynamic")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print refusals whole")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    print(f"{'model':12} {'opset':>5} {'sizes':8} {'ideal':>5}  collectives; largest error")
    for name in options.models.split(","):
        for opset in map(int, options.opsets.split(",")):
            for sizes in options.sizes.split(","):
                start = time.perf_counter()
                try:
                    path, case = export(name, opset, sizes == "dynamic", options.cache)
                except Exception as error:
                    print(f"{name:12} {opset:5} {sizes:8}        export: {str(error).splitlines()[0][:100]}")
                    continue
                try:
                    if options.train:
                        found = train_and_compare(path, case, sizes == "dynamic") if case.trains else "-"
                    else:
                        found = "; ".join(compile_and_compare(path, case, sizes == "dynamic"))
                except Exception as error:
                    lines = str(error).splitlines() or [type(error).__name__]
                    found = f"{type(error).__name__}: " + ("\n".join(lines) if options.verbose else lines[0][:200])
                print(
                    f"{name:12} {opset:5} {sizes:8} {case.ideal:5}  {found}  [{time.perf_counter() - start:.0f} s]",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(main())
