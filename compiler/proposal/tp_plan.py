"""Applies the `tp_plan` of a model of `transformers` to the sets of linked dims: the sets that it shards, and its entries that do not
apply.

An entry speaks of the products inside of its module, or of those that read its parameter: colwise of the dims that their weights make,
rowwise of those that they sum over. The plan shards a set if entries name one of its products at least, and none says otherwise. What partc
derives (which output is gathered, what lies between two entries) needs no entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.declared import TpPlanEntry
from partc.compiler.ir.program import Typed
from partc.compiler.matching import matched_nodes, readers_of
from partc.compiler.plan.sharding import MEANINGS
from partc.compiler.proposal.linked import Linked
from partc.compiler.sharding.seeding.styles import styled
from partc.runtime.options import Refused


@dataclass(frozen=True)
class TpPlan:
    """The entries of a `tp_plan`, the nodes that each speaks of, and by node the entry that decides, which is the last one."""

    entries: tuple[TpPlanEntry, ...] = ()
    nodes: Mapping[TpPlanEntry, tuple[ir.Node, ...]] = field(default_factory=dict)
    decided: Mapping[ir.Node, TpPlanEntry] = field(default_factory=dict)

    def sources(self, one: Linked) -> list[str]:
        """The classes whose entries shard a set; none where no entry names it, or one does not shard it."""
        speaking = [entry for _, entry in self._speaking(one)]
        return [] if self.against(one) else list(dict.fromkeys(entry.source for entry in speaking))

    def against(self, one: Linked) -> TpPlanEntry | None:
        """An entry that does not shard a set of which it speaks."""
        return next((entry for style, entry in self._speaking(one) if _style(entry) != style), None)

    def _speaking(self, one: Linked) -> Iterator[tuple[str, TpPlanEntry]]:
        """The entries that decide for the products of a set, each with the style that would shard the set there."""
        for style, nodes in (("colwise", one.producers), ("rowwise", one.summed)):
            yield from ((style, self.decided[node]) for node in nodes if node in self.decided)

    def not_taken(self, chosen: Sequence[Linked], refused: Sequence[tuple[Linked, str]]) -> Iterator[str]:
        """The entries that are not taken as they stand, each with the reason."""
        for entry in self.entries:
            if why := self._why_not(entry, chosen, refused):
                yield f"{entry.pattern}: {entry.style} ({entry.source}): {why}"

    def _why_not(self, entry: TpPlanEntry, chosen: Sequence[Linked], refused: Sequence[tuple[Linked, str]]) -> str:
        meaning = MEANINGS.get(entry.style)
        if meaning is None:
            return "partc has no such style"
        nodes = self.nodes[entry]
        if not nodes:
            return "matches no module and no weight of the model"
        if meaning.style not in ("colwise", "rowwise"):
            return ""

        def speaks_of(one: Linked) -> bool:
            return not set(nodes).isdisjoint(one.producers if meaning.style == "colwise" else one.summed)

        reasons = {reason: None for one, reason in refused if speaks_of(one)}
        taken = any(map(speaks_of, chosen))
        if not taken and not reasons:
            return "no product with a weight inside has such a dim"
        if reasons:
            return next(iter(reasons))
        return (
            "taken as colwise, since an output that is gathered at once sends no fewer bytes" if meaning.gathers else ""
        )


def read_tp_plan(program: Typed, entries: Sequence[TpPlanEntry]) -> TpPlan:
    """What the entries say of the nodes of a program whose packed weights are taken apart."""
    by_entry: dict[TpPlanEntry, tuple[ir.Node, ...]] = {}
    decided: dict[ir.Node, TpPlanEntry] = {}
    for entry in entries:
        try:
            nodes = matched_nodes(program, entry.pattern) or readers_of(program, entry.pattern)
        except (Refused, ValueError):
            nodes = []  # not a pattern of a plan
        by_entry[entry] = tuple(dict.fromkeys(map(styled, nodes)))
        if _style(entry) in ("colwise", "rowwise", "replicate"):
            decided.update(dict.fromkeys(by_entry[entry], entry))
    return TpPlan(tuple(entries), by_entry, decided)


def matching_entries(program: Typed, entries: Sequence[TpPlanEntry]) -> list[TpPlanEntry]:
    """The entries; a pattern that matches nothing from the model's root on is taken below any module, as that of one block is."""
    found = []
    for entry in entries:
        below = dataclasses.replace(entry, pattern=f"**.{entry.pattern}")
        known, deeper = (read_tp_plan(program, [one]).nodes[one] for one in (entry, below))
        found.append(below if deeper and not known else entry)
    return found


def _style(entry: TpPlanEntry) -> str:
    return MEANINGS[entry.style].style if entry.style in MEANINGS else ""
