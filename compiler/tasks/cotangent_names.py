"""The names of cotangents: derived from the primal's name, without counters.

    h read by one node                          h.grad
    h read by fc2.Gemm and skip.Add             h.grad.fc2.Gemm, h.grad.skip.Add, and their sum h.grad
    h made on two groups, each read by one      h.grad.fc2.Gemm there, h.grad.skip.Add here: one name is one node on all ranks
    each rank's term of a sum over ranks        h.grad.partial
    of the version h@[2, 1] of h                h@[2, 1].grad

A node that hands a cotangent on (an Add) makes none, and the name stays. What a gradient computes on its way begins with the name of the
output whose cotangent it takes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from partc.compiler.autodiff.reach import flowing
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import ShardedValue, facts_of
from partc.compiler.layout.layout import Layout
from partc.compiler.sharding.values.operands import input_layout_of, replicated_on

PARTIAL = ".partial"


class CotangentNames:
    """The names of what nodes contribute to cotangents; `at` has the primals, `homes` the definitions of versions that are read."""

    def __init__(
        self, program: Targeted, at: Mapping[ShardedValue, Value], homes: Mapping[ShardedValue, ShardedValue]
    ) -> None:
        assert program.training is not None
        self._program, self._at, self._homes = program, at, homes
        self._parameters = program.training.parameters
        self._contributions: dict[ir.Value | ShardedValue, int] = {}
        self._readers: dict[ir.Value, set[ir.Node]] = {}
        for node in flowing(program.reads, program.training):
            for group in program.placement[node].groups:
                operands = [k for k, value in enumerate(node.inputs) if value is not None]
                read = {input_layout_of(program, NodeOnGroup(node, group), k) for k in operands}
                for version in read | {replicated_on(value, group) for value in program.around[node]}:
                    whole = self._whole(version)
                    self._contributions[whole] = self._contributions.get(whole, 0) + 1
                    self._readers.setdefault(version.value, set()).add(node)

    def _whole(self, version: ShardedValue) -> ir.Value | ShardedValue:
        """The value to which the cotangent of a version contributes: that of a parameter, or of the definition of another value."""
        return version.value if version.value in self._parameters else self._homes.get(version, version)

    def spellings(self, instance: NodeOnGroup, version: ShardedValue, layout: Layout) -> list[str]:
        """The names that a node's contribution in a layout may have, in order: the next one where one is taken."""
        primal = name_of(version.value) if version.layout.partial else str(self._at[version])
        end = PARTIAL if layout.partial else ""
        path = f"{primal}.grad.{self._program.paths[instance.node]}"
        alone = self._contributions.get(self._whole(version), 0) <= 1 and len(self._readers.get(version.value, ())) <= 1
        short = [f"{primal}.grad{end}"] if alone else []
        return [*short, f"{path}{end}", f"{path}@{facts_of(instance.group).text}{end}"]


def sum_spellings(cotangent: str, version: ShardedValue, *, final: bool = True) -> list[str]:
    """The names of a sum of contributions, in order; `final`: it is the cotangent, nothing has to be added or brought elsewhere."""
    ranks = facts_of(version.group).text
    if version.layout.partial:
        return [f"{cotangent}{PARTIAL}", f"{cotangent}{PARTIAL}@{ranks}"]
    primal = cotangent.removesuffix(".grad")
    apart = [f"{primal}@{version.layout}.grad", f"{primal}@{version.layout}@{ranks}.grad"]
    return [cotangent, *apart] if final else apart


def brought_spellings(name: str, cotangent: str, version: ShardedValue) -> list[str]:
    """The names of a contribution in the layout in which it is added to others, in order: by the node that gave it where that is known."""
    primal, _, path = name.removesuffix(PARTIAL).partition(".grad")
    source = path.removeprefix(".") or ("reduced" if f"{primal}.grad" == cotangent else primal)
    return [f"{cotangent}.{source}", f"{cotangent}.{source}@{facts_of(version.group).text}"]
