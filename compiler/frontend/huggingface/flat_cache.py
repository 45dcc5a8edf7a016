"""A decoder of `transformers` whose forward takes its cache as tensors, and gives it back with the step's entries appended.

    input_ids [batch, sequence], past_0_key [batch, heads, past, size], past_0_value, ..  ->  logits, present_0_key, present_0_value, ..

The module itself stays, so that nodes and weights keep their names; only its `forward` is another one. Layers of which a window alone is
attended keep all entries: their mask leaves out those before it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from partc.compiler.directives.input import Input
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface import settings

if TYPE_CHECKING:
    import torch

PAST = "past"
"""The name of the dim along which caches grow."""
_SIDES = ("key", "value")


def flatten_cache(module: Any, where: str) -> tuple[dict[str, Input], list[str]]:
    """Gives a module that forward; its inputs, and the names of its outputs.

    CompileError where its cache is not keys and values by layer.
    """
    shapes = _shapes(module, where)
    names = [f"{layer}_{side}" for layer in range(len(shapes)) for side in _SIDES]
    inputs = {"input_ids": Input(["batch", "sequence"], "int64")}
    kind = str(next(module.parameters()).dtype).removeprefix("torch.")
    for layer, pair in enumerate(shapes):
        for side, (heads, size) in zip(_SIDES, pair, strict=True):
            inputs[f"past_{layer}_{side}"] = Input(["batch", heads, PAST, size], kind)
    whole, argument = module.forward, _argument(module)

    def forward(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers.cache_utils import DynamicCache

        cache: Any = DynamicCache()
        for layer in range(len(shapes)):
            cache.update(*(given[f"past_{layer}_{side}"] for side in _SIDES), layer)
        logits = whole(input_ids=given["input_ids"], use_cache=True, **{argument: cache}).logits
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return {"logits": logits, **{f"present_{name}": one for name, one in zip(names, tensors, strict=True)}}

    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in inputs])  # type: ignore[attr-defined]
    module.forward = forward
    return inputs, ["logits", *(f"present_{name}" for name in names)]


def _shapes(module: Any, where: str) -> list[list[tuple[int, int]]]:
    """By layer heads and size of its keys, and of its values, as two tokens make them."""
    import torch
    from partc.compiler.frontend.torch.torch_module import quiet
    from transformers.cache_utils import DynamicCache

    kind, law = type(module).__name__, "a cache of 'generate' is keys and values of each layer of a decoder alone"
    if module.config.is_encoder_decoder or not module.can_generate():
        fact = f"{kind} is not a decoder alone that generates"
        raise CompileError(Problem(where, fact, law, "use a model such as LlamaForCausalLM, or leave out 'generate'"))
    device = next((tensor.device for tensor in module.parameters()), None)
    cache: Any = DynamicCache()
    settings.settle(module, "experts")
    padding, module.config.pad_token_id = (
        getattr(module.config, "pad_token_id", None),
        None,
    )  # else it looks at tokens for it
    try:
        with torch.no_grad(), quiet():
            ids = torch.ones(1, 2, dtype=torch.int64, device=device)
            module(input_ids=ids, use_cache=True, **{_argument(module): cache})
        found = [[tuple(tensor.shape) for tensor in (layer.keys, layer.values)] for layer in cache.layers]
    except Exception as error:  # what a model of another kind of cache raises
        fact = f"{kind} runs with no such cache: {' '.join(str(error).split()) or type(error).__name__}"
        raise CompileError(
            Problem(where, fact, law, "export it in a module of your own, with past and present")
        ) from error
    finally:
        module.config.pad_token_id = padding
    if not found or any(len(shape) != 4 or shape[2] != 2 for pair in found for shape in pair):
        help_ = "export it in a module of your own, with past and present"
        raise CompileError(Problem(where, f"the cache of {kind} has the shapes {found[:1]}", law, help_))
    return [[(shape[1], shape[3]) for shape in pair] for pair in found]


def _argument(module: Any) -> str:
    """The argument of its forward that takes a cache; the second is its name in older versions."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
