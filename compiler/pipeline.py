"""The road of a compile: load, then the passes in order, then emit and prove.

program = analyse(Path("model.py"), Path("plan.yaml"))      # everything but writing
report = compile_model(Path("model.py"), Path("plan.yaml"), Path("build"))
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from partc.compiler.analysis.shapes import shapes
from partc.compiler.annotations.check import follow_annotations
from partc.compiler.annotations.read import read
from partc.compiler.emit.annotated import write_annotated
from partc.compiler.emit.dump import begin_text
from partc.compiler.emit.emit import emit, refuse_to_replace
from partc.compiler.emit.prove import prove
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend import load
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.source import Known, Source
from partc.compiler.garbage_collection import uncollected
from partc.compiler.ir.graph import OWN_NAME, is_inside
from partc.compiler.ir.program import Program
from partc.compiler.ir.training import ProgramKind
from partc.compiler.lower.lower import lower
from partc.compiler.pipelines.pipeline import pipeline
from partc.compiler.placement.placement import place
from partc.compiler.plan.dataset import in_order
from partc.compiler.plan.read import Plan, read_plan
from partc.compiler.plan.rules import Dataset
from partc.compiler.rewrite.counted_indices import counted_indices
from partc.compiler.rewrite.in_microbatches import in_microbatches
from partc.compiler.rewrite.normalize import normalize
from partc.compiler.rewrite.packed import unpack
from partc.compiler.rewrite.precision import precision
from partc.compiler.rewrite.rotary import repeat_tables
from partc.compiler.rewrite.straighten import straighten
from partc.compiler.sharding.budget import check_budget
from partc.compiler.sharding.sharding import shard
from partc.compiler.sharding.sums import pass_sums
from partc.compiler.targets.choose_targets import choose_targets
from partc.compiler.targets.copies import copy_between_targets
from partc.compiler.tasks.differentiate import differentiate
from partc.compiler.tasks.localize import localize
from partc.compiler.tasks.update import update
from partc.compiler.training.add_training import add_training, misnamed
from partc.compiler.training.in_parts import in_parts, only_totals
from partc.compiler.training.serve import serve
from partc.compiler.training.trainable import trainable_names
from partc.compiler.unsound import blamed
from partc.compiler.verify import is_asked_for, verify
from partc.runtime.artifact.format import Manifest, SourceRecord
from partc.runtime.errors import merged
from partc.runtime.files.regular import open_regular

Pass = Callable[[Program], Program]
After = Callable[[str, Program], None]
"""Is told the name of a pass and the program that it gave."""
Watch = Callable[[str], None]
"""Is told the name of what begins."""
PASSES: tuple[Pass, ...] = (
    normalize,  # the single-device model
    add_training,
    shapes,
    repeat_tables,
    straighten,
    counted_indices,
    unpack,
    serve,
    precision,
    follow_annotations,  # the global view
    in_parts,
    in_microbatches,
    place,
    only_totals,
    shard,
    choose_targets,
    pass_sums,
    localize,  # the local view
    differentiate,
    update,
    lower,
    pipeline,
    copy_between_targets,
    check_budget,
)
"""What comes before is `load` and `start`. What comes behind, for all programs of a plan at once, is `emit` and `prove` (`_written`)."""


@dataclass(frozen=True)
class Report:
    """What a compile did: the program, the manifest of what was written, and what the user should know of."""

    program: Program
    manifest: Manifest
    out: Path

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings; of those that differ in the numbers of a path alone the first, with their number."""
        return tuple(merged(self.program.warnings))


def start(
    source: Source,
    plan: Plan | None,
    name: str,
    configuration: str | None = None,
    *,
    kind: ProgramKind = ProgramKind.STEP,
    strict: bool = False,
    begun: Program | None = None,
) -> Program:
    """The program before any pass. Without a plan the model's own annotations are one, else all runs on one rank.

    Of several device configurations the one called `configuration` is meant, or the first; "none" ignores annotations. Of a
    plan that trains, `kind` says which of its programs is meant: each has a model of its own, and the others are over the tensors of the
    step's, `begun`. `strict` is as `compile_model` says.
    """
    found = read(source.model, name, configuration)
    declared = source.declared
    if found:
        declared = replace(declared, symbols={**found.symbols, **declared.symbols}, annotations=found)
    if plan is None:
        plan = found.plan() if found else Plan.whole()
    if found:
        plan = replace(plan, outputs=(*found.outputs, *plan.outputs))
    plan = replace(plan, dataset=_arriving(source, plan))
    trains = plan.train is not None
    model = source.model.clone() if trains else source.model
    weights = tuple(trainable_names(source.model)) if trains else ()
    paths = node_paths(model)
    file_names = {path: str(node.meta.get(OWN_NAME) or path) for node, path in paths.items()}
    first = Program(name, model, plan, declared, paths, file_names, kind, trainable=weights, strict=strict, begun=begun)
    return replace(first, warnings=declared.warnings)


def _arriving(source: Source, plan: Plan) -> Dataset:
    """How inputs arrive: as the plan says, else as the model does."""
    said = plan.dataset if plan.dataset.where or source.declared.dataset is None else source.declared.dataset
    own = [value.name or "" for value in source.model.graph.inputs]
    loss = plan.train.loss if plan.train is not None and plan.train.loss.type != "output" else None
    labels = [loss.labels] if loss is not None and loss.labels not in own else []
    return in_order(said, [*own, *labels], len(own))


@uncollected()
def run_passes(
    program: Program,
    after: After | None = None,
    watch: Watch = lambda name: None,
    *,
    verify_passes: bool = False,
    behind: Pass | None = None,
    through: Pass | None = None,
) -> Program:
    """The program after all passes, or after those behind `behind` and to `through`; `after` and `watch` are told of each.

    With `verify_passes`, or where the environment asks for it (`verify.py`), each pass's program is verified: InvalidProgram where it
    breaks a law. Raises CompileError with all violations that the failing pass found. A note of whatever a pass raises names the pass.
    """
    verified = verify_passes or is_asked_for()
    valid = program if behind else None
    for step in PASSES[PASSES.index(behind) + 1 if behind else 0 :]:
        name = step.__name__
        watch(name)
        try:
            program = step(program)
        except Exception as error:
            error.add_note(f"in the pass '{name}'")
            raise
        if verified:
            verify(program, name, valid if step is not PASSES[-1] else None)
            valid = program
        if after:
            after(name, program)
        if step is through:
            break
    return program


def step_program(
    source: Source,
    plan: Plan | None,
    name: str,
    configuration: str | None = None,
    after: After | None = None,
    watch: Watch = lambda name: None,
    *,
    strict: bool = False,
    verify_passes: bool = False,
) -> Program:
    """The program of a step, after all passes; of a plan without `train` the one that there is. Arguments as of `start` and `run_passes`.

    Where microbatches of a training are given numbers of the whole batch, these are made by a program of their own.
    """
    program = start(source, plan, name, configuration, strict=strict)
    program = run_passes(program, after, watch, verify_passes=verify_passes, through=lower)
    if program.training is not None and program.training.totals:
        totals = start(source, plan, name, configuration, kind=ProgramKind.TOTALS, begun=program)
        program = replace(program, totals=run_passes(totals, verify_passes=verify_passes))
    return run_passes(program, after, watch, verify_passes=verify_passes, behind=lower)


def analyse(
    model: Path,
    plan: Path | None,
    after: After | None = None,
    configuration: str | None = None,
) -> Program:
    """Loads and runs all passes; writes nothing. `plan` and `configuration` are as `start` says."""
    chosen = read_plan(plan) if plan is not None else None
    with blamed(model):
        return step_program(load(model, _named_by(chosen)), chosen, model.name, configuration, after)


def _named_by(plan: Plan | None) -> Known:
    """Looks at the plan's names of parameters; CompileError for those that a module does not have."""

    def look(names: Sequence[str]) -> None:
        if plan is not None and plan.train is not None and (problems := misnamed(plan.train, names)):
            raise CompileError(problems)

    return look


@dataclass(frozen=True)
class Options:
    """How a compile is to go, as `compile_model` says."""

    dump_ir: bool = False
    strict: bool = False
    annotated: Path | None = None
    configuration: str | None = None
    check: bool = True
    verify_passes: bool = False


def compile_model(
    model: Path,
    plan: Path | None,
    out: Path,
    dump_ir: bool = False,
    strict: bool = False,
    annotated: Path | None = None,
    configuration: str | None = None,
    check: bool = True,
    watch: Watch = lambda name: None,
    verify_passes: bool = False,
) -> Report:
    """Compiles `model` by `plan` into the folder `out`; with `dump_ir` also the text after each pass, `ir/1_normalize.ir` and on.

    `strict` refuses changes of layout that nobody asked for. `annotated`: where the whole model is written with the choices
    made, in the standard's annotations; `configuration`: which of the model's own are followed. `check`: whether what was
    written is opened. `watch` is told what begins. `verify_passes`: whether the program is verified after each pass. The plan is read
    first: what is wrong in it by itself is told before a module is exported, which may take long.

    Raises CompileError; then `out` is as it was.
    """
    chosen = read_plan(plan) if plan is not None else None
    refuse_to_replace(out)
    watch("load")
    options = Options(dump_ir, strict, annotated, configuration, check, verify_passes)
    with blamed(model):
        source = load(model, _named_by(chosen))
        return _compiled(source, model, chosen, plan, out, options, watch)


def _compiled(
    source: Source, model: Path, chosen: Plan | None, plan: Path | None, out: Path, options: Options, watch: Watch
) -> Report:
    """Compiles a model that is loaded by a plan that is read."""
    texts: dict[str, str] = {}
    annotated = options.annotated

    def keep(name: str, program: Program) -> None:
        texts[f"ir/{len(texts) + 1}_{name}.ir"] = begin_text(program, name)

    watch("start")
    dumped, verified = keep if options.dump_ir else None, options.verify_passes
    said = source, chosen, model.name, options.configuration
    program = step_program(*said, dumped, watch, strict=options.strict, verify_passes=verified)
    if annotated is not None and any(is_inside(node) for node in program.model.graph):
        fact = "the model has local maps, which ONNX annotations cannot express"
        raise CompileError(Problem(str(annotated), fact, help="leave out --annotated"))
    if program.training is not None and plan is not None:
        program = replace(program, training=program.training.from_folder(os.path.relpath(plan.parent, out)))
    inner = []
    if program.training is not None:
        watch(ProgramKind.EVALUATION.name.lower())
        inner = [_evaluation(*said, program, verified)]
    sources = {"model": _record(model), "plan": _record(plan) if plan is not None else None}
    report = _written(program, inner, source, out, sources, texts, options.check, watch)
    if annotated is not None:
        write_annotated(report.program, annotated)
    return report


def compile_source(source: Source, plan: Plan | None, out: Path, name: str = "model") -> Report:
    """As `compile_model`, of a model and a plan in memory."""
    program = step_program(source, plan, name)
    record = SourceRecord(name=name, sha256=hashlib.sha256(begin_text(program).encode()).hexdigest())
    inner = [_evaluation(source, plan, name, None, program, False)] if program.training is not None else []
    return _written(program, inner, source, out, {"model": record, "plan": None})


def _evaluation(
    source: Source, plan: Plan | None, name: str, configuration: str | None, step: Program, verify_passes: bool
) -> Program:
    """The program of an evaluation beside the one of the step, over the same parameters."""
    first = start(source, plan, name, configuration, kind=ProgramKind.EVALUATION, begun=step)
    return run_passes(first, verify_passes=verify_passes)


@uncollected()
def _written(
    program: Program,
    inner: list[Program],
    source: Source,
    out: Path,
    sources: dict[str, SourceRecord | None],
    texts: dict[str, str] | None = None,
    check: bool = True,
    watch: Watch = lambda name: None,
) -> Report:
    """The last of the road: the artifact is written (`emit`), and opened (`prove`) before it takes its place."""
    warnings: list[str] = []

    def checked(folder: Path) -> None:
        watch("check")
        warnings.extend(prove(folder, source.model, program.name) if check else ())

    watch("emit")
    manifest = emit(program, out, sources, texts, inner, checked)
    return Report(replace(program, warnings=(*program.warnings, *warnings)), manifest, out)


def _record(path: Path) -> SourceRecord:
    """The hash of a source file itself; weights beside a model are covered by the hashes of the artifact's own."""
    with open_regular(path) as file:
        return SourceRecord(name=path.name, sha256=hashlib.file_digest(file, "sha256").hexdigest())
