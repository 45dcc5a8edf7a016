"""The least legal sizes of symbols, where the model itself needs more than 1: the plan need not state them.

A size is not legal where a node would make a dim below 0, or windows (of a convolution, a pool, a Resize) no longer fit, or a computed
entry of a Reshape becomes 0, which means a copy of the input's dim. Empty slices are legal.

    Conv 3x3 without padding over [h, w]      h - 2 windows     h is at least 3
    AveragePool 2x2 over [h, w]               floor(h/2)        h is at least 2

A size counts as not legal if it breaks a law with the other symbols small as well as large; a law that depends on the others (`past + seq -
1`) is checked at run time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.dims.facts import Facts
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.value_info import SymbolInfo
from partc.runtime.artifact.dim_expression import Expression, parse

WINDOWED = frozenset({"AveragePool", "Conv", "ConvInteger", "ConvTranspose", "FusedConv", "LpPool", "MaxPool"}) | {
    "QLinearAveragePool",
    "QLinearConv",
    "Resize",
    "SpaceToDepth",
    "Upsample",
}
_MOST = 4096
"""The most sizes of a symbol that are tried."""
_FAR = (0, 1, 64)
"""The numbers of steps above their minimum at which the other symbols are tested."""


@dataclass(frozen=True)
class _Law:
    """A law: a dim is at least `least`, or a Reshape entry is 0 only where the dim that it then copies is 0, too."""

    node: ir.Node
    dim: Expression
    least: int
    copied: Expression | None = None

    def broken_by(self, sizes: str, path: str) -> str:
        """Describes how these sizes break the law."""
        at = f"{self.node.op_type} '{path}'"
        if self.node.op_type == "Reshape" and self.least:
            return f"{sizes} make an entry of {at} 0, which copies a dim of its input"
        return f"{sizes} leave no window in {at}" if self.least else f"{sizes} make a dim of {at} negative"

    def holds(self, sizes: Mapping[str, int]) -> bool:
        try:
            size = self.dim(sizes)
            return size >= self.least or (self.copied is not None and size == 0 and self.copied(sizes) == 0)
        except ValueError:
            return True


def with_least_sizes(
    graph: ir.Graph, symbols: Mapping[str, SymbolInfo], paths: Mapping[ir.Node, str], name: str
) -> dict[str, SymbolInfo]:
    """Raises the symbols' minimums to the sizes that the model needs, with the reason; CompileError where a symbol's maximum is smaller.

    The shapes of the graph's values are known; `name` is the model's.
    """
    raised_symbols, problems = dict(symbols), [*_without_windows(graph, paths, name)]
    laws = [law for law in dict.fromkeys(_laws(graph, symbols)) if law.dim.names]
    for symbol, info in symbols.items():
        own = [law for law in laws if symbol in law.dim.names]
        least = info.facts.min or 0
        if not own or info.parts > 1 or info.facts.value is not None:
            continue
        broken: _Law | None = None
        for size in _sizes(info.facts, least):
            law = next((law for law in own if _breaks(law, symbol, size, raised_symbols)), None)
            if law is None:
                break
            broken = law
        else:
            continue
        if broken is None or size < 2:
            continue
        why = broken.broken_by("smaller ones", paths.get(broken.node, broken.node.name or ""))
        if info.facts.max is not None and size > info.facts.max:
            fact = f"'{symbol}' is at most {info.facts.max}, and the model needs at least {size}: {why}"
            problems.append(Problem(info.where, fact, help=f"raise `max` of '{symbol}' to {size} or more"))
            continue
        facts = info.facts
        raised = Facts(facts.divisor, facts.remainder, size, facts.max)
        raised_symbols[symbol] = replace(info, facts=raised, because=why)
    if problems:
        raise CompileError(problems)
    return raised_symbols


def _without_windows(graph: ir.Graph, paths: Mapping[ir.Node, str], name: str) -> Iterator[Problem]:
    """Problems of windows that fit at no size that the plan allows."""
    for node in graph:
        data = node.inputs[0] if node.op_type in WINDOWED else None
        shape, made = (None, None) if data is None else (data.shape, node.outputs[0].shape)
        for dim, windows in zip((shape or ())[2:], (made or ())[2:], strict=False):
            if not isinstance(dim, int) and windows == 0:
                fact = f"{node.op_type} '{paths.get(node, node.name)}' has no window in a dim of {dim}"
                yield Problem(name, fact, "at least one fits", "allow larger sizes under `symbols`")


def _sizes(facts: Facts, least: int) -> Iterator[int]:
    """Yields sizes from the least one above 0, in steps that the facts allow, also beyond their maximum."""
    first = max(least, 1)
    first += (facts.remainder - first) % facts.divisor
    return iter(range(first, first + _MOST * facts.divisor, facts.divisor))


def _breaks(law: _Law, name: str, size: int, symbols: Mapping[str, SymbolInfo]) -> bool:
    """Whether a size of a symbol breaks a law, whatever the other symbols are."""
    copied = law.copied.names if law.copied is not None else frozenset()
    others = {other: symbols[other].facts for other in law.dim.names | copied if other != name and other in symbols}
    for steps in _FAR if others else _FAR[:1]:
        sizes = {other: _above(facts, steps) for other, facts in others.items()}
        if law.holds({**sizes, name: size}):
            return False
    return True


def _above(facts: Facts, steps: int) -> int:
    if facts.value is not None:
        return facts.value
    least = max(facts.min or 0, 1)
    least += (facts.remainder - least) % facts.divisor
    size = least + steps * facts.divisor
    return least if facts.max is not None and size > facts.max else size


def _laws(graph: ir.Graph, symbols: Mapping[str, SymbolInfo]) -> Iterator[_Law]:
    """Yields the laws on the sizes of all symbols, first those of nodes that read the inputs."""
    seen: set[tuple[str, int]] = set()
    for node in graph:
        if node.op_type == "Reshape" and not node.attributes.get_int("allowzero", 0):
            yield from _entries(node, symbols)
        windowed = node.op_type in WINDOWED
        for out in node.outputs:
            for k, dim in enumerate(out.shape or ()):
                least = 1 if windowed and k > 1 else 0
                if isinstance(dim, int) or dim.value is None or (str(dim.value), least) in seen:
                    continue
                seen.add((str(dim.value), least))
                if (expression := _read(str(dim.value), symbols)) is not None:
                    yield _Law(node, expression, least)


def _entries(node: ir.Node, symbols: Mapping[str, SymbolInfo]) -> Iterator[_Law]:
    """Yields the laws on the computed entries of a Reshape."""
    data, target = node.inputs[0], node.inputs[1]
    noted = None if target is None else target.metadata_props.get(SYM_DATA_KEY)
    dims = () if data is None or data.shape is None else data.shape.dims
    for k, entry in enumerate(json.loads(noted) if noted else ()):
        expression = _read(entry, symbols) if isinstance(entry, str) else None
        if expression is not None:
            copied = dims[k] if k < len(dims) else None
            text = copied if isinstance(copied, int) or copied is None else copied.value
            yield _Law(node, expression, 1, None if text is None else _read(text, symbols))


def _read(text: int | str, symbols: Mapping[str, SymbolInfo]) -> Expression | None:
    """Returns the expression of a dim; None unless all of its names are symbols."""
    try:
        found = parse(text, symbols)
    except ValueError:
        return None
    return found if found.names <= symbols.keys() else None
