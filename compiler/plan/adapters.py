"""`adapters` of a plan: products of two narrow weights that are added to products of the model, whose own weights stay as they are.

adapters: {sql: adapters/sql, mine: {on: "**.{q,v}_proj", rank: 8, alpha: 16, train: true}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from partc.compiler.plan.pattern import checked_pattern
from partc.runtime.options import Options, Refused, Remedy
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

MOST_RANK = 1 << 12


class AdapterEntry(Options):
    """An adapter: the folder that peft wrote, or the products that get a new one."""

    source: Annotated[str | None, Remedy("write the folder that peft's save_pretrained wrote")] = Field(
        None, description="A folder with adapter_config.json and adapter_model.safetensors, as peft writes it."
    )
    on: Annotated[str | None, AfterValidator(lambda text: text and checked_pattern(text))] = Field(
        None, description="A pattern of the modules that get a new adapter, which begins as peft's: it adds nothing."
    )
    rank: int = Field(8, ge=1, le=MOST_RANK, description="The width between the two weights of a new adapter.")
    alpha: float = Field(16.0, gt=0, description="What a new adapter adds is multiplied by alpha / rank.")
    seed: int = Field(0, ge=0, description="The seed of a new adapter's first weights.")
    train: bool = Field(False, description="Whether `train` changes it, and no other weight of the model.")

    @model_validator(mode="after")
    def _one_origin(self) -> AdapterEntry:
        if (self.source is None) == (self.on is None):
            fact = "neither 'source' nor 'on'" if self.source is None else "both 'source' and 'on'"
            help_ = (
                'write the folder of an adapter, or {on: "**.q_proj", rank: 8, alpha: 16, train: true} for a new one'
            )
            raise Refused(fact, "an adapter is read from a folder, or is new", help_)
        if self.on is not None and not self.train:
            raise Refused("a new adapter, and no 'train'", "a new adapter adds nothing", "write train: true")
        if self.source is not None and (said := {"rank", "alpha", "seed"} & self.model_fields_set):
            name = min(said)
            fact = f"'{name}' beside 'source'"
            raise Refused(fact, "the folder has the adapter's rank and alpha", f"leave out '{name}'", name)
        return self


def _folder_alone(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


AdapterForm: TypeAlias = Annotated[
    AdapterEntry, BeforeValidator(_folder_alone, json_schema_input_type=str | AdapterEntry)
]


def refused_adapters(adapters: Mapping[str, AdapterEntry], *, trains: bool, generates: bool) -> Refused | None:
    """Returns the reason why adapters do not fit the plan's other keys; None where they fit."""
    trained = [name for name, entry in adapters.items() if entry.train]
    if len(adapters) > 1 and not generates:
        law = "one adapter is added to a model; a plan that generates has several, chosen by request"
        return Refused(f"{len(adapters)} adapters, and no 'generate'", law, "keep one of them", "adapters")
    if trained and not trains:
        return Refused(
            f"'{trained[0]}' has train: true, and the plan has no 'train'",
            "",
            "add 'train', or leave it out",
            "adapters",
        )
    if adapters and trains and not trained:
        fact = f"'train' beside the adapter '{next(iter(adapters))}', which it does not change"
        return Refused(
            fact, "of a model with an adapter the adapter alone is trained", "write train: true under it", "adapters"
        )
    return None


@dataclass(frozen=True)
class AdapterRule:
    """An adapter by its name; `folder`: the folder that contains its `source`."""

    name: str
    entry: AdapterEntry
    folder: Path | None
    where: str
