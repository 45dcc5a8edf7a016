"""Shape rules that partc adds to onnx-shape-inference, and its engine made tolerant of a rule that fails on one node.

A wrong shape is worse than none: a receive is posted with the size that the shape promises. So rules known to be wrong are
replaced here, and a rule that raises leaves its node's outputs unknown.

Output types of ops that only onnxruntime knows: it infers them from a model of that one node.

Shapes are not inferred: they stay unknown, and a message with such a value carries its shape.

Shape rules of If, Loop and Scan: the outputs of their bodies, as far as they are the same for any number of iterations.

A carried value has the shape that it begins with, if the body gives back that shape. What a body changes is unknown in it, and
the body is read again with that, until nothing changes. A scanned output of a Loop has as many rows as trips only if nothing ends
the loop early: its condition is absent or true, and the body hands on the condition or gives true.

Shapes and types of the ops of ai.onnx.ml, which the engine does not know: as onnxruntime makes them.

An input of one dim is one record. Scores are float32 whatever the features are.
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
from partc.compiler.analysis.shape_windows import conv_transpose, pool, resize
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts, meet
from partc.compiler.dims.normal import as_dim, normal, normal_dim, quotient
from partc.compiler.dims.reading import largest, read
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
    from partc.runtime.program.ort import quiet_session

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
    try:
        return {out.name: out.type for out in quiet_session(model.SerializeToString()).get_outputs()}
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


def if_(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Sets the outputs to those of the branch that runs, where the condition is known; else to the common part of both branches."""
    branches = {name: node.attributes[name].as_graph() for name in ("then_branch", "else_branch")}
    condition = scalar_of(ctx, node.inputs[0])
    if isinstance(condition, sympy.Integer):
        runs = branches["then_branch" if condition else "else_branch"]
        for out, inner in zip(node.outputs, runs.outputs, strict=False):
            out.shape = inner.shape
            out.type = inner.type or out.type
        return
    rule(ctx, node)
    for k, out in enumerate(node.outputs):
        if any(branch.outputs[k].shape is None for branch in branches.values()):
            out.shape = None


def loop(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Carried values keep their initial shape if the body preserves it; scanned outputs have a row for each trip."""
    body = node.attributes["body"].as_graph()
    first = list(node.inputs[2:])
    inside, given = body.inputs[2:], body.outputs[1:]
    settle(ctx, body, first, inside, given[: len(first)])
    trips = _trips(ctx, node, body, known)
    for k, (out, last) in enumerate(zip(node.outputs, given, strict=False)):
        if k < len(first):
            out.type = out.type or last.type or inside[k].type
            out.shape = inside[k].shape
        else:
            out.type = out.type or last.type
            out.shape = (
                None
                if last.shape is None
                else ir.Shape([ctx.new_symbolic_dim() if trips is None else trips, *last.shape.dims])
            )


def settle(
    ctx: ShapeInferenceContext, body: ir.Graph, first: list[ir.Value | None], inside: Any, last_values: Any
) -> None:
    """Sets shapes of a body's carried inputs that hold in every iteration: the initial ones, with dims unknown that the body changes."""
    for start, value in zip(first, inside, strict=False):
        if start is not None:
            value.type = value.type or start.type
            value.shape = start.shape
    for _ in range(sum(1 + len(value.shape or ()) for value in inside) + 1):
        _read_again(ctx, body)
        changed = False
        for value, last in zip(inside, last_values, strict=False):
            common = _common(ctx, value.shape, last.shape)
            if common is not value.shape:
                value.shape, changed = common, True
        if not changed:
            return


def _common(ctx: ShapeInferenceContext, first: ir.Shape | None, last: ir.Shape | None) -> ir.Shape | None:
    """Returns the shape that two shapes have in common; `first` itself if it covers both."""
    if first is None or last is None or len(first) != len(last):
        return None
    if all(a == b or _is_new(ctx, a) for a, b in zip(first.dims, last.dims, strict=True)):
        return first
    return ir.Shape([a if a == b else ctx.new_symbolic_dim() for a, b in zip(first.dims, last.dims, strict=True)])


def _is_new(ctx: ShapeInferenceContext, dim: int | ir.SymbolicDim) -> bool:
    """Whether the dim is unknown already."""
    return isinstance(dim, ir.SymbolicDim) and (dim.value is None or ctx.is_generated_symbol(dim.value))


def _read_again(ctx: ShapeInferenceContext, body: ir.Graph) -> None:
    from onnx_shape_inference import _engine

    for node in body:
        for out in node.outputs:
            out.shape = None
    _engine._process_graph(ctx, body, warn_on_missing=False)


def _trips(ctx: ShapeInferenceContext, node: ir.Node, body: ir.Graph, known: Known) -> int | ir.SymbolicDim | None:
    """Returns the number of iterations; None where the loop may end early."""
    count = scalar_of(ctx, node.inputs[0])
    begins = node.inputs[1] is None or scalar_of(ctx, node.inputs[1]) == 1
    goes_on = body.outputs[0]
    while (maker := goes_on.producer()) is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
        goes_on = maker.inputs[0]
    if count is None or not begins or not (goes_on is body.inputs[1] or scalar_of(ctx, goes_on) == 1):
        return None
    return as_dim(normal(largest(0, count), known))


def scan(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """States keep their initial shape if the body preserves it."""
    body = node.attributes["body"].as_graph()
    carried = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    settle(ctx, body, list(node.inputs[:carried]), body.inputs[:carried], body.outputs[:carried])
    rule(ctx, node)
    for out, value in zip(node.outputs[:carried], body.inputs, strict=False):
        out.shape = value.shape


_STRING, _FLOAT, _INT64 = ir.DataType.STRING, ir.DataType.FLOAT, ir.DataType.INT64


def scores(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is None:
        return
    counted = {"SVMRegressor": "", "LinearRegressor": "targets"}.get(node.op_type, "n_targets")
    dtype = x.dtype if node.op_type == "TreeEnsemble" else _FLOAT
    ctx.set_shape_and_dtype(node.outputs[0], _rows(x, int(node.attributes.get_int(counted, 1) or 1)), dtype)


def classes(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is None:
        return
    texts = node.attributes.get_strings("classlabels_strings")
    kinds = (_STRING if texts else _INT64, _FLOAT)
    for out, shape, dtype in zip(node.outputs, (_rows(x), _rows(x, _class_count(ctx, node))), kinds, strict=False):
        ctx.set_shape_and_dtype(out, shape, dtype)


def _class_count(ctx: ShapeInferenceContext, node: ir.Node) -> int | ir.SymbolicDim:
    """The columns of a classifier's scores: an SVM without probabilities has one for each pair of classes."""
    names = ("classlabels_strings", "classlabels_ints", "classlabels_int64s")
    labels = max((len(node.attributes[name].value) for name in names if name in node.attributes), default=0)
    match node.op_type:
        case "SVMClassifier":
            listed = node.attributes.get_ints("vectors_per_class") or ()
            if not listed or node.attributes.get_floats("prob_a"):
                return labels or ctx.new_symbolic_dim()
            pairs = len(listed) * (len(listed) - 1) // 2
            return 2 if pairs == 1 else pairs
        case "LinearClassifier":
            terms = len(node.attributes.get_floats("intercepts") or ()) or labels
            return 2 if terms == 1 and labels == 2 else terms or ctx.new_symbolic_dim()
        case _:
            return labels or ctx.new_symbolic_dim()


def by_feature(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is not None:
        ctx.set_shape_and_dtype(node.outputs[0], x.shape, x.dtype if node.op_type == "Imputer" else _FLOAT)


def by_element(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is not None:
        ctx.set_shape_and_dtype(node.outputs[0], x.shape, _mapped_type(node, x.dtype))


def _mapped_type(node: ir.Node, dtype: ir.DataType | None) -> ir.DataType | None:
    """The output type of an elementwise map: that of the attribute that lists the values."""
    if node.op_type == "Binarizer":
        return dtype
    listed = {"values_strings": _STRING, "values_int64s": _INT64, "values_floats": _FLOAT}
    for name, kind in listed.items():
        if name in node.attributes:
            return kind
    if "values_tensor" in node.attributes:
        return node.attributes["values_tensor"].as_tensor().dtype
    return _INT64 if dtype == _STRING else _STRING  # CategoryMapper, and LabelEncoder of version 1


def one_hot(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is None:
        return
    listed = [node.attributes[name].value for name in ("cats_int64s", "cats_strings") if name in node.attributes]
    count = max(map(len, listed), default=0)
    shape = None if x.shape is None else ir.Shape([*x.shape.dims, count])
    ctx.set_shape_and_dtype(node.outputs[0], shape, _FLOAT)


def feature_vectorizer(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x, counts = node.inputs[0], node.attributes.get_ints("inputdimensions") or ()
    if x is not None:
        ctx.set_shape_and_dtype(node.outputs[0], _rows(x, sum(counts)) if counts else None, _FLOAT)


def array_feature_extractor(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x, indices = node.inputs[0], node.inputs[1]
    if x is None or indices is None:
        return
    if x.shape is None or indices.shape is None:
        ctx.set_shape_and_dtype(node.outputs[0], None, x.dtype)
        return
    count: int | ir.SymbolicDim = 1
    for dim in indices.shape.dims:
        count = dim if count == 1 else count if dim == 1 else _times(ctx, count, dim)
    rows = [1] if len(x.shape) == 1 else [*x.shape.dims[:-1]]
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([*rows, count]), x.dtype)


def _times(ctx: ShapeInferenceContext, one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    return one * other if isinstance(one, int) and isinstance(other, int) else ctx.new_symbolic_dim()


def _rows(x: ir.Value, *columns: int | ir.SymbolicDim) -> ir.Shape | None:
    """The shape of a result computed per record; an input of one dim is one record."""
    if x.shape is None:
        return None
    return ir.Shape([1 if len(x.shape) == 1 else x.shape[0], *columns])


TABULAR = {
    ("ai.onnx.ml", op_type): rule
    for rule, op_types in {
        scores: ("LinearRegressor", "SVMRegressor", "TreeEnsemble", "TreeEnsembleRegressor"),
        classes: ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"),
        by_feature: ("Imputer", "Normalizer", "Scaler"),
        by_element: ("Binarizer", "CategoryMapper", "LabelEncoder"),
        one_hot: ("OneHotEncoder",),
        feature_vectorizer: ("FeatureVectorizer",),
        array_feature_extractor: ("ArrayFeatureExtractor",),
    }.items()
    for op_type in op_types
}


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
