"""Linear maps and lookups: `Linear`, `Embedding`."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.nn import init as _init
from partc.compiler.nn.module import Module
from partc.compiler.nn.parameter import Parameter
from partc.compiler.nn.sizes import positive


class Linear(Module):
    """`x W^T + b` over the last axis of x; W is `[out_features, in_features]`.

    One Gemm where x is known to be a matrix, else MatMul and Add. Both start uniform within `1 / sqrt(in_features)`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: _init.Initializer | None = None,
        bias_init: _init.Initializer | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.in_features = positive(in_features, "in_features")
        self.out_features = positive(out_features, "out_features")
        default = _init.within(in_features**-0.5)
        self.weight = Parameter([out_features, in_features], dtype, init=init or default)
        self.bias = Parameter([out_features], dtype, init=bias_init or default) if bias else None

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value
        if x.shape is not None and len(x.shape) == 2:
            y = op.Gemm(x, self.weight, self.bias, transB=1)
            return y
        y = op.MatMul(x, op.Transpose(self.weight, perm=[1, 0]))
        return y if self.bias is None else op.Add(y, self.bias)


class Embedding(Module):
    """Row i of the weight `[num_embeddings, embedding_dim]` for each index i; the row `padding_idx` starts as zeros."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init: _init.Initializer | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.num_embeddings = positive(num_embeddings, "num_embeddings")
        self.embedding_dim = positive(embedding_dim, "embedding_dim")
        rows = init or _init.normal()
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx {padding_idx} is outside of the {num_embeddings} embeddings")
            rows = _init.zero_row(rows, padding_idx % num_embeddings)
        self.weight = Parameter([num_embeddings, embedding_dim], dtype, init=rows)

    def forward(self, op: OpBuilder, indices: ir.Value) -> ir.Value:
        y: ir.Value = op.Gather(self.weight, indices, axis=0)
        return y
