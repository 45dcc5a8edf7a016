"""What onnxruntime takes while it makes a session that has convolutions of constant weights, which it lays out in blocks: an estimate.

One convolution after the other is laid out. Meanwhile its weight is there four times: in the file, as numbers, in blocks, and as what the
session keeps. Those before it are there in blocks, and by measurement half of them once more, as memory that was freed and that no larger
weight fits into. In the end all are there in blocks and as what the session keeps. Weights into which a batch normalization is multiplied,
which happens to all of them before, are there once more.

    weights of 9, 2, 2 MB      max(4 * 9, 1.5 * 9 + 4 * 2, 1.5 * 11 + 4 * 2, 2 * 13) = 36 MB, and 13 more with batch normalizations
    weights of 2, 2, 9 MB      max(4 * 2, 1.5 * 2 + 4 * 2, 1.5 * 4 + 4 * 9, 2 * 13) = 42 MB
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import NodeProto

_BEFORE, _CURRENT, _AFTER = 1.5, 4, 2


def laid_out(nodes: Iterable[NodeProto], weights: Mapping[str, int]) -> int:
    """The bytes that making a session of these nodes takes at most beside its weights; `weights`: the bytes of constants by name."""
    ordered = list(nodes)
    normalized = {node.input[0] for node in ordered if node.op_type == "BatchNormalization"}
    before = again = 0
    most = 0.0
    for node in ordered:
        if node.op_type != "Conv" or (bytes := weights.get(node.input[1])) is None:
            continue
        most = max(most, _BEFORE * before + _CURRENT * bytes)
        before += bytes
        again += bytes if node.output[0] in normalized else 0
    return int(max(most, _AFTER * before)) + again - before
