"""Finds the first value inside of a compiled model that differs from the unsharded model, and its rank.

Both artifacts are copied with one more output for each value that a node makes and that is a shard of a value of the model, and run once.
Then the values are compared in the order of the unsharded program; partial values are skipped, but the values that they are reduced to are
compared. The effect of rounding on the unsharded model is measured on the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto, helper
from partc.cli.comparison.variant import variant
from partc.compiler.comparison.compare import compare, spread
from partc.compiler.comparison.rounding import perturb
from partc.compiler.ir.graph import FOLDED
from partc.compiler.ir.program import Complete
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.rewrite.fold import in_folded_order
from partc.runtime.artifact.format import TARGET, Manifest, Port
from partc.runtime.artifact.graph.onnx_graph import path_of
from partc.runtime.artifact.graph.targets import output_target, target_of
from partc.runtime.artifact.tensors.dtypes import Array, type_text

Arrays: TypeAlias = dict[str, Array]

_DRAWS = 3
_SHARE = {"float16": 1e-2, "float64": 1e-9}


@dataclass(frozen=True)
class Compiled:
    """A compiled program and its artifact, with the device that each target runs on."""

    program: Complete
    folder: Path
    devices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seen:
    """A value of the model on a rank, with the name of the output that shows it."""

    output: str
    value: str
    rank: int
    copy: ShardedValue


@dataclass
class _Look:
    """The values of an artifact that are shown, and for each value the node that makes it."""

    seen: list[_Seen] = field(default_factory=list)
    makers: dict[str, str] = field(default_factory=dict)


def first_difference(
    whole: Compiled, compiled: Compiled, inputs: Mapping[str, Any], scratch: Path, noisy: bool = True
) -> str:
    """Returns a line that names the first value that differs, its maker and the rank; empty where none does.

    `inputs` are the inputs of one step, with its scalars.
    """
    look, reference = _shown(whole, scratch / "inside_whole", inputs)
    others = [_shown(whole, scratch / "inside_whole", inputs, draw + 1)[1] for draw in range(_DRAWS if noisy else 0)]
    values = {one.value: reference[one.output] for one in look.seen if one.output in reference}
    noise = spread(
        values, [{one.value: other[one.output] for one in look.seen if one.output in other} for other in others]
    )
    inside, arrays = _shown(compiled, scratch / "inside_compiled", inputs)
    by_value: dict[str, list[_Seen]] = {}
    for copy in inside.seen:
        by_value.setdefault(copy.value, []).append(copy)
    for value, array in values.items():
        for copy in by_value.get(value, ()):
            row = _differs(copy, array, arrays.get(copy.output), noise.get(value))
            if row is not None:
                return f"the first value that differs is '{value}' of {look.makers[value]}, on rank {copy.rank}: {row}"
    return ""


def gradients_alone(whole: Compiled, inputs: Mapping[str, Any], scratch: Path) -> Arrays:
    """Returns the gradients of all parameters in the first step of a program of one rank."""
    look, reference = _shown(whole, scratch / "inside_whole", inputs, only_gradients=True)
    return {one.value: reference[one.output] for one in look.seen}


def gradients(whole: Compiled, compiled: Compiled, inputs: Mapping[str, Any], scratch: Path) -> tuple[Arrays, Arrays]:
    """Returns the gradients of all parameters in the first step, of the unsharded and of the compiled program.

    Where several ranks have the same shard, each element is the one with the largest difference.
    """
    want = gradients_alone(whole, inputs, scratch)
    inside, arrays = _shown(compiled, scratch / "inside_compiled", inputs, only_gradients=True)
    have: Arrays = {}
    for copy in inside.seen:
        if copy.value not in want:
            continue
        at, shard = _place(copy, want[copy.value].shape), arrays[copy.output]
        gathered = have.setdefault(copy.value, want[copy.value].copy())
        if at is None or shard.shape != gathered[at].shape:
            have[copy.value] = np.full(gathered.shape, np.nan, gathered.dtype)
            continue
        reference_shard = want[copy.value][at].astype(np.float64)
        with np.errstate(invalid="ignore"):  # a gradient that overflows
            off, known = (np.abs(array.astype(np.float64) - reference_shard) for array in (shard, gathered[at]))
        gathered[at] = np.where(~(off <= known), shard, gathered[at])
    return {name: want[name] for name in have}, have


def _shown(
    compiled: Compiled, out: Path, inputs: Mapping[str, Any], seed: int = 0, only_gradients: bool = False
) -> tuple[_Look, Arrays]:
    """Runs one step of a copy that shows its inner values; a nonzero seed changes operands by units in the last place."""
    from partc.cli.job.outputs import flatten
    from partc.runtime import load_local

    look = _Look()
    names = _names(compiled.program, only_gradients)

    def change(rank: int, model: ModelProto, manifest: Manifest) -> Manifest:
        if seed:
            perturb(model, seed)
        if not manifest.is_main or (manifest.training is None and compiled.program.training is not None):
            return manifest
        return _show(rank, model, manifest, names.get(rank, {}), look)

    variant(compiled.folder, out, change, apart=True)
    with load_local(out, trust=True, devices=compiled.devices) as program:
        return look, flatten(program({port.name: inputs[port.name] for port in program.inputs if port.name in inputs}))


def _names(program: Complete, only_gradients: bool) -> dict[int, dict[str, ShardedValue]]:
    """Maps each rank to a map of names in its file to the values that it has; partial values are left out."""
    from partc.compiler.emit.names import Names

    learned = program.training.parameters if program.training is not None else ()
    wanted = {f"{value.name}.grad" for value in learned} if only_gradients else None
    names = Names(program)
    by_rank: dict[int, dict[str, ShardedValue]] = {}
    for copy, value in program.at.items():
        if copy.layout.partial or (wanted is not None and copy.value.name not in wanted):
            continue
        for rank in copy.group:
            by_rank.setdefault(rank, {}).setdefault(names[value], copy)
    return by_rank


def _show(rank: int, model: ModelProto, manifest: Manifest, names: Mapping[str, ShardedValue], look: _Look) -> Manifest:
    """Adds an output for every known value that a node of a rank makes."""
    graph = model.graph
    types = {port.name: port.type.tensor_type.elem_type for port in (*graph.value_info, *graph.output)}
    kept = {name for record in manifest.state for name in (record.value, record.next)}
    ports = []
    nodes = []
    targeted = any(target_of(node) for node in graph.node)
    for node in graph.node:
        nodes.append(node)
        for name in node.output:
            if name not in names or not types.get(name) or name in kept:
                continue
            shown = f"inside.{rank}.{len(look.seen)}"
            copy = names[name]
            look.seen.append(_Seen(shown, copy.value.name or name, rank, copy))
            look.makers.setdefault(copy.value.name or name, f"{node.op_type} '{path_of(node) or node.name}'")
            look_at = helper.make_node("Identity", [name], [shown], name=shown)
            if targeted and (target := output_target(node)):
                look_at.metadata_props.add(key=TARGET, value=target)
            nodes.append(look_at)
            port = helper.make_tensor_value_info(shown, types[name], None)
            graph.output.append(port)
            text = type_text(helper.make_tensor_type_proto(types[name], None))
            ports.append(Port(name=shown, type=text, shape=None, ranks=[rank]))
    copies = [type(node)() for node in nodes]
    for made, node in zip(copies, nodes, strict=True):
        made.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(copies)
    return manifest.model_copy(update={"outputs": [*manifest.outputs, *ports]})


def _differs(seen: _Seen, whole: Array, have: Array | None, noise: Array | None) -> str | None:
    """Returns a text of how a value on a rank differs; None where it does not, or cannot be compared."""
    if have is None:
        return None
    at = _place(seen, whole.shape)
    if at is None:
        return None
    if (folded := seen.copy.value.meta.get(FOLDED, (1, ()))) is None:
        return None
    ranks, dims = folded
    whole, noise = in_folded_order(whole, ranks, dims), None if noise is None else in_folded_order(noise, ranks, dims)
    want = whole[at]
    part = f"its shard [{', '.join(f'{cut.start}:{cut.stop}' for cut in at)}]" if want.shape != whole.shape else "it"
    if have.shape != want.shape:
        return f"{part} has the shape {list(have.shape)} instead of {list(want.shape)}"
    share = _SHARE.get(want.dtype.name, 1e-4)
    finite = np.abs(whole[np.isfinite(whole)]) if whole.dtype.kind in "fc" else np.zeros(0)
    close = share * float(finite.max(initial=0.0)) if want.dtype.kind in "fc" else None
    row = compare({"": want}, {"": have}, share, close, {} if noise is None else {"": noise[at]})[0]
    return None if row.passed else f"{part} differs by {row.absolute:.3g} at {list(row.absolute_at)}"


def _place(one: _Seen, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """Returns the slices of a rank's shard in the global value; None where the value's dims do not fit its layout."""
    try:
        box = one.copy.layout.box(one.copy.group.index(one.rank), shape)
    except ValueError:
        return None
    return tuple(slice(begin, end) for begin, end in box)
