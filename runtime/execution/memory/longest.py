"""The sizes that follow from how many tokens a decoder's sequences have: at most those of the first step and of the last.

A file leaves open the shape of what a step reads of a cache, `Slice(cache, 0, max(position) + tokens)`, and of all that follows from it.
With a number for `position` the sizes are computed node by node, and the shapes by the inference of ONNX; of the shapes at position 0 and
at the last one each dim counts at its larger size, so that what becomes smaller with the position is bounded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ...artifact.generation import GenerationRecord
from ...artifact.tensors.dtypes import BY_CODE
from ...program.rank_file import RankFile
from ...program.session_memory import Place
from ...program.steps import Segment

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

_LARGEST = 4096
"""The most elements of a tensor whose numbers are computed."""
_WHOLE = "biu"
"""The kinds of numpy's types of whole numbers and truth values."""


def longest(
    file: RankFile,
    record: GenerationRecord,
    constants: Mapping[str, TensorProto],
    place_of: Callable[[str], Place | None],
) -> dict[str, Place]:
    """By value without a place, as `place_of` tells, the type and the largest shape that it has at any position.

    Left out are those that ONNX infers nothing of, and those whose number of dims differs. Tasks of microbatches are not looked at.
    """
    found: dict[str, Place] = {}
    for position in (0, record.length - 1):
        step = _Step(file, constants, place_of)
        rows = record.rows_of(file.manifest.name) or record.slots
        step.numbers[record.position] = np.full((rows,), position, np.int64)
        for name, (dtype, shape) in step.places().items():
            before = found.get(name, (dtype, shape))[1]
            if len(before) == len(shape):
                found[name] = dtype, tuple(map(max, before, shape))
    return found


class _Step:
    """A step at one position: the `numbers` of small tensors, and the places of values that have none."""

    def __init__(
        self, file: RankFile, constants: Mapping[str, TensorProto], place_of: Callable[[str], Place | None]
    ) -> None:
        from onnx.external_data_helper import uses_external_data
        from onnx.numpy_helper import to_array

        self.file, self.place_of = file, place_of
        self.versions = {one.domain.replace("ai.onnx", ""): one.version for one in file.model.opset_import}
        self.weights = {
            name: (BY_CODE[one.data_type], tuple(one.dims))
            for name, one in constants.items()
            if one.data_type in BY_CODE
        }
        small = (
            name
            for name, (dtype, shape) in self.weights.items()
            if dtype.numpy.kind in _WHOLE and prod(shape) <= _LARGEST and not uses_external_data(constants[name])
        )
        self.numbers = {name: to_array(constants[name]) for name in small}
        self.found: dict[str, Place] = {}

    def places(self) -> dict[str, Place]:
        """The type and the shape of each value that has none by `place_of`."""
        for step in self.file.steps:
            if isinstance(step, Segment) and step.body is None:
                for node in step.nodes:
                    self._compute(node)
                    if any(name and self.place_of(name) is None for name in node.output):
                        self._infer(node)
        return self.found

    def _place(self, name: str) -> Place | None:
        return self.found.get(name) or self.weights.get(name) or self.place_of(name)

    def _compute(self, node: NodeProto) -> None:
        """Notes the numbers of a node of whole numbers and sizes, where those of its operands are known."""
        from onnx.reference import ReferenceEvaluator

        feeds: dict[str, Any] = {}
        for name in filter(None, node.input):
            place = self._place(name)
            if node.op_type in ("Shape", "Size") and place is not None:
                feeds[name] = np.broadcast_to(np.zeros((), np.bool_), place[1])
            elif name in self.numbers:
                feeds[name] = self.numbers[name]
            else:
                return
        if node.domain not in ("", "ai.onnx") or not all(one.dtype.kind in _WHOLE for one in feeds.values()):
            return
        made = ReferenceEvaluator(node).run(None, feeds)
        for name, array in zip(node.output, map(np.asarray, made), strict=False):
            if array.size <= _LARGEST:
                self.numbers[name] = array

    def _infer(self, node: NodeProto) -> None:
        """Notes the places of what a node makes, by those of its operands and by the numbers that are known."""
        from onnx import defs, helper, numpy_helper, shape_inference

        version = self.versions.get(node.domain.replace("ai.onnx", ""), 0)
        places = {name: self._place(name) for name in filter(None, node.input)}
        data = {name: numpy_helper.from_array(self.numbers[name]) for name in places if name in self.numbers}
        types = {
            name: helper.make_tensor_type_proto(one[0].code, one[1]) for name, one in places.items() if one is not None
        }
        if not version or types.keys() < places.keys() or not defs.has(node.op_type, node.domain):
            return
        schema = defs.get_schema(node.op_type, version, node.domain)
        try:
            made = shape_inference.infer_node_outputs(schema, node, types, data)
        except shape_inference.InferenceError:
            return
        for name, kind in made.items():
            dims = kind.tensor_type.shape.dim
            dtype = BY_CODE.get(kind.tensor_type.elem_type)
            if (
                dtype is not None
                and kind.tensor_type.HasField("shape")
                and all(one.HasField("dim_value") for one in dims)
            ):
                self.found[name] = dtype, tuple(one.dim_value for one in dims)
