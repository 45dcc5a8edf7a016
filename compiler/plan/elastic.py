"""The plan's `elastic`: the numbers of ranks on which a training may continue.

Each number of ranks compiles the same plan with another `ranks`. The mesh axis `dp` gets the ranks that the other axes leave; the rest of
the plan stays as written, so a placement, a stage or a fixed number of shards must fit each number of ranks.

    ranks: 8
    mesh: {dp: 4, tp: 2}
    elastic: {ranks: [8, 6, 4]}        # {dp: 4, tp: 2}, {dp: 3, tp: 2}, {dp: 2, tp: 2}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.groups import DATA_AXIS, frame_in, shown_mesh
from partc.compiler.plan.pipeline import MOST_MICROBATCHES, PipelineRules
from partc.runtime.artifact.format import MOST_RANKS
from partc.runtime.options import Options, Refused
from pydantic import Field, ValidationInfo, model_validator

_MOST_NUMBERS = 32
_LAW = "on each number of ranks the mesh's axis 'dp' takes what the other axes leave"


class ElasticEntry(Options):
    """The numbers of ranks of a training, of each of which the artifact has programs."""

    ranks: Annotated[
        list[Annotated[int, Field(ge=1, le=MOST_RANKS)]], Field(min_length=1, max_length=_MOST_NUMBERS)
    ] = Field(
        description="The numbers of ranks that the training may run on, the plan's 'ranks' first: [8, 6, 4]. The mesh's axis dp takes "
        "what the other axes leave of each; the batch and the losses are the same on all."
    )

    parts: int | None = Field(
        None,
        ge=2,
        le=MOST_MICROBATCHES,
        description="The number of equal parts of a batch, each computed by itself and all sums over them in one order: a training has the "
        "same bits on each number of ranks. A multiple of each number, at least twice.",
    )
    statistics: Literal["part"] | None = Field(
        None,
        description="part: a batch normalization takes its statistics of each part; without it such a layer is refused with 'parts'.",
    )

    copies: Literal[1] | None = Field(
        None,
        description="1: with --restarts each rank's state is also kept in memory, of its host and of the next one: a job that lost ranks, "
        "or a host, continues from there.",
    )
    every: int = Field(10, ge=1, description="The number of steps from one copy in memory to the next.")

    @model_validator(mode="after")
    def _of_the_mesh(self, info: ValidationInfo) -> ElasticEntry:
        frame = frame_in(info)
        if frame.ranks is None or frame.mesh is None:
            return self
        if len({*self.ranks}) < len(self.ranks) or max(self.ranks) != frame.ranks:
            there = ", ".join(map(str, self.ranks))
            law = "a training begins on the plan's 'ranks', and continues on fewer"
            help = f"name distinct numbers, the largest of them {frame.ranks}, or set 'ranks' to {max(self.ranks)}"
            raise Refused(f"the numbers are {there}, and 'ranks' is {frame.ranks}", law, help, "ranks")
        if frame.roles:
            law = "ranks with a role are named by their numbers, which another number of ranks has not"
            raise Refused("the plan has 'roles'", law, "leave out 'roles', or 'elastic'", "ranks")
        if not frame.mesh:
            return self
        if DATA_AXIS not in dict(frame.mesh) or not frame.spans:
            fact = f"the mesh {shown_mesh(frame.mesh)} is not a grid of all ranks with an axis 'dp'"
            raise Refused(
                fact, _LAW, f"name the axis over which the batch is dealt 'dp': mesh: {{dp: {frame.ranks}}}", "ranks"
            )
        others = others_of(dict(frame.mesh))
        if uneven := [number for number in self.ranks if number % others]:
            fact = f"{uneven[0]} ranks are not a mesh {shown_mesh(frame.mesh)} with another size of 'dp'"
            raise Refused(
                fact, f"{_LAW}, and {uneven[0]} is not divisible by {others}", f"take multiples of {others}", "ranks"
            )
        return self

    @model_validator(mode="after")
    def _of_one_order(self, info: ValidationInfo) -> ElasticEntry:
        if self.parts is None:
            if self.statistics is not None:
                raise Refused(
                    "'statistics' without 'parts'", "a part is one of 'parts'", "write parts: 24", "statistics"
                )
            return self
        mesh = dict(frame_in(info).mesh or ())
        if others_of(mesh) > 1:
            fact = f"'parts', and the mesh has axes besides 'dp': {shown_mesh(tuple(mesh.items()))}"
            law = "the sums along other axes are added in the order of ranks"
            raise Refused(fact, law, "leave out 'parts', or the other axes", "parts")
        if wrong := [number for number in self.ranks if self.parts % number or self.parts < 2 * number]:
            whole = math.lcm(*self.ranks)
            least = whole * (2 if whole < 2 * max(self.ranks) else 1)
            fact = f"{self.parts} parts cannot be dealt out to {wrong[0]} ranks, to each the same number, two or more"
            raise Refused(
                fact, "a rank computes whole parts", f"choose {least}, or another multiple of {whole}", "parts"
            )
        return self

    @model_validator(mode="after")
    def _of_copies(self) -> ElasticEntry:
        if self.copies is None and "every" in self.model_fields_set:
            raise Refused(
                "'every' without 'copies'", "it is the interval of copies in memory", "write copies: 1", "every"
            )
        return self

    def pipeline(self, ranks: int, where: Callable[..., str]) -> PipelineRules | None:
        """The microbatches of a batch whose `parts` are dealt to this number of ranks; None without `parts`."""
        if self.parts is None:
            return None
        place, count = where("elastic", "parts"), self.parts // ranks
        shares = math.lcm(*self.ranks)
        return PipelineRules(
            place, count, statistics=self.statistics, accumulates=True, parts=self.parts, shares=shares
        )

    def refuse_uneven(
        self, batch: int | None, microbatches: int, mesh: Mapping[str, int], where: Callable[..., str]
    ) -> None:
        """Raises CompileError for each number of ranks that does not divide the plan's batch; `where` returns the place of a key."""
        if batch is not None and self.parts is not None and batch % self.parts:
            fact = f"'elastic': a batch of {batch} records cannot be divided into {self.parts} parts"
            help = f"choose a batch that is a multiple of {self.parts}, or another number of parts"
            raise CompileError(Problem(where("elastic", "parts"), fact, "parts are equal", help))
        shards = {ranks: ranks // others_of(mesh) for ranks in self.ranks}
        whole, problems = math.lcm(*shards.values()) * microbatches, list[Problem]()
        for at, (ranks, count) in enumerate(shards.items()):
            if batch is None or self.parts is not None or batch % (count * microbatches) == 0:
                continue
            parts = f" in {microbatches} microbatches" if microbatches > 1 else ""
            fact = f"'elastic', {ranks} ranks: a batch of {batch} records cannot be dealt out to {count}{parts}"
            law = (
                f"the batch is the same on each number of ranks, and {batch} is not divisible by {count * microbatches}"
            )
            help = f"choose a batch that is a multiple of {whole}, or leave {ranks} out"
            problems.append(Problem(where("elastic", "ranks", at), fact, law, help))
        if problems:
            raise CompileError(problems)


def others_of(mesh: Mapping[str, int]) -> int:
    """The number of ranks at one place of the axis over which records are dealt: the product of the other axes."""
    return math.prod(size for axis, size in mesh.items() if axis != DATA_AXIS) if mesh else 1


def on_ranks(data: Any, ranks: int) -> dict[str, Any]:
    """Returns the data of a valid plan, changed to another number of ranks and without `elastic`."""
    mesh = data.get("mesh") or {}
    sizes = {axis: ranks // others_of(mesh) if axis == DATA_AXIS else size for axis, size in mesh.items()}
    data = {key: value for key, value in data.items() if key != "elastic"}
    return {**data, "ranks": ranks, **({"mesh": sizes} if mesh else {})}
