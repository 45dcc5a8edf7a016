"""A case for the prover of op rules: an op, its operands and attributes as data, and the node and the runs that it stands for.

case("MatMul", [(2, 6, 12), (12, 18)])
case("Gather", [(12, 6), np.array([3, -1, 7, 0])], {"axis": 0})
case("ReduceSum", [(6, 12)], {"keepdims": 0}, constants={1: [1]})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

Array = np.ndarray[Any, Any]
Operand = tuple[int, ...] | Array | None
OPSETS = {"com.microsoft": 1, "ai.onnx.ml": 5}
"""The opsets of other domains than the standard's; ensembles of trees that version 5 replaces are those of version 3."""


@dataclass(frozen=True)
class Case:
    """One op with operands: a shape stands for random numbers of `dtype` within `span`, None for an operand that is absent.

    `constants` are operands that the compiler knows. `outputs`: how many the node has. `lacks`: rows that hold and are not
    claimed, with the reason. `undivided`: factors that the case's dims do not let cut by 2 and 3. `close`: tolerance, of the
    largest element. `static`: not tried with dynamic dims. `enumerated`: whether rows that the rule lacks are looked for; not
    so where there are too many placements to try.
    """

    op_type: str
    operands: tuple[Operand, ...]
    attributes: Mapping[str, Any]
    constants: Mapping[int, Array]
    domain: str
    opset: int
    dtype: str
    span: tuple[float, float] | None
    outputs: int
    lacks: Mapping[str, str]
    undivided: str
    close: float
    static: bool
    enumerated: bool

    def __str__(self) -> str:
        shapes = ",".join("-" if one is None else "x".join(map(str, _shape(one))) for one in self.operands)
        words = [f"{name}={value}" for name, value in self.attributes.items()]
        words += [f"#{k}={array.tolist()}" for k, array in self.constants.items()]
        return " ".join([self.op_type, shapes, *words, *([f"opset{self.opset}"] if self.opset != 21 else [])])


def case(
    op_type: str,
    operands: Sequence[Operand],
    attributes: Mapping[str, Any] | None = None,
    *,
    constants: Mapping[int, Any] | None = None,
    domain: str = "",
    opset: int = 21,
    dtype: str = "float32",
    span: tuple[float, float] | None = None,
    outputs: int = 1,
    lacks: Mapping[str, str] | None = None,
    undivided: str = "",
    close: float = 2e-5,
    static: bool = False,
    enumerated: bool = True,
) -> Case:
    """A case; see `Case`. A constant operand may be left out of `operands`."""
    known = {
        k: np.asarray(value, np.int64 if np.asarray(value).dtype.kind == "i" else None)
        for k, value in (constants or {}).items()
    }
    count = max([len(operands), *(k + 1 for k in known)])
    given = [np.asarray(one) if isinstance(one, np.generic) else one for one in operands]
    full = tuple(known[k] if k in known else given[k] if k < len(given) else None for k in range(count))
    return Case(
        op_type,
        full,
        attributes or {},
        known,
        domain,
        opset,
        dtype,
        span,
        outputs,
        lacks or {},
        undivided,
        close,
        static,
        enumerated,
    )


def node_of(this: Case, dynamic: bool = False, feeds: Mapping[str, Array] | None = None) -> ir.Node:
    """The case's node in a graph, every shape known; with `dynamic`, dims above 1 are symbols, equal ones alike."""
    arrays = feeds_of(this) if feeds is None else feeds
    inputs: list[ir.Value | None] = []
    for k, one in enumerate(this.operands):
        if one is None:
            inputs.append(None)
            continue
        array = arrays[f"x{k}"]
        kind = ir.TensorType(_data_type(array.dtype))
        if k in this.constants:
            inputs.append(ir.Value(name=f"x{k}", shape=ir.Shape(array.shape), type=kind, const_value=ir.tensor(array)))
        else:
            dims = [f"d{dim}" if dynamic and dim > 1 else dim for dim in array.shape]
            inputs.append(ir.Value(name=f"x{k}", shape=ir.Shape(dims), type=kind))
    outputs = [ir.Value(name=f"y{k}") for k in range(this.outputs)]
    attributes = ir.convenience.convert_attributes(dict(this.attributes))
    node = ir.Node(this.domain, this.op_type, inputs, attributes, outputs=outputs)
    given = [value for k, value in enumerate(inputs) if value is not None and k not in this.constants]
    known = [value for k, value in enumerate(inputs) if value is not None and k in this.constants]
    opsets = opsets_of(this)
    graph = ir.Graph(given, outputs, nodes=[node], initializers=known, opset_imports=opsets, name="case")
    if dynamic:
        import onnx_shape_inference

        onnx_shape_inference.infer_symbolic_shapes(ir.Model(graph, ir_version=10), warn_on_missing=False)
    else:
        made = _outputs_of(this, node) if feeds is None else run([node], arrays, {}, this)
        for value, array in zip(outputs, made, strict=True):
            value.shape, value.type = ir.Shape(array.shape), ir.TensorType(_data_type(array.dtype))
    return node


def opsets_of(this: Case) -> dict[str, int]:
    """The versions of the domains that a case's node is of."""
    replaced = {"ai.onnx.ml": 3} if this.op_type in ("TreeEnsembleClassifier", "TreeEnsembleRegressor") else {}
    return {"": this.opset, **OPSETS, **replaced}


_known: dict[int, tuple[Case, list[Array]]] = {}
"""By its id a case, which is kept so that no other one has the id, and the outputs of its node by its own operands."""


def _outputs_of(this: Case, node: ir.Node) -> list[Array]:
    if id(this) not in _known:
        _known[id(this)] = this, run([node], feeds_of(this), {}, this)
    return _known[id(this)][1]


def feeds_of(this: Case) -> dict[str, Array]:
    """The operands' numbers, the same for the same case."""
    rng = np.random.default_rng(1000 + len(str(this)))
    found: dict[str, Array] = {}
    for k, one in enumerate(this.operands):
        if isinstance(one, np.ndarray):
            found[f"x{k}"] = one
        elif one is not None:
            found[f"x{k}"] = _numbers(rng, one, np.dtype(this.dtype), this.span)
    return found


_sessions: dict[tuple[Any, ...], Any] = {}


def run(
    nodes: Sequence[ir.Node], feeds: Mapping[str, Array], constants: Mapping[str, Array], this: Case
) -> list[Array]:
    """The outputs of nodes that make `y0`, `y1`, ... of the operands `x0`, ... and of constants."""
    session, names = session_of(nodes, feeds, constants, this)
    return list(session.run(None, {name: feeds[name] for name in names}))


def session_of(
    nodes: Sequence[ir.Node], feeds: Mapping[str, Array], constants: Mapping[str, Array], this: Case
) -> tuple[Any, list[str]]:
    """A session of the nodes for operands of these dtypes, whatever their shapes, and the names of those that it is given."""
    fixed = {name: array for name, array in feeds.items() if int(name[1:]) in this.constants} | dict(constants)
    used = {value.name for node in nodes for value in node.inputs if value is not None}
    given = {name: array.dtype for name, array in feeds.items() if name not in fixed and name in used}
    known = {name: np.asarray(array) for name, array in fixed.items() if name in used}
    protos = [ir.serde.serialize_node(node) for node in nodes]
    key = (
        *(proto.SerializeToString(deterministic=True) for proto in protos),
        *given.items(),
        *((name, array.dtype, array.shape, array.tobytes()) for name, array in known.items()),
        (this.outputs, *opsets_of(this).values()),
    )
    if key not in _sessions:
        graph = onnx.helper.make_graph(
            protos,
            "case",
            [onnx.helper.make_tensor_value_info(name, int(_data_type(dtype)), None) for name, dtype in given.items()],
            [onnx.ValueInfoProto(name=f"y{k}") for k in range(this.outputs)],
            [onnx.numpy_helper.from_array(array, name) for name, array in known.items()],
        )
        opsets = [onnx.helper.make_opsetid(*one) for one in opsets_of(this).items()]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        _sessions[key] = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    return _sessions[key], [*given]


def _data_type(dtype: np.dtype[Any]) -> ir.DataType:
    return ir.DataType.STRING if dtype.kind in "OU" else ir.DataType.from_numpy(dtype)


def _numbers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], span: tuple[float, float] | None
) -> Array:
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind in "iu":
        low, high = span or (0 if dtype.kind == "u" else -9, 10)
        return rng.integers(int(low), int(high), shape).astype(dtype)
    return (eighths(rng, shape) if span is None else rng.uniform(*span, shape)).astype(dtype)


def eighths(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Random multiples of 1/8 up to 4: sums of their products are exact in float32."""
    return np.asarray(rng.integers(-32, 33, shape) / 8)


def _shape(one: Operand) -> tuple[int, ...]:
    return one.shape if isinstance(one, np.ndarray) else one or ()
