"""The optimizer of a plan, read by the table: its numbers.

    optimizer: {type: momentum, lr: 0.01, momentum: 0.9}

chosen.slots                                   # ("momentum",): one tensor of the parameter's shape
chosen.scalars                                 # ("lr",): what the runtime feeds each step
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from partc.compiler.plan.target import TargetName
from partc.compiler.plan.training.optimizer_kind import ByRows, Form
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS
from partc.runtime.options import Options, Refused, Remedy, of_type, shown
from pydantic import BeforeValidator, Field, PlainValidator, WrapValidator, create_model


class Optimizer(Options):
    """An optimizer with its numbers, and its own options besides. Without `lr` it has the rate of the training's."""

    type: str
    lr: float = Field(default_factory=lambda: 1.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)

    @classmethod
    def instead_of(cls, key: str, keys: Collection[str]) -> str:
        if key in OPTIMIZERS:
            return f"write 'type: {key}'"
        if key in ("beta1", "beta2") and "betas" in keys:
            return "write 'betas: [0.9, 0.999]'"
        return super().instead_of(key, keys)

    @cached_property
    def hyper(self) -> Mapping[str, float]:
        """The numbers but `lr` and `weight_decay`, by name, `betas` as `beta1` and `beta2`."""
        numbers: dict[str, float] = {}
        for key in OPTIMIZERS[self.type].options:
            match getattr(self, key):
                case (first, second):
                    name = _PAIRS.get(key, key)
                    numbers |= {f"{name}1": first, f"{name}2": second}
                case number if key not in ("lr", "weight_decay"):
                    numbers[key] = float(number)
        return numbers

    @property
    def form(self) -> Form:
        """The form of the formula that the numbers select."""
        return OPTIMIZERS[self.type].form(self.hyper)

    @property
    def slots(self) -> tuple[str, ...]:
        """The state tensors of each parameter, each of its shape and type."""
        return self.form.slots

    def slots_of(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Maps each state tensor of a parameter of `rank` dims to the dims along which it has one element."""
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
        """The way in which the optimizer treats a gradient that lists rows of a table."""
        return OPTIMIZERS[self.type].by_rows

    @property
    def is_elementwise(self) -> bool:
        """Whether the update of an element reads only the same elements of the parameter's gradient and slots."""
        return bool(self.form.body)

    @property
    def is_lazy(self) -> bool:
        """Whether only the looked-up rows of a table are updated."""
        return self.by_rows is ByRows.LAZY

    def is_like(self, other: Optimizer) -> bool:
        """Whether both are the same except for rate and weight decay, which are numbers of each parameter."""
        return (self.type, self.hyper) == (other.type, other.hyper)

    def initial(self, slot: str) -> float:
        """The initial value of every element of a slot."""
        if slot not in {*self.slots, *self.slots_of(2)}:
            raise KeyError(f"{self.type} has no slot '{slot}'")
        option = OPTIMIZERS[self.type].initial.get(slot)
        return self.hyper[option] if option else 0.0

    @property
    def is_scheduled(self) -> bool:
        """Whether its rate is that of the step, which a schedule may change."""
        return OPTIMIZERS[self.type].is_scheduled


_PAIRS = {"betas": "beta"}
"""Maps each pair option to the name of its numbers, without their index."""


def _shard(value: object) -> object:
    if value not in (None, False, True) and not isinstance(value, str):
        raise Refused(f"expected the name of a mesh axis, but got {shown(value)}")
    return value or None


class _OfTraining(Options):
    """What the optimizer of a training says besides.

    `shard`: the mesh axis along which ranks share its state and its work; true: all that hold the same.
    `target`: the kind of device that updates parameters, and where their state lies; empty: that of what reads a parameter.
    """

    lr: float = Field(ge=0, description="The learning rate.")
    shard: Annotated[str | Literal[True] | None, PlainValidator(_shard, json_schema_input_type=str | bool | None)] = (
        None
    )
    target: TargetName | None = None


def _typed(value: object) -> object:
    """Expands an optimizer that is written as its type alone."""
    return {"type": value} if isinstance(value, str) else value


def _own(value: object) -> object:
    for key in ("shard", "target"):
        if isinstance(value, dict) and key in value:
            fact = f"'{key}' applies to all parameters; it cannot be set for a pattern"
            raise Refused(fact, help="write it in train.optimizer", key=key)
    return _typed(value)


_make: Any = create_model
OWN: dict[str, Any] = {
    name: _make(
        f"{'Lazy' * name.startswith('lazy_')}{kind.function}Options",
        __base__=Optimizer,
        __module__=__name__,
        type=(Literal[name], ...),
        **{key: option.definition for key, option in kind.options.items() if key != "lr"},
    )
    for name, kind in OPTIMIZERS.items()
}
"""Maps each type to the class of an optimizer for some parameters."""
OF_TRAINING: dict[str, Any] = {
    name: _make(f"Training{own.__name__}", __base__=(_OfTraining, own), __module__=__name__)
    for name, own in OWN.items()
}
"""Maps each type to the class of a training's optimizer."""

if TYPE_CHECKING:

    class TrainingOptimizer(_OfTraining, Optimizer):
        """The optimizer of a training."""

    OwnOptimizer: TypeAlias = Optimizer
    OptimizerForm: TypeAlias = TrainingOptimizer
else:
    _ANY_OWN, _ANY = reduce(or_, OWN.values()), reduce(or_, OF_TRAINING.values())
    OwnOptimizer = Annotated[
        _ANY_OWN,
        Field(discriminator="type"),
        WrapValidator(of_type),
        BeforeValidator(_own, json_schema_input_type=_ANY_OWN | Literal[tuple(OWN)]),
    ]
    OptimizerForm = Annotated[
        _ANY,
        Field(discriminator="type"),
        WrapValidator(of_type),
        BeforeValidator(_typed, json_schema_input_type=_ANY),
        Remedy("write optimizer: {type: momentum, lr: 0.01, momentum: 0.9}"),
    ]
