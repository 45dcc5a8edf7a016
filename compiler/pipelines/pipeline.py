"""Pass: a plan with `pipeline` runs a batch as microbatches, whose tasks follow the plan's schedule.

stages       of nodes, by their placement                                   stages.py
tasks        of the ops that ranks' programs have for one microbatch        phases.py
again        the forward ops that backward tasks repeat                     recompute.py
gathers      of parameters that ranks store in shards                       gathers.py
costs        of tasks: work, bytes that are saved                           task_costs.py
schedule     the order of tasks on each rank: by name, given as rows, or found   schedule/
rows         the programs of a step                                         microbatches.py
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from partc.compiler.ir.program import Lowered, Scheduled, TaskOrder
from partc.compiler.ir.programs import RankProgram, needed
from partc.compiler.ir.training import ProgramKind
from partc.compiler.pipelines.batch_totals import is_per_microbatch, with_inputs
from partc.compiler.pipelines.gathers import gathers
from partc.compiler.pipelines.microbatches import rows_of
from partc.compiler.pipelines.phases import Labels, Phase, Unit, labelled, split_backward
from partc.compiler.pipelines.recompute import recompute, undivided
from partc.compiler.pipelines.stages import NodeStages, in_halves, node_stages
from partc.compiler.pipelines.task_costs import task_costs
from partc.compiler.plan.pipeline import PipelineRules
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import Edge, Stages, grouped
from partc.compiler.schedulers.choose import choose
from partc.compiler.schedulers.in_turn import in_turn
from partc.compiler.training.microbatch_model import PART
from partc.runtime.artifact.tasks.sum_tree import roots, run_of


def pipeline(program: Lowered) -> Scheduled:
    """Turns the programs of one microbatch into those of a step; raises CompileError if the plan's schedule does not fit."""
    rules, training = program.plan.pipeline, program.training
    stored = bool(program.pinned.units)
    if rules is None or (training is not None and not program.kind.divides) or rules.microbatches == 1:
        if not stored and not (rules is not None and rules.recompute and program.kind.divides):
            return program.into(Scheduled, tasks=None)
        units = _units(program, None)
        labels = labelled(units, node_stages(program))
        if rules is not None and program.kind.divides:
            program, units, labels = recompute(program, units, labels)
        program, units, labels = gathers(program, units, labels, divided=False)
        return undivided(program, units).into(Scheduled, tasks=None)
    totals = program.other_programs.get(ProgramKind.TOTALS)
    if totals is not None:
        program = with_inputs(program, totals)
    units = _units(program, totals)
    stages = node_stages(program)
    labels = labelled(units, stages)
    shape = _stages(stages, labels)
    if not program.stages and shape.is_pointed_vee and _asks_for_vee(rules, len(shape)):
        stages = in_halves(program, stages, len(shape) // 2)
        labels = labelled(units, stages)
        shape = _stages(stages, labels)
    program, units, labels = recompute(program, units, labels)
    program, units, labels = gathers(program, units, labels, divided=True)
    costs = task_costs(program, units, labels, shape, rules.microbatches)
    if rules.accumulates and not shape.is_one_each:
        schedule = in_turn(shape, rules.microbatches)
    else:
        schedule = choose(
            shape, rules.microbatches, rules.schedule, rules.memory, costs, rules.where, rows_where=rules.rows or None
        )
    schedule = schedule.split_alike()
    split_backward(units, labels, {task.stage for row in schedule.rows for task in row if schedule.is_split(task)})
    spans = simulate(schedule, costs).spans
    order = sorted(spans, key=lambda task: spans[task][0])  # as they begin: the one order that all ranks follow
    made = rows_of(program, units, labels, stages, order, rules.microbatches, totals)
    return made.into(Scheduled, tasks=TaskOrder(schedule, costs))


def _asks_for_vee(rules: PipelineRules, stages: int) -> bool:
    """Whether a plan's schedule is that of a V, or has rows with tasks of one stage more than there are."""
    if isinstance(rules.schedule, tuple):
        return any(word.startswith(f"{stages}F") for row in rules.schedule for word in row.split())
    return rules.schedule == "zbv"


def _units(program: Lowered, totals: Lowered | None) -> list[Unit]:
    """Groups the ranks by their ops, both in a microbatch and for the batch's totals."""
    before = {part.rank: part.steps for part in totals.parts} if totals else {}
    members: dict[Hashable, list[RankProgram]] = {}
    rules = program.plan.pipeline
    parts = rules.parts if rules is not None else 0
    for part in program.parts:
        run = run_of(part.rank, program.plan.ranks, parts)
        shape = [high - low for low, high in roots((0, parts), run)] if parts else ()
        members.setdefault((part.share_key, id(before.get(part.rank)), *shape), []).append(part)
    units = []
    for some in members.values():
        # Ops may have no reader: of a weight of two groups a gradient, whose sum another rank hands on.
        part = replace(some[-1], steps=tuple(needed(some[-1].steps, some[-1].live_out)))
        units.append(_unit(program, part, [one.rank for one in some], totals is not None and is_per_microbatch(totals)))
    return units


def _unit(program: Lowered, part: RankProgram, ranks: Iterable[int], counts: bool) -> Unit:
    """Returns a unit of ranks; `counts`: whether each microbatch counts for the batch's totals; else inputs of these are not dealt out."""
    read = {value for step in part.steps for value in step.reads} | {held.value for held in part.outputs}
    own = {
        held.value
        for held in part.inputs
        if (held.version.value in program.batch_dims and (counts or held.value in read))
        or held.version.value.name == PART
    }
    sums = {one.value for one in part.state if one.kind == "gradient"}
    return Unit(part, frozenset(ranks), frozenset(own), frozenset(sums), joined=program.training is None)


def _stages(found: NodeStages, labels: Labels) -> Stages:
    """Returns the graph of stages: their dependencies, and which of them have a backward pass."""
    edges = [Edge(a, b, (a, b) in labels.gradients) for a, b in labels.edges | labels.gradients]
    backward = {label.stage for steps in labels.steps for label in steps if label.phase is Phase.BACKWARD}
    return grouped(found.groups, edges, [stage in backward for stage in range(len(found.groups))])
