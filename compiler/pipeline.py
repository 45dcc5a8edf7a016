"""The steps of a compile: load, then the passes in order, then emit and prove.

program = analyse(Path("model.py"), Path("plan.yaml"))      # everything but writing
report = compile_model(Path("model.py"), Path("plan.yaml"), Path("build"))

Decides whether the model is at fault when a pass fails: it is where onnx or onnxruntime refuse the model as it was loaded.

Passes take the model for sound ONNX. To prove that before each compile would cost every user for a few models that are not, and would
refuse some that onnxruntime runs; so a model is looked at when a pass has stumbled over it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from partc.compiler.adapters import adapted
from partc.compiler.analysis.shapes import shapes
from partc.compiler.annotations.check import follow_annotations
from partc.compiler.emit.annotated import write_annotated
from partc.compiler.emit.dump import begin_text
from partc.compiler.emit.emit import Unwritten, emit, refuse_to_replace
from partc.compiler.emit.prove import prove, without_weights
from partc.compiler.errors import CompileError, InternalError, Problem
from partc.compiler.frontend import load
from partc.compiler.frontend.huggingface.safetensors_files import CONFIG
from partc.compiler.frontend.source import Known, Source, Weights
from partc.compiler.ir.graph import is_inside
from partc.compiler.ir.program import Complete, Loaded, Lowered, Scheduled
from partc.compiler.ir.training import ProgramKind
from partc.compiler.lower.lower import lower
from partc.compiler.placement.placement import place
from partc.compiler.plan.read import Plan, read_plan
from partc.compiler.quantize import quantized
from partc.compiler.rewrite.context import shard_context
from partc.compiler.rewrite.counted_indices import counted_indices
from partc.compiler.rewrite.generation.caches import caches_as_state
from partc.compiler.rewrite.generation.repeated_heads import repeat_heads
from partc.compiler.rewrite.in_microbatches import in_microbatches
from partc.compiler.rewrite.normalize import normalize
from partc.compiler.rewrite.packed import unpack
from partc.compiler.rewrite.precision import precision
from partc.compiler.rewrite.rotary import repeat_tables
from partc.compiler.rewrite.route_experts import route_experts
from partc.compiler.rewrite.routed import routed
from partc.compiler.rewrite.straighten import straighten
from partc.compiler.sharding.sharding import shard
from partc.compiler.sharding.values.budget import check_budget
from partc.compiler.sharding.values.sums import defer_all_reduce
from partc.compiler.start import start
from partc.compiler.targets.choose_targets import choose_targets
from partc.compiler.targets.copies import copy_between_targets
from partc.compiler.tasks.localize import localize
from partc.compiler.training.microbatch_model import in_parts, only_totals
from partc.compiler.training.parameter_server import serve
from partc.compiler.training_passes import add_training, differentiate, pipeline, update
from partc.compiler.unroll import unrolled
from partc.compiler.verify import is_requested, verify
from partc.runtime.artifact.format import Manifest, SourceRecord, ranks_folder
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.graph.half_kernels import compute_in_float32
from partc.runtime.checker.structures import check_model
from partc.runtime.errors import PartcError, merged, out_of_memory
from partc.runtime.files.regular import open_regular
from partc.runtime.garbage_collection import uncollected
from partc.runtime.program.ort import can_load, version

P = TypeVar("P", bound=Loaded)
Pass = Callable[[Any], Loaded]
After = Callable[[str, Loaded], None]
"""A callback with the name of a pass and the program that it returned."""
Watch = Callable[[str], None]
"""A callback with the name of the pass, or other work, that begins."""
PASSES: tuple[Pass, ...] = (
    normalize,  # the single-device model
    caches_as_state,
    add_training,
    shapes,
    routed,
    repeat_tables,
    straighten,
    counted_indices,
    unpack,
    repeat_heads,
    serve,
    precision,
    shard_context,
    follow_annotations,  # the global view
    in_parts,
    in_microbatches,
    route_experts,
    place,
    only_totals,
    shard,
    choose_targets,
    defer_all_reduce,
    localize,  # the local view
    differentiate,
    update,
    lower,
    pipeline,
    copy_between_targets,
    check_budget,
)
"""The passes from a `Loaded` program to a `Complete` one (`ir/program.py`), by the types of their arguments and results. `load` and `start`
come before them; `emit` and `prove` (`_write`) come after them, for all programs of a plan at once.
"""
COMPILE_ORDER: tuple[tuple[ProgramKind, Pass], ...] = (
    (ProgramKind.STEP, lower),
    (ProgramKind.TOTALS, lower),
    (ProgramKind.STEP, PASSES[-1]),
    (ProgramKind.EVALUATION, PASSES[-1]),
    (ProgramKind.STREAMED_EVALUATION, PASSES[-1]),
    (ProgramKind.PREFILL, PASSES[-1]),
    (ProgramKind.ENCODE, PASSES[-1]),
)
"""The order in which the programs of a plan are compiled, each with the last pass that it runs before the next program: the others use the
tensors of the step's program, and a step in microbatches has the totals in its rows.
"""


Key: TypeAlias = ProgramKind | tuple[ProgramKind, int]
"""The key of a program of a plan: its kind, with the size for a narrow program."""
STEP_ALONE = (ProgramKind.STEP, ProgramKind.TOTALS)
"""The kinds of programs that a step needs, without evaluation and prefill."""


@dataclass(frozen=True)
class Report:
    """The result of a compile: the program, the manifest, and the warnings for the user."""

    program: Complete
    manifest: Manifest
    out: Path
    exported: bool = False
    """Whether torch exported the model."""
    is_export_cached: bool = False
    """Whether the export is stored for the next command."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings; warnings that differ only in the numbers of a path are merged to the first, with their count."""
        return tuple(merged(self.program.warnings))


@uncollected()
def run_passes(
    program: Loaded,
    through: Callable[[Any], P],
    on_end: After | None = None,
    on_start: Watch = lambda name: None,
    *,
    verify_passes: bool = False,
    start_after: Pass | None = None,
) -> P:
    """Runs the passes up to and including `through`, from the first one, or from the one after `start_after`; calls `on_start` and `on_end`
    for each.

    With `verify_passes`, or if the environment requests it (`verify.py`), each pass's program is verified: raises InvalidProgram if it
    breaks a law. Raises CompileError with all violations of the failing pass. A note on any exception names the pass.
    """
    valid = program if start_after else None
    for step in PASSES[PASSES.index(start_after) + 1 if start_after else 0 : PASSES.index(through) + 1]:
        name = step.__name__
        on_start(name)
        try:
            program = step(program)
        except Exception as error:
            error.add_note(f"in the pass '{name}'")
            raise
        if verify_passes or is_requested(last=step is through):
            verify(program, name, valid if step is not PASSES[-1] else None)
            valid = program
        if on_end:
            on_end(name, program)
    return cast("P", program)


def programs_of(
    source: Source,
    plan: Plan | None,
    name: str,
    configuration: str | None = None,
    on_end: After | None = None,
    on_start: Watch = lambda name: None,
    *,
    strict: bool = False,
    verify_passes: bool = False,
    kinds: Collection[ProgramKind] = tuple(ProgramKind),
) -> dict[Key, Complete]:
    """Compiles the programs of a plan in the order of `COMPILE_ORDER` and returns them by kind; the arguments are those of `start` and
    `run_passes`.

    The key of a narrow program of a generating plan has its size. `on_end` and `on_start` are called for the passes of the step; `on_start`
    also once for the evaluation, the prefill, or the encoder.
    """
    source = adapted(quantized(unrolled(source, plan, name), plan, name), plan, name)
    done: dict[ProgramKind, Lowered] = {}
    for kind, through in COMPILE_ORDER:
        is_step, beside = kind is ProgramKind.STEP, {other: one for other, one in done.items() if other is not kind}
        if kind not in kinds or not (is_step or _has(done[ProgramKind.STEP], kind)):
            continue
        if kind is ProgramKind.STREAMED_EVALUATION:
            training = done[ProgramKind.STEP].training
            if training is not None and training.rules.loss.per_rank_mean:
                _note_not_streamed(done, "the loss is a sum over ranks of means, which an evaluation has not")
                continue
        first: Loaded
        if kind in done:
            first = replace(done[kind], other_programs=beside)
        else:
            strictly = strict and kind in (ProgramKind.STEP, ProgramKind.PREFILL, ProgramKind.ENCODE)
            first = start(source, plan, name, configuration, kind=kind, strict=strictly, beside=beside)
        if kind in (ProgramKind.EVALUATION, ProgramKind.PREFILL, ProgramKind.ENCODE):
            on_start(kind.name.lower())
        told = (on_end, on_start) if is_step else ()
        behind = lower if kind in done else None
        try:
            passed = run_passes(first, through, *told, verify_passes=verify_passes, start_after=behind)
        except CompileError as error:
            if kind is not ProgramKind.STREAMED_EVALUATION:
                raise
            _note_not_streamed(done, *(problem.fact for problem in error.problems))
            continue
        done[kind] = cast("Lowered", passed)
    complete: dict[Key, Complete] = {kind: program for kind, program in done.items() if isinstance(program, Complete)}
    decode, prefill = complete.get(ProgramKind.STEP), complete.get(ProgramKind.PREFILL)
    if decode is not None and decode.generation is not None and prefill is not None and prefill.generation is not None:
        # the prefill knows in how many runs slots lie, and all together how many there is room for
        record, rules = prefill.generation.record, decode.plan.generate
        sizes = [(ProgramKind.PREFILL, size) for size in record.narrow_chunks]
        sizes += [(ProgramKind.DECODE_ROWS, size) for size in record.narrow_rows]
        if record.draft is not None:
            sizes += [(ProgramKind.DRAFT, size) for size in record.draft.sizes]
        for kind, size in sizes:
            on_start(f"{kind.value} of {size}")
            first = start(source, plan, name, configuration, kind=kind, beside=done, size=size)
            complete[kind, size] = cast("Complete", run_passes(first, PASSES[-1], verify_passes=verify_passes))
        if rules is not None and rules.memory is not None:
            from partc.compiler.cost.memory import most_slots  # it knows how the runtime runs a file

            others = [program for key, program in complete.items() if key is not ProgramKind.STEP]
            programs = [replace(decode, generation=prefill.generation), *others]
            room = most_slots(Unwritten(programs, name), rules, record.runs)
            record = record.model_copy(update={"room": room})
        complete[ProgramKind.STEP] = replace(decode, generation=replace(decode.generation, record=record))
    return complete


def _has(step: Lowered, kind: ProgramKind) -> bool:
    """Whether the plan of a step also has a program of this kind."""
    if kind is ProgramKind.PREFILL:
        return step.generation is not None
    if kind is ProgramKind.ENCODE:
        return step.generation is not None and step.generation.record.encoder is not None
    training = step.training
    if training is None or kind is ProgramKind.EVALUATION:
        return training is not None
    if kind is ProgramKind.TOTALS:
        return bool(training.records.totals)
    return isinstance(step, Scheduled) and step.working_groups > 1


def _note_not_streamed(done: dict[ProgramKind, Lowered], *facts: str) -> None:
    """Notes in the step the reason for which it has no evaluation in microbatches: whole batches are evaluated instead."""
    step = done[ProgramKind.STEP]
    assert step.training is not None
    more = f", and {len(facts) - 1} more" if len(facts) > 1 else ""
    notes = replace(step.training.notes, not_streamed=f"{facts[0]}{more}")
    done[ProgramKind.STEP] = replace(step, training=replace(step.training, notes=notes))


def step_program(source: Source, plan: Plan | None, name: str, **how: Any) -> Complete:
    """Compiles the program of a step alone; the arguments are those of `programs_of`."""
    return programs_of(source, plan, name, kinds=STEP_ALONE, **how)[ProgramKind.STEP]


def analyse(
    model: Path,
    plan: Path | None,
    after: After | None = None,
    configuration: str | None = None,
) -> Complete:
    """Loads a model and runs all passes; writes nothing. `plan` and `configuration` are those of `start`."""
    chosen = read_plan(plan) if plan is not None else None
    with as_user_error(model):
        source = load(model, _named_by(chosen), cache=chosen is not None and chosen.generate is not None)
        return step_program(source, chosen, model.absolute().name, configuration=configuration, on_end=after)


def _named_by(plan: Plan | None) -> Known:
    """Returns a function that checks the plan's names of parameters; it raises CompileError for names that a module does not have."""

    def look(names: Sequence[str]) -> None:
        if plan is None or plan.train is None:
            return
        from partc.compiler.training.add_training import misnamed

        if problems := misnamed(plan.train, names):
            raise CompileError(problems)

    return look


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
    compare: bool = True,
    keep: bool = True,
    weights: Weights = True,
    by_reference: bool = False,
    loaded: Callable[[Source], None] = lambda source: None,
) -> Report:
    """Compiles `model` by `plan` into the folder `out`; with `dump_ir` also writes the text after each pass, `ir/1_normalize.ir` and on.

    `strict`: refuses changes of layout that were not requested. `annotated`: the file for the whole model with the compiler's choices as
    the standard's annotations. `configuration`: the model's own configuration to follow. `check`: whether the artifact is opened and
    checked. `watch`: called with the name of each pass or other work that begins. `verify_passes`: whether the program is verified after
    each pass. `compare`: whether torch's export is compared with its module. `keep`: whether the export of a folder is stored for the next
    command. `weights`: the place of a folder's weights; with False the artifact has none. `by_reference`: whether weights stay in their
    files. `loaded`: called with the model before passes edit it. The plan is read first: its own faults are reported before a module is
    exported, which may take long.

    Raises CompileError, and then leaves `out` as it was.
    """
    chosen = read_plan(plan) if plan is not None else None
    refuse_to_replace(out)
    watch("load")
    texts: dict[str, str] = {}

    def dump(name: str, program: Loaded) -> None:
        texts[f"ir/{len(texts) + 1}_{name}.ir"] = begin_text(program, name)

    with as_user_error(model):
        cache = chosen is not None and chosen.generate is not None
        source = load(model, _named_by(chosen), cache=cache, compare=compare, keep=keep, weights=weights)
        loaded(source)
        with uncollected():
            watch("start")
            name, dumped = model.absolute().name, dump if dump_ir else None
            programs = programs_of(
                source, chosen, name, configuration, dumped, watch, strict=strict, verify_passes=verify_passes
            )
            program = programs.pop(ProgramKind.STEP)
            if annotated is not None and any(is_inside(node) for node in program.model.graph):
                fact = "the model has local maps, which ONNX annotations cannot express"
                raise CompileError(Problem(str(annotated), fact, help="leave out --annotated"))
            elastic: dict[int, list[Complete]] = {}
            for ranks, other in (chosen.elastic.plans if chosen is not None else {}).items():
                watch(f"{ranks} ranks")
                try:
                    scaled = programs_of(source, other, name, configuration, strict=strict, verify_passes=verify_passes)
                except CompileError as error:
                    raise CompileError(
                        [replace(one, fact=f"on {ranks} ranks: {one.fact}") for one in error.problems]
                    ) from None
                main = _in_folder(scaled.pop(ProgramKind.STEP), plan, out / ranks_folder(ranks))
                elastic[ranks] = [main, *scaled.values()]
                more = [f"on {ranks} ranks: {text}" for text in main.warnings if text not in program.warnings]
                program = replace(program, warnings=(*program.warnings, *more))
            program = _in_folder(program, plan, out)
            sources = {"model": _record(model), "plan": _record(plan) if plan is not None else None}
            written = check, watch, by_reference, elastic
            report = _write(program, [*programs.values()], source, out, sources, texts, *written)
            report = replace(report, exported=source.exported, is_export_cached=source.is_export_cached)
            if annotated is not None:
                write_annotated(report.program, annotated)
            return report


def _in_folder(program: Complete, plan: Path | None, out: Path) -> Complete:
    """Returns a program whose training knows the relative path from its artifact's folder to its plan's."""
    if program.training is None or plan is None:
        return program
    return replace(program, training=replace(program.training, folder=os.path.relpath(plan.parent, out)))


def compile_source(
    source: Source,
    plan: Plan | None,
    out: Path,
    name: str = "model",
    *,
    check: bool = True,
    kinds: Collection[ProgramKind] = tuple(ProgramKind),
    by_reference: bool = False,
) -> Report:
    """Compiles a model and a plan in memory, as `compile_model` does; `kinds`: the programs of the plan to write."""
    programs = programs_of(source, plan, name, kinds=kinds)
    program = programs.pop(ProgramKind.STEP)
    record = SourceRecord(name=name, sha256=hashlib.sha256(begin_text(program).encode()).hexdigest())
    return _write(
        program,
        [*programs.values()],
        source,
        out,
        {"model": record, "plan": None},
        check=check,
        by_reference=by_reference,
    )


@uncollected()
def _write(
    program: Complete,
    inner: list[Complete],
    source: Source,
    out: Path,
    sources: dict[str, SourceRecord | None],
    texts: dict[str, str] | None = None,
    check: bool = True,
    watch: Watch = lambda name: None,
    by_reference: bool = False,
    elastic: Mapping[int, Sequence[Complete]] = MappingProxyType({}),
) -> Report:
    """Writes the artifact (`emit`), and opens and checks it (`prove`) before it replaces the old one."""
    warnings: list[str] = []

    def checked(folder: Path) -> None:
        watch("check")
        warnings.extend(prove(folder, source.model, program.name) if check else ())

    watch("emit")
    manifest = emit(program, out, sources, texts, inner, checked, source.absent, by_reference, elastic)
    if by_reference and not manifest.referenced:
        warnings.append(
            f"{program.name}: no weight is a tensor of a safetensors file or external data; all are written"
        )
    return Report(replace(program, warnings=(*program.warnings, *warnings)), manifest, out)


def _record(path: Path) -> SourceRecord:
    """Returns the record of a source file's hash, or of a folder's configuration; weights are covered by the artifact's hashes."""
    with open_regular(path / CONFIG if path.is_dir() else path) as file:
        return SourceRecord(name=path.absolute().name, sha256=hashlib.file_digest(file, "sha256").hexdigest())


@contextmanager
def as_user_error(path: Path) -> Iterator[None]:
    """Turns an internal error into a CompileError if the model at `path` proves invalid."""
    try:
        yield
    except Exception as error:
        expected = isinstance(error, CompileError | PartcError | OSError) and not isinstance(error, InternalError)
        if expected or out_of_memory(error):
            raise
        if reason := unsound(path):
            help = "see onnx.checker.check_model and onnxruntime.InferenceSession, and export the model again"
            raise CompileError(Problem(path.name, f"is not a valid ONNX model: {reason}", help=help)) from error
        raise


def unsound(path: Path) -> str:
    """What onnx's checker or onnxruntime say against a model; '' where they take it."""
    built = None if path.suffix == ".onnx" else load(path).model
    try:
        # weights of a folder may be in files of any place
        model = read_model(path) if built is None else without_weights(built)
        violations = check_model(path.name, model, Manifest.model_construct(symbols={}))  # type: ignore[call-arg]
    except Exception as error:  # of a model that cannot even be looked at
        if out_of_memory(error):
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())
    if violations:
        return f"{violations[0].node}: {violations[0].fact}" if violations[0].node else violations[0].fact
    compute_in_float32(model, bfloat16=True)
    refused = can_load(model.SerializeToString(), str(path.parent.resolve()), optimized=False)
    return f"onnxruntime {version()} does not load it: {refused}" if refused else ""
