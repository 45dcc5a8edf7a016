"""`vmap` of the op builder: a function of one record over all is a loop over records, within `shard`, nested, and in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnxscript import OpBuilder
from partc.compiler import nn, shard
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.python import load_python
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from training_equivalence import run_whole, same_training

RECORDS, WIDTH = 4, 1288
ELEMENTWISE = (
    *(
        "Abs",
        "Atan",
        "Celu",
        "Cos",
        "Elu",
        "Erf",
        "Exp",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Mish",
    ),
    *("Neg", "Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Tanh", "ThresholdedRelu"),
)


def loop(f: Callable[..., Any], in_axes: Sequence[int | None] | int = 0) -> Callable[..., Any]:
    """`vmap` by its meaning: record by record."""

    def of_all(op: OpBuilder, *arguments: ir.Value) -> ir.Value:
        axes = in_axes if isinstance(in_axes, list | tuple) else [in_axes] * len(arguments)
        shape = next(value.shape for value, axis in zip(arguments, axes, strict=True) if axis is not None)
        axis = next(axis for axis in axes if axis is not None)
        assert shape is not None
        results = [
            f(
                op,
                *(
                    value if axis is None else op.Gather(value, op.Constant(value_int=k), axis=axis)
                    for value, axis in zip(arguments, axes, strict=True)
                ),
            )
            for k in range(int(shape[axis]))
        ]
        return op.Concat(*[op.Unsqueeze(one, [0]) for one in results], axis=0)

    return of_all


def many(op: OpBuilder, x: ir.Value, shared: ir.Value) -> ir.Value:
    """48 ops of a record (4, 6): by letters of their rules, merged with the records, and in a Scan."""
    found = [getattr(op, name)(x) for name in ELEMENTWISE]
    found += [
        op.Add(x, shared),
        op.Sub(shared, x),
        op.Mul(op.Mul(x, x), shared),
        op.Div(x, op.Add(op.Mul(shared, shared), 2.0)),
        op.Where(op.Greater(x, shared), x, op.Neg(shared)),
        op.Max(x, shared),
        op.Pow(x, 2.0),
        op.Sqrt(op.Add(op.Mul(x, x), 1.0)),
        op.Clip(x, -0.5, 0.5),
        op.Clip(x, op.ReduceMin(op.Abs(x), keepdims=0)),
        op.MatMul(x, op.Transpose(shared)),
        op.MatMul(op.Softmax(op.MatMul(x, op.Transpose(x)), axis=-1), x),
        op.Gemm(x, shared, transB=1),
        op.Einsum(x, x, equation="ij,kj->ik"),
        op.LogSoftmax(x, axis=0),
        op.LayerNormalization(x, op.ReduceSum(shared, [0], keepdims=0), axis=-1),
        op.ReduceMean(x, [0], keepdims=1),
        op.ReduceSum(x, keepdims=0),
        op.ReduceL2(x, [-1], keepdims=0),
        op.ReduceLogSumExp(x, [1], keepdims=1),
        op.Reshape(x, [2, 3, -1]),
        op.Transpose(x),
        op.Unsqueeze(x, [1]),
        op.Concat(x, shared, axis=0),
        op.Slice(x, [1], [3], [0]),
        op.Gather(x, [2, 0], axis=1),
        op.Expand(op.Unsqueeze(x, [0]), [2, 1, 1]),
        op.Pad(x, [0, 1, 1, 0]),
        op.Tile(x, [1, 2]),
        op.CumSum(x, op.Constant(value_int=0)),
        op.Trilu(x),
        op.Flatten(x, axis=1),
        *op.Split(x, num_outputs=2, axis=1, _outputs=2),
        op.MaxPool(op.Reshape(x, [1, 1, 4, 6]), kernel_shape=[2, 2], strides=[2, 2]),
        op.Conv(op.Reshape(x, [1, 1, 4, 6]), op.Reshape(shared, [2, 1, 3, 4])),
    ]
    parts = [op.Reshape(op.Tanh(one), [-1]) for one in found]
    return op.Concat(*parts, axis=0)


class Net(nn.Module):
    """The ops over records and, within each, over two halves; `mapped` is vmap or a loop, within `shard` over so many ranks."""

    def __init__(self, mapped: Callable[..., Any], ranks: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(12, 48)
        self.shared = nn.Parameter([4, 6], init=nn.init.normal(0.5))
        self.mapped, self.ranks = mapped, ranks

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        def halves(op: OpBuilder, record: ir.Value) -> ir.Value:
            both = op.Reshape(self.up(op, record), [2, 4, 6])
            return op.ReduceMean(self.mapped(many, (0, None))(op, both, self.shared), [0], keepdims=0)

        over: Any = self.mapped(halves)
        if self.ranks > 1:
            over = shard(over, in_strategy=((self.ranks, 1),))
        made: ir.Value = over(op, x)
        return made


MODEL = """
from partc.compiler import Input, nn
from test_vmap import Net

nn.seed(3)
model = Net(nn.vmap, 2)
inputs = {"x": Input([4, 12])}
outputs = ["y"]
"""
TRAIN = "train:\n  loss: {type: mse, prediction: y, target: t}\n  optimizer: {type: momentum, lr: 0.5, momentum: 0.9}\n"


def test_records_are_as_in_a_loop(tmp_path: Path) -> None:
    """Forward and gradients, within `shard` and nested; each rank has records of its own, and none are sent."""
    rng, t = np.random.default_rng(2), np.zeros((RECORDS, WIDTH), np.float32)
    steps = [{"x": rng.normal(size=(RECORDS, 12)).astype(np.float32), "t": t} for _ in range(2)]
    nn.seed(3)
    model = trace(Net(loop), [Spec("x", (RECORDS, 12), ir.DataType.FLOAT)], ["y"], "model.py")
    looped = run_whole(Source(model), "ranks: 1\n" + TRAIN, steps)
    (tmp_path / "model.py").write_text(MODEL)
    same_training(
        lambda: load_python(tmp_path / "model.py"),
        "ranks: 2\n" + TRAIN,
        tmp_path,
        steps,
        rtol=1e-4,
        atol=1e-4,
        whole=looped,
    )


def test_nodes_have_the_modules_that_the_function_calls() -> None:
    """Those that move dims of records, too, so a plan names modules as of any model."""
    model = trace(Net(nn.vmap), [Spec("x", (RECORDS, 12), ir.DataType.FLOAT)], ["y"], "model.py")
    assert {"up.Transpose", "up.Unsqueeze", "up.MatMul", "up.Squeeze", "up.Add"} <= {node.name for node in model.graph}


REFUSED = {
    "nn.vmap(pair, (0,))(op, x, x)": (
        "in_axes is (0,), and the function is called with 2 arguments",
        "an entry for each argument: the dim of its records, or None for one that all records share",
        "write in_axes=(0, 0)",
    ),
    "nn.vmap(pair, (0, 2))(op, x, x)": (
        "in_axes[1] is 2, and argument 1 has 2 dims, [4, 12]",
        "a dim is from -2 to 1",
        "name one that it has, or None",
    ),
    "nn.vmap(pair, (0, 1))(op, x, x)": (
        "argument 0 has 4 records along dim 0, argument 1 12 along dim 1",
        "each record has one part of every argument with records",
        "correct in_axes, or write None for in_axes[1]",
    ),
    "nn.vmap(pair, None)(op, x, x)": (
        "in_axes is None: no argument has records",
        "the results have as many records as an argument has",
        "name a dim of one",
    ),
    "nn.vmap(pair, (0, 0), 2)(op, x, x)": (
        "out_axes[0] is 2, and result 0 has 2 dims with that of the records",
        "a dim is from -2 to 1",
        "name one that it has",
    ),
    "nn.vmap(shard(pair, ((1,), (1,))), (0, 0))(op, x, x)": (
        "'pair' is called inside of vmap, at model.py:10",
        "the tensors of a shard are those of all records, and inside of vmap a dim is hidden",
        "shard a function that calls vmap",
    ),
    "nn.vmap(nn.ReLU().shard(((1,),)))(op, x)": (
        "'ReLU' is called inside of vmap, at model.py:10",
        "the tensors of a shard are those of all records, and inside of vmap a dim is hidden",
        "shard a function that calls vmap",
    ),
    "nn.vmap(lambda op, a: op.Add(a, op.RandomNormalLike(a)))(op, x)": (
        "RandomNormalLike draws inside of vmap",
        "each record has numbers of its own",
        "draw the numbers of all records outside of vmap",
    ),
    "nn.vmap(lambda op, a: op.BatchNormalization(op.Unsqueeze(a, [0]), *[a] * 4, training_mode=1, _outputs=3)[0])(op, x)": (
        "BatchNormalization in training is inside of vmap",
        "its statistics are those of a batch, and a record has none of its own",
        "call it outside of vmap",
    ),
    "nn.vmap(lambda op, a: op.NonZero(a))(op, x)": (
        "NonZero of a record is as long as its numbers say",
        "all records have the same shapes",
        "take a mask in place of it",
    ),
    "nn.vmap(lambda op, a, k: op.Expand(a, op.Cast(k, to=7)), (0, 0))(op, x, x)": (
        "input 1 of Expand of a record differs by record",
        "sizes, axes and bounds are the same for all records",
        "compute it outside of vmap",
    ),
}
CALL = """from partc.compiler import Input, nn, shard


def pair(op, a, b):
    return op.Add(a, b)


class Net(nn.Module):
    def forward(self, op, x):
        return CALL


model = Net()
inputs = {"x": Input([4, 12])}
"""


@pytest.mark.parametrize("call", REFUSED)
def test_what_does_not_fit_is_refused(call: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CALL.replace("CALL", call))
    with pytest.raises(CompileError) as caught:
        load_python(tmp_path / "model.py")
    fact, law, help = REFUSED[call]
    assert str(caught.value) == f"model.py:10: {fact}\n  {law}\n  help: {help}"
