"""`shard`: a `model.py` says how a module, a function or a single op is cut, and what of the graph that speaks of.

    self.block1.shard(in_strategy=((1, 8),), parameter_plan={"self.block1.dense2.weight": (8, 1)})
    shard(dense_relu, in_strategy=((4, 2), None, None))(op, x, weight, bias)
    shard(op.MatMul, in_strategy=((2, 4), (4, 1)))(x, weight)

The region of a module is all that is inside. That of a function is what one call of it emits: the nodes get a scope of the
function's name (`dense_relu.MatMul`, of a second call in the same module `dense_relu_1.MatMul`), also those of modules that
it calls. That of an op is its node. Strategies speak of the tensors in the order of the call: one entry each, a number of
pieces or mesh axes for each dim, None where the entry, or the cut of the dim beside axes, is left out. Regions do not nest.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder
from partc.compiler.declare import Collector, calling_line, collector
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.cut import Cut, Piece, one_spelling, piece_of, shown_cut
from partc.compiler.plan.violation import Violation

Target = TypeVar("Target")
_STRATEGY = "a strategy is a tuple with a tuple for each tensor, or None to derive it: ((4, 2), None)"


@dataclass
class Region:
    """What one call emitted: a scope's path, or one node; and the tensors that went in and came out."""

    path: str
    node: ir.Node | None
    arguments: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]


@dataclass
class ShardCall:
    """One call of `shard`: the module or function, its cuts, and the regions that its calls became."""

    target: object
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | None, ...] | None
    parameters: Mapping[str, Cut]
    level: int
    where: str
    regions: list[Region] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The module's class, the function's name, or the op's type."""
        if is_module(self.target):
            return type(self.target).__name__
        if bound := _bound_op(self.target):
            return bound[1]
        name = str(getattr(self.target, "__name__", type(self.target).__name__))
        return name if name.isidentifier() else "function"


def shard(
    fn_or_module: Target,
    in_strategy: Sequence[Sequence[Any] | None],
    out_strategy: Sequence[Sequence[Any] | None] | None = None,
    parameter_plan: Mapping[str, Sequence[Any]] | None = None,
    device: str | None = None,
    level: int = 0,
) -> Target:
    """Cuts a module, a function or an op over its group; hands the module back, or the function to be called instead.

    `parameter_plan` cuts parameters of a module, named from there (`dense2.weight`) or as the caller sees them
    (`self.block1.dense2.weight`). `device` is checked and changes nothing; `level` says what to prefer where much is left to
    derive (0 less communication, 1 less memory, 2 speed). The plan wins over the model. Raises CompileError with all that is
    wrong.
    """
    where = calling_line(sys._getframe(1))
    problems = [
        *_wrong_target(fn_or_module, parameter_plan, where),
        *_wrong_options(device, level, where),
    ]
    read = _Reading(where, problems)
    inputs = read.strategy("in_strategy", "input", in_strategy)
    outputs = None if out_strategy is None else read.strategy("out_strategy", "output", out_strategy)
    plan = parameter_plan if isinstance(parameter_plan, Mapping) else {}
    parameters = [read.cut(f"parameter_plan['{name}']", entry) for name, entry in plan.items()]
    cuts = iter(read.one_spelling([*inputs, *(outputs or ()), *parameters]))
    if problems:
        raise CompileError(problems)
    call = ShardCall(
        fn_or_module,
        tuple(next(cuts) for _ in inputs),
        None if outputs is None else tuple(next(cuts) for _ in outputs),
        {name: cut for name, cut in zip(plan, cuts, strict=True) if cut is not None},
        level,
        where,
    )
    if record := collector():
        record.shards.append(call)
    if is_module(fn_or_module):
        return fn_or_module
    return cast(Target, _traced(call, cast("Callable[..., object]", fn_or_module)))


def is_module(target: object) -> bool:
    """Whether this is a module of onnxscript or torch."""
    return not isinstance(target, type) and hasattr(target, "named_modules") and hasattr(target, "forward")


def note_call(module: object, arguments: Sequence[object], result: object) -> None:
    """Records what a module that is being traced was given and gave back, if `shard` spoke of it."""
    record = collector()
    for call in record.shards if record else ():
        if call.target is module:
            region = Region("", None, _tensors(arguments), _tensors([result]))
            _check_counts(call, region)
            call.regions.append(region)


def _traced(call: ShardCall, fn: Callable[..., object]) -> Callable[..., object]:
    bound = _bound_op(fn)

    def traced(*arguments: object, **named: object) -> object:
        op = bound[0] if bound else arguments[0] if arguments else None
        if not isinstance(op, OpBuilder):
            fact = f"'{call.name}' is called without the op builder"
            law = "the region of a function is what it emits: its first argument is the op builder of forward"
            raise CompileError(Problem(call.where, fact, law, "call it with op first; of a torch model shard a module"))
        builder, record = op.builder, collector()
        if record and builder.parent is not None:
            fact = f"'{call.name}' is called in a body of If, Loop or Scan, whose ops run whole"
            raise CompileError(Problem(call.where, fact, help="shard what is outside of it"))
        given = _tensors([*arguments, *named.values()])
        with _scope(builder, None if bound else call.name, record) as path:
            before = builder.graph.num_nodes()
            result = fn(*arguments, **named)
        results = _tensors([result])
        if record:
            if builder.graph.num_nodes() == before:
                raise CompileError(Problem(call.where, f"'{call.name}' emits no op", help="shard what computes"))
            region = Region(path, results[0].producer() if bound else None, given, results)
            _check_counts(call, region)
            call.regions.append(region)
        return result

    return functools.wraps(fn)(traced)


@contextmanager
def _scope(builder: GraphBuilder, name: str | None, record: Collector | None) -> Iterator[str]:
    """Within, nodes get a scope of this name, made unlike those of earlier calls; its path without the root's own name."""
    around = [part for part in builder._scope_names()[1:] if part]
    if name is None:
        yield ".".join(around)
        return
    taken = (
        {region.path for call in record.shards for region in call.regions if region.node is None} if record else set()
    )
    path, k = ".".join([*around, name]), 0
    while path in taken:
        k += 1
        path = ".".join([*around, f"{name}_{k}"])
    rootless = not builder._scope_names()
    for scope in ([""] if rootless else []) + [path.rpartition(".")[2]]:
        builder.push_module(scope)
    try:
        yield path
    finally:
        builder.pop_module()
        if rootless:
            builder.pop_module()


def _check_counts(call: ShardCall, region: Region) -> None:
    """Raises CompileError where strategies have not one entry for each tensor, and one for each dim of it."""
    problems: list[Problem] = []
    sides = [("in", "is called with", call.inputs, region.arguments)]
    if call.outputs is not None:
        sides.append(("out", "gives back", call.outputs, region.results))
    for side, verb, cuts, values in sides:
        if len(cuts) != len(values):
            fact = f"{side}_strategy is for {_count(len(cuts), 'tensor')}, but '{call.name}' {verb} {len(values)}"
            problems.append(Problem(call.where, fact, help="write None for one to derive"))
            continue
        for k, (cut, value) in enumerate(zip(cuts, values, strict=True)):
            if cut is not None and value.shape is not None and len(cut) != len(value.shape):
                dims = ", ".join(str(dim) for dim in value.shape)
                fact = f"{side}_strategy[{k}] {shown_cut(cut)} cuts {_count(len(cut), 'dim')}, but the tensor has"
                fact = f"{fact} {len(value.shape)}, [{dims}]"
                problems.append(Problem(call.where, fact, help="write one entry for each dim"))
    if problems:
        raise CompileError(problems)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _tensors(values: Sequence[object]) -> tuple[ir.Value, ...]:
    found: list[ir.Value] = []
    for value in values:
        match value:
            case ir.Value():
                found.append(value)
            case list() | tuple():
                found += _tensors(value)
            case Mapping():
                found += _tensors(list(value.values()))
    return tuple(found)


def _bound_op(fn: object) -> tuple[OpBuilder, str] | None:
    """The builder and op type of `op.MatMul`, which a builder makes as a function of its own."""
    if not inspect.isfunction(fn) or fn.__module__ != OpBuilder.__module__:
        return None
    inside = inspect.getclosurevars(fn).nonlocals
    builder, op_type = inside.get("self"), inside.get("op_type")
    return (builder, op_type) if isinstance(builder, OpBuilder) and isinstance(op_type, str) else None


@dataclass
class _Reading:
    """Reads strategies of Python values; what is wrong with them is added to `problems`."""

    where: str
    problems: list[Problem]

    def strategy(self, name: str, kind: str, value: object) -> list[list[Piece | None] | None]:
        if not isinstance(value, tuple | list):
            self.problem(
                f"{name} is {value!r}", _STRATEGY, f"write (({value}, ...),)" if isinstance(value, int) else ""
            )
            return []
        flat = [entry for entry in value if entry is not None and not isinstance(entry, tuple | list)]
        if flat or not value:
            fact = f"{name} is {value!r}, which has no tuple for {'each' if value else 'any'} {kind}"
            self.problem(fact, _STRATEGY, f"write ({value!r},) for one {kind}" if len(flat) == len(value) > 0 else "")
            return []
        return [None if entry is None else self.cut(f"{name}[{k}]", entry) for k, entry in enumerate(value)]

    def cut(self, name: str, value: object) -> list[Piece | None]:
        if not isinstance(value, tuple | list):
            self.problem(f"{name} is {value!r}", "a cut is a tuple with an entry for each dim: (8, 1)", "")
            return []
        found: list[Piece | None] = []
        for dim, entry in enumerate(value):
            try:
                found.append(piece_of(entry))
            except Violation as violation:
                self.problems.append(violation.at(self.where, f"{name}, dim {dim}"))
        return found

    def one_spelling(self, cuts: Sequence[Sequence[Piece | None] | None]) -> list[Cut | None]:
        try:
            return one_spelling(cuts)
        except Violation as violation:
            self.problems.append(violation.at(self.where, "shard"))
            return []

    def problem(self, fact: str, law: str, help: str) -> None:
        self.problems.append(Problem(self.where, fact, law, help))


def _wrong_target(target: object, parameter_plan: object, where: str) -> Iterator[Problem]:
    if isinstance(target, type):
        yield Problem(where, f"shard got the class {target.__name__}", help="make an instance of it")
    elif not is_module(target) and not callable(target):
        yield Problem(where, f"shard takes a module, a function or an op such as op.MatMul, but got {target!r}")
    elif parameter_plan is not None and not isinstance(parameter_plan, Mapping):
        yield Problem(where, f"parameter_plan is {parameter_plan!r}", help="write {'dense2.weight': (8, 1)}")
    elif isinstance(parameter_plan, Mapping):
        names = [name for name in parameter_plan if not isinstance(name, str)]
        yield from (Problem(where, f"parameter_plan has the name {name!r}, which is no text") for name in names)
        if parameter_plan and not is_module(target):
            fact = "parameter_plan is given for what is no module"
            yield Problem(
                where, fact, "parameters belong to modules", "shard the module, or cut the tensor by in_strategy"
            )


def _wrong_options(device: object, level: object, where: str) -> Iterator[Problem]:
    if device is not None and not isinstance(device, str):
        yield Problem(where, f"device is {device!r}", help="write a name such as 'CPU', or leave it out")
    if isinstance(level, bool) or level not in (0, 1, 2):
        yield Problem(where, f"level is {level!r}", "a level is 0, 1 or 2")
