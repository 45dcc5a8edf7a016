"""The batches of a training: what a batch has, and batches with those that follow them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from ..artifact.format import Manifest

Item = TypeVar("Item")


def of_batch(manifest: Manifest) -> Manifest:
    """The manifest without the inputs that a step of training is given beside a batch."""
    if manifest.training is None:
        return manifest
    own = {*manifest.training.scalars}
    return manifest.model_copy(update={"inputs": [port for port in manifest.inputs if port.name not in own]})


def with_next(batches: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Each batch with the one that follows it, which is read before the first is handled."""
    source = iter(batches)
    batch = next(source, None)
    while batch is not None:
        following = next(source, None)
        yield batch, following
        batch = following
