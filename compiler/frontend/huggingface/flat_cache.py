"""A model of `transformers` that makes tokens, whose forward takes its cache as tensors, and gives it back with a step's entries.

    input_ids, position_ids [batch, sequence], past_0_key [batch, heads, past, size], past_0_value, ..
        ->  logits, present_0_key, present_0_value, ..

The forward of an encoder with a decoder has both, and gives the keys and values, too, that the decoder makes of the encoder's output:

    input_ids or input_features, encoder_attention_mask, decoder_input_ids [batch, target], past_0_key, ..
        ->  logits, present_0_key, .., cross_0_key [batch, heads, sequence, size], cross_0_value, ..

Positions are an input where the model takes them, as `generate` of `transformers` gives them: of positions that it counts itself a forward
has one row for all sequences, and torch exports that number as a constant.

The module itself stays, so that nodes and weights keep their names; only its `forward` is another one. Layers of which a window alone is
attended keep all entries: their mask leaves out those before it.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.compiler.directives.input import Input
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface import settings
from partc.compiler.frontend.huggingface.configuration import attribute, no_padding
from partc.compiler.frontend.huggingface.ports import has_encoder, usual_inputs
from partc.compiler.frontend.huggingface.rotary import short_frequencies

if TYPE_CHECKING:
    import torch

PAST, ENCODER_MASK, POSITIONS = "past", "encoder_attention_mask", "position_ids"
"""The name of the dim along which caches grow; of the input that says which entries of an encoder's input are meant; of positions."""
_SIDES = ("key", "value")
_LAW = "a cache of 'generate' is keys and values of each layer of a decoder"


def flatten_cache(module: Any, where: str) -> tuple[dict[str, Input], list[str]]:
    """Gives a module that forward; its inputs, and the names of its outputs.

    CompileError where its cache is not keys and values by layer.
    """
    if not module.can_generate():
        fact = f"{type(module).__name__} is not a model that makes tokens"
        help_ = "use a model such as LlamaForCausalLM or T5ForConditionalGeneration, or leave out 'generate'"
        raise CompileError(Problem(where, fact, _LAW, help_))
    if _argument(module) not in inspect.signature(module.forward).parameters:
        fact = f"{type(module).__name__} keeps no keys and values: its forward takes no cache, and computes whole sequences"
        raise CompileError(Problem(where, fact, _LAW, "leave out 'generate'"))
    step = _with_encoder(module, where) if has_encoder(module) else _alone(module)
    grown, crossing = _shapes(module, step, where)
    names = [f"{layer}_{side}" for layer in range(len(grown)) for side in _SIDES]
    kind = str(next(module.parameters()).dtype).removeprefix("torch.")
    inputs = dict(step.inputs)
    for layer, pair in enumerate(grown):
        for side, (heads, size) in zip(_SIDES, pair, strict=True):
            inputs[f"past_{layer}_{side}"] = Input(["batch", heads, PAST, size], kind)
    outputs = [f"present_{name}" for name in names] + [f"cross_{name}" for name in names if crossing]

    def forward(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        pasts = [[given[f"past_{layer}_{side}"] for side in _SIDES] for layer in range(len(grown))]
        logits, *layers = step.run(given, pasts)
        tensors = [tensor for some in layers for layer in some for tensor in (layer.keys, layer.values)]
        return {"logits": logits, **dict(zip(outputs, tensors, strict=True))}

    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in inputs])  # type: ignore[attr-defined]
    module.forward = forward
    return inputs, ["logits", *outputs]


@dataclass(frozen=True)
class _Step:
    """A model's own forward: `inputs` without caches, and `run`, which gives of these and the past of each layer logits, the layers of the
    cache, and with an encoder the layers of the keys and values that are made of its output.
    """

    inputs: Mapping[str, Input]
    run: Callable[[Mapping[str, Any], list[list[Any]]], tuple[Any, ...]]


def _alone(module: Any) -> _Step:
    whole, argument = module.forward, _argument(module)
    names = [name for name in ("input_ids", POSITIONS) if name in inspect.signature(whole).parameters]

    def run(given: Mapping[str, Any], pasts: list[list[Any]]) -> tuple[Any, ...]:
        cache = _cache(pasts)
        logits = whole(**{name: given[name] for name in names}, use_cache=True, **{argument: cache}).logits
        return logits, cache.layers

    return _Step({name: Input(["batch", "sequence"], "int64") for name in names}, run)


def _with_encoder(module: Any, where: str) -> _Step:
    whole, argument, name = module.forward, _argument(module), module.main_input_name
    inputs = usual_inputs(module, [name], where)
    if name == "input_ids":
        inputs[ENCODER_MASK] = Input(["batch", "sequence"], "int64")
    inputs["decoder_input_ids"] = Input(["batch", "target"], "int64")

    def run(given: Mapping[str, Any], pasts: list[list[Any]]) -> tuple[Any, ...]:
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        cache: Any = EncoderDecoderCache(_cache(pasts), _cache([]))
        targets = given["decoder_input_ids"]
        masks = [_masked(given, module, tokens.shape[1]) for tokens in (given[name], targets)]
        states = module.get_encoder()(given[name], **masks[0]).last_hidden_state
        made = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), argument: cache}
        logits = whole(decoder_input_ids=targets, use_cache=True, **masks[1], **made).logits
        return logits, cache.self_attention_cache.layers, cache.cross_attention_cache.layers

    return _Step(inputs, run)


def _masked(given: Mapping[str, Any], module: Any, tokens: int) -> dict[str, Any]:
    """What is added to the scores of an encoder's entries, so that they count or do not: a model takes it as it is.

    It is [batch, 1, 1, entries]. Fused attention becomes ONNX's op, for which onnxruntime wants a row for each of the `tokens` that attend.
    """
    import torch

    if ENCODER_MASK not in given:
        return {}
    kind = next(module.parameters()).dtype
    away = torch.where(given[ENCODER_MASK][:, None, None, :] != 0, 0.0, torch.finfo(kind).min).to(kind)
    is_fused = attribute(module.config, "_attn_implementation", str) == "sdpa"
    return {"attention_mask": away.expand(-1, -1, tokens, -1) if is_fused else away}


def _cache(pasts: list[list[Any]]) -> Any:
    """A cache of `transformers` with these keys and values."""
    from transformers.cache_utils import DynamicCache

    cache: Any = DynamicCache()
    for layer, pair in enumerate(pasts):
        cache.update(*pair, layer)
    return cache


def _shapes(module: Any, step: _Step, where: str) -> tuple[list[list[tuple[int, int]]], bool]:
    """For each layer, the number of heads and size of its keys and of its values, as two tokens make them; and whether an encoder's
    output has others.
    """
    import torch
    from partc.compiler.frontend.torch.torch_model import quiet

    kind, device = type(module).__name__, next((tensor.device for tensor in module.parameters()), None)
    settings.settle(module, "experts")
    given = {
        name: torch.ones(
            [dim if isinstance(dim, int) else 1 + (k > 0) for k, dim in enumerate(one.shape)],
            dtype=torch.int64 if one.dtype == "int64" else next(module.parameters()).dtype,
            device=device,
        )
        for name, one in step.inputs.items()
        if name != ENCODER_MASK  # numbers of a mask decide how it is read
    }
    try:
        unfused, short = settings.unfused_attention(module), short_frequencies(module)
        with torch.no_grad(), quiet(), unfused, short, no_padding(module.config):
            _, grown, *crossing = step.run(given, [])
        found = [[tuple(tensor.shape) for tensor in (layer.keys, layer.values)] for layer in grown]
    except Exception as error:  # what a model of another kind of cache raises
        fact = f"{kind} runs with no such cache: {_reason(error)}"
        if getattr(module, "_is_stateful", False):
            fact = f"{kind} keeps states of fixed size, of a state space or of linear attention"
            help_ = "leave out 'generate': the model then computes whole sequences"
            raise CompileError(Problem(where, fact, _LAW, help_)) from error
        raise CompileError(
            Problem(where, fact, _LAW, "export it in a module of your own, with past and present")
        ) from error
    if not found or any(len(shape) != 4 or shape[2] != 2 for pair in found for shape in pair):
        sizes = next(([*shape] for pair in found for shape in pair if len(shape) != 4 or shape[2] != 2), None)
        fact = (
            f"the cache of {kind} gets keys or values of {sizes} of two tokens" if sizes else f"{kind} fills no cache"
        )
        help_ = "export it in a module of your own, with past and present"
        raise CompileError(Problem(where, fact, _LAW, help_))
    return [[(shape[1], shape[3]) for shape in pair] for pair in found], bool(crossing)


def _reason(error: Exception) -> str:
    """The text of an error; the line of the model's code where it asks for numbers, which no weights have while a model is exported, and
    where the text alone names nothing of the model.
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
    """The tokens with which the decoder of a model with an encoder begins, as its configuration says; of a decoder alone none."""
    token = attribute(module.config, "decoder_start_token_id", int) if has_encoder(module) else None
    return () if token is None else (token,)


def _argument(module: Any) -> str:
    """The argument of its forward that takes a cache; the second is its name in older versions."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
