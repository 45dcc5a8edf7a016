"""Turns the `place` and `shard` calls of a loaded `model.py` into rules, which name regions, devices and parameters by their paths.

This runs after the model is built: only then are paths known, and the names of the tensors that a call got. A parameter's path begins at
its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import onnx_ir as ir
from partc.compiler.directives.calls import Region, ShardCall, TracedCall, is_module
from partc.compiler.directives.recorder import Recorder
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.declared import Placement
from partc.compiler.ir.graph import name_of
from partc.compiler.plan.pattern import literal_pattern, nearest
from partc.compiler.plan.rules import RegionCall, ShardingRule
from partc.compiler.plan.shard_spec import ShardSpec, shown_spec
from partc.compiler.plan.target import TargetRule

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
