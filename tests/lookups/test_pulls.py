"""Tables whose rows are pulled from the ranks that have them: where ids are cut by the same axes, or the plan says so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, same_as_whole
from mutated import change_file
from onnx import numpy_helper
from partc.compiler.emit.annotated import annotated
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.checker.check import check_artifact
from partc.runtime.program.steps import Segment
from run_steps import steps_of

ROWS, WIDTH = 24, 6
TEXT = f"""<ir_version: 10, opset_import: ["" : 18]>
bag (int64[batch, 3] ids, float[batch, 3] extra) => (float[batch, 4] y)
<float[{ROWS}, {WIDTH}] table, float[{WIDTH}, 4] w> {{
  [embed] rows = Gather(table, ids)
  three = Constant <value_ints = [1]>()
  bag = ReduceSum <keepdims = 0> (rows, three)
  [head] h = MatMul(bag, w)
  one = Constant <value_ints = [1]>()
  sums = ReduceSum <keepdims = 1> (extra, one)
  y = Add(h, sums)
}}"""


def model(rows: int = ROWS) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT.replace(f"[{ROWS}, ", f"[{rows}, "))
    random = np.random.default_rng(3)
    for name, shape in (("table", (rows, WIDTH)), ("w", (WIDTH, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape, np.float32), name))
    return proto


def steps(*batches: int) -> list[dict[str, np.ndarray]]:
    """Batches with duplicates within a rank and over ranks, and ids from the end."""
    found = []
    for batch in batches:
        random = np.random.default_rng(batch)
        ids = random.integers(-ROWS, ROWS, (batch, 3)) // 2
        found.append({"ids": ids, "extra": random.standard_normal((batch, 3)).astype(np.float32)})
    return found


def kinds(program: Complete) -> Counter[str]:
    return Counter(event.op_type for event in program.events)


def plan(ranks: int, sharding: str, more: str = "") -> str:
    return f"ranks: {ranks}\nsymbols: {{batch: {{divisor: {ranks}}}}}\ndataset: data_parallel\noutputs: cut\n{more}sharding: {sharding}\n"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (2, "{embed: pull}"),
        (3, "{embed: {in: [[RANKS, 1], [RANKS, 1]]}}"),
        (6, "{embed: {parameters: {table: [RANKS, 1]}}}"),
    ],
)
def test_rows_are_pulled_where_ids_are_cut_as_they_are(ranks: int, said: str) -> None:
    program = same_as_whole(
        model(), plan(ranks, said.replace("RANKS", str(ranks))), *steps(2 * ranks, 5 * ranks), rtol=1e-6, atol=1e-6
    )
    assert kinds(program) == {"Pull": 1}
    (event,) = program.events
    least = {
        2: "16*Min(24, 3*batch/2)",
        3: "64*Min(24, batch)/3",
        4: "24*Min(24, 3*batch/4)",
        6: "80*Min(24, batch/2)/3",
    }
    assert event.bytes == least[ranks], "(P-1)/P u (8 + 4 D), of u distinct ids"


def test_the_forward_value_is_exact() -> None:
    """Rows are copied, not added up."""
    proto = model()
    del proto.graph.node[1:], proto.graph.output[:], proto.graph.input[1:]
    proto.graph.output.append(onnx.helper.make_tensor_value_info("rows", 1, ["batch", 3, WIDTH]))
    given = [{"ids": one["ids"]} for one in steps(4, 8)]
    same_as_whole(proto, plan(4, "{embed: pull}"), *given, rtol=0, atol=0)


@pytest.mark.parametrize("grid", ["{dp: 2, tp: 2}", "{dp: 2, tp: 3}"])
def test_rows_are_cut_over_more_ranks_than_ids(grid: str) -> None:
    """Along the other axis ranks ask the same."""
    ranks = 4 if grid.endswith("2}") else 6
    said = f"ranks: {ranks}\nmesh: {grid}\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: data_parallel\nsharding: {{embed: pull}}\n"
    program = same_as_whole(model(), said, *steps(4, 6), rtol=1e-6, atol=1e-6)
    assert kinds(program)["Pull"] == 1
    assert len(program.events[0].ranks[0]) == ranks


def test_rows_along_one_axis_and_columns_along_another() -> None:
    """The rows of a list's ranks have the same columns; ids are cut by the axis of the rows."""
    said = plan(4, "{embed: {in: [[dp, tp], [dp, null]]}}", "mesh: {dp: 2, tp: 2}\n")
    program = same_as_whole(model(), said, *steps(4, 8), rtol=1e-6, atol=1e-6)
    assert kinds(program)["Pull"] == 1
    assert [event.ranks for event in program.events if event.op_type == "Pull"] == [((0, 2), (1, 3))]


def test_whole_ids_are_pulled_where_the_plan_says_so_and_masked_else() -> None:
    said = "ranks: 3\nsharding: {embed: STYLE}\n"
    assert kinds(same_as_whole(model(), said.replace("STYLE", "pull"), *steps(4), rtol=1e-6, atol=1e-6)) == {
        "Pull": 1,
    }
    masked = same_as_whole(model(), said.replace("STYLE", "rowwise"), *steps(4), rtol=1e-6, atol=1e-6)
    assert "Pull" not in kinds(masked)


def test_the_artifact_is_proven_and_owners_of_other_rows_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    compiled(model(), plan(2, "{embed: pull}"), folder)
    assert check_artifact(folder) == []

    def exchanged(one: onnx.ModelProto) -> None:
        node = next(node for node in one.graph.node if node.op_type == "Pull")
        next(said for said in node.attribute if said.name == "owners").ints[:] = [1, 0]

    for file in {*folder.glob("rank_*.onnx")}:
        change_file(folder, file.name, exchanged)
    (found,) = check_artifact(folder)
    assert "rank 1 is owner 0 of 2, and has rows 1/2 to 1" in str(found)


def test_rows_that_are_no_equal_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="cannot cut 'table' dim 0 \\(25\\) into 2"):
        compiled(model(25), plan(2, "{embed: pull}"), tmp_path / "a")
    with pytest.raises(CompileError, match="pull, but nothing inside looks up rows of a table by ids"):
        compiled(model(), plan(2, "{head: pull}"), tmp_path / "b")


@pytest.mark.parametrize("style", ["pull", "colwise"])
def test_a_style_of_a_pattern_leaves_what_it_does_not_speak_of(tmp_path: Path, style: str) -> None:
    """`*` is the table, and the sums and the product beside it, too."""
    assert kinds(compiled(model(), plan(2, f'{{"*": {style}}}'), tmp_path / "a"))["Pull"] == (style == "pull")


TWO = f"""<ir_version: 10, opset_import: ["" : 18]>
main (int64[batch] a, int64[batch] b) => (float[batch, 4] y)
<float[{ROWS}, {WIDTH}] one, float[{ROWS}, {WIDTH}] two, float[{WIDTH}, 4] w> {{
  [first] rows = Gather(one, a)
  [head] left = MatMul(rows, w)
  [ids] c = Neg(b)
  [second] others = Gather(two, c)
  [tail] right = MatMul(others, w)
  y = Add(left, right)
}}"""


def test_pulls_follow_each_other_and_what_reads_their_rows_is_one_segment(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(TWO)
    random = np.random.default_rng(3)
    for name, shape in (("one", (ROWS, WIDTH)), ("two", (ROWS, WIDTH)), ("w", (WIDTH, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape, np.float32), name))
    feeds = [{"a": random.integers(0, ROWS, size), "b": random.integers(0, ROWS, size)} for size in (4, 6)]
    said = plan(2, "{first: pull, second: pull}")
    same_as_whole(proto, said, *feeds, rtol=1e-6, atol=1e-6)
    compiled(proto, said, tmp_path)
    rank = onnx.load(tmp_path / "rank_0000.onnx", load_external_data=False)
    assert [node.op_type for node in rank.graph.node][:3] == ["Neg", "Pull", "Pull"]
    segments = [step for step in steps_of(rank, "rank_0000.onnx") if isinstance(step, Segment)]
    assert [len(one.nodes) for one in segments] == [1, len(rank.graph.node) - 3]


def test_annotations_alone_say_it(tmp_path: Path) -> None:
    """Specs that cut rows and ids over the same devices, as another tool may write them."""
    written = annotated(compiled(model(), plan(2, "{embed: pull}"), tmp_path / "a"))
    for node in written.graph:
        node.metadata_props.pop("partc.cuts", None)
    source = Source(written)
    program = compile_source(
        source, parse_plan("ranks: 2\nsymbols: {batch: {divisor: 2}}\n", "plan.yaml"), tmp_path / "b"
    ).program
    assert kinds(program)["Pull"] == 1
