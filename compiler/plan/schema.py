"""The plan's YAML: its keys, their meaning and their values.

The models serve two ends: `plan_schema` prints them for editors, and `read` checks a file by them. A rule of the plan's
own raises `Refused`, whose texts are the user's; a `Frame` as context lets ranks and axes be checked where they stand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from partc.compiler.dims.symbol import LARGEST, Symbol
from partc.compiler.plan.adapters import AdapterForm, refused_adapters
from partc.compiler.plan.context import ContextRules
from partc.compiler.plan.dataset import DatasetEntry, DatasetForm
from partc.compiler.plan.elastic import ElasticEntry
from partc.compiler.plan.experts import ExpertsEntry, everywhere
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.plan.groups import Group, checked_mesh, checked_role, checked_roles, placed, rank_of, ranks_of
from partc.compiler.plan.pattern import checked_pattern
from partc.compiler.plan.pipeline import PipelineEntry
from partc.compiler.plan.precision import Blocks, MessageRules, PrecisionRules, low_type
from partc.compiler.plan.rules import FULL_BATCH
from partc.compiler.plan.sharding import ShardingForm
from partc.compiler.plan.stored import StoredEntry, StoredSettings, refused_storage
from partc.compiler.plan.target import TargetName
from partc.compiler.plan.training.rules import TrainRules
from partc.runtime.artifact.format import MOST_RANKS
from partc.runtime.options import ByteCount, Options, Refused, Remedy, is_integer, or_empty, shown
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

PRODUCER: Literal["producer"] = "producer"
CUT = ("cut", "sharded")
"""The words for an output that stays sharded."""

_DIM_NAME = re.compile(r"[^\W\d][\w.]*")


def is_dim_name(text: str) -> bool:
    """Whether a text can name a dim in a plan: letters, digits, `_` and `.`, no digit first."""
    return _DIM_NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class Delivery:
    """Where an output goes: to these ranks, or nowhere, where it is whole or stays `sharded`."""

    ranks: tuple[int, ...] | None
    sharded: bool = False


def _delivered(value: object, info: ValidationInfo) -> Delivery:
    if value == PRODUCER or value in CUT:
        return Delivery(None, sharded=value in CUT)
    if not isinstance(value, list):
        if not is_integer(value):
            raise Refused(f"expected a rank, a list of ranks, 'producer' or 'sharded', but got {shown(value)}")
        return Delivery((rank_of(value, info),))
    return Delivery(
        tuple(sorted(ranks_of(value, info, "write 'producer' for an output that stays where it is computed")))
    )


def _dim(value: object) -> int | str | None:
    law = "a dim is a size, the name of a symbol or of a free dim, or null where nothing is said"
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise Refused(f"the size {value} is negative", law, "name a dynamic dim, or write null")
        if value > LARGEST:
            raise Refused(f"the size {value} is above {LARGEST}", law)
        return value
    if not isinstance(value, str):
        raise Refused(f"expected a dim, but got {shown(value)}", law)
    if not is_dim_name(value):
        raise Refused(f"'{value}' is no name", law, "a name has letters, digits, '_' and '.', and no digit first")
    return value


def _dims(value: object) -> object:
    if not isinstance(value, list):
        raise Refused(f"expected a list of dims such as [batch, 1, 28, 28], but got {shown(value)}")
    return value


def _name_of(what: str) -> AfterValidator:
    """The law of names that the plan gives itself."""

    def checked(text: str) -> str:
        if not text.isidentifier():
            raise Refused("this is no name", f"{what} name has letters, digits and '_', and no digit first")
        return text

    return AfterValidator(checked)


def _or_none(form: Any) -> BeforeValidator:
    """Lets null stand for an empty mapping."""
    return BeforeValidator(or_empty, json_schema_input_type=form | None)


def _everywhere(value: object) -> object:
    return or_empty(value) if isinstance(value, dict | None) else {"**": value}


PatternText: TypeAlias = Annotated[str, AfterValidator(checked_pattern), Field(min_length=1)]
SymbolName: TypeAlias = Annotated[str, _name_of("a symbol's")]
RankNumber: TypeAlias = Annotated[int, Field(ge=0)]
RankList: TypeAlias = Annotated[list[RankNumber], Field(min_length=1)]
Slice: TypeAlias = Annotated[dict[str, RankNumber], Field(min_length=1)]
RoleName: TypeAlias = Annotated[dict[Literal["role"], str], Field(min_length=1)]
Placed: TypeAlias = Annotated[
    Group, PlainValidator(placed, json_schema_input_type=RankNumber | RankList | Slice | RoleName)
]
DeliveredTo: TypeAlias = RankNumber | RankList | Literal["producer", "sharded", "cut"]
Delivered: TypeAlias = Annotated[Delivery, PlainValidator(_delivered, json_schema_input_type=DeliveredTo)]
DimText: TypeAlias = Annotated[int, Field(ge=0)] | str | None
Dim: TypeAlias = Annotated[int | str | None, PlainValidator(_dim, json_schema_input_type=DimText)]
Dims: TypeAlias = Annotated[list[Dim], BeforeValidator(_dims)]
BatchDimEntries: TypeAlias = dict[str, Annotated[int, Field(ge=0)] | None]


class SymbolEntry(Options):
    """The legal sizes of a dynamic dim: divisor*N + remainder with N >= 1, within min and max."""

    min: int = Field(1, ge=1, description="The smallest size.")
    max: int = Field(0, ge=0, description="The largest size; 0: no maximum.")
    divisor: int = Field(1, ge=1, description="Every size is divisor*N + remainder with N >= 1.")
    remainder: int = Field(0, ge=0, description="See divisor; less than divisor.")
    unique: bool = Field(False, description="All uses of the symbol have the same size.")

    @model_validator(mode="after")
    def _legal(self) -> SymbolEntry:
        try:
            self.symbol()
        except ValueError as error:
            raise Refused(str(error), key="remainder" if self.remainder >= self.divisor else "max") from None
        return self

    def symbol(self) -> Symbol:
        """The symbol that the entry declares."""
        return Symbol(self.max, self.min, self.divisor, self.remainder, self.unique)


SymbolEntries: TypeAlias = dict[SymbolName, Annotated[SymbolEntry, _or_none(SymbolEntry)]]
InputEntries: TypeAlias = dict[str, Dims]
MeshEntries: TypeAlias = dict[Annotated[str, _name_of("a mesh axis'")], Annotated[int, Field(ge=1)]]
RoleEntries: TypeAlias = dict[
    Annotated[str, _name_of("a role's")],
    Annotated[Group, PlainValidator(checked_role, json_schema_input_type=RankNumber | RankList)],
]
PlacementEntries: TypeAlias = dict[PatternText, Placed]
ShardingEntries: TypeAlias = dict[PatternText, ShardingForm]
OutputEntries: TypeAlias = dict[PatternText, Delivered]
TargetEntries: TypeAlias = dict[PatternText, TargetName]
ExpertsEntries: TypeAlias = dict[PatternText, ExpertsEntry]
QuantizeEntries: TypeAlias = dict[PatternText, Blocks | None]
StoredEntries: TypeAlias = dict[PatternText, StoredEntry]
_NOT_IN_PARTS = ("parameters", "experts", "context", "messages")
"""Keys of a plan that a training with `elastic: {parts: ...}` cannot have."""
AdapterEntries: TypeAlias = dict[Annotated[str, Field(pattern=r"^[\w.:/@+-]+$", max_length=256)], AdapterForm]


def _precision(value: object) -> str:
    return f"write precision: {{compute: {low_type(value) or 'float16'}}}"


class RankEntries(Options):
    """The keys of a plan about the ranks of the job."""

    ranks: Annotated[int, Remedy("begin with the number of ranks, 'ranks: 2'")] = Field(
        ge=1, le=MOST_RANKS, description="The number of ranks, the processes of the job; they are numbered from 0."
    )
    mesh: Annotated[
        MeshEntries, AfterValidator(checked_mesh), _or_none(MeshEntries), Remedy("write mesh: {dp: 2, tp: 4}")
    ] = Field(
        {},
        description="Names of the mesh axes, with their sizes, row-major, the last axis fastest: "
        "{dp: 2, tp: 4}. The sizes multiply to 'ranks', or else to the size of every group in 'placement'.",
    )
    roles: Annotated[
        RoleEntries, AfterValidator(checked_roles), _or_none(RoleEntries), Remedy("write roles: {ps: [2, 3]}")
    ] = Field(
        {},
        description="Ranks that only serve, by the name of their role: {ps: [4, 5]}. 'placement' gives them parameters; all else runs on "
        "the other ranks, the workers, whose grid the mesh may be.",
    )


class DataEntries(RankEntries):
    """The keys of a plan about the inputs: their dims, and how they arrive."""

    symbols: Annotated[
        SymbolEntries, _or_none(SymbolEntries), Remedy("write symbols: {batch: {divisor: 2, max: 64}}")
    ] = Field({}, description="Dynamic dims by name, with their legal sizes.")
    inputs: Annotated[InputEntries, _or_none(InputEntries), Remedy("write inputs: {x: [batch, 8]}")] = Field(
        {},
        description="The dims of the model's inputs: sizes, symbols, names of free dims, or null. "
        "An input that is not named keeps the dims that the model gives it.",
    )
    batch_dims: Annotated[
        BatchDimEntries, _or_none(BatchDimEntries), Remedy("write batch_dims: {x: 1, temperature: null}")
    ] = Field(
        {},
        description="By input the dim along which it holds the records of a batch, or null where it holds none. Without it: along the "
        "dim that the first input, or the labels, have the batch at.",
    )
    dataset: DatasetForm = Field(
        DatasetEntry({}),
        json_schema_extra={"default": FULL_BATCH},
        description="How inputs arrive: full_batch, replicated; data_parallel, records (dim 0) sharded over all ranks; or by "
        "input the cut of every dim, {x: [8, 1, 1, 1]}, where an input that is not named arrives whole; or the cuts in the "
        "order of the inputs, [[8, 1, 1, 1], [8]].",
    )
    dataset_strategy: DatasetForm = Field(
        DatasetEntry({}), json_schema_extra={"default": None}, description="MindSpore's name of 'dataset'."
    )
    full_batch: bool | None = Field(
        None, description="MindSpore's older word: true is 'dataset: full_batch', false 'dataset: data_parallel'."
    )


class PlanEntries(DataEntries):
    """Where each operator of a model runs, and how it is cut. Rules apply in order; where two match, the later wins."""

    model_config = ConfigDict(title="partc plan")

    placement: Annotated[PlacementEntries, _or_none(PlacementEntries), Remedy("write placement: {conv1: 0, fc: 1}")] = (
        Field(
            {},
            description="The ranks of the operators that a pattern matches: a rank, a list of ranks (a group), or a slice of "
            "the mesh, {pp: 1}, the group of all ranks with this coordinate; {role: ps}: those ranks have the parameters. "
            "A pattern names modules or nodes by "
            "their dotted path: '*' within one part, '**' across parts, [0-5] a range of numbers; a module takes all that is "
            "inside.",
        )
    )
    sharding: Annotated[
        ShardingEntries, _or_none(ShardingEntries), Remedy("write sharding: {fc1: colwise, fc2: rowwise}")
    ] = Field(
        {},
        description="The sharding of the operators that a pattern matches over their group: colwise, rowwise, replicate, pull, or a "
        "strategy, {in: [[2, 4], [4, 1]]}. What is not said is derived.",
    )
    experts: Annotated[
        ExpertsEntries,
        BeforeValidator(everywhere, json_schema_input_type=ExpertsEntries | ExpertsEntry | None),
        Remedy("write experts: {axis: dp}"),
    ] = Field(
        {},
        description="The layers of experts whose experts are shared out along a mesh axis, by pattern, {axis: ep}; one entry instead of a "
        "mapping holds for all. Where the axis shards the tokens, too, each goes to the ranks of its experts, and the results come back.",
    )
    parameters: Annotated[
        StoredEntries, _or_none(StoredEntries), Remedy('write parameters: {"layers.*": {stored: dp}}')
    ] = Field(
        {},
        description="Modules whose parameters ranks store in shards, by pattern: {stored: dp, after_forward: free}. They are gathered "
        "where they are read, a module in one message. '**' takes all parameters.",
    )
    stored: Annotated[StoredSettings, Remedy("write stored: {ahead: 1}")] = Field(
        StoredSettings(), description="When the parameters that `parameters` stores are gathered."
    )
    outputs: Annotated[
        OutputEntries,
        BeforeValidator(_everywhere, json_schema_input_type=OutputEntries | DeliveredTo | None),
    ] = Field(
        {},
        description="The ranks to which the outputs that a pattern matches are delivered, whole: a rank, a list of ranks, "
        "or 'producer' for the ranks that make them; 'sharded' (or 'cut'): they stay there, a shard on each rank. One value instead of a "
        "mapping holds for all outputs.",
    )
    target: Annotated[
        TargetEntries,
        BeforeValidator(_everywhere, json_schema_input_type=TargetEntries | Literal["cpu", "cuda"] | None),
        Remedy("write target: {fc: cuda}"),
    ] = Field(
        {},
        description="The kind of device, within its rank, of the operators that a pattern matches: cpu or cuda. The others run on the "
        "device of the job (--device). One value instead of a mapping holds for all operators.",
    )
    max_reshard_bytes: ByteCount = Field(
        None,
        description="Limit of the bytes that reshards send per step, and copies between a rank's devices move, 64MB or a number; "
        "null: no limit.",
    )
    train: Annotated[TrainRules | None, Remedy("write train: with loss, optimizer and batch under it")] = Field(
        None, description="Training: the plan then compiles to training programs."
    )
    precision: Annotated[PrecisionRules | None, Remedy(_precision)] = Field(
        None, description="Computation in 16 bits, with weights and sums in float32."
    )
    messages: Annotated[
        MessageRules | None, Remedy("write messages: {gradients: {bits: 8, block: 256, keep_rest: true}}")
    ] = Field(None, description="Messages between ranks in fewer bits.")
    quantize: Annotated[
        QuantizeEntries, _or_none(QuantizeEntries), Remedy('write quantize: {"**.up_proj": {bits: 4, block: 32}}')
    ] = Field(
        {},
        description="Products and tables whose weights are stored in 4 or 8 bits by pattern, {bits: 4, block: 32}; null: they stay as they "
        "are. Of a plan that does not train.",
    )
    adapters: Annotated[
        AdapterEntries,
        _or_none(AdapterEntries),
        Remedy("write adapters: {sql: adapters/sql}, the folder of an adapter of peft"),
    ] = Field(
        {},
        description="Adapters by name, which add to products of the model: a folder that peft wrote, or a new one, "
        '{on: "**.q_proj", rank: 8, alpha: 16, train: true}. A plan that generates has several, chosen by request.',
    )
    context: Annotated[ContextRules | None, Remedy("write context: {axis: cp}")] = Field(
        None,
        description="The tokens of a sequence are cut over a mesh axis, and attention gets keys and values of other ranks.",
    )
    generate: Annotated[GenerateRules | None, Remedy("write generate: {slots: 8, length: 4096}")] = Field(
        None,
        description="A decoder with past and present keeps its caches from step to step: the plan then compiles to a program that makes "
        "tokens.",
    )
    pipeline: Annotated[PipelineEntry | None, Remedy("write pipeline: {microbatches: 4}")] = Field(
        None,
        description="A batch runs as microbatches through the stages that the placement makes, in training and without it.",
    )

    elastic: Annotated[ElasticEntry | None, Remedy("write elastic: {ranks: [8, 6, 4]}")] = Field(
        None, description="The numbers of ranks that a training may continue on after it has lost some."
    )

    @model_validator(mode="after")
    def _elastic_fits(self) -> PlanEntries:
        if self.elastic is not None and self.train is None:
            law = "a training continues from its checkpoint, and an inference has none"
            raise Refused("'elastic' without 'train'", law, "leave out 'elastic'", "elastic")
        parts = self.elastic is not None and self.elastic.parts is not None
        if parts and (self.placement or self.target):
            key = "placement" if self.placement else "target"
            law = "each rank runs all of the model, on parts of the batch"
            raise Refused(f"'parts' beside '{key}'", law, f"leave out '{key}', or 'parts'", "elastic")
        if parts and self.train is not None and (self.train.accumulate > 1 or self.pipeline is not None):
            key = "pipeline" if self.pipeline is not None else "train.accumulate"
            law = "the parts of a batch are its microbatches, and their gradients are added up"
            raise Refused(f"'parts' beside '{key}'", law, f"leave out '{key}', or 'parts'", "elastic")
        if parts and (key := next((key for key in _NOT_IN_PARTS if getattr(self, key)), "")):
            law = (
                "gradients are whole on a rank, of records that no other rank shares, and added in float32 by one tree"
            )
            raise Refused(f"'parts' beside '{key}'", law, f"leave out '{key}', or 'parts'", "elastic")
        if self.elastic is not None and self.train is not None and getattr(self.train.loss, "per_rank_mean", False):
            law = "it is other numbers on another number of ranks"
            raise Refused("'elastic', and a loss with 'sum_over_ranks'", law, "write reduction: mean", "elastic")
        return self

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> PlanEntries:
        if self.pipeline is not None and self.train is not None and self.train.accumulate > 1:
            raise Refused(
                f"'train.accumulate' is {self.train.accumulate} already",
                "the gradients of microbatches are added up",
                "leave out 'accumulate'",
                "pipeline",
            )
        if self.pipeline is not None and self.pipeline.recompute and self.train is None:
            raise Refused(
                "'recompute' without 'train'",
                "values are kept for a backward pass alone",
                "leave out 'recompute'",
                "pipeline",
            )
        if self.pipeline is not None and self.pipeline.statistics is not None and self.train is None:
            law = "without training a normalization takes its running statistics"
            raise Refused("'statistics' without 'train'", law, "leave out 'statistics'", "pipeline")
        for key, other in (("train", self.train), ("pipeline", self.pipeline)):
            if self.generate is not None and other is not None:
                law = "a program that makes tokens neither learns nor runs microbatches"
                raise Refused(f"'generate' beside '{key}'", law, f"leave out '{key}', or 'generate'", "generate")
        if self.messages is not None and self.messages.rows is not None and not self.experts:
            law = "rows are sent to experts that ranks share"
            raise Refused(
                "'messages.rows' without 'experts'", law, "leave it out, or write experts: {axis: dp}", "messages"
            )
        gradients = self.messages.gradients if self.messages is not None else None
        if gradients is not None and self.train is None:
            law = "gradients are of a training"
            raise Refused("'messages.gradients' without 'train'", law, "leave out 'messages'", "messages")
        if gradients is not None and self.precision is not None and self.precision.messages is not None:
            law = "a gradient travels in one form"
            raise Refused("'messages.gradients' beside 'precision.messages'", law, "leave out one of them", "messages")
        if gradients is not None and gradients.keep_rest and self.stored.reduce == "microbatch":
            law = "what rounding leaves is kept from step to step, and each microbatch would leave its own"
            help_ = "write keep_rest: false, or stored: {reduce: step}"
            raise Refused("'keep_rest' beside 'reduce: microbatch'", law, help_, "messages")
        if self.quantize and self.train is not None and not any(one.train for one in self.adapters.values()):
            law = "a quantized weight has no gradient, but for an adapter that is added to it"
            raise Refused(
                "'quantize' beside 'train'",
                law,
                "train first, and quantize the model that the training saves",
                "quantize",
            )
        if self.generate is not None and any(entry.capacity for entry in self.experts.values()):
            law = "which rows are dropped depends on the other rows, so a text would depend on the texts of other slots"
            raise Refused("a capacity of experts beside 'generate'", law, "leave out 'capacity'", "experts")
        if refused := refused_storage(self.parameters, self.stored, generates=self.generate is not None):
            raise refused
        if refused := refused_adapters(
            self.adapters, trains=self.train is not None, generates=self.generate is not None
        ):
            raise refused
        scale = self.precision.scale if self.precision is not None else None
        if self.train is not None and scale is not None and scale.dynamic:
            said = self.train.on_nonfinite
            if "on_nonfinite" in self.train.model_fields_set and said != "skip":
                law = "a step whose gradients leave the range shrinks the scale, and changes nothing else"
                help_ = "leave out 'on_nonfinite', or give 'precision' a loss_scale that is a number"
                raise Refused(f"'on_nonfinite' is {said}, and the loss scale is dynamic", law, help_, "train")
        return self


class PlanWithoutTraining(PlanEntries):
    """A plan without the key `train`, whose many options are a quarter of what it takes to check a plan."""

    train: None = None


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan, for editors that complete and check YAML."""
    schema: Mapping[str, Any] = PlanEntries.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
