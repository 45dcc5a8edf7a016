"""Measures the time of a session, a node of each kernel, and products on this rank.

The models have one op, and their operands are bound once, as the runtime binds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.compiler.cost.machine import FEW, FEW_INT4
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Array
from partc.runtime.artifact.tensors.tensor import Tensor
from partc.runtime.devices.devices import HOST
from partc.runtime.program.ort import new_session

if TYPE_CHECKING:
    from onnx import NodeProto

_IR_VERSION, _OPSET = 10, 21
_LONGEST, _MOST, _LEAST = 0.1, 200, 5
"""The limits of one measurement: the most seconds, the most runs and the fewest runs."""
_WARM = 2
_TELLS = 1e-4
"""The seconds from which on the clock of a thread is exact enough."""
_CHAIN = 33
_BETWEEN = 1 << 24
"""The bytes that other work in a step touches between two runs of a session."""
_MIXED = ("Neg", "Add", "Greater", "Where", "Mul", "Greater", "Cast", "Exp")
_ELEMENT, _ID = 4, 8
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""The bytes that a node moves."""
_CACHED, _MEMORY = (1 << 21, 1 << 23, 1 << 25), 1 << 26
"""Larger sizes: with an elementwise op they show where caches end, and the speed of memory beyond all caches."""
_MATRICES = (16, 32, 64, 128, 256, 512)
_BATCHES = ((8, 64), (16, 64), (32, 64), (64, 64), (128, 16), (256, 4))
"""The rows (and columns) of the matrices of a batch, and their number: together they fill the caches."""
_VECTOR = 64
"""The number of elements of each vector of a batch."""
_IMAGES = ((8, 8), (16, 16), (32, 28), (64, 56))
"""The channels of an image, and its pixels along each side."""
_PLACES = 9
"""The number of elements of a filter for one channel: 3 x 3."""
_FEW, _SECOND = 4, (32, 128, 512, 2048)
"""The rows of thin products, and the rows (and columns) of their second operands."""
_ROWS, _WEIGHT, _BLOCK = (1, 2, 5, 9), 2048, 32
"""The rows of products with a constant weight, the rows (and columns) of the weight, and the rows of a block of 4 bits."""
_FILTERS = 8
"""The number of filters of a convolution: small, so that its time is that of copying the windows."""


@dataclass(frozen=True)
class Sample:
    """A model of one op: its nodes, its inputs, and the amount (bytes moved, or operations) of each of its `count` equal parts.

    `weights`: its constants. `before`: what is called before each run.
    """

    nodes: Sequence[NodeProto]
    inputs: dict[str, Array]
    amount: float
    count: int = 1
    weights: Mapping[str, Array] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None


def undisturbed(taken: Sequence[float]) -> float:
    """Returns the lower quartile of times: the time of a run that no other process on the core has interrupted."""
    ordered = sorted(taken)
    return ordered[len(ordered) // 4]


def clock_of(threads: int) -> Callable[[], float]:
    """Returns the clock for a session's runs: for one thread its CPU time, which does not count time that other processes have its core."""
    return time.thread_time if threads == 1 else time.perf_counter


def timed(action: Callable[[], object], threads: int, before: Callable[[], object] = lambda: None) -> float:
    """Returns the seconds of an undisturbed run of an action, after warm-up; in its thread's CPU time where that is precise enough.

    `before` is called before each run, and its time is not counted.
    """
    for _ in range(_WARM):
        action()
    clock, begun = clock_of(threads), time.perf_counter()
    taken, worked = list[float](), list[float]()
    for count in range(_MOST):
        if count >= _LEAST and time.perf_counter() - begun >= _LONGEST:
            break
        before()
        work, start = clock(), time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
        worked.append(clock() - work)
    wall, own = undisturbed(taken), undisturbed(worked)
    return own if own > _TELLS else wall


def session_run(sample: Sample, threads: int) -> Callable[[], object]:
    """Returns a function that runs a sample's model once, with its operands bound."""
    from onnx import helper, numpy_helper

    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in sample.inputs.items()
    ]
    last = sample.nodes[-1].output[0]
    constants = [numpy_helper.from_array(array, name) for name, array in sample.weights.items()]
    graph = helper.make_graph(sample.nodes, "sample", inputs, [helper.make_empty_tensor_value_info(last)], constants)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=opsets)
    session = new_session(model.SerializeToString(), threads, HOST, {"session.intra_op.allow_spinning": "0"})
    (result,) = session.run([last], sample.inputs)
    binding = session.io_binding()
    held = []
    for name, array in sample.inputs.items():
        tensor = Tensor.of(array, BY_CODE[helper.np_dtype_to_tensor_dtype(array.dtype)])
        held.append(tensor)
        binding.bind_input(name, "cpu", 0, tensor.dtype.code, tensor.shape, tensor.pointer)
    made = Tensor.empty(BY_CODE[helper.np_dtype_to_tensor_dtype(result.dtype)], result.shape)
    held.append(made)
    binding.bind_output(last, "cpu", 0, made.dtype.code, made.shape, made.pointer)

    def run() -> list[Tensor]:
        session.run_with_iobinding(binding)
        return held

    return run


def _overwriting(count: int = _BETWEEN) -> Callable[[], object]:
    """Returns a function that writes as many bytes."""
    others = np.zeros(count, np.uint8)
    return lambda: np.add(others, 1, out=others)


def overhead(threads: int, apart: bool = False) -> tuple[float, float, float]:
    """Returns the seconds of a session's run without its nodes, of a node of few elements, and of a node that makes a view (Unsqueeze).

    `apart`: the caches are overwritten between two runs, as other sessions do in a step; else the runs follow each other directly.
    """
    before = _overwriting(_BETWEEN if apart else 1)
    one, chain, views = (
        timed(session_run(_chain(count, ops), threads), threads, before)
        for count, ops in ((1, _MIXED), (_CHAIN, _MIXED), (_CHAIN, ("Unsqueeze",)))
    )
    node = max(1e-8, (chain - one) / (_CHAIN - 1))
    return max(1e-7, one - node), node, max(1e-8, (views - one) / (_CHAIN - 1))


def _chain(count: int, ops: Sequence[str]) -> Sample:
    """Returns a chain of `count` nodes that uses the ops in turn, since in a model, too, neighbouring nodes have different kernels."""
    from onnx import helper

    nodes, x = [helper.make_node("Neg", ["x0"], ["x1"])], "x1"
    beside = {"Add": ["one"], "Mul": ["one"], "Greater": ["one"], "Where": ["one", "x0"], "Unsqueeze": ["axes"]}
    for k in range(1, count):
        op = ops[k % len(ops)]
        attributes: dict[str, Any] = {"to": 1} if op == "Cast" else {}
        nodes.append(helper.make_node(op, [x, *beside.get(op, [])], [f"x{k + 1}"], **attributes))
        x = f"x{k + 1}"
    given = {"x0": np.ones(16, np.float32), "one": np.ones(1, np.float32), "axes": np.array([0])}
    read = {name for node in nodes for name in node.input}
    return Sample(nodes, {name: array for name, array in given.items() if name in read}, 0)


def kernels() -> Iterator[tuple[str, Sample]]:
    """Yields, for each kernel of the op table, a sample at each size."""
    for size in sorted((*SIZES, *_CACHED, _MEMORY)):
        third = size // _ELEMENT // 3
        yield "elementwise", _of("Add", third, {"x": _floats(third), "y": _floats(third)})
    for size in SIZES:
        elements = size // _ELEMENT
        half = elements // 2
        rows = max(1, half // 64)
        yield "function", _of("Erf", 2 * half, {"x": _floats(half)})
        yield "reduction", _of("ReduceSum", rows * 64, {"x": _floats(rows, 64), "axes": np.array([1])}, keepdims=0)
        scale, bias = _floats(64), _floats(64)
        yield "normalization", _of("LayerNormalization", 2 * rows * 64, {"x": _floats(rows, 64), "s": scale, "b": bias})
        yield "layout", _of("Transpose", 2 * rows * 64, {"x": _floats(rows, 64)}, perm=[1, 0])
        ids = np.random.default_rng(0).integers(0, 4 * rows, rows)
        yield "lookup", _of("Gather", 2 * rows * 64, {"x": _floats(4 * rows, 64), "ids": ids})
        yield "sort", _sort(size // _ID)
        few = max(1, elements // (2 * 64 + 64 + 128))
        places = np.tile(np.random.default_rng(0).permutation(few)[:, None], (1, 64))
        given = {"x": _floats(few, 64), "ids": places, "y": _floats(few, 64)}
        yield "scatter", _of("ScatterElements", few * 64 * 5, given, axis=0)
    for size in (*SIZES, max(_CACHED)):
        matrices = size // _ELEMENT // _VECTOR**2 or 1
        yield (
            "vectors",
            Sample([_product()], _batch(matrices, _VECTOR, 1), float(matrices * (_VECTOR + 2) * _VECTOR * _ELEMENT)),
        )


def _sort(count: int) -> Sample:
    """Returns a sort of `count` ids, with the ids' bytes as its amount."""
    from onnx import helper

    given = {"x": np.random.default_rng(0).integers(0, count, count), "k": np.array([count])}
    return Sample([helper.make_node("TopK", ["x", "k"], ["y", "z"], axis=0, largest=0)], given, float(count * _ID))


def products() -> Iterator[tuple[str, Sample]]:
    """Yields, for each kind of product, samples whose amount is the operations of one matrix, two for each multiply-add."""
    for n in _MATRICES:
        yield "matmul", Sample([_product()], {"x": _floats(n, n), "y": _floats(n, n)}, 2.0 * n**3)
    for n, count in _BATCHES:
        yield "batch", Sample([_product()], _batch(count, n, n), 2.0 * n**3, count)
    for rows in _ROWS:
        yield FEW, _few(rows, _product(), {"y": _floats(_WEIGHT, _WEIGHT)})
        yield FEW_INT4, _few(rows, *_product_of_4_bits())


def _few(rows: int, node: NodeProto, weights: Mapping[str, Array]) -> Sample:
    """A product whose weight is read from memory, as in a step."""
    return Sample(
        [node], {"x": _floats(rows, _WEIGHT)}, 2.0 * rows * _WEIGHT**2, weights=weights, before=_overwriting()
    )


def _product_of_4_bits() -> tuple[NodeProto, Mapping[str, Array]]:
    from onnx import helper

    blocks = _WEIGHT // _BLOCK
    packed = np.random.default_rng(0).integers(0, 256, (_WEIGHT, blocks, _BLOCK // 2), np.uint8)
    sizes: dict[str, Any] = {"K": _WEIGHT, "N": _WEIGHT, "bits": 4, "block_size": _BLOCK}
    node = helper.make_node("MatMulNBits", ["x", "y", "scales"], ["z"], domain="com.microsoft", **sizes)
    return node, {"y": packed, "scales": _floats(_WEIGHT * blocks)}


def thin_products() -> Iterator[tuple[Sample, float]]:
    """Yields products of few rows with their operations; their amount is the bytes of the second operand."""
    for n in _SECOND:
        given = {"x": _floats(_FEW, n), "y": _floats(n, n)}
        yield Sample([_product()], given, float(n * n * _ELEMENT)), 2.0 * _FEW * n * n


def convolutions() -> Iterator[tuple[Sample, float]]:
    """Yields convolutions of one image with their operations; their amount is the bytes of the columns that the windows make."""
    from onnx import helper

    for channels, pixels in _IMAGES:
        node = helper.make_node("Conv", ["x", "y"], ["z"], pads=[1, 1, 1, 1])
        given = {"x": _floats(1, channels, pixels, pixels), "y": _floats(_FILTERS, channels, 3, 3)}
        columns = channels * _PLACES * pixels**2
        yield Sample([node], given, float(columns * _ELEMENT)), 2.0 * _FILTERS * columns


def _product() -> NodeProto:
    from onnx import helper

    return helper.make_node("MatMul", ["x", "y"], ["z"])


def _batch(count: int, n: int, columns: int) -> dict[str, Array]:
    """Returns `count` matrices [n, n], and for each a second operand [n, columns]."""
    return {"x": _floats(count, n, n), "y": _floats(count, n, columns)}


def _of(op: str, elements: int, given: dict[str, Array], **attributes: Any) -> Sample:
    from onnx import helper

    count = 3 * elements if op == "Add" else elements
    return Sample([helper.make_node(op, list(given), ["z"], **attributes)], given, float(count * _ELEMENT))


def _floats(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
