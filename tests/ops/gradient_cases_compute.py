"""Gradients of products, reductions and normalizations: every form and attribute, with broadcasting."""

from __future__ import annotations

import numpy as np
from gradient_case import proof

RNG = np.random.default_rng(19)
CONTRIB = {"domain": "com.microsoft"}
BENT = ("ReduceL2", "ReduceLogSum", "ReduceProd")
REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp")
TRAINING = {"training_mode": 1}
STATISTICS = [(12,), (12,), (12,), (12,)]

CASES = [
    *[
        proof("MatMul", list(shapes))
        for shapes in [
            ((6, 12), (12, 18)),
            ((2, 6, 12), (12, 18)),
            ((2, 6, 12), (2, 12, 18)),
            ((3, 1, 6, 12), (2, 12, 18)),
            ((12,), (12,)),
            ((12,), (2, 12, 18)),
            ((2, 6, 12), (12,)),
            ((6, 12), (2, 12, 18)),
        ]
    ],
    *[
        proof(
            "MatMulNBits",
            [(6, size), RNG.integers(0, 256, (18, blocks, 2 * bits), np.uint8), (18, blocks)],
            {"K": size, "N": 18, "bits": bits, "block_size": 16},
            wanted=(0,),
            static=True,
            **CONTRIB,
        )
        for size, blocks, bits in ((96, 6, 4), (96, 6, 8), (40, 3, 4))
    ],
    proof("FusedMatMul", [(6, 12), (12, 18)], {"alpha": 0.5}, **CONTRIB),
    proof("FusedMatMul", [(2, 12, 6), (2, 18, 12)], {"transA": 1, "transB": 1}, **CONTRIB),
    proof("FusedMatMul", [(6, 2, 12), (2, 12, 18)], {"transBatchA": 1}, **CONTRIB),
    proof("FusedMatMul", [(2, 6, 12), (18, 2, 12)], {"transBatchB": 1, "transB": 1}, **CONTRIB),
    *[
        proof(
            "Gemm",
            [(12, 6) if a else (6, 12), (18, 12) if b else (12, 18), (18,)],
            {"transA": a, "transB": b, "alpha": 0.5, "beta": 2.0},
        )
        for a in (0, 1)
        for b in (0, 1)
    ],
    proof("Gemm", [(6, 12), (12, 18)]),
    proof("Gemm", [(6, 12), (12, 18), (6, 1)]),
    proof("Gemm", [(6, 12), (12, 18), ()]),
    proof("Einsum", [(2, 6, 12), (12, 18)], {"equation": "bij,jk->bik"}),
    proof("Einsum", [(2, 6, 12), (2, 6, 4)], {"equation": "bij,bik->bjk"}),
    proof("Einsum", [(2, 3, 6, 12), (2, 3, 12, 6)], {"equation": "...ij,...jk->...ik"}),
    proof("Einsum", [(6, 12)], {"equation": "ij->i"}),
    proof("Einsum", [(6, 12)], {"equation": "ij->ji"}),
    proof("Einsum", [(6,), (6, 12), (12,)], {"equation": "i,ij,j->ij"}),
    proof("Einsum", [(6, 12), (12, 4)], {"equation": "ij,jk"}),
    *[proof(op, [(6, 12, 2)], constants={1: [1]}) for op in REDUCTIONS],
    *[proof(op, [(6, 12, 2)], {"keepdims": 0}, constants={1: [-1, 0]}) for op in REDUCTIONS],
    *[proof(op, [(6, 12)], {"keepdims": 0}, span=(0.5, 1.5)) for op in (*REDUCTIONS, *BENT)],
    *[proof(op, [(6, 12, 2)], constants={1: [1]}, span=(0.5, 1.5)) for op in BENT],
    *[
        proof(op, [(6, 12)], {"noop_with_empty_axes": 1, "keepdims": keep}, span=(0.5, 1.5))
        for op in (*REDUCTIONS, *BENT)
        for keep in (0, 1)
    ],
    proof("ReduceL1", [(6, 12)], {"noop_with_empty_axes": 1}),
    proof("ReduceMean", [(6, 12, 2), np.array([1])], {"keepdims": 0}, static=True),
    proof("ReduceSum", [(6, 12, 2), np.array([0, 2])], {"keepdims": 0}, static=True),
    *[proof(op, [(6, 12, 2)], {"axis": axis}) for op in ("Softmax", "LogSoftmax") for axis in (-1, 1)],
    proof("LayerNormalization", [(6, 12, 5), (5,), (5,)]),
    proof("LayerNormalization", [(6, 12, 5), (5,)], {"axis": -1}),
    proof("LayerNormalization", [(6, 12, 5), (5,), (5,)], outputs=3, seeds=(0, 1, 2)),
    proof("LayerNormalization", [(6, 12, 3, 5), (3, 5)], {"axis": 2}, outputs=3, seeds=(1, 2), wanted=(0,)),
    proof("LayerNormalization", [(6, 12, 5), (5,)], outputs=3, seeds=(2,), wanted=(0,)),
    proof("LayerNormalization", [(6, 3, 5), (3, 5), (3, 5)], {"axis": 1, "epsilon": 1e-3}),
    proof("RMSNormalization", [(6, 12, 5), (5,)], opset=23),
    proof("RMSNormalization", [(6, 3, 5), (3, 5)], {"axis": 1, "epsilon": 1e-3}, opset=23),
    proof("SimplifiedLayerNormalization", [(6, 12, 5), (5,)], static=True, cuts=False),
    proof("GroupNormalization", [(2, 12, 5, 3), (12,), (12,)], {"num_groups": 6}),
    proof("InstanceNormalization", [(2, 12, 5, 3), (12,), (12,)]),
    proof("InstanceNormalization", [(2, 12, 7), (12,), (12,)], {"epsilon": 1e-2}),
    proof("BatchNormalization", [(6, 12, 5, 3), *STATISTICS], span=(0.5, 1.5)),
    proof("BatchNormalization", [(6, 12), *STATISTICS], span=(0.5, 1.5)),
    proof("BatchNormalization", [(6, 12, 5, 3), *STATISTICS], TRAINING, wanted=(0, 1, 2), outputs=3, span=(0.5, 1.5)),
    proof("BatchNormalization", [(6, 12), *STATISTICS], TRAINING, wanted=(0, 1, 2), outputs=3, span=(0.5, 1.5)),
]
