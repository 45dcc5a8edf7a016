"""Mutations of the number of microbatches: one is left out wherever rows and messages state it, or one statement is another."""

from __future__ import annotations

import copy

import numpy as np
import onnx
from mutations_of_calls import Draft, Mutation
from mutations_of_rows import microbatch, tasks
from onnx import numpy_helper
from partc.runtime.artifact.format import DOMAIN, SCHEDULE, TASKS


def last_of(models: dict[str, onnx.ModelProto]) -> int:
    """The last microbatch of the rows; 0 where there is one alone, or none."""
    return max((microbatch(model.graph.node[at]).i for model in models.values() for at in tasks(model)), default=0)


def left_out(model: onnx.ModelProto, last: int) -> None:
    """Removes the calls of the last microbatch, their messages, and what they add to sums, from a rank file."""
    kept: list[onnx.NodeProto] = []
    instead: dict[str, str] = {}
    for node in model.graph.node:
        if node.domain == TASKS and microbatch(node).i == last:
            body = next(one for one in model.functions if one.domain == TASKS and one.name == node.op_type)
            for formal, made in zip(body.output, node.output, strict=True):
                if (sum_ := formal.removesuffix(".next")) in body.input:
                    instead[made] = node.input[list(body.input).index(sum_)]
        elif node.domain != DOMAIN or not [*node.input, *node.output][0].endswith(f".{last}"):
            kept.append(copy.deepcopy(node))
    for node in kept:
        names = [instead.get(name, name) for name in node.input]
        if node.op_type == "Sum":
            names = [name for name in names if not name.endswith(f".{last}")]
        node.input[:] = names
    del model.graph.node[:]
    model.graph.node.extend(kept)


def last_left_out(divisor: bool) -> Mutation:
    """The last microbatch is left out on all ranks, and the text of the schedule with it; with `divisor` means are of the others."""

    def change(draft: Draft) -> bool:
        last, manifest = last_of(draft.models), draft.manifest
        if not last:
            return False
        for model in draft.models.values():
            left_out(model, last)
            for tensor in model.graph.initializer:
                if divisor and tensor.name.endswith(".count") and not tensor.dims:
                    number = numpy_helper.to_array(tensor)
                    tensor.CopyFrom(numpy_helper.from_array(np.array(last, number.dtype), tensor.name))
        manifest["transfers"] = [one for one in manifest["transfers"] if not one["value"].endswith(f".{last}")]
        for file in [one for one in manifest["files"] if one.endswith(SCHEDULE.rpartition("/")[2])]:
            manifest["files"].pop(file)
            if draft.folder is not None:
                (draft.folder / file).unlink()
        return True

    return change


def part_more(draft: Draft) -> bool:
    """An input is split into one part more, which no task reads."""
    splits = [
        node
        for model in draft.models.values()
        for node in model.graph.node
        if node.op_type == "Split" and not node.domain
    ]
    if not splits:
        return False
    node = draft.chance.choice(splits)
    node.output.append(f"{node.input[0]}.more")
    for attribute in node.attribute:
        if attribute.name == "num_outputs":
            attribute.i += 1
    return True


MICROBATCH_MUTATIONS: dict[str, Mutation] = {
    "the last microbatch left out": last_left_out(False),
    "the last microbatch left out, and counted so": last_left_out(True),
    "a part more": part_more,
}
