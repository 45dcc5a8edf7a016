"""The versions of values: as each is defined, and on every other group or in every other layout in which it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.sharded import ShardedValue


@dataclass
class ValueVersions:
    """All versions of each value.

    `defs`: as produced or fed. `canonical`: what a partial definition is reduced to, or an output is resharded to as the plan asks. `uses`:
    versions that are read, with the first reader as cause. `delivered`: versions of the model's outputs. `names`: what each is called.
    `read` and `made`: of a node on a group its operands, None for one that is absent, and its outputs.
    """

    defs: dict[ir.Value, list[ShardedValue]] = field(default_factory=dict)
    canonical: dict[ShardedValue, ShardedValue] = field(default_factory=dict)
    uses: dict[ir.Value, dict[ShardedValue, str]] = field(default_factory=dict)
    delivered: dict[ir.Value, list[ShardedValue]] = field(default_factory=dict)
    names: dict[ShardedValue, str] = field(default_factory=dict)
    derived: set[ShardedValue] = field(default_factory=set)
    """Versions that only readers whose sharding is derived ask for."""
    read: dict[NodeOnGroup, Sequence[ShardedValue | None]] = field(default_factory=dict)
    made: dict[NodeOnGroup, Sequence[ShardedValue]] = field(default_factory=dict)

    def definition_for(self, version: ShardedValue) -> ShardedValue:
        """The version from which a used one is made: the definition on its own group, else the first one; in its canonical layout."""
        defs = self.defs[version.value]
        home = next((one for one in defs if one.group == version.group), defs[0])
        return self.canonical.get(home, home)
