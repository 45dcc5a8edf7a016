"""Bombs in ONNX models: what a few bytes of functions, bodies, shapes and constants stand for."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import onnx
from onnx import TensorProto, helper

Bomb = Callable[[random.Random], bytes]
HUGE = 10**12
node = helper.make_node


def model(
    nodes: Sequence[onnx.NodeProto],
    functions: Sequence[onnx.FunctionProto] = (),
    initializers: Sequence[TensorProto] = (),
    dim: object = "n",
    opset: int = 21,
) -> bytes:
    """A model from x to y."""
    ports = [helper.make_tensor_value_info(name, 1, [dim, 6]) for name in "xy"]
    graph = helper.make_graph(list(nodes), "g", ports[:1], ports[1:], list(initializers))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    made = helper.make_model(graph, functions=list(functions), opset_imports=opsets, ir_version=10)
    return bytes(made.SerializeToString())


def function(name: str, nodes: Sequence[onnx.NodeProto], opset: int = 21) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["c"], list(nodes), opsets)


def call(name: str, given: str, made: str) -> onnx.NodeProto:
    return node(name, [given], [made], domain="own")


def doubling(depth: int, opset: int = 21) -> bytes:
    """Functions that each call the next twice."""
    last = function(f"D{depth}", [node("Relu", ["a"], ["c"])], opset)
    found = [function(f"D{k}", [call(f"D{k + 1}", "a", "v"), call(f"D{k + 1}", "v", "c")], opset) for k in range(depth)]
    return model([call("D0", "x", "y")], [*found, last])


def chain(depth: int) -> bytes:
    """Functions that each call the next."""
    found = [function(f"D{k}", [call(f"D{k + 1}", "a", "c")]) for k in range(depth)]
    return model([call("D0", "x", "y")], [*found, function(f"D{depth}", [node("Relu", ["a"], ["c"])])])


def nested(op: str, depth: int, inside: bool = False) -> bytes:
    """Bodies of If or Loop in each other."""
    inner = helper.make_graph([node("Relu", ["x"], ["r"])], "b", [], [helper.make_tensor_value_info("r", 1, None)])
    for k in range(depth):
        name = f"o{k}"
        made = node("If", ["t"], [name], then_branch=inner, else_branch=inner) if op == "If" else None
        if made is None:
            ports = [helper.make_tensor_value_info(f"i{k}", 7, []), helper.make_tensor_value_info(f"k{k}", 9, [])]
            again = node("Identity", [f"k{k}"], [f"k{k}.out"])
            body = helper.make_graph(
                [*inner.node, again], "b", ports, [helper.make_tensor_value_info(f"k{k}.out", 9, []), *inner.output]
            )
            made = node("Loop", ["m", "t"], [name], body=body)
        inner = helper.make_graph([made], "b", [], [helper.make_tensor_value_info(name, 1, None)])
    constants = [
        helper.make_tensor("t", TensorProto.BOOL, [], [True]),
        helper.make_tensor("m", TensorProto.INT64, [], [10**9]),
    ]
    return model([*inner.node, node("Add", ["x", inner.output[0].name], ["y"])], (), constants)


def deep_bytes(depth: int) -> bytes:
    """Graphs in attributes in nodes in graphs, written by hand, since protobuf does not write so many."""
    data = b""
    for _ in range(depth):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # attribute.g, node.attribute, graph.node
            data = tag + _varint(len(data)) + data
            if len(data) > 3_000_000:
                return b"\x3a" + _varint(len(data)) + data
    return b"\x08\x0a\x3a" + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def unsaid(dims: Sequence[int], kind: int = TensorProto.FLOAT, raw: bytes | None = None) -> TensorProto:
    """A tensor without its numbers."""
    made = TensorProto(name="w", data_type=kind, dims=dims)
    if raw is not None:
        made.raw_data = raw
    return made


def external(**where: object) -> TensorProto:
    made = TensorProto(name="w", data_type=1, dims=[6, 6], data_location=TensorProto.EXTERNAL)
    for key, value in where.items():
        made.external_data.add(key=key, value=str(value))
    return made


def sizes(*numbers: int) -> TensorProto:
    return helper.make_tensor("s", TensorProto.INT64, [len(numbers)], list(numbers))


MULTIPLY = [node("MatMul", ["x", "w"], ["y"])]
ADD = [node("MatMul", ["x", "w"], ["y"])]

MODELS: Mapping[str, Bomb] = {
    "functions that double": lambda chance: doubling(chance.choice([22, 30, 60, 1000])),
    "functions that double, of another opset": lambda chance: doubling(chance.choice([22, 30, 60]), 18),
    "a long chain of functions": lambda chance: chain(chance.choice([3000, 20_000])),
    "a function of itself": lambda chance: model(
        [call("D", "x", "y")], [function("D", [call("D", "a", "v"), call("D", "v", "c")])]
    ),
    "functions of each other": lambda chance: model(
        [call("D", "x", "y")], [function("D", [call("E", "a", "c")]), function("E", [call("D", "a", "c")])]
    ),
    "bodies of If": lambda chance: nested("If", chance.choice([10, 12])),
    "bodies of Loop": lambda chance: nested("Loop", chance.choice([9, 30])),
    "deep bytes": lambda chance: deep_bytes(chance.choice([1000, 100_000])),
    "many nodes": lambda chance: model([], ()) + b"\x3a" + _varint(3_000_000) + b"\x0a\x00" * 1_500_000,
    "a weight without numbers": lambda chance: model(MULTIPLY, (), [unsaid([6, HUGE])]),
    "a weight of many dims": lambda chance: model(MULTIPLY, (), [unsaid([1] * 100_000, raw=bytes(4))]),
    "a weight of negative dims": lambda chance: model(MULTIPLY, (), [unsaid([6, -6])]),
    "a weight of too few numbers": lambda chance: model(MULTIPLY, (), [unsaid([6, 6], raw=bytes(8))]),
    "a weight of no type": lambda chance: model(MULTIPLY, (), [unsaid([6, 6], 99, bytes(144))]),
    "a weight of dims that overflow": lambda chance: model(MULTIPLY, (), [unsaid([1 << 62, 1 << 62])]),
    "numbers outside of a file": lambda chance: model(
        MULTIPLY, (), [external(location="model.onnx", offset=chance.choice([10**6, 10**17]), length=144)]
    ),
    "numbers before a file": lambda chance: model(MULTIPLY, (), [external(location="model.onnx", offset=-8)]),
    "numbers at no number": lambda chance: model(MULTIPLY, (), [external(location="model.onnx", offset="9" * 5000)]),
    "numbers elsewhere": lambda chance: model(
        MULTIPLY, (), [external(location=chance.choice(["../../etc/passwd", "/dev/zero", "a\0b", "a" * 5000, ""]))]
    ),
    "a large ConstantOfShape": lambda chance: model(
        [node("ConstantOfShape", ["s"], ["w"]), *MULTIPLY], (), [sizes(6, chance.choice([10**9, HUGE, 1 << 62]))]
    ),
    "a large Expand": lambda chance: model(
        [node("Expand", ["v", "s"], ["w"]), *MULTIPLY],
        (),
        [sizes(6, HUGE), helper.make_tensor("v", 1, [1], [0.5])],
    ),
    "a large Range": lambda chance: model(
        [node("Range", ["b", "e", "d"], ["w"]), node("Add", ["x", "w"], ["y"])],
        (),
        [helper.make_tensor(name, 1, [], [number]) for name, number in (("b", 0.0), ("e", 1e12), ("d", 1.0))],
    ),
    "a large Tile": lambda chance: model(
        [node("Tile", ["v", "s"], ["w"]), node("Add", ["x", "w"], ["y"])],
        (),
        [sizes(HUGE), helper.make_tensor("v", 1, [1], [0.5])],
    ),
    "a large Pad": lambda chance: model([node("Pad", ["x", "s"], ["y"])], (), [sizes(HUGE, HUGE, HUGE, HUGE)]),
    "a dim that overflows": lambda chance: model([node("Relu", ["x"], ["y"])], dim=chance.choice([-5, 1 << 62])),
    "a deep dim": lambda chance: model([node("Relu", ["x"], ["y"])], dim="(" * 100_000 + "n"),
    "a long dim": lambda chance: model([node("Relu", ["x"], ["y"])], dim="n" + "*n" * 20_000),
    "a name of many lines": lambda chance: model([node("Relu", ["x"], ["y"], name="a\n" * 100_000)]),
    "a name that is not UTF-8": lambda chance: model([node("Relu", ["x"], ["y"], name="QQQQ")]).replace(
        b"QQQQ", b"\xff\xfe\xff\xfe"
    ),
    "an unknown opset": lambda chance: model([node("Relu", ["x"], ["y"])], opset=chance.choice([1, 99, (1 << 62)])),
    "an op that is not known": lambda chance: model([node("A" * 100_000, ["x"], ["y"])]),
    "a cycle": lambda chance: model([node("Add", ["x", "b"], ["a"]), node("Add", ["a", "x"], ["b"])]),
    "cut short": lambda chance: doubling(3)[: chance.randrange(4, 200)],
    "nothing": lambda chance: b"",
    "chance": lambda chance: chance.randbytes(5000),
    "zeros": lambda chance: bytes(20_000_000),
    "a text": lambda chance: b"#!/bin/sh\n" * 100,
}
