"""Exports a `torch.nn.Module` to a model whose nodes and weights keep the names of its modules.

torch's own clean-up would fold weights into others, merge equal ones and drop layers that train, so it stays off. Instead
the weights become graph inputs, the graph is cleaned up around them, and they are put back under their names. Layers in
training mode stay: Dropout as it is, BatchNorm with `training_mode=1` and its running statistics as outputs, which torch's
exporter leaves out. A module is exported in the mode that it is in: call `model.eval()` for inference.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from partc.compiler.dims.symbol import Symbol
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import Recorder
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface import settings
from partc.compiler.frontend.huggingface.ports import main_outputs
from partc.compiler.frontend.huggingface.rotary import limit, short_frequencies
from partc.compiler.frontend.inputs import DimNames, Spec, all_inputs, as_mapping, specs
from partc.compiler.frontend.names import TORCH_SCOPES, derive_names
from partc.compiler.frontend.onnx_file import checked
from partc.compiler.frontend.torch import translations
from partc.compiler.frontend.torch.autograd_effects import (
    Observer,
    hook_problems,
    mark_gradients,
    refuse_cumulative_averages,
    write_problems,
    write_problems_into,
)
from partc.compiler.frontend.torch.clean_up import clean_up
from partc.compiler.frontend.torch.function_regions import keep_marks, take_regions
from partc.compiler.frontend.torch.stopped_gradients import (
    blocks_detached,
    mark,
    marks_preserved,
    observe_apart,
    traced_blocks_detached,
)
from partc.compiler.frontend.torch.torch_file import FOLDED
from partc.compiler.frontend.torch.torch_model import TORCH_MODEL, TorchModel, quiet, without_gradients
from partc.compiler.frontend.user_code import user_frames
from partc.compiler.ir.graph import FROZEN_STATISTICS, UNBIASED, graphs_of
from partc.runtime.errors import chain_of

if TYPE_CHECKING:
    import torch

OPSET = 21
"""The opset of exports: partc's rules are written for it, and training converts to it.

From 23 on torch writes attention and rotary embeddings as single ops. Of these onnxruntime refuses forms that the standard's broadcasting
allows: tables of one record for a dynamic batch.
"""
OPSET_WITH_CACHE = 23
"""The opset for a decoder with a cache: attention as one op becomes onnxruntime's fused one, and each sequence has a table of its own."""

_BATCH_NORM_IN_TRAINING = "_native_batch_norm_legit_functional"
_OTHERWISE = "a dim that the module fixes is an int in inputs; torch.export's documentation says what forward may do"
_IN_ANOTHER = "its forward has sizes that torch does not follow; export it in a module of your own, with a dynamic batch, tokens and past"
_QUOTED = re.compile(r"'([^']*)'")
_CLASSES = "pkg.torch.onnx.class_hierarchy"
# Paths and source lines of the exporting machine, and metadata that repeat the graph in another form.
_DROPPED = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node", "pkg.torch.onnx.original_node_name")


def export(
    module: torch.nn.Module,
    inputs: object,
    dynamic_shapes: object,
    names: DimNames,
    outputs: Sequence[str],
    where: str,
    recorder: Recorder,
    opset: int = OPSET,
) -> ir.Model:
    """Exports the module. An input is an example tensor, with its dims named by `dynamic_shapes`, or an entry that `specs` accepts.

    Raises CompileError where torch cannot export it or the declarations do not fit forward.
    """
    import torch

    sequential = type(module).forward is torch.nn.Sequential.forward
    given = as_mapping(inputs, module.forward, 0, where, sequential)
    examples = {name: entry for name, entry in given.items() if isinstance(entry, torch.Tensor)}
    named = _dynamic_dims(dynamic_shapes, list(given), where)
    declared = all_inputs({name: _declared(entry, named.get(name, {})) for name, entry in given.items()}, where)
    read = specs(declared, names, where)
    limit(module, read, names, where)
    sizes = _sizes(read, names)
    device = next((tensor.device for tensor in module.parameters()), None)
    tensors = {spec.name: examples.get(spec.name, _example(spec, sizes)).to(device) for spec in read}
    dims = {spec.name: {k: dim for k, dim in enumerate(spec.dims) if isinstance(dim, str)} for spec in read}
    arguments: dict[str, Any]
    if sequential:
        arguments = {"args": tuple(tensors.values()), "dynamic_shapes": tuple(dict(dims[name]) for name in tensors)}
    else:
        shapes = {name: dict(dims[name]) for name in tensors}
        arguments = {"args": (), "kwargs": dict(tensors), "dynamic_shapes": shapes}
    refuse_cumulative_averages(module)
    observer = Observer(module, recorder)
    program, called = _by_torch(module, {**arguments, "opset_version": opset}, where, recorder, observer)
    if program is None:
        raise CompileError(Problem(where, "torch.onnx.export returned no program", help="use torch 2.6 or later"))
    model: ir.Model = program.model.clone()  # in torch's own model, `==` of two values may add a node
    _name_weights(model.graph, module)
    weights = dict(model.graph.initializers)
    _set_inputs(model, read, where)
    made = list(model.graph.outputs)
    if settings.is_of_transformers(module):
        outputs = _chosen(model.graph, _output_names(program, len(model.graph.outputs), (), where), outputs)
    places = [made.index(value) for value in model.graph.outputs]
    outputs = _output_names(program, len(model.graph.outputs), outputs, where)
    _set_outputs(model, outputs, where)
    if not observer.complete:
        with quiet(), without_gradients():
            observer = observe_apart(module, recorder, arguments)
    problems = [*hook_problems(module), *observer.problems, *write_problems(module, program.exported_program)]
    _mark_batch_norms(model, module.training)
    problems += mark_gradients(model)
    mark(model, {name for name, _ in module.named_parameters(remove_duplicate=False)}, called)
    translations.attend_to_none(model)
    translations.drop_in_attention(model)
    with marks_preserved(model):
        clean_up(model, weights)
    keep_marks(model)
    model = checked(model, where)
    take_regions(model, recorder)
    _drop_metadata(model)
    derive_names(model, [value for name, value in model.graph.initializers.items() if name not in weights])
    by_name = dict(zip(outputs, places, strict=True))
    called_by = () if sequential else [spec.name for spec in read]
    model.meta[TORCH_MODEL] = TorchModel(module, read, names.symbols, by_name, sizes, called_by, where)
    write_problems_into(model, problems)
    return model


def _by_torch(
    module: torch.nn.Module, arguments: Mapping[str, Any], where: str, recorder: Recorder, observer: Observer
) -> tuple[Any, list[str]]:
    """Returns torch's program, and the names of the `torch.autograd.Function`s that ran.

    A model of `transformers` that torch cannot export as it is gets the settings with which it can.
    """
    import torch

    options: dict[str, Any] = {"dynamo": True, "optimize": False, "verbose": False}
    options["custom_translation_table"] = translations.table()
    tried: set[str] = set()
    settings.prepare(module)
    while True:
        try:
            with (
                quiet(),
                without_gradients(),
                short_frequencies(module),
                traced_blocks_detached(),
                blocks_detached(module, observer) as called,
            ):
                return torch.onnx.export(module, **arguments, **options), called
        except Exception as error:
            setting = settings.remedy(str(_root(error)), module)
            if setting in tried or not settings.settle(module, setting):
                kind = type(module).__name__ if settings.is_of_transformers(module) else ""
                help_ = settings.HELPS.get(setting, _IN_ANOTHER if kind else _OTHERWISE)
                raise _refusal(error, where, recorder, help_, kind or "the module") from error
            tried.add(setting)


def _root(error: BaseException) -> BaseException:
    return [*chain_of(error, contexts=False)][-1]


def _declared(entry: object, dims: Mapping[int, object]) -> object:
    """Converts an example tensor to an Input with its dynamic dims; returns anything else unchanged."""
    import torch

    if not isinstance(entry, torch.Tensor):
        return entry
    shape = [dims.get(axis, size) for axis, size in enumerate(entry.shape)]
    return Input(shape, str(entry.dtype).removeprefix("torch."))  # type: ignore[arg-type]


def _dynamic_dims(declared: object, inputs: list[str], where: str) -> dict[str, dict[int, object]]:
    """Maps each input to its dynamic dims by axis, from torch's forms: a dict or tuple of inputs, each a dict or tuple of dims."""
    if declared is None:
        return {}
    if isinstance(declared, list | tuple):
        declared = dict(zip(inputs, declared, strict=False))
    if not isinstance(declared, Mapping) or not set(declared) <= set(inputs):
        fact = f"dynamic_shapes is {declared!r}; the inputs are {', '.join(inputs)}"
        raise CompileError(Problem(where, fact, help='write dynamic_shapes = {"x": {0: "batch"}}'))
    by_input: dict[str, dict[int, object]] = {}
    for name, dims in declared.items():
        by_axis = isinstance(dims, Mapping)
        by_input[name] = {}
        for axis, dim in dims.items() if by_axis else enumerate(dims or ()):
            if dim is None and not by_axis:
                continue
            is_plain = dim is None or isinstance(dim, str | int | Symbol)
            # a `torch.export.Dim` has a name; `Dim.AUTO` and similar ones have none
            by_input[name][int(axis)] = dim if is_plain else getattr(dim, "__name__", None)
    return by_input


def _sizes(read: Sequence[Spec], names: DimNames) -> dict[str, int]:
    """Returns a legal example size for each dynamic dim, all different where their Symbols allow it."""
    sizes: dict[str, int] = {}
    for spec in read:
        for axis, dim in enumerate(spec.dims):
            if isinstance(dim, str) and dim not in sizes:
                sizes[dim] = _size(names.symbols.get(dim, Symbol()), 3 if axis == 0 else 37, set(sizes.values()))
    return sizes


def _size(symbol: Symbol, wanted: int, used: set[int]) -> int:
    last = symbol.max or 1 << 30
    legal = [size for k in range(64) if (size := symbol.smallest + k * symbol.divisor) <= last]
    fitting = [size for size in legal if size >= wanted and size not in used] or [
        size for size in reversed(legal) if size > 1 and size not in used
    ]
    if fitting:
        return fitting[0]
    return legal[-1]


def _example(spec: Spec, sizes: Mapping[str, int]) -> torch.Tensor:
    import torch

    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims]
    fill = 1 if spec.dtype.is_floating_point() else 0
    return torch.full(shape, fill, dtype=_torch_type(spec))


def _torch_type(spec: Spec) -> torch.dtype:
    import torch

    kind = getattr(torch, spec.dtype.numpy().name, None)
    if not isinstance(kind, torch.dtype):
        raise CompileError(Problem(f"input '{spec.name}'", f"torch has no dtype {spec.dtype.name}"))
    return kind


def _refusal(error: Exception, where: str, recorder: Recorder, help: str, what: str) -> Exception:
    """Returns the error to raise, from the root of an error: the user's own unchanged, torch's with the user's line where it has one."""
    root = _root(error)
    if (node := _untranslated(error)) is not None:
        return CompileError(_without_translation(node, root, where))
    frames = user_frames(root, recorder)
    own_kind = type(root).__module__.startswith("torch")
    if frames and isinstance(root, Exception) and not own_kind:
        return root
    lines = [line.strip() for line in str(root).strip().splitlines() if line.strip()] or [type(root).__name__]
    if frames:
        where = recorder.line(frames[-1].filename, frames[-1].lineno or 0)
        lines[1:] = [frames[-1].line or ""]
    fact = f"torch cannot export {what}: {'' if own_kind else type(root).__name__ + ': '}{lines[0]}"
    return CompileError(Problem(where, fact, "\n  ".join(lines[1:6]), help))


def _untranslated(error: BaseException | None) -> torch.fx.Node | None:
    """Returns the node of the exported program that the exporter could not translate, from the stack frame that tried it."""
    import torch

    for reason in () if error is None else chain_of(error, contexts=False):
        if str(reason).startswith("Error when translating node"):
            frames = traceback.walk_tb(reason.__traceback__)
            nodes = [node for frame, _ in frames if isinstance(node := frame.f_locals.get("node"), torch.fx.Node)]
            return nodes[-1] if nodes else None
    return None


def _without_translation(node: torch.fx.Node, root: BaseException, where: str) -> Problem:
    """Returns a problem that names the function of torch and the module that calls it."""
    stack = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    module = stack[-1] if stack and stack[-1] else ""
    function = re.sub("^(aten|prims)", "torch", str(node.target).removesuffix(".default"))
    at = f"module '{module}'" if module else "the model's forward"
    if isinstance(root, ValueError):
        return Problem(where, f"{at}: {root}", help="fix that size in inputs, or write it with other functions")
    fact = f"{at} calls {function}, which has no translation to ONNX"
    return Problem(where, fact, " ".join(str(root).split())[:200], "write it with other functions of torch")


def _name_weights(graph: ir.Graph, module: torch.nn.Module) -> None:
    """Gives every weight torch's own name, and marks whether it is trainable in torch.

    A shared weight gets the first of its names whose module is called; a module that is called only under its second name keeps that one.
    """
    scopes = {one for node in graph for one in _QUOTED.findall(node.metadata_props.get(TORCH_SCOPES, ""))}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    for path, tensor in named:
        if path.rpartition(".")[0] in scopes:
            first.setdefault(id(tensor), path)
    trainable = {path for path, parameter in module.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for path, tensor in named:
        own = first.get(id(tensor), path)
        if path == own or path not in graph.initializers:
            continue
        value = graph.initializers.pop(path)
        if own in graph.initializers:
            value.replace_all_uses_with(graph.initializers[own], replace_graph_outputs=True)
        else:
            value.name = own
            graph.initializers[own] = value
    for name, value in graph.initializers.items():
        value.meta["partc.trainable"] = name in trainable


def _set_inputs(model: ir.Model, read: Sequence[Spec], where: str) -> None:
    """Gives the graph's inputs the declared names and dims, in the declared order. Raises CompileError where they do not fit."""
    graph = model.graph
    by_name = {value.name: value for value in graph.inputs}
    inputs = [by_name.get(spec.name) for spec in read]
    if len(read) == 1 and len(graph.inputs) == 1:
        inputs = [graph.inputs[0]]
    if any(value is None for value in inputs) or len(graph.inputs) != len(read):
        fact = f"the exported graph has the inputs {', '.join(str(name) for name in by_name)}"
        raise CompileError(Problem(where, fact, f"declared are {', '.join(spec.name for spec in read)}"))
    values = [value for value in inputs if value is not None]
    fixed = []
    for spec, value in zip(read, values, strict=True):
        for axis, (dim, got) in enumerate(zip(spec.dims, value.shape or spec.dims, strict=True)):
            if isinstance(dim, str) and isinstance(got, int):
                fact = f"input '{spec.name}', dim {axis}: '{dim}' is declared, but the module works for {got} alone"
                fixed.append(Problem(where, fact, help=f"write {got}, or make that size dynamic in the module"))
        value.name = spec.name
        value.shape = ir.Shape(spec.dims)
    if fixed:
        raise CompileError(fixed)
    graph.inputs.clear()
    graph.inputs.extend(values)


def _output_names(program: Any, count: int, names: Sequence[str], where: str) -> list[str]:
    """Returns the declared names, else the keys of the dict that forward returns, else `output`, or `output_0`, `output_1`."""
    if names:
        if len(names) != count:
            fact = f"outputs names {len(names)} values ({', '.join(names)}), but forward returns {count}"
            raise CompileError(Problem(where, fact, help="write one name for each value that forward returns"))
        return list(names)
    from torch.utils import _pytree

    result = _pytree.tree_unflatten(list(range(count)), program.exported_program.call_spec.out_spec)
    if isinstance(result, Mapping) and sorted(result.values(), key=str) == sorted(range(count), key=str):
        return [str(name) for name, _ in sorted(result.items(), key=lambda item: int(item[1]))]
    return ["output"] if count == 1 else [f"output_{k}" for k in range(count)]


def _chosen(graph: ir.Graph, made: Sequence[str], asked: Sequence[str]) -> Sequence[str]:
    """Reduces the graph's outputs to those in `asked`, by forward's names, else to the main ones; returns the remaining names."""
    if asked and not set(asked) <= set(made):
        return asked
    by_name = dict(zip(made, graph.outputs, strict=True))
    chosen = list(asked) or main_outputs(made)
    graph.outputs.clear()
    graph.outputs.extend(by_name[name] for name in chosen)
    return chosen


def _set_outputs(model: ir.Model, names: Sequence[str], where: str) -> None:
    """Names the outputs; a value that is also an input, a weight or another output gets an Identity as its output node."""
    graph = model.graph
    kept = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    if clash := [name for name in names if name in kept]:
        raise CompileError(
            [Problem(where, f"'{name}' names an output and an input or weight", help="rename one") for name in clash]
        )
    values = list(graph.outputs)
    for k, (name, value) in enumerate(zip(names, values, strict=True)):
        if value.producer() is None or value in values[:k]:
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[k] = node.outputs[0]
        graph.outputs[k].name = name


def _mark_batch_norms(model: ir.Model, training: bool) -> None:
    """Marks all BatchNorms to move the running variance by torch's law; those in training mode use the statistics of the batch.

    `training`: whether the module as a whole is in training mode; then a layer in evaluation mode was frozen by its author.
    """
    for node in model.graph:
        if node.op_type != "BatchNormalization":
            continue
        node.meta[UNBIASED] = True
        if _BATCH_NORM_IN_TRAINING not in node.metadata_props.get(_CLASSES, ""):
            node.meta[FROZEN_STATISTICS] = training
        else:
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            mean, variance = node.inputs[3], node.inputs[4]
            node.resize_outputs(3)
            for output, state in zip(node.outputs[1:], (mean, variance), strict=True):
                assert state is not None
                output.type, output.shape = state.type, state.shape


def _drop_metadata(model: ir.Model) -> None:
    model.graph.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.pop(FOLDED, None)
    for graph in graphs_of(model.graph):
        for node in graph:
            for key in _DROPPED:
                node.metadata_props.pop(key, None)
