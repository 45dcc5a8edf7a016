"""An existing plan with proposed targets: the section `target` at its end, `target: cpu` in its optimizer, all else as it was written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import step_program
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.targets import Device, ProposedTargets, propose_targets
from partc.runtime.artifact.format import CPU
from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode


def with_targets(source: Source, text: str, file: Path, name: str, device: Device) -> str:
    """The text of the plan with targets. CompileError where it is not a plan, has targets already, or does not fit on the device."""
    if parse_plan(text, str(file)).target:
        fact = "the plan has targets already"
        raise CompileError(Problem(str(file), fact, help="remove its section 'target', and have it proposed anew"))

    def compiled(some: ProposedTargets) -> Complete:
        plan = parse_plan(_edited(text, some), str(file))
        return step_program(dataclasses.replace(source, model=source.model.clone()), plan, name)

    return _edited(text, propose_targets(compiled, device, name)[0])


def _edited(text: str, targets: ProposedTargets) -> str:
    text = with_optimizer(text, f"target: {CPU}") if targets.optimizer else text
    return "\n".join([text.rstrip("\n"), "", *targets.section()]).lstrip("\n") + "\n"


def with_optimizer(text: str, option: str) -> str:
    """The text of a plan that trains with one more option of its optimizer, `target: cpu`; in the way in which the optimizer is written."""
    root = YAML(typ="rt", pure=True).compose(text)
    optimizer = _entry(_entry(root, "train"), "optimizer")
    assert optimizer is not None, "a plan that trains names its optimizer"
    begin = optimizer.start_mark.index
    if isinstance(optimizer, MappingNode) and optimizer.flow_style:
        return f"{text[: begin + 1]}{option}, {text[begin + 1 :]}"
    if isinstance(optimizer, ScalarNode):
        return f"{text[:begin]}{{type: {optimizer.value}, {option}}}{text[optimizer.end_mark.index :]}"
    return f"{text[:begin]}{option}\n{' ' * optimizer.start_mark.column}{text[begin:]}"


def _entry(node: Node | None, name: str) -> Node | None:
    """Returns the entry of a mapping under a key."""
    pairs = node.value if isinstance(node, MappingNode) else ()
    return next((value for key, value in pairs if key.value == name), None)
