"""`shard`: with it a `model.py` declares the sharding of a module, a function or a single op; finds the nodes that this applies to.

    self.block1.shard(in_strategy=((1, 8),), parameter_plan={"self.block1.dense2.weight": (8, 1)})
    shard(dense_relu, in_strategy=((4, 2), None, None))(op, x, weight, bias)
    shard(op.MatMul, in_strategy=((2, 4), (4, 1)))(x, weight)

Strategies speak of the tensors in the order of the call: one entry each, a number of shards or mesh axes for each dim, None where the
entry, or the cut of the dim beside axes, is left out. Regions (`calls.py`) of shard do not nest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from partc.compiler.directives.calls import ShardCall, is_module
from partc.compiler.directives.recorder import calling_line, recorder
from partc.compiler.directives.traced import traced, wrong_device
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.shard_spec import DimSpec, ShardSpec, dim_spec, one_spelling
from partc.compiler.plan.target import named_target
from partc.runtime.options import Refused

Target = TypeVar("Target")
_STRATEGY = "a strategy is a tuple with a tuple for each tensor, or None to derive it: ((4, 2), None)"


def shard(
    fn_or_module: Target,
    in_strategy: Sequence[Sequence[Any] | None] | None = None,
    out_strategy: Sequence[Sequence[Any] | None] | None = None,
    parameter_plan: Mapping[str, Sequence[Any]] | None = None,
    device: str | None = None,
    level: int = 0,
) -> Target:
    """Shards a module, a function or an op over its group. Returns the module, or the function to call instead.

    `parameter_plan` says how parameters of a module are kept, named from there (`dense2.weight`) or as the caller sees them
    (`self.block1.dense2.weight`). `device`, `cpu` or `cuda`, is the kind of device that runs it within its ranks; `Ascend`, MindSpore's
    default, leaves it to the job. `level` says what to prefer where the strategies leave a choice: 0 fewest bytes, 1 less memory,
    2 less time. The plan wins over the model. Raises CompileError with all that is wrong.
    """
    where = calling_line(sys._getframe(1))
    problems = [
        *_wrong_target(fn_or_module, parameter_plan, where),
        *wrong_device(device, where),
    ]
    if isinstance(level, bool) or level not in (0, 1, 2):
        problems.append(Problem(where, f"level is {level!r}", "a level is 0, 1 or 2"))
    read = _Reading(where, problems)
    inputs = None if in_strategy is None else read.strategy("in_strategy", "input", in_strategy)
    outputs = None if out_strategy is None else read.strategy("out_strategy", "output", out_strategy)
    plan = parameter_plan if isinstance(parameter_plan, Mapping) else {}
    parameters = [read.spec(f"parameter_plan['{name}']", entry) for name, entry in plan.items()]
    if inputs is None and outputs is None and not parameters:
        read.problem("shard is given no strategy", _STRATEGY, "give in_strategy, out_strategy or parameter_plan")
    specs = iter(read.one_spelling([*(inputs or ()), *(outputs or ()), *parameters]))
    if problems:
        raise CompileError(problems)
    call = ShardCall(
        fn_or_module,
        where,
        None if inputs is None else tuple(next(specs) for _ in inputs),
        None if outputs is None else tuple(next(specs) for _ in outputs),
        {name: spec for name, spec in zip(plan, specs, strict=True) if spec is not None},
        level,
    )
    call.device = named_target(device)
    if record := recorder():
        record.shards.append(call)
    if is_module(fn_or_module):
        return fn_or_module
    return cast(Target, traced(call, cast("Callable[..., object]", fn_or_module)))


@dataclass
class _Reading:
    """Reads strategies of Python values; what is wrong with them is added to `problems`."""

    where: str
    problems: list[Problem]

    def strategy(self, name: str, kind: str, value: object) -> list[list[DimSpec | None] | None]:
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
        return [None if entry is None else self.spec(f"{name}[{k}]", entry) for k, entry in enumerate(value)]

    def spec(self, name: str, value: object) -> list[DimSpec | None]:
        if not isinstance(value, tuple | list):
            self.problem(f"{name} is {value!r}", "a strategy is a tuple with an entry for each dim: (8, 1)", "")
            return []
        entries: list[DimSpec | None] = []
        for dim, entry in enumerate(value):
            try:
                entries.append(dim_spec(entry))
            except Refused as violation:
                self.problems.append(Problem.of(violation, self.where, f"{name}, dim {dim}"))
        return entries

    def one_spelling(self, specs: Sequence[Sequence[DimSpec | None] | None]) -> list[ShardSpec | None]:
        try:
            return one_spelling(specs)
        except Refused as violation:
            self.problems.append(Problem.of(violation, self.where, "shard"))
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
        yield from (Problem(where, f"parameter_plan has the name {name!r}, which is not a string") for name in names)
        if parameter_plan and not is_module(target):
            fact = "parameter_plan is only for modules"
            yield Problem(
                where, fact, "only modules have parameters", "shard the module, or shard the tensor by in_strategy"
            )
