"""Shape rules that partc adds to onnx-shape-inference, and its engine made tolerant of a rule that fails on one node.

A wrong shape is worse than none: a receive is posted with the size that the shape promises. So rules known to be wrong are
replaced here, and a rule that raises leaves its node's outputs unknown.

Output types of ops that only onnxruntime knows: it infers them from a model of that one node.

Shapes are not inferred: they stay unknown, and a message with such a value carries its shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir
import sympy
from onnx_shape_inference import SYM_DATA_KEY, ShapeInferenceContext, registry
from partc.compiler.analysis.shape_bodies import if_, loop, scan
from partc.compiler.analysis.shape_data import entries_of, follow, scalar_of
from partc.compiler.analysis.shape_extents import (
    BROADCASTING,
    broadcast,
    concat,
    constant_of_shape,
    expand,
    pad,
    range_,
    slice_,
    split,
    squeeze,
)
from partc.compiler.analysis.shape_tabular import TABULAR
from partc.compiler.analysis.shape_windows import conv_transpose, pool, resize
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.extremes import largest
from partc.compiler.dims.facts import Facts, meet
from partc.compiler.dims.normal import as_dim, normal, normal_dim, quotient
from partc.compiler.dims.reading import read
from partc.compiler.ir.distinct_ranks import key_of
from partc.compiler.ir.graph import NEWEST_OPSET, operand_name

_STANDARD = ("", "ai.onnx")


@functools.cache
def _ops() -> frozenset[tuple[str, str]]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset((schema.domain, schema.name) for schema in state.get_all_operator_schema())


def is_foreign(domain: str, op_type: str) -> bool:
    """Whether an op is one of onnxruntime's own, which the ONNX standard does not have."""
    return domain not in _STANDARD and (domain, op_type) in _ops()


def foreign_types(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Sets the types of a node's outputs, where onnxruntime accepts the node."""
    if any(value is not None and value.type is None for value in node.inputs):
        return
    proto = ir.serde.serialize_node(node)
    assert isinstance(proto, onnx.NodeProto)
    del proto.metadata_props[:]
    proto.name = proto.doc_string = ""
    given = {value.name: value for value in node.inputs if value is not None and value.name}
    kinds = [value.type for value in given.values() if value.type is not None]
    inputs = tuple(ir.serde.serialize_type(kind).SerializeToString(deterministic=True) for kind in kinds)
    found = _types(proto.SerializeToString(deterministic=True), tuple(map(str, given)), inputs, ctx.opset)
    for out in node.outputs:
        if out.type is None:
            out.type = _named(found.get(operand_name(out), ""))


def _named(text: str) -> ir.TypeProtocol | None:
    """Parses a type such as `seq(tensor(float))`; None for other kinds."""
    head, _, rest = text.partition("(")
    inner = rest.removesuffix(")")
    match head:
        case "tensor":
            name = {"float": "FLOAT", "double": "DOUBLE"}.get(inner, inner.upper())
            return ir.TensorType(ir.DataType[name]) if name in ir.DataType.__members__ else None
        case "seq" | "optional":
            element = _named(inner)
            return None if element is None else (ir.SequenceType if head == "seq" else ir.OptionalType)(element)
        case _:
            return None


@functools.lru_cache(maxsize=256)
def _types(node: bytes, names: tuple[str, ...], types: tuple[bytes, ...], opset: int) -> dict[str, str]:
    import onnxruntime

    proto = onnx.NodeProto.FromString(node)
    ports = []
    for name, kind in zip(names, types, strict=True):
        port = onnx.ValueInfoProto(name=name)
        port.type.ParseFromString(kind)
        ports.append(port)
    made = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "one", ports, made)
    imports = [onnx.helper.make_opsetid("", min(opset, NEWEST_OPSET)), onnx.helper.make_opsetid(proto.domain, 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return {out.name: out.type for out in session.get_outputs()}
    except Exception:
        return {}


Rule = Callable[[ShapeInferenceContext, ir.Node], None]
Known = Mapping[str, Facts]
"""The facts promised for the dims that the inputs name."""
Correction = Callable[[ShapeInferenceContext, ir.Node, Rule, Known], None]
NEWEST = 1000


def unique(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """With an axis, the first output has the input's rank; the engine says 1. Index outputs are 1-D."""
    axis = node.attributes.get_int("axis", None)
    data = node.inputs[0]
    if axis is None or data is None:
        rule(ctx, node)
        return
    for k, out in enumerate(node.outputs):
        if k == 0:
            dims = None if data.shape is None else list(data.shape.dims)
            if dims is not None:
                dims[axis] = ctx.new_symbolic_dim()
            ctx.set_shape_and_dtype(out, None if dims is None else ir.Shape(dims), data.dtype)
        else:
            ctx.set_shape_and_dtype(out, ir.Shape([ctx.new_symbolic_dim()]), ir.DataType.INT64)


def reshape(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """An entry of -1 is the exact quotient, for other sizes are refused where the node runs; the engine rounds it down.

    An entry of 0 copies the input's dim, so one that is computed and may be 0 is not known. Dims of inputs, and their products, are
    taken not to be 0 here, or all would be lost; a step with such sizes is stopped by the sender, who holds every value against
    its promise.
    """
    rule(ctx, node)
    data, target, out = node.inputs[0], node.inputs[1], node.outputs[0]
    entries = entries_of(ctx, target)
    flat = [] if entries is None else list(entries.ravel())
    if data is None or data.shape is None or out.shape is None or flat.count(-1) != 1:
        return
    place = flat.index(-1)
    dims = list(out.shape.dims)
    if not node.attributes.get_int("allowzero", 0):
        some = {name: facts if facts.low >= 1 else meet(facts, Facts(min=1)) for name, facts in known.items()}
        for k, entry in enumerate(flat):
            if entry is not None and entry.free_symbols and facts_of(entry, some).contains(0):
                dims[k] = ctx.new_symbolic_dim()
    total, others = _product(data.shape.dims), _product(dims[:place] + dims[place + 1 :])
    if total is not None and others:
        dims[place] = as_dim(normal(quotient(total, others), known))
        out.shape = ir.Shape(dims)


def _product(dims: Iterable[int | ir.SymbolicDim]) -> sympy.Expr | None:
    """The product of dims; None where one is unreadable."""
    found = [sympy.Integer(dim) if isinstance(dim, int) else read(str(dim.value)) for dim in dims]
    return None if any(one is None for one in found) else sympy.expand(sympy.Mul(*found))


def _normalize_outputs(node: ir.Node, known: Known) -> None:
    """Normalizes the dims that a rule inferred, so that later nodes see equal dims as equal and numbers as numbers."""
    for out in node.outputs:
        if out.shape is not None:
            dims = [normal_dim(dim, known) for dim in out.shape.dims]
            if any(a is not b for a, b in zip(dims, out.shape.dims, strict=True)):
                out.shape = ir.Shape(dims)


def compress(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """With an axis and an input of unknown shape, the output's rank is unknown; the engine says 1."""
    data = node.inputs[0]
    rule(ctx, node)
    if data is not None and data.shape is None and "axis" in node.attributes:
        node.outputs[0].shape = None
    condition = entries_of(ctx, node.inputs[1])
    if condition is not None and node.outputs[0].shape is not None and (data is None or data.shape is None):
        node.outputs[0].shape = ir.Shape([ctx.new_symbolic_dim()])


def group_query_attention(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """A cache that has room keeps its size: Max(past, total), where the total is an operand; the engine says past + new. Its type stays."""
    rule(ctx, node)
    past = node.inputs[3] if len(node.inputs) > 3 else None
    total = scalar_of(ctx, node.inputs[6]) if len(node.inputs) > 6 else None
    for out in node.outputs[1:3]:
        if past is not None and past.dtype is not None:
            out.type = ir.TensorType(past.dtype)
        if out.shape is None or len(out.shape) != 4:
            continue
        dims = list(out.shape.dims)
        before = None if past is None or past.shape is None else past.shape[2]
        if past is not None and past.is_initializer() and before is not None:
            out.shape = ir.Shape([*dims[:2], before, dims[3]])  # a cache that ranks keep: a step writes within it
            continue
        have = sympy.Integer(0) if past is None else None if before is None else _product([before])
        size = None if total is None or have is None else as_dim(normal(largest(have, total), known))
        dims[2] = ctx.new_symbolic_dim() if size is None else size
        out.shape = ir.Shape(dims)


def matmul_n_bits(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """The last dim is the attribute N; the engine has no rule."""
    source, columns = node.inputs[0], node.attributes.get_int("N", 0)
    if source is not None:
        shape = None if source.shape is None else ir.Shape([*source.shape.dims[:-1], columns])
        ctx.set_shape_and_dtype(node.outputs[0], shape, source.dtype)


def gather_block_quantized(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """The last dim is the number of elements, packed or not; the engine has no rule."""
    data, indices, scales = node.inputs[0], node.inputs[1], node.inputs[2]
    if data is None or indices is None or scales is None:
        return
    shape = None
    if data.shape is not None and indices.shape is not None and node.attributes.get_int("gather_axis", 0) == 0:
        *rest, last = data.shape.dims[1:]
        packed = 8 // node.attributes.get_int("bits", 4) if data.dtype is ir.DataType.UINT8 else 1
        if isinstance(last, int):
            shape = ir.Shape([*indices.shape.dims, *rest, last * packed])
    ctx.set_shape_and_dtype(node.outputs[0], shape, scales.dtype)


CORRECTIONS: dict[tuple[str, str], Correction] = {
    **{("", op): broadcast for op in sorted(BROADCASTING | {"MatMul"})},
    **{("", op): pool for op in ("AveragePool", "LpPool", "MaxPool")},
    ("", "Compress"): compress,
    ("", "Concat"): concat,
    ("", "ConstantOfShape"): constant_of_shape,
    ("", "ConvTranspose"): conv_transpose,
    ("", "Expand"): expand,
    ("", "If"): if_,
    ("", "Loop"): loop,
    ("", "Pad"): pad,
    ("", "Range"): range_,
    ("", "Reshape"): reshape,
    ("", "Resize"): resize,
    ("", "Scan"): scan,
    ("", "Slice"): slice_,
    ("", "Split"): split,
    ("", "Squeeze"): squeeze,
    ("", "Unique"): unique,
    ("", "Upsample"): resize,
    ("com.microsoft", "GroupQueryAttention"): group_query_attention,
    ("com.microsoft", "GatherBlockQuantized"): gather_block_quantized,
    ("com.microsoft", "MatMulNBits"): matmul_n_bits,
    **TABULAR,
}

LIKE: dict[tuple[str, str], tuple[str, str]] = {
    **{
        ("com.microsoft", op): ("", op)
        for op in ("DequantizeLinear", "GatherND", "GridSample", "Pad", "QuantizeLinear")
    },
    **{("com.microsoft", op): ("", op) for op in ("Range", "Trilu", "Unique")},
    **{("com.microsoft", op): ("", "Relu") for op in ("BiasSoftmax", "GemmaRotaryEmbedding", "Inverse")},
    **{("com.microsoft", op): ("", "Dropout") for op in ("BiasDropout",)},
    ("com.microsoft", "FusedConv"): ("", "Conv"),
    ("com.microsoft", "FusedGemm"): ("", "Gemm"),
    ("com.microsoft", "IsAllFinite"): ("", "Size"),
}
"""Maps each op for which the engine has no rule to the op whose rule it borrows: outputs of equal shapes and types."""


_Dims = tuple[int | ir.SymbolicDim, ...]
_Kind = tuple[ir.DataType, _Dims, _Dims | None]
"""The type and the dims of a tensor, and its entries where they are noted."""
_REALS = frozenset(ir.DataType[name] for name in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "BOOL"))
"""Types of which the engine keeps no entries."""


def _shared_key(node: ir.Node) -> Hashable | None:
    """The key under which a node's outputs are kept for nodes that are alike; None where other things decide, too.

    Such are integers whose entries are not noted, though the engine may know them, and types other than tensors."""
    entries: list[str | None] = []
    for value in node.inputs:
        if value is None:
            continue
        dtype = value.dtype if isinstance(value.type, ir.TensorType) else None
        noted = value.metadata_props.get(SYM_DATA_KEY)
        if dtype is None or not (noted or dtype in _REALS or value.const_value is not None):
            return None
        entries.append(noted)
    key = key_of(node)
    return None if key is None else (key, *entries, *(value.dtype for value in node.outputs))


def _kinds(ctx: ShapeInferenceContext, node: ir.Node, known: Known) -> list[_Kind] | None:
    """The inferred types and dims of a node's outputs; None where one is missing, names this node alone, or the engine knows more of it."""
    kinds: list[_Kind] = []
    for out in node.outputs:
        if not isinstance(out.type, ir.TensorType) or out.shape is None:
            return None
        noted = ctx.get_symbolic_value(out)
        if noted is not None and SYM_DATA_KEY not in out.metadata_props:
            return None
        dims, entries = out.shape.dims, None if noted is None else tuple(noted)
        for dim in (*dims, *(entries or ())):
            if not isinstance(dim, int) and not (dim.value and dim.free_symbols() <= known.keys()):
                return None
        kinds.append((out.type.dtype, dims, entries))
    return kinds


def _give(ctx: ShapeInferenceContext, node: ir.Node, kinds: list[_Kind]) -> None:
    for out, (dtype, dims, entries) in zip(node.outputs, kinds, strict=True):
        out.type, out.shape = ir.TensorType(dtype), ir.Shape(dims)
        if entries is None:
            out.metadata_props.pop(SYM_DATA_KEY, None)
        else:
            ctx.set_symbolic_value(out, list(entries))


@contextmanager
def tolerant_rules(known: Known) -> Iterator[dict[ir.Node, str]]:
    """Within, the engine's rules are corrected, and a node whose rule raises is left unknown; yields by such a node what was raised.
    Of nodes that are alike (`ir/distinct_ranks.py`) the first is asked, where their operands' types and dims alone decide.

    The engine looks rules up through `registry.get` and has no hook for either; so the registry's lookup is wrapped here.
    """
    lookup = registry.get
    failed: dict[ir.Node, str] = {}
    kept: dict[Hashable, list[_Kind]] = {}

    def find(domain: str, op_type: str, version: int) -> Rule | None:
        """A rule of this version; of an op that onnxruntime takes below its first opset, the first one."""
        name = LIKE.get((domain, op_type), (domain, op_type))
        found: Rule | None = lookup(*name, version=version if name[0] == domain else NEWEST)
        found = found or lookup(*name, version=NEWEST)
        return foreign_types if found is None and is_foreign(domain, op_type) else found

    def get(domain: str, op_type: str, version: int = 1) -> Rule | None:
        rule = find(domain, op_type, version)
        if rule is None:
            return None
        correction = CORRECTIONS.get((domain, op_type))

        def guarded(ctx: ShapeInferenceContext, node: ir.Node) -> None:
            key = _shared_key(node)
            if key is not None and key in kept:
                _give(ctx, node, kept[key])
                return
            try:
                held = [out.const_value for out in node.outputs]
                if correction:
                    correction(ctx, node, rule, known)
                else:
                    rule(ctx, node)
                _normalize_outputs(node, known)
                for out, value in zip(node.outputs, held, strict=True):
                    if out.const_value is not value:
                        out.const_value = value
                follow(ctx, node, known)
                if key is not None and (kinds := _kinds(ctx, node, known)) is not None:
                    kept[key] = kinds
            except Exception as error:
                failed[node] = str(error).partition("\n")[0] or type(error).__name__

        return guarded

    registry.get = get
    try:
        yield failed
    finally:
        del registry.get
