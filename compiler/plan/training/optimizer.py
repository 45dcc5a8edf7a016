"""The optimizer of a plan, read by the table: its numbers, and what is wrong with the options that are given.

chosen = optimizer("momentum", {"lr": 0.01, "momentum": 0.9})
chosen.slots                                   # ("momentum",): one tensor of the parameter's shape
chosen.scalars                                 # ("lr",): what the runtime feeds each step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.training.optimizer_kind import ByRows, Form
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS
from partc.compiler.plan.violation import shown


@dataclass(frozen=True)
class Optimizer:
    """An optimizer with its numbers. `hyper`: those but `lr` and `weight_decay`, by name, `betas` as `beta1` and `beta2`."""

    type: str
    lr: float
    weight_decay: float = 0.0
    hyper: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def form(self) -> Form:
        """The form of the type that the numbers make."""
        return OPTIMIZERS[self.type].form(self.hyper)

    @property
    def slots(self) -> tuple[str, ...]:
        """The tensors that are kept of each parameter, each of its shape and type."""
        return self.form.slots

    def slots_of(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """The tensors that are kept of a parameter of `rank` dims, by name, with the dims along which they have one element."""
        matrix = OPTIMIZERS[self.type].matrix_slots if rank > 1 else {}
        but_first = tuple(range(1 - rank, 0))
        return {slot: but_first if ones is None else ones for slot, ones in matrix.items()} or dict.fromkeys(
            self.slots, ()
        )

    @property
    def scalars(self) -> tuple[str, ...]:
        """The rank-0 float32 values that a step reads; where gradients are scaled `scale` is one more."""
        return OPTIMIZERS[self.type].scalars

    @property
    def by_rows(self) -> ByRows:
        """What a gradient is for it that names the rows of a table."""
        return OPTIMIZERS[self.type].by_rows

    @property
    def is_elementwise(self) -> bool:
        """Whether an update needs nothing of a parameter but the same elements of its gradient and slots."""
        return bool(self.form.body)

    @property
    def is_lazy(self) -> bool:
        """Whether a looked-up table is updated where it was looked up alone."""
        return self.by_rows is ByRows.LAZY

    def is_like(self, other: Optimizer) -> bool:
        """Whether both are one but for rate and weight decay, which are numbers of each parameter."""
        return (self.type, self.hyper) == (other.type, other.hyper)

    def initial(self, slot: str) -> float:
        """What every element of a slot begins with."""
        if slot not in {*self.slots, *self.slots_of(2)}:
            raise KeyError(f"{self.type} has no slot '{slot}'")
        option = OPTIMIZERS[self.type].initial.get(slot)
        return self.hyper[option] if option else 0.0

    @property
    def is_scheduled(self) -> bool:
        """Whether its rate is that of the step."""
        return OPTIMIZERS[self.type].is_scheduled


def optimizer(
    type: object, options: Mapping[str, object], where: Callable[[str], str] = lambda key: "optimizer"
) -> Optimizer:
    """The optimizer of a type and its options, defaults filled in. Raises CompileError with all that is wrong, each at `where(key)`."""
    if not isinstance(type, str) or type not in OPTIMIZERS:
        near = nearest(type, OPTIMIZERS, 1) if isinstance(type, str) else []
        remedy = f"the nearest is '{near[0]}'" if near else f"choose from {', '.join(OPTIMIZERS)}"
        fact = (
            f"unknown optimizer '{type}'"
            if isinstance(type, str)
            else f"an optimizer's type is a text, but got {shown(type)}"
        )
        raise CompileError(Problem(where("type"), fact, help=remedy))
    known = OPTIMIZERS[type].options
    problems: list[Problem] = []
    numbers: dict[str, float] = {}
    for key in options:
        if key not in known:
            problems.append(Problem(where(key), f"{type}: unknown option '{key}'", help=_remedy(type, key)))
    for key, option in known.items():
        if option.default is None and key not in options:
            problems.append(Problem(where(key), f"{type}: '{key}' is missing", help=f"it is {option.law}"))
            continue
        value = options.get(key, option.default)
        match option.number(value):
            case None:
                got = value if isinstance(value, list | tuple) else shown(value)
                problems.append(Problem(where(key), f"{type}: expected {option.law} as '{key}', but got {got}"))
            case (first, second):
                name = _PAIRS.get(key, key)
                numbers |= {f"{name}1": first, f"{name}2": second}
            case float(number):
                numbers[key] = number
    if problems:
        raise CompileError(problems)
    return Optimizer(type, numbers.pop("lr"), numbers.pop("weight_decay"), numbers)


_PAIRS = {"betas": "beta"}
"""What each of the numbers of a pair is called, without its place."""


def _remedy(type: str, key: str) -> str:
    known = OPTIMIZERS[type].options
    if key in OPTIMIZERS:
        return f"write 'type: {key}'"
    if key in ("beta1", "beta2") and "betas" in known:
        return "write 'betas: [0.9, 0.999]'"
    near = nearest(key, known, 1)
    return f"the nearest is '{near[0]}'" if near else f"the options of {type} are {', '.join(known)}"
