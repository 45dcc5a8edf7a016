"""Finds the dynamic dims of a program: names in the inputs' shapes, combined with the plan's `inputs` and `symbols`.

A name that the model itself uses twice means equal dims (ONNX says so). A Symbol that the plan writes at several places
shares its promises only, unless it is `unique: true`; its uses then get names of their own (`batch`, `batch_mask_0`).
"""

from __future__ import annotations

from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.symbol import identifier
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Loaded
from partc.compiler.ir.value_info import SymbolInfo
from partc.compiler.plan.rules import Plan
from partc.runtime.spellings import nearest

_FREE = Facts(divisor=1, remainder=0, min=0, max=None)
_LEFT_OUT = "; inputs that neither the loss nor a metric reads are left out"


def bind_inputs(program: Loaded) -> dict[str, SymbolInfo]:
    """Writes the plan's dims into the shapes of the graph's inputs; returns the program's symbols by name.

    Raises CompileError, all violations at once: an unknown input, another rank, a fixed dim that the plan changes, a symbol that no input
    has.
    """
    graph, plan = program.model.graph, program.plan
    problems = _input_problems(graph, plan)
    names = _Names(_promises(program))
    for value in graph.inputs:
        rule = plan.dims.inputs.get(name_of(value))
        if value.shape is None and rule and isinstance(value.type, ir.TensorType | None):
            value.shape = ir.Shape([None] * len(rule.dims))
        if value.shape is None or (rule and len(rule.dims) != len(value.shape)):
            continue
        asked = rule.dims if rule else (None,) * len(value.shape)
        value.shape = ir.Shape([names.give(value, axis, dim) for axis, dim in enumerate(asked)])
    if not problems:
        problems = _unused_symbols(plan, names, graph)
    if problems:
        raise CompileError(problems)
    return names.bound


def promised(program: Loaded) -> dict[str, Facts]:
    """Maps dims of the inputs to their promised facts before they are bound, by the model's names, or `x_dim_1` for unnamed dims."""
    graph, plan = program.model.graph, program.plan
    promises, facts_of_dims = _promises(program), dict[str, Facts]()
    for value in graph.inputs:
        dims = value.shape.dims if value.shape is not None else ()
        rule = plan.dims.inputs.get(name_of(value))
        asked = rule.dims if rule and len(rule.dims) == len(dims) else (None,) * len(dims)
        for axis, (dim, said) in enumerate(zip(dims, asked, strict=True)):
            if isinstance(dim, int):
                continue
            own = unnamed(value, axis) if dim.value is None else str(dim.value)
            promise = None if isinstance(said, int) else promises.get(said or identifier(own))
            facts = Facts.constant(said) if isinstance(said, int) else promise.facts if promise else _FREE
            facts_of_dims.setdefault(own, facts)
    return facts_of_dims


def unknown_input(name: str, where: str, graph: ir.Graph, plan: Plan) -> Problem:
    """The problem of an entry of the plan for an input that the program does not have."""
    have = [name_of(value) for value in graph.inputs]
    close = nearest(name, have)
    fact = f"the {'model' if plan.train is None else 'training'} has no input '{name}'"
    law = f"its inputs are {', '.join(map(repr, have)) or 'none'}{_LEFT_OUT if plan.train is not None else ''}"
    return Problem(where, fact, law, f"say '{close[0]}', or remove the entry" if close else "remove the entry")


def unnamed(value: ir.Value, axis: int) -> str:
    """Returns the name for a dim that the model does not name."""
    return f"{value.name}_dim_{axis}"


def dim_name(value: ir.Value, axis: int) -> int | str:
    """Returns the size or the name of an input's dim that the plan does not name."""
    assert value.shape is not None
    dim = value.shape[axis]
    if isinstance(dim, int):
        return dim
    return str(dim.value) if dim.value is not None else identifier(unnamed(value, axis))


def _unused_symbols(plan: Plan, names: _Names, graph: ir.Graph) -> list[Problem]:
    have = sorted(names.bound)
    problems = []
    for name, rule in plan.dims.symbols.items():
        if name in names.used:
            continue
        close = nearest(name, have)
        remedy = f"say '{close[0]}'" if close else "remove it"
        if not close and graph.inputs:
            remedy = f"name it in `inputs`, as in `inputs: {{{graph.inputs[0].name}: [{name}, ...]}}`"
        law = f"the inputs' dynamic dims are {', '.join(have)}" if have else "every dim of the inputs is fixed"
        if plan.train is not None and not graph.inputs:
            law = "neither the loss nor a metric reads an input: they depend on parameters alone"
        elif plan.train is not None:
            law += _LEFT_OUT
        problems.append(Problem(rule.where, f"no input has a dim '{name}'", law, remedy))
    return problems


class _Names:
    """Names dims, one after another; `bound` and `used` record the symbols that result."""

    def __init__(self, promises: dict[str, SymbolInfo]) -> None:
        self.promises = promises
        self.bound: dict[str, SymbolInfo] = {}
        self.used: set[str] = set()
        self._given: dict[str, int | str] = {}

    def give(self, value: ir.Value, axis: int, asked: int | str | None) -> int | str:
        """Returns the size or name of a dim: the model's size, else the plan's, else the model's name, else a new name."""
        assert value.shape is not None
        dim = value.shape[axis]
        if isinstance(dim, int):
            return dim
        place = f"{value.name}_{axis}"
        own = str(dim.value) if dim.value is not None else None
        key = own if own is not None else f"[{place}]"
        if key not in self._given:
            self._given[key] = self._choose(own, asked, place, unnamed(value, axis))
        name = self._given[key]
        if isinstance(name, str) and name not in self.bound:
            self.bound[name] = self.promises.get(name) or SymbolInfo(_FREE, f"input '{value.name}'")
        return name

    def _choose(self, own: str | None, asked: int | str | None, place: str, fresh: str) -> int | str:
        if isinstance(asked, int):
            return asked
        name = asked or own or identifier(fresh)
        self.used.add(name)
        promise = self.promises.get(name)
        if promise is None or promise.unique or name not in self.bound:
            return name
        apart = identifier(f"{name}_{place}")
        self.promises[apart] = promise
        return apart


def _promises(program: Loaded) -> dict[str, SymbolInfo]:
    """Maps names to symbols: the model's own, overridden by the plan's."""
    found = {
        name: SymbolInfo(symbol.facts(), f"{program.name}, Symbol", symbol.unique)
        for name, symbol in program.declared.symbols.items()
    }
    return found | {
        name: SymbolInfo(rule.symbol.facts(), PurePath(rule.where).name, rule.symbol.unique)
        for name, rule in program.plan.dims.symbols.items()
    }


def _input_problems(graph: ir.Graph, plan: Plan) -> list[Problem]:
    problems = []
    by_name = {name_of(value): value for value in graph.inputs}
    for name, rule in plan.dims.inputs.items():
        value = by_name.get(name)
        if value is None:
            problems.append(unknown_input(name, rule.where, graph, plan))
            continue
        if value.shape is None:
            continue
        if len(value.shape) != len(rule.dims):
            problems.append(
                Problem(
                    rule.where,
                    f"input '{name}' has {len(value.shape)} dims in the model and {len(rule.dims)} in the plan",
                    help=f"the model says {value.shape}",
                )
            )
            continue
        for axis, (dim, asked) in enumerate(zip(value.shape.dims, rule.dims, strict=True)):
            if isinstance(dim, int) and asked is not None and asked != dim:
                problems.append(
                    Problem(
                        rule.where,
                        f"dim {axis} of input '{name}' is {dim} in the model and {asked} in the plan",
                        "a plan cannot change a size that the model fixes",
                        f"write {dim}, or export the model with a dynamic dim there",
                    )
                )
    return problems
