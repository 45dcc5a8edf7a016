"""Reads an adapter's folder as peft writes it: `adapter_config.json` and `adapter_model.safetensors`, two narrow weights for each module.

    y = x W + (x A^T) B^T * scale        A [rank, inputs], B [outputs, rank], scale = alpha / rank, or alpha / sqrt(rank) with rslora

Modules of `modules_to_save`, such as the head of a classifier, have weights in place of the model's. Any other tensor of the folder
(biases, magnitudes) is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.safetensors_files import InFile, read_object, tensors_of
from partc.compiler.frontend.huggingface.weights import stored_as
from partc.runtime.units import first_of

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix that peft writes before the name of each module."""
_PAIR = re.compile(r"(.+)\.lora_([AB])\.weight")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_AGAIN = "write the adapter again with peft's save_pretrained"
_OTHER_FORMS = {
    "use_dora": "DoRA scales the columns of the sum of both weights",
    "use_qalora": "QALoRA adds to groups of inputs",
    "use_bdlora": "BD-LoRA has blocks on a diagonal",
    "lora_bias": "a bias is added behind the second weight",
    "target_parameters": "it adds to parameters besides weights of linear layers",
    "layer_replication": "layers of the model are repeated",
    "trainable_token_indices": "rows of the embedding are replaced",
    "alora_invocation_tokens": "it begins in the middle of a prompt",
    "arrow_config": "several adapters are mixed by token",
}
"""Settings of peft under which an adapter is more than a sum of low-rank products, each with its effect."""


@dataclass(frozen=True)
class LowRank:
    """The adapter of one module: a [rank, inputs], b [outputs, rank] and the factor of their product."""

    a: ir.TensorProtocol
    b: ir.TensorProtocol
    scale: float

    @property
    def rank(self) -> int:
        """The rank of the product: the number of rows of A."""
        return int(self.a.shape.numpy()[0])

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of the product."""
        return int(self.a.shape.numpy()[1]), int(self.b.shape.numpy()[0])


@dataclass(frozen=True)
class Adapter:
    """A folder's low-rank products by module, and by name the weights that replace the model's, all in float32."""

    products: Mapping[str, LowRank]
    replaced: Mapping[str, ir.TensorProtocol]


def read_adapter(folder: Path, where: str) -> Adapter:
    """Raises CompileError with all problems of the folder."""
    if not (folder / ADAPTER_CONFIG).exists():
        fact = f"'{folder}' has no {ADAPTER_CONFIG}" if folder.is_dir() else f"'{folder}' is not a folder"
        raise CompileError(Problem(where, fact, help="give the folder that peft's save_pretrained wrote"))
    config = read_object(folder / ADAPTER_CONFIG, f"{folder.name}/{ADAPTER_CONFIG}")
    title = f"{folder.name}/{ADAPTER_WEIGHTS}"
    problems = [Problem(f"{folder.name}/{ADAPTER_CONFIG}", *one) for one in _unreadable(config)]
    if not problems and not (folder / ADAPTER_WEIGHTS).exists():
        others = sorted(path.name for path in folder.glob("adapter_model.*"))
        fact = f"the folder has no {ADAPTER_WEIGHTS}" + (f"; it has {others[0]}" if others else "")
        problems = [Problem(folder.name, fact, help=f"{_AGAIN}, which writes safetensors")]
    if problems:
        raise CompileError(problems)
    tensors = tensors_of(folder / ADAPTER_WEIGHTS, title)
    pairs, others = _pairs(tensors)
    replaced = [name for name in others if _is_saved(name, config)]
    problems = [Problem(title, *one) for one in _misfits(pairs, [name for name in others if name not in replaced])]
    if problems:
        raise CompileError(problems)
    products = dict[str, LowRank]()
    for module, pair in pairs.items():
        a, b = (stored_as(pair[key], ir.DataType.FLOAT, f"{module}.lora_{key}.weight") for key in "AB")
        products[module] = LowRank(a, b, _scale(config, module, pair["A"].stored.shape[0]))
    names = {name: name.removeprefix(PREFIX) for name in replaced}
    return Adapter(products, {own: stored_as(tensors[name], ir.DataType.FLOAT, own) for name, own in names.items()})


def _is_saved(name: str, config: Mapping[str, object]) -> bool:
    """Whether a tensor is a weight of a module of `modules_to_save`, which peft lists by the ends of their names."""
    modules = config.get("modules_to_save") or ()
    parts = name.removeprefix(PREFIX).split(".")[:-1]
    ends = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return isinstance(modules, list | tuple) and any(
        f".{end}".endswith(f".{module}") for end in ends for module in modules
    )


def _unreadable(config: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Yields the reasons why the settings are refused: fact, law and remedy."""
    kind = config.get("peft_type")
    if kind != "LORA":
        law = "an adapter adds a product of two narrow weights, peft's LORA"
        yield f"'peft_type' is {kind!r}", law, "merge it into its model: merge_and_unload(), then save_pretrained"
        return
    for key, why in _OTHER_FORMS.items():
        if config.get(key):
            yield (
                f"'{key}' is set: {why}",
                "an adapter adds a product of two narrow weights",
                f"train it without '{key}'",
            )
    if config.get("bias", "none") != "none":
        fact = f"'bias' is {config['bias']!r}: biases of the model are trained besides"
        yield fact, "an adapter adds a product of two narrow weights", 'train it with bias="none"'
    patterns = config.get("alpha_pattern") or {}
    numbers = [config.get("lora_alpha"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
        yield "'lora_alpha' and the values of 'alpha_pattern' are not all numbers", "", _AGAIN


def _pairs(tensors: Mapping[str, InFile]) -> tuple[dict[str, dict[str, InFile]], list[str]]:
    """Maps each module to its tensors A and B; the second result is the names of all other tensors."""
    pairs: dict[str, dict[str, InFile]] = {}
    others = []
    for name, tensor in tensors.items():
        found = _PAIR.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            others.append(name)
        else:
            pairs.setdefault(found[1], {})[found[2]] = tensor
    return pairs, others


def _misfits(pairs: Mapping[str, Mapping[str, InFile]], others: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields the reasons why the tensors are refused: fact, law and remedy."""
    if others:
        law = "an adapter has lora_A.weight and lora_B.weight of linear layers"
        yield f"has {first_of([*map(repr, others)])}", law, "train it on linear layers alone"
    elif not pairs:
        yield "has no tensors", "", _AGAIN
    for module, pair in pairs.items():
        if len(pair) < 2:
            yield f"'{module}' has no lora_{'B' if 'A' in pair else 'A'}.weight", "", _AGAIN
            continue
        a, b = (pair[key].stored for key in "AB")
        if wrong := [one for one in (a, b) if ir.DataType(one.dtype.code) not in _FLOATS]:
            yield (
                f"'{module}' is {wrong[0].dtype.shown}",
                "weights of an adapter are float32, float16 or bfloat16",
                _AGAIN,
            )
        elif len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            fact = f"'{module}' has lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            yield fact, "A is [rank, inputs] and B is [outputs, rank], of a linear layer", ""


def _scale(config: Mapping[str, object], module: str, rank: int) -> float:
    """Returns the factor of a module's product; a pattern of `alpha_pattern` matches the end of the module's name, as in peft."""
    patterns = config.get("alpha_pattern") or {}
    assert isinstance(patterns, dict)
    alpha = config["lora_alpha"]
    for pattern, value in patterns.items():
        if _ends_with(pattern, module):
            alpha = value
            break
    assert isinstance(alpha, int | float)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _ends_with(pattern: str, module: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error:
        return False
