"""A GPT of four blocks in stages, and the text of pipeline plans."""

from __future__ import annotations

from training_models import Model, gpt


def pipeline(count: int, schedule: str = "", more: str = "") -> str:
    return f"pipeline: {{microbatches: {count}{f', schedule: {schedule}' if schedule else ''}{more}}}\n"


GPT = "'layers.0': A, 'layers.1': B, 'layers.2': C, 'layers.3': D, norm: D, head: D, tokens: A, positions: A"
CLASSES = "{type: softmax_cross_entropy, logits: y, labels: labels, ignore_index: 3}"


def placed(groups: str) -> str:
    """The four layers of a GPT on ranks, the tied table with the first; the head is on the last."""
    found = GPT
    for letter, group in zip("ABCD", groups.split(), strict=True):
        found = found.replace(f" {letter}", f" {group}")
    return f"placement: {{{found}}}\n"


def small_gpt() -> Model:
    return gpt(16, 4, 2, 30, 8)
