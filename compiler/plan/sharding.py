"""The sharding of operators in a plan: styles, strategies, and the limit on the bytes of the reshards that they cause.

Every dim's entry is checked on its own, and a rule as a whole for having one spelling (`partc.compiler.plan.shard_spec`).

The names of shardings of a module's parameters: Megatron's, and those of the `tp_plan` of Hugging Face's transformers, unchanged.

    colwise      shards the factor that a parameter adds to the output; each part of a packed weight
    rowwise      shards the factor over which it sums
    replicate    shards nothing inside
    pull         shards the rows of a looked-up table over all ranks; each requests the rows of its ids from the others
    derive       declares nothing: the inside is sharded as its neighbours are

Derived reshards need no style: the input of a rowwise layer is sharded if it is not yet, and its output is summed where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from partc.compiler.plan.groups import frame_in
from partc.compiler.plan.rules import ShardingRule
from partc.compiler.plan.shard_spec import DimSpec, ShardSpec, dim_spec, one_spelling
from partc.runtime.options import Options, Refused, is_integer, or_empty, shown
from partc.runtime.spellings import nearest
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

Style: TypeAlias = Literal[
    "colwise",
    "rowwise",
    "replicate",
    "pull",
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "local_colwise",
    "local_rowwise",
    "mla_kv_a_proj",
    "moe_tp_experts",
    "packed_colwise",
    "packed_rowwise",
    "replicated",
    "replicated_with_grad_allreduce",
    "rowwise_rep",
    "rowwise_split_input",
]
STYLES: tuple[str, ...] = get_args(Style)
PLAIN: tuple[str, ...] = STYLES[:4]
"""The styles that messages list; the other names are Hugging Face's."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a name. `style`: colwise, rowwise, replicate, pull or derive. `gathers`: the output is replicated on every rank."""

    style: str
    gathers: bool = False


MEANINGS: dict[str, Meaning] = {
    **{word: Meaning(word) for word in PLAIN},
    "replicated": Meaning("replicate"),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), Meaning("colwise", gathers=True)),
    **dict.fromkeys(("embedding_colwise", "local_colwise", "packed_colwise", "packed_rowwise"), Meaning("colwise")),
    **dict.fromkeys(("embedding_rowwise", "local_rowwise", "rowwise_rep", "rowwise_split_input"), Meaning("rowwise")),
    **dict.fromkeys(("mla_kv_a_proj", "moe_tp_experts", "replicated_with_grad_allreduce"), Meaning("derive")),
}
"""Maps names to meanings. A packed rowwise weight is not transposed: its packed last dim is that of the output."""


def _dim_spec(value: object, info: ValidationInfo) -> DimSpec | None:
    frame = frame_in(info)
    return dim_spec(value, None if frame.mesh is None else [name for name, _ in frame.mesh])


def _one_spec(value: object) -> object:
    if isinstance(value, list):
        return value
    raise Refused(f"expected an entry for each dim, such as [2, 4], but got {shown(value)}")


def _spelled_once(dims: list[DimSpec | None]) -> list[DimSpec | None]:
    one_spelling([dims])
    return dims


def _some_specs(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list):
        raise Refused(f"expected a cut for each tensor, such as [[2, 4], [4, 1]], but got {shown(value)}")
    if not value:
        raise Refused("the list is empty", "a strategy has an entry for each tensor; null derives it")
    if not any(entry is None or isinstance(entry, list) for entry in value):
        raise Refused(
            "the list has dims where it should have tensors",
            "a strategy has a list for each tensor, with an entry for each dim",
            "write one more pair of brackets: [[2, 4]] for one tensor",
        )
    return value


_PACKED = "a packed weight is cut in each of its parts"


def _style_name(value: object) -> object:
    if not isinstance(value, str) or value in STYLES:
        return value
    near = nearest(value, STYLES, 1)
    help = f"the nearest is '{near[0]}'" if near else f"choose from {', '.join(PLAIN)}"
    raise Refused(f"'{value}' is not a style", "a rule is a style, or a strategy such as {in: [[2, 4], null]}", help)


def _packed(value: object) -> object:
    numbers = value if isinstance(value, list) else [value]
    if (
        not all(isinstance(n, int) and is_integer(n) and n > 0 for n in numbers)
        or len(numbers) < isinstance(value, list) * 2
        or value == 1
    ):
        fact = f"expected a number of parts, or the size of each, but got {shown(value)}"
        raise Refused(fact, _PACKED, "write packed: 3, or packed: [64, 16, 16]")
    return value


StyleName: TypeAlias = Annotated[Style, BeforeValidator(_style_name, json_schema_input_type=Style)]
PackedParts: TypeAlias = Annotated[int | list[int], BeforeValidator(_packed, json_schema_input_type=int | list[int])]
DimEntry: TypeAlias = Annotated[int, Field(ge=1)] | str | list[str] | None
SpecDim: TypeAlias = Annotated[DimSpec | None, PlainValidator(_dim_spec, json_schema_input_type=DimEntry)]
SpecEntry: TypeAlias = Annotated[list[SpecDim], BeforeValidator(_one_spec), AfterValidator(_spelled_once)]
SpecEntries: TypeAlias = Annotated[
    list[SpecEntry | None] | None,
    BeforeValidator(_some_specs, json_schema_input_type=list[list[DimEntry] | None] | None),
]


class ShardingEntry(Options):
    """Into how many shards, or along which mesh axes, each dim is sharded. What is not said, or null, is derived."""

    inputs: SpecEntries = Field(
        None,
        alias="in",
        description="Per tensor input the shards of its dims, or null: [[2, 4], [4, 1]], [[dp, tp], [tp, null]], [[[dp, tp], null], null].",
    )
    outputs: SpecEntries = Field(None, alias="out", description="The same for each output.")
    parameters: Annotated[
        dict[str, SpecEntry], BeforeValidator(or_empty, json_schema_input_type=dict[str, list[DimEntry]] | None)
    ] = Field({}, description="Shards of parameters inside a module, by their path from it: {dense2.weight: [8, 1]}.")
    level: Literal[0, 1, 2] = Field(
        0,
        description="What to prefer where a choice is left: 0 fewest bytes; 1 less memory, sums are left scattered; "
        "2 less time, products that all ranks would do alike are shared out.",
    )
    style: StyleName | None = Field(
        None, description="The style of the parameters inside: {style: colwise, packed: 3}."
    )
    packed: PackedParts | None = Field(
        None,
        description="For a colwise weight that packs several: the number of equal parts, or their sizes: 3, [64, 16, 16]. "
        "Where a Split behind it says so it may be left out.",
    )

    @model_validator(mode="after")
    def _says_something_once(self) -> ShardingEntry:
        if self.style is None and self.inputs is None and self.outputs is None and not self.parameters:
            raise _nothing()
        if self.style is not None and (self.inputs is not None or self.outputs is not None):
            fact = "a style beside 'in' or 'out'"
            raise Refused(fact, "a style cuts parameters, and all else is derived", "keep one of them")
        if self.packed is not None and (self.style is None or MEANINGS[self.style].style != "colwise"):
            raise Refused("'packed' without a colwise style", _PACKED, "write {style: colwise, packed: 3}")
        self.specs()
        return self

    def specs(self) -> list[ShardSpec | None]:
        """Returns the specs of inputs, outputs and parameters, in this order, all in one spelling."""
        return one_spelling([*(self.inputs or ()), *(self.outputs or ()), *self.parameters.values()])

    def rule(self, pattern: str, where: str) -> ShardingRule:
        """Returns the rule of the entry for a pattern, at the line `where`."""
        specs = iter(self.specs())
        inputs = None if self.inputs is None else tuple(next(specs) for _ in self.inputs)
        outputs = None if self.outputs is None else tuple(next(specs) for _ in self.outputs)
        parameters = {name: spec for name, spec in zip(self.parameters, specs, strict=True) if spec is not None}
        meaning = None if self.style is None else MEANINGS[self.style]
        packed = tuple(self.packed) if isinstance(self.packed, list) else self.packed
        return ShardingRule(
            pattern,
            None if meaning is None else meaning.style,
            inputs,
            outputs,
            parameters,
            where,
            self.level,
            packed=packed,
            gathers=meaning is not None and meaning.gathers,
        )


def _nothing() -> Refused:
    return Refused(
        "the rule is empty",
        f"a rule is {', '.join(PLAIN[:-1])} or {PLAIN[-1]}, or has 'in', 'out' or 'parameters'",
        "write {in: [[2, 4], null]}, or remove the line",
    )


def _styled(value: object) -> object:
    if value is None:
        raise _nothing()
    if not isinstance(value, str):
        return value
    return {"style": _style_name(value)}


ShardingForm: TypeAlias = Annotated[
    ShardingEntry, BeforeValidator(_styled, json_schema_input_type=ShardingEntry | Style)
]
