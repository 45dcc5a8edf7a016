"""Ids that a table does not have are refused before a step, alike with a table whole and cut, with the input, the record and the id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, same_as_whole
from onnx import numpy_helper
from partc.compiler.errors import CompileError
from partc.runtime import load_local
from partc.runtime.errors import InputError, RankError

TEXT = """
<ir_version: 10, opset_import: ["" : 18]>
agraph (int64[batch, 3] ids, int64[batch] user) => (float[batch, 3, 4] y, float[batch, 4] z)
<float[12, 4] table, float[6, 4] small, int64[3] columns = {1, -1, 1}, int64[1] flat = {-1}>
{
    first = Identity(ids)
    some = Gather<axis = 1>(first, columns)
    y = Gather(table, some)
    column = Reshape(user, flat)
    z = Gather(small, column)
}
"""
CUTS = {
    "whole": "ranks: 1",
    "rows": 'ranks: 3\nsharding: {"node_y": {in: [[3, 1], [1, 1]]}, "node_z": {in: [[3, 1], [1]]}}',
    "batch": "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel",
}


def proto(text: str = TEXT) -> onnx.ModelProto:
    one = onnx.parser.parse_model(text)
    for node in one.graph.node:
        node.name = f"node_{node.output[0]}"
    random = np.random.default_rng(1)
    for name, shape in (("table", (12, 4)), ("small", (6, 4))):
        one.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    return one


def inputs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    return {"ids": random.integers(-12, 12, (8, 3)), "user": random.integers(-6, 6, 8)}


@pytest.mark.parametrize("cut", CUTS)
def test_an_id_that_is_no_row_is_refused(tmp_path: Path, cut: str) -> None:
    plan = CUTS[cut].replace("node_", "node_")
    same_as_whole(proto(), plan, inputs(), rtol=1e-6, atol=1e-6)
    compiled(proto(), plan, tmp_path / "build")
    with load_local(tmp_path / "build") as ranks:
        for name, at, id, place, law in (
            ("ids", (5, 2), 12, "record 5 of the batch at [2]", "'table' has 12 rows: ids are -12 to 11"),
            ("ids", (6, 1), -13, "record 6 of the batch at [1]", "'table' has 12 rows: ids are -12 to 11"),
            ("user", (7,), 6, "record 7 of the batch", "'small' has 6 rows: ids are -6 to 5"),
        ):
            given = inputs()
            given[name][at] = id
            with pytest.raises(InputError) as error:
                ranks(given)
            assert f"input '{name}': {place} has the id {id}\n  the table {law}\n" in str(error.value)
        given = inputs()
        given["ids"][:, 0] = 99  # a column that nothing looks up
        ranks(given)


def test_computed_ids_are_refused_by_the_shard_that_would_have_them(tmp_path: Path) -> None:
    text = TEXT.replace("Identity(ids)", "Mul(ids, ids)")
    plan = CUTS["rows"].replace("node_", "node_")
    compiled(proto(text), plan, tmp_path / "build")
    with load_local(tmp_path / "build") as ranks:
        given = inputs()
        given["ids"][:] = 3
        ranks(given)
        given["ids"][4, 2] = 4
        with pytest.raises(RankError, match=r"rank 2.*node_y.*out of data bounds"):
            ranks(given)


@pytest.mark.parametrize("cut", CUTS)
def test_ids_of_another_type_are_refused_when_a_model_compiles(tmp_path: Path, cut: str) -> None:
    """With a table cut, too, where no Gather of ranks has them as its ids."""
    text = TEXT.replace("int64[batch, 3] ids, int64[batch] user", "float[batch, 3] ids, int16[batch] user")
    with pytest.raises(CompileError) as error:
        compiled(proto(text), CUTS[cut], tmp_path / "build")
    assert [problem.fact for problem in error.value.problems] == [
        "Gather 'node_y' reads 'some', a tensor(float)",
        "Gather 'node_z' reads 'column', a tensor(int16)",
    ]
    assert error.value.problems[0].law == "it takes tensor(int32) or tensor(int64) there"


def test_a_bool_is_an_id(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
        agraph (bool[batch] flag) => (float[batch, 4] y) <float[1, 4] one = {1, 2, 3, 4}> {
            ids = Cast <to = 7> (flag)  y = Gather(one, ids) }"""
    compiled(onnx.parser.parse_model(text), CUTS["batch"], tmp_path / "build")
    with load_local(tmp_path / "build") as ranks:
        ranks({"flag": np.zeros(4, bool)})
        with pytest.raises(InputError, match="record 2 of the batch has the id True\n  the table 'one' has 1 rows"):
            ranks({"flag": np.array([False, False, True, False])})
