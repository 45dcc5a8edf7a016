"""Pass: the plan's `precision`: products compute in 16 bits, ops that would lose accuracy in float32, and trained weights stay float32.

The op table has the type in which each op computes (`Entry.precision`):

    low       MatMul, Conv: in the plan's type
    widest    Add, Concat: in float32 if any operand has it, else in the plan's type
    follow    Relu, Reshape: in the type of their first operand
    high      the others: in float32, as do loss and metrics, the parts of a BatchNormalization that trains, nodes in `keep`, and nodes in
              a body or a local map

An operand of another type is cast before the op, once for each value and type. Weights, constants and numbers of rank 0 take the type of
the other operands, so they widen nothing; a constant that exceeds the range of float16 does. A parameter is cast like any value, before a
Transpose or the like if only products read that: the Cast depends on no microbatch, so it runs once a step, and the gradient of Cast gives
its gradient in float32. Without training the weights themselves get the type.

    x -> Gemm(w, b) -> Softmax     ->     x, w, b -> Cast -> Gemm -> Cast -> Softmax
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx.defs
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.computed import ComputedTensor, DrawnTensor, WidenedTensor, shard_of, widens
from partc.compiler.ir.graph import bodies, captured_by, graphs_of, is_inside, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ir.training import ProgramKind
from partc.compiler.matching import matched_nodes, nothing_matched
from partc.compiler.ops.registry import draws, entry_of
from partc.compiler.ops.rule import OWN
from partc.compiler.plan.precision import PrecisionRules
from partc.compiler.rewrite.batch_norm import EXACT
from partc.compiler.rewrite.rewriting import Rewriting

FLOAT = ir.DataType.FLOAT
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_KINDS = (FLOAT, *HALVES)
_LOW = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_STORAGE = (
    "bfloat16 is stored and sent, and computed in float32: onnxruntime has no bfloat16 kernels for CPUs; "
    "float16 computes faster only on other devices, too"
)


def precision(program: Typed) -> Typed:
    """Returns the program with the Casts of the plan's precision; trained weights of 16 bits always become float32 and are cast.

    Raises CompileError for a pattern that matches nothing, and if nothing would compute in 16 bits.
    """
    rules, training = program.plan.precision, program.training
    masters = [value for value in (training.parameters if training else ()) if value.dtype in HALVES]
    if rules is None and not masters:
        return program
    kept = _nodes_to_keep(program, rules) if rules else frozenset[ir.Node]()
    work = _Typing(program, rules, kept)
    work.masters(masters)
    for node in list(work.graph):
        work.node(node)
    work.outputs()
    if rules is not None and not work.lowered and program.kind is ProgramKind.STEP:
        fact = f"no operator of the model computes in {rules.compute}"
        law = "products of floating-point tensors do: MatMul, Gemm, Einsum, Conv, recurrent layers and attention"
        raise CompileError(Problem(rules.where(), fact, law, "take 'precision' out, or keep less"))
    warnings = [f"{rules.where()}: {_STORAGE}"] if rules is not None and rules.compute == "bfloat16" else []
    if rules is not None and training is None:
        warnings += [
            f"{rules.where()}: 'precision.{key}' is of a training, and there is no 'train'"
            for key in ("loss_scale", "messages")
            if key in rules.model_fields_set
        ]
    return work.done(warnings=(*program.warnings, *warnings))


def _nodes_to_keep(program: Typed, rules: PrecisionRules) -> frozenset[ir.Node]:
    """Returns the nodes that stay in float32."""
    kept_nodes: set[ir.Node] = set()
    problems = []
    for k, pattern in enumerate(rules.keep):
        hit = matched_nodes(program, pattern)
        kept_nodes.update(hit)
        if not hit:
            problems.append(nothing_matched(program, pattern, rules.where("keep", k)))
    if problems:
        raise CompileError(problems)
    return frozenset(kept_nodes)


@dataclass(frozen=True)
class _Group:
    """Operands and outputs of a node that share one type by the op's schema, and whether 16 bits are allowed."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    allowed: frozenset[str]


class _Typing(Rewriting[Typed]):
    def __init__(self, program: Typed, rules: PrecisionRules | None, kept: frozenset[ir.Node]) -> None:
        super().__init__(program)
        self.rules, self.kept = rules, kept
        self.low = _LOW[rules.compute] if rules else FLOAT
        self.types: dict[ir.Value, ir.DataType] = {
            value: value.dtype
            for value in program.values
            if value.dtype is not None and isinstance(value.type, ir.TensorType)
        }
        """The types that values had; values that are made by a Cast are not among them."""
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.weak = set(self.graph.initializers.values())
        training = program.training
        self.learned = set(training.parameters) if training else set[ir.Value]()
        self.exact = {training.loss, *training.statistics.values()} if training else set[ir.Value | None]()
        self.opset = self.graph.opset_imports.get("", onnx.defs.onnx_opset_version())
        self.lowered = False

    def masters(self, values: Sequence[ir.Value]) -> None:
        """Makes parameters of 16 bits float32."""
        for value in values:
            self.types[value] = value.dtype or FLOAT
            self._retype(value, FLOAT)
            if value.const_value is not None:
                value.const_value = _cast_tensor(value.const_value, FLOAT)

    def node(self, node: ir.Node) -> None:
        """Gives a node's operands and outputs their types."""
        reads = self.before.reads[node]
        if reads and not draws(node) and all(value in self.weak for value in reads):
            self.weak.update(node.outputs)
        for body in bodies(node):
            self._keep_captured(node, body)
        for group in self._groups(node):
            self._typed(node, group)

    def outputs(self) -> None:
        """Casts outputs of the model back to the types that they had, under their names."""
        for k, value in enumerate(self.graph.outputs):
            before = self.types.get(value)
            if before is None or value.dtype == before:
                continue
            name = name_of(value)
            value.name = self.free(f"{name}.{_word(value.dtype)}")
            leaving = self.casts.get((value, before))
            if leaving is not None:
                leaving.name = name
            else:
                leaving = self._cast_value(value, before, name)
                producer = value.producer()
                assert producer is not None
                self._put_cast(value, leaving, f"{self.paths[producer]}.{_word(before)}", None)
            self.graph.outputs[k] = leaving

    def _typed(self, node: ir.Node, group: _Group) -> None:
        wanted = self._required_type(node, group)
        if wanted is None:
            return
        for k in group.inputs:
            value = node.inputs[k]
            if value is not None and value.dtype != wanted:
                node.replace_input_with(k, self._as(value, wanted, node, k))
        for k in group.outputs:
            if node.outputs[k].dtype != wanted:
                self._retype(node.outputs[k], wanted)

    def _required_type(self, node: ir.Node, group: _Group) -> ir.DataType | None:
        """Returns the type of a group of operands; None if nothing is to change."""
        operands = [value for k in group.inputs if (value := node.inputs[k]) is not None]
        made = [node.outputs[k] for k in group.outputs]
        before = [self.types.get(value, value.dtype) for value in (*operands, *made)]
        if not operands or not before or any(kind not in _KINDS for kind in before):
            return None
        own = before[0]
        weak = all(value in self.weak for value in operands)
        if self.rules is None or own is None or bodies(node) or is_inside(node):
            return own
        entry = entry_of(node)
        if weak and (entry is None or entry.precision != "low"):
            return self.low if self._is_for_products(node) else own
        high = FLOAT if f"tensor({_word(FLOAT)})" in group.allowed else own
        exact = node in self.kept or not self.exact.isdisjoint(node.outputs) or self._is_exact(node)
        entry = entry_of(node)
        how = entry.precision if entry is not None else "high"
        if exact or how == "high" or f"tensor({_word(self.low)})" not in group.allowed:
            return high
        if how == "low":
            self.lowered = True
            return self.low
        counted = operands[:1] if how == "follow" else self._widening(operands)
        if any(value.dtype != self.low for value in counted):
            return high
        return self.low

    def _widening(self, operands: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Returns the operands that determine the type of an op."""
        largest = max((value.shape.rank() if value.shape is not None else 1) for value in operands)
        return [
            value
            for value in operands
            if (value not in self.weak or not self._fits(value))
            and (value in self.weak or value.shape is None or value.shape.rank() or not largest)
        ]

    def _fits(self, value: ir.Value) -> bool:
        """Whether the numbers of a constant are in the range of the low type."""
        tensor = None if value in self.learned else ir.convenience.get_const_tensor(value)
        if tensor is None or self.low != ir.DataType.FLOAT16:
            return True
        numbers = np.abs(tensor.numpy().astype(np.float64))
        finite = numbers[np.isfinite(numbers) & (numbers > 0)]
        return bool(finite.size == 0 or (finite.max() <= 65504 and finite.min() >= 2.0**-24))

    def _is_for_products(self, node: ir.Node) -> bool:
        """Whether a node only moves its operand's elements, and only products in 16 bits read them: then it takes the products' type."""
        entry = entry_of(node)
        if entry is None or node in self.kept or is_inside(node) or self._is_exact(node):
            return False
        if entry.precision == "low":
            return True
        if entry.precision != "follow" or any(out.is_graph_output() for out in node.outputs):
            return False
        groups = [group for group in self._groups(node) if group.inputs or group.outputs]
        if len(groups) != 1 or not groups[0].outputs or f"tensor({_word(self.low)})" not in groups[0].allowed:
            return False
        readers = {reader for out in node.outputs for reader in out.consumers()}
        return bool(readers) and all(reader.graph is node.graph and self._is_for_products(reader) for reader in readers)

    def _is_exact(self, node: ir.Node) -> bool:
        training = self.before.training
        return EXACT in node.meta or (training is not None and training.adds(self.paths[node]))

    def _keep_captured(self, node: ir.Node, body: ir.Graph) -> None:
        """Casts the outer values that a body reads back to the types that they had."""
        for value in dict.fromkeys(captured_by(node)):
            before = self.types.get(value)
            if before is None or value.dtype == before or before not in _KINDS:
                continue
            cast = self._as(value, before, node, 0)
            for inner in graphs_of(body):
                for reader in inner:
                    for k, operand in enumerate(reader.inputs):
                        if operand is value:
                            reader.replace_input_with(k, cast)
                inner.outputs[:] = [cast if out is value else out for out in inner.outputs]

    def _groups(self, node: ir.Node) -> list[_Group]:
        """Returns the groups of tensor operands and outputs that share one type each."""
        schema = _schema(node, self.opset)
        if schema is None:
            inputs = tuple(k for k, value in enumerate(node.inputs) if value is not None and self._is_float(value))
            outputs = tuple(k for k, value in enumerate(node.outputs) if self._is_float(value))
            if node.domain == OWN:  # its nodes on a rank compute in one type
                return [_Group(inputs, outputs, frozenset(map(_text, _KINDS)))]
            return [_Group((k,), (), frozenset(map(_text, _KINDS))) for k in inputs] + [
                _Group((), outputs, frozenset())
            ]
        allowed = {one.type_param_str: frozenset(one.allowed_type_strs) for one in schema.type_constraints}
        by_kind: dict[str, tuple[list[int], list[int]]] = {}
        for side, formals, actual in ((0, schema.inputs, node.inputs), (1, schema.outputs, node.outputs)):
            for k, value in enumerate(actual):
                if value is not None and formals and self._is_float(value):
                    kind = formals[min(k, len(formals) - 1)].type_str
                    by_kind.setdefault(kind, ([], []))[side].append(k)
        return [
            _Group(tuple(inputs), tuple(outputs), allowed.get(kind, frozenset((kind,))))
            for kind, (inputs, outputs) in by_kind.items()
        ]

    def _is_float(self, value: ir.Value) -> bool:
        return isinstance(value.type, ir.TensorType) and value.dtype in _KINDS

    def _as(self, value: ir.Value, kind: ir.DataType, reader: ir.Node, k: int) -> ir.Value:
        """Returns a value in another type: a constant of a constant, else a Cast at its first reader, or for 16 bits at its maker."""
        known = self.casts.get((value, kind))
        if known is not None:
            return known
        converted = self._cast_value(value, kind, self.free(f"{value.name}.{_word(kind)}"))
        self.casts[value, kind] = converted
        tensor = None if value in self.learned else ir.convenience.get_const_tensor(value)
        if tensor is not None:
            converted.const_value = _cast_tensor(tensor, kind)
            self.graph.register_initializer(converted)
            self.weak.add(converted)
            if value.is_initializer() and not value.uses():
                self.graph.initializers.pop(name_of(value), None)
            return converted
        if value in self.weak:
            self.weak.add(converted)
        producer = value.producer()
        there = producer is not None and kind in HALVES and value not in self.weak
        path = f"{self.paths[producer]}.{_word(kind)}" if there and producer is not None else ""
        path = path or f"{self.paths[reader]}.{_word(kind)}" + (f".input{k}" if k else "")
        self._put_cast(value, converted, path, reader)
        return converted

    def _put_cast(self, value: ir.Value, made: ir.Value, path: str, before: ir.Node | None) -> None:
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(made.dtype or FLOAT))], outputs=[made], name=path)
        self.paths[node] = path
        if before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(before, node)

    def _cast_value(self, value: ir.Value, kind: ir.DataType, name: str) -> ir.Value:
        made = self.like(value, name)
        self._retype(made, kind)
        return made

    def _retype(self, value: ir.Value, kind: ir.DataType) -> None:
        value.type = ir.TensorType(kind)
        self.values[value] = replace(self.values[value], type=type_text(value.type), item_bytes=kind.bitwidth // 8)


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        return onnx.defs.get_schema(node.op_type, min(opset, onnx.defs.onnx_opset_version()), "")
    except onnx.defs.SchemaError:
        return None


def _word(kind: ir.DataType | None) -> str:
    """Returns a type's name in ONNX types and in names: `float`, `float16`."""
    return "float" if kind is None else kind.name.lower()


def _text(kind: ir.DataType) -> str:
    return f"tensor({_word(kind)})"


def _cast_tensor(tensor: ir.TensorProtocol, kind: ir.DataType) -> ir.TensorProtocol:
    """Returns the tensor in another type, computed when it is read."""
    if isinstance(tensor, DrawnTensor) and tensor.is_law:
        return tensor.cast(kind)

    shape, name = tensor.shape.numpy(), tensor.name or ""
    if isinstance(tensor, WidenedTensor) and tensor.source.dtype == kind:
        return tensor.source
    if widens(tensor.dtype, kind):
        return WidenedTensor(tensor, kind, name)
    if tensor.nbytes > 1 << 10:
        return ComputedTensor(lambda box: shard_of(tensor, box).astype(kind.numpy()), kind, shape, name)

    def read() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy().astype(kind.numpy()), dtype=kind)

    return ir.LazyTensor(read, kind, ir.Shape(shape), name=name, cache=True)
