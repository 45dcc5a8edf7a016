"""Constants that differ by rank: a rank file states their law, so that ranks that do the same work share one file.

    RankConstant() -> Y {group, dtype, shape, items}    each item an expression over `place`, the rank's place in its list of the group

    begin = RankConstant {group: "0-2+1", shape: [1], items: ["64*place"]}    on ranks 0 and 1 of 0-2, 1-3: [0]; on ranks 2 and 3: [64]

When a program is read, they become initializers (`bound`), so that all code which splits, runs or measures it sees weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from partc.runtime.artifact import dim_expression as expression
from partc.runtime.artifact.format import DOMAIN, DTYPE, GROUP, ITEMS, PLACE, RANK_CONSTANT, SHAPE
from partc.runtime.artifact.graph.onnx_graph import text_of
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Array
from partc.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def is_rank_constant(node: NodeProto) -> bool:
    """Whether a node is a RankConstant."""
    return node.domain == DOMAIN and node.op_type == RANK_CONSTANT


def group_of(node: NodeProto) -> str:
    """The group in whose lists the place of the rank is counted."""
    return text_of(node, GROUP)


def constant_of(node: NodeProto, place: int) -> Array:
    """Returns the constant's value on the rank at `place` of its list; ValueError says what is wrong with its attributes."""
    attributes = {one.name: one for one in node.attribute}
    if missing := [name for name in (GROUP, DTYPE, ITEMS) if name not in attributes]:
        raise ValueError(f"its attribute '{missing[0]}' is missing")
    row = BY_CODE.get(attributes[DTYPE].i)
    if row is None:
        raise ValueError(f"its type {attributes[DTYPE].i} is not a type of numbers")
    items = [one.decode(errors="replace") for one in attributes[ITEMS].strings]
    shape = [*attributes[SHAPE].ints] if SHAPE in attributes else []
    if min(shape, default=1) < 0 or math.prod(shape) != len(items):
        raise ValueError(f"it has {len(items)} items, and its shape is {shape}")
    numbers = [expression.parse(item)({PLACE: place}) for item in items]
    try:
        return np.array(numbers, np.int64).astype(row.numpy).reshape(shape)
    except OverflowError:
        raise ValueError(f"{numbers} are too large") from None


def bound(model: ModelProto, groups: Mapping[str, Sequence[int]], rank: int, where: str) -> ModelProto:
    """Turns the rank constants of a model, in place, into initializers for `rank`, and returns the model.

    `groups` maps each group to the rank's list, as `Manifest.groups_of` returns it. ArtifactError names the file and the node that is not
    valid.
    """
    if not any(map(is_rank_constant, model.graph.node)):
        return model
    from onnx import numpy_helper

    graph = model.graph
    nodes = list(graph.node)
    for node in filter(is_rank_constant, nodes):
        try:
            (name,) = node.output
            if group_of(node) not in groups:
                raise ValueError(f"rank {rank} is in no list of its group '{group_of(node)}'")
            array = constant_of(node, groups[group_of(node)].index(rank))
            graph.initializer.append(numpy_helper.from_array(array, name))
        except ValueError as error:
            title = f"{RANK_CONSTANT} '{next(iter(node.output), '')}'"
            raise ArtifactError(f"{where}: {title}: {error}\n  help: compile again") from None
    kept = [node for node in nodes if not is_rank_constant(node)]
    del graph.node[:]
    graph.node.extend(kept)
    return model


def names_of(model: ModelProto) -> Iterator[str]:
    """The outputs of the model's RankConstant nodes."""
    return (name for node in model.graph.node if is_rank_constant(node) for name in node.output)
