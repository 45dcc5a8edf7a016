"""The prover of op rules: what a rule claims is run on the shards of every rank and compared with the whole op.

`violations` cuts every factor of a case's rule alone over 2 and over 3 ranks, every pair of factors and every factor with a
Partial row over a mesh of 2 x 3, and takes every Partial row alone. Terms of a sum differ by a factor of 1000 and nearly cancel,
so that a term lost or counted twice shows. `unclaimed` goes the other way: it tries every placement of the operands on 2 ranks
with the plain node, and tells which rows hold although the rule does not say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import onnx_ir as ir
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE, Local, Rule
from rule_case import Array, Case, case, eighths, feeds_of, node_of, run, session_of

__all__ = ["Case", "case", "claimed_rows", "divides", "local_of", "node_of", "text_of", "unclaimed", "violations"]

Rules = Callable[[ir.Node], Rule]


MOST_ROWS = 1500


def violations(this: Case, rules: Rules = rule_of) -> list[str]:
    """Every claim of the case's rule that does not hold, with static and with dynamic dims."""
    feeds = feeds_of(this)
    static = node_of(this, feeds=feeds)
    want = run([static], feeds, {}, this)
    found = [f"cannot be proven: {text}" for text in _unproven(this, rules(static), feeds, want)]
    proven: Rule | None = None
    for dynamic in (False,) if this.static else (False, True):
        node = node_of(this, dynamic, feeds) if dynamic else static
        rule = rules(node)
        if rule == proven and rule.local is None:
            continue
        proven = rule
        for cuts, terms in _claims(rule):
            if not divides(rule, cuts, feeds, want) or (terms and not _are_numbers(feeds, terms)):
                continue
            fault = _fault(this, node, rule, cuts, terms, feeds, want)
            if fault:
                names = [f"{letter} in {shards}" for letter, shards in cuts]
                names += [f"P in {' and '.join(map(str, terms[0]))} over {terms[1]}"] if terms else []
                found.append(f"{'dynamic ' if dynamic else ''}{', '.join(names)} by {text_of(rule)}: {fault}")
    return found


def claimed_rows(this: Case, rules: Rules = rule_of) -> set[tuple[str, ...]]:
    """The placements of the operands along one axis that the case's rule allows."""
    rule = rules(node_of(this))
    rows = {tuple(_placement(letters, letter) for letters in rule.inputs) for letter in rule.factors}
    return rows | {tuple("P" if k in row else "R" for k in range(len(rule.inputs))) for row in rule.partial_inputs}


def unclaimed(this: Case, rules: Rules = rule_of) -> set[str]:
    """Rows that hold on 2 ranks with the plain node and that the rule does not claim, as `S(0),R->S(0)`."""
    feeds = feeds_of(this)
    session, names = session_of([node_of(this, feeds=feeds)], feeds, {}, this)
    want = session.run(None, {name: feeds[name] for name in names})
    placed = cache(lambda name, placement, at: _placed(feeds[name], placement, at))
    choices = [_choices(this, k, feeds) for k in range(len(this.operands))]
    assert math.prod(map(len, choices)) <= MOST_ROWS, f"{this}: too many placements to try"
    claimed = claimed_rows(this, rules)
    found = set()
    for row in itertools.product(*choices):
        if row in claimed or all(placement == "R" for placement in row):
            continue
        try:
            ranks = [session.run(None, {name: placed(name, row[int(name[1:])], at) for name in names}) for at in (0, 1)]
        except Exception:
            continue
        fits = [_fits([rank[k] for rank in ranks], whole, this.close) for k, whole in enumerate(want)]
        if all(fits):
            found.add(f"{','.join(row)}->{','.join(fits)}")
    return found


Cuts = tuple[tuple[str, int], ...]


Terms = tuple[tuple[int, ...], int] | None


def _claims(rule: Rule) -> Iterator[tuple[Cuts, Terms]]:
    factors, partial = rule.factors, rule.partial_inputs
    for group in (2, 3):
        for letter in factors:
            yield ((letter, group),), None
        for row in partial:
            yield (), (row, group)
    for a, b in itertools.combinations(factors, 2):
        yield ((a, 2), (b, 3)), None
    for letter, row in itertools.product(factors, partial):
        yield ((letter, 2),), (row, 3)


def _unproven(this: Case, rule: Rule, feeds: Mapping[str, Array], want: Sequence[Array]) -> list[str]:
    """Factors of the rule that the case's dims do not let cut, other than those that it names."""
    short = "".join(
        letter for letter in rule.factors if not all(divides(rule, ((letter, group),), feeds, want) for group in (2, 3))
    )
    return [] if set(short) == set(this.undivided) else [f"'{short}' of {text_of(rule)} is not cut by 2 and by 3"]


def divides(rule: Rule, cuts: Cuts, feeds: Mapping[str, Array], want: Sequence[Array]) -> bool:
    there = [(letters, feeds[f"x{k}"].shape) for k, letters in enumerate(rule.inputs) if letters is not None]
    there += [(letters, array.shape) for letters, array in zip(rule.outputs, want, strict=True) if letters is not None]
    return all(rule.units.get(letter, shards) % shards == 0 for letter, shards in cuts) and all(
        shape[letters.index(letter)] % shards == 0
        for letters, shape in there
        for letter, shards in cuts
        if letter in letters
    )


def _are_numbers(feeds: Mapping[str, Array], terms: tuple[tuple[int, ...], int]) -> bool:
    return all(feeds[f"x{k}"].dtype.kind in "fiu" for k in terms[0])


def _fault(
    this: Case, node: ir.Node, rule: Rule, cuts: Cuts, terms: Terms, feeds: Mapping[str, Array], want: Sequence[Array]
) -> str:
    """What is wrong when the node runs by `cuts` (and `terms`) and its outputs are put together again; empty if nothing."""
    rng = np.random.default_rng(7)
    shards = dict(cuts)
    split = {f"x{k}": _terms(rng, feeds[f"x{k}"], terms[1]) for k in terms[0]} if terms else {}
    sizes = [*(count for _, count in cuts), *([terms[1]] if terms else [])]
    ranks: dict[tuple[int, ...], list[Array]] = {}
    programs = set()
    for at in itertools.product(*map(range, sizes)):
        shard = {letter: index for (letter, _), index in zip(cuts, at, strict=False)}
        local_feeds = {}
        for name, array in feeds.items():
            term = split[name][at[-1]] if name in split else array
            local_feeds[name] = _shard(term, rule.inputs[int(name[1:])], shards, shard)
        local = local_of(node, rule, shards, shard)
        try:
            (rule.local or Local.same)(local)
            programs.add(tuple(ir.to_proto(one).SerializeToString(deterministic=True) for one in local.nodes))
            ranks[at] = run(local.nodes, local_feeds, local.constants, this)
        except Exception as error:
            return f"rank {at} fails: {str(error).splitlines()[0]}"
    if len(programs) > 1:
        return "the ranks have different nodes, not only different constants"
    combined = {at: list(arrays) for at, arrays in ranks.items()}
    for axis in reversed(range(len(sizes))):
        letter = cuts[axis][0] if axis < len(cuts) else ""
        groups: dict[tuple[int, ...], list[list[Array]]] = {}
        for at in sorted(combined):
            groups.setdefault(at[:axis], []).append(combined[at])
        try:
            combined = {
                at: [_joined([rank[k] for rank in group], rule, k, letter) for k in range(len(want))]
                for at, group in groups.items()
            }
        except ValueError as error:
            return str(error)
    for k, (have, whole) in enumerate(zip(combined[()], want, strict=True)):
        if not equal(have, whole, max(this.close, 1e-3) if terms else this.close):
            shapes = f"{have.dtype}{list(have.shape)}, the whole's {whole.dtype}{list(whole.shape)}"
            return f"output {k} is {shapes}, and differs"
    return ""


def local_of(node: ir.Node, rule: Rule, shards: Mapping[str, int], shard: Mapping[str, int]) -> Local:
    """What a rule's `local` is given of a node on a rank."""
    shapes: dict[str, tuple[int | str, ...] | None] = {}
    local_shapes: dict[str, tuple[int | str, ...] | None] = {}
    for letters, value in [*zip(rule.inputs, node.inputs, strict=True), *zip(rule.outputs, node.outputs, strict=True)]:
        if value is None or value.name is None:
            continue
        dims = None if value.shape is None else tuple(value.shape.dims)
        shapes[value.name] = None if dims is None else tuple(d if isinstance(d, int) else str(d) for d in dims)
        if dims is not None and letters is not None:
            cut = [
                dim if shards.get(letter, 1) == 1 else dim // shards[letter]
                for dim, letter in zip(dims, letters, strict=True)
            ]
            local_shapes[value.name] = tuple(d if isinstance(d, int) else str(d) for d in cut)
        else:
            local_shapes[value.name] = shapes[value.name]
    inputs = ["" if value is None else str(value.name) for value in node.inputs]
    return Local(node, rule, shards, shard, inputs, [str(value.name) for value in node.outputs], shapes, local_shapes)


def equal(have: Array, want: Array, close: float) -> bool:
    """Equality in dtype and shape; of numbers exactly, of floating-point ones within `close` of the largest."""
    if have.dtype != want.dtype or have.shape != want.shape:
        return False
    if want.dtype.kind != "f":
        return bool(np.array_equal(have, want))
    finite = np.isfinite(want)
    largest = float(np.abs(want[finite]).max()) if finite.any() else 0.0
    return bool(np.allclose(have, want, rtol=close, atol=close * largest, equal_nan=True))


def _joined(parts: Sequence[Array], rule: Rule, k: int, letter: str) -> Array:
    """One output put together along one axis, whose factor is `letter`; an axis without one holds terms of a sum."""
    letters = rule.outputs[k]
    if letter and letters and letter in letters:
        return np.concatenate(parts, axis=letters.index(letter))
    if not letter or rule.reduce.get(letter):
        function = {"sum": np.add, "max": np.maximum, "min": np.minimum}[rule.reduce.get(letter, "sum")]
        if any(part.shape != parts[0].shape for part in parts):
            raise ValueError(f"the terms of output {k} have shapes {[part.shape for part in parts]}")
        total = parts[0]
        for part in parts[1:]:
            total = function(total, part)
        return np.asarray(total, parts[0].dtype)
    if not all(equal(part, parts[0], 0.0) for part in parts):
        raise ValueError(f"output {k} has no factor {letter} and differs by rank")
    return parts[0]


def _terms(rng: np.random.Generator, array: Array, count: int, scale: float = 1000.0) -> list[Array]:
    """Terms that add up to the array; each is `scale` times as large as the one before, the last is what remains."""
    if array.dtype.kind in "iu":
        drawn = [rng.integers(0, 5, array.shape).astype(array.dtype) for _ in range(count - 1)]
    else:
        drawn = [np.asarray(eighths(rng, array.shape) * scale**k, array.dtype) for k in range(count - 1)]
    rest = array.copy()
    for term in drawn:
        rest -= term
    return [np.asarray(term) for term in (*drawn, rest)]


def _shard(array: Array, letters: str | None, shards: Mapping[str, int], shard: Mapping[str, int]) -> Array:
    for dim, letter in enumerate(letters or ""):
        if letter != WHOLE and shards.get(letter, 1) > 1:
            array = np.split(array, shards[letter], axis=dim)[shard[letter]]
    return array


def _choices(this: Case, k: int, feeds: Mapping[str, Array]) -> list[str]:
    """The placements to try for an operand: constants and absent ones stay whole, and only numbers have terms."""
    array = feeds.get(f"x{k}")
    if array is None or k in this.constants:
        return ["R"]
    cuts = [f"S({dim})" for dim, size in enumerate(array.shape) if size % 2 == 0]
    return ["R", *cuts, *(["P"] if array.dtype.kind in "fi" and this.operands[k] is not array else [])]


def _placement(letters: str | None, letter: str) -> str:
    return f"S({letters.index(letter)})" if letters and letter in letters else "R"


def _placed(array: Array, placement: str, index: int) -> Array:
    match placement[0]:
        case "S":
            return np.split(array, 2, axis=int(placement[2:-1]))[index]
        case "P":
            return _terms(np.random.default_rng(11), array, 2, 2.5)[index]
    return array


def _fits(parts: Sequence[Array], want: Array, close: float) -> str:
    """The placement by which the parts on 2 ranks are the whole output; empty if there is none."""
    a, b = parts
    if a.dtype != want.dtype or a.shape != b.shape or len(a.shape) != len(want.shape):
        return ""
    if equal(a, want, close) and equal(b, want, close):
        return "R"
    for dim, (part, size) in enumerate(zip(a.shape, want.shape, strict=True)):
        if part * 2 == size and equal(np.concatenate(parts, axis=dim), want, close):
            return f"S({dim})"
    if a.shape == want.shape and want.dtype.kind in "fiu":
        for name, function in (("P", np.add), ("P(max)", np.maximum), ("P(min)", np.minimum)):
            if equal(np.asarray(function(a, b), want.dtype), want, close):
                return name
    return ""


def text_of(rule: Rule) -> str:
    """A rule's operands, as `mk,kn->mn`."""
    ins, outs = (",".join("-" if one is None else one for one in side) for side in (rule.inputs, rule.outputs))
    return f"{ins}->{outs}"
