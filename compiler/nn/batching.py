"""Rewrites the nodes of one record's computation for all records of a batch, by the op table: a rule of factors is also a rule of batching.

    record  MatMul  mk,kn->mn     of (5, 6) and (6, 4)             all  MatMul  bmk,kn->bmn   of (B, 5, 6) and (6, 4)
    record  Conv    nc..,oc..->no..   of (2, 3, 8, 8)              all  Conv of (B * 2, 3, 8, 8), the records in n

Batched values, which differ from record to record, have the new dim in front. An op is written in the first of three forms that fits:

    new dim    the op's rule on the batched values has a letter for the new dim in all batched operands and in no other, and without
               this letter the rule is that of the op on one record
    merged     the rule has a letter in all batched operands, in all results and in no other operand, along which the op on shards gives
               shards of the result: the records are merged into this dim
    Scan       the op runs in a Scan over the records

So an op that is added to the op table can be batched without code here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx.defs
import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.ir.graph import bodies, captured_by, is_inside, nodes_of
from partc.compiler.ir.value_info import Array
from partc.compiler.ops.node import constant_ints, counted, dims, rank_of
from partc.compiler.ops.registry import draws, entry_of, rule_of
from partc.compiler.ops.rule import OWN, WHOLE, Rule
from partc.runtime.artifact.graph.kernels import host_inputs

_BY_NUMBERS = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
"""Ops whose number of results depends on the values of a record."""
_AXES = {"CumSum": 1, "Pad": 3, "Slice": 3, "Squeeze": 1, "Unsqueeze": 1, "CumProd": 1}
"""Maps ops other than reductions to the operand that names axes."""
_ALIKE = frozenset({"Concat", "GatherElements", "GatherND", "ScatterElements", "ScatterND"})
"""Ops whose operands must all have the new dim: an operand that all records share is repeated."""
_OF_ANY_RANK = frozenset({"FusedMatMul", "Gelu", "MatMulNBits", "QuickGelu", "SimplifiedLayerNormalization"})
"""Ops outside the ONNX standard whose kernels take operands of any rank."""
_ROWS_ALONE = frozenset({"MatMulInteger", "QLinearMatMul"})
"""Ops whose kernels take a batch of matrices only as the left operand."""
_EXACT = ("Gather", "GatherND", "Gemm", "Reshape")
"""Ops whose rule requires a rewrite of the node, except along a dim that passes through unchanged."""


class NotBatchedError(Exception):
    """The fact, the law and the remedy of a node that cannot be computed for several records."""


@dataclass(frozen=True)
class _Form:
    """The changes to a node that runs for all records: its attributes, new constant operands, and dims of 1 to insert after the new dim."""

    attributes: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[int, Array] = field(default_factory=dict)
    inserted: Mapping[int, int] = field(default_factory=dict)
    prefixed: Mapping[int, int] = field(default_factory=dict)
    """Maps operands that are known only at run time to the number to put in front of their numbers."""


class Batch:
    """Writes the nodes of all records; `values` maps each value of one record to that of all, `batched` has those that differ by record."""

    def __init__(self, op: OpBuilder, size: int | ir.SymbolicDim) -> None:
        self.op, self.size = op, size
        self.values: dict[ir.Value, ir.Value] = {}
        self.batched: set[ir.Value] = set()

    def take(self, record: ir.Value, value: ir.Value) -> None:
        """Sets the value of all records for a value of one record; its first dim is the records."""
        self.values[record] = value
        self.batched.add(record)

    def now(self, record: ir.Value | None) -> ir.Value | None:
        """The value of all records for a value of one record; a value from outside stands for itself."""
        return None if record is None else self.values.get(record, record)

    def node(self, node: ir.Node) -> None:
        """Writes a record's node for all records."""
        if self.batched.isdisjoint([*node.inputs, *captured_by(node)]):
            self._plain(node)
            return
        self._refuse_impossible(node)
        if node.op_type in ("Shape", "Size") and node.domain == "":
            self._sizes(node)
        elif node.op_type == "MatMul" and node.domain == "" and 1 in map(rank_of, node.inputs):
            self._product_of_vectors(node)
        elif node.op_type == "Dropout":  # each element draws for itself
            self._write(node, _Form(), [value in self.batched for value in node.inputs], 0)
        elif not self._leading(node) and not self._merged(node):
            self._scanned(node)

    def spread(self, value: ir.Value) -> ir.Value:
        """Repeats a value that all records share, so that its first dim is the records."""
        if value in self.batched:
            return self.values[value]
        now, sizes = self.now(value), [self.size, *(dims(value) or ())]
        target = _vector(self.op, [size for size in sizes if isinstance(size, int)])
        if value.shape is None or not all(isinstance(size, int) for size in sizes):
            some = next(iter(self.batched))
            target = self._joined([self.op.Shape(self.values[some], start=0, end=1), self.op.Shape(now)])
        return self.shaped(self.op.Expand(self.op.Unsqueeze(now, _vector(self.op, [0])), target), value)

    def shaped(self, result: ir.Value, record: ir.Value) -> ir.Value:
        """Gives a value of all records the type of the record's value, and its shape with the new dim."""
        result.type = record.type or result.type
        if record.shape is not None:
            result.shape = ir.Shape([self.size, *record.shape.dims])
        return result

    def _joined(self, parts: Sequence[ir.Value]) -> ir.Value:
        joined: ir.Value = parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0)
        return joined

    def _refuse_impossible(self, node: ir.Node) -> None:
        title = f"{node.op_type} of a record"
        if node.domain == OWN or is_inside(node):
            raise NotBatchedError(
                "a local_map is inside of vmap", "its collectives are of all records", "call vmap in it"
            )
        if any(draws(one) for one in nodes_of([node])) and node.op_type != "Dropout":
            help = "draw the numbers of all records outside of vmap"
            raise NotBatchedError(f"{node.op_type} draws inside of vmap", "each record has numbers of its own", help)
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1:
            law = "its statistics are those of a batch, and a record has none of its own"
            raise NotBatchedError("BatchNormalization in training is inside of vmap", law, "call it outside of vmap")
        if node.op_type in _BY_NUMBERS:
            law = "all records have the same shapes"
            raise NotBatchedError(f"{title} is as long as its numbers say", law, "take a mask in place of it")
        hosted = [k for k in host_inputs(node.domain, node.op_type) if k < len(node.inputs)]
        if not bodies(node) and any(node.inputs[k] in self.batched for k in hosted):
            k = next(k for k in hosted if node.inputs[k] in self.batched)
            law = "sizes, axes and bounds are the same for all records"
            raise NotBatchedError(f"input {k} of {title} differs by record", law, "compute it outside of vmap")

    def _emit(
        self, like: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr], count: int
    ) -> list[ir.Value]:
        """Adds a node of the same module and metadata as `like`, and returns its `count` results."""
        builder = self.op.builder
        outputs = [ir.Value(name=f"vmap.{builder.graph.num_nodes()}.{k}") for k in range(count)]
        node = ir.Node(like.domain, op_type, inputs, attributes, outputs=outputs, name=like.name, version=like.version)
        node.metadata_props.update(like.metadata_props)
        node.meta.update(like.meta)
        builder.add_node(node)
        return outputs

    def _plain(self, node: ir.Node) -> None:
        """Writes the node unchanged: all records share its operands."""
        moved = {value: self.values[value] for value in captured_by(node) if value in self.values}
        attributes = [_reading(attribute, moved) for attribute in node.attributes.values()]
        inputs = [self.now(value) for value in node.inputs]
        results = self._emit(node, node.op_type, inputs, attributes, len(node.outputs))
        for record, made in zip(node.outputs, results, strict=True):
            made.type, made.shape, made.const_value = record.type, record.shape, record.const_value
            self.values[record] = made

    def _sizes(self, node: ir.Node) -> None:
        """Writes a Shape or Size, which is the same for all records."""
        bounds = {name: node.attributes.get_int(name, 0) for name in ("start", "end") if name in node.attributes}
        further = {name: at + 1 if at >= 0 else at for name, at in {"start": 0, **bounds}.items()}
        sizes = self.op.Shape(self.now(node.inputs[0]), **further)
        self.values[node.outputs[0]] = sizes if node.op_type == "Shape" else self.op.ReduceProd(sizes, keepdims=0)

    def _product_of_vectors(self, node: ir.Node) -> None:
        """Writes a product with vectors as one with matrices of one row or column."""
        places = [-2, -1]
        vectors = [rank_of(value) == 1 for value in node.inputs]
        values = []
        for value, place, vector in zip(node.inputs, places, vectors, strict=True):
            assert value is not None
            now = self.values.get(value, value)
            made: ir.Value = self.op.Unsqueeze(now, _vector(self.op, [place])) if vector else now
            values.append(ir.Value(type=value.type, shape=_unsqueezed(value.shape, place) if vector else value.shape))
            self.values[values[-1]] = made
            if value in self.batched:
                self.take(values[-1], self.shaped(made, values[-1]))
        shape = node.outputs[0].shape
        for place, vector in zip(places, vectors, strict=True):
            shape = _unsqueezed(shape, place if place == -1 or not vectors[1] else -1) if vector else shape
        wide = ir.Value(type=node.outputs[0].type, shape=shape)
        product = ir.Node("", "MatMul", values, outputs=[wide], name=node.name, version=node.version)
        product.metadata_props.update(node.metadata_props)
        self.node(product)
        axes = [place for place, vector in zip(places, vectors, strict=True) if vector]
        self.take(
            node.outputs[0], self.shaped(self.op.Squeeze(self.values[wide], _vector(self.op, axes)), node.outputs[0])
        )

    def _leading(self, node: ir.Node) -> bool:
        """Writes the node with the new dim in front, if the op's rule has a letter for it; returns whether it does."""
        form = self._form(node)
        if form is None:
            return False
        batched = [value in self.batched or node.op_type in _ALIKE for value in node.inputs]
        place = self._place(node)
        if not self._fits(node, form, batched, place):
            return False
        self._write(node, form, batched, place)
        return True

    def _place(self, node: ir.Node) -> int:
        """The dim of the results that is the new one: 0, or for a Gather with batched indices the first dim of the indices."""
        if node.op_type != "Gather" or node.inputs[0] in self.batched:
            return 0
        return counted(node.attributes.get_int("axis", 0), rank_of(node.inputs[0]) or 0)

    def _fits(self, node: ir.Node, form: _Form, batched: Sequence[bool], place: int) -> bool:
        """Whether the node's rule for all records is that of one record with a letter for the new dim."""
        record, operands = rule_of(node), []
        for k, (value, differs) in enumerate(zip(node.inputs, batched, strict=True)):
            shape = None if value is None else value.shape
            if value is None or shape is None:
                return False
            if k in form.constants:
                operands.append(_constant(form.constants[k]))
            elif k in form.prefixed:
                (length,) = shape.numpy()
                operands.append(ir.Value(type=value.type, shape=ir.Shape([length + 1])))
            elif differs:
                ones = [1] * form.inserted.get(k, 0)
                operands.append(ir.Value(type=value.type, shape=ir.Shape([self.size, *ones, *shape.dims])))
            else:
                operands.append(value)
        outputs = []
        for value in node.outputs:
            if value.shape is None:
                return False
            sizes = list(value.shape.dims)
            outputs.append(
                ir.Value(name="y", type=value.type, shape=ir.Shape([*sizes[:place], self.size, *sizes[place:]]))
            )
        operands += [_constant(array) for k, array in form.constants.items() if k >= len(node.inputs)]
        attributes = _attributes(node, form.attributes)
        lifted = ir.Node(node.domain, node.op_type, operands, attributes, outputs=outputs, version=node.version)
        try:
            rule = rule_of(lifted)
        except IndexError:  # operands of ranks that the op does not take together
            return False
        finally:
            lifted.resize_inputs(0)  # it is no reader of them
        return _is_lifted(record, rule, batched, form, place)

    def _write(self, node: ir.Node, form: _Form, batched: Sequence[bool], place: int) -> None:
        inputs: list[ir.Value | None] = []
        for k, (value, differs) in enumerate(zip(node.inputs, batched, strict=True)):
            assert value is not None
            if k in form.constants:
                inputs.append(_vector(self.op, form.constants[k]))
            elif k in form.prefixed:
                inputs.append(self._joined([_vector(self.op, [form.prefixed[k]]), self.now(value) or value]))
            elif not differs:
                inputs.append(self.now(value))
            else:
                operand, ones = self.spread(value), form.inserted.get(k, 0)
                inputs.append(self.op.Unsqueeze(operand, _vector(self.op, range(1, ones + 1))) if ones else operand)
        inputs += [_vector(self.op, array) for k, array in form.constants.items() if k >= len(node.inputs)]
        attributes = _attributes(node, form.attributes)
        results = self._emit(node, node.op_type, inputs, attributes, len(node.outputs))
        for record, operand in zip(node.outputs, results, strict=True):
            if place:
                rank = rank_of(record) or 0
                order = [place, *(k for k in range(rank + 1) if k != place)]
                operand.type, shape = record.type or operand.type, record.shape
                operand.shape = None if shape is None else ir.Shape([*shape[:place], self.size, *shape[place:]])
                operand = self.op.Transpose(operand, perm=order)
            self.take(record, self.shaped(operand, record))

    def _form(self, node: ir.Node) -> _Form | None:
        """The changes to a node whose operands have a new first dim; None if they are not known."""
        rank = rank_of(node.inputs[0])
        if rank is None or bodies(node) or (node.domain not in ("", "ai.onnx") and node.op_type not in _OF_ANY_RANK):
            return None
        if node.op_type in _ROWS_ALONE and not self.batched.isdisjoint(node.inputs[1:]):
            return None
        of_data = node.inputs[0] in self.batched or node.op_type in _ALIKE
        attributes = _shifted_axes(node) if of_data else {}
        constants: dict[int, Array] = {}
        prefixed: dict[int, int] = {}
        match node.op_type:
            case "Flatten" | "SequenceConstruct":
                return None
            case "Transpose":
                perm = node.attributes.get_ints("perm") or range(rank - 1, -1, -1)
                attributes["perm"] = [0, *(axis + 1 for axis in perm)]
            case "Einsum":
                equation = _equation(node, [value in self.batched for value in node.inputs])
                if equation is None:
                    return None
                attributes["equation"] = equation
            case "GatherND":
                attributes["batch_dims"] = node.attributes.get_int("batch_dims", 0) + 1
            case "Reshape" | "Expand" | "Tile":
                first = {"Reshape": 0, "Expand": 1, "Tile": 1}[node.op_type]
                numbers, length = constant_ints(node, 1), dims(node.inputs[1])
                if node.op_type == "Reshape" and node.attributes.get_int("allowzero", 0) == 1:
                    return None
                if not length or not isinstance(length[0], int):
                    return None
                if node.op_type == "Expand" and length[0] < rank:
                    if numbers is None:
                        return None
                    numbers = (*[1] * (rank - length[0]), *numbers)
                if numbers is None:
                    prefixed[1] = first
                else:
                    constants[1] = np.array([first, *numbers], np.int64)
                ones = max(0, length[0] - rank) if node.op_type == "Expand" else 0
                return _Form(attributes, constants, {0: ones}, prefixed)
            case _ if node.op_type in _AXES or _is_reduction(node):
                axes = self._axes(node, rank)
                if axes is None:
                    return None
                constants = axes
        return _Form(attributes, constants, self._aligned(node))

    def _axes(self, node: ir.Node, rank: int) -> dict[int, Array] | None:
        """The new constant operands of a node that names axes in an operand; None if only the run knows the axes."""
        k, op_type = _AXES.get(node.op_type, 1), node.op_type
        operand = node.inputs[k] if k < len(node.inputs) else None
        axes = constant_ints(node, k)
        if operand is not None and axes is None:
            return None
        if operand is not None and axes:
            further = np.array([axis + 1 if axis >= 0 else axis for axis in axes], np.int64)
            return {k: further.reshape([]) if rank_of(operand) == 0 else further}
        shape = dims(node.inputs[0]) or ()
        if op_type == "Pad" and (pads := constant_ints(node, 1)) is not None:
            return {1: np.array([0, *pads[:rank], 0, *pads[rank:]], np.int64)}
        if op_type == "Squeeze" and 1 in shape and all(isinstance(size, int) for size in shape):
            return {1: np.array([axis + 1 for axis, size in enumerate(shape) if size == 1], np.int64)}
        bounds = dims(node.inputs[1]) if op_type == "Slice" and operand is None and len(node.inputs) == 3 else None
        if bounds and isinstance(bounds[0], int):
            return {3: np.arange(1, bounds[0] + 1)}
        if _is_reduction(node) and not node.attributes.get_int("noop_with_empty_axes", 0) and operand is None:
            return {1: np.arange(1, rank + 1)}
        return None

    def _aligned(self, node: ir.Node) -> dict[int, int]:
        """Maps each batched operand of a broadcast to the dims of 1 to insert after the new dim, so that its other dims stay aligned."""
        entry = entry_of(node)
        parts = _parts(entry.notation.factors, len(node.inputs)) if entry is not None else []
        stars = {
            k: (rank_of(value) or 0) - len(part.replace("*", ""))
            for k, (value, part) in enumerate(zip(node.inputs, parts, strict=False))
            if value is not None and "*" in part
        }
        most = max(stars.values(), default=0)
        return {k: most - count for k, count in stars.items() if node.inputs[k] in self.batched}

    def _merged(self, node: ir.Node) -> bool:
        """Writes the node with the records merged into one of its dims, if the op allows one; returns whether it does."""
        rule = rule_of(node)
        places: list[int] = []
        batched = [k for k, value in enumerate(node.inputs) if value in self.batched]
        letters = {letter for letter in rule.factors if self._takes_records(node, rule, letter, batched)}
        if not letters or bodies(node):
            return False
        letter = next(one for one in rule.factors if one in letters)
        inputs = [self.now(value) for value in node.inputs]
        for k in batched:
            value, place = node.inputs[k], (rule.inputs[k] or "").index(letter)
            assert value is not None
            places.append(place)
            inputs[k] = self._merge(self.values[value], value, place)
        made = self._emit(node, node.op_type, inputs, list(node.attributes.values()), len(node.outputs))
        for record, result, of in zip(node.outputs, made, rule.outputs, strict=True):
            place = (of or "").index(letter)
            self.take(record, self._unmerged(result, record, place))
        return True

    def _takes_records(self, node: ir.Node, rule: Rule, letter: str, batched: Sequence[int]) -> bool:
        if letter in rule.units or letter in rule.replicated or (rule.local is not None and node.op_type not in _EXACT):
            return False
        for k, value in enumerate(node.inputs):
            own = rule.inputs[k] or ""
            if value is not None and own.count(letter) != (k in batched):
                return False
        known = all(value.shape is not None for value in (*node.inputs, *node.outputs) if value is not None)
        return known and all(of is not None and of.count(letter) == 1 for of in rule.outputs)

    def _merge(self, value: ir.Value, record: ir.Value, place: int) -> ir.Value:
        """Merges the first dim, the records, into dim `place` of a record: the records are the outer index."""
        rank = rank_of(record) or 0
        if place:
            value = self.op.Transpose(value, perm=[*range(1, place + 1), 0, *range(place + 1, rank + 1)])
        merged: ir.Value = self.op.Reshape(value, self._target(value, record, place, [-1], place + 2))
        return merged

    def _unmerged(self, value: ir.Value, record: ir.Value, place: int) -> ir.Value:
        rank, some = rank_of(record) or 0, next(iter(self.batched))
        size = None if record.shape is None else record.shape[place]
        pair: list[int | ir.Value] = (
            [-1, size] if isinstance(size, int) else [self.op.Shape(self.values[some], start=0, end=1), -1]
        )
        value = self.op.Reshape(value, self._target(value, record, place, pair, place + 1))
        if place:
            value = self.op.Transpose(value, perm=[place, *range(place), *range(place + 1, rank + 1)])
        return self.shaped(value, record)

    def _target(
        self, value: ir.Value, record: ir.Value, place: int, middle: Sequence[int | ir.Value], after: int
    ) -> ir.Value:
        """The target shape of a Reshape that leaves the dims before `place`, puts `middle` next, and then the record's dims after `place`.

        `after`: the first of the remaining dims in `value`, for those whose sizes only the run knows.
        """
        sizes = list((dims(record) or ())[place + 1 :])
        rest: Sequence[int | ir.Value] = [size for size in sizes if isinstance(size, int)]
        if len(rest) < len(sizes):
            rest = [self.op.Shape(value, start=after)]
        parts = [*[0] * place, *middle, *rest]
        if all(isinstance(part, int) for part in parts):
            return _vector(self.op, [part for part in parts if isinstance(part, int)])
        return self._joined([_vector(self.op, [part]) if isinstance(part, int) else part for part in parts])

    def _scanned(self, node: ir.Node) -> None:
        """Writes the node in a Scan over the records."""
        values = [*dict.fromkeys(value for value in [*node.inputs, *captured_by(node)] if value in self.batched)]
        moved = {value: self.values[value] for value in (*node.inputs, *captured_by(node)) if value in self.values}
        inside = {value: ir.Value(name=f"one{k}", type=value.type, shape=value.shape) for k, value in enumerate(values)}
        moved |= inside
        attributes = [_reading(attribute, moved) for attribute in node.attributes.values()]
        results = [
            ir.Value(name=f"made{k}", type=value.type, shape=value.shape) for k, value in enumerate(node.outputs)
        ]
        inputs = [None if value is None else moved.get(value, value) for value in node.inputs]
        inner = ir.Node(
            node.domain, node.op_type, inputs, attributes, outputs=results, name=node.name, version=node.version
        )
        inner.metadata_props.update(node.metadata_props)
        imports = dict(self.op.builder.graph.opset_imports)
        body = ir.Graph(list(inside.values()), results, nodes=[inner], opset_imports=imports, name="record")
        scan = ir.Node("", "Scan", [], name=node.name)
        scan.metadata_props.update(node.metadata_props)
        given = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(values))]
        made = self._emit(scan, "Scan", [self.values[value] for value in values], given, len(results))
        for record, result in zip(node.outputs, made, strict=True):
            self.take(record, self.shaped(result, record))


def _is_lifted(record: Rule, rule: Rule, batched: Sequence[bool], form: _Form, place: int) -> bool:
    """Whether `rule` is `record` plus one letter for the new dim, in all batched operands, all results and no other operand."""
    lifted = [rule.inputs[k] for k, differs in enumerate(batched) if differs]
    letters = {one[0] for one in lifted if one} | {one[place] for one in rule.outputs if one and len(one) > place}
    (new,) = letters if len(letters) == 1 else (WHOLE,)
    if new not in rule.factors or not all(lifted) or not all(rule.outputs):
        return False
    operands: list[tuple[str, str]] = []
    for k, (own, differs) in enumerate(zip(record.inputs, batched, strict=True)):
        now = rule.inputs[k] or ""
        if differs:
            operands.append((own or "", now[1 + form.inserted.get(k, 0) :]))
        elif new in now:
            return False
        elif k not in form.constants and k not in form.prefixed:
            operands.append((own or "", now))
    for own, made in zip(record.outputs, rule.outputs, strict=True):
        operands.append((own or "", f"{(made or '')[:place]}{(made or '')[place + 1 :]}"))
    first, second = ("|".join(texts) for texts in zip(*operands, strict=True))
    if new in second or len(first) != len(second):
        return False
    renamed: dict[str, str] = {}
    return all(
        a == b if WHOLE in (a, b) or "|" in (a, b) else renamed.setdefault(a, b) == b
        for a, b in zip(first, second, strict=True)
    ) and len({*renamed.values()}) == len(renamed)


def _parts(factors: str, count: int) -> list[str]:
    """The parts of a rule's notation for each of `count` operands."""
    parts = factors.split("->")[0].split(",")
    return [*parts[:-1], *parts[-2:-1] * (count - len(parts) + 1)] if parts[-1] == "..." else parts


def _is_reduction(node: ir.Node) -> bool:
    return node.op_type.startswith("Reduce")


@functools.cache
def _default(op_type: str, domain: str, name: str) -> object:
    """The default of an op's attribute; None if the op has no such attribute or default."""
    try:
        schema = onnx.defs.get_schema(op_type, domain)
    except onnx.defs.SchemaError:
        return None
    attribute = schema.attributes.get(name)
    if attribute is None:
        return None
    return onnx.helper.get_attribute_value(attribute.default_value) if attribute.default_value.type else None


def _shifted_axes(node: ir.Node) -> dict[str, object]:
    """The attributes that count dims from the first, each increased by 1 for the new dim."""
    shifted: dict[str, object] = {}
    for name in ("axis", "axes"):
        given = node.attributes.get(name)
        value = given.value if given is not None else _default(node.op_type, node.domain, name)
        if isinstance(value, int):
            shifted[name] = value + 1 if value >= 0 else value
        elif isinstance(value, list | tuple):
            shifted[name] = [axis + 1 if axis >= 0 else axis for axis in value]
    return shifted


def _equation(node: ir.Node, batched: Sequence[bool]) -> str | None:
    """The Einsum equation with a letter for the new dim; None if it has an ellipsis or no explicit result."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    left, arrow, right = equation.partition("->")
    new = next(letter for letter in "zyxwvutsrqponmlkjihgfedcba" if letter not in equation)
    if not arrow or "." in equation:
        return None
    operands = [f"{new}{one}" if differs else one for one, differs in zip(left.split(","), batched, strict=True)]
    return f"{','.join(operands)}->{new}{right}"


def _attributes(node: ir.Node, changed: Mapping[str, object]) -> list[ir.Attr]:
    attributes: dict[str, Any] = dict(changed)
    kept = [attribute for name, attribute in node.attributes.items() if name not in changed]
    return [*kept, *ir.convenience.convert_attributes(attributes)]


def _reading(attribute: ir.Attr, moved: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    """A copy of an attribute whose bodies read the values that `moved` gives in place of outer ones."""
    if attribute.type != ir.AttributeType.GRAPH:
        return attribute
    copy = attribute.as_graph().clone(allow_outer_scope_values=True)
    for node in nodes_of(copy):
        for k, value in enumerate(node.inputs):
            if value is not None and value in moved:
                node.replace_input_with(k, moved[value])
    for k, value in enumerate(copy.outputs):
        if value in moved:
            inside = ir.Node("", "Identity", [moved[value]])
            copy.append(inside)
            copy.outputs[k] = inside.outputs[0]
    return ir.AttrGraph(attribute.name, copy)


def _unsqueezed(shape: ir.Shape | None, place: int) -> ir.Shape | None:
    if shape is None:
        return None
    sizes = list(shape.dims)
    sizes.insert(len(sizes) + place + 1, 1)
    return ir.Shape(sizes)


def _constant(array: Array) -> ir.Value:
    return ir.val(None, const_value=ir.Tensor(np.asarray(array)))


def _vector(op: OpBuilder, numbers: Sequence[int] | range | Array) -> ir.Value:
    """Returns integers as a constant of the model."""
    array = np.asarray(numbers, np.int64)
    value: ir.Value = op.builder._get_or_create_constant(array.tolist(), ir.DataType.INT64)
    return value
