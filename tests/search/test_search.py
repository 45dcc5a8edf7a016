"""`partc plan --ranks`: the found plan is that of the least step, as it is simulated; memory; what is refused."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import same_as_whole
from machines import links, machine, shared
from onnx import helper
from partc.cli.main import invoke
from partc.cli.simulation.search import Options, SearchResult, searched
from partc.compiler.cost.machine import Curve, Machine
from partc.compiler.cost.machine_file import machine_text
from partc.compiler.cost.play import Begin
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search import search_state
from partc.compiler.search.base_plan import Base, base_of
from partc.compiler.search.candidate import Candidate, Fixed, baselines, candidates, degrees_of
from partc.compiler.search.estimate import Estimate
from partc.compiler.search.search import Request, Search
from partc.compiler.search.search_state import play_program, played
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from partc.runtime.errors import UsageError
from partc.runtime.units import parse_bytes
from perceptrons import DEEP, TRAIN, WIDE, layers
from proposal_case import source
from rows import of_today

Capture = pytest.CaptureFixture[str]


def found(
    folder: Path, on: Machine, ranks: int = 4, train: str = "", depth: int = DEEP, width: int = WIDE, **options: object
) -> SearchResult:
    """What a search finds for the layers, at 64 records."""
    (folder / "machine.yaml").write_text(machine_text(on))
    plan = None
    if train:
        plan = folder / "train.yaml"
        plan.write_text(train)
    given = {"sizes": {} if train else {"batch": 64}, "fixed": Fixed(), **options}
    asked = Options(ranks, machine=folder / "machine.yaml", plan=plan, **given)  # type: ignore[arg-type]
    return searched(source(layers(width, depth)), "model.onnx", asked)


def times(report: str) -> list[str]:
    """The first words of the rows of played candidates, the fastest first."""
    return [line.split("  ")[0] for line in report.splitlines()[2:-1] if "~" not in line]


def test_the_found_plan_is_the_fastest_and_equals_the_model(tmp_path: Path) -> None:
    one, again = (found(tmp_path, links(1e-7, 1e12)) for _ in range(2))
    assert (one.text, one.report) == (again.text, again.report)
    plan = parse_plan(one.text, "plan.yaml")
    assert plan.ranks == 4
    assert times(one.report)[0] in one.report.splitlines()[2]
    assert one.report.splitlines()[2].endswith("found")
    same_as_whole(
        layers(),
        one.text,
        {"x": np.random.default_rng(2).standard_normal((64, WIDE), np.float32)},
        rtol=1e-4,
        atol=1e-3,
    )


def test_what_is_predicted_is_what_simulate_says(tmp_path: Path, capsys: Capture) -> None:
    import json

    text = found(tmp_path, links(1e-6, 1e10)).text
    onnx.save(layers(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(text)
    options = [
        "--model",
        str(tmp_path / "model.onnx"),
        "--machine",
        str(tmp_path / "machine.yaml"),
        "--set",
        "batch=64",
    ]
    assert invoke(["simulate", str(tmp_path / "plan.yaml"), *options, "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    assert f"a step takes {seconds * 1e6:.0f} us" in text or f"a step takes {seconds * 1e3:.3g} ms" in text


def test_training_within_a_memory(tmp_path: Path) -> None:
    """With less memory than the fastest plan needs another one is found, which is slower, and needs as little."""
    on, fixed = links(1e-7, 1e12), Fixed(tp=2)
    free = found(tmp_path, on, train=TRAIN, fixed=fixed)
    peak = int(size(free.text) * 0.95)
    less = found(tmp_path, on, train=TRAIN, fixed=fixed, memory=peak)
    assert size(less.text) <= peak
    assert less.text != free.text
    for one in (free, less):
        assert parse_plan(one.text, "plan.yaml").train is not None


def size(text: str) -> int:
    """The peak memory that a found plan states."""
    stated = text.partition("Peak memory of a rank: ")[2].partition(".\n")[0]
    return parse_bytes(stated) or 0


def test_two_ranks_that_share_memory_gain_nothing(tmp_path: Path) -> None:
    """Of ranks that are three times as slow beside each other no more than one is used."""
    on = replace(links(1e-7, 1e12), cores=2)
    plain, slowed = (found(tmp_path, one, ranks=2) for one in (on, shared(on, times=1.0)))
    assert plain.text == slowed.text
    assert "ranks: 2\n" in plain.text
    assert "ranks: 1\n" in found(tmp_path, shared(on, times=3.0), ranks=2).text


@pytest.mark.parametrize(
    ("train", "ranks", "fixed", "many"),
    of_today(
        [
            pytest.param("", 2, Fixed(), 5, id="infer"),
            pytest.param(TRAIN.replace("64", "4"), 2, Fixed(), 9, id="train"),
            pytest.param(TRAIN.replace("64", "4"), 4, Fixed(tp=1, dp=2), 6, id="ZeRO in stages"),
            pytest.param(TRAIN.replace("64", "4"), 4, Fixed(tp=2, stages=2), 3, id="tp in stages"),
            pytest.param(TRAIN.replace("64", "4"), 4, Fixed(tp=2, dp=2), 2, id="tp and dp"),
        ],
        2,
    ),
)
def test_no_candidate_is_faster_than_what_is_found(
    train: str, ranks: int, fixed: Fixed, many: int, tmp_path: Path
) -> None:
    """All are simulated, where products are faster the larger they are, and slower next to other ranks."""
    on = links(1e-7, 1e12)
    products = {"matmul": Curve(((1e3, 2e-6), (1e6, 1e-4), (1e9, 5e-2)))}
    on = shared(replace(on, processors={"cpu": replace(on.processors["cpu"], products=products)}), times=1.5)
    one, base = source(layers(16, 1)), Base()
    if train:
        (tmp_path / "train.yaml").write_text(train)
        base, one = base_of(tmp_path / "train.yaml", one)
    search = Search.of(one, "model.onnx", Request(ranks, fixed, base, on, {} if train else {"batch": 4}))
    found = played(search, None, time.monotonic(), None)
    assert len(search.candidates) >= many
    least = {one: play_program(search, search.proposal(one).done).played.seconds for one in search.candidates}
    assert found.best is not None
    assert found.best.seconds == min(least.values())


def test_a_large_model_is_searched_with_fewer_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is by its estimate behind what is found, and slower where it is played."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    base, one = base_of(tmp_path / "train.yaml", source(layers(16, 1)))
    search = Search.of(one, "model.onnx", Request(2, Fixed(), base, links(1e-6, 1e10), {}))
    every = played(search, None, time.monotonic(), None, wanted=8)
    monkeypatch.setattr(search_state, "_LARGE", 0)
    few = played(search, None, time.monotonic(), None)
    assert few.best is not None
    assert every.best is not None
    assert few.best.candidate == every.best.candidate
    left = [one for one in every.played if few.of(one.candidate) is None]
    assert left
    for other in left:
        assert few.likely(other.candidate, other.estimate, few.ratios) >= few.best.seconds


def test_a_high_estimate_does_not_end_the_search_of_a_large_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is played where all estimates are right is played, too, where all are twice as high."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    base, one = base_of(tmp_path / "train.yaml", source(layers(16, 1)))
    monkeypatch.setattr(search_state, "_LARGE", 0)
    exact, runs = Search.estimate, []
    for factor in (1, 2):
        monkeypatch.setattr(Search, "estimate", lambda self, one, f=factor: Estimate(f * exact(self, one).seconds, 0))
        search = Search.of(one, "model.onnx", Request(2, Fixed(), base, links(1e-6, 1e10), {}))
        runs.append(played(search, None, time.monotonic(), None))
    right, high = ({one.candidate for one in run.played} for run in runs)
    assert len(right) > 2
    assert right <= high
    assert runs[0].best is not None
    assert runs[1].best is not None
    assert runs[0].best.candidate == runs[1].best.candidate


@pytest.mark.parametrize(
    "one",
    [
        Candidate(Degrees(dp=4)),
        Candidate(Degrees(dp=4), zero=True),
        Candidate(Degrees(dp=4), microbatches=2, zero=True),
        Candidate(Degrees(tp=2, dp=4), 2),
        Candidate(Degrees(dp=8), zero=True),
        Candidate(Degrees(dp=16), zero=True),
    ],
    ids=str,
)
def test_reductions_are_those_of_the_compiled_plan(one: Candidate, tmp_path: Path) -> None:
    """A width of 12 is divided by 4, not by 8; 48 is divided by 8 and 16, so weights are sharded along their other dim."""
    (tmp_path / "train.yaml").write_text(TRAIN + "  bucket_mb: 0.003\n")
    base, model = base_of(tmp_path / "train.yaml", source(layers(12)))
    search = Search.of(model, "model.onnx", Request(one.degrees.ranks, Fixed(), base, machine(), {}))
    assert base.bucket == 3146
    degrees, places = one.degrees, search._sharded(one.degrees.tp)[1].places
    assert search.estimates.reductions.calls(places, degrees.tp, degrees.dp, one.zero) == reduced(search, one)


def reduced(search: Search, one: Candidate) -> Counter[tuple[str, float]]:
    """The collectives for gradients of a candidate that is compiled."""
    (played, *_) = play_program(search, search.proposal(one).done).played.classes
    ops = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)  # of more than 4 bytes: the loss is summed, too
    return Counter(
        (action.op, float(action.bytes))
        for action in played.actions
        if isinstance(action, Begin) and action.op in ops and not action.task and action.bytes > 4
    )


@pytest.mark.parametrize(
    "one", [Candidate(Degrees(dp=4), stored=True), Candidate(Degrees(tp=2, dp=4), stored=True)], ids=str
)
def test_gathers_are_those_of_the_compiled_plan(one: Candidate, tmp_path: Path) -> None:
    """Of units twice but for the last, and their gradients once; 12 is not divided by 8, so weights are stored along their other dim."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    base, model = base_of(tmp_path / "train.yaml", source(layers(12)))
    search = Search.of(model, "model.onnx", Request(one.degrees.ranks, Fixed(), base, machine(), {}))
    degrees, places = one.degrees, search._sharded(one.degrees.tp)[1].places
    sent, known = reduced(search, one), search.estimates.reductions.units.calls(places, degrees.tp, degrees.dp, False)
    assert not known - sent
    assert {op for op, _ in sent - known} == ({ALL_REDUCE} if degrees.tp > 1 else set())  # sums of layers


def test_parameters_are_stored_where_nothing_else_fits(tmp_path: Path) -> None:
    """A search proposes it within a memory alone, and the plan that it writes says what it saves."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    base, one = base_of(tmp_path / "train.yaml", source(layers(16)))
    for memory in (None, 1 << 20):
        request = Request(2, Fixed(), base, machine(), {}, memory=memory)
        stored = {some.stored for some in Search.of(one, "model.onnx", request).candidates}
        assert stored == ({False} if memory is None else {False, True})
    given = {"ranks": 4, "train": TRAIN, "depth": 1, "width": 128, "fixed": Fixed(tp=1, dp=4, stages=1)}
    with pytest.raises(UsageError, match=r"needs as little; dp 4.*, stored") as refused:
        found(tmp_path, links(1e-7, 1e11), memory=1000, **given)  # type: ignore[arg-type]
    least = parse_bytes(str(refused.value).partition("\n")[0].rpartition(" needs ")[2])
    text = found(tmp_path, links(1e-7, 1e11), memory=least, **given).text  # type: ignore[arg-type]
    assert parse_plan(text, "plan.yaml").stored.rules
    assert "# storing shards saves about " in text


def test_a_number_by_itself_is_not_reduced(tmp_path: Path) -> None:
    """A model's scale is not trained, so no rank reduces a gradient of it."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    model = layers(12)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2.0), "scale"))
    first = model.graph.node[0]
    given, first.input[0] = first.input[0], "scaled"
    model.graph.node.insert(0, helper.make_node("Mul", [given, "scale"], ["scaled"], name="scaled.Mul"))
    base, one = base_of(tmp_path / "train.yaml", source(model))
    search = Search.of(one, "model.onnx", Request(2, Fixed(), base, machine(), {}))
    names = {value.name for value, *_ in search.estimates.reductions.parameters}
    assert "scale" not in names
    assert len(names) == len(model.graph.initializer) - 1


def test_a_small_model_is_data_parallel(tmp_path: Path) -> None:
    """Few weights and many records: what all ranks compute of their records outweighs the gradients."""
    text = found(tmp_path, links(1e-7, 1e8), ranks=2, train=TRAIN, depth=1, width=8).text
    assert parse_plan(text, "plan.yaml").ranks == 2
    assert "dp 2 saves" in text


def test_on_slow_links_there_are_stages(tmp_path: Path) -> None:
    """Gradients of all weights, or sums of each layer, take longer than what one stage hands to the next."""
    text = found(tmp_path, links(1e-6, 2e7), ranks=2, train=TRAIN).text
    plan = parse_plan(text, "plan.yaml")
    assert plan.pipeline is not None
    assert "2 stages saves" in text


def test_the_least_memory_is_enough(tmp_path: Path) -> None:
    """What the message names as needed by some plan is enough for a plan."""
    with pytest.raises(UsageError, match="needs as little") as refused:
        found(tmp_path, links(1e-6, 1e10), ranks=2, memory=1000)
    least = parse_bytes(str(refused.value).partition("\n")[0].rpartition(" needs ")[2])
    assert least is not None
    assert size(found(tmp_path, links(1e-6, 1e10), ranks=2, memory=least).text) <= least


def test_statistics_of_microbatches_are_taken_over(tmp_path: Path) -> None:
    """Whether they may be of each microbatch the user's plan says, and no search."""
    (tmp_path / "train.yaml").write_text(TRAIN + "pipeline: {microbatches: 2, statistics: microbatch}\n")
    one = source(layers(16, 1))
    for base in (base_of(tmp_path / "train.yaml", one)[0], Base()):
        search = Search.of(one, "model.onnx", Request(2, Fixed(), base, links(1e-7, 1e12), {"batch": 64}))
        text = search.proposal(Candidate(Degrees(stages=2), 2, "1f1b" if base.trains else "")).text
        assert ("statistics: microbatch" in text) == base.statistics == base.trains


@pytest.mark.parametrize(
    ("options", "fact", "help"),
    [
        (["--ranks", "4"], "the size of 'batch' is not known", "--batch 64"),
        (
            ["--ranks", "6", "--tp", "4", "--batch", "8"],
            "--ranks 6 is not divisible by the 4 ranks of --tp 4",
            "a multiple of 4",
        ),
        (
            ["--ranks", "2", "--batch", "8", "--memory", "1kB"],
            "no plan on 2 ranks was found that needs as little",
            "more --ranks",
        ),
        (["--ranks", "2", "--batch", "8", "--time", "1e9"], "is not a time above 0", ""),
        (["--ranks", "2", "--batch", "8", "--time", "0.001s"], "is over before a plan is found", "give it more"),
        (
            ["--ranks", "3", "--dp", "3", "--batch", "8"],
            "there is no plan for --ranks 3",
            "the batch of 8 is divided by dp",
        ),
        (["--ranks", "2", "--set", "rows=8"], "the model has no such symbol", "its symbols are batch"),
        (["--ranks", "2", "--target", "auto"], "--target is for a proposal of given degrees", "leave out --ranks"),
        (
            ["--ranks", "2", "--slots", "2", "--device-memory", "1GB"],
            "--device-memory, --slots are for a proposal of given",
            "leave",
        ),
        (["--memory", "1GB", "--time", "3s"], "--memory, --time are for a search", "add --ranks"),
    ],
)
def test_what_is_refused(options: list[str], fact: str, help: str, tmp_path: Path, capsys: Capture) -> None:
    onnx.save(layers(depth=1), tmp_path / "model.onnx")
    assert invoke(["plan", str(tmp_path / "model.onnx"), *options]) == 2
    told = capsys.readouterr().err
    assert fact in told
    assert help in told


def test_candidates_are_all_degrees_of_divisors() -> None:
    assert len(degrees_of(12, Fixed())) == sum({1: 1, 2: 3, 3: 3, 4: 6, 6: 9, 12: 18}.values())
    assert degrees_of(12, Fixed(tp=3, stages=2)) == [Degrees(3, 2, 2), Degrees(3, 1, 2)]
    some = list(candidates(Degrees(1, 2, 2), 8, trains=True, again=True, sharded=False))
    assert len(some) == len(set(some)) == 2 * 2 * (1 + 2 * 2)
    assert Candidate(Degrees(1, 2, 2), 4, "zb_h1", zero=True, recompute=True) in some
    assert not list(candidates(Degrees(1, 3, 1), 8, trains=False, again=False, sharded=False))
    assert list(candidates(Degrees(2, 1, 1), None, trains=False, again=False, sharded=False)) == [Candidate(Degrees(2))]


def test_recomputing_is_searched_within_a_memory(tmp_path: Path) -> None:
    """It saves memory alone, so without a limit of it no candidate is faster by it."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    base, one = base_of(tmp_path / "train.yaml", source(layers(16)))
    for memory in (None, 1 << 20):
        request = Request(2, Fixed(), base, machine(), {}, memory=memory)
        recomputes = {some.recompute for some in Search.of(one, "model.onnx", request).candidates}
        assert recomputes == ({False} if memory is None else {False, True})


def test_baselines_are_named() -> None:
    named = {name: str(one) for name, one in baselines(16, 64, trains=True, most=16).items()}
    assert named == {
        "one rank": "one rank",
        "data parallel": "dp 16",
        "tensor parallel": "tp 16",
        "stages": "16 stages, 32 microbatches, 1f1b",
        "Megatron": "dp 2, tp 8",
        "data parallel, stages": "dp 8, 2 stages, 4 microbatches, 1f1b",
        "tensor parallel, stages": "tp 8, 2 stages, 4 microbatches, 1f1b",
    }
