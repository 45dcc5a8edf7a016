"""Pass: every value gets its type and its global shape, dims as expressions over the dynamic dims of the inputs.

Dims that the inputs name are the program's symbols; the plan's Symbols say what is promised of them. A shape counts as known when
every dim is an integer or an expression over symbols: only then can a rank post a receive without being told the size.
Shapes written in the model's own value_info are not trusted, since nothing checks them; they are inferred anew.

    x: (batch, 1, 28, 28), batch = 64N   Reshape(x, [-1, 784])   ->   (batch, 784), batch = 64N
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
from partc.compiler.analysis.bindings import bind_inputs
from partc.compiler.analysis.shape_rules import tolerant_rules
from partc.compiler.dims.normal import normal_dim
from partc.compiler.load.onnx_file import bodies, graphs_of
from partc.compiler.program import Program, Shape, ValueInfo
from partc.compiler.training.in_parts import part_symbols

_SCALAR_TYPE = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.STRING: "string",
    ir.DataType.BOOL: "bool",
    ir.DataType.COMPLEX64: "complex64",
    ir.DataType.COMPLEX128: "complex128",
}


def shapes(program: Program) -> Program:
    """Fills `symbols` and `values`. Raises CompileError where the plan contradicts the model's inputs."""
    graph = program.model.graph
    symbols = part_symbols(program, bind_inputs(program))
    _forget_declared_shapes(graph)
    failed: list[ir.Node] = []
    facts = {name: info.facts for name, info in symbols.items()}
    for value in graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([normal_dim(dim, facts) for dim in value.shape.dims])
    import onnx_shape_inference

    with tolerant_rules(failed, facts):
        onnx_shape_inference.infer_symbolic_shapes(program.model, warn_on_missing=False, adopt_declared_symbols=False)
    _fill_missing_types(program.model)
    known = frozenset(symbols)
    values: dict[ir.Value, ValueInfo] = {}
    memo: dict[ir.SymbolicDim, bool] = {}
    for value in [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]:
        values[value] = _info(value, known, memo)
    return replace(program, symbols=symbols, values=values)


def type_text(kind: ir.TypeProtocol | None) -> str:
    """A type as onnxruntime writes it: `tensor(float)`, `seq(tensor(int64))`; `unknown` where nothing says."""
    match kind:
        case ir.TensorType(dtype=dtype):
            return f"tensor({_SCALAR_TYPE.get(dtype, dtype.name.lower())})"
        case ir.SparseTensorType(dtype=dtype):
            return f"sparse_tensor({_SCALAR_TYPE.get(dtype, dtype.name.lower())})"
        case ir.SequenceType(elem_type=inner):
            return f"seq({type_text(inner)})"
        case ir.OptionalType(elem_type=inner):
            return f"optional({type_text(inner)})"
        case _:
            return "unknown"


def _info(value: ir.Value, known: frozenset[str], memo: dict[ir.SymbolicDim, bool]) -> ValueInfo:
    kind = type_text(value.type)
    dense = isinstance(value.type, ir.TensorType) and value.type.dtype not in (
        ir.DataType.STRING,
        ir.DataType.UNDEFINED,
    )
    dtype = value.type.dtype if isinstance(value.type, ir.TensorType) else None
    bits = dtype.bitwidth if dense and dtype is not None else None
    return ValueInfo(kind, _known_shape(value.shape, known, memo), bits // 8 if bits and bits % 8 == 0 else None)


def _known_shape(shape: ir.Shape | None, known: frozenset[str], memo: dict[ir.SymbolicDim, bool]) -> Shape | None:
    if shape is None:
        return None
    dims: list[int | str] = []
    for dim in shape.dims:
        if isinstance(dim, int):
            dims.append(dim)
            continue
        if dim not in memo:
            memo[dim] = dim.value is not None and dim.free_symbols() <= known
        if not memo[dim]:
            return None
        dims.append(str(dim.value))
    return tuple(dims)


def _forget_declared_shapes(graph: ir.Graph) -> None:
    for part in graphs_of(graph):
        for node in part:
            for value in node.outputs:
                value.shape = None
            for body in bodies(node):
                for value in body.inputs[2 if node.op_type == "Loop" else 0 :]:
                    value.shape = None


def _fill_missing_types(model: ir.Model) -> None:
    """Types that the symbolic engine leaves open are taken from onnx's own inference, which knows every standard op."""
    missing = {
        value.name: value
        for node in model.graph
        for value in node.outputs
        if value.name and type_text(value.type).count("unknown")
    }
    if not missing:
        return
    import onnx

    light = ir.to_proto(_without_weights(model))
    try:
        inferred = onnx.shape_inference.infer_shapes(light)
    except Exception:
        return
    for info in [*inferred.graph.value_info, *inferred.graph.output]:
        if info.name in missing and info.HasField("type"):
            missing[info.name].type = ir.serde.deserialize_type_proto_for_type(info.type)


def _without_weights(model: ir.Model) -> ir.Model:
    """A copy whose large weights are inputs, so that it can become one proto whatever their size."""
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > 1024:
            value.type = value.type or ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape.numpy())
            del copy.graph.initializers[name]
            value.const_value = None
            copy.graph.inputs.append(value)
    return copy
