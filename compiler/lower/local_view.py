"""The local view of a program: the ops of every rank, task by task, begun by `localize` and extended by `differentiate` and `update`.

It is the one object that these passes hand on inside of the program, until `lower` makes rank programs of it. They share it since names and
messages of a rank depend on what that rank has by then: a name is free or taken, a value is there or must be brought. A pass writes into a
copy of its own (`begin`), so the program that it was given stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import TaskKind, Value
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.lower.comm import CommLowering
from partc.compiler.sharding.values.versions import ValueVersions


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient where a version of the parameter lies: its value there, and what each rank updates of that version.

    With `ids` it is a list of rows, of which these say where each belongs; `distinct`: none of them stands there twice.
    """

    parameter: ir.Value
    owner: ShardedValue
    value: Value
    share: ShardedValue
    ids: Value | None = None
    distinct: bool = False


@dataclass(frozen=True)
class AccumulatedGradient:
    """The sum of a parameter's gradients over the parts of a batch, not yet reduced over ranks."""

    parameter: ir.Value
    version: ShardedValue
    value: Value


@dataclass(frozen=True)
class LocalView:
    """The work of every rank, in the order of all: `comm` has the ranks' ops, and `forms` those of each node of the model.

    What the backward pass gives: the `gradients` of parameters in the order in which they
    are ready, those `accumulated` over the parts of a batch, and by version each cotangent (`totals`).
    """

    versions: ValueVersions
    comm: CommLowering
    forms: Mapping[NodeOnGroup, tuple[tuple[LocalForm, Group], ...]]
    gradients: tuple[Gradient, ...] = ()
    accumulated: tuple[AccumulatedGradient, ...] = ()
    totals: Mapping[ShardedValue, Value] = field(default_factory=dict)

    def begin(self, task: TaskKind) -> LocalView:
        """A copy for a pass that writes ops of `task`."""
        return replace(self, comm=self.comm.copy(task))


@dataclass(frozen=True, kw_only=True)
class Localized(Targeted):
    """The phase of a program in which what every rank does is written task by task."""

    local: LocalView
