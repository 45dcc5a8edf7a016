"""How a plan says that operators are cut: styles, strategies, and the budget for what that moves.

Every dim's entry is checked where it stands, and a rule as a whole for its one spelling (`partc.compiler.plan.cut`).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias, get_args

from partc.compiler.plan.cut import Cut, Piece, one_spelling, piece_of
from partc.compiler.plan.groups import Frame
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.rules import ShardingRule
from partc.compiler.plan.violation import Violation, is_integer, shown
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

Style: TypeAlias = Literal["colwise", "rowwise", "replicate"]
STYLES: tuple[str, ...] = get_args(Style)

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.ASCII)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _piece(value: object, info: ValidationInfo) -> Piece | None:
    frame = info.context if isinstance(info.context, Frame) else Frame()
    return piece_of(value, None if frame.mesh is None else [name for name, _ in frame.mesh])


def _one_cut(value: object) -> object:
    if isinstance(value, list):
        return value
    raise Violation(f"expected an entry for each dim, such as [2, 4], but got {shown(value)}")


def _spelled_once(pieces: list[Piece | None]) -> list[Piece | None]:
    one_spelling([pieces])
    return pieces


def _some_cuts(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list):
        raise Violation(f"expected a cut for each tensor, such as [[2, 4], [4, 1]], but got {shown(value)}")
    if not value:
        raise Violation("the list is empty", "a strategy has an entry for each tensor; null derives it")
    if not any(entry is None or isinstance(entry, list) for entry in value):
        raise Violation(
            "the list has dims where it should have tensors",
            "a strategy has a list for each tensor, with an entry for each dim",
            "write one more pair of brackets: [[2, 4]] for one tensor",
        )
    return value


def _or_nothing(value: object) -> object:
    return {} if value is None else value


DimCut: TypeAlias = Annotated[int, Field(ge=1)] | str | list[str] | None
PieceEntry: TypeAlias = Annotated[Piece | None, PlainValidator(_piece, json_schema_input_type=DimCut)]
CutEntry: TypeAlias = Annotated[list[PieceEntry], BeforeValidator(_one_cut), AfterValidator(_spelled_once)]
CutEntries: TypeAlias = Annotated[
    list[CutEntry | None] | None, BeforeValidator(_some_cuts, json_schema_input_type=list[list[DimCut] | None] | None)
]


class ShardingEntry(BaseModel):
    """Into how many pieces, or along which mesh axes, each dim is cut. What is not said, or null, is derived."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: CutEntries = Field(
        None,
        alias="in",
        description="For each tensor input its cut, or null: [[2, 4], [4, 1]], [[dp, tp], [tp, null]], [[[dp, tp], null], null].",
    )
    outputs: CutEntries = Field(None, alias="out", description="The same for each output.")
    parameters: Annotated[
        dict[str, CutEntry], BeforeValidator(_or_nothing, json_schema_input_type=dict[str, list[DimCut]] | None)
    ] = Field(
        {}, description="Cuts of parameters inside of a module, by their path from there: {dense2.weight: [8, 1]}."
    )
    level: Literal[0, 1, 2] = Field(
        0, description="What to prefer where much is left to derive: 0 less communication, 1 less memory, 2 speed."
    )
    _style: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _says_something_once(self) -> ShardingEntry:
        if self._style is None and self.inputs is None and self.outputs is None and not self.parameters:
            raise _nothing()
        self.cuts()
        return self

    @staticmethod
    def styled(style: str) -> ShardingEntry:
        """The entry that is no strategy but a style."""
        entry = ShardingEntry.model_construct()
        entry._style = style
        return entry

    def cuts(self) -> list[Cut | None]:
        """The cuts of inputs, outputs and parameters, in this order, in their one spelling."""
        return one_spelling([*(self.inputs or ()), *(self.outputs or ()), *self.parameters.values()])

    def rule(self, pattern: str, where: str) -> ShardingRule:
        """The rule that the entry gives to a pattern."""
        cuts = iter(self.cuts())
        inputs = None if self.inputs is None else tuple(next(cuts) for _ in self.inputs)
        outputs = None if self.outputs is None else tuple(next(cuts) for _ in self.outputs)
        parameters = {name: cut for name, cut in zip(self.parameters, cuts, strict=True) if cut is not None}
        return ShardingRule(pattern, self._style, inputs, outputs, parameters, where, self.level)


def _nothing() -> Violation:
    return Violation(
        "this says nothing",
        f"a rule is {', '.join(STYLES[:-1])} or {STYLES[-1]}, or has 'in', 'out' or 'parameters'",
        "write {in: [[2, 4], null]}, or take the line away",
    )


def _styled(value: object) -> object:
    if value is None:
        raise _nothing()
    if not isinstance(value, str):
        return value
    if value in STYLES:
        return ShardingEntry.styled(value)
    near = nearest(value, STYLES, 1)
    help = f"the nearest is '{near[0]}'" if near else f"choose from {', '.join(STYLES)}"
    raise Violation(f"'{value}' is no style", "a rule is a style, or a strategy such as {in: [[2, 4], null]}", help)


def _bytes(value: object) -> int | None:
    law = "a size is a number of bytes, or a text such as 64MB, 1.5GB or 512KiB"
    if value is None:
        return None
    if isinstance(value, int) and is_integer(value):
        if value < 0:
            raise Violation(f"the size {value} is negative", law)
        return value
    found = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise Violation(f"expected a size in bytes, but got {shown(value)}", law)
    unit = found[2] or ""
    scale: int = (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]]
    return round(float(found[1]) * scale)


ShardingForm: TypeAlias = Annotated[
    ShardingEntry, BeforeValidator(_styled, json_schema_input_type=ShardingEntry | Style)
]
ByteText: TypeAlias = Annotated[str, Field(pattern=r"^\d+(\.\d+)?\s*([KMGT]i?)?B$")]
ByteCount: TypeAlias = Annotated[
    int | None, PlainValidator(_bytes, json_schema_input_type=Annotated[int, Field(ge=0)] | ByteText | None)
]
