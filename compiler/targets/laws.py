"""What holds of targets in a finished program: every op has one, and reads what lies there; every copy is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Body, Call, Comm, Compute, Copy, Op, RankProgram, Value
from partc.compiler.targets.of_ops import is_of_shape
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.graph.kernels import host_inputs


def target_faults(program: Complete) -> Iterator[str]:
    """What breaks the laws of targets; nothing where the plan names none."""
    for part, ranks in program.alike if program.targets else ():
        yield from (f"rank {ranks[0]}: {fault}" for fault in _part_faults(part))


def _part_faults(part: RankProgram) -> Iterator[str]:
    lying = dict.fromkeys((*(held.value for held in part.inputs), *part.scalars), CPU)
    lying |= {one.value: one.target for one in part.kept}
    given: dict[Body, dict[Value, str]] = {}
    yield from _faults(part.steps, lying, given)
    for held in part.outputs:
        if lying.get(held.value, CPU) != CPU:
            yield f"the output '{held.value}' lies on {lying[held.value]}"
    for one in part.kept:
        if one.next is not None and lying.get(one.next, one.target) != one.target:
            yield f"'{one.value}' lies on {one.target}, and its next value on {lying[one.next]}"
    yield from _unread(part.steps, part.results)
    for body in part.bodies:
        yield from (f"{body.name}: {fault}" for fault in _unread(body.steps, body.outputs))


def _faults(steps: Iterable[Op], lying: dict[Value, str], given: dict[Body, dict[Value, str]]) -> Iterator[str]:
    """The faults of ops in order; `lying` gets where lies what they make, `given` by body where its ends lie."""
    for step in steps:
        match step:
            case Compute():
                yield from _op_faults(step, lying)
                lying |= dict.fromkeys(step.makes, CPU if is_of_shape(step) else step.target)
            case Comm():
                wrong = [value for value in step.reads if lying.get(value, CPU) != CPU]
                yield from (f"{step.op_type} takes '{value}', which lies on {lying[value]}" for value in wrong)
                lying |= dict.fromkeys(step.makes, CPU)
            case Copy():
                if lying.get(step.source, "") in ("", step.target):
                    yield f"a Copy of '{step.source}' to {step.target}, where it lies"
                lying[step.made] = step.target
            case Call(body=body):
                ends = zip(body.inputs, step.inputs, strict=True)
                inner = {own: lying[value] for own, value in ends if value in lying}
                if body not in given:
                    yield from (f"{body.name}: {fault}" for fault in _faults(body.steps, inner, given))
                    given[body] = inner
                else:
                    moved = [own for own, at in inner.items() if given[body].get(own, at) != at]
                    yield from (f"{step.cell} is given '{own}' on {inner[own]}" for own in moved)
                lying |= {
                    value: given[body][own]
                    for own, value in zip(body.outputs, step.outputs, strict=True)
                    if own in given[body]
                }


def _op_faults(step: Compute, lying: dict[Value, str]) -> Iterator[str]:
    title = f"{step.node.op_type} '{step.label}'"
    if not step.target:
        yield f"{title} has no target"
    host = host_inputs(step.node.domain, step.node.op_type)
    operands = [(value, k in host) for k, value in enumerate(step.inputs) if value is not None]
    for value, on_host in (*operands, *((value, False) for value in step.captured.values())):
        wanted = CPU if on_host else step.target
        if lying.get(value, wanted) != wanted:
            yield f"{title} on {wanted} reads '{value}', which lies on {lying[value]}"


def _unread(steps: Iterable[Op], kept: Iterable[Value]) -> Iterator[str]:
    read = {*kept}
    copies: list[Copy] = []
    for step in steps:
        read.update(step.reads)
        if isinstance(step, Copy):
            copies.append(step)
    yield from (f"nothing reads the Copy '{one.made}'" for one in copies if one.made not in read)
