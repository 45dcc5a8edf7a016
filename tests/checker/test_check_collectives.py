"""The checker on artifacts with collectives: what one rank has otherwise than the others, wrong orders, boxes that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_text import write
from equivalence import compiled
from mutated import change_file
from onnx import numpy_helper
from partc.runtime.checker.check import check_artifact

SHARED = """rank (float[4, 6] x) => (float[8, 2] y) <float[4, 6] h, float[8, 6] k, float[8, 2] p>
{ h = Neg(x)
  k = partc.comm.AllGather <group = "pairs", tag = 0, axis = 0> (h)
  p = partc.comm.ReduceScatter <group = "triples", tag = 1, axis = 1, reduce = "sum"> (k)
  y = Abs(p) }"""
GROUPS = {"pairs": [[0, 3], [1, 4], [2, 5]], "triples": [[2, 1, 0], [3, 4, 5]]}


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        (
            'tag = 1, axis = 1, reduce = "sum"',
            'tag = 1, axis = 1, reduce = "max"',
            "differs from the node of rank 2 in op, red",
        ),
        ("axis = 1", "axis = 0", "differs from the node of rank 2"),
        ("axis = 1", "axis = 7", "there is no axis 7 in a value of 2 dims"),
        ("float[8, 2] p", "float[8, 3] p", "its output is [8, 3]; ReduceScatter of [8, 6] on 3 ranks makes"),
        ("float[8, 6] k", "float[8, 5] k", "its output is [8, 5]; AllGather"),
        ("tag = 1", "tag = 4", "collective 1, ReduceScatter of 'p', has no node on rank 0"),
        ('"pairs"', '"triples"', "manifest.json has AllGather of 'k' in group 'pairs' as 0"),
        ("p = partc.comm.ReduceScatter", "p = partc.comm.AllGather", "manifest.json has ReduceScatter of 'p'"),
    ],
)
def test_the_checker_finds_what_one_rank_has_otherwise(tmp_path: Path, old: str, new: str, fact: str) -> None:
    assert old in SHARED
    graphs = [SHARED] * 6
    graphs[0] = SHARED.replace(old, new)
    with_record = write(tmp_path / "sound", [SHARED] * 6, groups=GROUPS) / "manifest.json"
    folder = write(tmp_path / "broken", graphs, groups=GROUPS)
    broken = json.loads((folder / "manifest.json").read_text())
    sound = json.loads(with_record.read_text())["programs"]["infer"]
    broken["programs"]["infer"]["collectives"] = sound["collectives"]
    (folder / "manifest.json").write_text(json.dumps(broken))
    assert fact in "\n".join(str(one) for one in check_artifact(folder))


def test_the_checker_finds_a_wrong_order(tmp_path: Path) -> None:
    calls = [
        f'{name} = partc.comm.AllReduce <group = "all", tag = {tag}, reduce = "sum"> (x)'
        for tag, name in enumerate("kp")
    ]
    graphs = [
        f"rank (float[n] x) => (float[n] y) <float[n] k, float[n] p> {{ {one}  {other}  y = Sub(k, p) }}"
        for one, other in (calls, calls[::-1])
    ]
    write(tmp_path, graphs, groups={"all": [[0, 1]]})
    found = "\n".join(str(one) for one in check_artifact(tmp_path))
    assert (
        "a deadlock of 2 ranks: rank 0 waits at AllReduce 'AllReduce.k' of group 'all', tag 0" in found
        or "it is where" in found
    )


def test_the_checker_finds_a_deadlock_of_collectives_and_messages(tmp_path: Path) -> None:
    reduce = 'k = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (x)'
    graphs = [
        f"""rank0 (float[n] x) => () <float[n] k, float[n] r>
        {{ {reduce}  r = Neg(k)  = partc.comm.Send <peer = 1, tag = 1> (r) }}""",
        f"""rank1 (float[n] x) => (float[n] y) <float[n] k, float[n] r>
        {{ r = partc.comm.Recv <peer = 0, tag = 1> ()  {reduce}  y = Sub(k, r) }}""",
    ]
    write(tmp_path, graphs, groups={"all": [[0, 1]]})
    found = "\n".join(str(one) for one in check_artifact(tmp_path))
    assert (
        "a deadlock of 2 ranks: rank 0 waits at AllReduce 'AllReduce.k' of group 'all', tag 0; rank 1 waits at" in found
    )


def test_the_checker_finds_boxes_that_do_not_fit(tmp_path: Path) -> None:
    give = "send_peers = [1], send_boxes = [0, 1, 2]"
    take = "recv_peers = [0], recv_boxes = [0, 1, 1]"
    for taken, rows, fact in (
        (take, 4, "it gives a box of [3] to rank 1, which takes one of [4]"),
        (take.replace("0, 1, 1", "0, 1, 2"), 6, "the boxes that it takes are 1/2 of its output"),
        (take.replace("[0]", "[1]"), 3, "it gives 1 boxes to rank 1, which takes 0 from it"),
    ):
        graphs = [
            f'rank0 (float[6] x) => () {{ = partc.comm.Exchange <group = "all", tag = 0, rank = 1, {give}> (x) }}',
            f"""rank1 () => (float[{rows}] y) <float[{rows}] k>
            {{ k = partc.comm.Exchange <group = "all", tag = 0, rank = 1, {taken}> ()  y = Neg(k) }}""",
        ]
        folder = write(tmp_path / str(rows), graphs, groups={"all": [[0, 1]]})
        assert fact in "\n".join(str(one) for one in check_artifact(folder))


def test_the_checker_finds_another_value_of_the_same_type(tmp_path: Path) -> None:
    """The ranks of one file do the same wrong thing, and one that gives only names nothing that it gets."""
    text = (
        """g (float[n, 6] x) => (float[n, 5] y) { [up] h = MatMul(x, v)  [act] t = Tanh(h)  [down] y = MatMul(t, w) }"""
    )
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    for name, shape in (("v", (6, 12)), ("w", (12, 5))):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    plan = """symbols: {n: {divisor: 2}}
ranks: 4
placement: {up: [0, 1], act: [0, 1], down: [2, 3]}
sharding: {up: colwise, down: {in: [[2, 1], [1, 1]]}}
"""
    compiled(proto, plan, tmp_path)
    assert check_artifact(tmp_path) == []

    def rewire(model: onnx.ModelProto) -> None:
        given = next(node for node in model.graph.node if node.op_type == "Exchange" and node.input)
        given.input[0] = "h"

    change_file(tmp_path, "rank_0000.onnx", rewire)
    found = "\n".join(str(one) for one in check_artifact(tmp_path))
    assert "on rank 0: it gives 'h'; manifest.json says 't'" in found
