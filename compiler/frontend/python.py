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

Turns the `place` and `shard` calls of a loaded `model.py` into rules, which name regions, devices and parameters by their paths.

This runs after the model is built: only then are paths known, and the names of the tensors that a call got. A parameter's path begins at
its module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import onnx
import onnx_ir as ir
import onnxscript.nn
from partc.compiler.dims.symbol import Symbol
from partc.compiler.directives.calls import Region, ShardCall, TracedCall, is_module
from partc.compiler.directives.recorder import Recorder, recording
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.decoding import decoding
from partc.compiler.frontend.huggingface.flat_cache import flatten_cache, start_tokens
from partc.compiler.frontend.huggingface.ports import image_inputs, position_symbols, usual_inputs
from partc.compiler.frontend.huggingface.settings import is_of_transformers, tp_plan
from partc.compiler.frontend.inputs import DimNames, all_inputs, as_mapping, specs
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.onnx_file import checked, from_proto
from partc.compiler.frontend.source import Known, Source, nothing
from partc.compiler.frontend.torch.torch_file import restored
from partc.compiler.frontend.trace import module_paths, trace
from partc.compiler.frontend.user_code import MODEL_MODULE, UserFile, errors_by_line, importable
from partc.compiler.ir.declared import Declared, Decoding, Placement
from partc.compiler.ir.graph import NEWEST_OPSET, OLDEST_OPSET, name_of
from partc.compiler.nn.parameter import seed_of_its_own
from partc.compiler.plan.dataset import KEYS, declared_dataset
from partc.compiler.plan.pattern import literal_pattern
from partc.compiler.plan.rules import RegionCall, ShardingRule
from partc.compiler.plan.shard_spec import ShardSpec, shown_spec
from partc.compiler.plan.target import TargetRule
from partc.runtime.files.regular import fault
from partc.runtime.spellings import nearest
from typing_extensions import TypeIs

if TYPE_CHECKING:
    import torch


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


Call = TypeVar("Call", bound=TracedCall)


def shardings(recorder: Recorder, modules: Iterable[tuple[str, object]], model: ir.Model) -> tuple[ShardingRule, ...]:
    """Returns the sharding rules in the order of the `shard` calls.

    Raises CompileError for modules that the model does not have, functions without a call, unknown parameters, shard counts that
    do not fit the parameters, and regions within others.
    """
    if not recorder.shards:
        return ()
    nodes = node_paths(model)
    paths = _paths(modules, list(nodes.values()))
    problems: list[Problem] = []
    rules: list[tuple[str, ShardCall, ShardingRule]] = []
    for call in recorder.shards:
        if not is_module(call.target):
            regions = regions_of(call, nodes, problems)
            rules += [(path, call, _rule(call, path, {}, [region])) for path, region in regions]
        elif names := paths.get(id(call.target)):
            parameters = _parameters(call, names, problems)
            rules.append((names[0], call, _rule(call, names[0], parameters, call.regions)))
        else:
            problems.append(stranger(call))
    held = {path for names in paths.values() for path in names}
    problems += [double(call, path) for path, call, _ in rules if not is_module(call.target) and path in held]
    problems += _nested([(path, call) for path, call, _ in rules])
    if problems:
        raise CompileError(problems)
    return tuple(rule for _, _, rule in rules)


def placements(recorder: Recorder, modules: Iterable[tuple[str, object]], model: ir.Model) -> tuple[Placement, ...]:
    """Returns the placements, one for each region that a `place` call names.

    Raises CompileError for modules that the model does not have and functions without a call.
    """
    found = _regions(recorder.calls, modules, model)
    return tuple(Placement(pattern, call.on, call.where, call.role) for call, pattern in found if call.on is not None)


def targets(recorder: Recorder, modules: Iterable[tuple[str, object]], model: ir.Model) -> tuple[TargetRule, ...]:
    """Returns the kinds of devices that `shard` and `place` calls name; those of `place` come last."""
    calls = [call for call in (*recorder.shards, *recorder.calls) if call.device]
    return tuple(TargetRule(pattern, call.device, call.where) for call, pattern in _regions(calls, modules, model))


def _regions(calls: Sequence[Call], modules: Iterable[tuple[str, object]], model: ir.Model) -> list[tuple[Call, str]]:
    """Returns each call with the pattern of its region.

    Raises CompileError for modules that the model does not have, and functions without a call.
    """
    if not calls:
        return []
    nodes = node_paths(model)
    paths: dict[int, str] = {}
    for first, module in modules:
        paths.setdefault(id(module), first)
    problems: list[Problem] = []
    patterns: list[tuple[Call, str]] = []
    for call in calls:
        if isinstance(call.target, str):
            patterns.append((call, call.target))
        elif not is_module(call.target):
            regions = [path for path, _ in regions_of(call, nodes, problems)]
            problems += [double(call, path) for path in regions if path in paths.values()]
            patterns += [(call, literal_pattern(path)) for path in regions]
        elif (path := paths.get(id(call.target))) is not None:
            patterns.append((call, literal_pattern(path) or "**"))
        else:
            problems.append(stranger(call))
    if problems:
        raise CompileError(problems)
    return patterns


def regions_of(call: TracedCall, nodes: Mapping[ir.Node, str], problems: list[Problem]) -> list[tuple[str, Region]]:
    """Returns the regions of a function or an op with their paths; adds a problem where it is never called."""
    paths = [(region.path if region.node is None else nodes.get(region.node), region) for region in call.regions]
    found = [(path, region) for path, region in paths if path is not None]
    if not found:
        fact = f"'{call.name}' is never called while the model is built"
        problems.append(Problem(call.where, fact, help=f"call what {call.verb} returns, in forward"))
    return found


def stranger(call: TracedCall) -> Problem:
    """Returns the problem of a call whose module is not part of the model."""
    fact = f"{call.verb} speaks of a {call.name} that is not part of the model"
    return Problem(call.where, fact, help=f"{call.verb} a module that the model holds as an attribute")


def double(call: TracedCall, path: str) -> Problem:
    """Returns the problem of a function and a module with the same path."""
    fact = f"the function '{call.name}' has the path of a module, '{path}'"
    return Problem(call.where, fact, help="rename one of the two")


def _paths(modules: Iterable[tuple[str, object]], nodes: Sequence[str]) -> dict[int, list[str]]:
    """Maps each module's id to its paths; for a module with several paths, the one in the names of its nodes comes first."""
    by_module: dict[int, list[str]] = {}
    for path, module in modules:
        by_module.setdefault(id(module), []).append(path)
    for paths in by_module.values():
        if len(paths) > 1:
            paths.sort(key=lambda path: not any(node.startswith(f"{path}.") for node in nodes))
    return by_module


def _rule(call: ShardCall, path: str, parameters: dict[str, ShardSpec], regions: Sequence[Region]) -> ShardingRule:
    calls = tuple(
        RegionCall(tuple(map(name_of, region.arguments)), tuple(map(name_of, region.results))) for region in regions
    )
    pattern = literal_pattern(path) or "**"
    return ShardingRule(pattern, None, call.inputs, call.outputs, parameters, call.where, call.level, calls)


def _nested(found: Sequence[tuple[str, ShardCall]]) -> Iterator[Problem]:
    law, help = "regions of shard do not nest", "shard one of the two; the plan's 'sharding' may speak of the other"
    for inner, call in found:
        for outer, around in found:
            if around is call or (is_module(call.target) and is_module(around.target) and inner == outer):
                continue
            if inner == outer or inner.startswith(f"{outer}.") or not outer:
                fact = (
                    f"shard of '{inner}' is inside of '{outer}'"
                    if outer
                    else f"shard of '{inner}' is inside of the model"
                )
                yield Problem(call.where, f"{fact}, which {around.where} shards", law, help)


def _parameters(call: ShardCall, paths: Sequence[str], problems: list[Problem]) -> dict[str, ShardSpec]:
    """Maps each parameter to its shard spec: by its path below the module, or by its whole path where another module holds it first."""
    target: Any = call.target
    own = dict(target.named_parameters())
    specs: dict[str, ShardSpec] = {}
    for key, spec in call.parameters.items():
        name = _named(key, paths, list(own))
        if name is None:
            near = ", ".join(f"'{other}'" for other in nearest(key.removeprefix("self."), own))
            law = "a parameter is named from the module, 'dense2.weight', or as the caller sees it, 'self.block1.dense2.weight'"
            help = f"the nearest are {near}" if near else f"it has {', '.join(own) or 'none'}"
            problems.append(Problem(call.where, f"parameter_plan: {call.name} has no parameter '{key}'", law, help))
            continue
        problems += _misfits(call.where, key, spec, list(own[name].shape))
        parameter = own[name]
        if isinstance(parameter, ir.Value) and parameter.name:  # its path in the graph, relative to the module
            name = parameter.name.removeprefix(f"{paths[0]}.") if paths[0] else parameter.name
        specs[name] = spec
    return specs


def _named(key: str, paths: Sequence[str], names: Sequence[str]) -> str | None:
    """Returns the parameter that `key` names, or None: names with `self.` are looked up from the caller first, others from the module."""
    wanted = key.removeprefix("self.")
    inside = [name for name in names if f".{wanted}".endswith(f".{name}")]
    seen = [name for name in inside if any(f".{path}.{name}".endswith(f".{wanted}") for path in paths)]
    if key == wanted and key in names:
        return key
    return min(seen, key=len, default=None)


def _misfits(where: str, key: str, spec: ShardSpec, shape: Sequence[object]) -> Iterator[Problem]:
    dims = ", ".join(str(dim) for dim in shape)
    if len(spec) != len(shape):
        fact = f"parameter_plan: {shown_spec(spec)} is for another number of dims than '{key}' [{dims}] has"
        yield Problem(where, fact, help="write one entry for each dim")
        return
    for dim, (shards, size) in enumerate(zip(spec, shape, strict=True)):
        if isinstance(shards, int) and isinstance(size, int) and size % shards:
            fact = f"parameter_plan: cannot cut '{key}' dim {dim} ({size}) into {shards}"
            yield Problem(
                where, fact, f"{size} is not divisible by {shards}", "choose a divisor, or 1 to leave it whole"
            )
