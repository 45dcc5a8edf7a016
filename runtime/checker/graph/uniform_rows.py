"""Proves by induction that all microbatches do what the first two do, so that other checks need only these: a law of its own.

A row calls the body of each task once for each microbatch, 0 to m - 1. Call k is the image of call 1 if it reads at every place one of

    the same value        as all calls of the body: a weight, a state
    a sum                 the result of the call before it
    its own value         with the suffix `.k`: the part k of a Split, a message, the result of a task of microbatch k

and if the nodes between the tasks repeat, too: those of microbatch k are those of microbatch 0, on values and tags of k. A Sum, a Split or
a Concat of all microbatches has each, in order; what else reads a sum reads the last one. So a proof of call 1 that relies on call 0 alone
is one of all calls, and a program whose calls from microbatch 2 on are left out has the faults of the whole one, if it has any.

    1F2 = F1(h.2, w)   2B2 = B2(g.2, sum.1)      the image of 1F1 = F1(h.1, w), 2B1 = B2(g.1, sum.0)
    1F2 = F1(h.1, w)                              is not: all calls are checked, one by one

No claim is made of the order of messages, which `across/ordering.py` proves for all calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.comm.collectives import BODIES, LOOKUPS
from partc.runtime.artifact.format import DOMAIN, OPTIMIZER, TAG
from partc.runtime.artifact.graph.onnx_graph import graph_bodies
from partc.runtime.artifact.graph.targets import is_copy
from partc.runtime.artifact.tasks.calls import Call, is_call
from partc.runtime.artifact.tasks.rows import Row

KEPT = 2
"""The number of microbatches that stand for all."""


def is_uniform(model: ModelProto, row: Row) -> bool:
    """Whether all microbatches of a rank file with tasks repeat what the first two do; False also for a file that is not sound."""
    calls: dict[str, list[Call]] = {}
    for call in row.calls:
        calls.setdefault(call.node.op_type, []).append(call)
    counts = {len(calls.get(name, ())) for name in row.functions}
    count = max(counts)
    ordered = all([call.microbatch for call in same] == [*range(count)] for same in calls.values())
    if len(counts) > 1 or count <= KEPT or not ordered or not _is_plain(model):
        return False
    values = _Values(model, calls, count)
    return values.is_defined_once(row) and all(map(values.reads_alike, calls.values())) and values.repeats()


def _is_plain(model: ModelProto) -> bool:
    """Whether a file has no lookups, loops and copies, updates nothing before its last task, and returns no result of a task."""
    nodes = list(model.graph.node)
    last = max(at for at, node in enumerate(nodes) if is_call(node))
    results = {name for node in nodes if is_call(node) for name in node.output}
    everywhere = [*nodes, *(node for function in model.functions for node in function.node)]
    return (
        not any(node.domain == DOMAIN and node.op_type in (*LOOKUPS, *BODIES) for node in everywhere)
        and not any(node.domain == OPTIMIZER for node in nodes[:last])
        and not any(graph_bodies(node) for node in nodes)
        and not any(map(is_copy, everywhere))
        and results.isdisjoint(port.name for port in model.graph.output)
    )


class _Values:
    """The values of a file's main graph: `places` maps those of one microbatch to their place and the microbatch, `sums` those of a sum."""

    def __init__(self, model: ModelProto, calls: dict[str, list[Call]], count: int) -> None:
        self.model, self.calls, self.count = model, calls, count
        self.places: dict[str, tuple[Hashable, int]] = {}
        self.sums: dict[str, int] = {}
        for name, same in calls.items():
            for place, names in enumerate(zip(*(call.node.output for call in same), strict=True)):
                carried = any(all(map(str.__eq__, names[:-1], read)) for read in _operands(same, 1))
                for k, value in enumerate(names):
                    if carried:
                        self.sums[value] = k
                    else:
                        self.places[value] = ((name, place), k)

    def is_defined_once(self, row: Row) -> bool:
        """Whether each value of the main graph is made once and before its use, and no task uses its name inside."""
        graph = self.model.graph
        defined = {port.name for port in graph.input} | {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            results = [name for name in node.output if name]
            if not defined.issuperset(filter(None, node.input)) or not defined.isdisjoint(results):
                return False
            defined.update(results)
        inside = (call.names[name] for call in row.calls for name in call.body.inside - {*call.body.function.output})
        return defined.isdisjoint(inside)

    def reads_alike(self, calls: Sequence[Call]) -> bool:
        """Whether calls of one body read the same value, a sum, or their own value, at each place; their own values become known."""
        for place, names in enumerate(_operands(calls, 0)):
            if len({*names}) == 1:
                if names[0] in self.places or names[0] in self.sums:
                    return False
            elif any(name in self.sums for name in names):
                results = zip(*(call.node.output for call in calls), strict=True)
                if names[0] in self.sums or not any(result[:-1] == names[1:] for result in results):
                    return False
            else:
                for k, name in enumerate(names):
                    self.places.setdefault(name, ((calls[0].node.op_type, "read", place), k))
                known = [self.places[name] for name in names]
                if [k for _, k in known] != [*range(self.count)] or len({place for place, _ in known}) > 1:
                    return False
        return True

    def repeats(self) -> bool:
        """Whether the nodes between the tasks are the same for each microbatch, and those of several have all in order."""
        nodes = [Counter[Hashable]() for _ in range(self.count)]
        for node in self.model.graph.node:
            if is_call(node):
                continue
            names = [*node.input, *node.output]
            if any(self.sums.get(name, self.count - 1) != self.count - 1 for name in names):
                return False
            known = [self.places[name] for name in names if name in self.places]
            if len({k for _, k in known}) == 1:
                nodes[known[0][1]][self._image(node, known[0][1])] += 1
                continue
            microbatches: dict[Hashable, list[int]] = {}
            for place, k in known:
                microbatches.setdefault(place, []).append(k)
            if any(each != [*range(self.count)] for each in microbatches.values()):
                return False
        return all(one == two for one, two in pairwise(nodes))

    def _image(self, node: NodeProto, microbatch: int) -> Hashable:
        """A key of a node of a microbatch, which is equal for its images; its results become known."""
        tags = tuple(one.i - microbatch for one in node.attribute if one.name == TAG)
        attributes = sorted(one.SerializeToString(deterministic=True) for one in node.attribute if one.name != TAG)
        operands = tuple(self.places.get(name, (name, 0))[0] for name in node.input)
        key = (node.domain, node.op_type, tags, *attributes, operands)
        for place, name in enumerate(node.output):
            self.places.setdefault(name, ((key, place), microbatch))
        return key, tuple(self.places[name][0] for name in node.output)


def _operands(calls: Sequence[Call], first: int) -> list[tuple[str, ...]]:
    """For each place of a body, the operands of its calls from the call `first` on."""
    return [*zip(*(call.node.input for call in calls[first:]), strict=True)]
