"""`partc plan --ranks`: searches for a plan, and compares its step with baselines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from partc.cli.output.table import Table
from partc.compiler.cost.machine import Curve, Link, Machine, Processor
from partc.compiler.cost.machine_file import read_machine
from partc.compiler.frontend.source import Source
from partc.compiler.proposal.batch import batch_of
from partc.compiler.search.base_plan import Base, base_of
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from partc.compiler.search.search_state import SearchState, SimulatedPlan, played
from partc.runtime.artifact.format import CPU
from partc.runtime.errors import UsageError
from partc.runtime.garbage_collection import uncollected
from partc.runtime.units import count, seconds, size_text

DEFAULT = "the default machine (a device for each rank at 50 TFLOP/s, links of 100 GB/s)"


def default_machine() -> Machine:
    """Returns a machine on which a product of a million operations takes 2 us, and a message of a KiB 5 us."""
    products = {
        "matmul": Curve(((1e6, 2e-6), (1e12, 20e-3))),
        "convolution": Curve(((1e6, 4e-6), (1e12, 30e-3))),
    }
    kernels = {"elementwise": Curve(((4096.0, 2e-6), (2.0**30, 1e-3)))}
    send, reduced = Curve(((1024.0, 5e-6), (2.0**30, 10e-3))), Curve(((1024.0, 10e-6), (2.0**30, 12e-3)))
    link = Link("default", 2, 1, 1.0, 2e-6, send, reduced)
    return Machine(DEFAULT, 0, {CPU: Processor(20e-6, 200e-6, products, kernels)}, [link])


@dataclass(frozen=True)
class Options:
    """The options of `partc plan --ranks`.

    `limit`: the seconds that the search may take, `plan`: a plan whose settings are kept, `tries`: the number of fastest plans to run.
    """

    ranks: int
    fixed: Fixed
    sizes: Mapping[str, int]
    batch: int | None = None
    memory: int | None = None
    machine: Path | None = None
    hosts: int = 1
    limit: float | None = None
    plan: Path | None = None
    tries: int = 0


@dataclass(frozen=True)
class SearchResult:
    """A plan's text, the report that is printed with it, and warnings."""

    text: str
    report: str
    warnings: tuple[str, ...]


@uncollected()
def searched(
    source: Source, name: str, options: Options, run: Callable[[SearchState], None] = lambda plays: None
) -> SearchResult:
    """Searches for a plan. Raises UsageError for a number of ranks that the fixed degrees do not divide, or where no plan fits the memory.

    `run` measures the fastest plans, where the options ask for it, before one is chosen.
    """
    least = options.fixed.least.ranks
    if options.ranks % least:
        fixed = options.fixed
        given = {"--tp": fixed.tp, "--dp": fixed.dp, "--stages": fixed.stages, "--context": fixed.cp}
        shown = " ".join(f"{option} {number}" for option, number in given.items() if number is not None)
        fact = f"--ranks {options.ranks} is not divisible by the {least} ranks of {shown}"
        raise UsageError(f"{fact}\n  help: give a multiple of {least}, or leave out what is to be searched")
    machine = default_machine() if options.machine is None else read_machine(options.machine)
    base, source = (Base(), source) if options.plan is None else base_of(options.plan, source)
    request = Request(
        options.ranks, options.fixed, base, machine, _sizes(source, options, base), options.hosts, options.memory
    )
    began = time.monotonic()
    search = Search.of(source, name, request)
    if not search.candidates:
        one = options.fixed.least
        wanted = f"--ranks {options.ranks} --tp {one.tp} --dp {one.dp} --stages {one.stages}"
        wanted += f" --context {one.cp}" if one.cp > 1 else ""
        help = "the model has no dim of a batch, so leave out --dp and --stages, or give another --tp"
        if search.records is not None:
            help = f"the batch of {search.records} is divided by dp, so choose another --batch, or leave a degree out"
        raise UsageError(f"{name}: there is no plan for {wanted}\n  help: {help}")
    plays = played(search, options.memory, began, options.limit, max(1, options.tries))
    if not plays.fitting:
        raise UsageError(_none_fits(plays, options))
    if options.tries:
        run(plays)
    best = plays.best
    assert best is not None
    text = best.with_head(tuple(_head(plays, best, options)))
    return SearchResult(text, "\n".join(_report(plays, best, options)), tuple(_warnings(plays, best, options)))


def _sizes(source: Source, options: Options, base: Base) -> dict[str, int]:
    """Returns the requested sizes; `--batch` is the size of the symbol that counts records."""
    if options.batch is None:
        return dict(options.sizes)
    if base.batch not in (None, options.batch):
        fact = f"--batch {options.batch}: the 'train' of {options.plan} has a batch of {base.batch}"
        raise UsageError(f"{fact}\n  help: leave out --batch, or change the plan")
    first = next(iter(batch_of(source, 2).symbols), None)
    if first is None:
        raise UsageError(f"--batch {options.batch}: the batch of the model is fixed\n  help: leave out --batch")
    return {**options.sizes, first: options.batch}


def _none_fits(plays: SearchState, options: Options) -> str:
    if not plays.played:
        facts = "; ".join(dict.fromkeys(plays.refused.values()))
        return f"{plays.search.name}: the compiler refuses every candidate: {facts}\n  help: try other --ranks"
    least = min(plays.played, key=lambda one: one.peak)
    fact = f"--memory {size_text(options.memory or 0)}: no plan on {count(options.ranks, 'rank')} was found that needs as little"
    return f"{fact}; {least.candidate} needs {size_text(least.peak, at_least=True)}\n  help: give that, or more --ranks"


def _at(plays: SearchState) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in plays.search.request.sizes.items())
    where = plays.search.request.machine.where
    return f"on {where if '(' in where else PurePath(where).name}" + (f" at {sizes}" if sizes else "")


def _head(plays: SearchState, best: SimulatedPlan, options: Options) -> Iterator[str]:
    """Yields comment lines for the head of the plan: its cost, the baselines, and the savings of each of its choices."""
    own = f"{seconds(best.seconds)} {_at(plays)}"
    if (measured := plays.measured.get(best.candidate)) is not None:
        own = f"{seconds(measured)} on this host, and by simulation {own}"
    tries = f" --try {options.tries}" if options.tries else ""
    yield f"# Found by `partc plan --ranks {options.ranks}{tries}` among {count(len(plays.search.candidates), 'candidate')}:"
    yield f"# a step takes {own}. Peak memory of a rank: {size_text(best.peak, at_least=True)}."
    for name, candidate in plays.search.baselines.items():
        yield f"#   {name}: {_told(plays, candidate)}"
    yield from (f"# {line}" for line in _savings(plays, best))
    if (fact := _idle(best, options)) is not None:
        yield f"# {fact[0].upper()}{fact[1:]}."


def _told(plays: SearchState, candidate: Candidate) -> str:
    """Returns the time of a baseline as text: simulated and measured, else as estimated."""
    one, measured = plays.of(candidate), plays.measured.get(candidate)
    if one is not None:
        return seconds(one.seconds) + (f", measured {seconds(measured)}" if measured is not None else "")
    if candidate in plays.refused:
        return f"refused: {plays.refused[candidate]}"
    return f"about {seconds(plays.search.estimate(candidate).seconds)}"


def _savings(plays: SearchState, best: SimulatedPlan) -> Iterator[str]:
    """Yields the saving of each choice of the plan, from the estimates of the plan with and without it."""
    candidate, estimate = best.candidate, plays.search.estimate
    own = estimate(candidate)
    degrees = candidate.degrees
    without = {
        f"tp {degrees.tp}": replace(candidate, degrees=replace(degrees, tp=1), by_module=False),
        f"dp {degrees.dp}": replace(candidate, degrees=replace(degrees, dp=1), zero=False, stored=False),
        f"context {degrees.cp}": replace(candidate, degrees=replace(degrees, cp=1)),
        f"{candidate.stages} stages": replace(candidate.in_line(), degrees=replace(degrees, stages=1)),
        f"{candidate.microbatches} microbatches": replace(candidate.in_line(), microbatches=1),
        candidate.schedule: candidate.in_line("1f1b"),
        "ZeRO": replace(candidate, zero=False),
        "storing shards": replace(candidate, stored=False),
        "recomputing": replace(candidate, recompute=False),
        "the choice by module": replace(candidate, by_module=False),
    }
    for name, other in without.items():
        if other == candidate or not name:
            continue
        there = estimate(other)
        parts = []
        if (saved := there.seconds - own.seconds) > 0:
            parts.append(f"about {seconds(saved)} of a step")
        if (saved := there.bytes - own.bytes) > 0:
            parts.append(f"about {size_text(saved)} of a rank")
        yield f"{name} saves {' and '.join(parts) or 'nothing by itself'}."


def _idle(best: SimulatedPlan, options: Options) -> str | None:
    """Returns the reason why not all ranks are used; None where they are."""
    used = best.candidate.degrees.ranks
    if used == options.ranks:
        return None
    return f"it uses {used} of {count(options.ranks, 'rank')}: every plan that was played on more takes longer, for what they send"


def _report(plays: SearchState, best: SimulatedPlan, options: Options) -> Iterator[str]:
    search = plays.search
    known = f"{count(len(search.candidates), 'candidate')}, {len(plays.played)} played"
    known += f", {len(plays.refused)} refused" if plays.refused else ""
    yield f"{search.name}: a plan for {count(options.ranks, 'rank')} {_at(plays)}; {known}"
    names = {candidate: name for name, candidate in search.baselines.items()}
    ran = bool(plays.measured)
    table = Table(["plan", *([">measured"] if ran else []), ">step", ">bytes given", ">peak memory", ""])
    for one in sorted(plays.played, key=lambda one: (plays.measured.get(one.candidate, math.inf), one.seconds)):
        word = "found" if one is best else names.get(one.candidate, "")
        over = " (too much)" if options.memory is not None and one.peak > options.memory else ""
        measured = [_measured(plays, one.candidate)] if ran else []
        row = seconds(one.seconds), size_text(one.bytes), size_text(one.peak) + over
        table.add(one.candidate, *measured, *row, word)
    for candidate, name in names.items():
        if plays.of(candidate) is None:
            estimate = search.estimate(candidate)
            told = (
                ("refused", "")
                if candidate in plays.refused
                else (f"~{seconds(estimate.seconds)}", f"~{size_text(estimate.bytes)}")
            )
            table.add(candidate, *([""] if ran else []), told[0], "", told[1], name)
    yield table.plain()
    own = seconds(best.seconds)
    yield f"found {f'{_measured(plays, best.candidate)}, by simulation {own}' if ran else own}"


def _measured(plays: SearchState, candidate: Candidate) -> str:
    """Returns a plan's time on this host as text; "" where it was not run."""
    taken = plays.measured.get(candidate)
    return "failed" if candidate in plays.failed else "" if taken is None else seconds(taken)


def _warnings(plays: SearchState, best: SimulatedPlan, options: Options) -> Iterator[str]:
    if plays.search.request.machine.where == default_machine().where:
        yield "no machine file was given; `partc measure -o machine.yaml` measures this one"
    if (fact := _idle(best, options)) is not None:
        yield fact
    yield from (f"{one} did not run: {fact}" for one, fact in plays.failed.items())
    if plays.cut_short:
        yield "the time was over before all candidates were played; with more of it the plan may be another"
