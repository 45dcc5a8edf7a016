"""`partc plan --stages N --machine FILE`: stages are of equal time on the machine, by the costs of the op table that a simulation has."""

from __future__ import annotations

import re

import pytest
from machines import curve
from onnx import TensorProto, helper
from partc.cli.main import invoke
from partc.compiler.cost.machine import Link, Machine, Processor
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.propose import propose
from proposal_case import Graph, source

WEIGHED = re.compile(r"(\d+) % of the (operations|time on m.yaml)")


def test_stages_are_of_equal_time_on_a_machine() -> None:
    """Where products cost next to nothing and a function of each element much, the stage that has most of these gets fewer others."""
    fast, slow = curve(1e15), curve(1e6)
    processor = Processor(0.0, 0.0, {"matmul": fast}, {"elementwise": fast, "function": slow})
    link = Link("default", 2, 1, 1.0, 0.0, fast, fast)
    machine = Machine("folder/m.yaml", 0, {"cpu": processor}, [link])
    graph, x = Graph(), "x"
    for k in range(8):
        x = graph.linear(f"layers.{k}", x, 64, 64)
        x = graph.node(f"layers.{k}.bend", "Erf", x) if k > 3 else x
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64]) for name in ("x", x)]
    proto = helper.make_model(
        helper.make_graph(graph.nodes, "m", ends[:1], ends[1:], graph.weights),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21)],
    )
    plain, timed = (propose(source(proto), "m", Degrees(stages=2), None, one)[0] for one in (None, machine))
    assert [what for _, what in WEIGHED.findall(plain)] == ["operations"] * 2
    assert [what for _, what in WEIGHED.findall(timed)] == ["time on m.yaml"] * 2
    placed = {
        plan: [line for line in plan.splitlines() if "layers" in line and not line.startswith("#")]
        for plan in (plain, timed)
    }
    assert placed[plain] != placed[timed]


def test_a_machine_is_for_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["plan", "model.onnx", "--tp", "2", "--machine", "m.yaml"]) == 2
    assert "--machine is for a search, or the proposal of stages" in capsys.readouterr().err
