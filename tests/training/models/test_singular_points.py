"""Gradients at points where a function has none, or several: torch's conventions, function by function, held against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import Recorder
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.source import Source
from training_equivalence import run

torch = pytest.importorskip("torch")
F = torch.nn.functional

INF = float("inf")
PLAN = "ranks: 1\ntrain: {loss: loss, optimizer: {type: sgd, lr: 1}}\n"
ROWS = [[0, 0, 0], [0, 2, -2], [1, 2, -3]]
KINKS = [-3, -1, -0.5, -0.0, 0, 0.5, 1, 3]
FACTORS = [[0, 2, 3], [0, 0, 3], [1, 2, 3]]
TIES = [[1, 2, 2], [3, 3, 1], [0, 0, 0]]
BASES = [0, 0, 0, 2, -2]
Case = tuple[Callable[..., Any], list[Any]]


def _of(*functions: Any, at: Any) -> dict[str, Case]:
    return {function.__name__: (function, [at]) for function in functions}


CASES: dict[str, Case] = {
    **_of(torch.abs, torch.relu, torch.sign, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.softplus, at=KINKS),
    **_of(F.hardswish, F.hardsigmoid, F.softshrink, F.hardshrink, F.logsigmoid, F.hardtanh, F.softsign, at=KINKS),
    **{f"norm {p}": (lambda x, p=p: torch.linalg.vector_norm(x, p, -1), [ROWS]) for p in (0.5, 1, 1.5, 2, 3, INF)},
    "norm of all": (lambda x: x.norm(), [[0.0, 0.0]]),
    "normalize": (lambda x: F.normalize(x, dim=-1, eps=0.1), [ROWS]),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x + 1, -1, eps=0.1), [ROWS]),
    "pairwise_distance": (lambda x, y: F.pairwise_distance(x, y, eps=0), [ROWS, [[0, 0, 0], [0, 2, -2], [1, 2, 3]]]),
    **{
        f"cdist {p}": (lambda x, y, p=p: torch.cdist(x, y, p), [[[1, 2], [3, 2]], [[1, 2], [2, 4.5]]])
        for p in (1, 2, 3, INF)
    },
    "std": (lambda x: x.std(-1), [TIES]),
    "std_mean": (lambda x: torch.std_mean(x, -1)[0], [TIES]),
    "prod": (lambda x: x.prod(-1), [FACTORS]),
    "prod of all": (lambda x: x.prod(), [[0.0, 2, 3]]),
    "cumprod": (lambda x: x.cumprod(-1), [FACTORS]),
    **{f"power {k}": (lambda x, k=k: x**k, [[0, 1, 4]]) for k in (0, 1, 1.5, 2, 3)},
    "power of powers": (lambda x, y: x**y, [BASES[:4], [0, 2, 0.5, 0]]),
    "power of 0": (lambda x: 0.0**x, [[0, 1, 2]]),
    "clamp": (lambda x: x.clamp(-1, 1), [KINKS]),
    "clamp min": (lambda x: x.clamp(min=0.5), [KINKS]),
    "clamp by tensors": (torch.clamp, [KINKS[:3], [-1, -1, 0], [1, 1, 1]]),
    "maximum": (torch.maximum, [[1, 2, 0], [1, 3, 0]]),
    "fmax": (torch.fmax, [[1, 2, 0], [1, 3, 0]]),
    "fmin": (torch.fmin, [[1, 2, 0], [1, 3, 0]]),
    "amax": (lambda x: x.amax(-1), [TIES]),
    "max of a dim": (lambda x: x.max(-1).values, [TIES]),
    "min of a dim": (lambda x: x.min(-1, keepdim=True).values, [TIES]),
    "max": (lambda x: x.max(), [TIES]),
    "topk": (lambda x: x.topk(2, -1).values, [TIES]),
    "sort": (lambda x: x.sort(-1).values, [TIES]),
    "median": (lambda x: x.median(-1).values, [[[1, 3, 2], [5, 4, 6]]]),
    "median of all": (lambda x: x.median(), [TIES]),
    "kthvalue": (lambda x: x.kthvalue(2, -1).values, [[[1, 3, 2], [5, 4, 6]]]),
    "max_pool": (lambda x: F.max_pool1d(x[:, None], 2), [TIES]),
    "logsumexp": (lambda x: x.logsumexp(-1), [[[-INF, 0, 1], [0, 0, 0]]]),
    "softmax": (lambda x: x.softmax(-1), [[[-INF, 0, 1], [100, 0, -100]]]),
    "log_softmax": (lambda x: x.log_softmax(-1)[:, 1:], [[[-INF, 0, 1], [100, 0, -100]]]),
    "logaddexp": (torch.logaddexp, [[3, 90, -90, 0], [3, -90, 90, 0]]),
    "logaddexp2": (torch.logaddexp2, [[3, 90, -90, 0], [3, -90, 90, 0]]),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), [TIES]),
    "expm1": (torch.expm1, [[0, 1e-8, -200, 5, 0.5, -0.5]]),
    "log1p": (torch.log1p, [[0, 1e-8, -0.5, 5, 0.5, -0.75]]),
    "atan2": (torch.atan2, [[1, 0, -0.0, 3, -2], [0, -1, 2, 3, 2]]),
    "hypot": (torch.hypot, [[3, 1e-20, 1e20, 0], [4, 1e-20, 1e20, 2]]),
    "copysign": (torch.copysign, [[0, 1, -2], [-1, -0.0, 1]]),
    "xlogy": (torch.xlogy, [[0, 1, 2], [2, 3, 1]]),
    "remainder": (torch.remainder, [[5, -5, 2.5], [3, 3, -0.7]]),
    "fmod": (torch.fmod, [[5, -5, 2.5], [3, 3, -0.7]]),
    "floor_divide": (lambda x: torch.div(x, 0.7, rounding_mode="floor") + x, [[2.1, -2.1]]),
    "l1_loss": (lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"), [KINKS]),
    "margin_ranking_loss": (
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x), margin=1.0, reduction="none"),
        [[1, 2, 3], [1, 1, 2]],
    ),
    "attention of a masked row": (
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.tensor([[True, False], [False, False]])),
        [[[[[1, 2], [3, 4]]]]],
    ),
}


class _Points(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Each case at its points, which are parameters, weighted by numbers that no two elements share."""

    def __init__(self) -> None:
        super().__init__()
        for k, (_, points) in enumerate(CASES.values()):
            for j, point in enumerate(points):
                setattr(self, f"p{k}_{j}", torch.nn.Parameter(torch.tensor(point, dtype=torch.float32)))

    def forward(self, x: Any) -> Any:
        return sum(self.term(k, function) for k, (function, _) in enumerate(CASES.values())) + x.sum()

    def term(self, k: int, function: Callable[..., Any]) -> Any:
        points = [getattr(self, f"p{k}_{j}") for j in range(len([*CASES.values()][k][1]))]
        made = function(*points)
        return (made * (1 + torch.arange(made.numel()).reshape(made.shape) / 8)).sum()


def test_gradients_at_singular_points_are_torchs(tmp_path: Path) -> None:
    """The parameters are the points less the gradient, after a step of rate 1."""
    from partc.compiler.frontend.torch.torch_module import export

    module = _Points()
    source = Source(
        export(module, {"x": Input([2])}, None, DimNames({}, set()), ["loss"], "model.py", Recorder(Path()))
    )
    have = run(source, PLAN, tmp_path / "build", [{"x": np.zeros(2, np.float32)}])
    wrong = []
    for k, (name, (function, points)) in enumerate(CASES.items()):
        module.zero_grad()
        term = module.term(k, function)
        if term.requires_grad:
            term.backward()
        for j in range(len(points)):
            parameter = getattr(module, f"p{k}_{j}")
            theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            finite = torch.isfinite(parameter).numpy()
            wanted = (parameter.detach() - theirs).numpy()
            ours = have.after.get(f"p{k}_{j}", parameter.detach().numpy())
            if not np.allclose(ours[finite], wanted[finite], rtol=2e-6, atol=2e-7):
                slopes = parameter.detach().numpy() - ours
                wrong.append(f"{name}, operand {j}: {slopes.tolist()}, torch {theirs.tolist()}")
    assert not wrong, "\n".join(wrong)
