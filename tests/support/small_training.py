"""Artifacts that train a small model, for tests of the checker and of tools that read rank files.

    compiled(folder, PERCEPTRON, DATA_PARALLEL)

A perceptron on two ranks, data parallel: one bucket of gradients, three parameters with a slot each, which both ranks hold.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan

PERCEPTRON = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 3] y)
<float[6, 5] first, float[5] shift, float[5, 3] second> {
    [one] h = MatMul(x, first)
    [plus] hs = Add(h, shift)
    [turn] hr = Tanh(hs)
    [two] y = MatMul(hr, second)
}"""
NORMALIZED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 5] x) => (float[batch, 5] y)
<float[5] weight, float[5] bias, float[5] running_mean, float[5] running_var> {
    [bn] y = BatchNormalization <epsilon = 0.001, momentum = 0.8> (x, weight, bias, running_mean, running_var)
}"""
TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: OPTIMIZER, clip: {norm: 1.5}}\n"
DATA_PARALLEL = "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"
MOMENTUM, LAMB = "{type: momentum, lr: 0.1, momentum: 0.9}", "{type: lamb, lr: 0.1}"


def with_numbers(text: str) -> onnx.ModelProto:
    """The model of a text, whose weights are random numbers."""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(7)
    for port in model.graph.value_info:
        shape = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        numbers = np.abs(rng.normal(size=shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, port.name))
    del model.graph.value_info[:]
    return model


def compiled(out: Path, text: str, plan: str, optimizer: str = MOMENTUM) -> Path:
    source = Source(from_proto(with_numbers(text), Path("model.onnx")))
    train = TRAIN.replace("OPTIMIZER", optimizer) if plan else optimizer
    compile_source(source, parse_plan(plan + train, "plan.yaml"), out)
    return out
