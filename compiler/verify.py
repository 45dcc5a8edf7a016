"""The laws of a valid program after each pass: every pass relies on them and none may break them.

    graph       a node reads only values made before it; names are distinct; every node has a path
    shapes      every value has a type; a dim is a size or an expression over the symbols
    place       every node whose results are read has groups of distinct ranks of the job
    shard       a sharding is of a node on a group where it runs; its mesh has the group's ranks; an axis shards one factor; shards divide
                their dims; nodes that share a rule object would also get it by themselves
    defer_all_reduce   partial sums that a node reads are made on its ranks, and the node is linear in them
    localize    the ranks of an op are among those of each value that it reads, which is made before it; a name is made once on a rank;
                forward ops come before all others; every event has the same place in the order of all its ranks; and the same after
                differentiate and update
    lower       the same for the finished programs, which cover all ranks and return the outputs that they list; a message is one value at
                both ends
    copy_between_targets  every op has a target, its operands are on it, and every copy is read

A law holds from the phase on that has its facts. A violation is a fault of the pass, never of the user: the error names the pass, and all
faults.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import onnx_ir as ir
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.reading import names_in, read
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.graph import BY_EXPERT, read_by
from partc.compiler.ir.program import Annotated, Complete, Loaded, Lowered, Placed, Scheduled, Sharded, Typed
from partc.compiler.ir.programs import Body, Call, Comm, Compute, Copy, Event, Op, RankProgram, TaskKind, Value
from partc.compiler.ir.sharded import Ranks, lowest, members, ranks_of
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.lower.job import Job, JobOp, Transfer
from partc.compiler.lower.local_view import Localized
from partc.compiler.ops.families.control.local_map import ALONG
from partc.compiler.ops.registry import fresh_rule, rule_of
from partc.compiler.ops.rule import Rule
from partc.compiler.targets.of_ops import is_of_shape
from partc.runtime.artifact.format import CPU, RECV, SEND
from partc.runtime.artifact.graph.kernels import host_inputs


def target_faults(program: Complete) -> Iterator[str]:
    """Yields the violations of the laws of targets; none if the plan names no targets."""
    for part, ranks in program.distinct_programs if program.targets else ():
        yield from (f"rank {ranks[0]}: {fault}" for fault in _part_faults(part))


def _part_faults(part: RankProgram) -> Iterator[str]:
    lying = dict.fromkeys((*(held.value for held in part.inputs), *part.scalars), CPU)
    lying |= {one.value: one.target for one in part.state}
    given: dict[Body, dict[Value, str]] = {}
    yield from _faults(part.steps, lying, given)
    for held in part.outputs:
        if lying.get(held.value, CPU) != CPU:
            yield f"the output '{held.value}' lies on {lying[held.value]}"
    for one in part.state:
        if one.next is not None and lying.get(one.next, one.target) != one.target:
            yield f"'{one.value}' lies on {one.target}, and its next value on {lying[one.next]}"
    yield from _unread(part.steps, part.live_out)
    for body in part.bodies:
        yield from (f"{body.name}: {fault}" for fault in _unread(body.steps, body.outputs))


def _faults(
    steps: Iterable[Op], locations: dict[Value, str], output_locations: dict[Body, dict[Value, str]]
) -> Iterator[str]:
    """Yields the faults of ops in order; `locations` gets the targets of their results, `output_locations` those of each body's outputs."""
    for step in steps:
        match step:
            case Compute():
                yield from _op_faults(step, locations)
                locations |= dict.fromkeys(step.makes, CPU if is_of_shape(step) else step.target)
            case Comm():
                wrong = [value for value in step.reads if locations.get(value, CPU) != CPU]
                yield from (f"{step.op_type} takes '{value}', which lies on {locations[value]}" for value in wrong)
                locations |= dict.fromkeys(step.makes, CPU)
            case Copy():
                if locations.get(step.source, "") in ("", step.target):
                    yield f"a Copy of '{step.source}' to {step.target}, where it lies"
                locations[step.output] = step.target
            case Call(body=body):
                ends = zip(body.inputs, step.inputs, strict=True)
                inner = {own: locations[value] for own, value in ends if value in locations}
                if body not in output_locations:
                    yield from (f"{body.name}: {fault}" for fault in _faults(body.steps, inner, output_locations))
                    output_locations[body] = inner
                else:
                    moved = [own for own, at in inner.items() if output_locations[body].get(own, at) != at]
                    yield from (f"{step.cell} is given '{own}' on {inner[own]}" for own in moved)
                locations |= {
                    value: output_locations[body][own]
                    for own, value in zip(body.outputs, step.outputs, strict=True)
                    if own in output_locations[body]
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
    yield from (f"nothing reads the Copy '{one.output}'" for one in copies if one.output not in read)


VARIABLE = "PARTC_VERIFY_PASSES"
"""The environment variable that makes every compile verify after every pass, or with `last` only after the last one; tests set it."""
_SHOWN = 12
_own_rules: WeakKeyDictionary[ir.Node, Rule] = WeakKeyDictionary()
"""Maps each node to the rule that was last verified for it."""


class InvalidProgram(Exception):
    """Raised for an invalid program of a pass. Not a PartcError: the user cannot fix it."""

    def __init__(self, name: str, faults: list[str]) -> None:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        lines = "\n  ".join([*faults[:_SHOWN], *more])
        super().__init__(f"the pass '{name}' made a program that is not valid:\n  {lines}")


def is_requested(*, last: bool) -> bool:
    """Whether the environment requests that a program is verified after a pass; `last`: whether it is the last pass."""
    requested = os.environ.get(VARIABLE, "")
    return requested not in ("", "0") and (last or requested != "last")


def verify(program: Loaded, name: str, before: Loaded | None = None) -> None:
    """Raises InvalidProgram with all laws that the program breaks; `name` is that of the pass which made it.

    `before`: a program for which all laws were found to hold. From `follow_annotations` on passes add facts and change none, and one that
    edits the graph sets new `paths`: so a law is not verified again for the very objects for which it held before. At the beginning of the
    local view all laws are verified, which finds a pass of the global view that edited the graph without setting new paths.
    """
    changes_nothing = isinstance(before, Annotated) and _is_local(program) == _is_local(before)
    faults = [
        fault
        for law, (phase, fields) in LAWS.items()
        if isinstance(program, phase)
        if not (changes_nothing and isinstance(before, phase))
        or any(getattr(program, field) is not getattr(before, field) for field in fields)
        for fault in law(program)
    ]
    if faults:
        raise InvalidProgram(name, faults)


def _is_local(program: Loaded) -> bool:
    return isinstance(program, Localized | Lowered)


def _graph(program: Loaded) -> Iterator[str]:
    graph = program.model.graph
    defined: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    names = Counter(value.name for value in defined)
    for node in graph:
        if node not in program.paths:
            yield f"{node.name or node.op_type}: it has no path"
        for value in read_by(node):
            if value not in defined:
                yield f"{program.paths.get(node, node.op_type)}: it reads '{value.name}', which is not made before it"
        defined.update(node.outputs)
        for value in node.outputs:
            if value.name:
                names[value.name] += 1
    yield from (f"'{name}': {count} values have this name" for name, count in names.items() if count > 1)
    yield from (f"output '{value.name}': nothing makes it" for value in graph.outputs if value not in defined)
    paths = Counter(program.paths.get(node) for node in graph)
    yield from (f"'{path}': {count} nodes have this path" for path, count in paths.items() if count > 1)


def _shapes(program: Typed) -> Iterator[str]:
    graph = program.model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    known: dict[int | str, str] = {}
    for value in values:
        info = program.values.get(value)
        if not value.name:
            continue
        if info is None:
            yield f"'{value.name}': nothing is known of it"
            continue
        for dim in info.shape or ():
            if dim not in known:
                known[dim] = _dim_fault(dim, program)
            if known[dim]:
                yield f"'{value.name}': its dim {known[dim]}"


def _dim_fault(dim: int | str, program: Typed) -> str:
    """Returns the fault of a dim, '' if it has none."""
    if isinstance(dim, int):
        return f"{dim} is below 0" if dim < 0 else ""
    expression = read(dim)
    if expression is None:
        return f"'{dim}' is not an expression"
    free = names_in(expression) - program.symbols.keys()
    return f"'{dim}' has {', '.join(sorted(free))}, of which nothing is known" if free else ""


def _placement(program: Placed) -> Iterator[str]:
    read = {*program.model.graph.outputs}
    for node in reversed(program.model.graph):
        if not read.isdisjoint(node.outputs) or (placed := program.placement.get(node)) is None or placed.groups:
            read.update(program.reads[node])
    for node in program.model.graph:
        placed, path = program.placement.get(node), program.paths.get(node, node.op_type)
        if placed is None or (not placed.groups and not read.isdisjoint(node.outputs)):
            yield f"{path}: it runs nowhere"
            continue
        for group in placed.groups:
            if len(set(group)) != len(group) or not all(0 <= rank < program.plan.ranks for rank in group):
                yield f"{path}: {list(group)} are not distinct ranks of {program.plan.ranks}"


def _choices(program: Sharded) -> Iterator[str]:
    known = {name: info.facts for name, info in program.symbols.items()}
    for instance, choice in program.choices.items():
        node, where = instance.node, program.paths.get(instance.node, instance.node.op_type)
        if not _has_own_rule(node):
            yield f"{where}: `rule_of` has the rule of another node, which is not alike"
        if node not in program.placement or instance.group not in program.placement[node].groups:
            yield f"{where}: it is cut over {list(instance.group)}, where it does not run"
        if math.prod(choice.mesh) != len(instance.group):
            yield f"{where}: its mesh {choice.mesh} is of {math.prod(choice.mesh)} ranks, its group of {len(instance.group)}"
        own = {
            letter: one
            for letter, one in choice.axes.items()
            if letter not in (choice.rule.dealt, *choice.rule.joined[:1])
        }
        axes = [axis for one in (*own.values(), choice.passing) for axis in one]
        if choice.pulled:  # rows may have the axes of ids, but not those of columns
            ids = {axis for letter in choice.rule.ids for axis in choice.axes.get(letter, ())}
            others = [axis for letter, one in own.items() if letter != choice.pulled for axis in one]
            axes = [*others, *(axis for axis in choice.axes[choice.pulled] if axis not in ids), *choice.passing]
        if len(axes) != len(set(axes)) or not all(0 <= axis < len(choice.mesh) for axis in axes):
            yield f"{where}: its axes {choice.axes} and {choice.passing} are not axes of {choice.mesh}, each once"
            continue
        if unknown := [
            letter
            for letter, one in choice.axes.items()
            if one and letter not in (*choice.rule.factors, ALONG, choice.rule.looked_up)
        ]:
            yield f"{where}: it is cut along {', '.join(unknown)}, which its rule does not let be cut"
        for value, layout in _operands(instance, choice):
            yield from (f"{where}: '{value.name}' {fault}" for fault in _uneven(program, value, layout, known))


def _has_own_rule(node: ir.Node) -> bool:
    """Whether the rule that equal nodes share is the one computed from this node itself; computed once for a node and a rule."""
    rule = rule_of(node)
    if _own_rules.get(node) is rule:
        return True
    equal = replace(rule, local=None) == replace(fresh_rule(node), local=None)
    if equal:
        _own_rules[node] = rule
    return equal


def _sums(program: Sharded) -> Iterator[str]:
    for instance, choice in program.choices.items():
        where = program.paths.get(instance.node, instance.node.op_type)
        for k in sorted(choice.partial):
            value = instance.node.inputs[k]
            producer = None if value is None else value.producer()
            maker = program.choices.get(NodeOnGroup(producer, instance.group)) if producer is not None else None
            made = maker.output(producer.outputs.index(value)) if maker and producer is not None and value else None
            wanted = choice.input(k)
            if made is None or wanted is None or normal(made) != normal(wanted):
                yield f"{where}: it reads '{value.name if value else ''}' partial, which is not produced so: {made}, not {wanted}"
        there = {k for k, value in enumerate(instance.node.inputs) if value is not None}
        if choice.passing and not any(
            there & {*row} <= choice.partial | choice.masked for row in choice.rule.partial_inputs
        ):
            yield f"{where}: it passes a sum on, and is not linear in what it is given"


def _operands(instance: NodeOnGroup, choice: NodeSharding) -> Iterator[tuple[ir.Value, Layout]]:
    node = instance.node
    for values, layout_of in ((node.inputs, choice.input), (node.outputs, choice.output)):
        for k, value in enumerate(values):
            layout = layout_of(k)
            if value is not None and value.name and layout is not None:
                yield value, layout


def _uneven(program: Typed, value: ir.Value, layout: Layout, known: dict[str, Facts]) -> Iterator[str]:
    info = program.values.get(value)
    if info is None or info.shape is None:
        return
    if len(info.shape) != len(layout.cuts):
        yield f"has {len(info.shape)} dims, and its layout {len(layout.cuts)}"
        return
    for k, dim in enumerate(info.shape):
        shards = layout.num_shards(k)
        if shards == 1 or (k == 0 and BY_EXPERT in value.meta):
            continue
        divisor = dim if isinstance(dim, int) else facts_of(ir.SymbolicDim(dim), known).real_divisor()
        if divisor % shards:
            yield f"is cut into {shards} along dim {k}, which is {dim}"


def _local(program: Localized) -> Iterator[str]:
    local = program.local
    job = local.comm.job
    defined: dict[Value, Ranks] = {}
    for some in (job.inputs, job.weights, job.state, job.constants, job.scalars):
        for value, _, ranks in some:
            defined[value] = defined.get(value, 0) | ranks
    for one in local.accumulated:
        defined[one.value] = defined.get(one.value, 0) | ranks_of(one.version.group)
    yield from _job(job, defined)
    tags = [(step.tag, ranks) for step, ranks in job.program if isinstance(step, Comm | Transfer)]
    rows = {
        rank: list(dict.fromkeys(tag for tag, some in tags if some & ranks))
        for ranks in job.distinct()
        for rank in members(ranks)
    }
    yield from _events(local.comm.events, rows)


def _job(job: Job, defined: dict[Value, Ranks]) -> Iterator[str]:
    """Yields the faults of a job's ops in order: an op's ranks must have its operands, and make a value once; `defined`: earlier values."""
    later: list[tuple[JobOp, Ranks]] = []
    behind = 0
    for step, ranks in job.program:
        if step.task is not TaskKind.FORWARD:
            later.append((step, ranks))
            behind |= ranks
        elif early := ranks & behind:
            first = next(one for one, some in reversed(later) if some & early)
            yield f"rank {lowest(early)}: {_title(step)} is forward, and stands behind {_title(first)}, which is not"
        reading, making = ranks, ranks
        if isinstance(step, Transfer):
            reading, making = ranks_of(step.sources), ranks_of(step.targets)
        for value in step.reads:
            if without := reading & ~defined.get(value, 0):
                yield f"rank {lowest(without)}: {_title(step)} reads '{value}', which it does not have"
        for value in step.makes:
            there = defined.get(value, 0)
            if again := making & there:
                yield f"rank {lowest(again)}: '{value}' is defined again by {_title(step)}"
            defined[value] = there | making


def _parts(program: Lowered) -> Iterator[str]:
    if [part.rank for part in program.parts] != list(range(program.plan.ranks)):
        yield f"there are {len(program.parts)} programs for {program.plan.ranks} ranks"
    for part, ranks in program.distinct_programs:
        in_order = not program.targets and not (isinstance(program, Scheduled) and program.tasks is not None)
        yield from (f"rank {ranks[0]}: {fault}" for fault in _part(part, in_order))
    yield from _events(
        program.events,
        {
            rank: list(dict.fromkeys(_each_tag(part.steps)))
            for part, ranks in program.distinct_programs
            for rank in ranks
        },
    )
    yield from _messages([part for part, _ in program.distinct_programs])


def _messages(parts: Sequence[RankProgram]) -> Iterator[str]:
    """Yields the messages whose received value differs from the sent one; a copy for a target may be sent in place of a value.

    A constant is the same by its name.
    """
    sent, received = dict[int, Sequence[Value]](), dict[int, Value]()
    for part in parts:
        steps = [*part.steps, *(step for body in part.bodies for step in body.steps)]
        copied = {step.output: step.source for step in steps if isinstance(step, Copy)}
        ends = [step for step in steps if isinstance(step, Comm)]
        sent |= {step.tag: (one, copied.get(one, one)) for step in ends if step.op_type == SEND for one in step.reads}
        received |= {step.tag: one for step in ends if step.op_type == RECV for one in step.makes}
    for tag in sent.keys() & received.keys():
        here = received[tag]
        if not any(one is here or (one.constant is not None and str(one) == str(here)) for one in sent[tag]):
            yield f"message {tag} is '{sent[tag][0]}' where it is sent and '{received[tag]}' where it arrives"


def _part(part: RankProgram, in_order: bool) -> Iterator[str]:
    """Yields the faults of a rank's program; `in_order`: whether its forward ops come before all others, as without a schedule."""
    made = Counter(part.live_in)
    yield from _steps(part.steps, made, in_order)
    for body in part.bodies:
        yield from (f"{body.name}: {fault}" for fault in _body(body, part))
    missing = (value for value in part.live_out if value not in made and value.constant is None)
    yield from (f"'{value}' is given back, and nothing makes it" for value in missing)


def _body(body: Body, part: RankProgram) -> Iterator[str]:
    """The faults of the body of a task, and of its calls."""
    made = Counter(body.inputs)
    yield from _steps(body.steps, made, False)
    yield from (f"'{value}' is given back, and nothing makes it" for value in body.outputs if value not in made)
    for step in part.steps:
        ends = (len(step.inputs), len(step.outputs)) if isinstance(step, Call) and step.body is body else None
        if ends not in (None, (len(body.inputs), len(body.outputs))):
            yield f"a call of it has {ends} inputs and outputs"


def _steps(steps: Sequence[Op], defined: Counter[Value], in_order: bool) -> Iterator[str]:
    """Yields the faults of a rank's ops in order; `defined` counts the values that exist before, and then those that ops make."""
    later: Op | None = None
    for step in steps:
        if step.task is not TaskKind.FORWARD:
            later = step
        elif later is not None and in_order:
            yield f"{_title(step)} is forward, and stands behind {_title(later)}, which is not"
        for value in step.reads:
            if value not in defined and value.constant is None:
                yield f"{_title(step)} reads '{value}', which it does not have"
        defined.update(step.makes)
    yield from (f"'{value}' is defined {count} times" for value, count in defined.items() if count > 1)


def _title(step: Op | JobOp) -> str:
    match step:
        case Call():
            return f"the task {step.cell}"
        case Comm():
            return f"{step.op_type} of '{step.value.name}'"
        case Transfer():
            return f"the message of '{step.value.name}'"
        case Copy():
            return f"the Copy of '{step.source}'"
    return f"{step.node.op_type} '{step.label}'"


def _each_tag(steps: Sequence[Op]) -> Iterator[int]:
    for step in steps:
        if isinstance(step, Comm):
            yield step.tag
        elif isinstance(step, Call):
            yield from (tag + step.microbatch for tag in _each_tag(step.body.steps))


def _events(events: Sequence[Event], rows: Mapping[int, list[int]]) -> Iterator[str]:
    """Yields the faults of events: every rank has the events in which it takes part, in one order; `rows`: each rank's tags in order."""
    expected: dict[int, list[int]] = {}
    for event in events:
        for rank in dict.fromkeys(rank for some in event.ranks for rank in some):
            expected.setdefault(rank, []).append(event.tag)
    by_tag = {event.tag: event for event in events}
    for rank, distinct in sorted(rows.items()):
        there = {*distinct}
        if unknown := [tag for tag in distinct if tag not in by_tag]:
            yield f"rank {rank}: it takes part in {unknown}, which are not events"
        elif missing := [by_tag[tag] for tag in expected.get(rank, ()) if tag not in there]:
            first = missing[0]
            yield f"rank {rank}: it takes no part in the {first.op_type} of '{first.name}' of ranks {first.ranks}"
        elif distinct != expected.get(rank, []):
            yield f"rank {rank}: its events {distinct} are not in the order of all"


LAWS: dict[Callable[[Any], Iterator[str]], tuple[type[Loaded], tuple[str, ...]]] = {
    _graph: (Loaded, ("model", "paths")),
    _shapes: (Typed, ("model", "values", "symbols")),
    _placement: (Placed, ("model", "paths", "plan", "placement")),
    _choices: (Sharded, ("model", "paths", "placement", "choices", "values", "symbols")),
    _sums: (Sharded, ("model", "paths", "choices")),
    _local: (Localized, ("plan", "local")),
    _parts: (Lowered, ("plan", "parts", "events", "targets")),
    target_faults: (Complete, ("parts", "targets")),
}
"""Maps each law to the phase from which it holds, and to the facts of a program that it reads."""
