"""Layers for writing models: torch's names, arguments and defaults, on top of onnxscript's modules.

    from partc.compiler import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

        def forward(self, op, x):
            return self.body(op, x)

A layer is called with the op builder and its input. Weights are drawn when they are needed, from the seed (`nn.seed(7)`) and the
parameter's path, so they are the same on every machine; `nn.init` has the initializers. Layers are in inference mode until `train()` is
called. The ops are those of opset 23, all of which onnxruntime runs.
"""

from partc.compiler.nn import init
from partc.compiler.nn.layers import (
    GELU,
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    Identity,
    InstanceNorm2d,
    LayerNorm,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    RMSNorm,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
    stop_gradient,
)
from partc.compiler.nn.module import Module, ModuleList, Op, Sequential
from partc.compiler.nn.parameter import Parameter, seed
from partc.compiler.nn.vmap import vmap

__all__ = [
    "GELU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool2d",
    "GroupNorm",
    "Identity",
    "InstanceNorm2d",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "Op",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "init",
    "seed",
    "stop_gradient",
    "vmap",
]
