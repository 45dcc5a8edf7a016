"""Proves that sums over the parts of a batch follow one tree (`artifact/tasks/sum_tree.py`), so that their bits do not depend on the ranks.

A task computes values of one part, that of its microbatch in the rank's run. The checker maps each value of a step to the tree nodes that
it has, in order: an Add has both halves of a node, in their order; an op that only moves elements has the nodes of its operand; an exchange
has those of all ranks. The loss, new statistics, and each gradient that an optimizer reads, must be the whole tree, or rows of all parts in
their order.

    %g.of_0_2 = Add(%g.0, %g.1)      (0, 1) and (1, 2) are (0, 2)
    %g.of_0_3 = Add(%g.1, %g.2)      (1, 3) is not a node: on another number of ranks they are added otherwise
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.format import (
    ALL_GATHER,
    ALL_TO_ALL,
    DOMAIN,
    GROUP,
    OPTIMIZER,
    TAG,
    TASK,
    Manifest,
)
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of
from partc.runtime.artifact.graph.row_function import gradient_operands
from partc.runtime.artifact.tasks.sum_tree import Node, halves, nodes, run_of
from partc.runtime.artifact.tasks.task import parse
from partc.runtime.errors import Violation

Nodes: TypeAlias = tuple[Node, ...]
_MOVES = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_MERGES = "MergeRows"


def check_tree_sums(manifest: Manifest, models: Mapping[int, ModelProto]) -> Iterator[Violation]:
    """Yields violations of sums over parts in another order than the tree's; only for a training whose plan has `parts`."""
    training = manifest.training
    if training is None or not training.parts or len(models) < manifest.ranks:
        return
    parts, reported = training.parts, set[tuple[str, str]]()
    ranks = {rank: _Rank(manifest, rank, models[rank], parts) for rank in models}
    sent: dict[tuple[int, int], Nodes | str] = {}
    while sum(one.follow(sent) for one in ranks.values()):
        pass
    whole = ((0, parts),), tuple((part, part + 1) for part in range(parts))
    for rank_sums in ranks.values():
        file = manifest.program(rank_sums.rank)
        statistics = {
            record.next
            for record in manifest.state
            if record.kind == "statistics"
            and rank_sums.rank in record.ranks
            and record.next
            and "int" not in record.type
        }
        for node, name in rank_sums.results({training.loss, *statistics}):
            if rank_sums.known.get(name) not in whole and (file, name) not in reported:
                reported.add((file, name))
                fact = f"'{name}' is not the sum over {parts} parts by their tree{rank_sums.why(name)}"
                yield Violation(file, fact, node_title(node), path_of(node), "compile the model again")


class _Rank:
    """A rank's program: `known` maps values to their tree nodes; `at` is the next node of the graph."""

    def __init__(self, manifest: Manifest, rank: int, model: ModelProto, parts: int) -> None:
        self.rank, self.leaves, self.run = rank, parts, run_of(rank, manifest.ranks, parts)
        self.tree, self.groups = frozenset(nodes((0, parts))), manifest.groups_of(rank)
        self.nodes, self.at = list(model.graph.node), 0
        self.gradients = gradient_operands(model)
        self.known: dict[str, Nodes] = {}
        self.zeros: set[str] = set()
        self.wrong: dict[str, str] = {}
        """Maps each value whose parts are in another order to the reason."""

    def results(self, totals: Collection[str]) -> Iterator[tuple[NodeProto, str]]:
        """The values that must be whole sums, each with its node: gradients, and the outputs of these names."""
        for node in self.nodes:
            operand = self.gradients.get(node.op_type, 0) if node.domain == OPTIMIZER else 0
            if 0 < operand < len(node.input) and node.op_type != _MERGES:
                yield node, node.input[operand]
            else:
                yield from ((node, name) for name in node.output if name in totals)

    def why(self, name: str) -> str:
        """The reason for which a value's parts are in another order, if it is known."""
        return f": {self.wrong[name]}" if name in self.wrong else ""

    def follow(self, sent: dict[tuple[int, int], Nodes | str]) -> bool:
        """Follows nodes up to a collective for which other ranks have not sent their values; returns whether it followed any.

        `sent`: maps a tag and a rank to the tree nodes of the value that the rank sends, or to the reason for which it has none.
        """
        begun = self.at
        while self.at < len(self.nodes):
            node = self.nodes[self.at]
            if node.domain == DOMAIN and node.op_type in (ALL_GATHER, ALL_TO_ALL) and len(node.input) == 1:
                tag = integer_of(node, TAG, -1)
                name = node.input[0]
                sent[tag, self.rank] = self.known.get(name) or self.wrong.get(name, "")
                group = next(one.s.decode() for one in node.attribute if one.name == GROUP)
                if any((tag, rank) not in sent for rank in self.groups[group]):
                    break
                self._exchange(node, [sent[tag, rank] for rank in self.groups[group]])
            else:
                self._apply(node)
            self.at += 1
        return self.at > begun

    def _exchange(self, node: NodeProto, operands: Sequence[Nodes | str]) -> None:
        """Concatenates the tree nodes that all ranks send, in their order; shorter lists are padded with zeros, which are not a node."""
        lists = [one for one in operands if not isinstance(one, str)]
        if len(lists) < len(operands):
            if reason := next((one for one in operands if one and isinstance(one, str)), ""):
                self.wrong[node.output[0]] = reason
            return
        most = max(map(len, lists))
        filled = [one for own in lists for one in (*own, *[(0, 0)] * (most - len(own)))]
        self.known[node.output[0]] = lists[0] if {*lists} == {((0, self.leaves),)} else tuple(filled)

    def _apply(self, node: NodeProto) -> None:
        if cell := metadata_of(node, TASK):
            part = self.run[0] + parse(cell).microbatch
            self.known |= dict.fromkeys(node.output, ((part, part + 1),))
            return
        if node.op_type == "ConstantOfShape":
            self.zeros.update(node.output)
        read = [self.known[name] for name in node.input if name in self.known]
        for name in node.input:
            if name in self.wrong:
                self.wrong |= dict.fromkeys(node.output, self.wrong[name])
        if not read:
            return
        if node.op_type in _MOVES or node.op_type == _MERGES:
            self.known |= dict.fromkeys(node.output, read[0])
        elif node.op_type == "Concat" and len(read) < sum(name not in self.zeros for name in node.input):
            return  # one of several values is not a sum by the tree
        elif node.op_type == "Concat":
            self.known[node.output[0]] = read[0] if len({*read}) == 1 else tuple(one for own in read for one in own)
        elif node.op_type == "Split":
            several = len(read[0]) == len(node.output) > 1
            self.known |= {name: (read[0][at],) if several else read[0] for at, name in enumerate(node.output)}
        elif node.op_type == "Add" and len(read) == 2:
            (left,), (right,) = (one if len(one) == 1 else ((0, 0),) for one in read)
            joined = left[0], right[1]
            if left[1] == right[0] and joined in self.tree and halves(joined) == (left, right):
                self.known[node.output[0]] = (joined,)
            else:
                fact = f"{node_title(node)} adds parts {left[0]} to {left[1] - 1} and {right[0]} to {right[1] - 1}"
                self.wrong[node.output[0]] = fact
