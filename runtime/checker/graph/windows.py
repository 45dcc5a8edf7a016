"""Windows of convolutions and poolings that are larger than their input, at one size of the symbols.

onnx rounds the number of such windows towards 0, a file's expressions round it down; where windows fit, both are equal. So what such a
node makes is taken as declared: nothing is said of sizes for which the model itself has no meaning.

    MaxPool <kernel_shape = [2]> of [n, 4, w] with w = 1        declared [n, 4, floor(w/2)], onnx says [n, 4, 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import NodeProto, TypeProto, helper

_WEIGHTS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "DeformConv": 1}
"""The operand whose dims are the kernel's where no attribute says it."""
_POOLS = {"AveragePool", "LpPool", "MaxPool"}


def does_not_fit(node: NodeProto, types: Mapping[str, TypeProto]) -> bool:
    """Whether a window of the node covers more than its padded input; `types` by value, with dims in numbers."""
    if node.domain or node.op_type not in {*_WEIGHTS, *_POOLS} or not node.input:
        return False
    said = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    automatic = said.get("auto_pad", b"NOTSET")
    if automatic in (b"SAME_UPPER", b"SAME_LOWER"):
        return False
    at = _WEIGHTS.get(node.op_type)
    weight = _sizes(types.get(node.input[at])) if at is not None and at < len(node.input) else ()
    kernel: Sequence[int] = said.get("kernel_shape") or weight[2:]
    dims = _sizes(types.get(node.input[0]))[2:]
    if len(kernel) != len(dims):
        return False
    none = [0] * (2 * len(dims))
    pads = none if automatic == b"VALID" else said.get("pads") or none
    dilations = said.get("dilations") or [1] * len(dims)
    return any(
        (kernel[k] - 1) * dilations[k] + 1 > size + pads[k] + pads[k + len(dims)]
        for k, size in enumerate(dims)
        if kernel[k] >= 0 and size >= 0
    )


def _sizes(type: TypeProto | None) -> list[int]:
    """The dims, -1 for one that is not known."""
    if type is None or not type.HasField("tensor_type"):
        return []
    return [dim.dim_value if dim.HasField("dim_value") else -1 for dim in type.tensor_type.shape.dim]
