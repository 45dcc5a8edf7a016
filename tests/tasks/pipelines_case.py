"""A small GPT in stages, and the text of pipeline plans."""

from __future__ import annotations

from training_models import Model, gpt


def pipeline(count: int, schedule: str = "", more: str = "") -> str:
    return f"pipeline: {{microbatches: {count}{f', schedule: {schedule}' if schedule else ''}{more}}}\n"


CLASSES = "{type: softmax_cross_entropy, logits: y, labels: labels, ignore_index: 3}"


def placed(groups: str) -> str:
    """The layers of a GPT each on its rank, the tied table with the first; the head is on the last."""
    each = groups.split()
    first, last = each[0], each[-1]
    layers = [f"'layers.{k}': {group}" for k, group in enumerate(each)]
    ends = [f"norm: {last}", f"head: {last}", f"tokens: {first}", f"positions: {first}"]
    return f"placement: {{{', '.join([*layers, *ends])}}}\n"


def small_gpt(layers: int) -> Model:
    return gpt(16, layers, 2, 30, 8)
