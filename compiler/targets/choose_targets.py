"""Pass: the target of every node of the single-device model, the kind of device that runs it within its rank.

The law, in order; the first that decides holds:

1. A constant has none: it stands where it is read.
2. A lookup whose rows are pulled is on cpu, and so is what a server gives: it is communication. On another target all of a table would
   be copied in every step.
3. The Cast of a trained parameter to 16 bits stands where the parameter is updated, so that 16 bits are copied, in both directions.
4. The plan's last matching rule, else the model's own last one, else the node's own metadata (`partc.target`).
5. What partc adds for a loss or a metric stands where its first operand is made.
6. The others have `device`, the device of the job.

A parameter that is pulled is updated on cpu, another one on the optimizer's target, else on that of the first node that computes with it.
What ranks' programs have beside these nodes follows its operands (`of_ops.py`); so do shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import PINNED
from partc.compiler.ir.program import Sharded, Targeted
from partc.compiler.ir.training import ProgramKind
from partc.compiler.lower.pulls import is_pulled
from partc.compiler.matching import is_unneeded, matched_nodes, nothing_matched
from partc.compiler.plan.target import KINDS, TargetRule, named_target
from partc.runtime.artifact.format import CONSTANT, CPU, DEVICE, SHAPE_ARITHMETIC, TARGET

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOATING = (CONSTANT, SHAPE_ARITHMETIC)


def choose_targets(program: Sharded) -> Targeted:
    """Fills `targets` and `update_targets` where the plan or the model names a target; CompileError for a rule that matches nothing."""
    rules, training = (*program.declared.targets, *program.plan.target), program.plan.train
    updated = (training.optimizer.target if training is not None else None) or ""
    said = rules or updated
    if not said and not any(TARGET in node.metadata_props for node in program.model.graph):
        return program.into(Targeted, targets={}, update_targets={})
    hosted = {node for node in program.model.graph if _is_communication(program, node)}
    targets = _of_nodes(program, _ruled(program, rules) | dict.fromkeys(hosted, CPU))
    updates = _of_updates(program, targets, hosted, updated)
    targets |= {node: updates[value] for node, value in _low_copies(program) if value in updates}
    return program.into(Targeted, targets=targets, update_targets=updates)


def _ruled(program: Sharded, rules: tuple[TargetRule, ...]) -> dict[ir.Node, str]:
    """Maps each node that a rule matches to its target."""
    decided: dict[ir.Node, str] = {}
    problems: list[Problem] = []
    for node, path in program.paths.items():
        if (own := node.metadata_props.get(TARGET)) is not None:
            decided[node] = named_target(own)
            if not decided[node]:
                law = f"a target is a kind of device: {' or '.join(KINDS)}"
                problems.append(Problem(path, f"its metadata '{TARGET}' is '{own}'", law))
    for rule in rules:
        hit = matched_nodes(program, rule.pattern)
        decided.update(dict.fromkeys(hit, rule.target))
        if not hit and program.kind is ProgramKind.STEP and not is_unneeded(program, rule.pattern):
            problems.append(nothing_matched(program, rule.pattern, rule.where))
    if problems:
        raise CompileError(problems)
    return decided


def _is_communication(program: Sharded, node: ir.Node) -> bool:
    """Whether a node gives rows that are pulled, or a parameter of a server."""
    placed = program.placement.get(node)
    groups = placed.groups if placed is not None else ()
    return PINNED in node.meta or any(is_pulled(program, NodeOnGroup(node, group)) for group in groups)


def _of_nodes(program: Sharded, ruled: Mapping[ir.Node, str]) -> dict[ir.Node, str]:
    by_node: dict[ir.Node, str] = {}
    by_value: dict[ir.Value, str] = {}
    for node in program.model.graph:
        placed = program.placement.get(node)
        if placed is not None and placed.rule in _FLOATING:
            continue
        target = ruled.get(node, DEVICE)
        if node not in ruled and program.training is not None and program.training.adds(program.paths[node]):
            target = next((by_value[value] for value in node.inputs if value in by_value), DEVICE)
        if not all(_is_tensor(value) for value in (*program.reads[node], *node.outputs)):
            target = CPU
        by_node[node] = target
        by_value |= dict.fromkeys(node.outputs, target)
    return by_node


def _is_tensor(value: ir.Value) -> bool:
    """Whether devices may have a value: a dense tensor of numbers, or one of which nothing is known."""
    return value.type is None or (isinstance(value.type, ir.TensorType) and value.dtype is not ir.DataType.STRING)


def _of_updates(
    program: Sharded, targets: Mapping[ir.Node, str], hosted: Collection[ir.Node], said: str
) -> dict[ir.Value, str]:
    """Maps each parameter, including frozen ones, and each statistic to the target that holds its state."""
    if program.training is None:
        return {}
    found = {}
    readers = {value: _first_reader(value, targets) for value in program.training.parameters}
    for value, options in program.training.parameters.items():
        served = any(node in hosted for node in value.consumers())
        found[value] = CPU if served else readers[value] if options.frozen or not said else said
    return found


def _first_reader(value: ir.Value, targets: Mapping[ir.Node, str]) -> str:
    """The target of the first node that computes with a weight, as it is or transposed, cast and the like."""
    for node in value.consumers():
        if node in targets:
            return targets[node]
        for out in node.outputs:
            if (found := _first_reader(out, targets)) != DEVICE:
                return found
    return DEVICE


def _low_copies(program: Sharded) -> list[tuple[ir.Node, ir.Value]]:
    """The Casts of trained parameters to 16 bits, each with the parameter."""
    if program.training is None:
        return []
    trained = {value for value, one in program.training.parameters.items() if not one.frozen}
    return [
        (node, value)
        for node in program.model.graph
        if node.op_type == "Cast" and (value := node.inputs[0]) in trained and node.outputs[0].dtype in _HALVES
        if value is not None and value.dtype == ir.DataType.FLOAT
    ]
