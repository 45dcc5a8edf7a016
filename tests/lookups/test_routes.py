"""Experts that ranks share out: tokens go to the ranks of their experts and come back, or each rank computes its experts' part of all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_text import write
from click.testing import CliRunner
from equivalence import compiled, same_as_whole
from expert_layers import CHOICES, EXPERTS, SGD, WIDTH, batches, kinds, model
from mpi_ranks_case import MPIEXEC, killed_at
from mutated import change_file, texts
from onnx import numpy_helper
from partc.cli.commands.verify import command as verify
from partc.compiler.cost.memory import rank_memory
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.runtime import load_local
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import StepError
from rows import of_today
from run_collectives import whole
from run_steps import give_lists
from training_equivalence import run_whole, same_training


def source() -> Source:
    return Source(from_proto(model(), Path("model.onnx")))


def plan(ranks: int, mesh: str, cut: str, axis: str, more: str = "") -> str:
    dataset = f"dataset: {{x: [{cut}, null]{', t: [' + cut + ', null]' if 'train' in more else ''}}}\n" if cut else ""
    said = f"ranks: {ranks}\nmesh: {{{mesh}}}\nsymbols: {{batch: {{divisor: {max(ranks, 4)}}}}}\n"
    return f"{said}{dataset}outputs: sharded\nexperts: {{axis: {axis}}}\n{more}"


CASES = [
    (3, "ep: 3", "", "ep", "", {"AllReduce": 1}),
    (6, "dp: 3, ep: 2", "[dp, ep]", "dp", "", {"Route": 1, "Return": 1}),
    (2, "dp: 2", "dp", "dp", "pipeline: {microbatches: 2}\n", {"Route": 2, "Return": 2}),
]


@pytest.mark.parametrize(("ranks", "mesh", "cut", "axis", "more", "moved"), CASES)
def test_outputs_are_those_of_one_rank(
    ranks: int, mesh: str, cut: str, axis: str, more: str, moved: dict[str, int]
) -> None:
    program = same_as_whole(model(), plan(ranks, mesh, cut, axis, more), *batches(12, 24), rtol=1e-5, atol=1e-6)
    assert kinds(program) == moved


TRAINED = [
    (3, "ep: 3", "", "ep", "", {"AllReduce": 2}),
    (4, "dp: 2, ep: 2", "dp", "ep", "", {"AllReduce": 4}),
    (4, "dp: 2, ep: 2", "[dp, ep]", "ep", "", {"Route": 2, "Return": 2, "AllReduce": 3}),
    (4, "dp: 4", "dp", "dp", ", accumulate: 2", {"Route": 4, "Return": 4, "AllReduce": 3}),
    (2, "dp: 2", "dp", "dp", "recompute", {"Route": 4, "Return": 4, "AllReduce": 3}),
    (8, "pp: 2, dp: 2, tp: 2", "dp", "dp", "stages", {"Route": 4, "Return": 4, "AllReduce": 8, "Send": 17}),
]


@pytest.mark.parametrize(("ranks", "mesh", "cut", "axis", "more", "moved"), of_today(TRAINED, 2))
def test_training_is_that_of_one_rank(
    ranks: int, mesh: str, cut: str, axis: str, more: str, moved: dict[str, int], tmp_path: Path
) -> None:
    """Gradients of experts are complete on their ranks, and the way back of a Route is a Return of the same counts."""
    steps = [
        {**one, "t": np.random.default_rng(k).standard_normal((len(one["x"]), 4)).astype(np.float32)}
        for k, one in enumerate(batches(24, 48, 24))
    ]
    train = SGD[:-2] + more * (more[:1] == ",") + "}\n"
    said = plan(ranks, mesh, cut, axis, train).replace("outputs: sharded\n", "").replace("divisor: 4", "divisor: 8")
    said += "sharding: {l0_up: colwise, l0_down: rowwise}\n" if more == "stages" else ""
    if more == "stages":
        said += (
            "placement: {first: {pp: 0}, 'l0_*': {pp: 0}, head: {pp: 1}}\npipeline: {microbatches: 2, schedule: 1f1b}\n"
        )
    said += 'pipeline: {microbatches: 2, recompute: ["l0_*"]}\n' if more == "recompute" else ""
    whole = run_whole(source(), "ranks: 1\nsymbols: {batch: {divisor: 8}}\n" + SGD, steps)
    program = same_training(source, said, tmp_path / "a", steps, rtol=1e-5, atol=1e-5, whole=whole)
    assert kinds(program) == moved


def forced(weight: Array) -> onnx.ModelProto:
    """The model with other weights of its router, and features that are all above 0."""
    proto = model()
    for one in proto.graph.initializer:
        if one.name == "l0_router_weight":
            one.CopyFrom(numpy_helper.from_array(weight.astype(np.float32), one.name))
        if one.name == "first_weight":
            one.CopyFrom(numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), one.name))
    return proto


@pytest.mark.parametrize("what", ["all tokens to two experts", "ties"])
def test_any_routing_is_exact(what: str) -> None:
    """Of all tokens on two experts three ranks of four get no row, and of equal logits the first experts are chosen."""
    weight = np.zeros((WIDTH, EXPERTS))
    if what != "ties":
        weight[:, 4:6] = 9
    steps = [{"x": np.abs(one["x"])} for one in batches(4, 24)]
    same_as_whole(forced(weight), plan(4, "dp: 4", "dp", "dp"), *steps, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_bits_of_one_rank(tmp_path: Path) -> None:
    """They are those of one product with its expert's matrix, whichever rank it is on and whichever rows are with it."""
    (step,), found = batches(16), []
    for name, said in (("one", "ranks: 1\n"), ("four", plan(4, "dp: 4", "dp", "dp"))):
        compiled(model(), said, tmp_path / name)
        with load_local(tmp_path / name) as ranks:
            found.append(ranks(step)["y"])
    np.testing.assert_array_equal(*found)


DROPPED = [
    (2, "dp: 2", "dp", "dp", 2),
    (4, "dp: 2, ep: 2", "[dp, ep]", "ep", 4),
    (4, "dp: 2, ep: 2", "dp", "ep", 2),
    (3, "ep: 3", "", "ep", 1),
    (1, "ep: 1", "", "ep", 1),
]
"""Ranks, mesh, axes of the tokens and of the experts, and the number of shards of the tokens."""


def dropping(said: str, capacity: float) -> str:
    """A plan whose experts have a capacity."""
    return said.replace("experts: {axis: ", f"experts: {{capacity: {capacity}, axis: ")


def with_capacity(x: Array, shards: int, capacity: float) -> tuple[Array, int]:
    """The model's output in numpy, where each expert takes the first ceil(capacity k n / E) rows of a shard; and how many are dropped."""
    weight = {one.name: numpy_helper.to_array(one).astype(np.float64) for one in model().graph.initializer}
    outputs, dropped = [], 0
    for tokens in np.split(x.astype(np.float64) @ weight["first_weight"], shards):
        logits = tokens @ weight["l0_router_weight"]
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, :CHOICES]
        best = np.exp(np.take_along_axis(logits, chosen, 1))
        room, total = np.full(EXPERTS, math.ceil(capacity * chosen.size / EXPERTS)), np.zeros_like(tokens)
        for token, choice in np.ndindex(chosen.shape):
            expert = chosen[token, choice]
            dropped += room[expert] == 0
            if room[expert]:
                room[expert] -= 1
                inner = np.tanh(tokens[token] @ weight["l0_up_weight"][expert] + weight["l0_bias"][expert])
                total[token] += inner @ weight["l0_down_weight"][expert] * best[token, choice] / best[token].sum()
        outputs.append(np.tanh(total) @ weight["head_weight"])
    return np.concatenate(outputs), dropped


@pytest.mark.parametrize(("ranks", "mesh", "cut", "axis", "shards"), of_today(DROPPED, 2))
def test_rows_above_a_capacity_are_dropped(
    ranks: int, mesh: str, cut: str, axis: str, shards: int, tmp_path: Path
) -> None:
    """Each rank drops by its own tokens; a capacity of all experts drops none."""
    for capacity in (1, 1.25, EXPERTS):
        compiled(model(), dropping(plan(ranks, mesh, cut, axis), capacity), tmp_path)
        assert check_artifact(tmp_path) == []
        with load_local(tmp_path) as program:
            for step in batches(12, 24):
                expected, dropped = with_capacity(step["x"], shards, capacity)
                assert bool(dropped) == (capacity < EXPERTS)
                np.testing.assert_allclose(program(step)["y"], expected, rtol=1e-5, atol=1e-5)


def test_a_capacity_is_not_verified(tmp_path: Path) -> None:
    """Before the model is read."""
    (tmp_path / "plan.yaml").write_text(dropping(plan(2, "dp: 2", "dp", "dp"), 1.25))
    ended = CliRunner().invoke(verify, ["none.onnx", "--plan", str(tmp_path / "plan.yaml")])
    assert ": a capacity of experts is not verified\n" in str(ended.exception)


def test_a_capacity_bounds_the_rows_of_a_rank(tmp_path: Path) -> None:
    """Two ranks with 2400 rows each send at most all, 4800, to one; or 250 for each of 6 experts, 3000: inside sessions is as much less."""
    inside = []
    for said in (plan(2, "dp: 2", "dp", "dp"), dropping(plan(2, "dp: 2", "dp", "dp"), 1.25)):
        compiled(model(), said, tmp_path)
        inside.append(rank_memory(open_artifact(tmp_path), 0, {"batch": 2400}).inside)
    assert 0.55 < inside[1] / inside[0] < 0.65


@pytest.mark.parametrize("more", of_today(["", 'pipeline: {microbatches: 1, recompute: ["l0_*"]}\n'], 1))
def test_dropped_rows_have_no_gradient(more: str, tmp_path: Path) -> None:
    """A training is that of one rank whose microbatches are the ranks' shards, and is another without the capacity."""
    steps = [
        {**one, "t": np.random.default_rng(k).standard_normal((len(one["x"]), 4)).astype(np.float32)}
        for k, one in enumerate(batches(24, 48))
    ]
    alone, shared = plan(1, "ep: 1", "", "ep", SGD[:-2] + ", accumulate: 2}\n"), plan(2, "dp: 2", "dp", "dp", SGD)
    plans = [one.replace("outputs: sharded\n", "") for one in (alone, shared + more)]
    whole = run_whole(source(), dropping(plans[0], 1.25), steps)
    same_training(source, dropping(plans[1], 1.25), tmp_path / "a", steps, rtol=1e-5, atol=1e-5, whole=whole)
    with pytest.raises(AssertionError, match="loss"):
        same_training(source, plans[1], tmp_path / "b", steps, rtol=1e-5, atol=1e-5, whole=whole)


SAID = 'group = "all", owners = [OWNERS], rows = 6, row = [2]'


def graphs(ranks: int) -> list[str]:
    """On each rank two Routes; the rows of the first come back doubled, and what came back goes there and back once more."""
    said = SAID.replace("OWNERS", ", ".join(map(str, range(ranks))))
    return [
        f"""rank{k} (float[n, 2] x{k}, int64[n] i{k}, int64[n] j{k}) => (float[n, 2] y{k}, int64[m] e{k}, float[n, 2] u{k})
        <float[n, 2] y, float[n, 2] z, float[n, 2] w, float[m, 2] h, int64[m] e, float[m, 2] d, float[o, 2] g, int64[o] f, float[o, 2] v,
         float[m, 2] q, int64[n] s, int64[n] t, int64[{2 * ranks}] c, int64[{2 * ranks}] b, int64[{2 * ranks}] a>
        {{ h, e, s, c = partc.comm.Route <tag = 0, {said}> (x{k}, i{k})
           g, f, t, b = partc.comm.Route <tag = 1, {said}> (x{k}, j{k})
           a = Neg(c)
           d = Add(h, h)
           z = partc.comm.Return <tag = 2, {said}> (d, s, c)
           v = Neg(g)
           w = partc.comm.Return <tag = 3, {said}> (v, t, b)
           q = partc.comm.Route <tag = 4, {said}> (z, , s, c)
           y = partc.comm.Return <tag = 5, {said}> (q, s, c)
           y{k} = Neg(y)  u{k} = Neg(w)  e{k} = Neg(e) }}"""
        for k in range(ranks)
    ]


def feeds(ranks: int, sizes: tuple[int, ...], experts: Callable[[np.random.Generator, int], Array]) -> dict[str, Array]:
    random, found = np.random.default_rng(len(sizes)), {}
    for k, size in zip(range(ranks), sizes, strict=True):
        found |= {f"x{k}": random.standard_normal((size, 2)).astype(np.float32)}
        found |= {f"i{k}": experts(random, size), f"j{k}": random.integers(0, 6, size)}
    return found


def test_rows_of_a_capacity_go_and_come_back(tmp_path: Path) -> None:
    """Of 12 rows for one expert of 6 two and a half times the mean go, 5; the other rows come back as zeros, and their cotangents stay."""
    changed = [text.replace("row = [2]> (x", "row = [2], capacity = [5, 2]> (x") for text in graphs(3)]
    write(tmp_path, changed, groups=whole(3))
    assert check_artifact(tmp_path) == []
    fine = feeds(3, (12, 12, 12), lambda random, count: np.full(count, 4))
    with load_local(tmp_path) as program:
        found = program(fine)
    np.testing.assert_array_equal(found["y1"][:5], -2 * fine["x1"][:5])
    np.testing.assert_array_equal(found["y1"][5:], 0)
    np.testing.assert_array_equal(found["e2"], np.full(15, 0))
    assert found["e0"].size == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_rows_go_and_come_back(ranks: int, tmp_path: Path) -> None:
    """Any number of rows, none on some ranks, and all for the experts of one; experts are counted from a rank's first."""
    write(tmp_path, graphs(ranks), groups=whole(ranks))
    assert check_artifact(tmp_path) == []
    with load_local(tmp_path) as program:
        for size, law in ((4, None), (0, None), (7, 5), (7, None)):
            given = feeds(
                ranks,
                (size,) * ranks,
                lambda random, count, law=law: random.integers(0, 6, count) if law is None else np.full(count, law),
            )
            found = program(given)
            own = [
                [one for j in range(ranks) for one in np.sort(given[f"i{j}"]) if one // (6 // ranks) == k]
                for k in range(ranks)
            ]
            for k in range(ranks):
                np.testing.assert_array_equal(found[f"y{k}"], -2 * given[f"x{k}"])
                np.testing.assert_array_equal(found[f"u{k}"], given[f"x{k}"])
                np.testing.assert_array_equal(found[f"e{k}"], -(np.array(own[k], np.int64) - k * (6 // ranks)))
        row = 8
        for k, rank in enumerate(program._ranks):
            first = next(iter(rank._program.messages.lookups.values()))
            came = [np.count_nonzero(given[f"i{j}"] // (6 // ranks) == k) for j in range(ranks) if j != k]
            assert first.moved.received >= row * sum(came)


def test_an_expert_that_is_none_is_refused_by_all(tmp_path: Path) -> None:
    """The step is given up on all ranks, and the next one is right."""
    write(tmp_path, graphs(3), groups=whole(3))
    fine = feeds(3, (4, 4, 4), lambda random, count: random.integers(0, 6, count))
    with load_local(tmp_path, on_error="recover") as program:
        for wrong in (6, -1):
            bad = {**fine, "i1": np.array([0, 5, wrong, 1])}
            with pytest.raises(
                StepError, match=f"'net.h': row 2 on rank 1 is for expert {wrong}\n.*there are 6 experts"
            ):
                program(bad)
            np.testing.assert_array_equal(program(fine)["y1"], -2 * fine["x1"])


def test_a_rank_that_fails_between_a_route_and_its_return_gives_zeros(tmp_path: Path) -> None:
    """All give the step up, none waits for the rows of the others, and the next step is right."""
    changed = [
        text.replace(") =>", f", int64[6] p{k}) =>", 1).replace("a = Neg(c)", f"a = Gather(c, p{k})")
        for k, text in enumerate(graphs(3))
    ]
    write(tmp_path, changed, groups=whole(3))
    fine = feeds(3, (4, 4, 4), lambda random, count: random.integers(0, 6, count))
    fine |= {f"p{k}": np.zeros(6, np.int64) for k in range(3)}
    with load_local(tmp_path, on_error="recover") as program:
        with pytest.raises(StepError, match="indices element out of data bounds"):
            program({**fine, "p1": np.full(6, 99)})
        np.testing.assert_array_equal(program(fine)["y2"], -2 * fine["x2"])


GIVEN = """
random = np.random.default_rng(3)
given = {f"{letter}{k}": random.integers(0, 6, 5) for letter in "ij" for k in range(3)}
given |= {f"x{k}": np.ones((5, 2), np.float32) for k in range(3)}
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python")
def test_a_rank_killed_within_a_route_ends_the_job(tmp_path: Path) -> None:
    """It has told how many rows come, and sends none: the others do not wait for them."""
    give_lists(write(tmp_path, graphs(3), groups=whole(3)))
    step, action = killed_at(tmp_path, tmp_path / "board", GIVEN)[1]
    assert step == 2
    assert action.startswith("Route")


@pytest.mark.parametrize(
    ("rank", "old", "new", "fact"),
    [
        (0, "(d, s, c)", "(d, t, c)", "asked, and on rank"),
        (1, "(d, s, c)", "(d, t, b)", "and on rank 0 what Route 'Route.h'"),
        (None, "(d, s, c)", "(d, t, b)", "its rows 'd' did not come by Route 'Route.g'"),
        (None, "= Neg(y)", "= Neg(d)", "of the shape ['n', 2] of rows as they came, whose number only a run tells"),
        (None, "(d, s, c)", "(d, c, s)", "and should be a tensor(int64) [4]"),
        (None, "(d, s, c)", "(d, s, b)", "it reads what Route"),
        (
            None,
            "d = Add(h, h)",
            "d = Add(h, g)",
            "it reads what came by Route 'Route.h' of group 'all', tag 0, and what came by Route 'Route.g'",
        ),
        (1, "(z, , s, c)", "(z, , t, b)", "and on rank 0 what Route 'Route.h'"),
        (None, "(z, , s, c)", "(z, , s, a)", "is not the counts of a Route"),
        (0, "owners = [0, 1]", "owners = [1, 0]", "its owners are [1, 0], and each of the 2 ranks has experts"),
        (
            0,
            'tag = 2, group = "all", owners = [0, 1], rows = 6',
            'tag = 2, group = "all", owners = [0, 1], rows = 8',
            "owners, givers, rows, row or capacity",
        ),
        (
            0,
            "row = [2]> (x0, i0)",
            "row = [2], capacity = [5, 4]> (x0, i0)",
            "owners, givers, rows, row or capacity",
        ),
        (None, "row = [2]> (x", "row = [2], capacity = [3, 4]> (x", "its capacity is [3, 4]: two numbers are needed"),
        (None, "rows = 6", "rows = 7", "7 rows do not divide into equal runs for 2 owners"),
        (None, "row = [2]", "row = [3]", "row"),
        (0, "(d, s, c)", "(d, s)", "it leaves out its places, its counts or its ids"),
        (0, "(x0, i0)", "(, i0)", "it leaves out its rows"),
    ],
)
def test_wrong_routes_are_refused(tmp_path: Path, rank: int | None, old: str, new: str, fact: str) -> None:
    changed = [one.replace(old, new) if rank in (None, k) else one for k, one in enumerate(graphs(2))]
    assert changed != graphs(2)
    write(tmp_path, changed, groups=whole(2))
    assert fact in "\n".join(map(str, check_artifact(tmp_path)))


HALVES = {
    "l0_gate, l0_lift = Split <axis = -1, num_outputs = 2> (l0_h)": "Mixtral",
    "l0_gate = Slice (l0_h, zero, ten, one, two) l0_lift = Slice (l0_h, one, ten, one, two)": "gpt-oss",
}


@pytest.mark.parametrize("halves", HALVES, ids=HALVES.values())
def test_columns_of_rows_are_theirs(halves: str, tmp_path: Path) -> None:
    """As the gate and the other half of a first product are taken: forward, and back in the gradient."""
    proto, port = model(), "float[batch, 10]"
    text = f"""<ir_version: 10, opset_import: ["" : 21]> main ({port} l0_h) => ({port} l0_swapped)
        <int64[1] zero = {{0}}, int64[1] ten = {{10}}> {{ {halves} l0_swapped = Concat <axis = 1> (l0_lift, l0_gate) }}"""
    part = onnx.parser.parse_model(text).graph
    at = next(k for k, node in enumerate(proto.graph.node) if node.output[0] == "l0_a")
    proto.graph.node[at].input[0] = "l0_swapped"
    for node in reversed(part.node):
        proto.graph.node.insert(at, node)
    proto.graph.initializer.extend(part.initializer)
    compiled(proto, plan(2, "dp: 2", "dp", "dp", SGD).replace("outputs: sharded\n", ""), tmp_path)
    assert check_artifact(tmp_path) == []


def test_a_rank_without_a_route_is_named(tmp_path: Path) -> None:
    compiled(model(), plan(2, "dp: 2", "dp", "dp"), tmp_path)

    def alone(proto: onnx.ModelProto) -> None:
        """A rank keeps its rows to itself."""
        node = next(node for node in proto.graph.node if node.op_type == "Return")
        node.domain, node.op_type = "", "Identity"
        del node.input[1:], node.attribute[:]

    manifest = json.loads((tmp_path / "manifest.json").read_text())
    change_file(
        tmp_path,
        sorted(name for name in manifest["files"] if name.startswith("rank_") and name.endswith("onnx"))[-1],
        alone,
    )
    assert "Return of 'l0_d4.product.return', has no node on rank" in texts(tmp_path)


BETWEEN = "'l0_act' takes rows of experts otherwise than 'l0_biased' gives them\n.*with the rank of its expert"
REFUSED = [
    ("experts: {axis: dp}\nsharding: {l0_act: replicate}", BETWEEN),
    ("experts: {axis: dp}\nplacement: {'l0_*': 0}", "runs on rank 0 alone .*\n.*to the 2 ranks along 'dp'"),
    ("experts: {axis: ep}", "'ep' is not an axis of the mesh\n.*the mesh has the axes dp"),
    (
        "experts: {axis: dp, capacity: 0.5}",
        "plan.yaml:6.*a capacity of 0.5\n.*has room for its mean number of rows.*\n.*write a number from 1 on",
    ),
    ("experts: {capacity: 1.5}", "plan.yaml:6.*'axis' is missing\n.*write experts: {axis: dp}, an axis of the mesh"),
    (
        "experts: {axis: dp, capacity: 1.5}\ngenerate: {slots: 2, length: 80}",
        "plan.yaml:6: a capacity of experts beside 'generate'\n.*depends on the other rows.*\n.*leave out 'capacity'",
    ),
    ("experts: {axis: dp, capacity: many}", "plan.yaml:6.*capacity.*\n(.*\n)*.*write capacity: 1.25"),
    ("experts: {head: {axis: dp}}", "plan.yaml:6.*'head'.*product with the matrices of experts\n.*\n.*'l0_up'"),
    ("experts: {nothing: {axis: dp}}", "plan.yaml:6: 'nothing' matches no module or node"),
]


@pytest.mark.parametrize(("said", "text"), REFUSED)
def test_wrong_experts_are_refused(said: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=text):
        compiled(model(), plan(2, "dp: 2", "dp", "dp").replace("experts: {axis: dp}", said), tmp_path / "a")


def test_tokens_that_ranks_share_are_not_sent_by_each(tmp_path: Path) -> None:
    """Gradients of experts would count them twice."""
    said = "ranks: 4\nmesh: {dp: 4}\nsymbols: {batch: {divisor: 4}}\ndataset: {x: [2, 1]}\nexperts: {axis: dp}\n"
    text = "plan.yaml:5: the tokens of 'l0_up' are cut into 2 along 'dp', and its experts into 4"
    with pytest.raises(CompileError, match=text):
        compiled(model(), said, tmp_path / "a")


def test_an_axis_shards_experts_or_their_columns(tmp_path: Path) -> None:
    said = "ranks: 2\nmesh: {tp: 2}\nexperts: {axis: tp}\nsharding: {l0_up: colwise}\n"
    with pytest.raises(CompileError, match="colwise, but the experts of 'l0_up' are shared out along the same axis"):
        compiled(model(), said, tmp_path / "a")


def test_experts_that_an_axis_does_not_divide_are_refused(tmp_path: Path) -> None:
    text = "plan.yaml:6: the 12 experts of 'l0_up.*' cannot be shared out to the 5 ranks of the axis 'dp'\n.*12 is not divisible by 5"
    with pytest.raises(CompileError, match=text):
        compiled(model(), plan(5, "dp: 5", "dp", "dp"), tmp_path / "a")
