"""A border of a body in which ranks communicate, as data (`graph/bodies.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from partc.runtime.artifact.comm.group_call import GroupCall
from partc.runtime.artifact.format import BEGIN, END, GROUP, KIND, OTHERWISE, TAG
from partc.runtime.artifact.graph.onnx_graph import path_of

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto

IF, LOOP = "If", "Loop"


@dataclass(frozen=True)
class BorderCall(GroupCall):
    """A Begin, Otherwise or End of an If or Loop (`kind`); `operands` and `results` have '' for an absent one.

    Of a Loop the operands are the count, the condition and the first states at its Begin, the condition, the states and what is stacked at
    its End; the results the turn, the condition and the states, and then the last states and the stacks.
    """

    LAW: ClassVar[str] = "kind, or numbers of values"
    kind: str
    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def value(self) -> str:
        return next(filter(None, (*self.results, *self.operands)), "")

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(filter(None, self.operands))

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(filter(None, self.results))

    @property
    def typed(self) -> None:
        return None

    @property
    def result(self) -> None:
        """No value moves at a border."""
        return None

    @property
    def law(self) -> tuple[object, ...]:
        return self.op, self.kind, len(self.operands), len(self.results)

    @property
    def condition(self) -> str:
        """The value that decides which branch runs, or whether a turn follows; '' where none does."""
        if self.op == OTHERWISE or (self.kind == IF and self.op == END):
            return ""
        return self.operands[1 if self.kind == LOOP and self.op == BEGIN else 0]

    @property
    def count(self) -> str:
        """The value that bounds the turns of a Loop; '' where none does."""
        return self.operands[0] if self.kind == LOOP and self.op == BEGIN else ""

    @property
    def states(self) -> tuple[str, ...]:
        """The states as they are given to the first turn, or by a turn, then what it stacks; or the results of a branch."""
        if self.kind == IF:
            return () if self.op == BEGIN else self.operands
        return self.operands[2 if self.op == BEGIN else 1 :]

    @property
    def carried(self) -> tuple[str, ...]:
        """The states as a turn reads them, or as they are after the last turn, with the stacks; or the results of an If."""
        return self.results[2:] if self.kind == LOOP and self.op == BEGIN else self.results

    def renamed(self, names: Mapping[str, str], tag: int, path: str) -> Self:
        given, made = (tuple(names.get(name, name) for name in some) for some in (self.operands, self.results))
        return replace(self, operands=given, results=made, tag=tag, path=path)


def border_call(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> BorderCall:
    """Returns the call of a valid border."""
    return BorderCall(
        op=node.op_type,
        group=attributes[GROUP].s.decode(errors="replace"),
        tag=attributes[TAG].i,
        path=path_of(node),
        kind=attributes[KIND].s.decode(errors="replace"),
        operands=tuple(node.input),
        results=tuple(node.output),
    )


def border_problems(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> Iterator[str]:
    """Yields the faults of a border by itself."""
    kind = attributes[KIND].s.decode(errors="replace")
    if kind not in (IF, LOOP):
        yield f"its kind is '{kind}'; it is {IF} or {LOOP}"
    input_count, output_count = len(node.input), len(node.output)
    if kind == LOOP and node.op_type == BEGIN and (input_count < 2 or output_count != input_count):
        yield f"a Loop with {input_count} operands has a body of as many inputs, and it has {output_count}"
    if (
        kind == LOOP
        and node.op_type == END
        and (input_count != output_count + 1 or not input_count or not node.input[0])
    ):
        yield f"a body gives a condition and a value for each of the {output_count} results, and it gives {input_count} values"
    if kind == IF and node.op_type == BEGIN and (input_count != 1 or output_count or not node.input[0]):
        yield f"an If has one condition, and it has {input_count} operands"
    if kind == IF and node.op_type == END and input_count != output_count:
        yield f"a branch gives {input_count} values, and the If has {output_count} results"
