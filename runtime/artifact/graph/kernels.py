"""The properties of onnxruntime's kernels by op: one table of these facts for the compiler and the runtime.

Sources: the kernels of onnxruntime 1.31 on CPUs; for CUDA docs/OperatorKernels.md of onnxruntime, commit 001d12d2623f. An op that no
table lists has a kernel on CUDA but no 16-bit kernel on CPUs, writes its result to a new tensor, and reads all inputs on its device.
"""

from __future__ import annotations


def _ops(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


BOTH_HALVES = _ops(
    "Cast Concat Constant ConstantOfShape Flatten Gather GatherElements GatherND Identity IsNaN Reshape ScatterElements",
    "Shape Slice Split Squeeze Transpose Unsqueeze",
)
"""The ops with CPU kernels for float16 and bfloat16; a scatter with a reduction has none."""
FLOAT16_KERNELS = BOTH_HALVES | _ops(
    "Attention Clip Compress Expand IsInf LayerNormalization Max Min Mod RMSNormalization ReverseSequence Round ScatterND",
    "Shrink Sign",
)
"""The ops with CPU kernels for float16."""
VIEWS = _ops("Flatten Identity Reshape Squeeze Unsqueeze")
"""Ops whose result shares the memory of their first operand."""
OVERWRITING = _ops(
    "Abs Cast Ceil Clip Elu Exp Floor HardSigmoid LeakyRelu Log Neg Not Reciprocal Relu ScatterElements ScatterND Selu",
    "Sigmoid Softplus Softsign Sqrt Tanh",
)
"""Ops whose kernels write their first result over their first operand; those of two operands do not."""
NOT_ON_CUDA = _ops(
    "Col2Im ConvInteger Cosh DFT Det DynamicQuantizeLinear GlobalLpPool Hardmax LpNormalization LpPool MaxRoiPool MaxUnpool",
    "Mean MeanVarianceNormalization MelWeightMatrix Mish Multinomial Optional QLinearConv QLinearMatMul RegexFullMatch STFT",
    "Sinh SplitToSequence StringConcat StringNormalizer StringSplit Tan TfIdfVectorizer Unique",
)
"""Ops of models that have no kernel on CUDA. The list need not be complete: loading refuses a node on cuda without a kernel, by name."""
FLOATS_ON_CUDA = _ops("Gemm MatMul Pad Relu Sum")
"""Ops whose kernels on CUDA take no integers."""
_HOST = {
    (0,): _ops("BlackmanWindow ConstantOfShape HammingWindow HannWindow If MelWeightMatrix"),
    (0, 1): _ops("Loop"),
    (0, 1, 2): _ops("Range"),
    (1,): _ops(
        "AffineGrid CenterCropPad CumProd CumSum Expand OneHot ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax",
        "ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape Split Squeeze Tile TopK Trilu Unsqueeze Upsample",
    ),
    (1, 2): _ops("Col2Im Dropout"),
    (1, 2, 3): _ops("Pad Resize"),
    (1, 2, 3, 4): _ops("Slice"),
    (2, 3, 4): _ops("NonMaxSuppression"),
    (4,): _ops("GRU LSTM RNN"),
    (6,): _ops("com.microsoft.GroupQueryAttention"),
}
"""Maps indices of inputs to the ops whose kernels read them on the host; ops outside the standard domain are written with their domain."""
_HOST_INPUTS = {name: places for places, names in _HOST.items() for name in names}


def host_inputs(domain: str, op_type: str) -> tuple[int, ...]:
    """Returns the indices of an op's inputs that its kernels read on the host, whichever device computes: a shape, axes, a condition."""
    return _HOST_INPUTS.get(op_type if domain in ("", "ai.onnx") else f"{domain}.{op_type}", ())
