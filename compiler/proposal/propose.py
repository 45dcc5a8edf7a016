"""Proposes a whole plan for a model: tensor, data and context parallel, and stages, alone or composed, with the reasons as comments.

The mesh is `{pp: stages, dp: dp, cp: cp, tp: tp}`: neighbouring ranks share a layer, which takes the most communication. The plan is
compiled before it is returned: its comments about communication are the compiler's results, and a sharding that the compiler refuses is
left out with a comment.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from partc.compiler.cost.machine import Machine
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.source import Source
from partc.compiler.ir.graph import OF_TURNS, name_of
from partc.compiler.ir.program import Complete, Typed
from partc.compiler.matching import matched_nodes
from partc.compiler.ops.families.neural.experts import EXPERT_MATMUL, EXPERT_MATMUL_N_BITS
from partc.compiler.pipeline import run_passes, step_program
from partc.compiler.placement.placement import place
from partc.compiler.plan.read import parse_plan
from partc.compiler.plan.rules import Plan
from partc.compiler.proposal.batch import Batch, batch_of, with_least_sizes, with_tokens
from partc.compiler.proposal.caches import Cache, alike, arriving, caches, lengths
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.flow import against_the_way
from partc.compiler.proposal.generation import Generation, are_repeated, drafts_on, repeated_lines
from partc.compiler.proposal.imports.imported import Imported
from partc.compiler.proposal.names import patterns
from partc.compiler.proposal.stages import EVEN, Stage, balanced_stages, uneven
from partc.compiler.proposal.starting_plan import Ports, Proposed, is_loss, key, loss_line, starting_plan
from partc.compiler.proposal.targets import Device, ProposedTargets, propose_targets
from partc.compiler.proposal.tensor_parallel import TensorParallel, tensor_parallel
from partc.compiler.proposal.tp_plan import TpPlan, matching_entries, read_tp_plan
from partc.compiler.rewrite.packed import unpack
from partc.compiler.rewrite.routed import routed
from partc.compiler.rewrite.straighten import straighten
from partc.compiler.sharding.values.budget import bytes_at, largest_first
from partc.compiler.start import start
from partc.runtime.units import count, size_text

_ROUNDS = 8
_FILE = "plan.yaml"
_AXES = {
    "pp": "pp: stages",
    "dp": "dp: shards of the batch",
    "ep": "ep: shards of the batch, and of experts",
    "cp": "cp: shards of a sequence",
    "tp": "tp: shards of a layer",
}


def propose(
    source: Source,
    name: str,
    degrees: Degrees,
    device: Device | None = None,
    machine: Machine | None = None,
    generation: Generation | None = None,
    imported: Imported | None = None,
) -> tuple[str, list[str]]:
    """Returns the text of a plan, and texts about what could not be proposed.

    With `device` the plan has targets, with `generation` it generates tokens. If a `machine` is given, stages are balanced for it, and one
    sequence at a time has drafts where products of several rows are nearly as fast there as those of one.

    The `tp_plan` of a model of `transformers` is followed where it applies, unless it sends more bytes than a proposal without it; an
    `imported` one is followed wherever it applies. Raises CompileError if a batch cannot be divided as requested, or a rank's part does not
    fit on its device.
    """
    imported = imported or Imported()
    generation = None if generation is None else generation.of_model(source.model.graph, source.declared.decoding)
    batch = batch_of(source, degrees.dp * imported.microbatches) if generation is None else Batch()
    frame = degrees.frame
    has_stacks = any(
        OF_TURNS in node.metadata_props for node in source.model.graph
    )  # whose weights are those of their layers
    program = run_passes(start(*parsed(source, frame, name)), unpack if has_stacks else routed)
    if degrees.ep > 1 and not any(
        node.op_type in (EXPERT_MATMUL, EXPERT_MATMUL_N_BITS) for node in program.model.graph
    ):
        fact = f"experts over {degrees.ep} ranks: the model has no layer of experts"
        law = "experts are matrices of one weight, of which a router chooses some for each token"
        raise CompileError(Problem(name, fact, law, "leave out --ep"))
    stages = balanced_stages(program, degrees.stages, machine, generation is not None) if degrees.stages > 1 else []
    if degrees.cp > 1 and generation is None:
        batch = with_tokens(source, taken_apart(source, frame, name), batch, degrees.cp)
    work = Work(source, name, degrees, batch, program, stages, device, generation, _of_imported(source, imported))
    if degrees.tp == 1:
        return work.drafted(work.proposed(None), None, machine).texts
    apart, paths = taken_apart(source, frame, name), program.paths.values()

    def sharded_by(tp_plan: TpPlan | None) -> TensorParallel:
        """Returns shardings in which keys with fewer heads than ranks are repeated, if the compiler can apply them."""
        found = tensor_parallel(apart, paths, degrees.tp, tp_plan, repeats=generation is not None)
        if not any(one.heads_to_repeat(apart, degrees.tp) for one in found.sets):
            return found
        repeated = are_repeated(apart, found, degrees.tp, work.proposed(found).done)
        return found if repeated else tensor_parallel(apart, paths, degrees.tp, tp_plan)

    if imported.styles:
        of_files = sharded_by(read_tp_plan(apart, matching_entries(apart, imported.styles)))
        return work.drafted(work.proposed(of_files), of_files, machine).texts
    own = sharded_by(None)
    if not source.declared.tp_plan:
        return work.drafted(work.proposed(own), own, machine).texts
    tp_plan = read_tp_plan(apart, source.declared.tp_plan)
    repeats = any(one.heads_to_repeat(apart, degrees.tp) for one in own.sets)
    followed = tensor_parallel(apart, paths, degrees.tp, tp_plan, repeats=repeats)
    first = work.proposed(followed)
    if followed.styles == own.styles:
        return work.drafted(first, followed, machine).texts
    sources = ", ".join(dict.fromkeys(entry.source for entry in source.declared.tp_plan))
    fact = f"The tp_plan of {sources} is not followed: it sends {first.sent} bytes to a rank"
    other = work.proposed(own, fact)
    chosen = (other, own, machine, fact) if other.sent < first.sent else (first, followed, machine)
    return work.drafted(*chosen).texts


@dataclass(frozen=True)
class BasePlan:
    """The parts of a proposal from elsewhere: lines at its head, whole sections, and whether one of them is `train`.

    `listed`: whether the plan lists outputs and modules as comments. `source`: the file that it is from; `left`: options of it that were
    not taken.
    """

    head: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    trains: bool = False
    listed: bool = True
    source: str = ""
    left: tuple[str, ...] = ()


def _of_imported(source: Source, imported: Imported) -> BasePlan:
    sections = [one for one in (imported.pipeline, imported.precision) if one]
    if imported.training:
        lines = (loss_line(source.model.graph), *imported.training)
        sections += ["", "train:", *(f"  {line}" for line in lines)]
    return BasePlan((), tuple(sections), bool(imported.training), True, imported.source, imported.ignored)


@dataclass(frozen=True)
class Proposal:
    """The text of a plan, what could not be proposed, the bytes that a step sends to a rank at the largest sizes, and its program."""

    text: str
    missing: list[str]
    sent: int
    done: Complete
    with_head: Callable[[tuple[str, ...]], str] = lambda head: ""
    """Returns the text with these lines at its head, and with lists of outputs and modules."""

    @property
    def texts(self) -> tuple[str, list[str]]:
        """The result of `propose`."""
        return self.text, self.missing


@dataclass(frozen=True)
class Work:
    """The inputs of a proposal. `stages`: the stages, if `degrees` has several, or if each group has several; `base`: everything else."""

    source: Source
    name: str
    degrees: Degrees
    batch: Batch
    program: Typed
    stages: list[Stage]
    device: Device | None = None
    generation: Generation | None = None
    base: BasePlan = BasePlan()

    def proposed(self, cut: TensorParallel | None, dearer: str = "") -> Proposal:
        """Returns the plan with these shardings, without those the compiler refuses; `dearer`: a text of a candidate that sends more."""
        source, name, degrees, device, batch = self.source, self.name, self.degrees, self.device, self.batch
        program, kept = self.program, caches(self.program) if self.generation is None else []
        stages, more = self.stages, self.base
        moved: dict[str, int] = {}
        paths = node_paths(source.model)
        symbols, because = with_least_sizes(program, {**source.declared.symbols, **batch.symbols}, batch.names)
        generated = (self.generation.line,) if self.generation is not None else ()
        free = tuple(dim for dim in lengths(kept, program) if dim not in symbols)
        for _ in range(_ROUNDS):
            missing = list(_missing(degrees, cut, stages))
            placed = tuple(_placement(degrees, stages, {**_placed_by_model(program, stages), **moved}))

            def text(
                head: Iterable[str],
                targets: ProposedTargets | None = None,
                cut: TensorParallel | None = cut,
                placed: tuple[str, ...] = placed,
                more: BasePlan = more,
            ) -> str:
                own = targets.section() if targets is not None else ()
                sections = (
                    *placed,
                    *_sections(program, degrees, batch, cut, kept, bool(generated)),
                    *own,
                    *generated,
                    *more.sections,
                )
                outputs = tuple(_outputs(source, degrees, kept))
                ranks = [f"ranks: {degrees.ranks}"]
                if degrees.mesh:
                    ranks += [
                        f"{degrees.mesh_line}   # {', '.join(_AXES[axis] for axis in degrees.mesh)}; the last varies fastest"
                    ]
                ports = Ports(not generated, more.trains, more.listed)
                given = Proposed((*more.head, *head), tuple(ranks), sections, batch.names, outputs, free, ports)
                return starting_plan(source.model, paths, name, symbols, given, because=because)

            bare = text([])
            placed_here = 0 < len(stages) <= degrees.stages
            try:
                done = step_program(*parsed(source, bare, name))
            except CompileError as error:
                if placed_here and (astray := self._astray(bare)).keys() - moved.keys():
                    moved |= astray  # a schedule refuses stages to which the data comes back
                elif cut is not None and (less := _without(cut, bare, error.problems)) is not None:
                    cut = less
                else:
                    raise
                continue
            if placed_here and (astray := against_the_way(done, degrees)).keys() - moved.keys():
                moved |= astray
                continue
            sent = sum(bytes_at(done, event) for event in done.events)
            comparison = f"{dearer}, this plan {sent}, in a step of the largest sizes." if dearer else ""
            what = ("generation",) if generated else ()
            heads = () if self.generation is None else tuple(repeated_lines(program, done, self.generation))
            if device is None:
                head = (*_head(degrees, done, cut, stages, missing, comparison, more, *what), *heads)

                def headed(
                    lines: tuple[str, ...], text: Callable[..., str] = text, head: tuple[str, ...] = head
                ) -> str:
                    return text(head, more=dataclasses.replace(more, head=lines, listed=True))

                return Proposal(text(head), missing, sent, done, headed)

            def compiled(some: ProposedTargets, text: Callable[..., str] = text) -> Complete:
                return step_program(*parsed(source, text([], some), name))

            targets, done = propose_targets(compiled, device, name)
            head = (*_head(degrees, done, cut, stages, missing, comparison, more, "targets", *what), *heads)
            return Proposal(text(head, targets), missing, sent, done)
        raise CompileError(
            Problem(name, "the compiler refuses the proposed plan", help="propose a plan for fewer ranks")
        )

    def drafted(
        self, proposal: Proposal, cut: TensorParallel | None, machine: Machine | None, dearer: str = ""
    ) -> Proposal:
        """Returns the proposal with drafts where they lose little on a machine if all are wrong; else with the reason why it has none.

        `cut` and `dearer`: the arguments of the proposal. Sequences take turns with drafts, so a plan with several slots has none.
        """
        generation = self.generation
        if machine is None or generation is None or self.device is not None:
            return proposal
        if generation.slots > generation.groups * self.degrees.dp:
            return proposal
        is_free, reason = drafts_on(machine, self.source.model.graph)
        if is_free:
            drafting = dataclasses.replace(generation, draft=True, reason=reason)
            try:
                return dataclasses.replace(self, generation=drafting).proposed(cut, dearer)
            except CompileError as error:
                reason = error.problems[0].fact
        told = dataclasses.replace(generation, reason=f"no drafts: {reason}")
        return dataclasses.replace(proposal, text=proposal.text.replace(generation.line, told.line))

    def _astray(self, text: str) -> dict[str, int]:
        """Returns the result of `against_the_way` for a plan that the compiler refuses; empty if it refuses the placement itself."""
        try:
            return against_the_way(run_passes(start(*parsed(self.source, text, self.name)), place), self.degrees)
        except CompileError:
            return {}


def parsed(source: Source, text: str, name: str) -> tuple[Source, Plan, str]:
    """Returns the arguments with which a compile begins; the model is a copy, since passes may rewrite it."""
    return dataclasses.replace(source, model=source.model.clone()), parse_plan(text, _FILE), name


def taken_apart(source: Source, frame: str, name: str) -> Typed:
    """Returns the program in the form that is sharded: detours removed, and packed weights taken apart, so parts are linked separately."""
    text = f'{frame}sharding: {{"**": colwise}}\n'
    try:
        return run_passes(start(*parsed(source, text, name)), unpack)
    except CompileError:
        return run_passes(start(*parsed(source, text, name)), straighten)


def _placed_by_model(program: Typed, stages: list[Stage]) -> dict[str, int]:
    """Maps the paths of nodes that the model itself places to their stage; the plan must place them to override the model."""
    lines = [placed.pattern for placed in program.declared.placements if not placed.role]
    nodes = {node: None for pattern in lines for node in matched_nodes(program, pattern)}
    named = {node for stage in stages for pattern in stage.lines() for node in matched_nodes(program, pattern)}
    at = {node: k for k, stage in enumerate(stages) for node in stage.nodes}
    return {program.paths[node]: at.get(node, 0) for node in nodes if node not in named}


def _placement(degrees: Degrees, stages: list[Stage], moved: Mapping[str, int]) -> Iterator[str]:
    """Yields lines that place the modules of stages, unless `pipeline` does; `moved`: nodes that would go against the data's direction."""
    if len(stages) > degrees.stages:
        return
    if not stages:
        if moved:
            yield "placement:   # the model places modules itself, and the plan wins"
            yield f'  "**": {list(range(degrees.ranks))}'
            yield ""
        return
    yield "placement:   # nodes without weights follow what they read"
    for k, stage in enumerate(stages):
        yield f"  # stage {k}: {stage.reason}"
        where = f"{{pp: {k}}}" if degrees.mesh else str(k)
        yield from (f"  {key(pattern)}: {where}" for pattern in stage.lines() if pattern not in moved)
        behind = [path for path, at in moved.items() if at == k]
        yield from (f"  {key(pattern)}: {where}" for pattern in patterns(behind, lambda pattern: False))
    yield ""


def _sections(
    program: Typed, degrees: Degrees, batch: Batch, cut: TensorParallel | None, kept: list[Cache], generates: bool
) -> Iterator[str]:
    if degrees.cp > 1:
        what = "the tokens of a sequence are sharded; each attention takes the way of the fewest bytes"
        what = "each rank has its share of the entries of every cache" if generates else what
        yield f"context: {{axis: cp}}   # {what}"
        yield ""
    if cut is not None and cut.groups:
        yield "sharding:"
        for line in cut.lines(program.paths.values()):
            pattern, _, style = line.rpartition(": ")
            yield f"  {line}" if line.startswith("#") else f"  {key(pattern)}: {style}"
        yield ""
    dims = arriving(kept, cut.places) if cut is not None else {}
    if degrees.ep > 1:
        yield f"experts: {{axis: {degrees.expert_axis}}}   # tokens go to the ranks of their experts, and come back"
        yield ""
    over = [*degrees.batch_axes, *["tp"] * (cut is not None and cut.has_records)]
    if over == ["dp"] and not batch.others and not dims:
        yield "dataset: data_parallel   # each rank of the axis dp gets its shard of the first dim of each input"
        yield ""
    elif over or dims:
        words = [f"{', '.join(batch.others)} has another first dim and is replicated"] if batch.others else []
        words += ["the batch is sharded over dp and ep"] if "ep" in over else []
        words += ["a cache arrives as it is kept"] if dims else []
        words += ["the batch is cut over tp, too, up to what is sharded"] if over[-1:] == ["tp"] else []
        yield f"dataset:   # {'; '.join(words)}"
        specs: dict[str, list[str]] = {}
        for value in program.model.graph.inputs:
            axes = ["null"] * len(value.shape or ())
            if value.name in batch.inputs and over:
                axes[0] = over[0] if len(over) == 1 else f"[{', '.join(over)}]"
            if value in dims:
                axes[dims[value]] = (
                    "tp" if axes[dims[value]] == "null" else f"[{', '.join([*degrees.batch_axes, 'tp'])}]"
                )
            if {*axes} != {"null"} and axes:
                specs.setdefault(f"[{', '.join(axes)}]", []).append(name_of(value))
        names = [name_of(value) for value in program.model.graph.inputs]
        for spec, some in specs.items():
            yield from (f"  {key(pattern)}: {spec}" for pattern in alike(some, names))
        yield ""


def _outputs(source: Source, degrees: Degrees, kept: list[Cache]) -> Iterator[str]:
    """Yields lines for the outputs that stay where they are made; the others follow as comments."""
    if not kept or degrees.ranks == 1:
        return
    stay = "cut" if degrees.tp * degrees.dp * degrees.cp > 1 else "producer"
    yield "outputs:   # a cache stays with the ranks that make it; other outputs go to rank 0"
    names = [name_of(value) for value in source.model.graph.outputs]
    yield from (f"  {key(pattern)}: {stay}" for pattern in alike([name_of(one.present) for one in kept], names))


def _head(
    degrees: Degrees,
    done: Complete,
    cut: TensorParallel | None,
    stages: list[Stage],
    missing: list[str],
    comparison: str,
    more: BasePlan,
    *others: str,
) -> Iterator[str]:
    """Yields the comment lines at the head: the proposal, the bytes that it sends, the comparison with another, and what is left out."""
    parts = [
        *([f"{max(degrees.stages, len(stages))} stages"] if degrees.stages > 1 else []),
        *([f"data parallel over {degrees.dp}"] if degrees.dp > 1 else []),
        *([f"experts over {degrees.ep}"] if degrees.ep > 1 else []),
        *([f"context parallel over {degrees.cp}"] if degrees.cp > 1 else []),
        *([f"tensor parallel over {degrees.tp}"] if degrees.tp > 1 else []),
        *others,
    ]
    of = f" from {more.source}" if more.source else ""
    yield f"# Proposed by `partc plan`{of}: {', '.join(parts) or 'one rank'}."
    counts = collections.Counter(event.op_type for event in done.events)
    listed = ", ".join(f"{number} {op}" for op, number in sorted(counts.items()))
    yield f"# Communication in a step: {listed or 'none'}."
    for event in largest_first(done)[:3]:
        cause = event.cause.partition(" (")[0]  # without the line of a plan that is not written yet
        yield f"#   {event.op_type} of '{event.name}', {event.bytes} bytes to a rank: {cause}"
    if degrees.dp > 1 and is_loss(done.model.graph):
        yield f"# A training sums its gradients over dp besides: {size_text(_most_trained(done))} to a rank in a step."
    if uneven(stages):
        costs = ", ".join(f"{100 * stage.cost:.0f} %" for stage in stages)
        yield f"# The stages are not within {100 * EVEN:.0f} % of equal cost, since no closer cut sends as little: {costs}."
    if comparison:
        yield f"# {comparison}"
    not_taken = (*more.left, *(cut.not_taken if cut is not None else ()))
    if not_taken:
        of = more.source or "the model's tp_plan"
        yield f"# Of {of} not taken as it stands:"
        yield from (f"#   {line}" for line in not_taken)
    if cut is not None and cut.replicated:
        yield "# Not sharded by tp, so replicated on its ranks:"
        yield from (f"#   {line}" for line in cut.replicated)
    for line in missing:
        yield f"# Not recognized: {line}"


def _most_trained(done: Complete) -> int:
    """Returns the bytes of the trained weights on the rank that has most of them."""
    from partc.compiler.training.trainable import trainable_names

    names = set(trainable_names(done.model))
    return max(
        sum(
            int(
                held.version.value.dtype.itemsize
                * math.prod(dim for dim in held.value.shape or () if isinstance(dim, int))
            )
            for held in part.weights
            if held.version.value.name in names and held.version.value.dtype is not None
        )
        for part in done.parts
    )


def _missing(degrees: Degrees, cut: TensorParallel | None, stages: list[Stage]) -> Iterator[str]:
    if cut is not None and not cut.groups:
        yield f"no layer can be sharded into {degrees.tp} over the axis tp; all its ranks would do the same work"
    if stages and len(stages) < degrees.stages:
        have = count(len(stages), "part")
        yield f"{degrees.stages} stages: the model has {have} with weights in its order; the last ranks have nothing to do"


def _without(cut: TensorParallel, text: str, problems: list[Problem]) -> TensorParallel | None:
    """Returns the proposal without the groups that the compiler refuses; None if the problems are of other lines."""
    lines = text.splitlines()
    named = {problem.where.rpartition(":")[2]: problem for problem in problems}
    refused = {
        comment: problem
        for number, problem in named.items()
        if number.isdigit() and (comment := _comment_above(lines, int(number) - 1))
    }
    groups = tuple((reason, styles) for reason, styles in cut.groups if f"# {reason}" not in refused)
    if len(groups) == len(cut.groups):
        return None
    told = tuple(f"{comment[2:]}: {problem.fact}" for comment, problem in refused.items())
    return dataclasses.replace(cut, groups=groups, replicated=(*cut.replicated, *told))


def _comment_above(lines: list[str], at: int) -> str:
    while at >= 0 and not lines[at].strip().startswith("#"):
        at -= 1
    return lines[at].strip() if at >= 0 else ""
