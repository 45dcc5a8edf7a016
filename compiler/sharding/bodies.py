"""Laws of bodies between borders (`ops/families/control/bodies.py`): one group, and one layout and shape of each state in all turns.

Carry(h) -> h'   ...   Carried(h'', h') -> h         h'' is given in the layout of h', into which it is resharded if it is made in another
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
from partc.compiler.errors import Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Placed
from partc.compiler.ops.families.control.bodies import (
    BEGIN,
    CARRIED,
    END,
    between_borders,
    carry_of,
    is_border,
    kind_of,
)
from partc.compiler.ops.node import same
from partc.runtime.artifact import format as fmt


def carry_layouts(choices: Mapping[NodeOnGroup, NodeSharding]) -> None:
    """Gives each state of a Loop, after its last turn, the layout that it has in all turns."""
    for instance, choice in choices.items():
        if is_border(instance.node) and instance.node.op_type == CARRIED:
            begun = choices[NodeOnGroup(carry_of(instance.node), instance.group)]
            choice.mesh, choice.axes, choice.why = begun.mesh, dict(begun.axes), dict(begun.why)


def wrong_bodies(program: Placed) -> Iterator[Problem]:
    """Yields the reasons why bodies cannot run between borders: several targets or groups, a state that changes its shape."""
    borders = [node for node in program.model.graph if is_border(node)]
    for rule in program.plan.target if borders else ():
        fact = f"target of '{rule.pattern}', and the body of '{_path(program, borders[0])}' is between borders"
        law = "a program whose bodies are sharded or placed by what is in them runs on one target"
        yield Problem(rule.where, fact, law, "leave out 'target', and name the nodes around bodies alone")
    if program.training is not None and borders:
        inside = between_borders(program.model.graph)
        for value in filter(None, program.training.statistics.values()):
            if (node := value.producer()) in inside and node is not None:
                fact = f"'{program.paths[node]}' takes running statistics in a body whose turns or branch only the run knows"
                law = "a state of the training is updated once a step"
                yield Problem(
                    _where(program, node), fact, law, "take the node out of the body, or freeze its statistics"
                )
    open_ = list[ir.Node]()
    reported = set[ir.Node]()
    for node in program.model.graph:
        if is_border(node) and node.op_type == BEGIN:
            open_.append(node)
        for begin in open_:
            if begin in reported or program.placement[node].groups == program.placement[begin].groups:
                continue
            if program.placement[node].rule not in (fmt.CONSTANT, fmt.SHAPE_ARITHMETIC, fmt.MADE_OF_INPUTS):
                reported.add(begin)
                path = _path(program, begin)
                ranks = [_listed(program.placement[one].groups) for one in (begin, node)]
                fact = f"'{program.paths[node]}' runs on {ranks[1]}, and the {kind_of(begin)} around it ('{path}') on {ranks[0]}"
                law = "all ops of a body run on the ranks of its node: they take its turns and branches together"
                yield Problem(_where(program, node), fact, law, f"place '{path}' as a whole, and shard what is in it")
        if is_border(node) and node.op_type == END:
            open_.pop()
        if is_border(node) and node.op_type == CARRIED:
            begun, ended = (None if value is None else value.shape for value in node.inputs[:2])
            known = begun is not None and ended is not None and len(begun) == len(ended)
            if not known or not all(map(same, begun or (), ended or ())):
                path = _path(program, node)
                of = carry_of(node).inputs[0]
                fact = f"state '{of.name if of is not None else ''}' of the Loop '{path}' begins as {ended}, and a turn makes {begun} of it"
                law = "what is carried from turn to turn of a body that is cut keeps its shape"
                yield Problem(
                    _where(program, node),
                    fact,
                    law,
                    f"write '{path}' in place of what is in it, so that it runs whole",
                )


def _path(program: Placed, border: ir.Node) -> str:
    return program.paths[border].rpartition(".")[0]


def _listed(groups: Sequence[Sequence[int]]) -> str:
    return " and ".join(f"rank{'s' * (len(group) > 1)} {', '.join(map(str, group))}" for group in groups)


def _where(program: Placed, node: ir.Node) -> str:
    """Returns the line of the plan that places a node, or its path where no line does."""
    line, pattern, _ = program.placement[node].rule.partition(" '")
    return line if pattern else program.paths[node]
