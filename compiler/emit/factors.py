"""The factors of the nodes of rank files (`partc.factors`): the op table's facts about each node, for checks of shard positions.

A node of the model has the letters of its unsharded operands. A node that a rule or a gradient has written is known only by its local
operands, in which a dim of 1 may be one of several shards, or broadcast: so the letters of such dims are left out. The dims of a Reshape
have letters if they are the same at the front and at the end, and not next to a dim of 1: in [8] -> [1, 8] the shard may be that of either
dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from partc.compiler.ir.programs import Compute, TaskKind, Value
from partc.compiler.ops.node import LETTERS
from partc.compiler.ops.notation import replicated_rule
from partc.compiler.ops.registry import Entry, entry_of, rule_of
from partc.compiler.ops.rule import WHOLE, Rule
from partc.runtime.artifact.format import FACTORS, REDUCTIONS, SUM
from partc.runtime.artifact.graph.factors import Factors

Typed = tuple[int, tuple[int | str | None, ...]]
"""The element type and the dims of a value."""
_ADDED = 2
"""The operand of Gemm that is added."""
_FEW = 64


class NodeFactors:
    """The texts of the factors of a program's nodes; `types`: the types of values that have no type of their own."""

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self._opsets = opsets
        self.types: dict[Value, onnx.TypeProto] = {}
        self._entries: dict[tuple[str, str], Entry | None] = {}
        self._typed: dict[Value, Typed | None] = {}
        self._own: dict[ir.Node, str] = {}
        self._texts: dict[int, tuple[Rule, str]] = {}
        """Maps the id of a rule, which equal nodes share, to the rule and its text."""
        self._known: dict[Hashable, str] = {}

    def of(self, step: Compute) -> str:
        """Returns the text of a node; empty if nothing is known of it."""
        node, source = step.node, step.source
        if FACTORS in node.metadata_props:
            return node.metadata_props[FACTORS]
        key = node.domain, node.op_type
        if key not in self._entries:
            entry = entry_of(node)
            says = entry is not None and entry.notation.factors and entry.notation.keeps_dims
            self._entries[key] = entry if says else None
        entry = self._entries[key]
        if entry is None:
            return ""
        if _is_own(step):
            if source not in self._own:
                rule = rule_of(source)
                if id(rule) not in self._texts:
                    unknown = any(one is not None and one.shape is None for one in (*source.inputs, *source.outputs))
                    self._texts[id(rule)] = rule, "" if unknown else _text(entry, rule)
                self._own[source] = self._texts[id(rule)][1]
            return self._own[source]
        return self._local(entry, step)

    def _local(self, entry: Entry, step: Compute) -> str:
        """Returns the text of a node that is known by its local operands."""
        node, key = step.node, list[Hashable]()
        types: list[Typed | None] = []
        for value in (*step.inputs, *step.outputs):
            if value is None:
                types.append(None)
                key.append(None)
                continue
            if value not in self._typed:
                self._typed[value] = self._type(value)
            if (typed := self._typed[value]) is None:
                return ""
            types.append(typed)
            key.append(typed)
            if isinstance(constant := value.constant, np.ndarray) and constant.size <= _FEW:
                key.append(constant.tobytes())
        key += [node.op_type, node.domain, len(step.inputs)]
        for name, attribute in node.attributes.data.items():
            key += (name, attribute.value if attribute.type in _PLAIN else id(attribute))
        known = tuple(key)
        if known not in self._known:
            self._known[known] = _text(entry, local_rule(self._alone(step, types), step.source))
        return self._known[known]

    def _type(self, value: Value) -> Typed | None:
        if value.constant is not None:
            return ir.DataType.from_numpy(value.constant.dtype).value, tuple(value.constant.shape)
        if value.of is not None and value.of.dtype is not None and value.shape is not None:
            return value.of.dtype.value, tuple(value.shape)
        if (kind := self.types.get(value)) is None or not kind.tensor_type.HasField("shape"):
            return None
        dims = [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in kind.tensor_type.shape.dim
        ]
        return kind.tensor_type.elem_type, tuple(dims)

    def _alone(self, step: Compute, types: Sequence[Typed | None]) -> ir.Node:
        """Returns a copy of an op's node over values of these types."""
        operands = list[ir.Value | None]()
        for value, typed in zip((*step.inputs, *step.outputs), types, strict=True):
            if value is None or typed is None:
                operands.append(None)
                continue
            fixed = value.constant if isinstance(value.constant, np.ndarray) else None
            kind = ir.TensorType(ir.DataType(typed[0]))
            tensor = None if fixed is None else ir.tensor(fixed)
            operands.append(ir.Value(name=str(len(operands)), shape=ir.Shape(typed[1]), type=kind, const_value=tensor))
        count, node = len(step.inputs), step.node
        outputs = [ir.Value(name="") if one is None else one for one in operands[count:]]
        version = self._opsets.get(node.domain, 1)
        attributes = [ir.Attr(one.name, one.type, one.value) for one in node.attributes.data.values()]
        return ir.Node(node.domain, node.op_type, operands[:count], attributes, outputs=outputs, version=version)


_PLAIN = frozenset(ir.AttributeType[name] for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS"))


def _is_own(step: Compute) -> bool:
    """Whether an op is a node of the model whose operands are shards of the model's values; a copy made by an Expand may replace one."""
    node, source = step.node, step.source
    if step.task is not TaskKind.FORWARD and not step.again:
        return False
    if node is not source and (
        (node.op_type, node.domain, len(step.inputs)) != (source.op_type, source.domain, len(source.inputs))
    ):
        return False
    if len(step.outputs) != len(source.outputs):
        return False
    pairs = (*zip(step.inputs, source.inputs, strict=False), *zip(step.outputs, source.outputs, strict=True))
    return not [one for one, whole in pairs if one is not None and one.of is not whole]


def local_rule(node: ir.Node, source: ir.Node) -> Rule:
    """Returns the rule of a node known by its local operands, as far as it holds for any unsharded operands; `source`: the model's node."""
    numbers = [name for name, attribute in source.attributes.items() if attribute.type is ir.AttributeType.INT]
    counts = [name for name in numbers if name not in ("axis", "tokens")]
    if any(source.attributes.get_int(name, 1) > 1 == node.attributes.get_int(name, 1) for name in counts):
        return replicated_rule(node)  # a rank may have one of several groups of channels, or heads
    rule, shapes = rule_of(node), [() if one is None or one.shape is None else one.shape.dims for one in node.inputs]
    if node.op_type in ("Reshape", "Flatten"):
        made = node.outputs[0].shape
        letters = _reshaped(shapes[0], () if made is None else made.dims)
        return Rule((letters[0], *rule.inputs[1:]), letters[1:], linear=rule.linear, partial=rule.partial)
    pairs = zip(rule.inputs, shapes, strict=True)
    dims = [(letter, dim) for one, shape in pairs for letter, dim in zip(one or "", shape, strict=False)]
    count = Counter([letter for letter, _ in dims])
    unsure = {letter for letter, dim in dims if dim == 1 and count[letter] > 1}
    entry = entry_of(node)
    if entry is not None and entry.work.kernel == "lookup":
        unsure |= (
            rule.reduce.keys()
        )  # rows of a rank, by ids that count from its first one: a term only where the others are masked
    return _without(rule, unsure)


def _reshaped(old: Sequence[object], new: Sequence[object]) -> tuple[str, str]:
    """Returns letters for the dims at the front and at the end that a Reshape leaves unchanged, except next to a dim of 1."""
    front, most = 0, min(len(old), len(new))
    while front < most and old[front] == new[front] != 1:
        front += 1
    back = 0
    while back < most - front and old[-1 - back] == new[-1 - back] != 1:
        back += 1
    between = (*old[front : len(old) - back], *new[front : len(new) - back])
    beside = 1 if 1 in between else 0
    front, back = max(front - beside, 0), max(back - beside, 0)
    head, tail = LETTERS[:front], LETTERS[front : front + back]
    first, second = (head + WHOLE * (len(dims) - front - back) + tail for dims in (old, new))
    return first, second


def _without(rule: Rule, letters: set[str]) -> Rule:
    """Returns a rule without these letters."""
    if not letters:
        return rule
    hidden = str.maketrans(dict.fromkeys(letters, WHOLE))
    inputs, outputs = (
        tuple([None if one is None else one.translate(hidden) for one in side]) for side in (rule.inputs, rule.outputs)
    )
    reduce = {letter: how for letter, how in rule.reduce.items() if letter not in letters}
    return Rule(inputs, outputs, reduce, rule.replicated, rule.linear, rule.partial)


def _text(entry: Entry, rule: Rule) -> str:
    """Returns a rule as the artifact's text; empty if the operands do not have the ranks of the op's entry."""
    if not rule.factors and not rule.linear and entry.notation.linear:
        return ""
    known = {letter for letter in rule.factors if rule.reduce.get(letter, SUM) in REDUCTIONS}
    sides = (*rule.inputs, *rule.outputs)
    rule = _without(rule, {letter for one in sides if one for letter in one} - known - {WHOLE})
    linear = tuple([k for row in rule.partial_inputs for k in row])
    if entry.op_type == "Gemm" and not linear:
        linear = (_ADDED,)  # to a running sum of terms a product that is a term is added
    return str(
        Factors(rule.inputs, rule.outputs, rule.reduce, linear, rule.linear == "joint", entry.rising, entry.moves)
    )
