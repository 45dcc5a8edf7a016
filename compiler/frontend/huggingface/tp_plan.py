"""Reads the `tp_plan` of the models of `transformers` in a module: how their authors shard them over ranks.

A model has the entries of its configuration's `base_model_tp_plan`, under the paths of its own modules, and those of its class, such as
the head's. A module around a model adds the path of the model as a prefix.

    LlamaConfig         layers.*.self_attn.q_proj: colwise     ->     model.layers.*.self_attn.q_proj: colwise
    LlamaForCausalLM    lm_head: colwise_gather_output         ->     lm_head: colwise_gather_output
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from partc.compiler.frontend.huggingface.configuration import attribute
from partc.compiler.frontend.huggingface.settings import of_transformers
from partc.compiler.ir.declared import TpPlanEntry

if TYPE_CHECKING:
    import torch


def tp_plan(module: torch.nn.Module) -> tuple[TpPlanEntry, ...]:
    """Returns the entries of all models of `transformers` in a module, in their order; a model inside another one adds none."""
    paths = {id(one): path for path, one in module.named_modules()}
    taken: list[str] = []
    entries: list[TpPlanEntry] = []
    for model in of_transformers(module):
        path = paths[id(model)]
        if any(not outer or path.startswith(f"{outer}.") for outer in taken):
            continue  # the outer model has its entries
        taken.append(path)
        entries += _entries(model, f"{path}." if path else "")
    return tuple(entries)


def _entries(model: Any, prefix: str) -> Iterator[TpPlanEntry]:
    of_config = attribute(model.config, "base_model_tp_plan", dict, {})
    said = getattr(model, "_tp_plan", None)
    for key, style in (said if isinstance(said, Mapping) else of_config).items():
        configured = any(key == own or key.endswith(f".{own}") for own in of_config)
        source = type(model.config if configured else model).__name__
        yield TpPlanEntry(f"{prefix}{key}", str(style), source)
