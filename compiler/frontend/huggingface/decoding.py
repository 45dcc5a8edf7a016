"""Reads the settings of a model's generation configuration that differ from greedy decoding without an end.

`transformers` reads it from `generation_config.json`, else from `config.json`:

    eos_token_id: [2, 7]        a sequence ends after either token
    temperature: 0.6            with `do_sample`, the default of a request's option; `repetition_penalty` also without `do_sample`
    num_beams: 4                a setting that changes tokens, and that partc does not implement
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.rotary import longest
from partc.compiler.frontend.huggingface.safetensors_files import read_object
from partc.compiler.frontend.huggingface.settings import attribute, of_transformers
from partc.compiler.ir.declared import WINDOW, Decoding

if TYPE_CHECKING:
    import torch

_FILE = "generation_config.json"
_NEUTRAL = {
    "bad_words_ids": None, "constraints": None, "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "exponential_decay_length_penalty": None,
    "force_words_ids": None, "forced_decoder_ids": None, "guidance_scale": 1.0,
    "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "penalty_alpha": None, "remove_invalid_values": False,
    "sequence_bias": None, "stop_strings": None, "watermarking_config": None,
}  # fmt: skip
"""Maps each setting that changes the generated tokens to the value at which it has no effect."""


_OPTIONS: dict[str, tuple[str, object, bool]] = {
    "temperature": ("temperature", 0.0, True),
    "top_k": ("top_k", 0, True),
    "top_p": ("top_p", 1.0, True),
    "min_p": ("min_p", 0.0, True),
    "repetition_penalty": ("repetition_penalty", 1.0, False),
    "suppress_tokens": ("suppress", None, False),
    "begin_suppress_tokens": ("suppress_first", None, False),
    "forced_bos_token_id": ("forced_first", None, False),
    "forced_eos_token_id": ("forced_last", None, False),
}
"""Maps each setting to a request's option, the value at which the option has no effect, and whether it applies to sampling alone."""


def decoding(module: torch.nn.Module, folder: Path | None = None) -> Decoding:
    """Returns the decoding settings of a module: from its generation configuration, or from the file in its folder.

    A module without such a configuration has only the limit of its positions or its window.
    """
    most, kind = min([one for one in (longest(module), _window(module)) if one is not None], default=(0, ""))
    settings: Any = getattr(module, "generation_config", None)
    if folder is not None and settings is not None and (folder / _FILE).exists():
        settings = _read(folder)
    if settings is None:
        return Decoding(longest=most, positions=kind)
    vocabulary = attribute(getattr(module, "config", None), "vocab_size", int, 1 << 62)
    ends = getattr(settings, "eos_token_id", None)
    stop = [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
    given = {name: getattr(settings, name, None) for name in _NEUTRAL}
    ignored = [f"{name}: {value}" for name, value in given.items() if value and value != _NEUTRAL[name]]
    ends = tuple(token for token in stop if 0 <= token < vocabulary)
    return Decoding(ends, tuple(ignored), most, kind, dict(_defaults(settings, vocabulary)))


def _window(module: torch.nn.Module) -> tuple[int, str] | None:
    """Returns the most entries that the cache of `transformers` keeps for a layer whose mask has no window (as of Moshi), with `WINDOW`.

    Returns None where the cache keeps all entries, or the masks have windows.
    """
    models = [*of_transformers(module)]
    names = {name for one in models for name in vars(sys.modules[type(one).__module__])}
    if not models or any(
        "sliding" in name or "chunked" in name or name == "create_masks_for_generate" for name in names
    ):
        return None
    from transformers.cache_utils import DynamicCache

    try:
        layers: list[Any] = DynamicCache(config=models[0].config).layers
    except Exception:  # a configuration without layers of attention
        return None
    return min(((one.sliding_window, WINDOW) for one in layers if getattr(one, "sliding_window", 0)), default=None)


def _defaults(settings: Any, vocabulary: int) -> Iterator[tuple[str, int | float | list[int]]]:
    """Yields the options of requests by their names, with their values; only options that have an effect."""
    drawn = bool(getattr(settings, "do_sample", None))
    for name, (option, neutral, is_of_draws) in _OPTIONS.items():
        value = getattr(settings, name, None)
        if name == "temperature" and drawn and value is None:
            value = 1.0
        if value is None or value == neutral or (is_of_draws and not drawn):
            continue
        if isinstance(value, list):
            value = [token for token in value if isinstance(token, int) and 0 <= token < vocabulary]
        if isinstance(value, list | int | float) and value != []:
            yield option, value


def _read(folder: Path) -> Any:
    from transformers import GenerationConfig

    where = f"{folder.name}/{_FILE}"
    read_object(folder / _FILE, where)
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        fact = f"cannot be read by transformers: {' '.join(str(error).split()) or type(error).__name__}"
        help_ = "use the file that the model was saved with, or remove it"
        raise CompileError(Problem(where, fact, help=help_)) from error
