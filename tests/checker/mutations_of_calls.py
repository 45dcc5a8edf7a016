"""Mutations of communication nodes and of the groups that they name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto
from partc.runtime.artifact.format import DOMAIN

Models = dict[str, onnx.ModelProto]


@dataclass
class Draft:
    """An artifact while it is mutated: the models of its rank files, its manifest, where chance decides, and its folder."""

    models: Models
    manifest: dict[str, Any]
    chance: random.Random
    folder: Path | None = None

    def file(self) -> str:
        """Any rank file."""
        return self.chance.choice(sorted(self.models))

    def calls(self, *ops: str) -> list[tuple[str, NodeProto]]:
        """The communication nodes of all files."""
        return [
            (file, node)
            for file, model in sorted(self.models.items())
            for node in model.graph.node
            if node.domain == DOMAIN and (not ops or node.op_type in ops)
        ]

    def alike(self, node: NodeProto) -> list[tuple[str, NodeProto]]:
        """The nodes of one message or collective in all files."""
        return [(file, other) for file, other in self.calls() if number_of(other, "tag") == number_of(node, "tag")]


def attribute_of(node: NodeProto, *names: str) -> onnx.AttributeProto | None:
    return next((one for one in node.attribute if one.name in names), None)


def number_of(node: NodeProto, name: str) -> int:
    found = attribute_of(node, name)
    return -1 if found is None else found.i


Mutation = Callable[[Draft], bool]
"""Changes a draft; False where there is nothing of what it changes."""


def _chosen(draft: Draft, everywhere: bool, *ops: str) -> list[tuple[str, NodeProto]]:
    calls = draft.calls(*ops)
    if not calls:
        return []
    one = draft.chance.choice(calls)
    return draft.alike(one[1]) if everywhere else [one]


def _place(draft: Draft, file: str, node: NodeProto) -> int:
    return next(at for at, one in enumerate(draft.models[file].graph.node) if one is node or one == node)


def drop(everywhere: bool) -> Mutation:
    """A communication node is left out; its output, where it has one, is what it would have been made of."""

    def change(draft: Draft) -> bool:
        chosen = _chosen(draft, everywhere)
        for file, node in chosen:
            graph = draft.models[file].graph
            at = _place(draft, file, node)
            sources, results = list(node.input), list(node.output)
            del graph.node[at]
            for place, (source, result) in enumerate(zip(sources, results, strict=False)):
                graph.node.insert(
                    at + place, onnx.helper.make_node("Identity", [source], [result], name=f"dropped.{result}")
                )
        return bool(chosen)

    return change


def remove(draft: Draft) -> bool:
    """A collective is left out everywhere, in the manifest, too; its input stands for its output."""
    chosen = _chosen(draft, True, "AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Exchange")
    if not chosen or any(len(node.input) != len(node.output) for _, node in chosen):
        return False
    tag = number_of(chosen[0][1], "tag")
    for file, node in chosen:
        graph, at = draft.models[file].graph, _place(draft, file, node)
        pairs = list(zip(node.input, node.output, strict=True))
        del graph.node[at]
        for source, result in pairs:
            graph.node.insert(at, onnx.helper.make_node("Identity", [source], [result], name=f"removed.{result}"))
    draft.manifest["collectives"] = [one for one in draft.manifest["collectives"] if one["tag"] != tag]
    return True


def duplicate(everywhere: bool) -> Mutation:
    """A communication node stands there twice; what it makes the second time has another name."""

    def change(draft: Draft) -> bool:
        chosen = _chosen(draft, everywhere)
        for file, node in chosen:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.output[:] = [f"{name}.again" for name in node.output]
            copy.name += ".again"
            draft.models[file].graph.node.insert(_place(draft, file, node) + 1, copy)
        return bool(chosen)

    return change


def swap(everywhere: bool) -> Mutation:
    """Two communication nodes that follow one another change places."""

    def change(draft: Draft) -> bool:
        pairs = []
        for file, model in sorted(draft.models.items()):
            places = [at for at, node in enumerate(model.graph.node) if node.domain == DOMAIN]
            pairs += [(file, one, two) for one, two in itertools.pairwise(places)]
        if not pairs:
            return False
        file, one, two = draft.chance.choice(pairs)
        nodes = draft.models[file].graph.node
        tags = {number_of(nodes[one], "tag"), number_of(nodes[two], "tag")}
        done = False
        for name in sorted(draft.models) if everywhere else [file]:
            nodes = draft.models[name].graph.node
            places = [at for at, node in enumerate(nodes) if node.domain == DOMAIN and number_of(node, "tag") in tags]
            if len(places) == 2:
                first, second = NodeProto(), NodeProto()
                first.CopyFrom(nodes[places[0]])
                second.CopyFrom(nodes[places[1]])
                nodes[places[0]].CopyFrom(second)
                nodes[places[1]].CopyFrom(first)
                done = True
        return done

    return change


def renumber(name: str, everywhere: bool) -> Mutation:
    """An attribute of a communication node that is a number is another one."""

    def change(draft: Draft) -> bool:
        calls = [one for one in draft.calls() if attribute_of(one[1], name) is not None]
        if not calls:
            return False
        one = draft.chance.choice(calls)
        new = draft.chance.choice([n for n in range(-1, 5) if n != number_of(one[1], name)])
        for _, node in draft.alike(one[1]) if everywhere else [one]:
            found = attribute_of(node, name)
            if found is not None:
                found.i = new
        return True

    return change


def reduce(everywhere: bool) -> Mutation:
    """Another reduction."""

    def change(draft: Draft) -> bool:
        chosen = _chosen(draft, everywhere, "AllReduce", "ReduceScatter", "Reduce")
        for _, node in chosen:
            found = attribute_of(node, "reduce")
            assert found is not None
            found.s = (
                draft.chance.choice([word for word in (b"max", b"min") if word != found.s])
                if not everywhere
                else b"max"
            )
        return bool(chosen)

    return change


_COLLECTIVE = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Exchange", "Broadcast", "Reduce")


def group(everywhere: bool) -> Mutation:
    """Another group, or the same list in another order."""

    def change(draft: Draft) -> bool:
        groups, chosen = draft.manifest["groups"], _chosen(draft, everywhere, *_COLLECTIVE)
        if not chosen:
            return False
        own = attribute_of(chosen[0][1], "group")
        assert own is not None
        others = [name for name in groups if name.encode() != own.s]
        if not others:
            groups["turned"] = [list(reversed(ranks)) for ranks in groups[own.s.decode()]]
            others = ["turned"]
        other = draft.chance.choice(sorted(others)).encode()
        for _, node in chosen:
            found = attribute_of(node, "group")
            assert found is not None
            found.s = other
        return True

    return change


def turn_group(draft: Draft) -> bool:
    """The ranks of a list in another order."""
    lists = [ranks for lists in draft.manifest["groups"].values() for ranks in lists if len(ranks) > 1]
    if lists:
        draft.chance.choice(lists).reverse()
    return bool(lists)


def boxes(name: str) -> Mutation:
    """Two boxes of an Exchange change places, or one is moved."""

    def change(draft: Draft) -> bool:
        calls = [
            one for one in draft.calls("Exchange") if (found := attribute_of(one[1], name)) is not None and found.ints
        ]
        if not calls:
            return False
        node = draft.chance.choice(calls)[1]
        found, dims = attribute_of(node, name), number_of(node, "rank")
        assert found is not None
        numbers = list(found.ints)
        whole = [numbers[at : at + 3 * dims] for at in range(0, len(numbers), 3 * dims)]
        if len(whole) > 1 and draft.chance.random() < 0.5:
            one, two = draft.chance.sample(range(len(whole)), 2)
            whole[one], whole[two] = whole[two], whole[one]
        else:
            box = draft.chance.choice(whole)
            axis = draft.chance.randrange(dims)
            begin, end, of = box[3 * axis : 3 * axis + 3]
            step = end - begin
            begin = begin - step if begin >= step else begin + step
            box[3 * axis : 3 * axis + 3] = [begin, begin + step, of]
        if [number for box in whole for number in box] == numbers:
            return False
        found.ints[:] = [number for box in whole for number in box]
        return True

    return change


def peers(draft: Draft) -> bool:
    """Two peers of an Exchange change places."""
    lists = [
        found
        for _, node in draft.calls("Exchange")
        for name in ("send_peers", "recv_peers")
        if (found := attribute_of(node, name)) is not None and len(set(found.ints)) > 1
    ]
    if not lists:
        return False
    found = draft.chance.choice(lists)
    one, two = draft.chance.sample(range(len(found.ints)), 2)
    if found.ints[one] == found.ints[two]:
        return False
    found.ints[one], found.ints[two] = found.ints[two], found.ints[one]
    return True


def rewire(draft: Draft) -> bool:
    """A communication node reads another value of the same type and shape."""
    file, node = draft.chance.choice(draft.calls() or [("", NodeProto())])
    if not file or not node.input:
        return False
    graph = draft.models[file].graph
    types = {port.name: port.type.SerializeToString(deterministic=True) for port in (*graph.value_info, *graph.input)}
    made = {name for one in graph.node[: _place(draft, file, node)] for name in one.output}
    at = draft.chance.randrange(len(node.input))
    others = [
        name for name in sorted(made) if name != node.input[at] and types.get(name) == types.get(node.input[at], b"")
    ]
    if not others:
        return False
    node.input[at] = draft.chance.choice(others)
    return True
