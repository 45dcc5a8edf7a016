"""Pass: defers all_reduce: partial sums flow through linear nodes, and are reduced where that costs least.

A contracted factor that is sharded leaves partial sums on the ranks along its axes. If they are reduced right after the node that computes
them, they are replicated for every reader. But a node that is linear in an operand (`Rule.linear`) maps partial to partial, and its output
can be reduced:

    x + attn + mlp     reduced at once   (x + AllReduce(attn.partial)) + AllReduce(mlp.partial)
                       deferred          AllReduce((x.kept + attn.partial) + mlp.partial)

The law: all readers of a partial value read it partial, or it is reduced once for all of them. A replicated operand that is added to
partial ones is masked: only the first rank keeps it (`lower/masked_replicas.py`). So the cost of a choice of nodes is the sum of the costs
of single values, and the cheapest choice is a minimum cut (`max_flow.py`): nodes on the source's side compute partial sums, and their
values with a reader on the sink's side are paid for. Among equal costs the cut nearest to the source is chosen: no reduction is deferred
without gain.

A deferred reduction is proven to take no more bytes and no more collectives than before, for all sizes of the symbols. Not deferred are:
maxima and minima; sums of a size known only at run time, or into a narrower type, which would round each partial; sums through nodes of
several groups, bodies or local maps; values to which the plan gives a layout. In training, a product whose other operand is trained
computes a partial gradient for it, too: its bytes count, and one more collective is accepted if the bytes fall to a quarter.

The module also warns of looked-up matrices, such as experts that a router picks, whose rows are sharded: each rank has a partial value for
every token.

Every rank then computes all tokens with the experts that it has, with zeros in place of the others, and the partial values are summed:
those of the picked matrices themselves, or of results computed from them, as far as partial sums pass. If the matrices are sharded in their
inner dim instead, each rank has its shard of every expert, and only one sum per token's result remains, as in any two products of a tensor
parallel model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias

import onnx_ir as ir
import sympy
from partc.compiler.autodiff.reach import trained_values
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.reading import read
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.graph import is_inside
from partc.compiler.ir.program import Sharded, Targeted
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.ir.value_info import bytes_text, whole_bytes
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.layout.moves import bytes_moved, is_local
from partc.compiler.layout.reshard import lower
from partc.compiler.matching import output_ranks
from partc.compiler.sharding.seeding.styles import LOOKUPS, styled
from partc.compiler.sharding.values.max_flow import ALWAYS, FlowNetwork
from partc.compiler.sharding.values.operands import input_layout_of, proven_divisors, replicated_on
from partc.compiler.sharding.values.versions import ValueVersions, deliver, reduce_definition

_Side: TypeAlias = set[NodeOnGroup | ir.Value | str]
_FLOATS = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_LEFT = 4
"""The factor by which the bytes must fall for a further collective to be accepted."""
_TYPICAL = 512
"""The size that is assumed for dims without bounds."""


@dataclass(frozen=True)
class Cost:
    """The cost of moving some values to their readers: byte expressions with their shares, and the number of collectives and messages."""

    bytes: tuple[tuple[Fraction, sympy.Expr], ...] = ()
    count: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.count + other.count)


def defer_all_reduce(program: Targeted) -> Targeted:
    """Pass: sets in each node's sharding which inputs it reads as partial sums and which it masks, so that its outputs are partial sums."""
    if not program.choices:
        return program
    work = _Sums(program)
    for terms in work.sources():
        work.place(terms)
    if work.changed:
        program = replace(program, choices=work.choices)
    told = tuple(picked_rows(program))
    return replace(program, warnings=(*program.warnings, *told)) if told else program


@dataclass(frozen=True)
class _PartialSums:
    """A kind of partial sums: those over the same ranks of a group."""

    group: Group
    layout: Layout
    """The layout of one of the values."""


@dataclass
class _Passing:
    """Nodes that could pass partial sums of one kind on, in order, and `layouts` of all values that are partial then."""

    makers: list[NodeOnGroup] = field(default_factory=list)
    choices: dict[NodeOnGroup, NodeSharding] = field(default_factory=dict)
    operands: dict[NodeOnGroup, tuple[int, ...]] = field(default_factory=dict)
    """Maps each node that could pass sums on to its inputs that are partial, or masked to one rank."""
    gradients: dict[NodeOnGroup, Cost] = field(default_factory=dict)
    """Maps each product that could pass sums on to the cost of reducing the gradients of its other factors, which become partial."""
    layouts: dict[ir.Value, Layout] = field(default_factory=dict)


class _Sums:
    def __init__(self, program: Sharded) -> None:
        self.program = program
        self.choices = dict(program.choices)
        self.changed = False
        self.prices: dict[tuple[Layout, Layout, bool, tuple[int, ...]], tuple[Fraction, int]] = {}
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.typical = {name: Facts.constant(_typical(facts)) for name, facts in self.known.items()}
        self.delivered, _ = output_ranks(program)
        training = program.training
        learns = training is not None and program.kind.backward
        self.learned = trained_values(program.reads, training) if training is not None and learns else set()
        self.ends = {*program.model.graph.outputs}
        if training is not None:
            self.ends |= {training.loss, *(value for value in training.statistics.values() if value is not None)}
        alone = (self._alone(node) for node in program.model.graph)
        self.instances = [instance for instance in alone if instance is not None]

    def sources(self) -> Iterator[_PartialSums]:
        """Yields the kinds of partial sums, in the order of the first node that computes each."""
        found: dict[tuple[Group, Layout], _PartialSums] = {}
        for instance in self.instances:
            for layout in self._layouts_of(instance).values():
                if layout.partial:
                    found.setdefault((instance.group, _kind(layout)), _PartialSums(instance.group, layout))
        yield from found.values()

    def place(self, terms: _PartialSums) -> None:
        """Decides for all nodes that could pass partial sums of this kind on whether they do."""
        passing = self._passing(terms)
        if not passing.choices:
            return
        costs: dict[ir.Value, Cost] = {}
        for value, layout in passing.layouts.items():
            # reduced on all ranks: that a reader needs less is not a gain of deferring
            partial = ShardedValue(value, terms.group, layout)
            reduced = ShardedValue(value, terms.group, Layout(layout.mesh, layout.cuts))
            costs[value] = self._moved(value, [(partial, reduced)])
        costs |= {
            value: self._now(value, passing.layouts[value], one.group)
            for one in passing.makers
            for value in self._layouts_of(one)
        }
        for per_byte, per_move in ((1 << 20, 1), (1, 1 << 80)):
            extra = {value: self._weight(cost, per_byte, per_move) for value, cost in costs.items()}
            side = self._cheapest(passing, extra, (per_byte, per_move))
            for part in self._connected(passing, side):
                if self._gains(passing, part, side, costs):
                    self._take(passing, part, side)
            passing = replace(
                passing, choices={i: c for i, c in passing.choices.items() if self.choices[i].passing == ()}
            )

    def _passing(self, terms: _PartialSums) -> _Passing:
        passing = _Passing()
        kind = _kind(terms.layout)
        for instance in self.instances:
            layouts = self._layouts_of(instance)
            if instance.group != terms.group or not layouts:
                continue
            reads, now = instance.node.inputs, self.choices[instance]
            if any(layout.partial for layout in layouts.values()):
                alike = all(_kind(layout) == kind for layout in layouts.values())
                if alike and not now.passing and self._are_sized(layouts):
                    passing.makers.append(instance)
                    passing.layouts |= {value: normal(layout) for value, layout in layouts.items()}
            elif now.rule.partial_inputs and not passing.layouts.keys().isdisjoint(reads):
                choice = now.giving(terms.layout)
                operands = self._operands(instance, choice, passing) if choice is not None else ()
                if choice is not None and operands and self._are_sized(layouts):
                    passing.choices[instance], passing.operands[instance] = choice, operands
                    passing.gradients[instance] = self._gradients(instance, choice, operands)
                    passing.layouts |= {
                        value: normal(layout)
                        for k, value in enumerate(instance.node.outputs)
                        if value in layouts and (layout := choice.output(k)) is not None
                    }
        return passing

    def _alone(self, node: ir.Node) -> NodeOnGroup | None:
        """A node on its only group, if all outputs are numbers of known sizes whose layouts the plan does not request; else None."""
        placed = self.program.placement[node]
        if len(placed.groups) != 1 or placed.follows or is_inside(node) or self.program.around[node]:
            return None
        instance = NodeOnGroup(node, placed.groups[0])
        if instance not in self.choices:
            return None
        given = self.program.pinned.outputs
        fits = all(
            value.dtype in _FLOATS
            and self.program.values[value].shape is not None
            and not (given and (instance, k) in given)
            for k, value in enumerate(node.outputs)
            if value.name
        )
        return instance if fits else None

    def _layouts_of(self, instance: NodeOnGroup) -> dict[ir.Value, Layout]:
        """The layouts of a node's outputs; empty if one has a pending reduction other than a sum, or if their reductions differ."""
        choice, layouts = self.choices[instance], dict[ir.Value, Layout]()
        for k, value in enumerate(instance.node.outputs):
            if value.name:
                layout = choice.output(k)
                if layout is None or (layout.partial and any(reduce != "sum" for _, reduce in layout.partial)):
                    return {}
                layouts[value] = layout
        return layouts

    def _are_sized(self, values: Iterable[ir.Value]) -> bool:
        """Whether the bytes of all values are known as expressions."""
        return all(self._bytes(value) is not None for value in values)

    def _operands(self, instance: NodeOnGroup, choice: NodeSharding, found: _Passing) -> tuple[int, ...]:
        """The inputs that are partial, or masked to one rank, where a node passes partial sums on; () where it cannot."""
        node, rule = instance.node, choice.rule
        rows = [tuple(k for k in row if k < len(node.inputs) and node.inputs[k]) for row in rule.partial_inputs]
        arriving = {k for row in rows for k in row if self._arrives(instance, choice, k, found)}
        if rule.linear == "each":
            rows = [row for row in rows if arriving.issuperset(row)] if len(arriving) == 1 else []
        for row in rows:
            others = [value for k, value in enumerate(node.inputs) if value is not None and k not in row]
            if arriving.intersection(row) and self._are_sized(self.learned.intersection(others)):
                return row if all(_holds(node.inputs[k], node.outputs) for k in row) else ()
        return ()

    def _gradients(self, instance: NodeOnGroup, choice: NodeSharding, operands: tuple[int, ...]) -> Cost:
        """The cost of reducing the gradients of the inputs that are not partial: each rank has a partial value of those gradients."""
        cost = Cost()
        for k, value in enumerate(instance.node.inputs):
            whole = choice.input(k)
            if value is not None and k not in operands and value in self.learned and whole is not None:
                terms = ShardedValue(value, instance.group, normal(choice.masked_layout(k)))
                cost += self._moved(value, [(terms, ShardedValue(value, instance.group, normal(whole)))])
        return cost

    def _arrives(self, instance: NodeOnGroup, choice: NodeSharding, k: int, found: _Passing) -> bool:
        """Whether an input could be read partial, in the layout in which it is produced."""
        value = instance.node.inputs[k]
        if value is None or value not in found.layouts or choice.input(k) is None:
            return False
        return normal(choice.masked_layout(k)) == found.layouts[value]

    def _readers(self, value: ir.Value, passing: _Passing) -> Iterator[NodeOnGroup | None]:
        """Yields the readers that could read a value partial; None for each reader that cannot, and for an output of the model."""
        if value in self.ends:
            yield None
        producer = value.producer()
        assert producer is not None
        (group,) = self.program.placement[producer].groups
        for node, k in value.uses():
            instance = NodeOnGroup(node, group)
            could = instance in passing.choices and k in passing.operands[instance]
            yield instance if could and self._arrives(instance, passing.choices[instance], k, passing) else None

    def _now(self, value: ir.Value, layout: Layout, group: Group) -> Cost:
        """The cost of the reductions without deferral: each reader gets the reduced value."""
        home, copies = ShardedValue(value, group, normal(layout)), ValueVersions()
        wanted = [
            input_layout_of(self.program, NodeOnGroup(node, each), k)
            for node, k in value.uses()
            if node in self.program.placement
            for each in self.program.placement[node].groups
        ]
        inner = self.program.capturing.get(value, [])
        wanted += [replicated_on(value, each) for node in inner for each in self.program.placement[node].groups]
        copies.defs[value], copies.uses[value] = [home], dict.fromkeys(wanted, "")
        if value in self.delivered:
            ranks, cut = self.delivered[value]
            deliver(self.program, copies, value, ranks, cut)
        reduce_definition(self.program, copies, value, home)
        pairs = [(copies.definition_for(copy), copy) for copy in copies.uses[value]]
        pairs += [(home, copies.canonical[home])] if home in copies.canonical else []
        return self._moved(value, pairs)

    def _moved(self, value: ir.Value, pairs: Iterable[tuple[ShardedValue, ShardedValue]]) -> Cost:
        """The cost of resharding versions of a value into others."""
        total, whole, divisors = Cost(), self._bytes(value), proven_divisors(self.program, value)
        assert whole is not None
        for one, other in pairs:
            most, count = self._price(one, other, divisors)
            total += Cost(((most, whole),) if most else (), count)
        return total

    def _price(self, one: ShardedValue, other: ShardedValue, divisors: tuple[int, ...]) -> tuple[Fraction, int]:
        """The maximum share of a value that a rank receives, and the number of steps; within a group, cached for all groups of its size."""
        key = one.layout, other.layout, one.group == other.group, divisors
        if not key[2] or key not in self.prices:
            moves = lower(one.layout, other.layout, one.group, other.group, divisors)
            self.prices[key] = bytes_moved(moves).most, sum(not is_local(move) for move in moves)
        return self.prices[key]

    def _bytes(self, value: ir.Value) -> sympy.Expr | None:
        found = whole_bytes(self.program.values[value])
        return found if found is None else sympy.Integer(found) if isinstance(found, int) else read(str(found.value))

    def _weight(self, cost: Cost, per_byte: int, per_move: int) -> int:
        """A cost as one number, at typical sizes."""
        found = 0
        for share, whole in cost.bytes:
            facts = facts_of(whole, self.typical)
            found += math.ceil(share * (facts.max if facts.max is not None else max(1, facts.min or 1)))
        return found * per_byte + cost.count * per_move

    def _cheapest(self, choices: _Passing, extra: Mapping[ir.Value, int], weights: tuple[int, int]) -> _Side:
        """Returns the nodes that compute partial sums in the cheapest choice, and those of their values that all readers read partial."""
        network = FlowNetwork[NodeOnGroup | ir.Value | str]()
        network.edge("source", "sink", 0)
        for instance in (*choices.makers, *choices.choices):
            if instance not in choices.choices:
                network.edge("source", instance, ALWAYS)
            elif choices.gradients[instance].count:
                network.edge(instance, "sink", self._weight(choices.gradients[instance], *weights))
            for value in instance.node.outputs:
                if value in choices.layouts:
                    network.edge(instance, value, extra[value])
                    for reader in self._readers(value, choices):
                        network.edge(value, "sink" if reader is None else reader, ALWAYS)
        return network.source_side("source", "sink")

    def _connected(self, passing: _Passing, side: _Side) -> Iterator[list[NodeOnGroup]]:
        """Yields the connected components of the nodes that pass partial sums on and of those that produce the sums for them."""
        leads: dict[NodeOnGroup, NodeOnGroup] = {}

        def lead(one: NodeOnGroup) -> NodeOnGroup:
            while leads.setdefault(one, one) != one:
                leads[one] = one = leads[leads[one]]
            return one

        for instance in (*passing.makers, *passing.choices):
            for value in instance.node.outputs:
                for reader in self._readers(value, passing) if instance in side and value in side else ():
                    assert reader is not None
                    leads[lead(reader)] = lead(instance)
        parts: dict[NodeOnGroup, list[NodeOnGroup]] = {}
        for instance in (*passing.makers, *passing.choices):
            if instance in leads:
                parts.setdefault(lead(instance), []).append(instance)
        yield from parts.values()

    def _gains(
        self, passing: _Passing, part: Iterable[NodeOnGroup], side: _Side, costs: Mapping[ir.Value, Cost]
    ) -> bool:
        """Whether deferral makes nothing more expensive, at any sizes, and something cheaper."""
        before, after = Cost(), Cost()
        for instance in part:
            after += passing.gradients.get(instance, Cost()) if instance in side else Cost()
            for value in instance.node.outputs:
                if value in passing.layouts:
                    before += Cost() if instance in passing.choices else costs[value]
                    after += Cost() if value in side else costs[value]
        weights = [self._weight(cost, 1, 0) for cost in (before, after)]
        learns = any(passing.gradients[one].count for one in part if one in passing.choices)
        more = after.count > before.count and not (learns and weights[1] * _LEFT <= weights[0])
        if weights[1] > weights[0] or more:
            return False
        return (after.count < before.count or weights[1] < weights[0]) and self._is_no_more(after, before)

    def _is_no_more(self, one: Cost, other: Cost) -> bool:
        """Whether the cost `one` is proven to have no more bytes than `other`."""
        shares = [(share, whole) for share, whole in other.bytes] + [(-share, whole) for share, whole in one.bytes]
        scale = math.lcm(*(share.denominator for share, _ in shares))
        summed: dict[sympy.Expr, int] = {}
        for share, whole in shares:
            summed[whole] = summed.get(whole, 0) + int(share * scale)
        rest = sympy.expand(sympy.Add(*(whole * times for whole, times in summed.items())))
        least = facts_of(rest, self.known).min
        return least is not None and least >= 0

    def _take(self, choice: _Passing, part: Iterable[NodeOnGroup], side: _Side) -> None:
        """Makes the nodes of a component pass partial sums on."""
        for instance in part:
            if instance in choice.choices:
                there = frozenset(
                    k
                    for k in choice.operands[instance]
                    if instance.node.inputs[k] in side and self._arrives(instance, choice.choices[instance], k, choice)
                )
                kept = frozenset(choice.operands[instance]) - there
                self.choices[instance] = replace(choice.choices[instance], partial=there, masked=kept)
                self.changed = True


def _kind(layout: Layout) -> Layout:
    """The key of a kind of partial sums: the ranks over which they are summed, whatever shards them."""
    return normal(Layout(layout.mesh, (), layout.partial))


def _typical(facts: Facts) -> int:
    """A typical size of a dim: its maximum if that is known."""
    if facts.max is not None:
        return facts.max
    least = max(facts.min or 1, _TYPICAL)
    return least + (facts.remainder - least) % facts.divisor if facts.divisor else facts.remainder


def _holds(operand: ir.Value | None, outputs: Iterable[ir.Value]) -> bool:
    """Whether every output's type can represent all numbers of the operand's type, so that no partial value is rounded."""
    if operand is None or operand.dtype not in _FLOATS:
        return False
    wider = {operand.dtype, *(_FLOATS[2:] if operand.dtype in _FLOATS[:2] else _FLOATS[3:])}
    return all(out.dtype in wider for out in outputs if out.name)


_FURTHEST = 12
"""The most nodes between a product and another node that reads its result."""


def picked_rows(program: Sharded) -> Iterator[str]:
    """Yields a warning for each table of matrices whose rows are sharded, with the bytes that are summed and a better sharding."""
    meant = {node: styled(node) for node in program.model.graph if node.op_type in LOOKUPS}
    products = {product for node, product in meant.items() if product is not node}
    for instance, choice in program.choices.items() if products else ():
        node, rule = instance.node, choice.rule
        product, table = meant.get(node, node), node.inputs[0] if node.inputs else None
        if product is node or table is None or choice.pulled:
            continue
        rows = [letter for letter in rule.inputs[0] or "" if choice.axes.get(letter) and letter in rule.reduce]
        if not rows:
            continue
        second = any(value is not None and _follows(value.producer(), products - {product}) for value in product.inputs)
        reduced = _reduced(program, NodeOnGroup(node, instance.group))
        if second and not any(value in _between(node, product) for value in reduced):
            continue
        yield _warning(program, table, choice, rows[0], reduced, product if second else None)


def _warning(
    program: Sharded,
    table: ir.Value,
    choice: NodeSharding,
    row: str,
    reduced: Iterable[ir.Value],
    last: ir.Node | None,
) -> str:
    """Returns the warning; `last` is the last product for a token, None where another product follows."""

    def size(value: ir.Value) -> str:
        return bytes_text(program.values[value], program.values[value].shape)

    better = f"`'{table.name}': colwise` (or `packed_colwise` where it holds several, as gate and up) adds up nothing"
    if last is not None:
        better = f"`'{table.name}': rowwise` adds up {size(last.outputs[0])}"
    added = " and ".join(f"{size(value)} of '{value.name}'" for value in reduced)
    where = choice.why.get(row, "")
    count = (program.values[table].shape or ("?",))[0]
    return (
        f"{where + ': ' if where else ''}the {count} matrices of '{table.name}' are shared by {choice.num_shards(row)} ranks, and ids pick "
        f"from all of them: bytes {added} are added up over the ranks; a cut inside of each matrix is cheaper: {better}"
    )


def _between(node: ir.Node, product: ir.Node) -> set[ir.Value]:
    """The values computed from looked-up matrices up to their product."""
    found = {*node.outputs}
    while node is not product:
        node = next(user for user, _ in node.outputs[0].uses())
        found.update(node.outputs if node is not product else ())
    return found


def _reduced(program: Sharded, instance: NodeOnGroup) -> list[ir.Value]:
    """The values at which the partial sums of a node are reduced."""
    reduced: list[ir.Value] = []
    values = list(instance.node.outputs)
    while values:
        value = values.pop()
        readers = [(program.choices.get(NodeOnGroup(node, instance.group)), node, k) for node, k in value.uses()]
        if not value.is_graph_output() and readers and all(one and k in one.partial for one, _, k in readers):
            values += [out for _, node, _ in readers for out in node.outputs if out.name and out not in values]
        elif value not in reduced:
            reduced.append(value)
    return reduced


def _follows(node: ir.Node | None, products: set[ir.Node]) -> bool:
    """Whether a node is one of `products`, or at most `_FURTHEST` nodes after one."""
    behind = set() if node is None else {node}
    for _ in range(_FURTHEST + 1):
        if not behind.isdisjoint(products):
            return True
        made = (value.producer() for one in behind for value in one.inputs if value is not None)
        behind = {producer for producer in made if producer is not None}
    return False
