"""Whether this machine's kernels of quantized products compute the same bits for a row alone as for the row among others.

A request's tokens must not depend on other requests, so a step computes only the rows that have a sequence if the number of rows changes
no bit. Float products with constant weights keep their bits at any number of rows. `MatMulNBits` does not, on some processors and for
some accuracy levels, because a single row has a kernel of its own there. Then a step has at least two rows.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ..artifact.generation import GenerationRecord
from ..program.ort import quiet_session

_COLUMNS, _BLOCKS = 64, 4


def least_rows(record: GenerationRecord) -> int:
    """The fewest rows of a step: 1, or 2 where a row alone gets other bits."""
    return 1 if all(keeps_bits(one.bits, one.block, one.level, one.points) for one in record.products) else 2


@cache
def keeps_bits(bits: int, block: int, level: int, points: bool = False) -> bool:
    """Whether the first row of a quantized product is the same alone and together with a second row."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    size = _BLOCKS * block
    packed = rng.integers(0, 256, (_COLUMNS, _BLOCKS, block * bits // 8)).astype(np.uint8)
    weights = [
        numpy_helper.from_array(packed, "blocks"),
        numpy_helper.from_array(rng.random((_COLUMNS, _BLOCKS), np.float32), "scales"),
    ]
    if points:
        weights.append(numpy_helper.from_array(packed[:, : _BLOCKS * bits // 8, 0].copy(), "points"))
    inputs = ["x", *(weight.name for weight in weights)]
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", K=size, N=_COLUMNS)
    numbers = {"bits": bits, "block_size": block, "accuracy_level": level}
    node.attribute.extend(helper.make_attribute(name, number) for name, number in numbers.items())
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", None]) for name in ("x", "y")]
    graph = helper.make_graph([node], "rows", ports[:1], ports[1:], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = quiet_session(model.SerializeToString())
    rows = rng.standard_normal((2, size)).astype(np.float32)
    alone, among = (session.run(None, {"x": rows[:n]})[0][0] for n in (1, 2))
    return bool((alone == among).all())
