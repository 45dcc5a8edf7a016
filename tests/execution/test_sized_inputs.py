"""An input that a rank reads for its sizes alone is not fed there: the ranks agree on these."""

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, model, same_as_whole, whole_outputs
from mutated import change_file
from partc.runtime import load_local
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from partc.runtime.errors import ArtifactError, InputError

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\nmain '
CACHES = f"""{HEAD}(float[batch, 4, seq] x, float[batch, 4, past] p, float[batch, 4, past] q)
=> (float[batch, 4, seq] y, float[batch, 4, all] p_next, float[batch, 4, all] q_next)
<int64[1] four = {{4}}> {{
    [a_join] p_next = Concat <axis = 2> (p, x)
    [a_shape] sizes = Shape <start = 2, end = 3> (q)
    [a_batch] records = Shape <start = 0, end = 1> (q)
    [a_count] count = Size(q)
    [a_many] many = Cast <to = 1> (count)
    [a_target] target = Concat <axis = 0> (records, four, sizes)
    [a_expand] none = ConstantOfShape(target)
    [a_sum] sums = ReduceSum <keepdims = 0> (p_next)
    [a_more] more = ReduceSum <keepdims = 0> (none)
    [a_mean] mean = Div(sums, many)
    [a_all] total = Add(mean, more)
    [a_out] h = Add(x, total)
    [b_join] q_next = Concat <axis = 2> (q, h)
    [b_out] y = Relu(h)
}}"""
STAGES = 'ranks: 2\nplacement: {"a_*": 0, "b_*": 1}\noutputs: {"*_next": producer}\n'


def step(past: int, seq: int = 3, batch: int = 2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(past)
    shapes = {"x": (batch, 4, seq), "p": (batch, 4, past), "q": (batch, 4, past)}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def readers(folder: Path) -> dict[str, list[int]]:
    return {port.name: [*port.ranks] for port in open_artifact(folder).manifest.inputs}


def test_each_rank_is_fed_what_it_computes_with(tmp_path: Path) -> None:
    """Stage 0 reads the sizes of stage 1's cache, which no other rank has: a decoder goes on with what each rank made."""
    proto = model(CACHES)
    compiled(proto, STAGES, tmp_path / "build")
    assert readers(tmp_path / "build") == {"x": [0], "p": [0], "q": [1]}
    assert not check(tmp_path / "build").violations
    with load_local(tmp_path / "build") as local:
        assert [[port.name for port in rank.inputs] for rank in local.ranks] == [["x", "p"], ["q"]]
        for past in (1, 4, 4, 0):
            fed = step(past)
            own = [{"x": fed["x"], "p": fed["p"]}, {"q": fed["q"]}]
            made = local._all([partial(rank, given) for rank, given in zip(local.ranks, own, strict=True)])
            want = whole_outputs(proto, fed)
            have = made[0] | made[1]
            assert {*made[0]} == {"y", "p_next"}
            for name, value in want.items():
                np.testing.assert_allclose(have[name], value, rtol=1e-5, atol=1e-5)


def test_what_must_be_fed_is_missed_by_name(tmp_path: Path) -> None:
    compiled(model(CACHES), STAGES, tmp_path / "build")
    with load_local(tmp_path / "build") as local, pytest.raises(InputError, match="the input 'q' is missing"):
        local({name: value for name, value in step(2).items() if name != "q"})


def test_what_alone_tells_a_symbol_is_fed(tmp_path: Path) -> None:
    text = f"""{HEAD}(float[batch, 4] x, float[length] like) => (float[batch, 4] y, int64[1] n) {{
        [a] y = Relu(x)
        [b] n = Shape(like)
    }}"""
    compiled(model(text), 'ranks: 2\nplacement: {"a": 0, "b": 1}\n', tmp_path / "build")
    assert readers(tmp_path / "build")["like"]
    inputs = {"x": np.ones((2, 4), np.float32), "like": np.zeros(5, np.float32)}
    with load_local(tmp_path / "build") as local:
        assert local(inputs)["n"].tolist() == [5]


def test_sizes_of_a_cut_input_are_those_of_all_of_it() -> None:
    plan = """ranks: 4
mesh: {pp: 2, tp: 2}
placement: {"a_*": {pp: 0}, "b_*": {pp: 1}}
dataset: {p: [null, tp, null], q: [null, tp, null]}
outputs: {"*_next": cut}
"""
    same_as_whole(model(CACHES), plan, step(2), step(5), step(0), rtol=1e-5, atol=1e-5)


def _read_again(proto: onnx.ModelProto) -> None:
    """A Shape becomes an op that reads elements."""
    node = next(node for node in proto.graph.node if node.op_type == "Size")
    node.op_type = "ReduceMax"


def test_a_value_that_is_read_must_be_fed(tmp_path: Path) -> None:
    compiled(model(CACHES), STAGES, tmp_path / "build")
    change_file(tmp_path / "build", "rank_0000.onnx", _read_again)
    assert any("lists no input 'q' for rank 0" in str(one) for one in check(tmp_path / "build").violations)
    with pytest.raises(ArtifactError, match="the inputs are"):
        load_local(tmp_path / "build")


def test_sizes_that_nothing_tells_are_refused(tmp_path: Path) -> None:
    """`past` is told by p and q; without readers of either, it is not."""
    compiled(model(CACHES), STAGES, tmp_path / "build")

    def rename(proto: onnx.ModelProto) -> None:
        (port,) = (port for port in proto.graph.input if port.name == "q")
        port.type.tensor_type.shape.dim[2].dim_param = "other"

    change_file(tmp_path / "build", "rank_0000.onnx", rename)
    said = [str(one) for one in check(tmp_path / "build").violations]
    assert any("read for its sizes alone, and no input that is fed determines them" in one for one in said), said
    with pytest.raises(
        ArtifactError, match="'q' is read for its sizes alone, which the inputs of a step do not determine"
    ):
        load_local(tmp_path / "build")
