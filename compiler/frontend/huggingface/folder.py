"""Loads a local folder of a model of `transformers`: `config.json` names the class, `*.safetensors` have the weights.

The model is built and exported without its weights, on torch's meta device, and each weight is taken from its file by name. Buffers that
no file has, such as a rotary embedding's frequencies, are computed while the model is built. Nothing is downloaded, and no code in the
folder runs. With `weights` False only `config.json` and the files' headers are read: weights are then names, types and shapes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import recording
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface import export_cache, settings
from partc.compiler.frontend.huggingface.adapter_folder import ADAPTER_CONFIG
from partc.compiler.frontend.huggingface.decoding import decoding
from partc.compiler.frontend.huggingface.export_cache import Export
from partc.compiler.frontend.huggingface.flat_cache import flatten_cache, start_tokens
from partc.compiler.frontend.huggingface.ports import position_symbols, usual_inputs
from partc.compiler.frontend.huggingface.quantized_files import float_weights
from partc.compiler.frontend.huggingface.repeated_layers import repeat, shortened, stack_of
from partc.compiler.frontend.huggingface.safetensors_files import (
    CONFIG,
    InFile,
    has_weights,
    read_object,
    stored_tensors,
)
from partc.compiler.frontend.huggingface.settings import tp_plan
from partc.compiler.frontend.huggingface.weights import FolderWeights, absent_as, stored_as, taken, unread
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.source import Known, Source, Weights, compared, nothing
from partc.compiler.frontend.torch.torch_model import TORCH_MODEL, TorchModel, quiet
from partc.compiler.ir.declared import Declared
from partc.runtime.spellings import nearest
from partc.runtime.units import first_of

if TYPE_CHECKING:
    import torch

_LITERAL = "lifted_tensor"
"""A part of the names that torch gives to tensors of literals in a forward."""


def load_folder(
    path: Path,
    known: Known = nothing,
    *,
    cache: bool = False,
    compare: bool = False,
    keep: bool = True,
    weights: Weights = True,
) -> Source:
    """Loads the model in a folder; `known`, `cache`, `compare` and `weights` are as in `load`. Raises CompileError with all its problems.

    `keep`: whether a stored export may be used, and a new one is stored.
    """
    folder = path.resolve()
    config = _settings(folder)
    absent, stored = weights is False, weights.resolve() if isinstance(weights, Path) else folder

    def weight_files() -> Mapping[str, InFile] | None:
        if absent and not has_weights(folder):
            return None
        return float_weights(config, stored_tensors(stored), folder.name)

    files = weight_files()
    key = export_cache.key_of(folder, files, cache, absent) if keep and export_cache.cache_folder() is not None else ""
    export = export_cache.read(key, folder.name) if key else None
    if export is not None:
        known(export.names)
        source = _with_weights(export, folder, config, files, cache, absent)
        if export.compared or not compare:
            return source
    else:
        source, export = _exported(folder, config, files, known, cache, absent)
    if absent:
        told = f"{folder.name}: the exported graph is not compared with torch: it has no weights"
        source = replace(source, declared=replace(source.declared, warnings=(*source.declared.warnings, told)))
    elif compare:
        source = compared(source)
    if key and export is not None:
        if _settings(folder) == config and export_cache.key_of(folder, weight_files(), cache, absent) == key:
            warning = export_cache.keep(key, folder.name, replace(export, source=source, compared=compare or absent))
        else:
            warning = f"the export is not kept: {folder} was changed meanwhile; compile it again"
        if warning:
            declared = replace(source.declared, warnings=(*source.declared.warnings, warning))
            source = replace(source, declared=declared)
        source = replace(source, is_export_cached=not warning)
    return source


def _with_weights(
    export: Export,
    folder: Path,
    config: dict[str, object],
    files: Mapping[str, InFile] | None,
    cache: bool,
    absent: bool,
) -> Source:
    """Returns a stored export with the weights of its folder; the torch module is built only when it is asked for."""
    initializers = export.source.model.graph.initializers
    tensors: dict[tuple[str, ir.DataType], ir.TensorProtocol] = {}
    said = config.get("dtype") or config.get("torch_dtype")
    of_config = ir.DataType.BFLOAT16 if said == "bfloat16" else None
    for name, own in export.weights.items():
        value = initializers[name]
        assert value.dtype is not None
        of_file = own, value.dtype
        if of_file not in tensors:
            if files is None or absent:
                assert value.shape is not None
                kept = of_config if files is None else ir.DataType(files[own].stored.dtype.code)
                tensors[of_file] = absent_as(value.dtype, value.shape.numpy(), name, kept)
            else:
                tensors[of_file] = stored_as(files[own], value.dtype, name)
        value.const_value = tensors[of_file]

    def torch_model() -> TorchModel:

        built = _Built.of(folder, config, files, cache, absent)
        settings.prepare(built.module)
        symbols = export.source.declared.symbols
        where = f"{folder.name}/{CONFIG}"
        own = built.module, export.inputs, symbols, export.outputs, export.sizes, export.arguments, where
        return TorchModel(*own, stored=built.stored)

    export.source.model.meta[TORCH_MODEL] = torch_model
    return replace(export.source, absent=absent)


@dataclass(frozen=True)
class _Built:
    """A module on the meta device, the values of its buffers, its weights, and the inputs and outputs of its forward."""

    module: Any
    buffers: Mapping[str, torch.Tensor]
    widened: str
    weights: FolderWeights
    inputs: Mapping[str, Input]
    outputs: Sequence[str]

    @staticmethod
    def of(
        folder: Path, config: dict[str, object], files: Mapping[str, InFile] | None, cache: bool, absent: bool
    ) -> _Built:
        """Builds the module of a folder; with `cache` its forward takes past and returns present."""
        module, buffers, widened = _built(_architecture(config, folder), folder)
        weights = taken(module, files, folder.name, absent) if files is not None else unread(module, widened)
        where = f"{folder.name}/{CONFIG}"
        inputs, outputs = flatten_cache(module, where) if cache else (usual_inputs(module, None, where), [])
        return _Built(module, buffers, widened, weights, inputs, outputs)

    @property
    def names(self) -> list[str]:
        """The names of parameters and buffers."""
        return [*dict(self.module.named_parameters(remove_duplicate=False)), *self.buffers]

    @property
    def stored(self) -> dict[str, ir.TensorProtocol]:
        """Maps names to the tensors that the module itself does not have; for a buffer that a file has, the file's tensor."""
        return {
            **{name: ir.Tensor(one.numpy(), name=name) for name, one in self.buffers.items()},
            **self.weights.tensors,
        }


def _exported(
    folder: Path,
    config: dict[str, object],
    files: Mapping[str, InFile] | None,
    known: Known,
    cache: bool,
    absent: bool,
) -> tuple[Source, Export | None]:
    """Exports the model of a folder; the second result is the export to store, or None where the folder must be exported each time."""
    where = f"{folder.name}/{CONFIG}"
    with recording(folder) as recorder:
        from partc.compiler.frontend.torch.torch_module import OPSET, OPSET_WITH_CACHE, export

        built = _Built.of(folder, config, files, cache, absent)
        module, weights, buffers = built.module, built.weights, built.buffers
        known(built.names)
        names = DimNames({}, set(), position_symbols(module, built.inputs))
        opset = OPSET_WITH_CACHE if cache else OPSET

        def exported(inputs: Mapping[str, Input], outputs: Sequence[str]) -> tuple[ir.Model, list[str]]:
            """Returns the graph, and its constants without numbers."""
            model = export(module, inputs, None, names, outputs, where, recorder, opset)
            lost = _without_numbers(model, {*weights.tensors, *buffers})
            if lost and all(_LITERAL in name for name in lost):
                _allocate(module)
                model = export(module, inputs, None, names, outputs, where, recorder, opset)
                lost = [name for name in lost if name not in model.graph.initializers]
            return model, lost

        model, stack = None, stack_of(module)
        if stack is not None:
            with shortened(module, stack):
                ports = flatten_cache(module, where) if cache else (built.inputs, built.outputs)
                short, lost = exported(*ports)
            model = short if not lost and repeat(short, stack, [*built.inputs], built.outputs) else None
        if model is None:
            if len({tensor.device for tensor in module.parameters()}) > 1:  # those of three layers are allocated
                _allocate(module)
            model, lost = exported(built.inputs, built.outputs)
    for name, value in model.graph.initializers.items():
        if name in built.stored:
            value.const_value = built.stored[name]
    torch_model = model.meta[TORCH_MODEL] = replace(model.meta[TORCH_MODEL], stored=built.stored)
    if lost:
        kind = type(module).__name__
        fact = (
            f"torch exports {first_of(lost)} of {kind} without their numbers, which its code makes where no weights are"
        )
        help_ = (
            f"write a model.py with `model = transformers.{kind}.from_pretrained({str(folder)!r})`, and compile that"
        )
        raise CompileError(Problem(where, fact, help=help_))
    warnings = []
    if weights.unread:
        warnings.append(f"{folder.name}: {type(module).__name__} does not read {first_of(weights.unread)}")
    if built.widened == "bfloat16":
        remedy = "`precision: {compute: float16}` in the plan computes in 16 bits"
        warnings.append(
            f"{folder.name}: bfloat16 becomes float32, since onnxruntime has no kernels for it on CPUs; {remedy}"
        )
    elif built.widened:
        warnings.append(
            f"{folder.name}: float16 becomes float32, in which products with quantized weights compute, or in int8"
        )
    declared = Declared(
        symbols=names.symbols,
        warnings=tuple(warnings),
        tp_plan=tp_plan(module),
        start=start_tokens(module),
        decoding=decoding(module, folder),
    )
    source = Source(model, declared, exported=True, absent=absent)
    if weights.origins is None:
        return source, None
    read = {name: weights.origins[name] for name in model.graph.initializers if name in weights.origins}
    kept = torch_model.inputs, torch_model.outputs, torch_model.sizes, torch_model.arguments
    return source, Export(source, read, *kept, built.names)


def _without_numbers(model: ir.Model, known: Collection[str]) -> list[str]:
    """Returns the names of the initializers without values, except those in `known`."""
    values = model.graph.initializers.items()
    return [
        name
        for name, value in values
        if name not in known and getattr(getattr(value.const_value, "raw", None), "is_meta", False)
    ]


def _allocate(module: torch.nn.Module) -> None:
    """Moves parameters and buffers from the meta device to uninitialized memory, which takes no physical pages.

    For a literal in a forward, such as the index `[-2]` of Falcon's heads, torch makes a tensor on the device of the indexed tensor. A
    trace reads no value of a weight, so the rest of the export stays the same.
    """
    import torch

    moved: dict[int, torch.Tensor] = {}
    for one in module.modules():
        kinds: tuple[dict[str, Any], ...] = (one._parameters, one._buffers)
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = torch.empty_like(tensor, device="cpu")
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                tensors[name] = moved[id(tensor)]


def _settings(folder: Path) -> dict[str, object]:
    if (folder / CONFIG).exists():
        return read_object(folder / CONFIG, f"{folder.name}/{CONFIG}")
    if (folder / ADAPTER_CONFIG).exists():
        help_ = f"give its model, and `adapters: {{name: {folder.name}}}` in the plan"
        raise CompileError(Problem(folder.name, "the folder has an adapter alone, and no model", help=help_))
    inside = sorted(one.name for one in folder.iterdir() if one.suffix in (".onnx", ".py") or (one / CONFIG).exists())
    help_ = (
        f"pass a path in it: {', '.join(inside[:4])}" if inside else "save a model of transformers with save_pretrained"
    )
    raise CompileError(Problem(folder.name, f"the folder has no {CONFIG}", help=help_))


def _architecture(config: dict[str, object], folder: Path) -> Any:
    """Returns the class that `architectures` in config.json names."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    where = f"{folder.name}/{CONFIG}"
    try:
        import transformers
        from transformers import core_model_loading  # noqa: F401, since version 5
    except ImportError as error:
        fact = "a folder of a model needs torch and transformers 5 or later"
        raise CompileError(Problem(where, fact, str(error), 'pip install "partc[transformers]"')) from None
    named = config.get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        help_ = 'write "architectures": ["LlamaForCausalLM"], the class of the model'
        raise CompileError(Problem(where, "names no architecture", help=help_))
    found = getattr(transformers, named[0], None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    like = nearest(named[0], (name for name in dir(transformers) if "For" in name or name.endswith("Model")))
    help_ = f"the nearest names are {', '.join(map(repr, like))}" if like else "write a model.py that builds it"
    law = "code of the folder's own is not run" if "auto_map" in config else ""
    fact = f"transformers {transformers.__version__} has no model '{named[0]}'"
    raise CompileError(Problem(where, fact, law, help_))


def _built(architecture: Any, folder: Path) -> tuple[Any, dict[str, torch.Tensor], str]:
    """Returns the model with all its tensors on the meta device, a map of names to its buffers' values, and its type before widening.

    The type is "bfloat16" or "float16" where the model was widened to float32, else empty.
    """
    import torch

    widened = ""
    try:
        with _without_weights(), quiet():
            settings = architecture.config_class.from_pretrained(folder, local_files_only=True)
            is_quantized = getattr(settings, "quantization_config", None) is not None
            if settings.dtype is torch.bfloat16 or (settings.dtype is torch.float16 and is_quantized):
                widened, settings.dtype = str(settings.dtype).removeprefix("torch."), torch.float32
            module = architecture._from_config(settings).eval()
    except Exception as error:
        fact = f"makes no {architecture.__name__}: {' '.join(str(error).split()) or type(error).__name__}"
        help_ = "use the config.json that the model was saved with"
        raise CompileError(Problem(f"{folder.name}/{CONFIG}", fact, help=help_)) from error
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name in buffers:
        owner, _, own = name.rpartition(".")
        holder = module.get_submodule(owner)
        holder._buffers[own] = holder._buffers[own].to("meta")
    return module, buffers, widened


@contextmanager
def _without_weights() -> Iterator[None]:
    """A context in which a parameter moves to the meta device as soon as a module registers it, before its memory is written to."""
    import torch

    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            empty = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            self._parameters[name] = empty

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
