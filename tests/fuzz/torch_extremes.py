"""Functions of torch where numbers are extreme: their export gives in stock onnxruntime what torch gives, or the guide says where not.

    python tests/fuzz/torch_extremes.py             all functions
    python tests/fuzz/torch_extremes.py --only amax log1p

Functions that differ are in the table of `samples/guide/models.md`, or in its last sentence, where they have no translation, and
what is there differs: another outcome is a fault.

Inputs are zeros of both signs, denormals, numbers around 1e-6, ordinary ones, 30 to 100, 1e19 to 3e38, infinities and NaN.
A number is torch's within 1e-5 of its size and the smallest normal number, of torch in 32 bits or of torch in 64.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
import torch.nn.functional as F
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import Recorder
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.torch.torch_module import export

GUIDE = Path(__file__).parents[2] / "samples/guide/models.md"
CLOSE, SMALLEST = 1e-5, float(np.finfo(np.float32).tiny)
INF, NAN = float("inf"), float("nan")
ROWS: dict[str, list[float]] = {
    "zeros": [0, 0, 0, 0, 0, 0],
    "signed zeros": [-0.0, 0, -0.0, 0, 1, -1],
    "ties": [2, 2, -3, 2, -3, 0.5],
    "denormal": [1e-40, -1e-40, 3e-45, 2e-39, 0, -1e-39],
    "tiny": [1e-10, -1e-10, 1e-6, 2e-6, 1e-20, -1e-7],
    "near one": [1, 1 + 1e-6, 1 - 1e-6, -1, -1 - 1e-6, -1 + 1e-6],
    "ordinary": [0.7, 1.4, -0.7, -1.4, 2.1, 0.35],
    "multiples": [2.1, -2.1, 5.25, -7.7, 3.5, -0.25],
    "tens": [30, -30, 88, -88, 90, 100],
    "hundreds": [17, -17, 19, -19, 104, -104],
    "large": [1e19, -1e19, 1e30, 3e38, -3e38, 1e38],
    "infinite": [INF, 1, 2, 3, 4, 5],
    "minus infinite": [-INF, 1, 2, 3, 4, 5],
    "infinities": [INF, -INF, INF, 1, -INF, 0],
    "all minus infinite": [-INF, -INF, -INF, -INF, -INF, -INF],
    "nan": [NAN, 1, 2, 3, 4, 5],
    "last nan": [1, 2, -3, 4, INF, NAN],
}
X = np.array([*ROWS.values()], np.float32)

Function = Callable[[torch.Tensor], Any]


def _other(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "deg2rad", "erf", "erfc", "exp"),
    *(
        "exp2",
        "expm1",
        "floor",
        "frac",
        "isfinite",
        "isinf",
        "isnan",
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "logit",
    ),
    *("nan_to_num", "neg", "positive", "rad2deg", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "signbit"),
    *(
        "sin",
        "sinc",
        "sinh",
        "sqrt",
        "square",
        "tan",
        "tanh",
        "trunc",
        "isposinf",
        "isneginf",
        "sgn",
        "digamma",
        "erfinv",
    ),
)
ACTIVATIONS = (
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish"),
    *("relu6", "selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink"),
)
BINARY = (
    *("add", "sub", "mul", "div", "pow", "atan2", "maximum", "minimum", "fmax", "fmin", "logaddexp", "logaddexp2"),
    *("floor_divide", "remainder", "fmod", "hypot", "copysign", "true_divide", "xlogy", "eq", "lt", "ge", "heaviside"),
)
FUNCTIONS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in UNARY},
    **{f"F.{name}": getattr(F, name) for name in ACTIVATIONS},
    **{name: (lambda x, name=name: getattr(torch, name)(x, _other(x))) for name in BINARY},
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus beta": lambda x: F.softplus(x, beta=3, threshold=5),
    "threshold": lambda x: F.threshold(x, 0.1, -2),
    "rrelu eval": lambda x: F.rrelu(x, training=False),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)),
    "glu": lambda x: F.glu(x, -1),
    "floor division": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "trunc division": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "remainder of a number": lambda x: torch.remainder(x, 0.7),
    "fmod of a number": lambda x: torch.fmod(x, -0.7),
    "//": lambda x: x // 0.7,
    "%": lambda x: x % -0.7,
    "power 0.5": lambda x: x**0.5,
    "power 2": lambda x: x**2,
    "power 3": lambda x: x**3,
    "power -1": lambda x: x**-1,
    "power -0.5": lambda x: x**-0.5,
    "power 0": lambda x: x**0,
    "power of 2": lambda x: 2.0**x,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp min": lambda x: x.clamp(min=1e-9),
    "clamp by tensors": lambda x: torch.clamp(x, x.new_tensor(-1.0), x.new_tensor(1.0)),
    "where": lambda x: torch.where(x > 0, x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "lerp": lambda x: torch.lerp(x, _other(x), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, _other(x), value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, _other(x), value=0.5),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "aminmax": lambda x: torch.aminmax(x, dim=-1),
    "max of a dim": lambda x: x.max(-1).values,
    "min of a dim": lambda x: x.min(-1).values,
    "indices of max": lambda x: x.max(-1).indices,
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "max of all": lambda x: x[:3].max(),
    "min of all": lambda x: x[:3].min(),
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.sum(-1),
    "prod": lambda x: x.prod(-1),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(-1),
    "var_mean": lambda x: torch.var_mean(x, -1, correction=0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmin": lambda x: F.softmin(x, -1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "cummax": lambda x: x.cummax(-1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "median": lambda x: x.median(-1).values,
    "indices of median": lambda x: x.median(-1).indices,
    "nanmedian": lambda x: x.nanmedian(-1).values,
    "median of all": lambda x: x[:8].median(),
    "nansum": lambda x: x.nansum(-1),
    "nanmean": lambda x: x.nanmean(-1),
    "sort": lambda x: x.sort(-1).values,
    "sort descending": lambda x: x.sort(-1, descending=True).values,
    "stable argsort": lambda x: x.argsort(stable=True, dim=-1),
    "topk": lambda x: x.topk(3, -1).values,
    "smallest": lambda x: x.topk(3, -1, largest=False).values,
    "kthvalue": lambda x: x.kthvalue(2, -1).values,
    "quantile": lambda x: x[4:8].quantile(0.3, -1),
    "norm": lambda x: x.norm(dim=-1),
    "norm 1": lambda x: x.norm(1, -1),
    "norm 3": lambda x: x.norm(3, -1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, INF, -1),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, -INF, -1),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, -1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x + 1),
    "cdist": lambda x: torch.cdist(x[:, None], x[:, None] + 1),
    "cdist 1": lambda x: torch.cdist(x[:, None], x[:, None] + 1, p=1),
    "cdist inf": lambda x: torch.cdist(x[:, None], x[:, None] + 1, p=INF),
    "dist": lambda x: torch.dist(x[4], x[5]),
    "renorm": lambda x: torch.renorm(x[:8], 2, 0, 1.0),
    "rms_norm": lambda x: F.rms_norm(x, (6,), eps=1e-8),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "group_norm": lambda x: F.group_norm(x[:, :, None], 2),
    "instance_norm": lambda x: F.instance_norm(x[:, None]),
    "local_response_norm": lambda x: F.local_response_norm(x[:, :, None], 3),
    "l1_loss": lambda x: F.l1_loss(x, _other(x), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, _other(x), reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, _other(x), reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, _other(x), reduction="none", delta=0.5),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, _other(x).sign(), reduction="none"),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, (_other(x) > 0).to(x.dtype), reduction="none"),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid().nan_to_num(), (_other(x) > 0).to(x.dtype), reduction="none"),
    "cross_entropy": lambda x: F.cross_entropy(x, (x[:, 0] > 0).long(), reduction="none"),
    "nll of log_softmax": lambda x: F.nll_loss(x.log_softmax(-1), (x[:, 0] > 0).long(), reduction="none"),
    "kl_div": lambda x: F.kl_div(x, _other(x).softmax(-1), reduction="none"),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, _other(x).abs(), reduction="none"),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x + 1, _other(x).abs(), reduction="none"),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, (_other(x) > 0) * 2.0 - 1, reduction="none"),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x + 1, (x > 0) * 2.0 - 1, reduction="none"),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x + 1, (x[:, 0] > 0) * 2.0 - 1, reduction="none"),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x + 1, _other(x), reduction="none"),
    "max_pool1d": lambda x: F.max_pool1d(x[:, None], 2),
    "avg_pool1d": lambda x: F.avg_pool1d(x[:, None], 2),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[:, None], 2),
    "lp_pool1d": lambda x: F.lp_pool1d(x[:, None], 2.0, 2),
    "attention of a masked row": lambda x: F.scaled_dot_product_attention(
        *[x[None, None, 6:9]] * 3, torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    ),
    "to int": lambda x: x[6:10].to(torch.int64),
    "to half": lambda x: x.half(),
    "to bfloat16": lambda x: x.bfloat16().float(),
    "logical_not": torch.logical_not,
    "logical_and": lambda x: torch.logical_and(x, _other(x)),
    "all": lambda x: x.all(-1),
    "any": lambda x: x.any(-1),
    "count_nonzero": lambda x: x.count_nonzero(-1),
    "diff": lambda x: x.diff(dim=-1),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:]),
    "outer": lambda x: torch.outer(x[6], x[7]),
    "matmul": lambda x: x[:8] @ x[:8].T,
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    "scatter amax": lambda x: torch.zeros_like(x).scatter_reduce(-1, (x > 0).long(), x, "amax"),
    "logical xor of signs": lambda x: torch.logical_xor(x > 0, _other(x) > 0),
    "frac of a product": lambda x: torch.frac(x * 3),
    "round to decimals": lambda x: torch.round(x, decimals=2),
    "mul by 1.000005": lambda x: x * 1.000005,
    "add 1e-8": lambda x: x + 1e-8,
    "rsqrt of a mean": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8),
    "log of a clamp": lambda x: torch.log(x.clamp(min=1e-12)),
    "special.entr": torch.special.entr,
    "special.xlog1py": lambda x: torch.special.xlog1py(x, _other(x)),
    "special.ndtr": torch.special.ndtr,
    "special.log_ndtr": torch.special.log_ndtr,
    "special.i0": torch.special.i0,
    "polar angle": lambda x: torch.atan2(x, x.flip(-1)),
}


class _Several(torch.nn.Module):
    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(one for f in self.functions for one in _parts(f(x)))


def _parts(made: Any) -> tuple[torch.Tensor, ...]:
    return tuple(made) if isinstance(made, tuple) else (made,)


def run(names: Sequence[str]) -> dict[str, list[np.ndarray] | str]:
    """By function what its export gives in stock onnxruntime, or why it has none; functions share an export where all of them have one."""
    functions = [FUNCTIONS[name] for name in names]
    counts = [len(_parts(f(torch.tensor(X)))) for f in functions]
    module = _Several(functions)
    outputs = [f"y{k}" for k in range(sum(counts))]
    try:
        model = export(
            module,
            {"x": Input(list(X.shape), "float32")},
            None,
            DimNames({}, set()),
            outputs,
            "functions",
            Recorder(Path()),
        )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        content = ir.to_proto(model).SerializeToString()
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        made = iter(session.run(outputs, {"x": X}))
    except Exception as error:
        if len(names) == 1:
            return {names[0]: f"{type(error).__name__}: " + " ".join(str(error).split())[:300]}
        half = len(names) // 2
        return {**run(names[:half]), **run(names[half:])}
    return {name: [next(made) for _ in range(count)] for name, count in zip(names, counts, strict=True)}


def differences(name: str, made: Sequence[np.ndarray]) -> dict[tuple[int, ...], tuple[float, float]]:
    """By place the numbers of the export and of torch that differ."""
    found = {}
    single = _parts(FUNCTIONS[name](torch.tensor(X)))
    double = _parts(FUNCTIONS[name](torch.tensor(X, dtype=torch.float64)))
    for k, (array, theirs, precise) in enumerate(zip(made, single, double, strict=True)):
        ours, wanted = array.astype(np.float64), theirs.numpy().astype(np.float64)
        if ours.shape != wanted.shape:
            return {(k,): (float(ours.size), float(wanted.size))}
        with np.errstate(all="ignore"):
            same = _close(ours, wanted) | _close(ours, precise.numpy().astype(np.float32).astype(np.float64))
        for place in np.argwhere(~same):
            found[(k, *place.tolist())] = float(ours[tuple(place)]), float(wanted[tuple(place)])
    return found


def _close(ours: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    close = np.abs(ours - wanted) <= CLOSE * np.abs(wanted) + SMALLEST
    close = np.where(np.isfinite(ours) & np.isfinite(wanted), close, ours == wanted)
    return close | (np.isnan(ours) & np.isnan(wanted))


def listed() -> set[str]:
    """The functions that the guide's page names, in its table and after it, as differing or without a translation."""
    text = GUIDE.read_text()
    table = text[text.index("| functions |") :]
    names = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}
    return names & {*FUNCTIONS}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[*FUNCTIONS])
    names = parser.parse_args(arguments).only
    known, faults = listed(), 0
    for begin in range(0, len(names), 24):
        for name, made in run(names[begin : begin + 24]).items():
            wrong = made if isinstance(made, str) else _text(name, made)
            as_listed = bool(wrong) == (name in known)
            faults += not as_listed
            if wrong or not as_listed:
                print(f"{name:24} {'' if as_listed else 'NOT AS IN THE GUIDE: '}{wrong or 'torch has the same'}")
    print(f"{len(names)} functions, {faults} not as in the guide")
    return faults > 0


def _text(name: str, made: Sequence[np.ndarray]) -> str:
    wrong = differences(name, made)
    if not wrong:
        return ""
    by_row = all(len(place) > 1 for place in wrong) and len(made[0]) == len(X)
    rows = dict.fromkeys([*ROWS][place[1]] if by_row else str(place) for place in wrong)
    place, (ours, theirs) = next(iter(wrong.items()))
    return f"{', '.join(rows)}: at {place} {ours:g}, torch {theirs:g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
