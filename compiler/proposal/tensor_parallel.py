"""Chooses the linked dims that are sharded over the axis `tp`: projections by columns, and those that sum over their results by rows.

The law. A set of linked dims is cut if nothing stands against it (`linked.py`) and it divides. Sets that the model's `tp_plan` shards
(`huggingface/settings.py`) come first, then those that both a product makes and another one sums over; a node is cut along one set only.
Where sets exclude each other, those with more bytes of weights are taken first, or those with more of them for a byte that is sent:
whichever way shards more of the weights, and where that is the same up to a twentieth, whichever sends less. So without norms, which
need the residual whole, attention is still cut by heads. What is left may have one side, the vocabulary of an embedding or of a head:
it is cut if it begins or ends the model, and its weights are at least a fiftieth of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Typed
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.proposal.flow import stored_bytes
from partc.compiler.proposal.linked import Linked, Place, linked_dims
from partc.compiler.proposal.names import among, patterns, template
from partc.compiler.proposal.tp_plan import TpPlan
from partc.compiler.rewrite.class_losses import IS_LOSS

_LEAST_SHARE = 50
_EVEN = 20
"""Ways that differ by less than one part in so many of the weights are equal."""
_LISTED = 8


@dataclass(frozen=True)
class Style:
    """A line of `sharding`: a module or node, and how its weight is cut."""

    path: str
    style: str


@dataclass(frozen=True)
class TensorParallel:
    """Shardings in groups of alike modules, each with its reason; weights that stay replicated; the dims of values that are sharded.

    `not_taken` are the entries of the model's `tp_plan` that do not stand here, with their reasons.
    """

    groups: tuple[tuple[str, tuple[Style, ...]], ...]
    replicated: tuple[str, ...]
    places: tuple[Place, ...]
    not_taken: tuple[str, ...] = ()
    sets: tuple[Linked, ...] = ()
    """The sets of linked dims that are sharded, in the order of the graph."""
    has_records: bool = False
    """Whether the batch is cut over `tp`, too, up to the first module that is sharded."""

    @property
    def styles(self) -> frozenset[Style]:
        """All shardings."""
        return frozenset(style for _, styles in self.groups for style in styles)

    def lines(self, paths: Iterable[str]) -> Iterator[str]:
        """The lines below `sharding:`, a comment before each group."""
        covered: dict[str, Callable[[str], bool]] = {}
        known = list(paths)
        for style in ("colwise", "rowwise"):
            covered[style] = among(known, [s.path for _, styles in self.groups for s in styles if s.style == style])
        for reason, styles in self.groups:
            yield f"# {reason}"
            for style in ("colwise", "rowwise"):
                chosen = list(dict.fromkeys(one.path for one in styles if one.style == style))
                yield from (f"{pattern}: {style}" for pattern in patterns(chosen, covered[style]))


def tensor_parallel(
    program: Typed,
    paths: Iterable[str],
    shards: int,
    tp_plan: TpPlan | None = None,
    kept_whole: Mapping[int, str] | None = None,
    linked: Sequence[Linked] | None = None,
    refused_texts: Callable[[Sequence[Linked]], str] = lambda some: "",
    repeats: bool = False,
) -> TensorParallel:
    """Proposes shardings of a model over a mesh axis of `shards` ranks; what `tp_plan` says of them is taken where it holds.

    `paths` are those of the model's own nodes: a node that is not among them stands for a part of one that is. `linked`: the sets, where
    they are known. `kept_whole`: by their number among those that would be sharded, sets that are not, with the reason; `refused_texts`:
    what to say besides of sets that are. `repeats`: heads of a cache that are fewer than the shards are repeated.
    """
    tp_plan = tp_plan or TpPlan()
    total = sum(value.const_value.nbytes for value in program.model.graph.initializers.values() if value.const_value)
    sets = linked_dims(program) if linked is None else linked
    chosen, refused = _choose(program, sets, shards, total, tp_plan, repeats)
    if kept_whole:
        refused = [*refused, *((one, kept_whole[k]) for k, one in enumerate(chosen) if k in kept_whole)]
        chosen = [one for k, one in enumerate(chosen) if k not in kept_whole]
    regions = _Regions(program, frozenset(paths))
    alike: dict[tuple[tuple[str, str], ...], list[tuple[Linked, list[Style]]]] = {}
    for one in chosen:
        styles = [Style(regions.of(node), "colwise") for node in one.producers]
        styles += [Style(regions.of(node), "rowwise") for node in one.summed]
        key = tuple(dict.fromkeys((template(style.path), style.style) for style in styles))
        alike.setdefault(key, []).append((one, styles))
    groups = []
    for members in alike.values():
        styles = [style for _, some in members for style in some]
        reason = _reason(program, members[0][0], len(members), members[0][1], shards)
        reason += refused_texts([one for one, _ in members])
        if sources := tp_plan.sources(members[0][0]):
            reason = f"tp_plan of {', '.join(sources)}: {reason}"
        groups.append((reason, tuple(styles)))
    places = tuple(place for one in chosen for place in one.places)
    whole = tuple(_replicated_weights(program, chosen, refused, total))
    return TensorParallel(tuple(groups), whole, places, tuple(tp_plan.not_taken(chosen, refused)), tuple(chosen))


def _choose(
    program: Typed, sets: Sequence[Linked], shards: int, total: int, tp_plan: TpPlan, repeats: bool
) -> tuple[list[Linked], list[tuple[Linked, str]]]:
    """The sets of dims to shard, in the order of the graph, and the others with the reason."""
    refused: list[tuple[Linked, str]] = []
    open_sets = []
    for linked in sets:
        against = linked.obstacles[0] if linked.obstacles else linked.indivisible(program, shards, repeats)
        if against or not (linked.producers or linked.summed):
            refused.append((linked, against))
        elif entry := tp_plan.against(linked):
            refused.append((linked, f"the tp_plan of {entry.source} says {entry.style} of {entry.pattern}"))
        else:
            open_sets.append(linked)
    sizes = TypicalSizes(program)
    sent = {id(one): _sent(one, sizes) for one in open_sets}
    weights = {id(one): one.bytes for one in open_sets}
    ways: list[Callable[[Linked], float]] = [
        lambda one: -weights[id(one)],
        lambda one: -weights[id(one)] / max(1, sent[id(one)]),
    ]
    named = {id(one) for one in open_sets if tp_plan.sources(one)}
    tried = [_taken(sorted(open_sets, key=way), weights, total, named) for way in ways]

    def worth(way: tuple[list[Linked], list[tuple[Linked, str]]]) -> tuple[int, int]:
        sharded = {value for one in way[0] for value in one.weights}
        return -round(_EVEN * sum(map(stored_bytes, sharded)) / max(1, total)), sum(sent[id(one)] for one in way[0])

    chosen, others = min(tried, key=worth)
    order = {id(one): k for k, one in enumerate(sets)}
    return sorted(chosen, key=lambda one: order[id(one)]), refused + others


def _taken(
    ranked: Iterable[Linked], weights: Mapping[int, int], total: int, named: Collection[int]
) -> tuple[list[Linked], list[tuple[Linked, str]]]:
    """The sets that are cut where those that are `named` by the model come first, then those with two sides, in the given order; and
    those that are not with the reason."""
    cut: dict[ir.Node, Linked] = {}
    chosen: list[Linked] = []
    refused: list[tuple[Linked, str]] = []
    for linked in sorted(ranked, key=lambda one: (id(one) not in named, not (one.producers and one.summed))):
        both = linked.producers and linked.summed
        if any(node in cut for node in linked.nodes):
            refused.append((linked, "its products are sharded along another dim"))
        elif not both and not _ends(linked):
            refused.append((linked, "no product contracts its output, or a node between them hides the dim"))
        elif not both and weights[id(linked)] * _LEAST_SHARE < total:
            refused.append((linked, "too small to be worth a message"))
        else:
            cut.update(dict.fromkeys(linked.nodes, linked))
            chosen.append(linked)
    return chosen, refused


def _sent(one: Linked, sizes: TypicalSizes) -> int:
    """About how many bytes a cut sends at typical sizes: an AllReduce moves what it sums twice, an output is gathered."""
    summed = sum(2 * sizes.bytes_of(node.outputs[0]) for node in one.summed)
    return summed + sum(sizes.bytes_of(value) for value, _ in one.places if value.is_graph_output())


def _ends(one: Linked) -> bool:
    """Whether dims with one side only begin or end the model: rows that are looked up, inputs, outputs, classes of its own loss."""
    if one.producers:
        return _has_loss(one) or any(value.is_graph_output() for value, _ in one.places)
    looked_up = all(node.op_type in ("Gather", "GatherBlockQuantized") for node in one.summed)
    return looked_up or any(value.is_graph_input() for value, _ in one.places)


def _has_loss(linked: Linked) -> bool:
    """Whether a loss of the model's own is over these dims."""
    return any(IS_LOSS in node.meta for node in linked.nodes)


class _Regions:
    """The shortest name of a product: its module where that holds no other weight of two dims, else the node itself."""

    def __init__(self, program: Typed, own: frozenset[str]) -> None:
        self.paths = {node: path if path in own else path.rpartition(".")[0] for node, path in program.paths.items()}
        inside: dict[str, set[str]] = {}
        constants = set(program.model.graph.initializers.values())
        for node, path in self.paths.items():
            several = [v for v in program.reads[node] if v in constants and v.shape is not None and len(v.shape) > 1]
            if all(value in constants for value in program.reads[node]):
                constants.update(node.outputs)
                continue
            if several:
                for end in range(len(parts := path.split("."))):
                    module = ".".join(parts[:end])
                    inside.setdefault(module, set()).add(path)
        self.inside = {module: len(paths) for module, paths in inside.items()}

    def of(self, node: ir.Node) -> str:
        path = self.paths[node]
        module = path.rpartition(".")[0]
        return module if module and self.inside.get(module, 0) == 1 else path


def _reason(program: Typed, linked: Linked, times: int, styles: Sequence[Style], shards: int) -> str:
    size = linked.size(program)
    each = f"{size // shards} of {size}" if isinstance(size, int) else f"1/{shards} of {size}"
    columns = _named(style.path for style in styles if style.style == "colwise")
    summed = _named(style.path for style in styles if style.style == "rowwise")
    sums = len(linked.summed)
    messages = f"{sums} AllReduce{', ' + str(times) + ' times' if times > 1 else ''}"
    if columns and summed:
        return f"each rank computes {each} columns in {columns}, contracted in {summed}: {messages}"
    if columns:
        out = any(value.is_graph_output() for value, _ in linked.places)
        end = (
            ", gathered where the output goes"
            if out
            else ", three numbers a position are reduced"
            if _has_loss(linked)
            else ""
        )
        return f"each rank computes {each} columns{end}"
    return f"each rank has {each} rows, and the partial outputs are summed: {messages}"


def _named(paths: Iterable[str]) -> str:
    found = list(dict.fromkeys(path.rpartition(".")[2] if "." in path else path for path in paths))
    return ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")


def _replicated_weights(
    program: Typed, chosen: Sequence[Linked], refused: Sequence[tuple[Linked, str]], total: int
) -> Iterator[str]:
    """Weights of two dims or more that stay replicated, the largest first, with the reason."""
    cut = {value for one in chosen for value in one.weights}
    why: dict[ir.Value, str] = {}
    for one, reason in sorted(refused, key=lambda pair: -pair[0].bytes):
        for value in (
            one.weights
        ):  # the dims that fewer weights have say more: of all that the residual has, a norm is in the way
            why[value] = reason or why.get(value, "")
    left = [value for value in why if value not in cut and value.shape is not None and len(value.shape) > 1]
    left.sort(key=lambda value: (-stored_bytes(value), name_of(value)))
    alike: dict[tuple[str, str], list[ir.Value]] = {}
    for value in left:
        alike.setdefault((template(name_of(value)), template(why[value])), []).append(value)
    rows = list(alike.values())
    for some in rows[:_LISTED]:
        share = 100 * sum(map(stored_bytes, some)) / max(1, total)
        more = f" and {len(some) - 1} like it" if len(some) > 1 else ""
        yield f"{some[0].name}{more} ({share:.1f} % of the weights): {why[some[0]] or 'no product reads it'}"
    if len(rows) > _LISTED:
        yield f"and {sum(map(len, rows[_LISTED:]))} smaller ones"
