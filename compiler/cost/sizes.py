"""The types and sizes of the values of a rank's file, with the symbols bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from partc.compiler.cost.even_rows import EvenRows
from partc.runtime.artifact.format import OPTIMIZER, ROUTE, Shape
from partc.runtime.artifact.graph.onnx_graph import reads
from partc.runtime.artifact.graph.row_function import MERGE
from partc.runtime.artifact.tasks.task import parse
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.execution.memory.layout import at_sizes
from partc.runtime.program.rank_file import RankFile
from partc.runtime.program.steps import LookUp, Segment
from partc.runtime.program.value_table import types_from_manifest

if TYPE_CHECKING:
    from onnx import NodeProto

_SOME = 4.0
"""The bytes of an element whose type is not known."""
_UNSTATED = "tensor(float)"
"""The type of a value without a stated one."""


@dataclass(frozen=True)
class Operand:
    """The sizes of an operand, None where only a run tells them, the bytes of an element, and whether it is the same in each step."""

    sizes: tuple[int, ...] | None
    item: float
    constant: bool = False

    @property
    def bytes(self) -> float:
        """All of it; 0 where it is not known."""
        return 0.0 if self.sizes is None else math.prod(self.sizes) * self.item


class FileSizes:
    """The operands of a rank's file by name; `unknown` counts values whose size only a run tells."""

    def __init__(self, file: RankFile, sizes: Mapping[str, int]) -> None:
        self.file, self.sizes = file, sizes
        self.shapes: dict[str, Shape] = {name: list(one.dims) for name, one in file.tensors.items()}
        self.shapes |= file.declared_shapes
        segments = [step for step in file.steps if isinstance(step, Segment)]
        nodes = [node for one in segments for node in one.nodes if (node.domain, node.op_type) == (OPTIMIZER, MERGE)]
        self.merged = {made: source for node in nodes for source, made in zip(node.input, node.output, strict=True)}
        """Maps each result of a merge of rows to its operand, which has at least as many rows."""
        self.unknown = set[str]()
        self._known: dict[str, Operand] = {}
        self._bound: dict[tuple[int | str, ...], tuple[int, ...] | None] = {}
        self._names: dict[int, dict[str, str]] = {}
        self._fixed: dict[int, frozenset[str]] = {}
        self._numbers: dict[str, tuple[int, ...] | None] = {}
        """Maps values of which shapes are made to their numbers."""
        self._followed = not any(isinstance(step, Segment) for step in file.steps)

    @cached_property
    def types(self) -> dict[str, str]:
        """The type of each value, as the file and the manifest state it without sessions."""
        file = self.file
        types = {**dict.fromkeys((*file.computed, *file.calls_by_output), _UNSTATED), **types_from_manifest(file)}
        types |= file.declared_types
        return types | {copy.result: types.get(copy.source, _UNSTATED) for copy in file.copies}

    def assume(self, name: str | None, sizes: tuple[int, ...], item: float) -> None:
        """Gives a value sizes that the file does not state."""
        if name:
            self._known[name] = Operand(sizes, item)

    def close(self, size: int) -> None:
        """Gives each dim that the file leaves open a size."""
        for name, value in self.file.declared.items():
            dims = value.type.tensor_type.shape.dim
            shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or size for dim in dims]
            if value.type.tensor_type.HasField("shape"):
                self.shapes[name] = shape

    def operand(self, name: str) -> Operand:
        """The sizes and the element's bytes of a value."""
        if name in self.merged and self.shapes.get(name) is None:
            return self.operand(self.merged[name])
        if name not in self._known:
            shape, dtype = self.shapes.get(name), dense(self.types.get(name, ""))
            shape_at_sizes = None if shape is None else self._at_sizes(tuple(shape))
            if shape_at_sizes is None and not self._followed:
                self._follow()
                return self.operand(name)
            if shape_at_sizes is None:
                self.unknown.add(name)
            self._known[name] = Operand(shape_at_sizes, _SOME if dtype is None else dtype.bits / 8)
        return self._known[name]

    def _follow(self) -> None:
        """Derives sizes that the file does not state, step by step, as `EvenRows` does."""
        self._followed = True
        for step in self.file.steps:
            if isinstance(step, LookUp) and step.call.op == ROUTE and (sent := self._sizes(step.call.operand or "")):
                self._derive(step.call.result or "", (sent[0], *step.call.row))
                self._derive(step.call.numbers or "", sent[:1])
            if not isinstance(step, Segment):
                continue
            names, suffix = self.names(step), f".{parse(step.task).microbatch}" if step.task else ""
            rules = self._even_rows(step)
            for node in step.formal.nodes:
                results = [names.get(name, name + suffix) for name in node.output]
                if any(self._sizes(name) is None for name in results if name):
                    for name, sizes in zip(results, rules.outputs(node), strict=True):
                        self._derive(name, sizes)
                if node.op_type in ("Shape", "Gather", "Concat"):
                    self._numbers[results[0]] = rules.numbers(node.output[0])

    def _even_rows(self, segment: Segment) -> EvenRows:
        of, names, formal = self.reader(segment), self.names(segment), segment.formal
        constants = {name: self.file.tensors[name] for name in formal.initializers if name in self.file.tensors}
        arriving = {name: self._numbers.get(names.get(name, "")) for node in formal.nodes for name in node.input}
        return EvenRows(formal.nodes, lambda name: of(name).sizes, constants, arriving.get)

    def _sizes(self, name: str) -> tuple[int, ...] | None:
        return self.operand(name).sizes if name else None

    def _derive(self, name: str, sizes: tuple[int, ...] | None) -> None:
        """Gives a value sizes if the file states none."""
        if sizes is not None and self._sizes(name) is None and name:
            self._known[name] = Operand(sizes, self.operand(name).item)
            self.unknown.discard(name)

    def _at_sizes(self, shape: tuple[int | str, ...]) -> tuple[int, ...] | None:
        """A shape with the symbols bound; None where they do not allow it."""
        if shape not in self._bound:
            try:
                self._bound[shape] = at_sizes([*shape], self.file.manifest.symbols, self.sizes)
            except ValueError:
                self._bound[shape] = None
        return self._bound[shape]

    def of_node(self, node: NodeProto, segment: Segment) -> tuple[list[Operand | None], list[Operand | None]]:
        """The operands of a node of a segment, and what it makes."""
        of = self.reader(segment)
        given, made = ([of(name) if name else None for name in some] for some in (node.input, node.output))
        return given, made

    def of_segment(self, segment: Segment) -> dict[str, Operand]:
        """Maps each name in a segment's body to the operands of all that its nodes read or make."""
        of = self.reader(segment)
        names = dict.fromkeys(name for node in segment.formal.nodes for name in (*node.input, *node.output) if name)
        return {name: of(name) for name in names}

    def reader(self, segment: Segment) -> Callable[[str], Operand]:
        """What gives the operand of a name in a segment's body."""
        names, fixed = self.names(segment), self.fixed(segment)
        suffix = f".{parse(segment.task).microbatch}" if segment.task else ""

        def of(name: str) -> Operand:
            one = self.operand(names.get(name, name + suffix))
            return replace(one, constant=True) if name in fixed else one

        return of

    def fixed(self, segment: Segment) -> frozenset[str]:
        """The initializers of a segment's body."""
        if (known := self._fixed.get(id(segment.formal))) is None:
            known = self._fixed[id(segment.formal)] = frozenset(segment.formal.initializers)
        return known

    def names(self, segment: Segment) -> Mapping[str, str]:
        """Maps each name in a segment's body to the name in the program; what is read of the file as it is stays as it is."""
        if (known := self._names.get(id(segment))) is not None:
            return known
        names = dict([*segment.operands, *segment.output_pairs])
        names.update((name, name) for name in segment.formal.initializers)
        names.update((name, name) for node in segment.formal.nodes for name in reads(node) if name in self.file.tensors)
        self._names[id(segment)] = names
        return names
