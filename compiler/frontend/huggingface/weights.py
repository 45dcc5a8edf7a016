"""Maps the weights of a model of `transformers` to the tensors of its folder, by name; no tensor's data is read before its first use.

Names are matched as `transformers` loads them: a tensor's name goes through the library's renamings and conversions for the architecture,
as for Mixtral, whose folder has a tensor for each expert and whose model has one tensor for all of them. A tensor that is used unchanged
stays in its file. A tensor that is converted, or stored in another type, is computed when it is read, one at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.safetensors_files import InFile, InFiles
from partc.compiler.ir.computed import AbsentTensor, ComputedTensor, WidenedTensor, shard_of, widens
from partc.runtime.artifact.tensors.dtypes import BY_CODE
from partc.runtime.files.regular import open_regular
from partc.runtime.spellings import nearest
from partc.runtime.units import first_of

if TYPE_CHECKING:
    import torch

_HELP = "check that config.json and the weights are of one model"


@dataclass
class _Origin:
    """The sources of a weight: the names of its tensors, the conversion, and the conversion's pattern that matches each tensor."""

    conversion: Any = None
    names: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FolderWeights:
    """Maps a model's weights to their tensors, and lists the names in the folder that the model does not read.

    `origins` maps each weight to the name of its tensor in the folder. It is None where names are not enough: weights are converted, or
    values decided which weights are tied.
    """

    tensors: Mapping[str, ir.TensorProtocol]
    unread: Sequence[str]
    origins: Mapping[str, str] | None = None


def unread(model: Any, widened: str) -> FolderWeights:
    """Returns the weights of a model without reading any; the names of a tied weight share one tensor.

    `widened`: the type of the folder's weights where it differs from the model's, else empty.
    """
    wanted: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    origins = {name: first.setdefault(id(value), name) for name, value in wanted.items()}
    kept = ir.DataType[widened.upper()] if widened else None
    tensors = {name: _absent(wanted[name], name, kept) for name in first.values()}
    return FolderWeights({name: tensors[own] for name, own in origins.items()}, [], origins)


def _absent(wanted: torch.Tensor, name: str, kept: ir.DataType | None) -> ir.TensorProtocol:
    return absent_as(ir.tensor_adapters.from_torch_dtype(wanted.dtype), wanted.shape, name, kept)


def absent_as(dtype: ir.DataType, shape: Sequence[int], name: str, kept: ir.DataType | None) -> ir.TensorProtocol:
    """Returns a weight without data; `kept`: its type in the folder, where that is known."""
    if kept is not None and widens(kept, dtype):
        return WidenedTensor(AbsentTensor(kept, shape, name), dtype, name)
    return AbsentTensor(dtype, shape, name)


def taken(model: Any, files: Mapping[str, InFile], where: str, absent: bool = False) -> FolderWeights:
    """Returns the tensors of all weights. The names of a tied weight share one tensor; they are untied where the folder's values differ.

    `absent`: no data is read, and only names and shapes are compared with the model's.

    Raises CompileError with all weights that the folder lacks or has in another shape.
    """
    wanted: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    origins, unused = _origins(model, files, wanted)
    problems: list[Problem] = []
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, origin in origins.items():
        if origin.conversion is None:
            kept = files[origin.names[0]].stored
            stored = {name: (kept.shape, ir.DataType(kept.dtype.code))}
        else:
            try:
                stored = {
                    made: (tuple(one.shape), ir.tensor_adapters.from_torch_dtype(one.dtype))
                    for made, one in _converted(model, name, origin, files, meta=True).items()
                }
            except Exception as error:
                fact = f"'{name}' cannot be converted from {first_of([*map(repr, origin.names)])}: {error}"
                problems.append(Problem(where, fact, help=_HELP))
                continue
        for name_in_model, (shape, dtype) in stored.items():
            if name_in_model not in wanted:
                unused.append(name_in_model)
            elif shape != tuple(wanted[name_in_model].shape):
                fact = f"'{name_in_model}' is {list(shape)}; the model's is {list(wanted[name_in_model].shape)}"
                problems.append(Problem(where, fact, help=_HELP))
            else:
                of_file = name_in_model, name, origin, files, wanted[name_in_model], dtype
                tensors[name_in_model] = (
                    _absent(wanted[name_in_model], name_in_model, dtype) if absent else _tensor(model, *of_file)
                )
    own = {id(tensors[name]): origin.names[0] for name, origin in origins.items() if name in tensors}
    decided = _share(model, wanted, tensors)
    simple = all(origin.conversion is None for origin in origins.values()) and not decided
    unused = _without(
        unused, model._keys_to_ignore_on_load_unexpected, (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
    )
    told = {problem.fact.split("'")[1] for problem in problems}
    missing = [name for name in wanted if name not in tensors and name not in told]
    for name in _without(missing, model._keys_to_ignore_on_load_missing):
        like = nearest(name, unused) or nearest(name, files)
        help_ = f"the nearest names are {', '.join(map(repr, like))}" if like else _HELP
        problems.append(Problem(where, f"'{name}' {list(wanted[name].shape)} of the model is in no file", help=help_))
    if problems:
        raise CompileError(problems)
    return FolderWeights(
        tensors, unused, {name: own[id(tensor)] for name, tensor in tensors.items()} if simple else None
    )


def _origins(model: Any, files: Iterable[str], wanted: dict[str, torch.Tensor]) -> tuple[dict[str, _Origin], list[str]]:
    """Returns the sources of each weight, and the names in the folder that belong to no weight, matched as in `transformers`."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(model)
    renamings = [one for one in known if isinstance(one, loading.WeightRenaming)]
    conversions = [one for one in known if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in conversions for pattern in one.source_patterns}
    origins: dict[str, _Origin] = {}
    unused: list[str] = []
    for own in sorted(files, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(own, renamings, conversions, model.base_model_prefix, wanted)
        if name not in wanted and own in wanted:
            name, pattern = loading.rename_source_key(own, [], [], model.base_model_prefix, wanted)
        if name not in wanted:
            unused.append(own)
            continue
        origin = origins.setdefault(name, _Origin(by_pattern[pattern] if pattern is not None else None))
        origin.names.append(own)
        origin.patterns.append(pattern or own)
    return origins, unused


def _converted(
    model: Any, name: str, origin: _Origin, files: Mapping[str, InFile], meta: bool = False
) -> dict[str, torch.Tensor]:
    """Returns the weights that a conversion makes, by name; with `meta` only their shapes and types."""
    conversion = copy.deepcopy(origin.conversion)
    for own, pattern in zip(origin.names, origin.patterns, strict=True):
        conversion.add_tensor(name, own, pattern, _read(files[own], meta))
    made = conversion.convert(name, model=model, config=model.config)
    return {key: one[0] if isinstance(one, list) else one for key, one in made.items()}


def _read(stored: InFile, meta: bool = False) -> torch.Tensor:
    import torch

    dtype, shape, size = getattr(torch, stored.stored.dtype.shown), stored.stored.shape, stored.stored.bytes
    if meta or not size:
        return torch.empty(shape, dtype=dtype, device="meta" if meta else None)
    if isinstance(stored, InFiles):
        return torch.from_numpy(stored.tensor(ir.DataType.FLOAT, "").numpy())
    with open_regular(stored.file) as file:
        file.seek(stored.stored.offset)
        data = bytearray(file.read(size))
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _tensor(
    model: Any,
    name: str,
    key: str,
    origin: _Origin,
    files: Mapping[str, InFile],
    wanted: torch.Tensor,
    kept: ir.DataType,
) -> ir.TensorProtocol:
    """Returns the tensor of a weight: a place in a file, or a tensor of type `kept` that is computed from such places when it is read."""
    dtype, shape = ir.tensor_adapters.from_torch_dtype(wanted.dtype), ir.Shape(wanted.shape)
    if origin.conversion is None:
        return stored_as(files[origin.names[0]], dtype, name)

    def read() -> ir.TensorProtocol:
        made = _converted(model, key, origin, files)[name]
        kind = made.dtype if widened else wanted.dtype
        return ir.tensor_adapters.TorchTensor(made.to(kind).contiguous(), name=name)

    widened = widens(kept, dtype)
    tensor = ir.LazyTensor(read, dtype=kept if widened else dtype, shape=shape, name=name, cache=False)
    return WidenedTensor(tensor, dtype, name) if widened else tensor


def stored_as(file: InFile, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    """Returns a tensor of a file: a place in the file where the types agree, else a tensor that is converted when it is read."""
    if isinstance(file, InFiles):
        return file.tensor(dtype, name)
    kept, shape = file.stored, file.stored.shape
    if not kept.bytes:
        return ir.Tensor(np.zeros(shape, dtype.numpy()), dtype=dtype, name=name)
    tensor = ir.ExternalTensor(
        file.file.name,
        kept.offset,
        kept.bytes,
        ir.DataType(kept.dtype.code),
        shape=ir.Shape(shape),
        name=name,
        base_dir=file.file.parent,
    )
    if kept.dtype is BY_CODE[dtype.value]:
        return tensor
    if widens(tensor.dtype, dtype):
        return WidenedTensor(tensor, dtype, name)
    return ComputedTensor(lambda box: shard_of(tensor, box).astype(dtype.numpy()), dtype, shape, name)


def _share(model: Any, wanted: Mapping[str, torch.Tensor], tensors: dict[str, ir.TensorProtocol]) -> bool:
    """Gives all names of a tied weight one tensor; a model whose folder has different values for the names is untied.

    Returns whether values had to be compared to decide that.
    """
    import torch

    decided = False
    groups: dict[int, list[str]] = {}
    for name, value in wanted.items():
        groups.setdefault(id(value), []).append(name)
    for names in groups.values():
        stored = [name for name in names if name in tensors]
        for name in names:
            if stored and name not in stored:
                tensors[name] = tensors[stored[0]]
            elif stored and name != stored[0]:
                decided = True
                if (tensors[name].numpy() == tensors[stored[0]].numpy()).all():
                    tensors[name] = tensors[stored[0]]
                else:
                    module, _, own = name.rpartition(".")
                    value = wanted[name]
                    alone = torch.nn.Parameter(torch.empty_like(value), requires_grad=value.requires_grad)
                    setattr(model.get_submodule(module), own, alone)
    return decided


def _without(names: Iterable[str], *ignored: Iterable[str] | None) -> list[str]:
    patterns = [pattern for some in ignored for pattern in some or ()]
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
