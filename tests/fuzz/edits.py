"""Edits of ONNX models and of bytes: what an exporter's fault, a broken disk or somebody's tool may make of a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import pool  # noqa: F401, it finds the modules of the tests
from odd_values import FLOATS, INTS, NAMES
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

OPS = [
    "Relu",
    "Add",
    "MatMul",
    "Gemm",
    "Conv",
    "Reshape",
    "Transpose",
    "Slice",
    "Split",
    "Concat",
    "If",
    "Loop",
    "Scan",
    "Range",
    "ConstantOfShape",
]
OPS += [
    "Expand",
    "Tile",
    "Pad",
    "Gather",
    "Resize",
    "Softmax",
    "LayerNormalization",
    "Dropout",
    "RandomNormal",
    "SequenceConstruct",
    "LSTM",
    "Cast",
]
OPS += [
    "BatchNormalization",
    "MaxPool",
    "OneHot",
    "EyeLike",
    "Constant",
    "QuantizeLinear",
    "Einsum",
    "NoSuchOp",
    "Identity",
    "Optional",
    "TopK",
    "NonZero",
]
DOMAINS = ["", "ai.onnx", "com.microsoft", "ai.onnx.ml", "partc.comm", "partc.optimizer", "my.own", "ai.onnx.training"]

Edit = Callable[[random.Random, ModelProto], None]
_MOST_NODES = 400


def flips(chance: random.Random, data: bytes) -> bytes:
    """Bytes changed, taken out, doubled or put in; or the end cut off."""
    kind = chance.randrange(6)
    if kind == 0:
        return data[: chance.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(changed)) if changed else 0
        match chance.randrange(5):
            case 0 | 1 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 2 if changed:
                changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 3:
                del changed[at : at + chance.choice((1, 2, 4, 64))]
            case _:
                changed[at:at] = changed[at : at + chance.choice((1, 4, 64))] or bytes([chance.randrange(256)])
    return bytes(changed)


def graphs(graph: GraphProto) -> list[GraphProto]:
    """A graph and the bodies in it."""
    found = [graph]
    for node in graph.node:
        for attribute in node.attribute:
            for body in (
                [attribute.g, *attribute.graphs]
                if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS)
                else ()
            ):
                found += graphs(body)
    return found


def _node(chance: random.Random, model: ModelProto) -> NodeProto:
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    nodes += [node for function in model.functions for node in function.node]
    return chance.choice(nodes) if nodes else model.graph.node.add()


def _name(chance: random.Random, model: ModelProto) -> str:
    there = [name for node in model.graph.node for name in (*node.input, *node.output)]
    there += [one.name for one in (*model.graph.input, *model.graph.initializer, *model.graph.output)]
    return chance.choice(there if there and chance.random() < 0.7 else NAMES)


def _tensor(chance: random.Random, model: ModelProto) -> TensorProto:
    tensors = [tensor for graph in graphs(model.graph) for tensor in graph.initializer]
    return chance.choice(tensors) if tensors else model.graph.initializer.add(name="w", data_type=1, dims=[2])


def rename(chance: random.Random, model: ModelProto) -> None:
    """An operand or a result of a node has another name: dangling, a cycle, made twice."""
    node = _node(chance, model)
    names = node.input if (chance.random() < 0.6 and node.input) or not node.output else node.output
    if names:
        names[chance.randrange(len(names))] = _name(chance, model)


def operands(chance: random.Random, model: ModelProto) -> None:
    """A node has an operand or a result more or less."""
    names = chance.choice([(node := _node(chance, model)).input, node.output])
    if names and chance.random() < 0.5:
        del names[chance.randrange(len(names))]
    else:
        names.extend([_name(chance, model)] * chance.choice((1, 1, 2, 40)))


def op(chance: random.Random, model: ModelProto) -> None:
    """A node is of another op or domain."""
    node = _node(chance, model)
    if chance.random() < 0.7:
        node.op_type = chance.choice([*OPS, "", "\x00", "x" * 2000])
    else:
        node.domain = chance.choice(DOMAINS)


def attributes(chance: random.Random, model: ModelProto) -> None:
    """A node has another attribute, or one of another value or type."""
    node = _node(chance, model)
    known = [
        "axis",
        "axes",
        "perm",
        "to",
        "alpha",
        "transB",
        "keepdims",
        "value",
        "body",
        "epsilon",
        "kernel_shape",
        "seed",
        "dtype",
        "equation",
    ]
    if node.attribute and chance.random() < 0.6:
        found = chance.choice(list(node.attribute))
        if chance.random() < 0.2:
            node.attribute.remove(found)
            return
    else:
        found = node.attribute.add(name=chance.choice([*known, *NAMES]))
    kind = (
        found.type
        if chance.random() < 0.5 and found.type
        else chance.choice(list(AttributeProto.AttributeType.values()))
    )
    found.type = kind
    match AttributeProto.AttributeType.Name(kind):
        case "INT":
            found.i = chance.choice(INTS)
        case "FLOAT":
            found.f = chance.choice(FLOATS)
        case "STRING":
            found.s = chance.choice([b"", b"\xff\xfe", b"sum", b"SAME_UPPER", b"ij,jk->ik", b"x" * 3000])
        case "INTS":
            found.ints[:] = [chance.choice(INTS) for _ in range(chance.choice((0, 1, 2, 3, 9)))]
        case "FLOATS":
            found.floats[:] = [chance.choice(FLOATS) for _ in range(chance.choice((0, 1, 3)))]
        case "TENSOR":
            odd_tensor(chance, found.t)
        case "GRAPH":
            body = GraphProto()
            body.CopyFrom(chance.choice(graphs(model.graph)))
            del body.node[20:]
            found.g.CopyFrom(body)
        case _:
            found.strings.append(b"\xff")


def odd_tensor(chance: random.Random, tensor: TensorProto) -> None:
    """Dims, type or data of a tensor that do not fit together."""
    match chance.randrange(7):
        case 0:
            tensor.dims[:] = [chance.choice(INTS) for _ in range(chance.choice((0, 1, 2, 5)))]
        case 1:
            tensor.data_type = chance.choice([*range(28), 99, -1])
        case 2:
            tensor.raw_data = tensor.raw_data[: chance.randrange(len(tensor.raw_data) + 1)]
        case 3:
            tensor.name = chance.choice(NAMES)
        case 4:
            outside(chance, tensor)
        case 5:
            tensor.float_data.extend([1.0] * chance.choice((1, 7, 60)))
        case _:
            tensor.int64_data.extend(chance.choice(INTS) for _ in range(3))


def outside(chance: random.Random, tensor: TensorProto) -> None:
    """A tensor's data is said to be in a file."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    places = [
        "data.bin",
        "../data.bin",
        "/etc/passwd",
        "/dev/zero",
        "",
        ".",
        "no/such",
        "model.onnx",
        "a\x00b",
        "C:\\x",
        "~/x",
        "data.bin/../data.bin",
    ]
    numbers = ["0", "8", "-1", "", "x", "99999999999999999999", "1e3", " 4", "\u0664"]
    for key, some in (("location", places), ("offset", numbers), ("length", numbers), ("checksum", numbers)):
        if chance.random() < 0.7:
            tensor.external_data.add(key=key, value=chance.choice(some))


def weights(chance: random.Random, model: ModelProto) -> None:
    """An initializer is odd, there twice, away, or sparse."""
    match chance.randrange(5):
        case 0 if model.graph.initializer:
            del model.graph.initializer[chance.randrange(len(model.graph.initializer))]
        case 1:
            model.graph.initializer.append(_tensor(chance, model))
        case 2:
            sparse = model.graph.sparse_initializer.add()
            sparse.values.CopyFrom(_tensor(chance, model))
            sparse.indices.CopyFrom(_tensor(chance, model))
            sparse.dims[:] = [chance.choice(INTS) for _ in range(2)]
        case _:
            odd_tensor(chance, _tensor(chance, model))


def ports(chance: random.Random, model: ModelProto) -> None:
    """An input, an output or a declared value has another name, type or shape, is there twice, or away."""
    graph = chance.choice(graphs(model.graph))
    lists: Sequence[Any] = [graph.input, graph.output, graph.value_info]
    some = chance.choice(lists)
    if not some or chance.random() < 0.1:
        some.add(name=chance.choice(NAMES))
        return
    port = chance.choice(list(some))
    dims = port.type.tensor_type.shape.dim
    match chance.randrange(7):
        case 0:
            port.name = chance.choice(NAMES)
        case 1:
            port.type.tensor_type.elem_type = chance.choice([*range(28), 99])
        case 2 if dims:
            chance.choice(list(dims)).dim_value = chance.choice(INTS)
        case 3 if dims:
            chance.choice(list(dims)).dim_param = chance.choice(
                [*NAMES, "n+1", "n*", "2*n", "n//0", "(" * 200, "batch", "0", "9" * 400, "Max(n"]
            )
        case 4:
            port.type.CopyFrom(onnx.TypeProto())
            if chance.random() < 0.6:
                port.type.CopyFrom(helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2])))
        case 5:
            some.add().CopyFrom(port)
        case _:
            some.remove(port)


def order(chance: random.Random, model: ModelProto) -> None:
    """Nodes in another order, one away, one twice, or one repeated as a long chain."""
    nodes = chance.choice(graphs(model.graph)).node
    if not nodes:
        return
    one, two = chance.randrange(len(nodes)), chance.randrange(len(nodes))
    copy = NodeProto()
    copy.CopyFrom(nodes[one])
    match chance.randrange(4):
        case 0:
            del nodes[one]
        case 1:
            nodes.add().CopyFrom(copy)
        case 2 if copy.input and copy.output and len(nodes) < _MOST_NODES:
            for at in range(chance.choice((3, 300))):
                nodes.add(op_type="Relu", input=[copy.output[0] if at == 0 else f"c{at}"], output=[f"c{at + 1}"])
        case _:
            nodes[one].CopyFrom(nodes[two])
            nodes[two].CopyFrom(copy)


def header(chance: random.Random, model: ModelProto) -> None:
    """Versions, domains and metadata."""
    match chance.randrange(6):
        case 0:
            model.ir_version = chance.choice([0, 1, 3, 8, 12, 99, -1, 2**62])
        case 1 if model.opset_import:
            chance.choice(list(model.opset_import)).version = chance.choice([0, 1, 6, 7, 13, 22, 26, 99, -1, 2**62])
        case 2 if model.opset_import:
            del model.opset_import[:]
        case 3:
            model.opset_import.add(domain=chance.choice(DOMAINS), version=chance.choice([1, 2, 99]))
        case 4:
            model.metadata_props.add(
                key=chance.choice(["partc.ranks", "partc.path", "", "x"]), value=chance.choice(NAMES)
            )
        case _:
            _node(chance, model).metadata_props.add(
                key=chance.choice(["partc.path", "pkg.onnxscript.name_scopes", "namespace", "partc.cut"]),
                value=chance.choice([*NAMES, "['a', 'b'", "[]", "[[[", "a.b.c"]),
            )


def functions(chance: random.Random, model: ModelProto) -> None:
    """A local function: recursive, without a body, of another name, with another list of inputs; or calls of one."""
    if not model.functions or chance.random() < 0.4:
        made = model.functions.add(
            name=chance.choice(["f", "Relu", ""]), domain=chance.choice(["local", "", "partc.optimizer"])
        )
        made.input.append("a")
        made.output.append("b")
        made.opset_import.add(domain="", version=21)
        inner = chance.choice(["f", "Relu", "NoSuchOp"])
        made.node.add(op_type=inner, domain=made.domain if inner == "f" else "", input=["a"], output=["b"])
        node = _node(chance, model)
        node.op_type, node.domain = made.name, made.domain
        if made.domain:
            model.opset_import.add(domain=made.domain, version=1)
        return
    found = chance.choice(list(model.functions))
    match chance.randrange(4):
        case 0:
            del found.node[:]
        case 1:
            found.input.append(chance.choice(NAMES))
        case 2:
            found.name = chance.choice(NAMES)
        case _:
            model.functions.remove(found)


def nest(chance: random.Random, model: ModelProto) -> None:
    """A node inside of an If or a Loop, once or many times."""
    node = NodeProto()
    node.CopyFrom(_node(chance, model))
    if not node.output:
        return
    for depth in range(chance.choice((1, 2, 30))):
        body = GraphProto(name=f"body{depth}")
        body.node.add().CopyFrom(node)
        for name in node.output:
            body.output.add(name=name)
        outputs = list(node.output)
        if chance.random() < 0.8:
            node = helper.make_node("If", ["flag"], outputs, then_branch=body, else_branch=body)
        else:
            node = helper.make_node("Loop", ["", "flag"], outputs, body=body)
        if depth > 12:
            del node.attribute[1:]
    model.graph.initializer.append(helper.make_tensor("flag", TensorProto.BOOL, [], [True]))
    model.graph.node.insert(0, node)


EDITS: list[Edit] = [
    rename,
    rename,
    operands,
    op,
    attributes,
    attributes,
    weights,
    ports,
    ports,
    order,
    header,
    functions,
    nest,
]


def edit(chance: random.Random, model: ModelProto) -> None:
    """A few edits of a model, in place."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        chance.choice(EDITS)(chance, model)
