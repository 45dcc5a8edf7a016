"""Runs an exported graph and its torch module on small inputs, and refuses a graph whose outputs differ from torch's.

Inputs are drawn with a fixed seed: ordinary numbers, zeros, tiny ones (1e-6 to 1e-30) and large ones (1e3), ids from all rows of their
tables. The tolerance of an element is 2e-6 of itself plus 2e-6 of the output's largest element (float32). Beyond it, the effect of rounding
on the graph is allowed, which is measured only where it is needed (`comparison/rounding.py`). On large inputs, elements that are not finite
in torch are not compared.

    model.py:12: the exported graph is not the torch module: on zeros 'y' is 0 at [0, 1], torch has 1e-08
      the first module that differs is 'norm' (RMSNorm), by 1e-08
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from partc.compiler.comparison.compare import Compared, compare, spread
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import DifferentError, Problem
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.torch.graph_sessions import GraphSessions, NotRunError
from partc.compiler.frontend.torch.torch_model import TorchModel, torch_model_of
from partc.compiler.ir.graph import is_inside
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.files.regular import text_of_system
from partc.runtime.units import first_of, size_text

if TYPE_CHECKING:
    import torch

SHARE = {"float16": 1e-2, "float64": 1e-9, "complex128": 1e-9}
"""Maps each dtype to the tolerance of an element, relative to itself and to the largest element; other dtypes have 2e-6."""
_SHARE = 2e-6
_KINDS = ("ordinary numbers", "zeros", "tiny numbers", "large numbers")
_DRAWS = 3
_CHOOSING = ("TopK", "ArgMax", "ArgMin", "Hardmax", "Unique")
"""Ops that choose among equal elements, each library in its own way: of zeros all are equal."""
_LOSING = ("Elu", "Selu", "Celu")
"""Ops whose kernels subtract 1 from exp(x), which loses tiny numbers (the guide's table lists them)."""
_COPIES = 5
"""The most copies of the weights in memory: torch's, onnxruntime's, its copies with rounding, transposed ones, intermediate values."""
_HELP = "--no-compare compiles it as it is; torch's numbers are not to be expected of it"


def compare_with_torch(model: ir.Model) -> list[str]:
    """Compares a graph with the module that it was exported from. Returns lines that name the parts that were not compared.

    Raises DifferentError where an output differs from torch's.
    """
    torch_model = torch_model_of(model)
    return [] if torch_model is None else compare_graph(model, torch_model)


def compare_graph(model: ir.Model, torch_model: TorchModel, what: str = "the exported graph") -> list[str]:
    """Compares any graph with the module's inputs and outputs, as `compare_with_torch` does; `what` names the graph in messages."""
    needed = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    if needed > (free := free_memory()) / _COPIES:
        return [
            f"{what} is not compared with torch: {size_text(needed)} of weights are more than a fifth of {size_text(free)}"
        ]
    if any(is_inside(node) for node in model.graph):
        return [f"{what} is not compared with torch: it has local maps, which are defined only on the mesh of a plan"]
    graph = GraphSessions(model)
    names = [name for name in torch_model.outputs if name not in graph.drawn]
    notes = [f"{first_of(graph.drawn)} of {what} is drawn, and not compared with torch"] if graph.drawn else []
    if not names:
        return notes
    if why := graph.refused():
        return [*notes, f"{what} is not compared with torch: onnxruntime does not load it: {why}"]
    kinds = list[str]()
    for kind, values, want in _cases(graph, torch_model):
        kinds.append(kind)
        if kind == _KINDS[2] and graph.has(_LOSING):
            continue
        if (
            kind == _KINDS[1]
            and graph.has(_CHOOSING)
            and any(one.any() for one in values.values() if one.dtype.kind == "f")
        ):
            continue
        try:
            rows = _compared(graph, kind, names, values, want)
        except NotRunError as error:
            shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in values.items())
            fact = f"{what} does not run on {shapes}, as the torch module does: {error}"
            raise DifferentError(Problem(torch_model.where, fact, help=_HELP)) from error
        failed = next((row for row in rows if not row.passed), None)
        if failed is not None:
            raise DifferentError(_problem(graph, torch_model, what, kind, values, want, failed))
    return (
        notes
        if kinds
        else [*notes, f"{what} is not compared with torch: forward takes none of the inputs that are drawn"]
    )


def _compared(
    graph: GraphSessions, kind: str, names: Sequence[str], values: Mapping[str, Array], torchs: Mapping[str, Array]
) -> list[Compared]:
    """Returns one comparison for each output; rounding is measured only where an output is not close."""
    want = {name: torchs[name] for name in names if name in torchs}
    if kind != _KINDS[0]:
        want = {name: array for name, array in want.items() if array.dtype.kind in "fc"}
    have = graph.run(values, [*want])
    if kind == _KINDS[3]:
        want = {name: _finite(array, have[name]) for name, array in want.items()}
    rows = _rows(want, have, None)
    if all(row.passed for row in rows):
        return rows
    others = [graph.run(values, [*want], seed + 1) for seed in range(_DRAWS)]
    return _rows(want, have, spread(have, others))


def _rows(want: Mapping[str, Array], have: Mapping[str, Array], noise: Mapping[str, Array] | None) -> list[Compared]:
    rows = list[Compared]()
    for name, array in want.items():
        share = SHARE.get(array.dtype.name, _SHARE)
        finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind in "fc" else np.zeros(0)
        close = share * float(finite.max(initial=0.0))
        rows += compare({name: array}, {name: have[name]}, share, close, noise)
    return rows


def _finite(want: Array, have: Array) -> Array:
    """Returns torch's array, with the graph's numbers where torch's are not finite."""
    if want.shape != have.shape or want.dtype.kind not in "fc":
        return want
    return np.where(np.isfinite(want), want, have)


def _problem(
    graph: GraphSessions,
    torch_model: TorchModel,
    what: str,
    kind: str,
    values: Mapping[str, Array],
    want: Mapping[str, Array],
    failed: Compared,
) -> Problem:
    if not failed.absolute_at and failed.shape:
        fact = f"'{failed.name}' has {failed.result}, torch has {failed.dtype} {list(failed.shape)}"
    else:
        have = graph.run(values, [failed.name])[failed.name]
        at = _worst(want[failed.name], have)
        fact = f"on {kind} '{failed.name}' is {have[at]:.7g} at {list(at)}, torch has {want[failed.name][at]:.7g}"
    law = _first_module(graph, torch_model, values)
    return Problem(torch_model.where, f"{what} is not the torch module: {fact}", law, _HELP)


def _worst(want: Array, have: Array) -> tuple[int, ...]:
    """Returns the index of the element with the largest error relative to its tolerance."""
    with np.errstate(all="ignore"):
        error = np.where((want == have) | (np.isnan(want) & np.isnan(have)), 0.0, np.abs(have.astype(float) - want))
        size = np.where(np.isfinite(want), np.abs(want), 0.0).astype(float)
        ratio = np.where(error == 0, 0.0, error / (size + size.max(initial=0.0) + np.finfo(float).tiny))
    place = np.argmax(np.where(np.isnan(ratio), np.inf, ratio))
    return tuple(int(axis) for axis in np.unravel_index(place, want.shape))


def _first_module(graph: GraphSessions, torch_model: TorchModel, values: Mapping[str, Array]) -> str:
    """Returns a sentence that names the first module whose output differs; empty where there is none."""
    calls: dict[str, list[tuple[torch.nn.Module, list[Array]]]] = {}

    def seen(path: str, module: torch.nn.Module, made: list[torch.Tensor]) -> None:
        calls.setdefault(path, []).append((module, [one.cpu().numpy() for one in made]))

    torch_model.run(values, seen)
    exported = graph.outputs_by_module()
    wanted = {
        name: (path, array)
        for path, made in calls.items()
        if path and len(made) == 1
        for array in made[0][1]
        if len(fitting := [name for name, rank in exported.get(path, ()) if rank == array.ndim]) == 1
        for name in fitting
    }
    have = graph.run(values, [*wanted])
    others = [graph.run(values, [*wanted], seed + 1) for seed in range(_DRAWS)]
    noise = spread(have, others)
    for name, (path, array) in wanted.items():
        row = _rows({name: array}, have, noise)[0]
        if not row.passed and array.shape == have[name].shape:
            kind = type(calls[path][0][0]).__name__
            return f"the first module that differs is '{path}' ({kind}), by {row.absolute:.3g}"
    return ""


def _cases(graph: GraphSessions, torch_model: TorchModel) -> Iterator[tuple[str, dict[str, Array], dict[str, Array]]]:
    """Yields each kind of inputs with the inputs and torch's outputs for them.

    Where torch does not run on the small sizes, the inputs have the sizes of the export.
    """
    small = _small_sizes(torch_model)
    numbers = any(spec.dtype.is_floating_point() for spec in torch_model.inputs)
    rows = {spec.name: graph.rows(spec.name) for spec in torch_model.inputs}
    attempts: list[tuple[Mapping[str, int], Mapping[str, int | None]]]
    attempts = [(small, rows), (torch_model.sizes, rows), (torch_model.sizes, dict.fromkeys(rows, 1))]
    for kind in _KINDS if numbers else _KINDS[:2]:
        for sizes, below in attempts:
            values = {spec.name: _drawn(spec, sizes, kind, below[spec.name]) for spec in torch_model.inputs}
            try:
                want = torch_model.run(values)
            except Exception:  # a module may raise anything for sizes or values that it rejects
                continue
            yield kind, values, want
            break


def _small_sizes(torch_model: TorchModel) -> dict[str, int]:
    """Returns legal sizes for the dynamic dims, other than the export's sizes and all different where possible."""
    sizes: dict[str, int] = {}
    for spec in torch_model.inputs:
        for axis, dim in enumerate(spec.dims):
            if isinstance(dim, str) and dim not in sizes:
                symbol = torch_model.symbols.get(dim, Symbol())
                last = symbol.max or 1 << 30
                legal = [size for k in range(16) if (size := symbol.smallest + k * symbol.divisor) <= last]
                least, used = (2 if axis == 0 else 5), {*sizes.values(), torch_model.sizes[dim]}
                fitting = [size for size in legal if size >= least and size not in used]
                sizes[dim] = fitting[0] if fitting else legal[-1]
    return sizes


def _drawn(spec: Spec, sizes: Mapping[str, int], kind: str, rows: int | None) -> Array:
    """Draws numbers of a kind for an input, the same in every run.

    Integers that index no table look like a mask: the first half along the last dim is 1.
    """
    rng = np.random.default_rng([_KINDS.index(kind), *spec.name.encode()])
    shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims)
    dtype = spec.dtype.numpy()
    if not spec.dtype.is_floating_point():
        if rows is not None:
            ids = rng.integers(0, rows, shape) if kind == _KINDS[0] else np.zeros(shape, np.int64)
            ids.reshape(-1)[-1:] = 0
            return ids.astype(dtype)
        bits = np.asarray(rng.integers(0, 2, shape))
        if shape:
            bits[..., : (shape[-1] + 1) // 2] = 1
        return bits.astype(dtype)
    numbers = rng.standard_normal(shape)
    match _KINDS.index(kind):
        case 1:
            numbers = np.zeros(shape)
        case 2:
            smallest = -4.0 if dtype.itemsize < 4 else -30.0
            records = shape[0] if len(shape) > 1 else 1
            exponents = np.linspace(-6.0 if dtype.itemsize > 2 else -2.0, smallest, max(records, 2))[:records]
            numbers = numbers * (10.0**exponents).reshape(-1, *[1] * (len(shape) - 1))
        case 3:
            numbers = numbers * (1e3 if dtype.itemsize > 2 else 10.0)
    return numbers.astype(dtype)


def free_memory() -> int:
    """Returns the bytes of available memory."""
    lines = dict(line.split(":", 1) for line in text_of_system("/proc/meminfo").splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else 1 << 62
