"""The section `generate` of a proposed plan.

The rest of such a plan is proposed for the model as it is, with past and present as inputs and outputs: what makes a cache lies where the
cache does. It says nothing of inputs and outputs, whose sizes `generate` fixes.

Where `tp` has more ranks than there are heads of keys, the compiler repeats heads whose projections are cut, if it can follow them
(`rewrite/generation/repeated_heads.py`). A proposal is compiled before it is given, and what is told of them is what the compiler did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Self

import onnx_ir as ir
from partc.compiler.cost.machine import FEW, FEW_INT4, Machine
from partc.compiler.ir.declared import Decoding
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Complete, Typed
from partc.compiler.ir.programs import RankProgram
from partc.compiler.plan.generate import DEFAULT_CHUNK
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.tensor_parallel import TensorParallel
from partc.compiler.rewrite.generation.encoder import takes_any_length
from partc.compiler.rewrite.generation.states import states_of
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.generation import Lookup
from partc.runtime.units import size_text

NEARLY_FREE = 1.1
"""The most that a step of a token and its drafts may take, of one of a token, in a plan with drafts: where all are wrong that is lost."""
_HEADS = 1
"""The dim of a cache, [slots, heads, entries, size]."""


@dataclass(frozen=True)
class Generation:
    """How long the sequences are that a decoder makes, how many at once, in how many groups these take turns, the most entries of an
    encoder before it, where it takes any number, how the model's configuration wants its tokens made, the type of rounded caches, and
    whether tokens are drafted, with the reason.
    """

    length: int
    slots: int
    groups: int = 1
    encoder_length: int | None = None
    chunk: int = DEFAULT_CHUNK
    decoding: Decoding = field(default_factory=Decoding)
    cache: str | None = None
    draft: bool = False
    reason: str = ""

    @classmethod
    def over(cls, degrees: Degrees, length: int, slots: int | None, cache: str | None = None) -> Generation:
        """As many groups as stages, where they divide the slots, of which there is one for each group and replica unless they are given."""
        slots = slots or degrees.dp * degrees.stages
        groups = degrees.stages if slots % (degrees.dp * degrees.stages) == 0 else 1
        chunk = min(DEFAULT_CHUNK, max(1, length // degrees.cp))  # entries are dealt out in blocks of a chunk
        return cls(length, slots, groups, chunk=chunk, cache=cache)

    def of_model(self, graph: ir.Graph, decoding: Decoding) -> Self:
        """With as many entries of an encoder as tokens, where the model's takes any number, chunks of one token of a model with states, and
        what its configuration says.
        """
        most, chunk = self.length if takes_any_length(graph) else None, 1 if states_of(graph) else self.chunk
        return replace(self, encoder_length=most, chunk=chunk, decoding=decoding)

    @property
    def line(self) -> str:
        """As a plan says it."""
        chunk = f", chunk: {self.chunk}" if self.chunk != DEFAULT_CHUNK else ""
        groups = f", groups: {self.groups}" if self.groups > 1 else ""
        encoder = "" if self.encoder_length is None else f", encoder_length: {self.encoder_length}"
        stop = f", stop: {[*self.decoding.stop]}" if self.decoding.stop else ""
        said = ", ".join(f"{name}: {value}" for name, value in self.decoding.defaults.items())
        defaults = f", defaults: {{{said}}}" if said else ""
        cache = f", cache: {self.cache}" if self.cache else ""
        draft = f", draft: {{tokens: {Lookup().tokens}}}" if self.draft else ""
        states = ["the model keeps states: prompts are read a token a step"] if self.chunk == 1 else []
        comment = "; ".join([*states, self.reason] if self.reason else states)
        sizes = f"slots: {self.slots}, length: {self.length}{encoder}{groups}{chunk}{cache}{draft}"
        return f"generate: {{{sizes}{stop}{defaults}}}" + (f"    # {comment}" if comment else "")


def drafts_on(machine: Machine, graph: ir.Graph) -> tuple[bool, str]:
    """Returns whether a step of a token and its drafts takes little more on a machine than one of a token, and the reason.

    A step is taken for its products with weights, of which the machine file has the times by rows.
    """
    bits = {node.attributes.get_int("bits", 4) for node in graph if node.op_type == "MatMulNBits"}
    curve = machine.processor(CPU).products.get(FEW_INT4 if bits else FEW)
    where, rows = PurePath(machine.where).name, 1 + Lookup().tokens
    if curve is None or bits - {4}:
        return False, f"{where} has no times of products of few rows" + (f" in {max(bits)} bits" if bits else "")
    one = curve.points[0][0]
    ratio = curve(rows * one) / curve(one)
    return ratio <= NEARLY_FREE, f"products of {rows} rows take {ratio:.2f} times those of one on {where}"


def are_repeated(program: Typed, cut: TensorParallel, shards: int, done: Complete) -> bool:
    """Whether the compiler repeated the heads of all caches that these shardings of a program cut into more shards than they have."""
    few = {
        name_of(value)
        for one in cut.sets
        if one.heads_to_repeat(program, shards)
        for value, _ in one.places
        if value.is_graph_input()
    }
    return few <= _repeated(program, done).keys()


def repeated_lines(program: Typed, done: Complete, generation: Generation) -> Iterator[str]:
    """A comment line for each number of heads that is repeated, with what a rank's caches cost."""
    found = set(_repeated(program, done).values())
    kept = size_text(generation.groups * max(map(_cache_bytes, done.parts)))
    for heads, ranks in sorted(found):
        yield (
            f"# {heads} heads of keys and values over {ranks} ranks: each is repeated, and is with its cache on {ranks // heads} ranks. "
            f"A rank keeps {kept} of caches, as over {heads} ranks."
        )


def _cache_bytes(part: RankProgram) -> int:
    """The bytes of a rank's caches, of one group of slots."""
    values = (one.value for one in part.state if one.kind == "cache")
    return sum(
        one.of.dtype.bitwidth * math.prod(dim for dim in one.shape or () if isinstance(dim, int)) // 8
        for one in values
        if one.of is not None and one.of.dtype is not None
    )


def _repeated(program: Typed, done: Complete) -> dict[str, tuple[int, int]]:
    """Maps names to the caches whose heads the compiler repeated: the number of heads before and after."""
    shapes = {name_of(value): program.values[value].shape for value in program.model.graph.inputs}
    repeated = dict[str, tuple[int, int]]()
    for cache in done.caches:
        before, after = shapes.get(name_of(cache)), done.values[cache].shape
        if before is None or after is None:
            continue
        heads, made = before[_HEADS], after[_HEADS]
        if isinstance(heads, int) and isinstance(made, int) and heads != made:
            repeated[name_of(cache)] = heads, made
    return repeated
