"""Ranks' programs while they are written: ranks that have done the same so far share one builder, and fork where they differ.

So writing costs by distinct programs, not by ranks: data parallel replicas are one builder from beginning to end.

    builders.of((0, 1, 2, 3))     one builder, if these four ranks are just those that share it
    builders.of((2, 3))           a builder of their own from now on, with all that stands there so far

What is made beside the model's own values has a name that the model does not have: `h.shape` is `h.shape'` where the model has an
`h.shape` itself (`derived`), and one that nothing else on these ranks has (`free`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.rank_program import ComputeOp, Constant, LocalTensor, RankOp, StateTensor
from partc.compiler.ir.value_info import Shape
from partc.compiler.ir.values import derived


@dataclass
class ProgramBuilder:
    """One program under construction, shared by `ranks` (ascending) as long as these emit the same ops."""

    ranks: list[int]
    steps: list[RankOp] = field(default_factory=list)
    weights: dict[str, LocalTensor] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    made: dict[ir.Node, dict[str, Mapping[str, str]]] = field(default_factory=dict)
    """By node the values that it has made here, each with the renamed ones inside: on a smaller group of these ranks it may stand again."""
    types: dict[str, tuple[ir.Value, Shape | None]] = field(default_factory=dict)
    replaced: dict[ComputeOp, tuple[RankOp, ...]] = field(default_factory=dict)
    """By op those in its place, where the backward pass asks a node for more than it gave."""
    kept: dict[str, StateTensor] = field(default_factory=dict)
    scalars: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, LocalTensor] = field(default_factory=dict)
    """What a program gives besides the outputs of the model."""
    appended: set[str] = field(default_factory=set)
    """What is made of that of all parts of a batch, one after the other."""

    def replace(self, old: Sequence[ComputeOp], new: Sequence[ComputeOp], behind: Sequence[ComputeOp]) -> None:
        """Replaces old ops by new ones, one by one, and puts `behind` after the last, leaving out ops whose outputs exist already."""
        tail = [op for op in behind if all((out.name or "") not in self.types for out in op.node.outputs)]
        for k, (before, after) in enumerate(zip(old, new, strict=True)):
            rest = tail if k == len(old) - 1 else []
            if after is not before or rest:
                self.replaced[before] = (after, *rest)

    taken: set[str] = field(default_factory=set)
    """Names that `ProgramBuilders.free` has given away here."""

    @property
    def program(self) -> list[RankOp]:
        """The steps in order, with replaced ops in the places of old ones."""
        return [
            final
            for step in self.steps
            for final in (self.replaced.get(step, (step,)) if isinstance(step, ComputeOp) else (step,))
        ]

    def fork(self, ranks: Sequence[int]) -> ProgramBuilder:
        """Hands some of the ranks over to a builder with the same contents."""
        gone = set(ranks)
        self.ranks = [rank for rank in self.ranks if rank not in gone]
        return self.copy(sorted(gone))

    def copy(self, ranks: list[int]) -> ProgramBuilder:
        """A builder of its own with the same contents, of these ranks."""
        made = {node: dict(names) for node, names in self.made.items()}
        return ProgramBuilder(
            ranks,
            list(self.steps),
            dict(self.weights),
            dict(self.constants),
            made,
            dict(self.types),
            dict(self.replaced),
            dict(self.kept),
            dict(self.scalars),
            dict(self.outputs),
            set(self.appended),
            set(self.taken),
        )

    def has(self, name: str) -> bool:
        """Whether a value here has the name."""
        return name in self.types or name in self.constants or name in self.taken


class ProgramBuilders:
    """The builder of every rank; `reserved` are the names of the model's own values and of their versions."""

    def __init__(self, ranks: int, reserved: Collection[str] = ()) -> None:
        self.reserved = frozenset(reserved)
        self._by_rank = [ProgramBuilder(list(range(ranks)))] * ranks
        self._found: dict[tuple[int, ...], tuple[ProgramBuilder, ...]] = {}
        self._sharing: dict[tuple[int, ...], list[ProgramBuilder]] = {}

    def __iter__(self) -> Iterator[ProgramBuilder]:
        return iter(self._by_rank)

    def copy(self) -> ProgramBuilders:
        """Builders of their own with the same contents, shared by the same ranks."""
        found = ProgramBuilders(0, self.reserved)
        copies = {id(one): one.copy(list(one.ranks)) for one in self.distinct}
        found._by_rank = [copies[id(one)] for one in self._by_rank]
        return found

    @property
    def distinct(self) -> list[ProgramBuilder]:
        """Every builder once, by its lowest rank."""
        return [*{id(one): one for one in self._by_rank}.values()]

    def append(self, ranks: tuple[int, ...], steps: Iterable[RankOp]) -> None:
        """Writes ops behind what these ranks do so far."""
        steps = tuple(steps)
        for builder in self.of(ranks):
            builder.steps += steps

    def declare(self, ranks: tuple[int, ...], name: str, value: ir.Value, shape: Shape | None) -> None:
        """Lists the type and local shape of what these ranks have under a name."""
        for builder in self.of(ranks):
            builder.types[name] = (value, shape)

    def of(self, ranks: tuple[int, ...]) -> tuple[ProgramBuilder, ...]:
        """The builders that are just these ranks', each once; one that others share is forked first."""
        if (found := self._found.get(ranks)) is not None:
            return found
        sharing: dict[int, list[int]] = {}
        for rank in ranks:
            sharing.setdefault(id(self._by_rank[rank]), []).append(rank)
        for some in sharing.values():
            shared = self._by_rank[some[0]]
            if len(some) < len(shared.ranks):
                own = shared.fork(some)
                for rank in some:
                    self._by_rank[rank] = own
                self._found.clear()
                self._sharing.clear()
        found = tuple({id(self._by_rank[rank]): self._by_rank[rank] for rank in ranks}.values())
        self._found[ranks] = found
        return found

    def derived(self, name: str) -> str:
        """The name, or where a value of the model has it, the name with a stroke."""
        return derived(name, self.reserved)

    def is_free(self, ranks: tuple[int, ...], name: str) -> bool:
        """Whether no value on these ranks has the name, nor any of the model."""
        return name not in self.reserved and not any(builder.has(name) for builder in self._on(ranks))

    def free(self, ranks: tuple[int, ...], wanted: str) -> str:
        """A name that is free on these ranks, from now on taken: the wanted one, else with a number."""
        wanted = self.derived(wanted)
        name, at = wanted, 1
        while not self.is_free(ranks, name):
            at += 1
            name = f"{wanted}.{at}"
        for builder in self._on(ranks):
            builder.taken.add(name)
        return name

    def unlisted(self) -> set[str]:
        """Names that nodes make and no type is listed of: bounds of slices, for instance."""
        found: set[str] = set()
        for builder in self.distinct:
            ops = (step for step in builder.steps if isinstance(step, ComputeOp))
            made = (out.name or "" for op in ops for out in op.node.outputs)
            found.update(name for name in made if name not in builder.types)
        return found

    def _on(self, ranks: tuple[int, ...]) -> list[ProgramBuilder]:
        """The builders that these ranks have a share in."""
        if ranks not in self._sharing:
            self._sharing[ranks] = [*{id(self._by_rank[rank]): self._by_rank[rank] for rank in ranks}.values()]
        return self._sharing[ranks]
