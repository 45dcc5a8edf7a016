"""Gradients: a rule an op, in plain ONNX ops, and the engine that runs rules, undoes broadcasting and adds up.

A rule takes the cotangents of its node's outputs and the node's inputs, all as names, and gives one name an input. It sees one
node on one rank, whose shapes are those of the shards; it never speaks of broadcasting, layouts or ranks.

    @gradient("MatMul")
    def matmul_gradient(g: Gradients, dy: str, a: str, b: str) -> tuple[str, str]:
        \"\"\"dA = dY Bt, dB = At dY.\"\"\"
        return g.MatMul(dy, g.mT(b)), g.MatMul(g.mT(a), dy)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient, extend
from partc.compiler.autodiff.scope import Scope
from partc.compiler.ir.graph import captured
from partc.compiler.ops.local import Shape, likeness
from partc.compiler.ops.node import Dim, same

GradientRule = Callable[..., "str | Sequence[str | None] | None"]

__all__ = [
    "Backward",
    "Bodies",
    "Cotangents",
    "GradientBuilder",
    "NoGradient",
    "body_gradient",
    "differentiate",
    "differentiate_nodes",
    "extend",
    "gradient",
    "is_differentiable",
    "no_gradient",
    "stops_gradient",
    "unbroadcast",
]


@dataclass
class Bodies:
    """What a node with bodies reads from around them: `names` by which names of their own, `wanted` those whose cotangents are asked for.

    A rule may put a node in the place of the forward one, with more outputs behind its own.
    """

    names: Mapping[str, str]
    wanted: Sequence[str]
    forward: ir.Node | None = None


Cotangents = Sequence[tuple[str, str]]
"""Names of what a node reads, by itself or in its bodies, each with that of a cotangent."""
BodyRule = Callable[[GradientBuilder, Sequence["str | None"], Bodies], Cotangents]

_RULES: dict[tuple[str, str], GradientRule] = {}
_BODIES: dict[str, BodyRule] = {}
_OUTPUTS: dict[tuple[str, str], int] = {}
_NONE: set[tuple[str, str]] = set()


def gradient(*op_types: str, domain: str = "", outputs: int = 0) -> Callable[[GradientRule], GradientRule]:
    """Registers the decorated function as the gradient of ops; it takes a cotangent for each output, or for the first `outputs`."""

    def decorate(rule: GradientRule) -> GradientRule:
        for op_type in op_types:
            if (domain, op_type) in _RULES:
                raise ValueError(f"{op_type} has two gradients")
            _RULES[domain, op_type] = rule
            _OUTPUTS[domain, op_type] = outputs
        return rule

    return decorate


def body_gradient(op_type: str) -> Callable[[BodyRule], BodyRule]:
    """Registers the decorated function as the gradient of an op with bodies."""

    def decorate(rule: BodyRule) -> BodyRule:
        _BODIES[op_type] = rule
        return rule

    return decorate


def no_gradient(*op_types: str, domain: str = "") -> None:
    """Says of ops that nothing flows back through them: what they make does not change with small changes of what they read."""
    _NONE.update((domain, op_type) for op_type in op_types)


def is_differentiable(domain: str, op_type: str) -> bool:
    """Whether the op has a gradient rule."""
    return (domain, op_type) in _RULES or (not domain and op_type in _BODIES)


def stops_gradient(domain: str, op_type: str) -> bool:
    """Whether the op's gradient is known to be nothing."""
    return (domain, op_type) in _NONE


@dataclass
class Backward:
    """What differentiation emits.

    `gradients`: by the name of an input, its cotangent. `forward`: the forward nodes, with those outputs added that a rule asked for.
    `early`: nodes that belong after them. `nodes`: the backward pass, in order. `constants`: of both.
    """

    gradients: dict[str, str]
    forward: list[ir.Node]
    scope: Scope = field(repr=False)

    def is_like(self, other: Backward) -> bool:
        """Whether both emit the same."""
        mine, theirs = ([likeness(node) for node in (*one.forward, *one.early, *one.nodes)] for one in (self, other))
        if mine != theirs or (self.gradients, self.constants.keys()) != (other.gradients, other.constants.keys()):
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
    domain = "" if node.domain == "ai.onnx" else node.domain
    if (domain, node.op_type) in _NONE:
        return [None] * len(node.inputs), node
    rule = _RULES.get((domain, node.op_type))
    if rule is None:
        raise NoGradient(f"{node.op_type} has no gradient")
    g = GradientBuilder(scope, node, wanted)
    count = _OUTPUTS[domain, node.op_type] or len(node.outputs)
    beyond = [k for k, dy in enumerate(cotangents) if k >= count and dy is not None]
    if beyond:
        raise NoGradient(f"{node.op_type} has no gradient of its output {beyond[0]}")
    given = [*cotangents, *[None] * count][:count]
    names = [None if value is None else value.name or None for value in node.inputs]
    found = rule(g, *given, *names)
    per_input = [found] if found is None or isinstance(found, str) else list(found)
    per_input = [*per_input, *[None] * len(names)][: len(names)]
    made: list[str | None] = []
    for k, (dx, x) in enumerate(zip(per_input, names, strict=True)):
        made.append(None if dx is None or x is None or not g.wants(k) else unbroadcast(g, dx, x))
    return made, extend(node, g.kept)


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
) -> Backward:
    """The gradient of a list of nodes in order: of their outputs' `cotangents` those of the `wanted` inputs.

    `values` say types and shapes where the nodes' own do not, `shapes` those of shards. `scope` knows the cotangents; without one they
    are taken to have the shapes of their primals. Of a value that several nodes read, the cotangents are added. `around`: the names
    here of what bodies read from around them, where they are not the bodies' own.
    """
    scope = scope or Scope()
    scope.know(values, shapes, constants)
    for node in nodes:
        scope.know([value for value in node.inputs if value is not None], shapes, constants)
        names = ["" if value is None else str(value.name) for value in node.inputs]
        copy = scope.node(
            node.op_type, names, [v.name or "" for v in node.outputs], list(node.attributes.values()), node.domain
        )
        scope.infer(copy)
        scope.know(list(node.outputs), shapes)
        for out in copy.outputs:
            held = scope.value(out.name or "")
            held.type = held.type or out.type
            held.shape = out.shape if held.shape is None or scope.is_doubtful(copy) else held.shape
    for primal, cotangent in cotangents.items():
        seed, value = scope.value(cotangent), scope.value(primal)
        seed.type = seed.type or value.type
        seed.shape = seed.shape if seed.shape is not None else value.shape
    needed = set(wanted)
    for node in nodes:
        read = (*(value.name for value in node.inputs if value is not None), *_captures(node, around or {}))
        if any(one in needed for one in read) and not _stops(node):
            needed.update(value.name for value in node.outputs if value.name)
    terms: dict[str, list[str]] = {primal: [cotangent] for primal, cotangent in cotangents.items()}
    forward: list[ir.Node] = []
    for node in reversed(nodes):
        flows = [value is not None and value.name in needed for value in node.inputs]
        dys = [_total(scope, str(made.name), terms) if made.name else None for made in node.outputs]
        inner = [name for name in _captures(node, around or {}) if name in needed]
        if not (any(flows) or inner) or all(dy is None for dy in dys) or _stops(node):
            forward.append(node)
            continue
        if _bodies(node):
            found, extended = _through_bodies(node, dys, flows, Bodies(around or {}, inner), scope)
            forward.append(extended)
            for primal, cotangent in found:
                terms.setdefault(primal, []).append(cotangent)
            continue
        dxs, extended = differentiate(node, dys, flows, scope)
        forward.append(extended)
        for operand, dx in zip(node.inputs, dxs, strict=True):
            if dx is not None and operand is not None:
                terms.setdefault(str(operand.name), []).append(dx)
    totals = {name: _total(scope, name, terms) for name in wanted}
    return Backward({name: dx for name, dx in totals.items() if dx is not None}, forward[::-1], scope)


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


def _total(scope: Scope, name: str, terms: dict[str, list[str]]) -> str | None:
    """The cotangent of a value: its terms added, once."""
    found = terms.get(name)
    if not found:
        return None
    if len(found) > 1:
        total = scope.derived(f"{name}.grad")
        scope.add(scope.node("Add" if len(found) == 2 else "Sum", found, [total]))
        terms[name] = [total]
    return terms[name][0]


def _stops(node: ir.Node) -> bool:
    return stops_gradient("" if node.domain == "ai.onnx" else node.domain, node.op_type)


def _through_bodies(
    node: ir.Node, dys: Sequence[str | None], wanted: Sequence[bool], inside: Bodies, scope: Scope
) -> tuple[Cotangents, ir.Node]:
    """The cotangents of what a node and its bodies read; and the node, with what its gradient asks it for."""
    rule = _BODIES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None:
        raise NoGradient(f"a gradient does not flow into the body of {node.op_type}")
    found = rule(GradientBuilder(scope, node, wanted), dys, inside)
    return found, inside.forward or node


def _captures(node: ir.Node, names: Mapping[str, str]) -> list[str]:
    """What the bodies of the node read from around it, by the names that these have there."""
    found = (value.name or "" for body in _bodies(node) for value in captured(body))
    return list(dict.fromkeys(names.get(name, name) for name in found))


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]


def _is_one(dim: Dim) -> bool:
    return isinstance(dim, int) and dim == 1
