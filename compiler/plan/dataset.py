"""How inputs arrive on their ranks, according to a plan or a `model.py`.

    dataset: data_parallel                  full_batch: every rank is fed the whole batch; data_parallel: dim 0 in as many shards as ranks
    dataset: {x: [8, 1, 1, 1]}              the shards of each dim, by input, or by a pattern of inputs: "past.*.key"; the later wins
    dataset: [[8, 1, 1, 1], [8]]            the same by the inputs' order, the loss's labels last; null: unsharded

`dataset_strategy` is MindSpore's name for it; `full_batch: true` and `false` are its older spellings of full_batch and data_parallel. A
`model.py` sets it by globals of these names, with tuples or lists; the plan overrides them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.groups import frame_in
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.rules import DATA_PARALLEL, FULL_BATCH, Dataset, DatasetSpec
from partc.compiler.plan.shard_spec import DimSpec, ShardSpec, dim_spec, one_spelling
from partc.compiler.plan.sharding import DimEntry, SpecEntry
from partc.runtime.options import Refused, shown
from pydantic import BeforeValidator, PrivateAttr, RootModel, ValidationInfo

KEYS = ("dataset", "dataset_strategy", "full_batch")


class DatasetEntry(RootModel[dict[str, SpecEntry]]):
    """Maps each input to how each of its dims arrives sharded."""

    _style: str = PrivateAttr(FULL_BATCH)
    _order: tuple[ShardSpec | None, ...] = PrivateAttr(())

    @staticmethod
    def of(style: str, order: Sequence[ShardSpec | None] = ()) -> DatasetEntry:
        """Returns the entry with one style for all inputs, or with specs in the order of the inputs."""
        entry = DatasetEntry({})
        entry._style, entry._order = style, tuple(order)
        return entry

    def dataset(self, where: str, lines: Mapping[str, str]) -> Dataset:
        """Converts the entry at the line `where` to a `Dataset`; `lines` maps its keys to their lines."""
        specs = {name: one_spelling([dims])[0] for name, dims in self.root.items()}
        by_name = {name: DatasetSpec(spec, lines[name]) for name, spec in specs.items() if spec is not None}
        return Dataset(self._style, by_name, where, self._order)


def full_batch(value: object) -> DatasetEntry | None:
    """Converts MindSpore's older key `full_batch` to an entry; None for None. Raises Refused."""
    if value is not None and not isinstance(value, bool):
        raise Refused(f"expected true or false, but got {shown(value)}")
    return None if value is None else DatasetEntry.of(FULL_BATCH if value else DATA_PARALLEL)


def declared_dataset(values: Mapping[str, object], lines: Mapping[str, str]) -> Dataset | None:
    """Returns the dataset that the globals of a `model.py` declare, None if none does; `lines` has their places. Raises CompileError."""
    said = [key for key in KEYS if values.get(key) is not None]
    problems = list(repeated_keys(said, lines))
    dataset: Dataset | None = None
    for key in said:
        try:
            dataset = _declared(key, values[key], lines[key])
        except Refused as violation:
            problems.append(Problem.of(violation, lines[key], key))
    if problems:
        raise CompileError(problems)
    return dataset


def repeated_keys(keys: Sequence[str], lines: Mapping[str, str]) -> list[Problem]:
    """Returns a problem for every key after the first that defines how inputs arrive."""
    return [
        Problem(lines[key], f"'{key}' and '{keys[0]}' both define how inputs arrive", help="keep one of them")
        for key in keys[1:]
    ]


def in_order(dataset: Dataset, names: Sequence[str], own: int) -> Dataset:
    """Assigns specs listed in order, or by patterns, to the inputs' names. Raises CompileError where their numbers differ.

    `names`: the model's `own` inputs, then those that the loss adds. A key that matches no input stays, and is reported when inputs are
    sharded.
    """
    if not dataset.order:
        return replace(dataset, specs=_by_name(dataset.specs, names))
    if len(dataset.order) not in (own, len(names)):
        count = len(dataset.order)
        fact = f"the dataset has {count} entr{'y' if count == 1 else 'ies'}, but the inputs are {', '.join(names)}"
        raise CompileError(
            Problem(dataset.where, fact, help="write one for each in this order, null for one that is whole")
        )
    specs = {
        name: DatasetSpec(spec, dataset.where)
        for name, spec in zip(names, dataset.order, strict=False)
        if spec is not None
    }
    return replace(dataset, specs=specs, order=())


def _by_name(specs: Mapping[str, DatasetSpec], names: Sequence[str]) -> dict[str, DatasetSpec]:
    found: dict[str, DatasetSpec] = {}
    for pattern, spec in specs.items():
        hit = [name for name in names if name == pattern] or [name for name in names if _matches(pattern, name)]
        found.update(dict.fromkeys(hit or [pattern], spec))
    return found


def _matches(pattern: str, name: str) -> bool:
    try:
        return compile_pattern(pattern).matches(name)
    except ValueError:  # names of inputs have any characters
        return False


def _declared(key: str, value: object, where: str) -> Dataset:
    if key == "full_batch":
        entry = full_batch(value)
        assert entry is not None
        return entry.dataset(where, {})
    if isinstance(value, dict):
        specs = {str(name): DatasetSpec(_spec(spec, None), where) for name, spec in value.items()}
        return Dataset(FULL_BATCH, specs, where)
    return _styled(value, None).dataset(where, {})


def _arriving(value: object, info: ValidationInfo) -> object:
    frame = frame_in(info)
    axes = None if frame.mesh is None else [name for name, _ in frame.mesh]
    return value if isinstance(value, dict | DatasetEntry) else _styled(value, axes)


def _styled(value: object, axes: Collection[str] | None) -> DatasetEntry:
    """Returns the entry of a style name, or of a list of specs."""
    if value is None or value in (FULL_BATCH, DATA_PARALLEL):
        return DatasetEntry.of(str(value or FULL_BATCH))
    if isinstance(value, list | tuple) and value:
        if not any(isinstance(spec, list | tuple) for spec in value):
            law = "a dataset has a cut for each input, with an entry for each dim"
            raise Refused("the list has dims where it should have inputs", law, "write one more pair of brackets")
        return DatasetEntry.of(
            FULL_BATCH, [None if spec is None else _spec(spec, axes, k) for k, spec in enumerate(value)]
        )
    raise Refused(
        f"expected {FULL_BATCH}, {DATA_PARALLEL} or the cut of each input, but got {shown(value)}",
        help="write {x: [8, 1, 1, 1]} for an input x whose dim 0 arrives in 8 shards",
    )


def _spec(value: object, axes: Collection[str] | None, k: int | None = None) -> ShardSpec:
    of = "" if k is None else f"input {k}: "
    if not isinstance(value, list | tuple):
        raise Refused(f"{of}expected an entry for each dim, such as [2, 4], but got {shown(value)}")
    try:
        dims: list[DimSpec | None] = [dim_spec(dim, axes) for dim in value]
        spec = one_spelling([dims])[0]
    except Refused as violation:
        raise Refused(f"{of}{violation.fact}", violation.law, violation.help) from None
    assert spec is not None
    return spec


_Specs: TypeAlias = list[DimEntry]
DatasetForm: TypeAlias = Annotated[
    DatasetEntry,
    BeforeValidator(
        _arriving,
        json_schema_input_type=dict[str, _Specs] | list[_Specs | None] | Literal["full_batch", "data_parallel"] | None,
    ),
]
