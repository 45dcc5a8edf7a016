"""What ranks do alike is stored once: rank files, dumps and manifest do not grow with the ranks along an axis that repeats the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partc.cli.output.stats import all_rank_stats
from partc.compiler import compile_model
from partc.compiler.cost.memory import memory_of_ranks
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.layout.layout import Layout
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.tasks.local_forms import item_of
from partc.runtime import load_local
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.format import DOMAIN, MANIFEST, RANK_CONSTANT, Manifest, Port
from partc.runtime.artifact.graph.rank_constants import bound, is_rank_constant
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.ranks import Grid, order_text, ranks_of
from partc.runtime.artifact.tensors.boxes import divisor
from partc.runtime.checker.across.constants import check_constants
from partc.runtime.checker.check import check
from partc.runtime.errors import ArtifactError
from small_training import PERCEPTRON, compiled, with_numbers
from training_equivalence import from_text

GRID = """ranks: RANKS
mesh: {dp: DATA, tp: 2}
symbols: {batch: {divisor: DATA}}
dataset: {x: [dp, null], t: [dp, null]}
sharding: {one: {parameters: {first: [null, tp]}}, two: {parameters: {second: [tp, null]}}}
"""
LOSS = "loss: {type: mean_squared, prediction: y, target: t}"
PERCEPTRON_OF_32 = PERCEPTRON.replace("[batch, 6]", "[batch, 64]").replace("6, 5", "64, 64").replace("5", "64")


def trained(out: Path, ranks: int, optimizer: str) -> Path:
    """A perceptron as dp x tp with tp 2, whose gradients are clipped by their norm."""
    parts = 2 if "accumulate" in optimizer else 1
    plan = GRID.replace("RANKS", str(ranks)).replace("divisor: DATA", f"divisor: {ranks // 2 * parts}")
    plan = plan.replace("DATA", str(ranks // 2))
    return compiled(
        out, PERCEPTRON_OF_32, "", f"{plan}train: {{{LOSS}, optimizer: {optimizer}, clip: {{norm: 1.5}}}}\n"
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        "{type: adam, lr: 0.1}",
        "{type: adam, lr: 0.1, shard: dp}",
        "{type: adam, lr: 0.1, shard: dp}, accumulate: 2, on_nonfinite: skip",
    ],
)
def test_files_and_manifest_do_not_grow_with_data_parallel_ranks(tmp_path: Path, optimizer: str) -> None:
    few, many = (trained(tmp_path / str(ranks), ranks, optimizer) for ranks in (8, 64))
    for folder in (few, many):
        # The loss goes to rank 0: of its tensor parallel coordinate it is one program, the others are a second one.
        assert len([*folder.glob("rank_*.onnx")]) == 3
        assert len([*(folder / "ir").glob("rank_*.ir")]) == 3
    sizes = {
        name: [sum(path.stat().st_size for path in folder.glob(name)) for folder in (few, many)]
        for name in (MANIFEST, "ir/*", "rank_*.onnx", "evaluate_*.onnx", "ir/evaluate/*")
    }
    assert all(large <= 1.25 * small for small, large in sizes.values()), sizes
    assert sum(path.stat().st_size for path in (many / "weights").glob("*")) == sum(
        path.stat().st_size for path in (few / "weights").glob("*")
    )


def test_64_ranks_that_share_updates_are_proven(tmp_path: Path) -> None:
    checked = check(trained(tmp_path / "build", 64, "{type: adam, lr: 0.1, shard: dp}"))
    assert checked.violations == []
    assert checked.ranks == 64
    assert checked.state.copies > 0


@given(st.lists(st.integers(0, 40), unique=True))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_ranks_are_read_as_they_are_written(ranks: list[int]) -> None:
    assert ranks_of(order_text(ranks)) == ranks
    assert ranks_of(order_text(sorted(ranks))) == sorted(ranks)


@pytest.mark.parametrize("text", ["3-", "a", "0-99999999", "0-4:0", "1-2-3", "0-900000,0-900000"])
def test_texts_that_name_no_ranks(text: str) -> None:
    with pytest.raises(ValueError, match=r"ranks|zero"):
        ranks_of(text)


def test_rows_of_ranks_are_short() -> None:
    assert order_text(range(4096)) == "0-4095"
    assert order_text(range(3, 4096, 8)) == "3-4091:8"
    assert order_text([4, 0, 1, 2, 9, 11]) == "4,0-2,9,11"


@pytest.mark.parametrize("cuts", [((0, 2), ()), ((1,), (2,)), ((2, 0), (1,)), ((), ())])
def test_boxes_by_layout_are_those_of_the_layout(cuts: tuple[tuple[int, ...], ...]) -> None:
    layout, shape = Layout((2, 3, 4), cuts), (48, 72)
    port = Port(name="x", type="tensor(float)", shape=[*shape], ranks=list(range(24)), boxes=Grid(layout.mesh, cuts))
    again = Port.model_validate_json(port.model_dump_json())
    assert '"0-23"' in port.model_dump_json()
    assert again == port
    assert again.boxes == list(port.boxes or ())
    for rank in range(24):
        box = [
            (size * begin // of, size * end // of)
            for (begin, end, of), size in zip(again.box(rank) or (), shape, strict=False)
        ]
        assert tuple(box) == layout.box(rank, shape)


@pytest.mark.parametrize("cuts", [((0, 2), ()), ((1,), (2,)), ((2, 0), (1,)), ((), ()), ((2,), ())])
@pytest.mark.parametrize("part", [(), ((2, 10, 12), (0, 5, 5))])
def test_shards_of_a_grid_once_each(cuts: tuple[tuple[int, ...], ...], part: tuple[tuple[int, int, int], ...]) -> None:
    grid = Grid((2, 3, 4), cuts, part)
    boxes = list(grid)
    first = {str(box): place for place, box in reversed([*enumerate(boxes)])}
    assert {str(box): place for place, box in grid.distinct()} == first
    assert len([*grid.distinct()]) == len(first)
    assert [divisor(grid, axis) for axis in (0, 1)] == [divisor(boxes, axis) for axis in (0, 1)]


def test_boxes_of_a_part_of_a_packed_tensor() -> None:
    grid = Grid((2,), ((0,),), ((4, 8, 12),))
    assert [grid[k] for k in range(2)] == [[[2, 3, 6]], [[3, 4, 6]]] == [*grid]


@pytest.mark.parametrize(
    "boxes",
    [
        {"mesh": [2]},
        {"mesh": [2], "cuts": [[1]]},
        {"mesh": [2], "cuts": [[0], [0]]},
        {"mesh": [1 << 30], "cuts": [[0]]},
        {"mesh": [2], "cuts": [[0]], "part": [[0, 0, 1]]},
        {"mesh": [2], "cuts": [[0]], "more": 1},
        [[1, 2]],
        3,
    ],
)
def test_boxes_that_are_none(boxes: object) -> None:
    with pytest.raises(ValueError, match="boxes"):
        Port.model_validate({"name": "x", "type": "tensor(float)", "shape": [4], "ranks": [0, 1], "boxes": boxes})


def broken(folder: Path, **changed: object) -> tuple[Manifest, onnx.ModelProto]:
    """A rank file whose first constant by rank has another attribute."""
    manifest = open_artifact(folder).manifest
    model = onnx.load_model(folder / manifest.program(1), load_external_data=False)
    node = next(filter(is_rank_constant, model.graph.node))
    kept = [one for one in node.attribute if one.name not in changed]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(onnx.helper.make_attribute(name, one) for name, one in changed.items() if one is not None)
    return manifest, model


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"items": ["place +"]}, "is not an expression"),
        ({"items": ["other"]}, "is not bound"),
        ({"items": ["place/2"]}, "not a whole number"),
        ({"items": ["place", "place"]}, "2 items"),
        ({"items": ["2**100"]}, "too large"),
        ({"group": "nobody"}, "group 'nobody'"),
        ({"dtype": 8}, "not a type of numbers"),
        ({"items": None}, "'items' is missing"),
    ],
)
def test_constants_by_rank_that_are_not_sound(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    folder = trained(tmp_path / "build", 8, "{type: adam, lr: 0.1, shard: dp}")
    manifest, model = broken(folder, **changed)
    (found, *_) = check_constants(manifest, {1: model, 3: model})
    assert message in found.fact
    assert RANK_CONSTANT in found.node
    with pytest.raises(ArtifactError, match=RANK_CONSTANT):
        bound(model, manifest.groups_of(3), 3, "rank_0001.onnx")


def test_a_program_is_read_with_the_constants_of_its_rank(tmp_path: Path) -> None:
    folder = trained(tmp_path / "build", 8, "{type: adam, lr: 0.1, shard: dp}")
    artifact = open_artifact(folder)
    model = onnx.load_model(folder / artifact.manifest.program(3), load_external_data=False)
    names = [node.output[0] for node in model.graph.node if is_rank_constant(node)]
    assert names
    found = {}
    for rank in (3, 5):
        assert artifact.manifest.program(rank) == artifact.manifest.program(3)
        read = artifact.model(rank)
        assert not any(node.domain == DOMAIN and node.op_type == RANK_CONSTANT for node in read.graph.node)
        found[rank] = {one.name: onnx.numpy_helper.to_array(one) for one in read.graph.initializer if one.name in names}
        assert [*found[rank]] == names
    begins = [name for name in names if name.endswith(".begin")]
    assert begins
    for name in begins:
        assert np.all(found[5][name] == 2 * found[3][name])  # places 2 and 1 of tp = 1


DROPPED = PERCEPTRON_OF_32.replace(
    "hr = Tanh(hs)", "ht = Tanh(hs)\n    [drop] hr = Dropout(ht, ratio, training)"
).replace("> {", ", float ratio = {0.3}, bool training = {1}> {")


@pytest.mark.parametrize("model", [PERCEPTRON_OF_32, DROPPED], ids=["tanh", "dropout"])
def test_laws_that_rules_give_by_shard_are_one_program(tmp_path: Path, model: str) -> None:
    """Where an element of a dropout's mask stands in the batch differs by rank; the nodes that find out do not."""
    plan = "ranks: 16\nsymbols: {batch: {divisor: 16}}\ndataset: data_parallel\n"
    folder = compiled(tmp_path / "build", model, "", f"{plan}train: {{{LOSS}, optimizer: {{type: sgd, lr: 0.1}}}}\n")
    assert len([*folder.glob("rank_*.onnx")]) == 2
    assert "Dropout" in (folder / "ir/step_parallel_begin.ir").read_text() or model == PERCEPTRON_OF_32


@pytest.mark.parametrize(
    ("column", "law"),
    [
        ([0, 16, 32], "16*place"),
        ([5, 6, 7], "place + 5"),
        ([7, 4, 1], "-3*place + 7"),
        ([1.0, 0.0, 0.0, 0.0], "Max(1 - place, 0)"),
        ([2, 7, 7], "-5*Max(1 - place, 0) + 7"),
        ([True, False], "-1*place + 1"),
        ([0.5, 1.0], None),
        ([0, 1, 4], None),
        ([float("inf"), 0.0], None),
        ([float("nan"), 0.0], None),
    ],
)
def test_laws_of_numbers_by_place(column: list[float], law: str | None) -> None:
    assert item_of(column) == law
    for place, number in enumerate(column if law else ()):
        assert parse(law or "")({"place": place}) == number


def test_the_rank_that_adds_a_bias_is_a_law_by_place(tmp_path: Path) -> None:
    """In bfloat16, which is no type of numpy's own: each rank's own constant would be another one to `partc check`."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[batch, 4] x) => (float[batch, 3] y) { [down] y = Gemm (x, w, b) }"""
    plan = """ranks: 2
symbols: {batch: {divisor: 2}}
mesh: {tp: 2}
sharding: {down: rowwise}
precision: {compute: bfloat16, loss_scale: none}
train: {loss: {type: softmax_cross_entropy, logits: y, labels: labels}, optimizer: {type: sgd, lr: 0.1}}
"""
    compile_source(from_text(text, {"w": (4, 3), "b": (3,)}), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    assert check(tmp_path / "build").violations == []
    for path in (tmp_path / "build").glob("*.onnx"):
        assert any(map(is_rank_constant, onnx.load(path).graph.node)), path


def test_ranks_that_do_the_same_have_each_their_own_of_what_is_passed_on(tmp_path: Path) -> None:
    """`z` is an input and an output, on each rank by itself, of ranks whose steps are the same."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[batch, 3] x, float[batch, 5] z) => (float[batch, 3] y, float[batch, 5] z) { [n] y = Neg (x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    plan = "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: {x: [2, 1]}\noutputs: [1, 0]\nplacement: {n: [1, 0]}\n"
    (tmp_path / "plan.yaml").write_text(plan)
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert check(tmp_path / "build").violations == []
    with load_local(tmp_path / "build") as program:
        x, z = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones((4, 5), np.float32)
        made = program(x=x, z=z)
        assert np.array_equal(made["y"], -x)
        assert np.array_equal(made["z"], z)


def test_ranks_that_keep_other_versions_are_not_alike(tmp_path: Path) -> None:
    """Ranks that evaluate by the same steps share what they keep, too; with another version of one tensor a rank is not like them."""
    source = Source(from_proto(with_numbers(PERCEPTRON), Path("model.onnx")))
    plan = f"ranks: 4\nsymbols: {{batch: {{divisor: 4}}}}\ndataset: data_parallel\ntrain: {{{LOSS}, optimizer: {{type: sgd, lr: 0.1}}}}\n"
    program = compile_source(source, parse_plan(plan, "plan.yaml"), tmp_path / "build").program
    first, *others = program.parts[1:]
    assert first.state
    assert {part.share_key for part in others} == {first.share_key}
    assert all(part.state is first.state for part in others)
    one, *rest = first.state
    elsewhere = replace(one, version=replace(one.version, group=one.version.group[:2]))
    assert replace(first, state=(elsewhere, *rest)).share_key != first.share_key
    assert replace(first, scalars=()).share_key != first.share_key


def test_ranks_of_equal_programs_share_a_file_for_estimates(tmp_path: Path) -> None:
    """Their files differ in the shards of weights alone."""
    rules = GRID.replace("RANKS", "4").replace("DATA", "2")
    train = f"train: {{{LOSS}, optimizer: {{type: adam, lr: 0.1}}}}\n"
    artifact = open_artifact(compiled(tmp_path / "build", PERCEPTRON_OF_32, "", rules + train), trust=True)
    shared = artifact.shared()
    files, fewer = ({one.manifest.program(rank) for rank in range(4)} for one in (artifact, shared))
    assert fewer < files
    sizes = {"batch": 8}
    assert memory_of_ranks(shared, sizes) == memory_of_ranks(artifact, sizes)
    assert all_rank_stats(shared, sizes) == all_rank_stats(artifact, sizes)
