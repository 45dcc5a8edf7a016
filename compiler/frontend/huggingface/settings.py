"""The settings with which torch exports a model of `transformers`: no cache, experts as batched products, unfused attention.

A model gets the first two before its export, and the last only if torch cannot export its attention unchanged.

Reads attributes of the configuration of a model of `transformers`, each with a type and a default.

    attribute(BertConfig(), "is_decoder", bool, False)          False
    attribute(DistilBertConfig(), "is_decoder", bool, False)    False: the class has no such attribute
    attribute(LlavaConfig(), "max_position_embeddings", int)    that of its text model

About half of the classes lack any particular attribute, some have properties that raise, and a composite configuration has its text
model's attributes in a nested configuration. Only this module reads attributes of a configuration.

Reads the `tp_plan` of the models of `transformers` in a module: how their authors shard them over ranks.

A model has the entries of its configuration's `base_model_tp_plan`, under the paths of its own modules, and those of its class, such as
the head's. A module around a model adds the path of the model as a prefix.

    LlamaConfig         layers.*.self_attn.q_proj: colwise     ->     model.layers.*.self_attn.q_proj: colwise
    LlamaForCausalLM    lm_head: colwise_gather_output         ->     lm_head: colwise_gather_output
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from partc.compiler.ir.declared import TpPlanEntry

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
U = TypeVar("U")


@overload
def attribute(config: Any, name: str, kind: type[T]) -> T | None: ...
@overload
def attribute(config: Any, name: str, kind: type[T], default: U) -> T | U: ...
def attribute(config: Any, name: str, kind: type, default: object = None) -> object:
    """Returns an attribute of a configuration, else of its text model's; the default where both lack it or have it with another type."""
    for of_text in (False, True):
        try:
            value = getattr(text_of(config) if of_text else config, name, None)
        except Exception:  # a property may raise, such as NotImplementedError where the model has no such size
            continue
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    return default


def text_of(config: Any) -> Any:
    """Returns the configuration of the text model; the configuration itself where it has no text model, or several."""
    try:
        return config.get_text_config(decoder=True)
    except Exception:  # several text models, or a class that the user wrote
        return config


@contextmanager
def no_padding(config: Any) -> Iterator[None]:
    """A context in which a configuration names no padding token.

    A model looks for the padding token among its input tokens, and an export without weights has no token values.
    """
    name = "pad_token_id"
    parts = {id(part): vars(part) for part in (config, text_of(config))}.values()
    before = [{name: fields[name]} if name in fields else {} for fields in parts]
    for fields in parts:
        fields[name] = None  # an assignment is refused where the field is declared as a whole number
    try:
        yield
    finally:
        for fields, old in zip(parts, before, strict=True):
            del fields[name]
            fields.update(old)


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
