"""Joins tokens with the batch so that a rank's shards of both are one run of the joined dim.

Exporters flatten tokens before a product, a loss or a mixture of experts:

    hidden [b, s, d] -> Reshape [b*s, d]    -> Gemm -> Reshape [b, s, e]
    hidden [b, s, d] -> JoinTokens [b*s, d] -> Gemm -> SplitTokens [b, s, e]

A Reshape that joins tokens with dims major to them becomes a JoinTokens, and one that takes them apart again a SplitTokens, if all ops
between treat the places of the joined dim alike. Joined dims that correspond change together, or stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
import sympy
from partc.compiler.dims.normal import is_integral
from partc.compiler.dims.reading import read
from partc.compiler.ir.graph import CONTEXT, FOLDED, ContextMark, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ir.value_info import Dim
from partc.compiler.ops.families.shapes.joined import JOIN, JOINED, RECORDS, SPLIT, TOKENS
from partc.compiler.ops.families.shapes.reshape import dim_groups
from partc.compiler.ops.rule import OWN, WHOLE, Rule
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.rewrite.token_dims import At, TokenDims, is_size


@dataclass(frozen=True)
class _View:
    """A Reshape that joins tokens with dims major to them, or takes them apart; `parts`: the sizes of these dims and of the tokens."""

    op_type: str
    rule: Rule
    joined: At
    tokens: At
    parts: tuple[Dim, ...]


def join_tokens(
    work: Rewriting[Typed], tokens: Mapping[ir.Value, int], ranks: int, axis: str, why: str
) -> dict[ir.Node, ir.Node]:
    """Replaces Reshapes that join tokens, and their inverses; the `ranks` along `axis` shard the tokens.

    Returns the Reshapes that stay, each with the op that does not treat the places of the joined dim alike.
    """
    plain = dict[ir.Node, ir.Node]()
    while True:
        dims, views = _views(work, tokens, plain)
        unaware = {root: _unaware(dims, root) for root in {dims.root(view.joined): None for view in views.values()}}
        if not any(unaware.values()):
            break
        roots = {node: dims.root(view.joined) for node, view in views.items()}
        plain |= {node: unaware[root][0] or node for node, root in roots.items() if unaware[root]}
    for value in dims.of({dims.root(view.joined) for view in views.values()}):
        value.meta[FOLDED] = None
    for node, view in views.items():
        letters = [view.rule.inputs[0] or "", view.rule.outputs[0] or ""]
        kept = [attribute for name, attribute in node.attributes.items() if name == "allowzero"]
        old, name = node.outputs[0], name_of(node.outputs[0])
        old.name, made = work.free(f"{name}.plain"), work.like(old, name)
        made.meta.update(old.meta)
        put = work.put(node, view.op_type, node.inputs, [made], "", kept, OWN, letters=letters, tokens=ranks)
        put.meta[CONTEXT] = ContextMark(axis, "", TOKENS, why, first=True)
        work.take_place(made, old, node)
        work.drop([node])
    return plain


def _views(
    work: Rewriting[Typed], tokens: Mapping[ir.Value, int], plain: Collection[ir.Node]
) -> tuple[TokenDims, dict[ir.Node, _View]]:
    """Returns the Reshapes that join tokens or take them apart, but for those in `plain`, and the correspondence of all other dims."""
    views = dict[ir.Node, _View]()
    while True:
        dims = TokenDims(work, {node: view.rule for node, view in views.items()})
        ends, parts = {dims.root(at) for at in tokens.items()}, dict[At, tuple[Dim, ...]]()
        count = 0
        while count < (count := len(ends) + len(parts)):
            for view in views.values():
                if dims.root(view.tokens) in ends:
                    parts.setdefault(dims.root(view.joined), view.parts)
                elif dims.root(view.joined) in parts:
                    ends.add(dims.root(view.tokens))
        rest = [
            node
            for node in dims.rules
            if node.op_type == "Reshape" and node not in views and node not in plain and CONTEXT not in node.meta
        ]
        found = {node: view for node in rest for view in [*_view(dims, node, ends, parts)][:1]}
        if not found:
            return dims, views
        views |= found


def _view(dims: TokenDims, node: ir.Node, ends: Collection[At], parts: Mapping[At, tuple[Dim, ...]]) -> Iterator[_View]:
    """Yields a Reshape as one that joins tokens, or takes them apart: by a dim of tokens, or by a joined dim with parts of these sizes."""
    x, out = node.inputs[0], node.outputs[0]
    rule = dims.rules[node]
    if x is None or rule.inputs[0] is None or rule.outputs[0] is None:
        return
    sides = (x, rule.inputs[0]), (out, rule.outputs[0])
    for here, there in dim_groups(dims.shape(x), dims.shape(out)):
        for op_type, apart, together in ((JOIN, here, there[0]), (SPLIT, there, here[0])):
            (value, letters), (whole, joined) = sides if op_type == JOIN else sides[::-1]
            sizes = tuple(dims.shape(value)[dim] for dim in apart)
            known = parts.get(dims.root((whole, together)), ())
            count = len(known) if known == sizes[: len(known)] else 0
            if op_type == JOIN:
                count = count or next(
                    (k + 1 for k, dim in enumerate(apart) if k and dims.root((value, dim)) in ends), 0
                )
            if count and _divides(sizes[:count], dims.shape(whole)[together]):
                letters = _marked(letters, {apart[0]: RECORDS, apart[count - 1]: TOKENS})
                both = letters, _marked(joined, {together: JOINED})
                source, target = both if op_type == JOIN else both[::-1]
                own = Rule((source, WHOLE), (target,), joined=(JOINED, TOKENS, RECORDS))
                yield _View(op_type, own, (whole, together), (value, apart[count - 1]), sizes[:count])


def _marked(letters: str, places: Mapping[int, str]) -> str:
    return "".join(places.get(dim, letter) for dim, letter in enumerate(letters))


def _divides(parts: Collection[Dim], size: Dim) -> bool:
    """Whether the product of the parts divides a size."""
    expressions = [sympy.Integer(one) if isinstance(one, int) else read(str(one)) for one in (size, *parts)]
    if None in expressions or 0 in expressions:
        return False
    whole, *factors = expressions
    return is_integral(sympy.expand(whole / sympy.prod(factors)), {})


def _unaware(dims: TokenDims, root: At) -> tuple[ir.Node | None, ...]:
    """Returns in a tuple the first node that reads or makes one of a set of joined dims and does not treat its places alike.

    The tuple is empty if there is no such node; it has None if a body or the caller has a value with one of the dims.
    """
    joined = dims.of({root})
    nodes = {value.producer(): None for value in joined}
    nodes |= {use.node: None for value in joined for use in value.uses() if not is_size(use.node)}
    if any(value.is_graph_output() for value in joined) or not nodes.keys() <= dims.rules.keys():
        return (None,)
    return tuple(node for node in nodes if node is not None and not dims.is_alike(node, joined))[:1]
