"""The names of shardings of a module's parameters: Megatron's, and those of the `tp_plan` of Hugging Face's transformers, unchanged.

    colwise      the factor that a parameter brings to the output; a packed weight's parts each
    rowwise      the factor that it sums over
    replicate    nothing inside is cut
    pull         the rows of a table that is looked up, over all ranks; each asks the others for the rows that its ids name
    derive       nothing is said: the inside is cut as its neighbours are

What partc derives needs no word: what enters a rowwise layer is cut where it is not, what leaves one is summed up where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

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
"""The words that a message names; the others are Hugging Face's."""


@dataclass(frozen=True)
class Meaning:
    """`style`: colwise, rowwise, replicate, pull or derive. `gathers`: the output is whole on every rank."""

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
"""A packed rowwise weight is one that is not transposed: its last dim, which is packed, is that of the output."""
