"""The names of shardings of a module's parameters: Megatron's, and those of the `tp_plan` of Hugging Face's transformers, unchanged.

    colwise      shards the factor that a parameter adds to the output; each part of a packed weight
    rowwise      shards the factor over which it sums
    replicate    shards nothing inside
    pull         shards the rows of a looked-up table over all ranks; each requests the rows of its ids from the others
    derive       declares nothing: the inside is sharded as its neighbours are

Derived reshards need no style: the input of a rowwise layer is sharded if it is not yet, and its output is summed where it is read.
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
