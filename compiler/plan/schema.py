"""The plan's YAML: its keys, what they mean and what they may be.

The models serve two ends: `plan_schema` prints them for editors, and `read` checks a file by them. A rule of the plan's
own raises `Violation`, whose texts are the user's; `context={"ranks": n}` lets ranks be checked where they stand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.symbol import Symbol
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

PRODUCER: Literal["producer"] = "producer"
LATER = ("mesh", "dataset", "sharding", "target", "pipeline", "train")

_DIM_NAME = re.compile(r"[^\W\d][\w.]*")


class Violation(ValueError):
    """A value that a plan cannot have: the fact, the law, the remedy; `key` where one key of a mapping is at fault."""

    def __init__(self, fact: str, law: str = "", help: str = "", key: str = "") -> None:
        super().__init__(fact)
        self.fact, self.law, self.help, self.key = fact, law, help, key


def is_dim_name(text: str) -> bool:
    """Whether a text can name a dim in a plan: letters, digits, `_` and `.`, no digit first."""
    return _DIM_NAME.fullmatch(text) is not None


def shown(value: object) -> str:
    """A YAML value in YAML's words: `the text 'a'`, `a list`, `nothing`."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"the text '{value}'"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"the number {value}"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rank(value: object, info: ValidationInfo) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Violation(f"expected a rank, an integer, but got {shown(value)}")
    ranks = (info.context or {}).get("ranks")
    if value < 0 or (ranks is not None and value >= ranks):
        there = "no negative ranks" if ranks is None else f"{ranks} rank{'s' if ranks != 1 else ''}"
        last = "" if ranks is None else f" to {ranks - 1}"
        more = "" if value < 0 else f", or set 'ranks' to at least {value + 1}"
        raise Violation(f"rank {value}, but there are {there}", help=f"choose a rank from 0{last}{more}")
    return value


def _placed(value: object, info: ValidationInfo) -> int:
    if isinstance(value, list | dict):
        what = "a list of ranks" if isinstance(value, list) else "a slice of the mesh"
        raise Violation(
            f"{what} is a group, but this version of partc places every operator on one rank",
            "groups of ranks come with sharding",
            "name one rank",
        )
    return _rank(value, info)


def _delivered(value: object, info: ValidationInfo) -> tuple[int, ...] | None:
    if value == PRODUCER:
        return None
    if not isinstance(value, list):
        if not _is_integer(value):
            raise Violation(f"expected a rank, a list of ranks or 'producer', but got {shown(value)}")
        return (_rank(value, info),)
    ranks = [_rank(rank, info) for rank in value]
    if not ranks:
        raise Violation("the list of ranks is empty", help="say 'producer' for an output that stays where it is made")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise Violation(f"rank {twice[0]} stands twice in the list", help="name every rank once")
    return tuple(sorted(ranks))


def _dim(value: object) -> int | str | None:
    law = "a dim is a size, the name of a symbol or of a free dim, or null where nothing is said"
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise Violation(f"the size {value} is negative", law, "name a dim that varies, or write null")
        return value
    if not isinstance(value, str):
        raise Violation(f"expected a dim, but got {shown(value)}", law)
    if not is_dim_name(value):
        raise Violation(f"'{value}' is no name", law, "a name has letters, digits, '_' and '.', and no digit first")
    return value


def _dims(value: object) -> object:
    if not isinstance(value, list):
        raise Violation(f"expected a list of dims such as [batch, 1, 28, 28], but got {shown(value)}")
    return value


def _pattern(text: str) -> str:
    try:
        compile_pattern(text)
    except ValueError as error:
        raise Violation(f"this is no pattern: {error}") from None
    return text


def _symbol_name(text: str) -> str:
    if not text.isidentifier():
        raise Violation("this is no name", "a symbol's name has letters, digits and '_', and no digit first")
    return text


def _or_empty(value: object) -> object:
    return {} if value is None else value


def _everywhere(value: object) -> object:
    return _or_empty(value) if value is None or isinstance(value, dict) else {"**": value}


PatternText: TypeAlias = Annotated[str, AfterValidator(_pattern), Field(min_length=1)]
SymbolName: TypeAlias = Annotated[str, AfterValidator(_symbol_name)]
RankNumber: TypeAlias = Annotated[int, Field(ge=0)]
Rank: TypeAlias = Annotated[int, PlainValidator(_placed, json_schema_input_type=RankNumber)]
DeliveredTo: TypeAlias = RankNumber | Annotated[list[RankNumber], Field(min_length=1)] | Literal["producer"]
Delivery: TypeAlias = Annotated[tuple[int, ...] | None, PlainValidator(_delivered, json_schema_input_type=DeliveredTo)]
DimText: TypeAlias = Annotated[int, Field(ge=0)] | str | None
Dim: TypeAlias = Annotated[int | str | None, PlainValidator(_dim, json_schema_input_type=DimText)]
Dims: TypeAlias = Annotated[list[Dim], BeforeValidator(_dims)]


class SymbolEntry(BaseModel):
    """The legal sizes of a dynamic dim: divisor*N + remainder with N >= 1, within min and max."""

    model_config = ConfigDict(extra="forbid", strict=True)

    min: int = Field(1, ge=1, description="The smallest size.")
    max: int = Field(0, ge=0, description="The largest size; 0: no maximum.")
    divisor: int = Field(1, ge=1, description="Every size is divisor*N + remainder with N >= 1.")
    remainder: int = Field(0, ge=0, description="See divisor; less than divisor.")
    unique: bool = Field(False, description="Whether all uses of the symbol have one and the same size.")

    @model_validator(mode="after")
    def _legal(self) -> SymbolEntry:
        try:
            self.symbol()
        except ValueError as error:
            raise Violation(str(error), key="remainder" if self.remainder >= self.divisor else "max") from None
        return self

    def symbol(self) -> Symbol:
        """The symbol that the entry declares."""
        return Symbol(self.max, self.min, self.divisor, self.remainder, self.unique)


SymbolEntries: TypeAlias = dict[
    SymbolName, Annotated[SymbolEntry, BeforeValidator(_or_empty, json_schema_input_type=SymbolEntry | None)]
]
InputEntries: TypeAlias = dict[str, Dims]
PlacementEntries: TypeAlias = dict[PatternText, Rank]
OutputEntries: TypeAlias = dict[PatternText, Delivery]


class PlanEntries(BaseModel):
    """Where each operator of a model runs. Rules apply in order; where two match, the later wins."""

    model_config = ConfigDict(extra="forbid", strict=True, title="partc plan")

    ranks: int = Field(ge=1, description="The number of ranks, the processes of the job; they are numbered from 0.")
    symbols: Annotated[SymbolEntries, BeforeValidator(_or_empty, json_schema_input_type=SymbolEntries | None)] = Field(
        {}, description="Dynamic dims by name, with their legal sizes."
    )
    inputs: Annotated[InputEntries, BeforeValidator(_or_empty, json_schema_input_type=InputEntries | None)] = Field(
        {},
        description="The dims of the model's inputs: sizes, symbols, names of free dims, or null. "
        "An input that is not named keeps the dims that the model gives it.",
    )
    placement: Annotated[
        PlacementEntries, BeforeValidator(_or_empty, json_schema_input_type=PlacementEntries | None)
    ] = Field(
        {},
        description="The rank of every operator that a pattern matches. A pattern names modules or nodes by "
        "their dotted path: '*' within one part, '**' across parts, [0-5] a range of numbers; a module takes all that is "
        "inside.",
    )
    outputs: Annotated[
        OutputEntries,
        BeforeValidator(_everywhere, json_schema_input_type=OutputEntries | DeliveredTo | None),
    ] = Field(
        {},
        description="The ranks to which the outputs that a pattern matches are delivered: a rank, a list of ranks, or "
        "'producer' for the rank that makes them. One value instead of a mapping holds for all outputs.",
    )


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan, for editors that complete and check YAML."""
    schema: Mapping[str, Any] = PlanEntries.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
