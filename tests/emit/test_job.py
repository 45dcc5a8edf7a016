"""The program of a job: ops over sets of ranks, of which distinct programs are filters, and names that are given at the end."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.programs import Comm, added
from partc.compiler.lower.job import Job, Transfer
from partc.compiler.lower.lower import Finished, names_of


def test_a_name_is_free_on_ranks_and_not_the_models() -> None:
    job = Job(4, {"h", "x"})
    first, apart = job.value((0, 1), "h.sum"), job.value((2, 3), "h.sum")
    crossing, spelled = job.value((1, 2), "h.sum"), job.value((1,), "h.sum", "h.sum.fc1")
    numbered, of_model = job.value((0, 1, 2, 3), "h.sum"), job.value((3,), "x")
    beside = job.derived_on((1, 2), crossing, ".zero")
    names = names_of(job)
    assert [names[one] for one in (first, apart, crossing, spelled)] == ["h.sum", "h.sum", "h.sum.2", "h.sum.fc1"]
    assert [names[one] for one in (numbered, of_model, beside)] == ["h.sum.3", "x'", "h.sum.2.zero"]


def test_ranks_that_do_the_same_share_a_program() -> None:
    job = Job(6)
    x, h = job.value(job.everyone, "x"), job.value(job.everyone, "h")
    job.append((0, 1, 2, 3), [added("Relu", [x], [h])])
    job.append((4, 5), [added("Abs", [x], [h])])
    y = job.value((2, 3), "y")
    job.append((3, 2), [added("Neg", [h], [y])])
    found = Finished(job).programs([(0, 3)])
    assert [bin(one.ranks) for one in found] == ["0b1", "0b10", "0b100", "0b1000", "0b110000"]
    ops = [[step.node.op_type for step in one.steps] for one in found]
    assert ops == [["Relu"], ["Relu"], ["Relu", "Neg"], ["Relu", "Neg"], ["Abs"]]
    assert found[0].steps[0] is found[2].steps[0]


def test_a_message_is_one_op_of_which_each_rank_sees_its_end() -> None:
    job = Job(4)
    x, h = job.value(job.everyone, "x"), job.value(job.everyone, "h")
    job.append((0, 1), [added("Relu", [x], [h])])
    job.append((1, 2), [Transfer(h, (1,), (2,), 0, ir.Value(name="h"), "n", "4")])
    assert len(job.program) == 2
    found = {one.ranks: [step for step in one.steps if isinstance(step, Comm)] for one in Finished(job).programs(())}
    assert [bin(ranks) for ranks in found] == ["0b1", "0b10", "0b100", "0b1000"]
    ((send,), (receive,)) = found[0b10], found[0b100]
    assert (send.op_type, send.attributes, str(send.inputs[0]), send.outputs) == ("Send", {"peer": 2}, "h", ())
    assert (receive.op_type, receive.attributes, receive.outputs) == ("Recv", {"peer": 1}, send.inputs)


def test_an_op_is_replaced_on_some_ranks() -> None:
    job = Job(3)
    x, h, shape = (job.value(job.everyone, name) for name in ("x", "h", "h.shape"))
    before, after, behind = added("Relu", [x], [h]), added("Abs", [x], [h]), added("Shape", [h], [shape])
    job.append(job.everyone, [before])
    copy = job.copy()
    copy.replace((0, 1), before, [(after, 0b11), (behind, 0b10)])
    assert copy.program == [(after, 0b11), (behind, 0b10), (before, 0b100)]
    assert job.program == [(before, 0b111)]
