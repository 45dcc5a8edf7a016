"""The data of a training loop that the user writes: a value that `data:` of a plan may have, or the object that a data file would define.

with load_trainer("build") as trainer, trainer.loader(DataLoader(digits, batch_size=32), epochs=2) as batches:
    for batch in batches:
        trainer.train(batch, batches.peek())
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from partc.runtime.artifact.training.data_spec import Spec

from ..artifact.format import Manifest, Port, TrainingRecord
from ..data.loader import Loader, open_loader
from ..errors import UsageError

Item = TypeVar("Item")


def of_batch(manifest: Manifest) -> Manifest:
    """Returns the manifest without the inputs that a training step gets in addition to a batch, such as the learning rate."""
    if manifest.training is None:
        return manifest
    own = {*manifest.training.scalars}
    return manifest.model_copy(update={"inputs": [port for port in manifest.inputs if port.name not in own]})


def with_next(batches: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Yields each batch with the next one (None after the last), which is read before the first is processed."""
    source = iter(batches)
    batch = next(source, None)
    while batch is not None:
        following = next(source, None)
        yield batch, following
        batch = following


class Choices(TypedDict, total=False):
    """The settings that a call may pass in place of the plan's: keys of `train:`, and `fields` of `data`."""

    batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    interleave: int
    fields: tuple[str, ...] | Mapping[str, str]


def loader_of(
    data: object,
    record: TrainingRecord,
    ports: list[Port],
    rank: int,
    largest: Callable[[int], int],
    epochs: int | None,
    choices: Choices,
) -> Loader:
    """Opens a rank's loader of the data, with the artifact's settings except those in `choices`."""
    if unknown := choices.keys() - Choices.__annotations__.keys():
        known = ", ".join(Choices.__annotations__)
        raise UsageError(f"loader() takes no {', '.join(sorted(unknown))}\n  help: it takes data, epochs, {known}")
    settings = record.settings
    says: dict[str, Any] = {
        name: choices.get(name, getattr(settings, name)) for name in ("batch", "seed", "shuffle", "drop_last")
    }
    interleave = choices.get("interleave", settings.interleave)
    says["shuffle"] = says["shuffle"] and interleave is None
    spec, source = (Spec.parse(data, Path.cwd()), None) if _is_spec(data) else (Spec(), data)
    spec = replace(spec, fields=choices.get("fields", spec.fields))
    return open_loader(
        spec,
        ports,
        rank,
        interleave=interleave or 1,
        epochs=epochs,
        fixed=record.fixed,
        source=source,
        largest=largest,
        **says,
    )


def _is_spec(data: object) -> bool:
    """Whether `data` is a path or a mapping as in a plan; else it is the source itself."""
    if isinstance(data, Mapping):
        return all(isinstance(value, str | int | float | list | tuple | dict) for value in data.values())
    return isinstance(data, str | os.PathLike)
