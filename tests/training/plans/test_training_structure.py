"""What a training step sends, counted for known cases, and what is refused, word by word."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Comm, Compute, Event
from partc.compiler.pipeline import step_program
from partc.compiler.plan.read import parse_plan
from sharded_models import BLOCK_STYLES, block, mlp, with_weights

TRAIN = """train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: sgd, lr: 0.1}
"""


def compiled(proto: onnx.ModelProto, plan: str) -> Complete:
    return step_program(Source(from_proto(proto, Path("model.onnx"))), parse_plan(plan, "plan.yaml"), "model")


def is_backward(event: Event) -> bool:
    return ".grad" in event.name


def kinds(program: Complete) -> tuple[list[str], list[str]]:
    """The ops of all communication that has more than a number, of the forward and of the backward pass."""
    large = [event for event in program.events if event.shape != ()]
    forward = [event.op_type for event in large if not is_backward(event)]
    return forward, [event.op_type for event in large if is_backward(event)]


def made(program: Complete) -> set[str]:
    return {str(one) for part in program.parts for step in part.steps for one in step.makes}


def chain(layers: int) -> onnx.ModelProto:
    """Layers of 6 x 6, whose gradients have 144 bytes each."""
    nodes, x = [], "x"
    for k in range(layers):
        out = f"h{k}" if k < layers - 1 else "y"
        nodes += [f"[layer{k}] a{k} = MatMul({x}, w{k})", f"[act{k}] {out} = Tanh(a{k})"]
        x = out
    body = "\n".join(nodes)
    text = f'<ir_version: 10, opset_import: ["" : 21]>\nmain (float[batch, 6] x) => (float[batch, 6] y) {{\n{body}\n}}'
    return with_weights(text, {f"w{k}": (6, 6) for k in range(layers)})


@pytest.mark.parametrize("broadcast", ["s = ReduceMean(h, one)", "s = ReduceSum(h, one)", "s = Expand(h, shape)"])
def test_the_gradient_of_a_cut_dynamic_batch_finds_no_broadcast_dims_when_it_runs(broadcast: str) -> None:
    """A shard has `batch/2` rows by one way of inferring and `floor(batch/2)` by another, which the plan promises to be equal."""
    proto = with_weights(
        f"""<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) <int64[1] one = {{1}}> {{
  h = MatMul(x, w)
  shape = Shape(h)
  {broadcast}
  y = Sub(h, s)
}}""",
        {"w": (6, 6)},
    )
    plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: data_parallel\n{TRAIN}"
    steps = [step for part in compiled(proto, plan).parts for step in part.steps]
    ops = {step.node.op_type for step in steps if isinstance(step, Compute)}
    assert {"MatMul", "Sub"} < ops
    assert not ops & {"NonZero", "Equal"}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_tensor_parallel_block_sums_twice_forward_and_twice_backward(ranks: int) -> None:
    program = compiled(block(), f"ranks: {ranks}\nsharding: {{{BLOCK_STYLES}}}\n{TRAIN}")
    assert kinds(program) == (["AllReduce"] * 2, ["AllReduce"] * 2)
    assert len(program.events) == 4
    assert {event.shape for event in program.events} == {("batch", "seq", 24)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_data_parallel_block_sends_nothing_but_gradients(ranks: int) -> None:
    plan = f"ranks: {ranks}\nsymbols: {{batch: {{divisor: {ranks}}}}}\ndataset: data_parallel\n{TRAIN}"
    program = compiled(block(), plan)
    assert kinds(program) == ([], ["AllReduce"])
    (loss,) = [event for event in program.events if not is_backward(event)]
    assert loss.shape == ()


@pytest.mark.parametrize(("bucket", "reduces"), [(144, 6), (288, 3), (432, 2), (720, 2), (864, 1), (1 << 20, 1)])
def test_gradients_are_reduced_in_buckets(bucket: int, reduces: int) -> None:
    plan = (
        f"ranks: 3\nsymbols: {{batch: {{divisor: 3}}}}\ndataset: data_parallel\n{TRAIN}  bucket_mb: {bucket / 2**20}\n"
    )
    program = compiled(chain(6), plan)
    assert kinds(program) == ([], ["AllReduce"] * reduces)
    sizes = [event.shape for event in program.events if is_backward(event)]
    assert sum(36 if size == (6, 6) else size[0] for size in sizes if size and isinstance(size[0], int)) == 6 * 36


def test_a_bucket_goes_while_earlier_layers_are_differentiated() -> None:
    plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: data_parallel\n{TRAIN}  bucket_mb: {288 / 2**20}\n"
    steps = compiled(chain(6), plan).parts[0].steps
    buckets = [k for k, step in enumerate(steps) if isinstance(step, Comm) and "w" in str(step.outputs[0])]
    products = [
        k for k, step in enumerate(steps) if not isinstance(step, Comm) and step.node.op_type in ("Gemm", "MatMul")
    ]
    behind = [sum(place > bucket for place in products) for bucket in buckets]
    assert len(behind) == 3
    assert behind[0] > behind[1] > behind[2] == 0


def test_cotangents_go_the_way_back() -> None:
    program = compiled(mlp(), f"ranks: 3\nplacement: {{up: 0, act: 1, down: 2, loss: 2}}\n{TRAIN}")
    routes = [(event.ranks[0][0], event.ranks[1][0]) for event in program.events if event.shape != ()]
    assert routes == [(0, 1), (1, 2), (2, 1), (1, 0)]
    assert [event.op_type for event in program.events] == ["Send"] * len(program.events)


def test_nobody_computes_the_cotangent_of_an_input() -> None:
    for plan in ("ranks: 1\n", "ranks: 2\nsharding: {up: colwise, down: rowwise}\n", "ranks: 2\nplacement: {up: 1}\n"):
        program = compiled(mlp(), plan + TRAIN)
        assert "x.grad" not in made(program)
        assert not {event.name for event in program.events if event.name.startswith("x.grad")}


def test_no_cotangent_goes_to_what_is_frozen() -> None:
    frozen = f'{TRAIN}  parameters: {{"up_*": {{frozen: true}}}}\n'
    program = compiled(mlp(), f"ranks: 2\nplacement: {{up: 0, down: 1, loss: 1}}\n{frozen}")
    assert kinds(program) == (["Send"], [])
    assert not {"up_w.grad", "hb.grad", "a.grad", "up_w.next"} & made(program)
    assert "down_w.next" in made(program)


def test_a_tied_weight_on_two_ranks_is_summed_by_one_message_each_way() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) {
    [first] a = MatMul(x, w)
    [act] b = Tanh(a)
    [second] y = MatMul(b, w)
}"""
    program = compiled(
        with_weights(text, {"w": (6, 6)}), f"ranks: 2\nplacement: {{first: 0, second: 1, loss: 1}}\n{TRAIN}"
    )
    of_weight = [event for event in program.events if event.shape == (6, 6)]
    assert [event.ranks for event in of_weight] == [((1,), (0,)), ((0,), (1,))]


def test_a_cut_parameter_is_updated_where_it_lies() -> None:
    """Nothing of a parameter that tensor parallelism cuts is sent, neither its gradient nor its update."""
    styles = "sharding: {up: colwise, up_bias: {in: [[1, 3], [3]]}, down: rowwise}"
    program = compiled(mlp(), f"ranks: 3\n{styles}\n{TRAIN.replace('sgd', 'adam')}")
    assert kinds(program) == (["AllReduce"], [])
    kept = {one.tensor: one.version.layout for one in program.parts[0].state}
    cut = {name for name, layout in kept.items() if not layout.is_replicated}
    assert cut == {f"{name}{slot}" for name in ("up_w", "up_b", "down_w") for slot in ("", ".exp_avg", ".exp_avg_sq")}


REFUSED: dict[str, tuple[str, str, str]] = {
    "no gradient": (
        """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) {
    [first] a = MatMul(x, w)
    [second] b = Tanh(a)
    [rest] c = Hardmax(b)
    [last] y = Mul(c, v)
}""",
        "",
        """rest: Hardmax has no gradient
  it lies between a parameter and the loss: w -> first -> second -> rest -> the loss
  help: freeze the parameter under `train: parameters:`, or write the model without this op""",
    ),
    "a rank that is lost": (
        """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) {
    [first] a = MatMul(x, w)
    [none] bags = SequenceEmpty()
    [joined] bag = ConcatFromSequence<axis = 0>(bags)
    [both] b = Add(a, bag)
    [last] y = Mul(b, v)
}""",
        "",
        """loss.mean: the rank of 'loss.sums' is not known: its size is lost at SequenceEmpty (none)
  it lies between a parameter and the loss: w -> first -> both -> last -> loss.difference -> loss.sums -> loss.mean -> the loss
  help: write the model without that op, or freeze the parameter under `train: parameters:`; an EmbeddingBag, which torch exports as \
a Loop, is embedding(ids).mean(1)""",
    ),
    "nothing learned": (
        "",
        "  parameters: {'**': {frozen: true}}",
        """plan.yaml:5: no trainable parameter changes the loss
  all 4 parameters are frozen
  help: freeze fewer: a later rule wins, such as head.weight: {frozen: false}""",
    ),
    "patterns": (
        "",
        "  parameters: {'up_x': {frozen: true}, 'down*': {lr: 1}, 'downb': {lr: 1}}",
        """plan.yaml:5: 'up_x' matches no parameter of the model
  help: the nearest are 'up_w', 'up_b'
plan.yaml:5: 'downb' matches no parameter of the model
  help: the nearest are 'down_b', 'down_w'""",
    ),
    "optimizer": (
        "lr: 0.1}",
        "lr: 0.1, momentun: 0.9}",
        """plan.yaml:4: 'train.optimizer': unknown key 'momentun'
  help: the keys here are type, lr, weight_decay, shard, target""",
    ),
    "output": (
        "prediction: y",
        "prediction: z",
        """plan.yaml:3: the model has no output 'z'
  its outputs are 'y'
  help: name one of them""",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """A text of a model, or what stands in the plan in place of what, or what is added to it; and the whole message."""
    first, second, said = REFUSED[name]
    proto, train = mlp(), TRAIN
    if first.startswith("<"):
        proto = with_weights(first, {"w": (6, 6), "v": (6,)})
    elif first:
        train = train.replace(first, second)
    else:
        train += f"{second}\n"
    with pytest.raises(CompileError) as caught:
        compiled(proto, f"ranks: 1\n{train}")
    assert str(caught.value) == said
