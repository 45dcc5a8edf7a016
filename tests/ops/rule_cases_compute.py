"""Cases for the prover: elementwise ops, products, convolution, pooling, reductions and normalizations."""

from __future__ import annotations

import numpy as np
from rule_prover import Case, case

CONTRIB = "com.microsoft"
RNG = np.random.default_rng(3)


def _ints(shape: tuple[int, ...], dtype: type, low: int = 0, high: int = 50) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


def _bits(size: int) -> dict[str, int]:
    return {"K": size, "N": 18, "bits": 4, "block_size": 16}


BIAS = "a product of terms goes with a bias that is in terms too, and what a layer adds is not"
AXES = "axes that only a run tells might be any"
PARAMETERS = "scales and shifts are parameters, which are not in terms"
TYPE = "an operand that gives only its type is expected whole, as it is where it has one element"


def _lacks(reason: str, *rows: str) -> dict[str, str]:
    return dict.fromkeys(rows, reason)


UNARY = (
    *("Abs", "Asinh", "Atan", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
    *("LeakyRelu", "Mish", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Softplus"),
    *("Softsign", "Tan", "Tanh", "ThresholdedRelu", "Identity", "Neg"),
)
WITHIN = {
    **dict.fromkeys(("Acos", "Asin", "Atanh"), (-0.9, 0.9)),
    "Acosh": (1.1, 4.0),
    **dict.fromkeys(("Cosh", "Sinh"), (-2.0, 2.0)),
    **dict.fromkeys(("Log", "Reciprocal", "Sqrt"), (0.1, 4.0)),
}
ODD_NUMBERS = np.where(RNG.random((6, 12)) < 0.5, 1, np.where(RNG.random((6, 12)) < 0.5, np.inf, np.nan)).astype(
    np.float32
)
COMPARED = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
LOGICAL = ("And", "Or", "Xor")
BITWISE = ("BitwiseAnd", "BitwiseOr", "BitwiseXor")

ELEMENTWISE = [
    *(case(name, [(6, 12)]) for name in UNARY),
    *(case(name, [(6, 12)], span=span) for name, span in WITHIN.items()),
    *(case(name, [ODD_NUMBERS]) for name in ("IsInf", "IsNaN")),
    case("Swish", [(6, 12)], opset=24),
    case("Not", [(6, 12)], dtype="bool"),
    case("BitwiseNot", [(6, 12)], dtype="int32"),
    *(case(name, [(6, 12), (12,)], dtype="int32") for name in COMPARED),
    *(case(name, [(6, 1, 12), (18, 12)], dtype="bool") for name in LOGICAL),
    *(case(name, [(6, 12), (6, 1)], dtype="int32") for name in BITWISE),
    case("BitShift", [_ints((6, 12), np.uint32), _ints((12,), np.uint32, 0, 4)], {"direction": "LEFT"}),
    case("Mod", [_ints((6, 12), np.int32), _ints((12,), np.int32, 1, 7)]),
    case("Mod", [(6, 12), (6, 12)], {"fmod": 1}, span=(0.5, 3.0)),
    case("Pow", [(6, 12), (12,)], span=(0.5, 3.0)),
    case("PRelu", [(6, 12, 18), (12, 1)]),
    case("Add", [(6, 12), (6, 12)]),
    case("Add", [(6, 12), (12,)]),
    case("Add", [(6, 12), (6, 12)], dtype="int32"),
    case("Add", [(6, 1, 18), (12, 1)]),
    case("Add", [(6, 12), np.float32(1.5)]),
    case("Sub", [(12,), (6, 12)]),
    case("Mul", [(6, 12), (6, 12)]),
    case("Mul", [(1, 12), (6, 1)]),
    case("Mul", [(6, 12), (6, 12)], dtype="int32"),
    case("Div", [(6, 12), (12,)], span=(0.5, 3.0)),
    case("Div", [_ints((6, 12), np.int32), _ints((6, 12), np.int32, 1, 7)]),
    *(case(name, [(6, 12), (12,), (6, 1)]) for name in ("Max", "Min", "Sum", "Mean")),
    *(case(name, [(6, 12)]) for name in ("Max", "Sum", "Mean")),
    case("Clip", [(6, 12), (), ()], constants={1: np.float32(-1), 2: np.float32(2)}),
    case("Clip", [(6, 12), None, np.array(1.5, np.float32)]),
    case("Clip", [(6, 12)], {"min": -1.0, "max": 2.0}, opset=10),
    case("Where", [RNG.random((6, 12)) < 0.5, (6, 12), (12,)]),
    case("Where", [RNG.random((6, 1)) < 0.5, (12,), ()]),
    case("Cast", [(6, 12)], {"to": 11}),
    case("Cast", [(6, 12)], {"to": 7}),
    case("Cast", [(6, 12)], {"to": 1}, dtype="int32"),
    case(
        "CastLike",
        [(6, 12), np.zeros((2, 4))],
        lacks=_lacks(
            TYPE,
            "P,S(0)->P",
            "P,S(1)->P",
            "R,S(0)->R",
            "R,S(1)->R",
            "S(0),S(0)->S(0)",
            "S(0),S(1)->S(0)",
            "S(1),S(0)->S(1)",
            "S(1),S(1)->S(1)",
        ),
    ),
    case("CastLike", [(6, 12), np.zeros(3, np.int64)]),
    case("Dropout", [(6, 12)], outputs=2, lacks=_lacks("the mask is no sum", "P->P,R")),
    case("Dropout", [(6, 12)], constants={1: np.float32(0.5), 2: np.array(False)}),
    case("Dropout", [(6, 12)], opset=10),
    case("Gelu", [(6, 12)], domain=CONTRIB),
    case("QuickGelu", [(6, 12)], {"alpha": 1.5}, domain=CONTRIB),
    case("BiasGelu", [(6, 12), (12,)], domain=CONTRIB),
    case("FastGelu", [(6, 12), (12,)], domain=CONTRIB),
    case("FastGelu", [(6, 12)], domain=CONTRIB),
]

PRODUCTS = [
    case("MatMul", [(6, 12), (12, 18)]),
    case("MatMul", [(2, 6, 12), (12, 18)], undivided="a"),
    case("MatMul", [(6, 1, 6, 12), (18, 12, 6)]),
    case("MatMul", [(12,), (6, 12, 18)]),
    case("MatMul", [(6, 18, 12), (12,)]),
    case("MatMul", [(12,), (12,)]),
    case("MatMul", [(6, 12), (12, 18)], dtype="int32"),
    case("Gemm", [(6, 12), (12, 18)]),
    case("Gemm", [(6, 12), (12, 18)], {"alpha": 0.5}),
    case(
        "Gemm",
        [(12, 6), (18, 12), (18,)],
        {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0},
        lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(0),S(1),P->P"),
    ),
    case(
        "Gemm",
        [(6, 12), (18, 12), (6, 18)],
        {"transB": 1},
        lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(1),P->P"),
    ),
    case("Gemm", [(6, 12), (12, 18), (6, 1)], lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(0),P->P")),
    case("Gemm", [(6, 12), (12, 18), (1, 18)], lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(0),P->P")),
    case("Gemm", [(6, 12), (12, 18), ()], lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(0),P->P")),
    case("Gemm", [(6, 12), (12, 18), (1,)], lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(0),P->P")),
    case("Einsum", [(6, 12), (12, 18)], {"equation": "ij,jk->ik"}),
    case("Einsum", [(6, 12), (12, 18)], {"equation": "ij, jk"}),
    case("Einsum", [(6, 12, 12)], {"equation": "bii->b"}),
    case("Einsum", [(6, 12, 18), (6, 18, 12)], {"equation": "...ij,...jk->...ik"}),
    case("Einsum", [(6, 12), (18,), (6, 18)], {"equation": "ab,c,ac->bc"}),
    case("Einsum", [(6, 12)], {"equation": "ij->"}),
    case("Einsum", [(6, 12)], {"equation": "ij->ji"}),
    *(
        case(
            "MatMulNBits", [source, _ints((18, blocks, 8), np.uint8, 0, 256), *more], _bits(16 * blocks), domain=CONTRIB
        )
        for source, blocks, more in (
            ((6, 96), 6, [(18, 6)]),
            ((6, 6, 192), 12, [(18, 12), _ints((18, 6), np.uint8, 0, 256)]),  # zero points packed, two blocks a byte
            ((6, 96), 6, [(18, 6), (18, 6)]),
            ((6, 96), 6, [(108,), _ints((54,), np.uint8, 0, 256)]),
        )
    ),
    case(
        "MatMulNBits",
        [(6, 96), _ints((18, 6, 8), np.uint8, 0, 256), (18, 6), None, None],
        _bits(96),
        constants={5: RNG.random(18, np.float32)},
        domain=CONTRIB,
    ),
    case("MatMulInteger", [_ints((6, 12), np.uint8), _ints((12, 18), np.uint8)]),
    case("MatMulInteger", [_ints((6, 6, 12), np.uint8), _ints((12, 18), np.int8), np.uint8(3), _ints((18,), np.int8)]),
    case(
        "QLinearMatMul",
        [
            *(_ints((6, 12), np.uint8), np.float32(0.5), np.uint8(3)),
            *(_ints((12, 18), np.uint8), RNG.random(18, np.float32), _ints((18,), np.uint8)),
            *(np.float32(20.5), np.uint8(7)),
        ],
    ),
    case("FusedMatMul", [(6, 12), (12, 18)], {"alpha": 0.5}, domain=CONTRIB),
    case("FusedMatMul", [(6, 12, 18), (6, 6, 12)], {"transA": 1, "transB": 1}, domain=CONTRIB),
    case("FusedMatMul", [(6, 12, 18), (12, 18, 6)], {"transBatchA": 1}, domain=CONTRIB),
    case(
        "FusedMatMul",
        [(18, 12, 6), (6, 12, 18)],
        {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1},
        domain=CONTRIB,
    ),
    case("FusedMatMul", [(12,), (12, 18)], domain=CONTRIB),
]

CONVOLUTION = [
    case("Conv", [(6, 12, 5, 7), (18, 12, 3, 3)], {"pads": [1, 1, 1, 1]}),
    case(
        "Conv",
        [(6, 12, 5, 7), (18, 12, 3, 3), (18,)],
        {"strides": [2, 1]},
        lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(1),P->P"),
    ),
    case("Conv", [(6, 12, 12, 6), (18, 12, 1, 1), (18,)], lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(1),P->P")),
    case("Conv", [(6, 12, 12, 18), (6, 12, 2, 3)], {"strides": [2, 3]}),
    case("Conv", [(6, 12, 9), (18, 12, 3)], {"auto_pad": "SAME_UPPER"}),
    case("Conv", [(6, 12, 5, 7), (12, 1, 3, 3), (12,)], {"group": 12}, lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P")),
    case("Conv", [(6, 18, 5, 7), (12, 3, 3, 3)], {"group": 6}),
    case(
        "ConvTranspose",
        [(6, 12, 5, 7), (12, 18, 3, 3), (18,)],
        {"strides": [2, 2]},
        lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P", "S(1),S(0),P->P"),
    ),
    case(
        "ConvTranspose",
        [(6, 12, 5, 7), (12, 18, 3, 3)],
        {"pads": [1, 1, 1, 1], "output_padding": [1, 1], "strides": [2, 2]},
    ),
    case("ConvTranspose", [(6, 12, 6, 12), (12, 6, 2, 2)], {"strides": [2, 2]}),
    case(
        "ConvTranspose", [(6, 12, 5, 7), (12, 3, 3, 3), (18,)], {"group": 6}, lacks=_lacks(BIAS, "P,R,P->P", "R,P,P->P")
    ),
    case("ConvInteger", [_ints((6, 12, 5, 7), np.uint8), _ints((18, 12, 3, 3), np.uint8), np.uint8(3), np.uint8(9)]),
    case("ConvInteger", [_ints((6, 12, 5, 7), np.uint8), _ints((12, 2, 3, 3), np.uint8), np.uint8(3)], {"group": 6}),
    case(
        "QLinearConv",
        [
            *(_ints((6, 12, 5, 7), np.uint8), np.float32(0.5), np.uint8(3)),
            *(_ints((18, 12, 3, 3), np.uint8), RNG.random(18, np.float32), np.full(18, 5, np.uint8)),
            *(np.float32(80.5), np.uint8(7), _ints((18,), np.int32)),
        ],
    ),
    case(
        "QLinearConv",
        [
            *(_ints((6, 12, 5, 7), np.uint8), np.float32(0.5), np.uint8(3)),
            *(_ints((12, 2, 3, 3), np.uint8), np.float32(0.25), np.uint8(5)),
            *(np.float32(20.5), np.uint8(7)),
        ],
        {"group": 6},
    ),
    case(
        "DeformConv",
        [(6, 12, 5, 5), (18, 12, 3, 3), (6, 18, 3, 3), (18,), (6, 9, 3, 3)],
        {},
        opset=22,
        lacks=_lacks(BIAS, "P,R,R,P,R->P", "R,P,R,P,R->P", "R,R,R,P,P->P", "S(1),S(1),R,P,R->P"),
    ),
    case("DeformConv", [(6, 12, 5, 5), (18, 2, 2, 2), (6, 16, 4, 4)], {"group": 6, "offset_group": 2}, opset=22),
]

POOLING = [
    case("MaxPool", [(6, 12, 5, 7)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    case("MaxPool", [(6, 12, 12, 18)], {"kernel_shape": [2, 3], "strides": [2, 3]}),
    case("MaxPool", [(6, 12, 5, 7)], {"kernel_shape": [3, 3]}, outputs=2),
    case("AveragePool", [(6, 12, 5, 7)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    case("MaxPool", [(6, 12, 12, 18)], {"kernel_shape": [1, 2], "strides": [2, 3], "ceil_mode": 1}),
    case("MaxPool", [(6, 12, 12, 18)], {"kernel_shape": [1, 2], "strides": [2, 3]}),
    case("AveragePool", [(6, 12, 12, 18)], {"kernel_shape": [2, 3], "strides": [2, 3]}),
    case("LpPool", [(6, 12, 5, 7)], {"kernel_shape": [3, 3]}),
    case("GlobalAveragePool", [(6, 12, 6, 18)]),
    case("GlobalAveragePool", [(6, 12, 18)]),
    case("GlobalMaxPool", [(6, 12, 6, 18)]),
    case("GlobalLpPool", [(6, 12, 6, 18)]),
    case(
        "MaxRoiPool",
        [(2, 12, 8, 8), np.array([[k % 2, 0, 0, k + 1, 7] for k in range(6)], np.float32)],
        {"pooled_shape": [2, 2]},
    ),
    case(
        "MaxUnpool", [(1, 6, 2, 2), np.arange(24).reshape(1, 6, 2, 2) * 4], {"kernel_shape": [2, 2], "strides": [2, 2]}
    ),
]

SUMS = ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceSumSquare", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd")
REDUCTIONS = [
    *(case(name, [(6, 12)], constants={1: [1]}) for name in SUMS),
    *(case(name, [(6, 12, 18)], {"keepdims": 0}, constants={1: [0, -1]}, span=(0.5, 1.5)) for name in SUMS[:6]),
    *(case(name, [(6, 12)], span=(0.5, 1.5)) for name in SUMS),
    case("ReduceSum", [(6, 12)], {"axes": [0], "keepdims": 0}, opset=11),
    case("ReduceSum", [(6, 12)], {"noop_with_empty_axes": 1}),
    case("ReduceSum", [(6, 12), np.array([1])], lacks=_lacks(AXES, "S(0),R->S(0)", "S(1),R->P")),
    case("ReduceSum", [(6, 12)], constants={1: [1]}, dtype="int32"),
    case("ReduceMean", [(6, 12)], constants={1: [1]}, dtype="int32"),
    case("ReduceMax", [RNG.random((6, 12)) < 0.1], constants={1: [1]}),
    case("ReduceMax", [(6, 12)], constants={1: [1]}, dtype="int32"),
    *(case(name, [(6, 12)], constants={1: [1]}, span=(0.5, 1.5)) for name in ("ReduceLogSum", "ReduceLogSumExp")),
    case("ArgMax", [(6, 12)], {"axis": 1}),
    case("ArgMin", [(6, 12, 18)], {"axis": 1, "keepdims": 0}),
    case("TopK", [(6, 12)], {"axis": 0}, constants={1: [2]}, outputs=2),
    case("TopK", [(6, 12), np.array([4])], outputs=2),
    case("CumSum", [(6, 12)], constants={1: 1}),
    case("CumSum", [(6, 12)], {"reverse": 1, "exclusive": 1}, constants={1: -2}),
    case("CumSum", [(6, 12), np.array(1)], lacks=_lacks(AXES, "S(0),R->S(0)")),
    case("CumProd", [(6, 12)], constants={1: 1}, opset=26, span=(0.5, 1.5)),
]

NORMALIZATIONS = [
    *(case(name, [(6, 12, 18)]) for name in ("Softmax", "LogSoftmax", "Hardmax")),
    *(case(name, [(6, 12, 18)], {"axis": 1}) for name in ("Softmax", "LogSoftmax", "Hardmax")),
    *(case(name, [(6, 12, 18)], {"axis": 2}, opset=11) for name in ("Softmax", "LogSoftmax", "Hardmax")),
    case("Softmax", [(6, 12, 18)], opset=11),
    case("LpNormalization", [(6, 12)]),
    case("LpNormalization", [(6, 12)], {"axis": 0, "p": 1}),
    case("MeanVarianceNormalization", [(6, 12, 4, 6)]),
    case("MeanVarianceNormalization", [(6, 12, 4)], {"axes": [-1]}),
    case("LRN", [(6, 12, 6, 18)], {"size": 3}),
    case("LayerNormalization", [(6, 12, 18), (18,), (18,)], outputs=3, lacks=_lacks(PARAMETERS, "R,P,P->P,R,R")),
    case("LayerNormalization", [(6, 12, 18), (12, 18)], {"axis": 1}, lacks=_lacks(PARAMETERS, "R,P->P")),
    case("RMSNormalization", [(6, 12, 18), (18,)], opset=23, lacks=_lacks(PARAMETERS, "R,P->P")),
    case("SimplifiedLayerNormalization", [(6, 12, 18), (18,)], lacks=_lacks(PARAMETERS, "R,P->P")),
    case(
        "SkipLayerNormalization",
        [(6, 12, 18), (6, 12, 18), (18,), (18,), (18,)],
        domain=CONTRIB,
        lacks=_lacks(PARAMETERS, "R,R,P,P,R->P"),
    ),
    case(
        "SkipLayerNormalization", [(6, 12, 18), (12, 18), (18,)], domain=CONTRIB, lacks=_lacks(PARAMETERS, "R,R,P->P")
    ),
    case(
        "SkipSimplifiedLayerNormalization",
        [(6, 12, 18), (6, 12, 18), (18,)],
        domain=CONTRIB,
        lacks=_lacks(PARAMETERS, "R,R,P->P"),
    ),
    case("GroupNormalization", [(6, 12, 4, 4), (12,), (12,)], {"num_groups": 6}, lacks=_lacks(PARAMETERS, "R,P,P->P")),
    case(
        "GroupNormalization",
        [(6, 12, 4, 4), (6,), (6,)],
        {"num_groups": 6},
        opset=18,
        lacks=_lacks(PARAMETERS, "R,P,P->P"),
    ),
    case("InstanceNormalization", [(6, 12, 4, 4), (12,), (12,)], lacks=_lacks(PARAMETERS, "R,P,P->P")),
    case(
        "BatchNormalization",
        [(6, 12, 6, 18), (12,), (12,), (12,), (12,)],
        span=(0.5, 1.5),
        lacks=_lacks(PARAMETERS, "P,R,P,P,R->P", "R,P,P,R,R->P"),
    ),
    case(
        "BatchNormalization",
        [(6, 12), (12,), (12,), (12,), (12,)],
        opset=9,
        span=(0.5, 1.5),
        lacks=_lacks(PARAMETERS, "P,R,P,P,R->P", "R,P,P,R,R->P"),
    ),
    case(
        "BatchNormalization",
        [(6, 12, 4), (12,), (12,), (12,), (12,)],
        {"training_mode": 1},
        outputs=3,
        span=(0.5, 1.5),
        lacks=_lacks(PARAMETERS, "R,P,P,R,R->P,R,R"),
    ),
]

CASES: list[Case] = [*ELEMENTWISE, *PRODUCTS, *CONVOLUTION, *POOLING, *REDUCTIONS, *NORMALIZATIONS]
