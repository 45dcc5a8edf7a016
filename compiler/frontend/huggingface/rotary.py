"""Bounds sequences of models whose rotary frequencies depend on the sequence's length: `longrope`, as in Phi-3, and dynamic scaling.

`transformers` uses other frequencies as soon as a sequence has more tokens than a number in its configuration. The cached keys were
rotated with the old frequencies, and a step of an exported graph rotates only its own tokens. So an export has the frequencies of short
sequences, and no sequence may be longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.huggingface.settings import attribute

if TYPE_CHECKING:
    import torch
    from partc.compiler.frontend.inputs import DimNames, Spec

_LAW = "an exported model rotates by the frequencies of short sequences"


def longest(module: torch.nn.Module) -> tuple[int, str] | None:
    """Returns the most tokens of a sequence whose frequencies stay the same, and the type of positions; None where there is no limit."""
    limits = []
    for one, kinds in _rotating(module):
        for layer, kind in kinds.items():
            settings = attribute(one.config, "rope_parameters", dict, {})
            most = (settings.get(layer) or settings).get("original_max_position_embeddings")
            if kind != "longrope" or not isinstance(most, int):
                most = getattr(one, "original_max_seq_len", attribute(one.config, "max_position_embeddings", int, 1))
            assert isinstance(most, int)
            limits.append((most, kind))
    return min(limits, default=None)


def limit(module: torch.nn.Module, read: list[Spec], names: DimNames, where: str) -> None:
    """Bounds the inputs' dims after the first by `longest`. Raises CompileError where they are declared larger."""
    if (found := longest(module)) is None:
        return
    most, kind = found
    problems = []
    for spec in read:
        for dim in spec.dims[1:] if isinstance(spec.dims[0], str) else ():
            symbol = names.symbols.get(dim, Symbol()) if isinstance(dim, str) else None
            size = dim if isinstance(dim, int) and not spec.dtype.is_floating_point() else 0
            if symbol is not None and max(symbol.min, symbol.max) <= most:
                names.symbols[str(dim)] = replace(symbol, max=symbol.max or most)
            elif symbol is not None or size > most:
                tokens = f"{size}" if symbol is None else f"up to {symbol.max}"
                fact = (
                    f"'{spec.name}' has {tokens} tokens, and beyond {most} the frequencies of {kind} positions change"
                )
                problems.append(Problem(where, fact, _LAW, f"declare at most {most}"))
    if problems:
        raise CompileError(problems)


@contextmanager
def short_frequencies(module: torch.nn.Module) -> Iterator[None]:
    """A context in which the frequencies are those of short sequences, whatever the length."""
    before = [(one, one.rope_type) for one, _ in _rotating(module)]
    for rotary, kinds in before:
        layers = kinds if isinstance(kinds, Mapping) else {None: kinds}
        for layer in layers:
            prefix = "" if layer is None else f"{layer}_"
            getattr(rotary, f"{prefix}inv_freq").copy_(getattr(rotary, f"{prefix}original_inv_freq"))
        rotary.rope_type = dict.fromkeys(layers, "default") if isinstance(kinds, Mapping) else "default"
    try:
        yield
    finally:
        for rotary, kinds in before:
            rotary.rope_type = kinds


def _rotating(module: torch.nn.Module) -> Iterator[tuple[Any, dict[str | None, str]]]:
    """Yields the modules of `transformers` with such positions, each with a map of layer types to position types."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds is None or not type(part).__module__.startswith("transformers."):
            continue
        layers = kinds if isinstance(kinds, Mapping) else {None: kinds}
        changing = {layer: kind for layer, kind in layers.items() if kind == "longrope" or "dynamic" in str(kind)}
        if changing:
            yield part, changing
