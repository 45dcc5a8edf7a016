"""The section `quantize` of a proposed plan: the products and tables of a model by module, in blocks that tensor parallelism can cut."""

from __future__ import annotations

from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.source import Source
from partc.compiler.plan.precision import BLOCKS
from partc.compiler.proposal.names import patterns, template
from partc.compiler.proposal.starting_plan import key
from partc.compiler.rewrite.products import Product, products
from partc.runtime.units import count

_LARGEST = 32
"""The usual size of a block; smaller ones where the rows of a rank are not whole blocks."""


def quantize_section(source: Source, bits: int, shards: int) -> list[str]:
    """The lines of the section; none of a model without any. `shards`: over how many ranks rows may be cut."""
    paths = node_paths(source.model)
    quantizable = {paths[node]: product for node, product in products(paths).items() if product.blocked is None}
    by_pattern: dict[str, list[str]] = {}
    for path in quantizable:
        by_pattern.setdefault(template(path.rpartition(".")[0] or path), []).append(path)
    lines, kept = [], list[str]()
    for members in by_pattern.values():
        chosen = list(dict.fromkeys(path.rpartition(".")[0] or path for path in members))
        block = _block([quantizable[path] for path in members], shards)
        named = [key(one) for one in patterns(chosen, lambda pattern: True)]
        if block is None:
            kept += named
        else:
            lines += [f"  {one}: {{bits: {bits}, block: {block}}}" for one in named]
    if not lines:
        return []
    tables = sum(product.table for product in quantizable.values())
    what = [f"{count(len(quantizable) - tables, 'product')}, which compute in int8 (accuracy_level: 4)"]
    head = f"quantize:   # {', and '.join([*what, *([count(tables, 'table')] if tables else [])])}"
    return [head, *lines, *(f"  # {one}: as it is, no block divides its rows" for one in kept), ""]


def _block(members: list[Product], shards: int) -> int | None:
    """The largest usual block that divides the rows of each rank, or else those of the whole weight."""
    sizes = [one for one in reversed(BLOCKS) if one <= _LARGEST]
    for over in (shards, 1):
        for block in sizes:
            if all(product.sizes[0] % (block * over) == 0 for product in members):
                return block
    return None
