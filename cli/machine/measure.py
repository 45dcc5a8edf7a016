"""`partc measure`: starts ranks on this machine that measure it together, and writes the machine file."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from partc.cli.machine.job import result_of_module
from partc.cli.machine.ranks import REQUEST, TINY
from partc.cli.output import console
from partc.compiler.cost.machine import Curve, Link, Machine, Processor
from partc.compiler.cost.machine_file import machine_text
from partc.compiler.cost.step import chosen_sizes
from partc.runtime.artifact.format import ALL_REDUCE, CPU
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.errors import UsageError
from partc.runtime.files.replace import refuse_other, write_text
from partc.runtime.job.machine import usable_cores
from partc.runtime.units import count, seconds, size_text

_BUSY = 0.5
"""The load of a core from which on the measurements are disturbed by other processes."""
_TINY_MODEL = """<ir_version: 10, opset_import: ["" : 21]>
tiny (float[batch, 4] x) => (float[batch, 3] y) <float[4, 3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2}> {
    [product] y = MatMul (x, w)
}"""
_TINY_PLAN = """ranks: 1
train: {loss: {type: softmax_cross_entropy, logits: y, labels: label}, optimizer: {type: sgd, lr: 0.01}}
"""


def measure(
    out: Path, ranks: int, threads: int | None, mesh: Mapping[str, int], of: Sequence[Path], sizes: Mapping[str, int]
) -> int:
    """Measures with `ranks` ranks over each axis of a mesh, and with the segments of artifacts; writes the machine file.

    Returns the exit code.
    """
    refuse_other(out)
    if not out.parent.is_dir():
        raise UsageError(f"{out}: the folder {out.parent} does not exist")
    if mesh and math.prod(mesh.values()) != ranks:
        shown = ",".join(f"{name}={size}" for name, size in mesh.items())
        raise UsageError(f"--mesh {shown}: has {math.prod(mesh.values())} ranks, and -n says {ranks}")
    links = links_of(ranks, mesh)
    load = os.getloadavg()[0]
    artifacts = [
        {"folder": str(folder.absolute()), "sizes": chosen_sizes(open_artifact(folder, trust=True), sizes, partly=True)}
        for folder in of
    ]
    with tempfile.TemporaryDirectory(prefix="partc-measure-") as name:
        folder = Path(name)
        _compile_tiny(folder)
        found = _run(folder, ranks, {"threads": threads, "links": links, "artifacts": artifacts})
        own = {"threads": found["threads"], "links": [], "artifacts": []}  # a rank alone would use all cores
        alone = _run(folder, 1, own) if found["ranks"] > 1 else None
    machine = _machine(out, found, alone, links)
    write_text(out, machine_text(machine))
    link, product = machine.links[0], machine.processors[CPU].products["matmul"].points[-1]
    speed = product[0] / product[1] / 1e9
    console.echo(
        f"wrote {out}: {count(ranks, 'rank')} on {count(machine.cores, 'core')}, products of {speed:.3g} GFLOP/s a rank, "
        f"an AllReduce of {size_text(link.all_reduce.points[-1][0])} in {seconds(link.all_reduce.points[-1][1])}"
        + (f", {count(len(machine.segments), 'segment')}" if machine.segments else "")
    )
    if load > _BUSY * machine.cores:
        text = f"warning: other processes had the cores, too (load {load:.1f}): measure again when nothing else runs"
        console.echo(text, err=True)
    return 0


def links_of(ranks: int, mesh: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the lists of ranks along each axis of the mesh, whose last axis varies fastest; without a mesh one list of all."""
    if not mesh:
        return [{"name": "default", "stride": 1, "lists": [list(range(ranks))]}]
    links, stride = list[dict[str, Any]](), ranks
    for name, size in mesh.items():
        stride //= size
        firsts = [rank for rank in range(ranks) if rank // stride % size == 0]
        lists = [[first + k * stride for k in range(size)] for first in firsts]
        if size > 1:
            links.append({"name": name, "stride": stride, "lists": lists})
    return links[::-1]


def _compile_tiny(folder: Path) -> None:
    """Compiles a training of one rank whose steps do almost no work, to measure the overhead of a step without communication."""
    import onnx
    from partc.compiler.pipeline import compile_model

    onnx.save(onnx.parser.parse_model(_TINY_MODEL), folder / "tiny.onnx")
    (folder / "plan.yaml").write_text(_TINY_PLAN)
    compile_model(folder / "tiny.onnx", folder / "plan.yaml", folder / TINY)


def _run(folder: Path, ranks: int, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the ranks' results for a request."""
    (folder / REQUEST).write_text(json.dumps(request))
    return result_of_module("partc.cli.machine.ranks", folder, ranks)


def _machine(
    out: Path, measured: dict[str, Any], alone: dict[str, Any] | None, links: Sequence[dict[str, Any]]
) -> Machine:
    """Returns the machine from the ranks' results over these links, and from one rank's results alone (None without them)."""
    processor = _processor(measured)
    if alone is not None:
        processor = replace(processor, alone=_processor(_least(alone, measured)), ranks=measured["ranks"])
    connections = [
        Link(
            asked["name"],
            len(asked["lists"][0]),
            asked["stride"],
            one["overlap"],
            one["wake"],
            _curve(one["send"]),
            _curve(one["collectives"][ALL_REDUCE]),
            {op: _curve(points) for op, points in one["collectives"].items() if op != ALL_REDUCE},
        )
        for asked, one in zip(links, measured["links"], strict=True)
    ]
    cores = min(len(usable_cores()), os.cpu_count() or 1)
    return Machine(str(out), cores, {CPU: processor}, connections, measured["segments"])


def _processor(found: dict[str, Any]) -> Processor:
    products, kernels = ({name: _curve(one) for name, one in found[key].items()} for key in ("products", "kernels"))
    return Processor(found["session"], found["step"], products, kernels)


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return Curve(tuple((amount, time) for amount, time in points))


def _least(alone: Any, together: Any) -> Any:
    """Returns one rank's results, each limited to the result of all ranks together: a longer time alone is a disturbance."""
    if isinstance(alone, dict):
        return {key: _least(one, together[key]) for key, one in alone.items()}
    if isinstance(alone, list):
        return [_least(*pair) for pair in zip(alone, together, strict=False)]
    return min(alone, together)
