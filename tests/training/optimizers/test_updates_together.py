"""Which updates run as one: those of one function with equal numbers, over memory in which their operands follow each other."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from partc.compiler.emit.run_list import UpdatePlan, plan_groups
from partc.compiler.training.optimizer_functions import function
from partc.runtime import load_local
from partc.runtime.program.steps import Segment, StartCollective, WaitCollective
from small_training import compiled

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 2] y)
<float[6, 4] first, float[4] shift, float[4, 8] second, float[8] turn, float[8, 2] third> {
    [one] h = MatMul(x, first)  [plus] hs = Add(h, shift)  [act] hr = Tanh(hs)
    [two] s = MatMul(hr, second)  [more] t = Add(s, turn)  [again] a = Tanh(t)  [three] y = MatMul(a, third)
}"""
PLAN = "ranks: 2\nmesh: {dp: 2}\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"
TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: label}, optimizer: OPTIMIZER, parameters: {OWN}}\n"
APART = "'{shift,turn}': {weight_decay: 0}"
SHARDED = "{type: adam, lr: 0.1, weight_decay: 0.1, shard: dp}"


def sgd(parameter: str, gradient: str, **numbers: float) -> onnx.NodeProto:
    return onnx.helper.make_node("Sgd", [parameter, gradient, "lr"], [f"{parameter}.next"], **numbers)


def planned(*nodes: onnx.NodeProto, kept: str = "") -> UpdatePlan:
    names = {name for node in nodes for name in (*node.input, *node.output)}
    return plan_groups([nodes], {"Sgd": function("Sgd")}, dict.fromkeys(names, "tensor(float)"), set(kept), {})


def groups(plan: UpdatePlan) -> list[str]:
    """By group its members' parameters."""
    return ["".join(node.input[0] for node in nodes) for nodes in plan.groups[0]]


def test_updates_alike_come_together_whatever_their_order() -> None:
    one, two, three, four = (
        sgd(k, f"{k}.grad", lr_multiplier=n) for k, n in zip("abcd", (1.0, 2.0, 1.0, 2.0), strict=True)
    )
    plan = planned(one, two, three, four, kept="abcd")
    assert groups(plan) == ["ac", "bd"]
    assert plan.gradients == [("a.grad", "c.grad", "b.grad", "d.grad")]
    reads_another = onnx.helper.make_node("Sgd", ["c", "b.next", "lr"], ["c.next"], lr_multiplier=1.0)
    assert [name[0] for name in groups(planned(one, two, reads_another, kept="abc"))] == ["a", "b", "c"]


def test_shards_lie_side_by_side_and_are_renewed_in_their_places() -> None:
    plan = planned(sgd("s", "s.grad"), sgd("t", "t.grad"))
    assert groups(plan) == ["st"]
    assert plan.shards == [("s", "t"), ("s.next", "t.next")]
    assert plan.renewed == {0: [("s", "s.next"), ("t", "t.next")]}
    read_twice = planned(sgd("s", "s.grad"), sgd("t", "s"))
    assert read_twice.renewed == {0: [("t", "t.next")]}


@pytest.mark.parametrize(
    ("own", "optimizer", "runs"),
    [
        ("", SHARDED, [["first", "second", "shift", "third", "turn"]]),
        (APART, SHARDED, [["first", "second", "third"], ["shift", "turn"]]),
        (APART, SHARDED.replace(", shard: dp", ""), [["first", "second", "third"], ["shift", "turn"]]),
    ],
    ids=["ZeRO", "ZeRO, two decays", "two decays"],
)
def test_a_rank_has_an_update_for_all_that_are_alike_in_a_bucket(
    own: str, optimizer: str, runs: list[list[str]], tmp_path: Path
) -> None:
    """With ZeRO all shards are cut in one session, when the bucket has come, and the new ones lie where those do."""
    plan = PLAN + TRAIN.replace("OPTIMIZER", optimizer).replace("OWN", own)
    built = compiled(tmp_path / "build", TEXT, "", plan)
    with load_local(built) as job:
        for rank in job.ranks:
            steps, program = rank._program.steps, rank._program
            (index,) = program.replacement.updates
            found = [one.group.operands[0] for one in program.replacement.updates[index]]
            assert sorted(sorted(name.removesuffix(".share") for name in names) for names in found) == runs
            shards = program.replacement.renewed.keys()
            assert len(shards) == (5 if "shard" in optimizer else 0)
            if not shards:
                continue
            assert isinstance(steps[index - 1], Segment)
            assert {*steps[index - 1].outputs} == {*shards}
            assert isinstance(steps[index - 2], WaitCollective)
            assert isinstance(steps[index + 1], StartCollective)
            places = program.values.flat_places
            roots = program.arenas.aliases
            for name in shards:
                buffer, at = places[f"{name}.next"]
                assert (roots[buffer], at) == places[name]
