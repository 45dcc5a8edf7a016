"""Gradients: the engine that runs the rules of the op table on a list of nodes, reduces over broadcast dims and sums cotangents; it
contains no rule of any op.

A rule takes the cotangents of its node's outputs and the node's inputs, all as names, and gives one name an input. It sees one node on one
rank, whose shapes are those of the shards; it never speaks of broadcasting, layouts or ranks.

    @matmul.gradient
    def _(g: GradientBuilder, dy: str, a: str, b: str) -> tuple[str, str]:
        return g.MatMul(dy, g.mT(b)), g.MatMul(g.mT(a), dy)

A list of nodes is differentiated in three walks: forwards the shapes of all values are inferred, forwards again the values are marked
through which a gradient flows, and backwards the rules are run.

Broadcasting undone: the cotangent of an operand is summed over what the operand was repeated along.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient, extend
from partc.compiler.autodiff.scope import Scope
from partc.compiler.ir.graph import bodies, captured_by, name_of, operand_name, operands_of
from partc.compiler.ir.value_info import Shape
from partc.compiler.ops.node import Dim, node_key, same
from partc.compiler.ops.registry import entry_of, looks_up_rows, stops_gradient


def unbroadcast(g: GradientBuilder, dx: str, x: str) -> str:
    """The cotangent `dx` summed over the dims along which `x` was broadcast, in the shape of `x`."""
    have, want = g.shape(dx), g.shape(x)
    if have is not None and want is not None:
        lead = len(have) - len(want)
        pairs = list(zip(have[lead:], want, strict=True)) if lead >= 0 else []
        if lead >= 0 and all(same(a, b) or _is_one(a) or isinstance(b, int) for a, b in pairs):
            spread = [lead + k for k, (a, b) in enumerate(pairs) if _is_one(b) and not same(a, b)]
            dx = g.sum(dx, spread, keepdims=True)
            if not want:
                return g.sum(dx, list(range(lead)))
            for axis in reversed(range(lead)):  # onnxruntime is far slower at two leading axes at once
                dx = g.sum(dx, [axis])
            return dx
    shape, spread_shape = g.shape_of(x), g.shape_of(dx)
    if have is None or want is None:
        ranks = g.Sub(g.Shape(spread_shape), g.Shape(shape))
        ones = g.ConstantOfShape(ranks, value=ir.tensor(np.ones(1, np.int64)))
        padded = g.Concat(ones, shape, axis=0)
    else:
        lead = len(have) - len(want)
        padded = g.Concat(g.constant(np.ones(lead, np.int64)), shape, axis=0) if lead else shape
    one = g.constant(1)
    was_spread = g.And(g.Equal(padded, one), g.Not(g.Equal(spread_shape, one)))
    axes = g.reshape(g.NonZero(was_spread), [-1])
    total = g.ReduceSum(dx, axes, keepdims=1, noop_with_empty_axes=1)
    return g.Reshape(total, shape, allowzero=1)


def _is_one(dim: Dim) -> bool:
    return isinstance(dim, int) and dim == 1


@dataclass
class Bodies:
    """What the bodies of a node read from around it: `names` maps their names to those here, `requested` need a cotangent.

    A rule may put a node in the place of the forward one, with more outputs behind its own.
    """

    names: Mapping[str, str]
    requested: Sequence[str]
    forward: ir.Node | None = None


@dataclass(frozen=True)
class RowGradient:
    """The gradient of a table as rows: `rows[i]` is added to the row `ids[i]`; the same id may stand there several times."""

    ids: str
    rows: str


Cotangents = Sequence[tuple[str, str]]
"""Names of what a node reads, by itself or in its bodies, each with that of a cotangent."""


@dataclass
class Backward:
    """What differentiation emits.

    `gradients`: by the name of an input, its cotangent; `by_rows` those that are asked for as rows. `forward`: the forward nodes, with
    those outputs added that a rule asked for.
    `early`: nodes that belong after them. `nodes`: the backward pass, in order. `constants`: of both.
    """

    gradients: dict[str, str]
    forward: list[ir.Node]
    scope: Scope = field(repr=False)
    by_rows: dict[str, RowGradient] = field(default_factory=dict)

    def is_like(self, other: Backward) -> bool:
        """Whether both emit the same."""
        mine, theirs = ([node_key(node) for node in (*one.forward, *one.early, *one.nodes)] for one in (self, other))
        if mine != theirs or (self.gradients, self.constants.keys()) != (other.gradients, other.constants.keys()):
            return False
        if self.by_rows != other.by_rows:
            return False
        pairs = ((one, other.constants[name]) for name, one in self.constants.items())
        return all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in pairs)

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes of the backward pass, in order."""
        return self.scope.nodes

    @property
    def early(self) -> list[ir.Node]:
        """Nodes of primals alone, to be run with the forward pass."""
        return self.scope.early

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """Constants that the nodes read."""
        return self.scope.constants


def differentiate(
    node: ir.Node, cotangents: Sequence[str | None], wanted: Sequence[bool], scope: Scope
) -> tuple[list[str | None], ir.Node]:
    """The cotangents of a node's inputs, one an input, in their shapes, and the node with the outputs that they ask for.

    `scope` knows the operands and the cotangents. Raises NoGradient where the op has no rule.
    """
    entry = entry_of(node)
    if stops_gradient(node):
        return [None] * len(node.inputs), node
    if entry is None or entry.gradients.rule is None:
        raise NoGradient(f"{node.op_type} has no gradient")
    g = GradientBuilder(scope, node, wanted)
    count = entry.gradients.outputs or len(node.outputs)
    beyond = [k for k, dy in enumerate(cotangents) if k >= count and dy is not None]
    if beyond:
        raise NoGradient(f"{node.op_type} has no gradient of its output {beyond[0]}")
    given = [*cotangents, *[None] * count][:count]
    names = [None if value is None else value.name or None for value in node.inputs]
    found = entry.gradients.rule(g, *given, *names)
    per_input = [found] if found is None or isinstance(found, str) else list(found)
    per_input = [*per_input, *[None] * len(names)][: len(names)]
    made: list[str | None] = []
    for k, (dx, x) in enumerate(zip(per_input, names, strict=True)):
        made.append(None if dx is None or x is None or not g.wants(k) else unbroadcast(g, dx, x))
    return made, extend(node, g.handles)


def differentiate_nodes(
    nodes: Sequence[ir.Node],
    cotangents: Mapping[str, str],
    wanted: Collection[str],
    *,
    values: Iterable[ir.Value] = (),
    shapes: Mapping[str, Shape | None] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    scope: Scope | None = None,
    around: Mapping[str, str] | None = None,
    by_rows: Collection[str] = (),
) -> Backward:
    """The gradient of a list of nodes in order: of their outputs' `cotangents` those of the `wanted` inputs.

    `values` say types and shapes where the nodes' own do not, `shapes` those of shards. `scope` knows the cotangents; without one they
    are taken to have the shapes of their primals. Of a value that several nodes read, the cotangents are added. `around`: the names
    here of what bodies read from around them, where they are not the bodies' own. `by_rows`: those of the wanted that nodes look up, whose
    gradient is given as rows.
    """
    scope = scope or Scope()
    scope.know(values, shapes, constants)
    _infer(nodes, shapes, constants, scope)
    for primal, cotangent in cotangents.items():  # one of which nothing is known has type and shape of its primal
        seed, value = scope.value(cotangent), scope.value(primal)
        seed.type = seed.type or value.type
        seed.shape = seed.shape if seed.shape is not None else value.shape
    names = around or {}
    inner = {
        node: list(dict.fromkeys(names.get(name_of(value), name_of(value)) for value in captured_by(node)))
        for node in nodes
    }
    needed = _needed(nodes, wanted, inner)
    contributions = {primal: [cotangent] for primal, cotangent in cotangents.items()}
    forward: list[ir.Node] = []
    looked_up: dict[str, list[RowGradient]] = {}
    for node in reversed(nodes):
        flows = [value is not None and value.name in needed for value in node.inputs]
        dys = [_total(scope, name_of(made), contributions) if made.name else None for made in node.outputs]
        inside = Bodies(around or {}, [name for name in inner[node] if name in needed])
        if not (any(flows) or inside.requested) or all(dy is None for dy in dys) or stops_gradient(node):
            forward.append(node)
            continue
        if looks_up_rows(node) and (table := operand_name(node.inputs[0])) in by_rows:
            forward.append(node)
            looked_up.setdefault(table, []).append(_by_rows(node, dys[0], scope))
            continue
        cotangents_of_inputs, extended = _reversed(node, dys, flows, inside, scope)
        forward.append(extended)
        for primal, cotangent in cotangents_of_inputs:
            contributions.setdefault(primal, []).append(cotangent)
    totals = {name: _total(scope, name, contributions) for name in wanted}
    gradients = {name: dx for name, dx in totals.items() if dx is not None}
    found_rows = {name: _appended(found, scope) for name, found in looked_up.items()}
    return Backward(gradients, forward[::-1], scope, found_rows)


def _by_rows(node: ir.Node, dy: str | None, scope: Scope) -> RowGradient:
    """The gradient of the table that a node looks up, as rows."""
    entry = entry_of(node)
    assert entry is not None
    assert entry.gradients.rows is not None
    return RowGradient(*entry.gradients.rows(GradientBuilder(scope, node, [True]), dy, *map(operand_name, node.inputs)))


def _appended(gradients: Sequence[RowGradient], scope: Scope) -> RowGradient:
    """The rows of several look-ups, one after the other."""
    if len(gradients) == 1:
        return gradients[0]
    axis = ir.convenience.convert_attributes({"axis": 0})
    names = [scope.derived(f"{name}.all") for name in (gradients[0].ids, gradients[0].rows)]
    for name, parts in zip(names, ([one.ids for one in gradients], [one.rows for one in gradients]), strict=True):
        scope.add(scope.node("Concat", parts, [name], axis))
    return RowGradient(*names)


def _infer(
    nodes: Sequence[ir.Node],
    shapes: Mapping[str, Shape | None] | None,
    constants: Mapping[str, np.ndarray] | None,
    scope: Scope,
) -> None:
    """Makes the values that nodes read and make known to `scope`, with types and shapes inferred where the nodes have none."""
    for node in nodes:
        scope.know([value for value in node.inputs if value is not None], shapes, constants)
        inputs, outputs = operands_of(node)
        copy = scope.node(node.op_type, inputs, outputs, list(node.attributes.values()), node.domain)
        scope.infer(copy)
        scope.know(list(node.outputs), shapes)
        for out in copy.outputs:
            known = scope.value(operand_name(out))
            known.type = known.type or out.type
            known.shape = out.shape if known.shape is None or scope.is_doubtful(copy) else known.shape


def _needed(nodes: Sequence[ir.Node], wanted: Collection[str], inner: Mapping[ir.Node, Sequence[str]]) -> set[str]:
    """The values that depend on a wanted one through ops that let a gradient through: those that need a cotangent."""
    needed = set(wanted)
    for node in nodes:
        read = (*(value.name for value in node.inputs if value is not None), *inner[node])
        if any(one in needed for one in read) and not stops_gradient(node):
            needed.update(value.name for value in node.outputs if value.name)
    return needed


def _reversed(
    node: ir.Node, dys: Sequence[str | None], flows: Sequence[bool], inside: Bodies, scope: Scope
) -> tuple[Cotangents, ir.Node]:
    """The cotangents of what a node and its bodies read, and the node with the outputs that its gradient asks for."""
    if not bodies(node):
        dxs, extended = differentiate(node, dys, flows, scope)
        pairs = zip(node.inputs, dxs, strict=True)
        return [(name_of(x), dx) for x, dx in pairs if dx is not None and x is not None], extended
    entry = entry_of(node)
    if entry is None or entry.gradients.body is None:
        raise NoGradient(f"a gradient does not flow into the body of {node.op_type}")
    found = entry.gradients.body(GradientBuilder(scope, node, flows), dys, inside)
    return found, inside.forward or node


def _total(scope: Scope, name: str, contributions: dict[str, list[str]]) -> str | None:
    """The cotangent of a value: what its readers contribute, added once, as `<value>.grad`."""
    found = contributions.get(name)
    if not found:
        return None
    if len(found) > 1:
        total = scope.derived(f"{name}.grad")
        scope.add(scope.node("Add" if len(found) == 2 else "Sum", found, [total]))
        contributions[name] = [total]
    return contributions[name][0]
