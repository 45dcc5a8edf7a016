"""What holds of targets in a finished program: every op has one, and reads what lies there; every copy is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    CopyOp,
    RankOp,
    RankProgram,
    TaskBody,
    TaskCall,
    captured_names,
    made_names,
    read_names,
)
from partc.compiler.ops.registry import host_inputs
from partc.compiler.targets.of_ops import is_of_shape
from partc.runtime.artifact.format import CPU


def target_faults(program: Program) -> Iterator[str]:
    """What breaks the laws of targets; nothing of a program whose copies are not written yet."""
    for part, ranks in program.alike if program.has_copies else ():
        yield from (f"rank {ranks[0]}: {fault}" for fault in _part_faults(part))


def _part_faults(part: RankProgram) -> Iterator[str]:
    lying = dict.fromkeys((*(held.name for held in part.inputs), *part.scalars), CPU)
    lying |= {one.name: one.target for one in part.kept}
    given: dict[TaskBody, dict[str, str]] = {}
    yield from _faults(part.steps, lying, given)
    for held in part.outputs:
        if lying.get(held.name, CPU) != CPU:
            yield f"the output '{held.name}' lies on {lying[held.name]}"
    for one in part.kept:
        if one.next and lying.get(one.next, one.target) != one.target:
            yield f"'{one.name}' lies on {one.target}, and its next value on {lying[one.next]}"
    kept = [*(held.name for held in part.outputs), *(one.next for one in part.kept)]
    yield from _unread(part.steps, kept)
    for body in part.bodies:
        yield from (f"{body.name}: {fault}" for fault in _unread(body.steps, body.outputs))


def _faults(steps: Iterable[RankOp], lying: dict[str, str], given: dict[TaskBody, dict[str, str]]) -> Iterator[str]:
    """The faults of ops in order; `lying` gets where lies what they make, `given` by body where its outputs lie."""
    for step in steps:
        match step:
            case ComputeOp():
                yield from _op_faults(step, lying)
                lying |= dict.fromkeys(made_names(step), CPU if is_of_shape(step) else step.target)
            case CommOp():
                wrong = [name for name in step.inputs if lying.get(name, CPU) != CPU]
                yield from (f"{step.op_type} takes '{name}', which lies on {lying[name]}" for name in wrong)
                lying |= dict.fromkeys(step.outputs, CPU)
            case CopyOp():
                if lying.get(step.source, "") in ("", step.target):
                    yield f"a Copy of '{step.source}' to {step.target}, where it lies"
                lying[step.made] = step.target
            case TaskCall(body=body):
                inner = {own: lying[name] for own, name in zip(body.inputs, step.inputs, strict=True) if name in lying}
                if body not in given:
                    yield from (f"{body.name}: {fault}" for fault in _faults(body.steps, inner, given))
                    given[body] = inner
                else:
                    moved = [own for own, at in inner.items() if given[body].get(own, at) != at]
                    yield from (f"{step.cell} is given '{own}' on {inner[own]}" for own in moved)
                lying |= {
                    name: given[body][own]
                    for own, name in zip(body.outputs, step.outputs, strict=True)
                    if own in given[body]
                }


def _op_faults(step: ComputeOp, lying: dict[str, str]) -> Iterator[str]:
    title = f"{step.node.op_type} '{step.node.name}'"
    if not step.target:
        yield f"{title} has no target"
    host = host_inputs(step.node)
    operands = [(value.name, k in host) for k, value in enumerate(step.node.inputs) if value is not None and value.name]
    for name, on_host in (*operands, *((name, False) for name in captured_names(step))):
        wanted = CPU if on_host else step.target
        if lying.get(name, wanted) != wanted:
            yield f"{title} on {wanted} reads '{name}', which lies on {lying[name]}"


def _unread(steps: Iterable[RankOp], kept: Iterable[str]) -> Iterator[str]:
    read = {*kept}
    copies: list[CopyOp] = []
    for step in steps:
        read.update(read_names(step))
        if isinstance(step, CopyOp):
            copies.append(step)
    yield from (f"nothing reads the Copy '{one.made}'" for one in copies if one.made not in read)
