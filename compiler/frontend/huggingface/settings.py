"""The settings with which torch exports a model of `transformers`: no cache, experts as batched products, unfused attention.

A model gets the first two before its export, and the last only if torch cannot export its attention unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from partc.compiler.frontend.huggingface.configuration import attribute

if TYPE_CHECKING:
    import torch

HELPS = {
    "cache": "set config.use_cache = False, or wrap the model in a module whose forward returns "
    "self.model(input_ids=input_ids, use_cache=False).logits",
    "experts": 'make the model with experts_implementation="batched_mm"',
    "attention": 'make the model with attn_implementation="eager"',
}
"""Maps each setting that partc cannot set to a text: what a user can write instead."""
_SYMPTOMS = (
    (re.compile(r"transformers\.cache_utils|DynamicCache"), "cache"),
    (re.compile(r"grouped_mm"), "experts"),
    (re.compile(r"Cannot view a tensor with shape|scaled_dot_product|SDPA \(MHA\)"), "attention"),
)
"""Patterns of torch's errors about models of `transformers` that it cannot export unchanged, each with the setting that helps."""


def of_transformers(module: torch.nn.Module) -> Iterator[Any]:
    """Yields the models of `transformers` in a module; the module itself comes first where it is one."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return (one for one in module.modules() if loaded is not None and isinstance(one, loaded.PreTrainedModel))


def is_of_transformers(module: torch.nn.Module) -> bool:
    """Whether the module itself is a model of `transformers`."""
    return next(of_transformers(module), None) is module


def prepare(module: torch.nn.Module) -> None:
    """Sets the cache and the experts of the models of `transformers` in a module, without which torch exports none.

    The cache is set only where the module itself is such a model; a module around a model chooses for itself.
    """
    for setting in ("cache", "experts"):
        settle(module, setting)


@contextmanager
def unfused_attention(module: torch.nn.Module) -> Iterator[None]:
    """A context in which the models of `transformers` in a module compute unfused attention, so that none reads the values of a mask."""
    before = [(one, attribute(one.config, "_attn_implementation", str, "eager")) for one in of_transformers(module)]
    settle(module, "attention")
    try:
        yield
    finally:
        for model, name in before:
            _attend(model, name)


def remedy(message: str, module: torch.nn.Module) -> str:
    """Returns the setting of `transformers` that would avoid an error of torch; empty for any other error."""
    found = (setting for symptom, setting in _SYMPTOMS if symptom.search(message))
    return next(found, "") if any(of_transformers(module)) else ""


def settle(module: torch.nn.Module, setting: str) -> bool:
    """Applies a setting to the models of `transformers` in a module; returns whether any could take it."""
    models = list(of_transformers(module))
    match setting:
        case "cache":  # encoder and decoder have copies of the configuration
            models = models if is_of_transformers(module) else []
            for model in models:
                model.config.use_cache = False
        case "experts":
            models = [one for one in models if one._can_set_experts_implementation()]
            for model in models:
                model.set_experts_implementation("batched_mm")
        case "attention":
            for model in models:
                _attend(model, "eager")
        case _:
            return False
    return bool(models)


def _attend(model: Any, name: str) -> None:
    """Sets how a model computes attention. Falcon reads it from its configuration in each forward, and has no method to set it."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    else:
        vars(model.config)["_attn_implementation_internal"] = name
