"""The local view of a program: what every rank does, task by task, as `localize` begins it and `differentiate` and `update` go on.

It is the one object that these passes hand on inside of the program, until `lower` makes rank programs of it. They share it since names and
messages of a rank depend on what that rank has by then: a name is free or taken, a value is there or must be brought. A pass
writes into a copy of its own (`begin`), so the program that it was given stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.rank_program import LocalTensor, TaskKind
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.lower.comm import CommLowering
from partc.compiler.sharding.value_versions import ValueVersions


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient where a version of the parameter lies: its name there, and what each rank updates of that version.

    With `ids` it is a list of rows, of which these say where each belongs; `distinct`: none of them stands there twice.
    """

    parameter: ir.Value
    home: ShardedValue
    name: str
    share: ShardedValue
    ids: str = ""
    distinct: bool = False


@dataclass(frozen=True)
class AccumulatedGradient:
    """The sum of a parameter's gradients over the parts of a batch, not yet reduced over ranks."""

    parameter: ir.Value
    version: ShardedValue
    name: str


@dataclass(frozen=True)
class LocalView:
    """What every rank does, in the order of all: `comm` has the ranks' ops, and `forms` those of each node of the model.

    `inputs`: by rank the tensors that arrive there. What the backward pass gives: the `gradients` of parameters in the order in which they
    are ready, those `accumulated` over the parts of a batch, and by version the name of each cotangent (`totals`).
    """

    versions: ValueVersions
    comm: CommLowering
    inputs: tuple[Mapping[str, LocalTensor], ...]
    forms: Mapping[NodeOnGroup, tuple[tuple[LocalForm, Group], ...]]
    gradients: tuple[Gradient, ...] = ()
    accumulated: tuple[AccumulatedGradient, ...] = ()
    totals: Mapping[ShardedValue, str] = field(default_factory=dict)

    def begin(self, task: TaskKind) -> LocalView:
        """A copy for a pass that writes ops of `task`."""
        return replace(self, comm=self.comm.copy(task))
