"""Loads a `model.py`: runs the file and takes the model that it defines.

The file defines one of these:

    model = LeNet()                   an object, or
    def build(): ...                  a function that needs no arguments and returns one

The object is an `onnx.ModelProto`, an `onnx_ir.Model`, a module of `partc.compiler.nn` (or onnxscript), or a
`torch.nn.Module`. A module also needs its inputs:

    inputs = {"x": Input(["batch", 1, 28, 28], "float32")}        a global, or build returns (module, inputs)

with one entry for each argument of `forward`, or a list in their order. An entry may be the bare shape (then float32), or an
example array; for torch an example tensor, whose dynamic dims a global `dynamic_shapes = {"x": {0: "batch"}}` names. A dim is
an int, a name or a `Symbol`; `partc.compiler.frontend.inputs` says how Symbols name dims. A global Symbol constrains every
dim that has its name, in finished graphs as well. `outputs = ["logits"]` names the outputs; else they are the keys
of the dict that forward returns, else `output`, or `output_0`, `output_1`. A model of `transformers` needs neither: its inputs are a list
of names, or the defaults in `partc.compiler.frontend.huggingface.ports`, its outputs are `logits` and, with labels, `loss`.

`dataset_strategy = "data_parallel"`, or a tuple with a sharding for each input, or `full_batch = True` gives the inputs' layouts, as a
plan's `dataset` does. For each other option of MindSpore's contexts (`set_context`, `set_auto_parallel_context`) a warning names the
way to write the same in partc.

`place(module, rank)`, `shard(module, in_strategy)` and `nn.seed(7)` may stand anywhere. The file's folder can be imported
from. `if __name__ == "__main__":` parts do not run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import onnxscript.nn
from partc.compiler.dims.symbol import Symbol
from partc.compiler.directives.recorder import Recorder, recording
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.decoding import decoding
from partc.compiler.frontend.huggingface.flat_cache import flatten_cache, start_tokens
from partc.compiler.frontend.huggingface.ports import image_inputs, position_symbols, usual_inputs
from partc.compiler.frontend.huggingface.settings import is_of_transformers
from partc.compiler.frontend.huggingface.tp_plan import tp_plan
from partc.compiler.frontend.inputs import DimNames, all_inputs, as_mapping, specs
from partc.compiler.frontend.onnx_file import checked, from_proto
from partc.compiler.frontend.region_calls import placements, shardings, targets
from partc.compiler.frontend.source import Known, Source, nothing
from partc.compiler.frontend.torch.torch_file import restored
from partc.compiler.frontend.trace import module_paths, trace
from partc.compiler.frontend.user_code import MODEL_MODULE, UserFile, errors_by_line, importable
from partc.compiler.ir.declared import Declared, Decoding
from partc.compiler.ir.graph import NEWEST_OPSET, OLDEST_OPSET
from partc.compiler.nn.parameter import seed_of_its_own
from partc.compiler.plan.dataset import KEYS, declared_dataset
from partc.runtime.files.regular import fault

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs


_DERIVED = "shards are given by `sharding` of the plan or by `shard`, and all others derived from them"
_MEAN = "a loss is a mean or sum over the whole batch (`loss: {reduction: ...}`), and its gradient that of the unsharded model"
_BUCKETS = "`train: {bucket_mb: ...}` says how gradients are reduced together"
_CHECKPOINTS = "`partc train --checkpoint`, `--resume` and `--init` read and write checkpoints, for any plan"
INSTEAD = {
    "parallel_mode": _DERIVED,
    **dict.fromkeys(("search_mode", "auto_parallel_search_mode", "strategy_search_mode"), _DERIVED),
    "device_num": "`ranks` of the plan says how many ranks there are",
    "global_rank": "the launcher gives each process its rank",
    "device_target": "`target` of the plan, or `--device`, says the kind of device",
    "device_id": "a rank takes the device of its number on its host; `--device cuda:1` names another",
    "pipeline_stages": "`pipeline: {stages: ...}` or `placement` of the plan gives the stages",
    "grad_accumulation_step": "write `train: {accumulate: ...}` in the plan",
    **dict.fromkeys(("gradients_mean", "loss_repeated_mean"), _MEAN),
    "enable_parallel_optimizer": "write `train: {optimizer: {shard: true}}` in the plan",
    "parallel_optimizer_config": "write `train: {optimizer: {shard: true}}` in the plan",
    **dict.fromkeys(("all_reduce_fusion_config", "comm_fusion"), _BUCKETS),
    "parameter_broadcast": "each rank reads its weights from the artifact, so replicas begin equal",
    **dict.fromkeys(("strategy_ckpt_config", "strategy_ckpt_load_file", "strategy_ckpt_save_file"), _CHECKPOINTS),
    "group_ckpt_save_file": _CHECKPOINTS,
    "max_device_memory": "`pipeline: {memory: ...}` of the plan bounds what a rank keeps",
    **dict.fromkeys(
        ("save_graphs", "save_graphs_path"), "`partc compile` writes `ir/`, and with --dump-ir a text for each pass"
    ),
}
"""Maps each option of MindSpore's contexts to its equivalent in partc."""


def not_followed(options: Mapping[str, object], line: Callable[[str], str]) -> Iterator[str]:
    """Yields a warning for each global that is such an option; `line` maps a global's name to the line that defines it."""
    for name, reason in INSTEAD.items():
        given = options.get(name)
        if isinstance(given, str | int | float | list | dict):
            yield f"{line(name)}: {name} = {given!r} is not followed: {reason}"


_CONTRACT = "define `model = ...`, or `def build(): return ...`"
_KINDS = "an onnx.ModelProto, an onnx_ir.Model, an nn.Module of partc.compiler or onnxscript, or a torch.nn.Module"
_INPUTS = 'write inputs = {"x": Input(["batch", 1, 28, 28], "float32")}, or return (module, inputs) from build'


def load_python(path: Path, known: Known = nothing, *, cache: bool = False) -> Source:
    """Loads the model that a file defines, with its declarations; `known` and `cache` are as in `load`.

    Raises CompileError with the user's own line.
    """
    if why := fault(path):
        fact = "no such file" if not path.exists() else why
        raise CompileError(
            Problem(
                str(path), fact, help="pass the path of a model.py, a .onnx file or a folder of a model of transformers"
            )
        )
    path = path.resolve()
    with (
        recording(path.parent) as recorder,
        importable(path.parent),
        seed_of_its_own(),
        errors_by_line(path, recorder),
    ):
        file = UserFile.run(path)
        built, inputs = _defined(file)
        built = _without_wrapper(built, file)
        names = DimNames(file.globals, set())
        if _is_torch_module(built):
            known(
                [
                    *dict(built.named_parameters(remove_duplicate=False)),
                    *dict(built.named_buffers(remove_duplicate=False)),
                ]
            )
        warnings = tuple(not_followed(file.globals, file.line))
        if inputs is None and (image := image_inputs(built)) is not None:
            inputs, said = image
            ((name, one),) = inputs.items()
            remedy = f'write inputs = {{"{name}": [...]}} for another'
            warnings += (f"{_where_inputs(file)}: the input '{name}' is {one.shape}, {said}; {remedy}",)
        model = _model(built, inputs, names, file, recorder, cache)
        _use_named_symbols(model, names, file)
        modules = [(recorder.moved.get(path, path), module) for path, module in _modules(built)]
        placed = placements(recorder, modules, model)
        sharding = shardings(recorder, modules, model)
        devices = targets(recorder, modules, model)
        dataset = declared_dataset(file.globals, {key: file.line(key) for key in KEYS})
        plan = tp_plan(built) if _is_torch_module(built) else ()
        start = start_tokens(built) if _is_torch_module(built) and is_of_transformers(built) else ()
        made = decoding(built) if _is_torch_module(built) else Decoding()
        declared = Declared(placed, names.symbols, sharding, None, dataset, devices, warnings, plan, start, made)
        return Source(model, declared, _is_torch_module(built))


def _defined(file: UserFile) -> tuple[object, object]:
    """Returns the object that is the model, and the declared inputs, None where there are none."""
    model, build = file.globals.get("model"), file.globals.get("build")
    if model is not None and build is not None:
        fact = f"both a model and, at {file.line('build')}, build are defined"
        raise CompileError(Problem(file.line("model"), fact, help="keep one of them"))
    if model is None and build is None:
        torch = sys.modules.get("torch")
        kinds = (onnxscript.nn.Module, torch.nn.Module) if torch else (onnxscript.nn.Module,)
        own = {name: one for name, one in file.globals.items() if isinstance(one, type) and issubclass(one, kinds)}
        classes = [name for name, one in own.items() if one.__module__ == MODEL_MODULE]
        help_ = f"write `model = {classes[-1]}()`" if classes else _CONTRACT
        raise CompileError(Problem(file.name, "neither a model nor build is defined", help=help_))
    inputs = file.globals.get("inputs")
    if build is None:
        return model, inputs
    if not callable(build):
        raise CompileError(Problem(file.line("build"), f"build is {build!r}, not a function", help=_CONTRACT))
    needed = [
        parameter.name
        for parameter in inspect.signature(build).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        fact = f"build needs arguments: {', '.join(needed)}"
        raise CompileError(Problem(file.line("build"), fact, help="add defaults; build is called without arguments"))
    result = build()
    if not isinstance(result, tuple):
        return result, inputs
    if len(result) != 2:
        fact = f"build returns a tuple of {len(result)}"
        raise CompileError(Problem(file.line("build"), fact, help="return the model, or (module, inputs)"))
    if inputs is not None:
        fact = f"build returns inputs, and {file.line('inputs')} defines them too"
        raise CompileError(Problem(file.line("build"), fact, help="keep one of them"))
    return result


def _without_wrapper(built: object, file: UserFile) -> object:
    """Returns the model in a wrapper of peft, with its adapters inside. Raises CompileError where the wrapper itself computes."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(built, peft.PeftModel):
        return built
    config = built.active_peft_config
    if config.is_prompt_learning:
        fact = f"{type(built).__name__} puts learned tokens of {config.peft_type.value} before its inputs"
        raise CompileError(Problem(file.line("model", "build"), fact, help="use an adapter of layers, such as LoRA"))
    return built.get_base_model()


def _model(built: object, inputs: object, names: DimNames, file: UserFile, recorder: Recorder, cache: bool) -> ir.Model:
    where = file.line("model", "build")
    match built:
        case onnx.ModelProto():
            return from_proto(built, file.path)
        case ir.Model():
            opset = built.opset_imports.get("", built.opset_imports.get("ai.onnx", NEWEST_OPSET))
            if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
                raise CompileError(Problem(where, f"opset {opset} is outside of {OLDEST_OPSET} to {NEWEST_OPSET}"))
            return restored(checked(built, where))
        case onnxscript.nn.Module() if type(built).forward is onnxscript.nn.Module.forward:
            help_ = "write def forward(self, op, x), with an argument for each of the inputs"
            raise CompileError(Problem(where, f"{type(built).__name__} has no method forward", help=help_))
        case onnxscript.nn.Module():
            in_order = type(built).forward is onnxscript.nn.Sequential.forward
            by_name = as_mapping(_required(inputs, file), built.forward, 1, _where_inputs(file), in_order)
            declared = specs(all_inputs(by_name, _where_inputs(file)), names, _where_inputs(file))
            return trace(built, declared, _output_names(file), where)
    if _is_torch_module(built):
        from partc.compiler.frontend.torch.torch_module import OPSET, OPSET_WITH_CACHE, export

        dynamic_shapes = file.globals.get("dynamic_shapes")
        outputs = _output_names(file)
        if cache and inputs is None and is_of_transformers(built):
            inputs, outputs = flatten_cache(built, where)
            names.symbols.update(position_symbols(built, inputs))
        elif is_of_transformers(built):
            inputs = _of_transformers(built, inputs, names, file)
        given, opset = _required(inputs, file), OPSET_WITH_CACHE if cache else OPSET
        return export(built, given, dynamic_shapes, names, outputs, _where_inputs(file), recorder, opset)
    kind = f"the class {built.__name__}" if isinstance(built, type) else f"a {type(built).__name__}"
    help_ = f"make an instance of it: {built.__name__}()" if isinstance(built, type) else f"a model is {_KINDS}"
    what = "model" if "model" in file.globals else "what build returns"
    raise CompileError(Problem(where, f"{what} is {kind}", help=help_))


def _of_transformers(built: torch.nn.Module, inputs: object, names: DimNames, file: UserFile) -> object:
    """Returns the inputs of a model of `transformers`: its usual ones where the file declares none or only names, else the file's."""
    named = isinstance(inputs, list | tuple) and bool(inputs) and all(isinstance(name, str) for name in inputs)
    if inputs is not None and not named:
        return inputs
    usual = usual_inputs(built, list(inputs) if isinstance(inputs, list | tuple) else None, _where_inputs(file))
    for dim, symbol in position_symbols(built, usual).items():
        names.symbols.setdefault(dim, symbol)
    return usual


def _required(inputs: object, file: UserFile) -> object:
    if inputs is None:
        raise CompileError(Problem(file.line("model", "build"), "the module's inputs are not declared", help=_INPUTS))
    return inputs


def _where_inputs(file: UserFile) -> str:
    return file.line("inputs", "build", "model")


def _output_names(file: UserFile) -> list[str]:
    names = file.globals.get("outputs", [])
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        fact = f"outputs is {names!r}, not a list of names"
        raise CompileError(Problem(file.line("outputs"), fact, help='write outputs = ["logits"]'))
    if len(set(names)) < len(names):
        raise CompileError(Problem(file.line("outputs"), f"outputs has a name twice: {', '.join(names)}"))
    return list(names)


def _use_named_symbols(model: ir.Model, names: DimNames, file: UserFile) -> None:
    """Applies global Symbols to the dims of their name. Raises CompileError for a Symbol that constrains no dim."""
    dims = {str(dim) for value in model.graph.inputs for dim in value.shape or () if not isinstance(dim, int)}
    used = {id(symbol) for symbol in names.symbols.values()}
    problems = []
    for name, symbol in file.globals.items():
        if not isinstance(symbol, Symbol):
            continue
        if name in dims:
            names.symbols.setdefault(name, symbol)
        elif id(symbol) not in used:
            fact = f"the Symbol '{name}' is used by no input"
            help_ = f"the dims of the inputs are {', '.join(sorted(dims))}" if dims else "no input has a dynamic dim"
            problems.append(Problem(file.line(name), fact, help=help_))
    if problems:
        raise CompileError(problems)


def _modules(built: object) -> Iterator[tuple[str, object]]:
    if isinstance(built, onnxscript.nn.Module):
        yield from module_paths(built)
    elif _is_torch_module(built):
        yield from built.named_modules(remove_duplicate=False)


def _is_torch_module(built: object) -> TypeIs[torch.nn.Module]:
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(built, loaded.nn.Module)
