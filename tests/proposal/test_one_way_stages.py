"""Stages that are proposed read from earlier ones alone, so every schedule of one stage on each group takes them.

Held of random networks with towers, skips, shared weights and tables, and of models whose branches meet: a recommendation model, towers,
a U, a GPT whose stages end within a layer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from machines import machine
from onnx import TensorProto, helper
from partc.compiler.analysis.shapes import shapes
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Typed
from partc.compiler.pipeline import run_passes, step_program
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.flow import floats
from partc.compiler.proposal.propose import parsed, propose
from partc.compiler.proposal.stages import Stage, balanced_stages
from partc.compiler.search.base_plan import base_of
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from partc.compiler.start import start
from proposal_case import WIDTH, Graph, source
from staged_networks import Network, batch, grown
from training_equivalence import from_text, same_training, source_of
from training_models import dlrm, gpt

RECORDS = 8
SQUARES = "train:\n  loss: {type: mean_squared, prediction: y, target: t}\n  optimizer: {type: sgd, lr: 0.1}\n"
IN_LINE = "pipeline: {microbatches: 2, schedule: 1f1b}\n"
BATCH = f"  batch: {{divisor: {RECORDS}, max: {RECORDS}}}"


def network(seed: int) -> tuple[Network, Source]:
    net = grown(random.Random(seed))
    return net, from_text(net.text, net.weights)


def typed(model: Source, count: int) -> Typed:
    return run_passes(start(*parsed(model, f"ranks: {count}\n", "model.onnx")), shapes)


def in_line(model: Source, text: str) -> int:
    """How many stages a plan has for 1f1b, with a training of microbatches; CompileError where a rank has several."""
    tasks = step_program(*parsed(model, f"{text}\n{SQUARES}{IN_LINE}", "model.onnx")).tasks
    assert tasks is not None
    return len(tasks.schedule.stages)


def against_the_way(program: Typed, stages: list[Stage]) -> list[str]:
    """The nodes that read from a later stage than theirs."""
    at = {node: k for k, stage in enumerate(stages) for node in stage.nodes}
    made = {node: [p for value in program.reads[node] if (p := value.producer()) in at] for node in at}
    return [program.paths[node] for node, before in made.items() if any(at[p] > at[node] for p in before)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_of_random_networks_go_one_way(count: int) -> None:
    """49, 100 and 109 count their labels on a rank that has nothing else of the last stage; each third has two towers."""
    made = 0
    for seed in (*range(6), 49, 100, 109):
        model = network(seed)[1]
        program = typed(model, count)
        stages = balanced_stages(program, count)
        assert not against_the_way(program, stages), seed
        if len(stages) == count:
            text, missing = propose(model, "model.onnx", Degrees(stages=count))
            assert not missing, seed
            assert in_line(model, text) == count, seed
            made += 1
    assert made > 5


@pytest.mark.parametrize(("seed", "count"), [(3, 3), (49, 3), (100, 4), (109, 3)])
def test_stages_of_random_networks_train_alike(seed: int, count: int, tmp_path: Path) -> None:
    net, model = network(seed)
    text, _ = propose(model, "model.onnx", Degrees(stages=count))
    lines = [line.partition("#")[0] for line in text.splitlines() if not line.startswith(("#", "  batch: "))]
    plan = "\n".join(lines).replace("symbols:", f"symbols:\n{BATCH}", 1)
    steps = [batch(net, k, RECORDS, 0) for k in range(2)]
    feeds = [{name: step[name] for name in step if name in ("x", "t") or name in net.read} for step in steps]
    done = same_training(lambda: network(seed)[1], f"{plan}\n{SQUARES}{IN_LINE}", tmp_path, feeds, rtol=1e-4, atol=1e-4)
    assert done.plan.ranks == count


def rows(g: Graph, y: str, *inputs: str) -> Source:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in (*inputs, "y")]
    g.nodes.append(helper.make_node("Identity", [y], ["y"], "last"))
    graph = helper.make_graph(g.nodes, "g", ports[:-1], ports[-1:], g.weights)
    return source(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def block(g: Graph, name: str, x: str, width: int = WIDTH) -> str:
    return g.node(f"{name}.act", "Relu", g.linear(name, x, width, WIDTH))


def towers() -> Source:
    """Two towers of four blocks that meet in a product: of three stages one has blocks of both, and each goes on in the next."""
    g, ends = Graph(), list[str]()
    for tower in ("user", "item"):
        x = tower
        for k in range(4):
            x = block(g, f"{tower}_tower.layers.{k}", x)
        ends.append(x)
    return rows(g, g.node("score", "Mul", *ends), "user", "item")


def skips() -> Source:
    """A U: each block of its way up reads what the block across made on the way down."""
    g, x, down = Graph(), "x", list[str]()
    for k in range(4):
        x = block(g, f"down.{k}", x)
        down.append(x)
    x = block(g, "middle", x)
    for k in range(4):
        x = block(g, f"up.{k}", g.node(f"join_{k}", "Concat", x, down.pop(), axis=1), 2 * WIDTH)
    return rows(g, x, "x")


def attending() -> Source:
    """Each layer of a decoder adds what the encoder made; a sum between them is of no module."""
    g, memory, x = Graph(), "x", "z"
    for k in range(3):
        memory = g.node(f"sum_{k}", "Add", memory, g.linear(f"encoder.layers.{k}", memory, WIDTH, WIDTH))
    for k in range(3):
        x = g.node(f"own_{k}", "Add", x, g.linear(f"decoder.layers.{k}.own", x, WIDTH, WIDTH))
        x = g.node(f"cross_{k}", "Add", x, g.linear(f"decoder.layers.{k}.cross", memory, WIDTH, WIDTH))
    return rows(g, x, "x", "z")


ENTROPY = "{type: softmax_cross_entropy, logits: y, labels: label}"
SQUARE = "{type: mean_squared, prediction: y, target: t}"
MODELS: Mapping[str, tuple[Callable[[], Source], dict[str, int], str]] = {
    "gpt": (lambda: source_of(gpt(64, 2, 4, 250, 16)), {"seq": 8}, ENTROPY),
    "dlrm": (lambda: source_of(dlrm(4, 500, 8, 13, 16)), {}, "loss"),
    "towers": (towers, {}, SQUARE),
    "skips": (skips, {}, SQUARE),
    "attending": (attending, {}, SQUARE),
}


def search_of(name: str, folder: Path, ranks: int) -> Search:
    made, sizes, loss = MODELS[name]
    plan = folder / "train.yaml"
    plan.write_text(f"ranks: 1\ntrain:\n  loss: {loss}\n  optimizer: {{type: sgd, lr: 0.1}}\n  batch: {RECORDS}\n")
    base, model = base_of(plan, made())
    return Search.of(model, "model.onnx", Request(ranks, Fixed(), base, machine(), sizes))


TAKEN = [(2, "1f1b", 1), (3, "zb_h1", 1), (4, "1f1b", 1), (4, "interleaved", 2), (6, "zb_h1", 1), (6, "zbv", 2)]
"""Stages, a schedule for them, and how many of them each rank has: every count, and every schedule with a count of each kind."""


@pytest.mark.parametrize("name", MODELS)
def test_a_search_may_take_every_schedule(name: str, tmp_path: Path) -> None:
    search = search_of(name, tmp_path, 6)
    for count, schedule, each in TAKEN:
        tasks = search.proposal(Candidate(Degrees(stages=count // each), 4, schedule, stages_each=each)).done.tasks
        assert tasks is not None
        assert tasks.schedule.name == schedule


@pytest.mark.parametrize("name", ["towers", "attending"])
def test_what_a_search_finds_in_stages_trains_alike(name: str, tmp_path: Path) -> None:
    search = search_of(name, tmp_path, 3)
    text = search.proposal(Candidate(Degrees(stages=3), 4, "1f1b")).text
    draw = np.random.default_rng(2).standard_normal
    ports = [str(value.name) for value in search.program.model.graph.inputs]
    steps = [{port: draw((RECORDS, WIDTH), np.float32) for port in (*ports, "t")} for _ in range(2)]
    same_training(MODELS[name][0], text, tmp_path / "run", steps, rtol=1e-4, atol=1e-4)


def test_what_has_fewer_parts_than_stages_is_refused_with_what_it_has(tmp_path: Path) -> None:
    search = search_of("skips", tmp_path, 16)
    with pytest.raises(CompileError) as caught:
        search.proposal(Candidate(Degrees(stages=16), 4, "1f1b"))
    assert (
        str(caught.value)
        == "model.onnx: 16 stages: the model has 9 parts with weights, one behind the other\n  help: take 9 stages or fewer"
    )


@pytest.mark.parametrize("name", ["towers", "skips", "attending", "dlrm"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_heaviest_stage_is_as_light_as_any_cuts_make_it(name: str, count: int) -> None:
    """Of all frontiers of the units, none has lighter stages beyond a tenth of an equal cost and what lies between units."""
    program = typed(MODELS[name][0](), count)
    stages = balanced_stages(program, count)
    assert len(stages) == count
    least = max(lightest(program, stages), 1.1 / count)
    assert max(stage.cost for stage in stages) <= 1.05 * least


def test_stages_of_random_networks_are_as_even_as_their_branches_allow() -> None:
    """In one order of their units a tenth of them is further off; what is left are orders by which too much would go over a cut."""
    off = []
    for seed, count in itertools.product(range(40), (2, 3, 4)):
        program = typed(network(seed)[1], count)
        stages = balanced_stages(program, count)
        if len(stages) == count:
            off.append(max(stage.cost for stage in stages) / max(lightest(program, stages), 1.1 / count))
    assert len(off) > 100
    assert sum(one > 1.05 for one in off) <= 0.04 * len(off)


def lightest(program: Typed, stages: list[Stage]) -> float:
    """The least cost of the heaviest of as many stages, over all frontiers of their units."""
    units = [unit for stage in stages for unit in stage.units]
    unit_of = {path: k for k, unit in enumerate(units) for path in unit.paths}
    floating, needs = floats(program), [0] * len(units)
    sources: dict[object, int] = {}
    for node in program.model.graph:
        parts = program.paths[node].split(".")
        own = next(
            (unit_of[path] for end in range(len(parts)) if (path := ".".join(parts[: end + 1])) in unit_of), None
        )
        read = 0
        for value in program.reads[node]:
            read |= sources.get(value, 0)
        if own is not None:
            needs[own] |= read & ~(1 << own)
        made = 1 << own if own is not None else 0 if node in floating else read
        sources.update(dict.fromkeys(node.outputs, made))
    frontiers = {0}
    for _ in units:
        frontiers |= {f | 1 << k for f in frontiers for k, need in enumerate(needs) if not need & ~f}
    costs = {f: sum(unit.cost for k, unit in enumerate(units) if f >> k & 1) for f in frontiers}
    best = {0: 0.0}
    for _ in stages:
        pairs = itertools.product(best, frontiers)
        following: dict[int, float] = {}
        for before, after in pairs:
            if not before & ~after:
                heaviest = max(best[before], costs[after] - costs[before])
                following[after] = min(heaviest, following.get(after, heaviest))
        best = following
    return best[(1 << len(units)) - 1]
