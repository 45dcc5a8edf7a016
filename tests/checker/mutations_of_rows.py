"""Mutations of the rows of tasks: calls, what they read, and the messages between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
from mutations_of_calls import Draft, Mutation
from onnx import NodeProto
from partc.runtime.artifact.format import DOMAIN, MICROBATCH, TASKS

Pick = Callable[[onnx.ModelProto], list[int]]


def tasks(model: onnx.ModelProto) -> list[int]:
    """The places of calls."""
    return [at for at, node in enumerate(model.graph.node) if node.domain == TASKS]


def messages(model: onnx.ModelProto) -> list[int]:
    """The places of messages between the first call and the last."""
    calls = tasks(model)
    nodes = model.graph.node
    return [at for at in range(calls[0], calls[-1]) if nodes[at].domain == DOMAIN] if calls else []


def exchange(model: onnx.ModelProto, one: int, two: int) -> None:
    """Two nodes change places."""
    first, second = NodeProto(), NodeProto()
    first.CopyFrom(model.graph.node[one])
    second.CopyFrom(model.graph.node[two])
    model.graph.node[one].CopyFrom(second)
    model.graph.node[two].CopyFrom(first)


def microbatch(node: NodeProto) -> onnx.AttributeProto:
    """The attribute that says the microbatch of a call."""
    return next(one for one in node.attribute if one.name == MICROBATCH)


def swapped(pick: Pick) -> Mutation:
    """Two calls, or two messages, that follow each other change places."""

    def change(draft: Draft) -> bool:
        file = draft.file()
        places = pick(draft.models[file])
        if len(places) < 2:
            return False
        k = draft.chance.randrange(len(places) - 1)
        exchange(draft.models[file], places[k], places[k + 1])
        return True

    return change


def dropped(pick: Pick) -> Mutation:
    """A call, or a message, is left out."""

    def change(draft: Draft) -> bool:
        file = draft.file()
        places = pick(draft.models[file])
        if not places:
            return False
        del draft.models[file].graph.node[draft.chance.choice(places)]
        return True

    return change


def _calls(draft: Draft) -> Iterator[NodeProto]:
    model = draft.models[draft.file()]
    yield from (model.graph.node[at] for at in tasks(model))


def duplicated(draft: Draft) -> bool:
    """A call stands for another microbatch than its own, whose number is then there twice."""
    calls = list(_calls(draft))
    if not calls:
        return False
    node = draft.chance.choice(calls)
    found = microbatch(node)
    found.i = draft.chance.choice([k for k in range(len(calls)) if k != found.i])
    return True


def again(draft: Draft) -> bool:
    """A call is there twice, with other names for what it makes."""
    model = draft.models[draft.file()]
    places = tasks(model)
    if not places:
        return False
    at = draft.chance.choice(places)
    copy = NodeProto()
    copy.CopyFrom(model.graph.node[at])
    copy.output[:] = [f"{name}.again" for name in copy.output]
    model.graph.node.insert(at + 1, copy)
    return True


def crossed(draft: Draft) -> bool:
    """Two calls of a function read a value of each other's microbatch."""
    calls = list(_calls(draft))
    pairs = [
        (one, two, k)
        for one in calls
        for two in calls
        if one.op_type == two.op_type and one.name < two.name
        for k in range(len(one.input))
        if one.input[k] != two.input[k]
    ]
    if not pairs:
        return False
    one, two, k = draft.chance.choice(pairs)
    one.input[k], two.input[k] = two.input[k], one.input[k]
    return True


ROW_MUTATIONS: dict[str, Mutation] = {
    "two tasks swapped": swapped(tasks),
    "a task left out": dropped(tasks),
    "a task of another microbatch": duplicated,
    "a task twice": again,
    "two messages between tasks swapped": swapped(messages),
    "a message between tasks left out": dropped(messages),
    "operands of two microbatches crossed": crossed,
}
