"""Weights that several modules read: some stay one parameter, others become a separate parameter of each module.

Exporters make one initializer of weights that are equal when they export: the scales of all norms, which begin as ones. As one tensor they
would be trained as one. So of a file, a weight that repeats a single number and is read by several modules becomes each module's own; any
other stays what ONNX says it is, one tensor. The plan has the last word: `parameters: {"wte.weight": {shared: false}}`.

    ones    read by layers.0.norm, layers.1.norm    ->    ones, layers.1.ones
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.computed import DrawnTensor, is_absent, shard_of
from partc.compiler.ir.graph import name_of, operand_name
from partc.compiler.training.trainable import TRAINABLE, is_parameter, trainable_names
from partc.runtime.spellings import first_free, numbered
from partc.runtime.units import first_of

Numbers: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"
_NAMED = 3
_BEGIN = 16


@dataclass(frozen=True)
class Shared:
    """A weight with the modules that read it, in the graph's order, and the names that it has in them where each has its own."""

    name: str
    modules: tuple[str, ...]
    names: tuple[str, ...]
    repeats: bool
    """Whether it is a weight of a file and all its elements are equal."""

    def text(self, own: bool) -> str:
        """The line for the user; `own`: each module gets its own copy."""
        read = f"'{self.name}' is read by {first_of(self.modules, _NAMED)}"
        if own:
            return f"{read}, and repeats one number: each has a parameter of its own"
        return f"{read}: they share one parameter"


def shared_weights(model: ir.Model, names: Iterable[str], paths: Mapping[ir.Node, str] | None = None) -> list[Shared]:
    """The named weights that nodes of several modules read."""
    paths = paths if paths is not None else node_paths(model)
    weights = model.graph.initializers
    of_file = not any(is_parameter(value) or TRAINABLE in value.meta for value in weights.values())
    taken = {*weights, *(name_of(value) for value in model.graph.inputs)}
    taken |= {operand_name(value) for node in model.graph for value in node.outputs}
    order = {node: place for place, node in enumerate(paths)}
    shared = []
    for name in names:
        readers = _readers(weights[name], paths, order) if name in weights else {}
        if len(readers) < 2:
            continue
        own = [name]
        for module in list(readers)[1:]:
            own.append(_own_name(name, module, taken))
            taken.add(own[-1])
        shared.append(Shared(name, tuple(readers), tuple(own), of_file and _repeats(weights[name])))
    return shared


def _own_name(name: str, module: str, taken: set[str]) -> str:
    """What a module's own copy of a weight is called: as if the module had made it, or after the weight and the module."""
    other = f"{name}.{module}"
    spellings = chain([other], numbered(other, ".", 2))
    return first_free(f"{module}.{name.rpartition('.')[2]}", taken.__contains__, lambda _: spellings)


def parameter_sizes(model: ir.Model, paths: Mapping[ir.Node, str] | None = None) -> list[int]:
    """The elements of each parameter that a training has if the plan says nothing of parameters."""
    names = trainable_names(model)
    copies = {one.name: len(one.names) for one in shared_weights(model, names, paths) if one.repeats}
    shapes = {name: model.graph.initializers[name].shape for name in names}
    sizes = {name: math.prod(shape.numpy()) if shape is not None else 0 for name, shape in shapes.items()}
    return [sizes[name] for name in names for _ in range(copies.get(name, 1))]


def separate_shared(
    model: ir.Model, trainable: list[str], said: Callable[[str], bool | None]
) -> tuple[list[str], list[tuple[Shared, bool]]]:
    """Splits shared weights where modules get their own; returns the trainable weights, and each shared weight with the decision.

    `said`: whether the plan wants a weight shared; None where it says nothing.
    """
    paths = node_paths(model)
    done: list[tuple[Shared, bool]] = []
    names = list(trainable)
    for weight in shared_weights(model, trainable, paths):
        keep = said(weight.name)
        own = weight.repeats if keep is None else not keep
        done.append((weight, own))
        if own:
            split(model, weight, paths)
            names[names.index(weight.name) + 1 : names.index(weight.name) + 1] = weight.names[1:]
    return names, done


def split(model: ir.Model, one: Shared, paths: Mapping[ir.Node, str]) -> None:
    """Gives every module but the first a copy of a weight."""
    value = model.graph.initializers[one.name]
    readers = _readers(value, paths, {node: place for place, node in enumerate(paths)})
    for module, name in zip(one.modules[1:], one.names[1:], strict=True):
        copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
        copy.meta.update(value.meta)
        model.graph.register_initializer(copy)
        for node, k in readers[module]:
            node.replace_input_with(k, copy)


def split_as(model: ir.Model, names: Iterable[str]) -> None:
    """Gives modules weights of their own where all of these have the names in `names`."""
    wanted, paths = {*names}, node_paths(model)
    for one in shared_weights(model, list(model.graph.initializers), paths):
        if wanted.issuperset(one.names):
            split(model, one, paths)


def parted(model: ir.Model, names: Iterable[str]) -> list[str]:
    """Lines about weights with the numbers of another one transposed: of a tied weight an exporter that folds constants makes two."""
    seen: dict[tuple[tuple[int, ...], bytes], tuple[str, ir.TensorProtocol]] = {}
    lines = []
    for name in names:
        value = model.graph.initializers.get(name)
        tensor = value.const_value if value is not None else None
        diagonal = _diagonal(tensor) if tensor is not None else None
        if tensor is None or diagonal is None:
            continue
        shape, begin = tuple(tensor.shape.numpy()), diagonal.tobytes()
        other, like = seen.get((shape[::-1], begin), (name, None))
        if like is not None and np.array_equal(like.numpy(), tensor.numpy().T):
            lines.append(
                f"'{name}' has the numbers of '{other}' transposed, and is a parameter of its own: an exporter that folds constants parts "
                "a weight that two modules share\n  help: export it as one, with torch by torch.onnx.export(..., optimize=False)"
            )
        seen.setdefault((shape, begin), (name, tensor))
    return lines


def _diagonal(tensor: ir.TensorProtocol) -> Numbers | None:
    """The begin of the diagonal of a weight of two dims, all that is read of it; None where it is one number alone."""
    if isinstance(tensor, DrawnTensor) or is_absent(tensor) or len(tensor.shape) != 2 or min(tensor.shape.numpy()) < 2:
        return None
    first = slice(0, min(_BEGIN, *tensor.shape.numpy()))
    diagonal = np.diagonal(shard_of(tensor, (first, first)))
    return diagonal if (diagonal != diagonal[0]).any() else None


def _readers(
    value: ir.Value, paths: Mapping[ir.Node, str], order: Mapping[ir.Node, int]
) -> dict[str, list[tuple[ir.Node, int]]]:
    """Maps each module to the (node, operand) pairs that read a weight; empty if a body reads it. A node outside of modules is a module.

    `order`: the place of each node."""
    uses = [(use.node, use.idx) for use in value.uses()]
    if any(node not in order for node, _ in uses):
        return {}
    found: dict[str, list[tuple[ir.Node, int]]] = {}
    for node, k in sorted(uses, key=lambda use: (order[use[0]], use[1])):
        found.setdefault(paths[node].rpartition(".")[0] or paths[node], []).append((node, k))
    return found


def _repeats(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or not tensor.size or isinstance(tensor, DrawnTensor) or is_absent(tensor):
        return False
    begin = tuple(slice(0, min(_BEGIN, size)) for size in tensor.shape.numpy())
    return _is_one_number(shard_of(tensor, begin)) and _is_one_number(tensor.numpy())


def _is_one_number(numbers: Numbers) -> bool:
    flat = numbers.reshape(-1)
    return bool((flat == flat[0]).all() and np.isfinite(flat[:1].astype(np.float64)).all())
