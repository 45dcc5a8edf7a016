"""Finds the dims of a model that are sharded together: dims with the same letter in the op table's rules, from node to node.

The columns of an up projection, the hidden units of an activation of them, and the rows of the down projection are one set of linked dims:
sharding one shards all. A set can be sharded if no node needs one of its dims unsharded, and only products with weights sum over it.

Weights that ids select, as a router selects experts, count as weights: all this holds for a product with them.

    up [192, 768]   h [batch, seq, 768]   gelu(h) [batch, seq, 768]   down [768, 192]      768 is made by up, summed over by down
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.dims.expression import facts_of
from partc.compiler.ir.program import Typed
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.rewrite.class_losses import IS_LOSS

Place = tuple[ir.Value, int]
_CACHE_DIMS = 4
_MOVING = frozenset(("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))


@dataclass
class Linked:
    """Dims that are sharded together, and the nodes that read or make them.

    `producers`: products whose weight has the dim, in order; `summed`: products that sum over it. `obstacles`: texts of the reasons for
    which it cannot be sharded at all. `units`: numbers besides the dims themselves that the shards must divide.
    """

    places: list[Place] = field(default_factory=list)
    producers: list[ir.Node] = field(default_factory=list)
    summed: list[ir.Node] = field(default_factory=list)
    nodes: dict[ir.Node, str] = field(default_factory=dict)
    units: set[int] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)

    @property
    def weights(self) -> list[ir.Value]:
        """The distinct weights that have such a dim."""
        return list(dict.fromkeys(value for value, _ in self.places if value.is_initializer()))

    @property
    def bytes(self) -> int:
        """The bytes of these weights."""
        return sum(value.const_value.nbytes for value in self.weights if value.const_value is not None)

    def size(self, program: Typed) -> int | str:
        """Returns the size of the dim in the first weight that has it, else in any value."""
        value, dim = next((place for place in self.places if place[0].is_initializer()), self.places[0])
        shape = program.values[value].shape
        return shape[dim] if shape is not None else "?"

    def heads_to_repeat(self, program: Typed, shards: int) -> int:
        """Returns the number of heads of the model's input caches, if it is less than the shards and divides them; else 0."""
        pasts = [(program.values[value].shape, dim) for value, dim in self.places if value.is_graph_input()]
        heads = {shape[dim] for shape, dim in pasts if shape is not None and len(shape) == _CACHE_DIMS}
        found = next(iter(heads)) if len(heads) == 1 else 0
        return found if isinstance(found, int) and 0 < found < shards and shards % found == 0 else 0

    def indivisible(self, program: Typed, shards: int, repeats: bool = False) -> str:
        """Returns a text about a dim that has no equal shards, or ""; `repeats`: whether caches' heads may be repeated."""
        known = {name: info.facts for name, info in program.symbols.items()}
        repeated = self.heads_to_repeat(program, shards) if repeats else 0
        for value, dim in self.places:
            shape = program.values[value].shape
            size = shape[dim] if shape is not None else None
            if size is None or (size != repeated and not facts_of(size, known).divisible_by(shards)):
                return (
                    f"dim {dim} of '{value.name}' ({'unknown' if size is None else size}) is not divisible by {shards}"
                )
        wrong = next((unit for unit in sorted(self.units) if unit % shards and unit != repeated), None)
        return "" if wrong is None else f"{wrong} heads or groups are not divisible by {shards}"


def linked_dims(program: Typed) -> list[Linked]:
    """Returns all sets of linked dims that have a weight, in the order of the graph."""
    work = _Links(program)
    for node in program.model.graph:
        work.add(node)
    return work.found()


class _Links:
    def __init__(self, program: Typed) -> None:
        self.program = program
        self.parent: dict[Place, Place] = {}
        self.constants: set[ir.Value] = set(program.model.graph.initializers.values())
        self.picked: set[ir.Value] = set()
        self.uses: list[tuple[Place, ir.Node, str, Rule]] = []
        self.obstacles: list[tuple[Place, str]] = []

    def root(self, place: Place) -> Place:
        """Returns the place that represents a set."""
        path = []
        while (up := self.parent.setdefault(place, place)) != place:
            path.append(place)
            place = up
        for each in path:
            self.parent[each] = place
        return place

    def add(self, node: ir.Node) -> None:
        """Links the dims of a node's operands."""
        rule = rule_of(node)
        if all(value in self.constants for value in self.program.reads[node]):
            self.constants.update(node.outputs)
        elif self._picks(node):
            self.picked.update(node.outputs)
        first: dict[str, Place] = {}
        for place, letter in self._lettered(node, rule):
            self.root(place)
            if letter == WHOLE:
                self.obstacles.append((place, f"{node.op_type} ({self.program.paths[node]}) needs it whole"))
                continue
            if letter in first:
                one, other = self.root(first[letter]), self.root(place)
                self.parent[other] = one
            first.setdefault(letter, place)
        for letter, place in first.items():
            self.uses.append((place, node, letter, rule))
        inputs = {value for value in node.inputs if value is not None}
        for value in self.program.reads[node]:
            if value not in inputs:
                for dim in range(len(self.program.values[value].shape or ()) if value in self.program.values else 0):
                    path = self.program.paths[node]
                    self.obstacles.append(((value, dim), f"a body of {node.op_type} ({path}) reads it whole"))

    def _lettered(self, node: ir.Node, rule: Rule) -> Iterator[tuple[Place, str]]:
        """Yields the dims of a node's operands that are larger than 1, with their letters."""
        for letters, value in (
            *zip(rule.inputs, node.inputs, strict=False),
            *zip(rule.outputs, node.outputs, strict=False),
        ):
            shape = self.program.values[value].shape if value is not None and value in self.program.values else None
            if value is None or letters is None or shape is None or len(shape) != len(letters):
                continue
            for dim, letter in enumerate(letters):
                if shape[dim] != 1:
                    yield (value, dim), letter

    def _picks(self, node: ir.Node) -> bool:
        """Whether a node selects matrices of a weight that has more dims, or moves elements of such matrices."""
        source = node.inputs[0] if node.inputs else None
        if source is None or node.domain not in ("", "ai.onnx"):
            return False
        if source in self.picked:
            return node.op_type in _MOVING
        shape = source.shape
        return (
            node.op_type in ("Gather", "GatherND") and source in self.constants and shape is not None and len(shape) > 2
        )

    def found(self) -> list[Linked]:
        """Returns the sets that have a weight."""
        sets: dict[Place, Linked] = {}
        for place in list(self.parent):
            sets.setdefault(self.root(place), Linked()).places.append(place)
        for place, node, letter, rule in self.uses:
            one = sets.setdefault(self.root(place), Linked())
            one.nodes.setdefault(node, letter)
            self._use(one, node, letter, rule)
        for place, obstacle in self.obstacles:
            if (root := self.root(place)) in sets:
                sets[root].obstacles.append(obstacle)
        return [one for one in sets.values() if one.weights]

    def _is_weight(self, value: ir.Value) -> bool:
        return value in self.constants or value in self.picked

    def _use(self, linked: Linked, node: ir.Node, letter: str, rule: Rule) -> None:
        path = self.program.paths[node]
        if letter not in rule.factors:
            linked.obstacles.append(f"{node.op_type} ({path}) needs it whole")
        if unit := rule.units.get(letter, 0):
            linked.units.add(unit)
        if not self.picked.isdisjoint(node.outputs):
            return
        operands = [(v, own) for v, own in zip(node.inputs, rule.inputs, strict=False) if v is not None and own]
        products = [v for v, own in operands if self._is_weight(v) and letter in own and len(own) > 1]
        others = [own for v, own in operands if not self._is_weight(v)]
        is_in_output = any(letter in letters for letters in rule.outputs if letters)
        if rule.reduce.get(letter) == "":
            return  # nothing is summed: every rank knows the result, as Shape the sizes
        if (
            not is_in_output and not products and others and IS_LOSS not in node.meta
        ):  # whose sums are a number a position
            linked.obstacles.append(f"{node.op_type} ({path}) sums over it")
        elif not is_in_output and products and others:
            common = any(rule.reduce.get(each) for own in others for each in own)
            if not common or any(letter in own for own in others):  # a product by expert sums over no experts
                linked.summed.append(node)
        elif is_in_output and products and others and not any(letter in letters for letters in others):
            linked.producers.append(node)
