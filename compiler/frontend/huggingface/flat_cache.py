"""Gives a generating model of `transformers` a forward whose cache is tensors: the past as inputs, with the step's entries as outputs.

    input_ids, position_ids [batch, sequence], past_0_key [batch, heads, past, size], past_0_value, ..
        ->  logits, present_0_key, present_0_value, ..

For an encoder with a decoder, the forward runs both, and also returns the cross-attention keys and values that the decoder computes from
the encoder's output:

    input_ids or input_features, encoder_attention_mask, decoder_input_ids [batch, target], past_0_key, ..
        ->  logits, present_0_key, .., cross_0_key [batch, heads, sequence, size], cross_0_value, ..

Positions are an input where the model takes them, as in `generate` of `transformers`: a forward that counts positions itself has one row
of positions for all sequences, and torch exports that number of rows as a constant.

Layers of a state space or of linear attention have states of fixed size, which each step replaces, next to the keys and values of the
other layers. Such a model is exported with one token per sequence: `transformers`' forms for several tokens begin without a state.

    input_ids [batch, 1], past_0_conv [batch, channels, kernel], past_0_recurrent [batch, ..]
        ->  logits, present_0_conv, present_0_recurrent

The module itself stays, so that nodes and weights keep their names; only its `forward` is replaced. Layers with sliding-window attention
keep all entries in the cache: their mask excludes the entries before the window.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.compiler.directives.input import Input
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface import settings
from partc.compiler.frontend.huggingface.ports import has_encoder, usual_inputs
from partc.compiler.frontend.huggingface.rotary import short_frequencies
from partc.compiler.frontend.huggingface.settings import attribute, no_padding

if TYPE_CHECKING:
    import torch

PAST, ENCODER_MASK, POSITIONS = "past", "encoder_attention_mask", "position_ids"
"""The dim along which caches grow; the input that marks the valid entries of an encoder's input; the input of positions."""
_LAW = (
    "a cache of 'generate' is keys and values of each layer of a decoder, or states that the cache of transformers has"
)
_SIDES = ("key", "value")
_STATES = ("conv", "recurrent")
_BEGUN_OTHERWISE = {"zaya": "attention_bias"}
"""Maps model types to the setting with which their states begin with other values than zeros."""
_OF_STATES = "LinearAttentionLayer"
_LAYERS = {"DynamicLayer", _OF_STATES, "LinearAttentionAndFullAttentionLayer", "DummyLayer"}
"""The classes of cache layers whose tensors this module can read."""


def flatten_cache(module: Any, where: str) -> tuple[dict[str, Input], list[str]]:
    """Replaces a module's forward by one with flat caches; returns its inputs, and the names of its outputs.

    Raises CompileError where its cache is not keys and values, or known states, of each layer.
    """
    if not module.can_generate():
        fact = f"{type(module).__name__} is not a model that makes tokens"
        help_ = "use a model such as LlamaForCausalLM or T5ForConditionalGeneration, or leave out 'generate'"
        raise CompileError(Problem(where, fact, _LAW, help_))
    if _argument(module) not in inspect.signature(module.forward).parameters:
        if getattr(module, "_is_stateful", False):
            raise _refusal(module, where)
        fact = f"{type(module).__name__} keeps no keys and values: its forward takes no cache, and computes whole sequences"
        raise CompileError(Problem(where, fact, _LAW, "leave out 'generate'"))
    step = _with_encoder(module, where) if has_encoder(module) else _alone(module)
    layers, crossing = _shapes(module, step, where)
    names = [f"{layer}_{name}" for layer, kept in enumerate(layers) for name in kept]
    inputs = dict(step.inputs)
    for layer, kept in enumerate(layers):
        for name, (shape, kind) in kept.items():
            inputs[f"past_{layer}_{name}"] = Input(["batch", *shape], kind)
    outputs = [f"present_{name}" for name in names] + [f"cross_{name}" for name in names if crossing]

    def forward(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        pasts = [{name: given[f"past_{layer}_{name}"] for name in kept} for layer, kept in enumerate(layers)]
        logits, *caches = step.run(given, pasts)
        tensors = [tensor for some in caches for layer in some for tensor in _tensors(layer).values()]
        return {"logits": logits, **dict(zip(outputs, tensors, strict=True))}

    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in inputs])  # type: ignore[attr-defined]
    module.forward = forward
    return inputs, ["logits", *outputs]


@dataclass(frozen=True)
class _Step:
    """A model's own forward. `inputs`: its inputs without caches.

    `run` takes these and the past tensors of each layer. It returns logits, the layers of the cache and, for a model with an encoder, the
    layers of the cross-attention keys and values.
    """

    inputs: Mapping[str, Input]
    run: Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], tuple[Any, ...]]


def _alone(module: Any) -> _Step:
    whole, argument = module.forward, _argument(module)
    names = [name for name in ("input_ids", POSITIONS) if name in inspect.signature(whole).parameters]
    config = module.config if keeps_states(module) else None

    def run(given: Mapping[str, Any], pasts: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        cache = _cache(pasts, config)
        logits = whole(**{name: given[name] for name in names}, use_cache=True, **{argument: cache}).logits
        return logits, cache.layers

    return _Step({name: Input(["batch", "sequence" if config is None else 1], "int64") for name in names}, run)


def _with_encoder(module: Any, where: str) -> _Step:
    whole, argument, name = module.forward, _argument(module), module.main_input_name
    inputs = usual_inputs(module, [name], where)
    if name == "input_ids":
        inputs[ENCODER_MASK] = Input(["batch", "sequence"], "int64")
    inputs["decoder_input_ids"] = Input(["batch", "target"], "int64")

    def run(inputs: Mapping[str, Any], pasts: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        cache: Any = EncoderDecoderCache(_cache(pasts), _cache([]))
        targets = inputs["decoder_input_ids"]
        masks = [_masked(inputs, module, tokens.shape[1]) for tokens in (inputs[name], targets)]
        states = module.get_encoder()(inputs[name], **masks[0]).last_hidden_state
        made = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), argument: cache}
        logits = whole(decoder_input_ids=targets, use_cache=True, **masks[1], **made).logits
        return logits, cache.self_attention_cache.layers, cache.cross_attention_cache.layers

    return _Step(inputs, run)


def _masked(inputs: Mapping[str, Any], module: Any, tokens: int) -> dict[str, Any]:
    """Returns an additive mask over an encoder's entries, [batch, 1, 1, entries]; the model adds it to the attention scores as it is.

    For fused attention it has a row for each of the `tokens` that attend: that becomes ONNX's op, and onnxruntime wants those rows.
    """
    import torch

    if ENCODER_MASK not in inputs:
        return {}
    kind = next(module.parameters()).dtype
    away = torch.where(inputs[ENCODER_MASK][:, None, None, :] != 0, 0.0, torch.finfo(kind).min).to(kind)
    is_fused = attribute(module.config, "_attn_implementation", str) == "sdpa"
    return {"attention_mask": away.expand(-1, -1, tokens, -1) if is_fused else away}


def keeps_states(module: Any) -> bool:
    """Whether a decoder's cache in `transformers` has a layer with states of fixed size."""
    from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

    if has_encoder(module):
        return False
    try:
        layers = DynamicCache(config=module.config).layers
    except Exception:  # the cache has no class for a kind of layer
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def _cache(pasts: Sequence[Mapping[str, Any]], config: Any = None) -> Any:
    """Returns a cache of `transformers` with these tensors for each layer; `config`: that of a model with states, else None."""
    from transformers import cache_utils

    cache: Any = cache_utils.DynamicCache(config=config)
    kinds = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    unbounded = {kinds["sliding_attention"]: kinds["full_attention"], kinds["hybrid_sliding"]: kinds["hybrid"]}
    cache.layers = [unbounded.get(type(layer), lambda layer=layer: layer)() for layer in cache.layers]
    for k, tensors in enumerate(pasts):
        if _SIDES[0] in tensors:
            cache.update(*(tensors[side] for side in _SIDES), k)
        for name in (name for name in tensors if name not in _SIDES):
            kind, _, at = name.partition("_")
            layer, index = cache.layers[k], int(at or 0)
            getattr(layer, f"{kind}_states")[index] = tensors[name].clone()  # a step overwrites it
            getattr(layer, f"is_{kind}_states_initialized")[index] = layer.has_previous_state[index] = True
            if kind == "conv":
                layer.conv_kernel_size[index] = tensors[name].shape[-1]
                layer.dtype, layer.device = tensors[name].dtype, tensors[name].device
    return cache


def _tensors(layer: Any) -> dict[str, Any]:
    """Maps names to the tensors of one layer of a cache."""
    found = {name: getattr(layer, f"{name}s", None) for name in _SIDES}
    for kind in _STATES:
        for at, state in getattr(layer, f"{kind}_states", {}).items():
            found[f"{kind}_{at}" if at else kind] = state
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _shapes(module: Any, step: _Step, where: str) -> tuple[list[dict[str, tuple[list[int | str], str]]], bool]:
    """Returns, for each layer, the dims but the first and the type of each cache tensor, as a run on two tokens gives them.

    The second result is whether the cache has cross-attention layers of an encoder's output.
    """
    import torch
    from partc.compiler.frontend.torch.torch_model import quiet

    kind, device = type(module).__name__, next((tensor.device for tensor in module.parameters()), None)
    settings.settle(module, "experts")
    arguments = {
        name: torch.ones(
            [
                dim if isinstance(dim, int) and (dim, one.dtype) != (1, "int64") else 1 + (k > 0)
                for k, dim in enumerate(one.shape)
            ],
            dtype=torch.int64 if one.dtype == "int64" else next(module.parameters()).dtype,
            device=device,
        )
        for name, one in step.inputs.items()
        if name != ENCODER_MASK  # the model treats a mask by its values
    }
    try:
        unfused, short = settings.unfused_attention(module), short_frequencies(module)
        with torch.no_grad(), quiet(), unfused, short, no_padding(module.config):
            _, grown, *crossing = step.run(arguments, [])
        by_layer = [_tensors(layer) for layer in grown]
    except Exception as error:  # a model with another kind of cache may raise anything
        raise _refusal(module, where, f"{kind} runs with no such cache: {_reason(error)}") from error
    if any(type(layer).__name__ == _OF_STATES and not kept for layer, kept in zip(grown, by_layer, strict=True)):
        raise _refusal(module, where)
    setting = _BEGUN_OTHERWISE.get(attribute(module.config, "model_type", str, ""), "")
    if setting and attribute(module.config, setting, bool, False):
        raise _refusal(
            module, where, f"with '{setting}' the states of {kind} begin with its biases, and not with zeros"
        )
    if odd := sorted({type(layer).__name__ for layer in grown} - _LAYERS):
        raise _refusal(module, where, f"the cache of {kind} has layers of other kinds: {', '.join(odd)}")
    shapes = [{name: tuple(tensor.shape) for name, tensor in layer.items()} for layer in by_layer]
    grow = [shape for layer in shapes for name, shape in layer.items() if name in _SIDES]
    if not any(shapes):
        raise _refusal(module, where, f"{kind} fills no cache")
    if odd_sizes := [[*shape] for shape in grow if len(shape) != 4 or shape[2] != 2]:
        raise _refusal(module, where, f"the cache of {kind} gets keys or values of {odd_sizes[0]} of two tokens")
    return [
        {
            name: (
                [shape[1], PAST, shape[3]] if name in _SIDES else [*shape[1:]],
                str(by_layer[k][name].dtype).removeprefix("torch."),
            )
            for name, shape in layer.items()
        }
        for k, layer in enumerate(shapes)
    ], bool(crossing)


def _refusal(module: Any, where: str, fact: str = "") -> CompileError:
    """Returns the error with `fact`; without one, it states that the model has states outside of the cache."""
    help_ = "export it in a module of your own, with past and present"
    if not fact or (getattr(module, "_is_stateful", False) and not keeps_states(module)):
        fact = f"{type(module).__name__} keeps states of a kind of its own"
        help_ = "leave out 'generate': the model then computes whole sequences"
    return CompileError(Problem(where, fact, _LAW, help_))


def _reason(error: Exception) -> str:
    """Returns the text of an error, with the line of the model's code where the text alone names nothing of the model.

    Where the code asks for values, which weights do not have during an export, the text says so.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    lines = [one for one in traceback.extract_tb(error.__traceback__) if "modeling_" in one.filename]
    if not lines:
        return text
    line = f"`{lines[-1].line}` ({Path(lines[-1].filename).name}:{lines[-1].lineno})"
    if "meta tensor" in text or "register_meta" in text:
        return f"its forward decides by numbers, and an export knows shapes: {line}"
    return f"{text}, at {line}" if isinstance(error, AttributeError | LookupError | TypeError) else text


def start_tokens(module: Any) -> tuple[int, ...]:
    """Returns the tokens with which a model's decoder begins, from its configuration; empty for a model without an encoder."""
    token = attribute(module.config, "decoder_start_token_id", int) if has_encoder(module) else None
    return () if token is None else (token,)


def _argument(module: Any) -> str:
    """Returns the name of the forward's argument for the cache: "cache", or "past_key_values" in older versions."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
