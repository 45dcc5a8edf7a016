"""The inputs and outputs of a `transformers` model whose `model.py` does not list them, named after the arguments of its forward.

    input_ids, attention_mask, token_type_ids, position_ids        [batch, sequence]     int64
    decoder_input_ids, decoder_attention_mask                      [batch, target]       int64
    pixel_values                                                   [batch, channels, height, width]
    input_features                                                 [batch, mel bins, frames]
    input_values                                                   [batch, samples], or of a spectrogram [batch, frames, mel bins]
    labels                                                         those of the decoder's ids, or [batch] of a classifier

By default a text encoder has the inputs `input_ids` and `attention_mask`, a decoder `input_ids`, and an encoder with a decoder also
`decoder_input_ids`. `inputs = ["input_ids", "labels"]` in the `model.py` chooses others; with `labels` the model also has the output
`loss`. `sequence` and `target` are at most the model's number of positions. The size of images is that of the configuration, else 224 x
224.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from partc.compiler.dims.symbol import Symbol
from partc.compiler.directives.input import Input
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.rotary import longest
from partc.compiler.frontend.huggingface.settings import attribute
from partc.runtime.spellings import nearest

_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_TARGET = ("decoder_input_ids", "decoder_attention_mask")
_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
_USUAL_SIDES = (224, 224)
"""The size of images if a configuration has none: that of the image processors of transformers."""
_POSITIONS = {
    "sequence": ("max_source_positions", "max_position_embeddings", "n_positions"),
    "target": ("max_target_positions", "max_position_embeddings", "n_positions"),
}


def usual_inputs(model: Any, names: Sequence[str] | None, where: str) -> dict[str, Input]:
    """Returns the inputs of these names, or the model's usual inputs. Raises CompileError for unknown names."""
    arguments = [name for name in inspect.signature(model.forward).parameters if name != "kwargs"]
    if names is None:
        names = [model.main_input_name]
        if model.main_input_name == "input_ids" and "attention_mask" in arguments and not _is_decoder(model):
            names.append("attention_mask")
        if has_encoder(model) and not type(model).__name__.endswith(_CLASSIFIERS):  # which make those of their text
            names.append("decoder_input_ids")
    found = {name: _input(model, name) if name in arguments else None for name in names}
    if unknown := [name for name, one in found.items() if one is None]:
        raise CompileError([_not_known(model, name, arguments, where) for name in unknown])
    return {name: one for name, one in found.items() if one is not None}


def image_inputs(module: Any) -> tuple[dict[str, Input], str] | None:
    """Returns the image input of a model of timm or torchvision, and the source of its size; None for another module."""
    library = type(module).__module__.partition(".")[0]
    if library not in ("timm", "torchvision"):
        return None
    said = getattr(module, "pretrained_cfg", None)
    size = said.get("input_size") if isinstance(said, Mapping) else None
    argument = next(iter(inspect.signature(module.forward).parameters))
    return {
        argument: Input(["batch", *(size or (3, 224, 224))])
    }, "its pretrained_cfg" if size else f"the usual one of {library}"


def position_symbols(model: Any, inputs: Mapping[str, Input]) -> dict[str, Symbol]:
    """Maps each dim of the inputs to its constraint.

    A dim of positions is at most the model's number of positions, and at least two for a decoder whose loss compares each token with the
    next.
    """
    dims = {dim for one in inputs.values() for dim in one.shape}
    symbols, most = {}, longest(model)
    for dim, keys in _POSITIONS.items():
        sizes = [size for key in keys if (size := attribute(model.config, key, int, 0)) > 0]
        sizes = sizes if most is None else [min([*sizes[:1], most[0]])]
        least = 2 if dim == "sequence" and "labels" in inputs and _is_decoder(model) else 1
        if dim in dims and (sizes or least > 1):
            symbols[dim] = Symbol(min=least, max=sizes[0] if sizes else 0)
    if "samples" in dims:
        least = 2  # frames
        for kernel, stride in _convolutions(model.config)[::-1]:
            least = (least - 1) * stride + kernel
        symbols["samples"] = Symbol(min=least)
    return symbols


def main_outputs(names: Sequence[str]) -> list[str]:
    """Returns the loss and the logits among the outputs of a forward; all outputs if there are no logits."""
    return [name for name in names if name in ("loss", "logits")] if "logits" in names else list(names)


def has_encoder(model: Any) -> bool:
    """Whether a decoder attends to the output of an encoder of the same model."""
    return attribute(model.config, "is_encoder_decoder", bool, False)


def _is_decoder(model: Any) -> bool:
    """Whether each position of a text sees only earlier positions, so that a text that ends early needs no mask."""
    is_decoder = attribute(model.config, "is_decoder", bool, False)
    return not has_encoder(model) and (bool(model.can_generate()) or is_decoder)


def _input(model: Any, name: str) -> Input | None:
    config = model.config
    if name in _TEXT:
        return Input(["batch", "sequence"], "int64")
    if name in _TARGET:
        return Input(["batch", "target"], "int64")
    if name == "labels" and type(model).__name__.endswith(_CLASSIFIERS):
        problem = attribute(config, "problem_type", str)
        return Input(["batch"], "float32" if problem == "regression" else "int64")
    if name == "labels":
        return Input(["batch", "target" if has_encoder(model) else "sequence"], "int64")
    if name == "pixel_values":
        seen = attribute(config, "vision_config", object) or config
        channels = attribute(seen, "num_channels", int)
        return None if channels is None else Input(["batch", channels, *(_sides(seen) or _USUAL_SIDES)], "float32")
    bins, positions, frames = (
        attribute(config, key, int) for key in ("num_mel_bins", "max_source_positions", "max_length")
    )
    if name == "input_features" and bins is not None and positions is not None:
        return Input(["batch", bins, 2 * positions], "float32")
    if name == "input_values" and _convolutions(config):
        return Input(["batch", "samples"], "float32")
    if name == "input_values" and bins is not None and frames is not None:
        return Input(["batch", frames, bins], "float32")
    return None


def _convolutions(config: Any) -> list[tuple[int, int]]:
    """Returns the kernel and the stride of each convolution at the beginning of a speech model."""
    kernels = attribute(config, "conv_kernel", Sequence, ())  # type: ignore[type-abstract]
    strides = attribute(config, "conv_stride", Sequence, ())  # type: ignore[type-abstract]
    return [*zip(kernels, strides, strict=False)]


def _sides(config: Any) -> list[int]:
    """Returns the height and the width of an image; empty if the configuration has no such numbers."""
    side = attribute(config, "image_size", int)
    sides = [side] * 2 if side is not None else attribute(config, "image_size", Sequence, ())  # type: ignore[type-abstract]
    return [one for one in sides if isinstance(one, int)]


def _not_known(model: Any, name: str, arguments: list[str], where: str) -> Problem:
    kind = type(model).__name__
    if name in arguments:
        fact = f"the shape of '{name}' of {kind} is not known"
        return Problem(where, fact, help=f'write inputs = {{"{name}": Input(["batch", ...], "float32")}}')
    like = nearest(name, arguments)
    help = f"the nearest names are {', '.join(map(repr, like))}" if like else f"it takes {', '.join(arguments)}"
    return Problem(where, f"the forward of {kind} takes no '{name}'", help=help)
