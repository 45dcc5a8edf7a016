"""Transforms of a batch of MNIST's digits, those beside the LeNet: each gives what one of the models here takes."""

import numpy as np


def pixels(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every fourth pixel: `x` [batch, 49] from 0 to 1; `label` [batch]."""
    few = batch["x"].reshape(-1, 28, 28)[:, 2::4, 2::4].reshape(-1, 49)
    return {"x": few.astype(np.float32) / 255, "label": batch["label"].astype(np.int64)}


def with_ink(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `pixels`, with the mean of each picture: `ink` [batch, 1]."""
    few = pixels(batch)
    return {**few, "ink": few["x"].mean(1, keepdims=True)}


def with_words(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `pixels`, with a text of seven words, one for the ink in each row: `ids` [batch, 7] from 0 to 15."""
    few = pixels(batch)
    return {**few, "ids": np.minimum(few["x"].reshape(-1, 7, 7).sum(2) * 4, 15).astype(np.int64)}
