"""Checks the types inside a rank file: the types inferred anew from inputs and weights must be those that the file declares.

Inference starts from the graph's inputs, the weights, the values received from other ranks, and the outputs of ops without an ONNX
schema; onnx infers all other types, at a few legal sizes of the symbols, because equal expressions may be written in many ways.
A dim that is unknown on either side is equal to any.

    h [batch/2, 8] = MatMul(x [batch/2, 4], w [4, 7])       declared [batch/2, 8], and the node makes [batch/2, 7]
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping

import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper
from partc.runtime.artifact.format import Manifest, Shape
from partc.runtime.artifact.graph.onnx_graph import all_nodes, node_title, path_of
from partc.runtime.artifact.graph.rank_constants import bound, is_rank_constant
from partc.runtime.artifact.tensors.dtypes import type_text
from partc.runtime.artifact.tensors.stored_weight import is_read_here
from partc.runtime.checker.graph.symbols import filled_samples, numbers
from partc.runtime.errors import ArtifactError, Violation

_AGAIN = "compile the model again"
_SIZES = 2
_LONG = 1 << 16
"""The number of elements from which a vector counts as long: shapes, and values that shapes are computed from, are shorter."""
_OPAQUE = ("If", "Loop", "Scan", "Optional", "OptionalGetElement", "SequenceAt", "SequenceMap")
"""Ops whose outputs are taken as declared, since onnx does not infer their shapes reliably."""
_WEIGHTS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "DeformConv": 1}
"""Maps each op to the index of its weight, whose dims are the kernel's if no attribute states them."""
_POOLS = {"AveragePool", "LpPool", "MaxPool"}
_UNKNOWN = TypeProto()


def check_types(file: str, model: ModelProto, manifest: Manifest, count: int = _SIZES) -> list[Violation]:
    """Returns a violation for the first node that makes another type or shape than the file declares; the graph must be valid.

    The types are compared at `count` sizes of the symbols.
    """
    model = _with_constants(model, manifest, file)
    stated = _declared(model)
    makers = {name: node for node in model.graph.node for name in node.output if name}
    names = (dim.dim_param for kind in stated.values() for dim in kind.tensor_type.shape.dim if dim.dim_param)
    for sizes in filled_samples(manifest, names, count if manifest.symbols else 1):
        light = _at(without_weights(model), manifest, sizes)
        declared = _declared(light)
        try:
            made = _outputs_of(light, declared, stated)
        except (onnx.shape_inference.InferenceError, MemoryError, UnicodeDecodeError) as error:
            return [Violation(file, f"its types contradict each other: {' '.join(str(error).split())}", help=_AGAIN)]
        for name, node in makers.items():
            if name in stated and name in made and declared[name] != made[name]:
                for fact in _differs(name, _type(stated[name]), _type(made[name]), manifest, sizes):
                    return [Violation(file, fact, node_title(node), path_of(node), _AGAIN)]
    return []


def _declared(model: ModelProto) -> dict[str, TypeProto]:
    return {port.name: port.type for port in (*model.graph.value_info, *model.graph.input, *model.graph.output)}


def _outputs_of(
    model: ModelProto, declared: Mapping[str, TypeProto], stated: Mapping[str, TypeProto]
) -> dict[str, TypeProto]:
    """The output types of nodes. Where onnx loses a size, or infers an impossible one, the declared type is used.

    `declared`: with dims as numbers; `stated`: as the file has them.
    """
    inferred = _inferred(model)
    believed = _undetermined(model, stated, inferred)
    if believed:
        inferred |= _inferred(model, believed)
    stated_types = {name: type for name, type in declared.items() if name not in inferred}
    stated_types |= {
        one.name: helper.make_tensor_type_proto(one.data_type, one.dims) for one in model.graph.initializer
    }
    while True:
        known = {**stated_types, **inferred}
        unfit = {node.output[0] for node in model.graph.node if _does_not_fit(node, known)} - believed
        if not unfit:
            return inferred
        believed |= unfit
        stated_types |= {name: declared[name] for name in unfit if name in declared}
        inferred = _inferred(model, believed)


def as_plain_onnx(model: ModelProto) -> ModelProto:
    """Returns the model in a form that `onnx.checker` accepts: without external data, and with nonstandard ops in a domain of their own.

    Nonstandard are the ops that only onnxruntime has, and those that the standard has deprecated and onnxruntime still runs, such as
    GroupNormalization of opset 18. External data are checked elsewhere. The checker demands a shape of every output, though the standard
    has values of unknown rank.
    """
    plain = without_weights(model)
    opset = next((entry.version for entry in plain.opset_import if not entry.domain), 1)
    for node in all_nodes(plain.graph.node):
        if not node.domain and not _is_of_onnx(node.op_type, opset):
            node.domain = "com.microsoft"
    if all(entry.domain != "com.microsoft" for entry in plain.opset_import):
        plain.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for port in plain.graph.output:
        if port.type.HasField("tensor_type") and not port.type.tensor_type.HasField("shape"):
            port.type.tensor_type.shape.SetInParent()
    return plain


@functools.cache
def _is_of_onnx(op_type: str, opset: int) -> bool:
    return onnx.defs.has(op_type, max_inclusive_version=opset) and not onnx.defs.get_schema(op_type, opset).deprecated


def without_weights(model: ModelProto, read_here: bool = False) -> ModelProto:
    """Returns a copy whose external weights are graph inputs; with `read_here`, only those weights that onnxruntime does not read."""

    def left(tensor: TensorProto) -> bool:
        return is_read_here(tensor) if read_here else tensor.data_location == TensorProto.EXTERNAL

    light = ModelProto()
    light.CopyFrom(model)
    listed = {port.name for port in light.graph.input}
    for tensor in model.graph.initializer:
        if left(tensor) and tensor.name not in listed:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    kept = [tensor for tensor in light.graph.initializer if not left(tensor)]
    del light.graph.initializer[:]
    light.graph.initializer.extend(kept)
    return light


def _undetermined(model: ModelProto, declared: Mapping[str, TypeProto], inferred: Mapping[str, TypeProto]) -> set[str]:
    """Returns the values at which onnx loses a size that the file declares, such as slices with a computed begin.

    The types after them are inferred from their declared types.
    """
    lost: set[str] = set()
    unknown: set[str] = set()
    for node in model.graph.node:
        for name in filter(None, node.output):
            if name in inferred and None in _sizes(inferred[name]):
                unknown.add(name)
                if unknown.isdisjoint(node.input) and name in declared and None not in _sizes(declared[name], True):
                    lost.add(name)
    return lost


def _sizes(type: TypeProto, names: bool = False) -> list[int | None]:
    """The dims of a tensor, None for an unknown dim, and [None] for an unknown shape; with `names`, a named dim is known, as 0."""
    tensor = type.tensor_type
    if not type.HasField("tensor_type") or not tensor.HasField("shape"):
        return [None]
    return [
        dim.dim_value if dim.HasField("dim_value") else 0 if names and dim.dim_param else None
        for dim in tensor.shape.dim
    ]


def _does_not_fit(node: NodeProto, types: Mapping[str, TypeProto]) -> bool:
    """Whether a window of a convolution or pooling covers more than its padded input; `types` maps values to types with dims as numbers.

    The number of such windows is rounded towards 0 by onnx, and down by a file's expressions: the node's outputs are taken as declared.

        MaxPool <kernel_shape = [2]> of [n, 4, w] with w = 1        declared [n, 4, floor(w/2)], onnx says [n, 4, 1]
    """
    if node.domain or node.op_type not in {*_WEIGHTS, *_POOLS} or not node.input:
        return False
    said = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    automatic = said.get("auto_pad", b"NOTSET")
    if automatic in (b"SAME_UPPER", b"SAME_LOWER"):
        return False
    at = _WEIGHTS.get(node.op_type)
    weight = _sizes(types.get(node.input[at], _UNKNOWN)) if at is not None and at < len(node.input) else []
    kernel: list[int | None] = said.get("kernel_shape") or weight[2:]
    dims = _sizes(types.get(node.input[0], _UNKNOWN))[2:]
    if len(kernel) != len(dims):
        return False
    none = [0] * (2 * len(dims))
    pads = none if automatic == b"VALID" else said.get("pads") or none
    dilations = said.get("dilations") or [1] * len(dims)
    return any(
        (covered - 1) * dilations[k] + 1 > size + pads[k] + pads[k + len(dims)]
        for k, (covered, size) in enumerate(zip(kernel, dims, strict=True))
        if covered is not None and size is not None
    )


def _inferred(model: ModelProto, believed: Collection[str] = ()) -> dict[str, TypeProto]:
    """The types of the values that nodes make, by name, with dims as numbers where the sizes of the symbols determine them.

    Values in `believed` are taken as declared, like values received from other ranks.
    """
    light = ModelProto()
    light.CopyFrom(model)
    graph = light.graph
    stated_names = {name for node in graph.node if _is_stated(node, light) for name in node.output} | {*believed}
    types = {port.name: port for port in (*model.graph.value_info, *model.graph.output)}
    del graph.value_info[:]
    graph.value_info.extend([types[name] for name in sorted(stated_names & types.keys())])
    for port in graph.output:
        if port.name not in stated_names:
            port.CopyFrom(ValueInfoProto(name=port.name))
    made = _infer(light)
    return {
        port.name: port.type for port in (*made.graph.value_info, *made.graph.output) if port.name not in stated_names
    }


def _infer(model: ModelProto) -> ModelProto:
    """Returns the model with inferred types; the numbers in vectors are propagated only if some size is unknown without them.

    They are not propagated if a vector is long: onnx makes a dim, of a hundred bytes, of each of its elements.
    """
    inferred = onnx.shape_inference.infer_shapes(model)
    graph = inferred.graph
    types = {port.name: port.type for port in (*graph.value_info, *graph.output, *graph.input)}
    vectors = [tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) == 1]
    vectors += [sizes[0] or 0 for sizes in map(_sizes, types.values()) if len(sizes) == 1]
    results = [types.get(name) for node in graph.node for name in node.output if name]
    if max(vectors, default=0) > _LONG or all(type is not None and None not in _sizes(type) for type in results):
        return inferred
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def _with_constants(model: ModelProto, manifest: Manifest, file: str) -> ModelProto:
    """Returns the model as the first of its ranks reads it, with rank constants as weights, so that slices by them have a known size."""
    if not any(map(is_rank_constant, model.graph.node)):
        return model
    rank = next((rank for rank in range(manifest.ranks) if file.endswith(manifest.program(rank))), 0)
    copy = ModelProto()
    copy.CopyFrom(model)
    try:
        return bound(copy, manifest.groups_of(rank), rank, file)
    except ArtifactError:
        return model  # another check says which constant is not sound


@functools.cache
def _standard_ops() -> frozenset[str]:
    """The ops that have a schema in onnx, in any opset."""
    return frozenset(schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain)


def _is_stated(node: NodeProto, model: ModelProto) -> bool:
    """Whether a node's outputs are taken as declared: received from other ranks, of an op unknown to onnx, or inferred wrongly by it."""
    if any((node.domain, node.op_type) == (one.domain, one.name) for one in model.functions):
        return False
    if node.op_type == "STFT" and all(one.name != "onesided" for one in node.attribute):
        return True  # onnx infers all frequencies, and the op's default is one side of them
    if node.op_type == "Split" and any(one.name == "num_outputs" for one in node.attribute):
        return True  # for a dim smaller than the number of outputs onnx infers impossible sizes, and such a node never runs
    return bool(node.domain) or node.op_type not in _standard_ops() or node.op_type in _OPAQUE


def _at(model: ModelProto, manifest: Manifest, sizes: Mapping[str, int]) -> ModelProto:
    """Replaces the dims of declared types by numbers, in place, and returns the model."""
    known: dict[str, int | None] = {}
    for port in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        if not port.type.HasField("tensor_type") or not port.type.tensor_type.HasField("shape"):
            continue
        for dim in port.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                if (text := dim.dim_param) not in known:
                    (known[text],) = numbers([text], manifest, dict(sizes))
                size = known[text]
                if size is None or not 0 <= size < 1 << 63:
                    dim.ClearField("dim_param")
                else:
                    dim.dim_value = size
    return model


def _type(type: TypeProto) -> tuple[str, Shape]:
    """Type and shape; None for a shape of unknown rank, an empty text for an unknown dim."""
    tensor = type.tensor_type
    text = (
        type_text(type) if type.WhichOneof("value") and (not type.HasField("tensor_type") or tensor.elem_type) else ""
    )
    if not type.HasField("tensor_type") or not tensor.HasField("shape"):
        return text, None
    return text, [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]


def _differs(
    name: str, declared: tuple[str, Shape], inferred: tuple[str, Shape], manifest: Manifest, sizes: Mapping[str, int]
) -> Iterator[str]:
    if declared[0] and inferred[0] and declared[0] != inferred[0]:
        yield f"it makes '{name}' a {inferred[0]}, and the file declares a {declared[0]}"
        return
    if declared[1] is None or inferred[1] is None or declared[1] == inferred[1]:
        return
    wanted, have = (numbers(shape, manifest, dict(sizes)) for shape in (declared[1], inferred[1]))
    if len(wanted) != len(have) or any(None not in (a, b) and a != b for a, b in zip(wanted, have, strict=True)):
        text = ", ".join("?" if size is None else str(size) for size in have)
        stated = ", ".join(str(dim) or "?" for dim in declared[1])
        at = f" with {dict(sizes)}" if sizes else ""
        yield f"it makes '{name}' of [{text}]{at}, and the file declares [{stated}]"
