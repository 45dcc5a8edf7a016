"""Modules and functions of torch with their special cases, for `torch_semantics.py`, written from torch's documentation.

Each case is a module that makes a scalar of the same inputs: `x` (6, 8) with zeros, ties and values at kinks, `ids` (6, 5) in which row 0
is padding, and classes `label` (6). REFUSED says of each case that partc does not train a word of its refusal; all others must be equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH, LENGTH, ROWS, CLASSES = 6, 8, 5, 9, 4
Tensor = torch.Tensor
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Case(nn.Module):
    """A module of some layers and a function of them and the inputs."""

    def __init__(self, loss: Loss, **layers: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
        return self.loss(self, x, ids, label)


CASES: dict[str, Callable[[], nn.Module]] = {}
REFUSED: dict[str, str] = {}
"""By case what its refusal names."""


def case(name: str, refused: str = "") -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Registers a function that makes a case."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        assert name not in CASES, name
        CASES[name] = make
        if refused:
            REFUSED[name] = refused
        return make

    return register


def _of_layer(name: str, make: Callable[[], nn.Module], loss: Loss, refused: str = "") -> None:
    case(name, refused)(lambda: Case(loss, layer=make()))


def batch(seed: int) -> dict[str, np.ndarray]:
    """The inputs of a step."""
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((BATCH, WIDTH)).astype(np.float32)
    x[0], x[1, :4], x[2, :3] = 0, (1, -1, 3, -3), x[2, 0]
    x[3] = x[4]
    ids = chance.integers(0, ROWS, (BATCH, LENGTH))
    ids[:, 3:], ids[0] = 0, 0
    label = chance.integers(0, CLASSES, BATCH)
    return {"x": x, "ids": ids, "label": label}


def _square(y: Tensor) -> Tensor:
    return (y - 0.1).square().mean()


def _bent(y: Tensor) -> Tensor:
    """A scalar whose gradient differs from element to element."""
    return (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape).cos()).sum() / 8


# Embeddings.
def _looked_up(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    return _bent(torch.tanh(self.layer(ids)))


for _name, _options in {
    "Embedding(padding_idx=0)": {"padding_idx": 0},
    "Embedding(padding_idx=-9), from the end": {"padding_idx": -ROWS},
    "Embedding(sparse=True)": {"sparse": True},
    "Embedding(padding_idx=0, sparse=True)": {"padding_idx": 0, "sparse": True},
}.items():
    _of_layer(_name, functools.partial(nn.Embedding, ROWS, 3, **_options), _looked_up)
_of_layer(
    "Embedding(scale_grad_by_freq=True)",
    lambda: nn.Embedding(ROWS, 3, scale_grad_by_freq=True),
    _looked_up,
    "scale_grad_by_freq",
)
_of_layer("Embedding(max_norm=1)", lambda: nn.Embedding(ROWS, 3, max_norm=1.0), _looked_up, "max_norm")
_of_layer(
    "Embedding.from_pretrained, frozen",
    lambda: nn.ModuleList([nn.Embedding.from_pretrained(torch.randn(ROWS, 3)), nn.Linear(3, 2)]),
    lambda self, x, ids, label: _bent(self.layer[1](self.layer[0](ids))),
)
_of_layer(
    "a padding row of a tied table",
    lambda: nn.Embedding(ROWS, WIDTH, padding_idx=0),
    lambda self, x, ids, label: _bent(torch.tanh(self.layer(ids).mean(1) + x) @ self.layer.weight.T),
)
_of_layer(
    "functional.embedding(padding_idx), of a product",
    lambda: nn.Linear(WIDTH, ROWS),
    lambda self, x, ids, label: _bent(functional.embedding(ids, self.layer.weight * 2, padding_idx=0)),
)
for _name, _options in {
    "EmbeddingBag(mean)": {},
    "EmbeddingBag(sum, padding_idx=0)": {"mode": "sum", "padding_idx": 0},
    "EmbeddingBag(max)": {"mode": "max"},
}.items():
    _of_layer(_name, functools.partial(nn.EmbeddingBag, ROWS, 3, **_options), _looked_up)
_of_layer(
    "EmbeddingBag(scale_grad_by_freq)",
    lambda: nn.EmbeddingBag(ROWS, 3, scale_grad_by_freq=True),
    _looked_up,
    "scale_grad_by_freq",
)
_of_layer("EmbeddingBag(max_norm=1)", lambda: nn.EmbeddingBag(ROWS, 3, max_norm=1.0), _looked_up, "max_norm")
_of_layer(
    "EmbeddingBag(sum, per_sample_weights)",
    lambda: nn.EmbeddingBag(ROWS, 3, mode="sum"),
    lambda self, x, ids, label: _bent(self.layer(ids, per_sample_weights=x[:, :LENGTH])),
)


# Norms.
def _normed(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    return _bent(self.layer(x))


def _normed_images(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    return _bent(self.layer(torch.sin(x[:, None, :] + torch.arange(4 * WIDTH).reshape(4, WIDTH))))


def _frozen_norm() -> nn.Module:
    layer = nn.BatchNorm1d(WIDTH)
    layer.running_mean += 0.3  # type: ignore[operator]
    return layer.eval()


for _name, _make in {
    "BatchNorm1d": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm1d(momentum=0.5, affine=False)": lambda: nn.BatchNorm1d(WIDTH, momentum=0.5, affine=False),
    "BatchNorm1d(momentum=0)": lambda: nn.BatchNorm1d(WIDTH, momentum=0.0),
    "BatchNorm1d(track_running_stats=False)": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "BatchNorm1d.eval()": _frozen_norm,
    "LayerNorm(elementwise_affine=False)": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "LayerNorm(bias=False)": lambda: nn.LayerNorm(WIDTH, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(4, WIDTH),
}.items():
    case(_name)(
        lambda make=_make: Case(
            lambda s, x, ids, label: _bent(s.layer(s.first(x))), first=nn.Linear(WIDTH, WIDTH), layer=make()
        )
    )
_of_layer("BatchNorm1d(momentum=None)", lambda: nn.BatchNorm1d(WIDTH, momentum=None), _normed, "momentum")
_of_layer("InstanceNorm1d(affine)", lambda: nn.InstanceNorm1d(4, affine=True), _normed_images)
_of_layer(
    "InstanceNorm1d(track_running_stats=True)",
    lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    _normed_images,
    "layer.running_mean",
)
_of_layer(
    "functional.instance_norm, which moves buffers",
    lambda: nn.BatchNorm1d(4),
    lambda s, x, ids, label: _bent(
        functional.instance_norm(
            torch.sin(x[:, None, :] + torch.arange(4 * WIDTH).reshape(4, WIDTH)),
            s.layer.running_mean,
            s.layer.running_var,
            s.layer.weight,
        )
    ),
    "layer.running_mean",
)
_of_layer(
    "functional.batch_norm of a layer's buffers",
    lambda: nn.BatchNorm1d(WIDTH),
    lambda s, x, ids, label: _bent(
        functional.batch_norm(x, s.layer.running_mean, s.layer.running_var, s.layer.weight, training=True)
    ),
)
_of_layer(
    "LocalResponseNorm",
    lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LocalResponseNorm(3)]),
    lambda s, x, ids, label: _bent(s.layer[1](s.layer[0](x)[:, :, None])),
)

# Losses; `y` are the outputs of a layer.
_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy(ignore_index)": lambda y, x, t: functional.cross_entropy(y, t, ignore_index=1),
    "cross_entropy(label_smoothing, weight)": lambda y, x, t: functional.cross_entropy(
        y, t, torch.tensor([0.5, 1.0, 2.0, 3.0]), label_smoothing=0.2
    ),
    "cross_entropy(label_smoothing, weight, ignore_index)": lambda y, x, t: functional.cross_entropy(
        y, t, torch.tensor([0.5, 1.0, 2.0, 3.0]), ignore_index=2, label_smoothing=0.2
    ),
    "cross_entropy(sum)": lambda y, x, t: functional.cross_entropy(y, t, reduction="sum") / 10,
    "cross_entropy(none)": lambda y, x, t: _bent(functional.cross_entropy(y, t, reduction="none", ignore_index=0)),
    "cross_entropy of probabilities": lambda y, x, t: functional.cross_entropy(
        y, x[:, :4].softmax(1), label_smoothing=0.1
    ),
    "nll_loss(weight)": lambda y, x, t: functional.nll_loss(y.log_softmax(1), t, torch.tensor([0.5, 1.0, 2.0, 3.0])),
    "binary_cross_entropy": lambda y, x, t: functional.binary_cross_entropy(y.sigmoid(), (x[:, :4] > 0).float()),
    "binary_cross_entropy_with_logits(pos_weight)": lambda y, x, t: functional.binary_cross_entropy_with_logits(
        y, (x[:, :4] > 0).float(), pos_weight=torch.tensor([0.5, 1.0, 2.0, 3.0])
    ),
    "kl_div(batchmean)": lambda y, x, t: functional.kl_div(
        y.log_softmax(1), x[:, :4].softmax(1), reduction="batchmean"
    ),
    "kl_div(log_target)": lambda y, x, t: functional.kl_div(
        y.log_softmax(1), x[:, :4].log_softmax(1), log_target=True, reduction="sum"
    ),
    "kl_div of a target with zeros": lambda y, x, t: functional.kl_div(
        y.log_softmax(1), functional.one_hot(t, 4).float(), reduction="batchmean"
    ),
    "smooth_l1_loss(beta=0.5)": lambda y, x, t: functional.smooth_l1_loss(y, x[:, :4], beta=0.5),
    "huber_loss(delta=0.3)": lambda y, x, t: functional.huber_loss(y, x[:, :4], delta=0.3),
    "l1_loss at equal values": lambda y, x, t: functional.l1_loss(y, torch.where(x[:, :4] > 0, y.detach(), x[:, :4])),
    "triplet_margin_loss": lambda y, x, t: functional.triplet_margin_loss(y, x[:, :4], x[:, 4:]),
    "triplet_margin_loss(swap)": lambda y, x, t: functional.triplet_margin_loss(y, x[:, :4], x[:, 4:], swap=True),
    "margin_ranking_loss": lambda y, x, t: functional.margin_ranking_loss(
        y[:, 0], y[:, 1], torch.where(x[:, 0] > 0, 1.0, -1.0), margin=0.2
    ),
    "cosine_embedding_loss": lambda y, x, t: functional.cosine_embedding_loss(
        y, x[:, :4] + 0.5, torch.where(t > 1, 1, -1), margin=0.1
    ),
    "hinge_embedding_loss": lambda y, x, t: functional.hinge_embedding_loss(y[:, 0], torch.where(t > 1, 1, -1)),
    "multi_margin_loss": lambda y, x, t: functional.multi_margin_loss(y, t),
    "multilabel_soft_margin_loss": lambda y, x, t: functional.multilabel_soft_margin_loss(y, (x[:, :4] > 0).float()),
    "soft_margin_loss": lambda y, x, t: functional.soft_margin_loss(y, torch.where(x[:, :4] > 0, 1.0, -1.0)),
    "poisson_nll_loss(full)": lambda y, x, t: functional.poisson_nll_loss(y, x[:, :4].abs() * 2, full=True),
    "gaussian_nll_loss, variance below eps": lambda y, x, t: functional.gaussian_nll_loss(
        y, x[:, :4], (y * 0.5).square() + 0.3, eps=0.4
    ),
    "mse_loss of a broadcast": lambda y, x, t: (y - x[:, :1]).square().mean(),
}
for _name, _loss in _LOSSES.items():
    _of_layer(_name, lambda: nn.Linear(WIDTH, CLASSES), lambda s, x, ids, label, f=_loss: f(s.layer(x), x, label))  # type: ignore[misc]


# Parametrizations.
class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _OwnBackward(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return _Scaled.apply(weight)  # type: ignore[no-any-return]


def _square_layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _parametrized(kind: type[nn.Module]) -> nn.Module:
    layer = _square_layer()
    parametrize.register_parametrization(layer, "weight", kind())
    return layer


for _name, _make, _refused in (
    ("parametrizations.weight_norm", lambda: parametrizations.weight_norm(_square_layer()), ""),
    ("parametrizations.weight_norm(dim=1)", lambda: parametrizations.weight_norm(_square_layer(), dim=1), ""),
    ("utils.weight_norm, as a hook before forward", lambda: nn.utils.weight_norm(_square_layer()), ""),
    ("parametrizations.spectral_norm", lambda: parametrizations.spectral_norm(_square_layer()), "_u"),
    ("parametrizations.spectral_norm.eval()", lambda: parametrizations.spectral_norm(_square_layer()).eval(), ""),
    ("utils.spectral_norm, as a hook before forward", lambda: nn.utils.spectral_norm(_square_layer()), "weight_u"),
    ("parametrizations.orthogonal", lambda: parametrizations.orthogonal(_square_layer()), "linalg_matrix_exp"),
    ("a symmetric parametrization", lambda: _parametrized(_Symmetric), ""),
    ("a parametrization with a backward of its own", lambda: _parametrized(_OwnBackward), "_Scaled"),
):
    _of_layer(_name, _make, _normed, _refused)

# Recurrent layers.
for _name, _make in {
    "LSTM(2 layers)": lambda: nn.LSTM(WIDTH, 3, 2),
    "LSTM(bidirectional, batch_first)": lambda: nn.LSTM(WIDTH, 3, bidirectional=True, batch_first=True),
    "GRU(bias=False)": lambda: nn.GRU(WIDTH, 3, bias=False),
    "RNN(relu)": lambda: nn.RNN(WIDTH, 3, nonlinearity="relu"),
}.items():
    _of_layer(
        _name,
        _make,
        lambda s, x, ids, label: _bent(s.layer(torch.stack([x, x * 0.5, x + 1]))[0]),
        "" if "RNN" in _name else "has no gradient",
    )
_of_layer("LSTMCell", lambda: nn.LSTMCell(WIDTH, 3), lambda s, x, ids, label: _bent(s.layer(x, s.layer(x))[1]))
_of_layer("GRUCell", lambda: nn.GRUCell(WIDTH, 3), lambda s, x, ids, label: _bent(s.layer(x, s.layer(x))))

# Activations and functions at their kinks: `x` has zeros, ones, threes and equal neighbors.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "relu6": lambda h: functional.relu6(h * 2),
    "hardtanh": functional.hardtanh,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "hardshrink(lambd=1)": lambda h: functional.hardshrink(h, 1.0),
    "softshrink(lambd=1)": lambda h: functional.softshrink(h, 1.0),
    "threshold at 1": lambda h: functional.threshold(h, 1.0, 0.5),
    "elu": functional.elu,
    "celu(alpha=2)": lambda h: functional.celu(h, 2.0),
    "selu": functional.selu,
    "softplus(beta=2, threshold=2)": lambda h: functional.softplus(h, 2.0, 2.0),
    "logsigmoid": lambda h: functional.logsigmoid(h * 5),
    "mish": functional.mish,
    "gelu(tanh)": lambda h: functional.gelu(h, approximate="tanh"),
    "glu": functional.glu,
    "tanhshrink": functional.tanhshrink,
    "softsign": functional.softsign,
    "abs": torch.abs,
    "sign": lambda h: h.sign() * h,
    "clamp at its bounds": lambda h: h.clamp(-1, 1),
    "clamp(min=tensor)": lambda h: torch.clamp(h, min=h.mean(1, keepdim=True)),
    "maximum of equal values": lambda h: torch.maximum(h, h.flip(0)),
    "minimum of equal values": lambda h: torch.minimum(h, h.flip(0)),
    "max(dim) of equal values": lambda h: h.max(1).values,
    "amax of equal values": lambda h: h.amax(1),
    "max of all": lambda h: h.max()[None],
    "min(dim) of equal values": lambda h: h.min(0).values,
    "sort": lambda h: h.sort(1).values,
    "topk": lambda h: (h + torch.arange(8) / 64).topk(3).values,
    "cummax": lambda h: h.cummax(1).values,
    "prod with one zero": lambda h: (h[1:] * torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1])).prod(1),
    "cumprod": lambda h: h.cumprod(1),
    "logsumexp": lambda h: h.logsumexp(1),
    "norm of a zero row": lambda h: h.norm(dim=1),
    "norm(p=1)": lambda h: h.norm(p=1, dim=1),
    "norm(p=inf)": lambda h: h.norm(p=float("inf"), dim=1),
    "normalize of a zero row": functional.normalize,
    "cosine_similarity with a zero row": lambda h: functional.cosine_similarity(h, h.flip(0) + 1),
    "pairwise_distance": lambda h: functional.pairwise_distance(h, h.flip(0)),
    "std": lambda h: h.std(1),
    "var(correction=0)": lambda h: h.var(1, correction=0),
    "pow(3)": lambda h: h.pow(3) / 20,
    "square root of squares": lambda h: (h.square() + 1e-6).sqrt(),
    "where with an untaken logarithm": lambda h: torch.where(h > 0, (h.clamp(min=0.1)).log(), h),
    "masked_fill": lambda h: h.masked_fill(h > 1, 1.0),
    "round": lambda h: h + h.round(),
    "fmod": lambda h: torch.fmod(h, 0.7),
    "remainder": lambda h: torch.remainder(h, 0.7),
    "atan2": lambda h: torch.atan2(h, h.flip(0) + 0.3),
    "index_put of a slice": lambda h: _assigned(h),
    "scatter_add": lambda h: torch.zeros(BATCH, 3).scatter_add(1, (h > 0).long()[:, :3], h[:, :3]),
    "gather": lambda h: h.gather(1, (h > 0).long()),
    "nan_to_num": lambda h: h.nan_to_num(),
    "unfold": lambda h: h.unfold(1, 3, 2),
    "dropout(p=0)": lambda h: functional.dropout(h, 0.0),
    "dropout in evaluation": lambda h: functional.dropout(h, 0.5, training=False),
    "alpha_dropout(p=0)": lambda h: functional.alpha_dropout(h, 0.0, training=True),
    "rrelu in evaluation": lambda h: functional.rrelu(h),
    "softmax of a masked row": lambda h: h.masked_fill(torch.arange(8) > 3, float("-inf")).softmax(1),
}


def _assigned(h: Tensor) -> Tensor:
    h = h * 1.0
    h[:, 1:3] = h[:, 3:5] * 2
    return h


class _Scale(nn.Module):
    """A factor of 1 for each element, which keeps kinks where they are in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(BATCH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


_FUNCTIONS_REFUSED = {"cummax": "cummax"}
for _name, _function in _FUNCTIONS.items():
    _of_layer(
        _name,
        _Scale,
        lambda s, x, ids, label, f=_function: _bent(f(s.layer(x))),  # type: ignore[misc]
        _FUNCTIONS_REFUSED.get(_name, ""),
    )


def _images(x: Tensor) -> Tensor:
    return (x[:, :, None] * x[:, None, :]).reshape(BATCH, 1, WIDTH, WIDTH)


# Other layers.
for _name, _make in {
    "Conv2d(circular)": lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"),
    "Conv2d(reflect, dilation)": lambda: nn.Conv2d(1, 2, 3, padding=2, dilation=2, padding_mode="reflect"),
    "Conv2d(padding='same')": lambda: nn.Conv2d(1, 2, 4, padding="same"),
    "ConvTranspose2d(output_padding)": lambda: nn.ConvTranspose2d(1, 2, 3, stride=2, padding=1, output_padding=1),
}.items():
    _of_layer(_name, _make, lambda s, x, ids, label: _bent(s.layer(_images(x))))
for _name, _make in {
    "MaxPool2d(ceil_mode)": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "AvgPool2d(count_include_pad=False)": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(2),
    "Upsample(bilinear)": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
    "PixelUnshuffle": lambda: nn.PixelUnshuffle(2),
    "ReflectionPad2d": lambda: nn.ReflectionPad2d(2),
}.items():
    case(_name)(
        lambda make=_make: Case(
            lambda s, x, ids, label: _bent(s.layer(s.first(_images(x)))), first=nn.Conv2d(1, 2, 1), layer=make()
        )
    )
_of_layer("PReLU", lambda: nn.PReLU(WIDTH), _normed)
_of_layer("Bilinear", lambda: nn.Bilinear(WIDTH, WIDTH, 3), lambda s, x, ids, label: _bent(s.layer(x, x.flip(0))))
_of_layer(
    "MultiheadAttention(key_padding_mask)",
    lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    lambda s, x, ids, label: _bent(
        s.layer(*[torch.stack([x, x * 0.5, x + 1], 1)] * 3, key_padding_mask=(ids[:, :3] > 7))[0]
    ),
)
_of_layer(
    "TransformerEncoderLayer(norm_first)",
    lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True, norm_first=True),
    lambda s, x, ids, label: _bent(s.layer(torch.stack([x, x * 0.5, x + 1], 1))),
)
_of_layer(
    "scaled_dot_product_attention(scale, mask)",
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda s, x, ids, label: _bent(
        functional.scaled_dot_product_attention(
            *[s.layer(torch.stack([x, x * 0.5, x + 1], 1)).unflatten(2, (2, 4)).mT] * 3,
            attn_mask=torch.ones(4, 4).tril().bool(),
            scale=0.3,
        )
    ),
)
_of_layer(
    "a vector times a transposed matrix",
    lambda: nn.Linear(WIDTH, 3),
    lambda s, x, ids, label: _bent(s.layer.weight.T @ s.layer.bias) + _bent(x.T @ (x @ s.layer.weight[0])),
)


# Hooks.
def _hooked_tensor(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    h = torch.tanh(self.layer(x))
    if h.requires_grad:
        h.register_hook(lambda dy: dy * 2)
    return _bent(h)


def _hooked_always(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    h = torch.tanh(self.layer(x))
    h.register_hook(lambda dy: -dy)
    return _bent(h)


def _hooked_branch(layer: nn.Module, x: Tensor) -> Tensor:
    h = torch.tanh(layer(x))
    h.register_hook(lambda dy: dy * 2)
    return h * 2


def _hooked(register: Callable[[nn.Linear], object]) -> nn.Module:
    layer = _square_layer()
    register(layer)
    return layer


_of_layer("a hook of a tensor", _square_layer, _hooked_tensor, "register_hook")
_of_layer("a hook of a tensor, without a question", _square_layer, _hooked_always, "register_hook")
for _name, _register, _refused in (
    ("Parameter.register_hook", lambda one: one.weight.register_hook(lambda dy: dy * 2), "layer.weight"),
    (
        "Parameter.register_post_accumulate_grad_hook",
        lambda one: one.bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)),
        "layer.bias",
    ),
    (
        "Module.register_full_backward_hook",
        lambda one: one.register_full_backward_hook(lambda m, dx, dy: tuple(2 * d for d in dx)),
        "layer': Linear has a backward hook",
    ),
    (
        "Module.register_full_backward_pre_hook",
        lambda one: one.register_full_backward_pre_hook(lambda m, dy: tuple(2 * d for d in dy)),
        "layer': Linear has a backward hook",
    ),
    ("Module.register_forward_hook", lambda one: one.register_forward_hook(lambda m, x, y: y * 2), ""),
    ("Module.register_forward_pre_hook", lambda one: one.register_forward_pre_hook(lambda m, x: (x[0] + 1,)), ""),
):
    _of_layer(_name, functools.partial(_hooked, _register), _normed, _refused)  # type: ignore[arg-type]


# Buffers and parameters that a forward changes.
class _Buffers(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, 3), change
        self.register_buffer("center", torch.full((3,), 0.2))
        self.register_buffer("steps", torch.ones((), dtype=torch.int64), persistent=False)
        self.calls = 0
        self.register_buffer("fixed", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.linear(x))


def _moving(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.center.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - self.center


def _assigned_anew(self: Any, h: Tensor) -> Tensor:
    self.center = 0.9 * self.center + 0.1 * h.detach().mean(0)
    return h - self.center


def _counting(self: Any, h: Tensor) -> Tensor:
    self.steps += 1
    return h / self.steps


def _warming(self: Any, h: Tensor) -> Tensor:
    self.calls += 1
    return h * min(1.0, self.calls / 4)


def _codebook(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.center[1:] = h[0, 1:]
    return h * self.center


def _clipped_weight(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.bias.clamp_(-0.1, 0.1)
    return h * self.linear.bias


for _name, _change, _refused in (
    ("a buffer that stays", lambda self, h: h * self.fixed - self.center, ""),
    ("a running center", _moving, "center"),
    ("a running center, assigned anew", _assigned_anew, "center"),
    ("a counter", _counting, "steps"),
    ("a counter that is a number", _warming, "calls"),
    ("a codebook, changed in part", _codebook, "center"),
    ("a weight clipped by forward", _clipped_weight, "linear.bias"),
):
    _of_layer(_name, functools.partial(_Buffers, _change), _normed, _refused)


# What takes no gradient.
def _detached_in_place(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    h = self.layer(x)
    g = (h * 2).detach_()
    return _bent(h * g)


def _inferring(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    h = self.layer(x)
    with torch.no_grad(), torch.inference_mode():
        g = h.tanh()
    with torch.no_grad(), torch.enable_grad():
        again = h.sin()
    return _bent(h * g.clone() + again)


def _clamped_without_gradients(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    h = self.layer(x) * 2
    with torch.no_grad():
        h.clamp_(-0.2, 0.2)
    return _bent(h * h)


def _changed_data(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    h = self.layer(x) * 2
    h.data.clamp_(-0.2, 0.2)
    return _bent(h * h)


def _own_function(self: Any, x: Tensor, ids: Tensor, label: Tensor) -> Tensor:
    return _bent(_Scaled.apply(self.layer(x)))


def _frozen_bias() -> nn.Module:
    layer = nn.Linear(WIDTH, 3)
    layer.bias.requires_grad_(False)
    return layer


for _name, _loss, _refused in (  # type: ignore[assignment]
    ("detach", lambda s, x, ids, label: _bent(s.layer(x) * s.layer(x.flip(0)).detach()), ""),
    ("Tensor.data", lambda s, x, ids, label: _bent(s.layer(x) * s.layer(x.flip(0)).data), ""),
    ("detach_", _detached_in_place, ""),
    ("no_grad, inference_mode, enable_grad", _inferring, ""),
    ("straight through", lambda s, x, ids, label: _bent(s.layer(x) + (s.layer(x).round() - s.layer(x)).detach()), ""),
    ("clamp_ in no_grad", _clamped_without_gradients, "clamp_"),
    ("Tensor.data.clamp_", _changed_data, "clamp_"),
    ("an autograd.Function", _own_function, "_Scaled"),
    (
        "a weight that is read detached alone",
        lambda s, x, ids, label: _bent(functional.linear(x, s.layer.weight.detach(), s.layer.bias)),
        "",
    ),
    (
        "checkpoint(use_reentrant=False)",
        lambda s, x, ids, label: _bent(checkpoint(s.layer, x * 1, use_reentrant=False)),
        "",
    ),
    (
        "checkpoint(use_reentrant=True)",
        lambda s, x, ids, label: _bent(
            checkpoint(lambda h: s.layer(h).tanh(), s.layer(x).tanh() @ s.layer.weight, use_reentrant=True)
        ),
        "",
    ),
):
    _of_layer(_name, lambda: nn.Linear(WIDTH, 3), _loss, _refused)
_of_layer(
    "a hook of a tensor in a branch of torch.cond",
    _square_layer,
    lambda s, x, ids, label: _bent(torch.cond(x.sum() > 0, functools.partial(_hooked_branch, s.layer), s.layer, (x,))),
    "torch cannot export",
)
_of_layer("a bias without requires_grad", _frozen_bias, _normed)
_of_layer(
    "RReLU in training",
    lambda: nn.ModuleList([nn.Linear(WIDTH, 3), nn.RReLU()]),
    lambda s, x, ids, label: _bent(s.layer[1](s.layer[0](x))),
    "rrelu",
)
_of_layer(
    "Identity beside an unused layer",
    lambda: nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(3, 3)]),
    lambda s, x, ids, label: _bent(s.layer[0](x)),
)
