"""The layers of `partc.compiler.nn` against numpy and torch, and their initializers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from partc.compiler import nn
from partc.compiler.frontend.inputs import Spec, data_type
from partc.compiler.frontend.trace import trace
from partc.runtime.artifact.tensors import draw

Array = NDArray[Any]
RNG = np.random.default_rng(3)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def built(layer: nn.Module, x: Array, dynamic: bool = False) -> ir.Model:
    dims = tuple("n" if dynamic and axis == 0 else size for axis, size in enumerate(x.shape))
    argument = "indices" if isinstance(layer, nn.Embedding) else "x"
    return trace(layer, [Spec(argument, dims, data_type(x.dtype))], [], "test")


def weights(model: ir.Model) -> dict[str, Array]:
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value}


def run(model: ir.Model, x: Array) -> Array:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def values(init: nn.init.Initializer, *shape: int, stream: str = "7/w") -> Array:
    return init.values(stream, shape, np.dtype(np.float32))


LAYERS: list[tuple[str, tuple[object, ...], dict[str, object], tuple[int, ...]]] = [
    ("Linear", (5, 7), {}, (3, 5)),
    ("Linear", (5, 7), {"bias": False}, (3, 5)),
    ("Linear", (5, 7), {}, (2, 3, 5)),
    ("Linear", (5, 7), {"bias": False}, (2, 3, 5)),
    ("Conv1d", (4, 6, 3), {"stride": 2, "padding": 1, "groups": 2}, (3, 4, 11)),
    ("Conv2d", (3, 5, 3), {}, (2, 3, 7, 9)),
    ("Conv2d", (3, 5, (2, 3)), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "bias": False}, (2, 3, 7, 9)),
    ("Conv2d", (4, 6, 3), {"groups": 2}, (2, 4, 7, 9)),
    ("Conv2d", (3, 5, (4, 3)), {"padding": "same", "dilation": (1, 2)}, (2, 3, 7, 9)),
    ("Conv2d", (3, 5, 3), {"padding": "valid"}, (2, 3, 7, 9)),
    ("ConvTranspose2d", (4, 6, 3), {}, (2, 4, 5, 7)),
    ("ConvTranspose2d", (4, 6, (3, 2), (2, 3), 1, (1, 2), 2, False), {}, (2, 4, 5, 7)),
    ("ConvTranspose2d", (4, 6, 3), {"dilation": (2, 1), "stride": 2}, (2, 4, 5, 7)),
    ("MaxPool2d", (2,), {}, (2, 3, 7, 9)),
    ("MaxPool2d", (3,), {"stride": 2, "padding": 1, "ceil_mode": True}, (2, 3, 6, 8)),
    ("MaxPool2d", ((2, 3),), {"stride": (1, 2), "dilation": (2, 1)}, (2, 3, 7, 9)),
    ("AvgPool2d", (2,), {}, (2, 3, 7, 9)),
    ("AvgPool2d", ((3, 2),), {"stride": (2, 1), "padding": 1}, (2, 3, 7, 9)),
    ("AvgPool2d", (3,), {"stride": 2, "padding": 1, "count_include_pad": False}, (2, 3, 7, 9)),
    ("AvgPool2d", (3,), {"stride": 2, "padding": 1, "ceil_mode": True}, (2, 3, 6, 8)),
    ("AdaptiveAvgPool2d", (1,), {}, (2, 3, 7, 9)),
    ("LayerNorm", (5,), {}, (2, 3, 5)),
    ("LayerNorm", ((3, 5),), {"eps": 1e-2, "bias": False}, (2, 3, 5)),
    ("LayerNorm", ((3, 5),), {"elementwise_affine": False}, (2, 3, 5)),
    ("RMSNorm", (5,), {}, (2, 3, 5)),
    ("RMSNorm", ((3, 5),), {"eps": 1e-2, "elementwise_affine": False}, (2, 3, 5)),
    ("GroupNorm", (3, 6), {}, (2, 6, 5, 7)),
    ("GroupNorm", (2, 6), {"eps": 1e-2, "affine": False}, (2, 6, 5)),
    ("InstanceNorm2d", (3,), {}, (2, 3, 5, 7)),
    ("InstanceNorm2d", (3,), {"affine": True, "eps": 1e-2}, (2, 3, 5, 7)),
    ("BatchNorm2d", (3,), {}, (2, 3, 5, 7)),
    ("BatchNorm2d", (3,), {"affine": False, "eps": 1e-2}, (2, 3, 5, 7)),
    ("ReLU", (), {}, (3, 5)),
    ("LeakyReLU", (), {}, (3, 5)),
    ("LeakyReLU", (0.3,), {}, (3, 5)),
    ("GELU", (), {}, (3, 5)),
    ("GELU", (), {"approximate": "tanh"}, (3, 5)),
    ("SiLU", (), {}, (3, 5)),
    ("Sigmoid", (), {}, (3, 5)),
    ("Tanh", (), {}, (3, 5)),
    ("Softmax", (-1,), {}, (2, 3, 5)),
    ("Softmax", (1,), {}, (2, 3, 5)),
    ("LogSoftmax", (), {"dim": 1}, (2, 3, 5)),
    ("Dropout", (), {}, (3, 5)),
    ("Identity", (), {}, (3, 5)),
    ("Flatten", (), {}, (2, 3, 5, 7)),
    ("Flatten", (2,), {}, (2, 3, 5, 7)),
    ("Flatten", (0, 1), {}, (2, 3, 5, 7)),
    ("Flatten", (1, 2), {}, (2, 3, 5, 7)),
    ("Flatten", (-3, -2), {}, (2, 3, 5, 7)),
    ("Flatten", (0,), {}, (2, 3, 5)),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize(("name", "args", "options", "shape"), LAYERS, ids=lambda value: str(value).replace(" ", ""))
def test_layer_equals_torch(
    name: str, args: tuple[object, ...], options: dict[str, object], shape: tuple[int, ...]
) -> None:
    torch = pytest.importorskip("torch", reason="needs partc[torch]")
    layer, x = getattr(nn, name)(*args, **options), floats(*shape)
    for parameter in layer.parameters():
        if parameter.init is not None and parameter.name in ("weight", "bias", "running_mean", "running_var"):
            parameter.init = nn.init.uniform(0.5, 1.5)
    model = built(layer, x, dynamic=True)
    theirs = getattr(torch.nn, name)(*args, **options).eval()
    for key, array in weights(model).items():
        if key in theirs.state_dict():
            theirs.state_dict()[key].copy_(torch.from_numpy(array))
            assert tuple(theirs.state_dict()[key].shape) == array.shape
    expected = theirs(torch.from_numpy(x)).detach().numpy()
    actual = run(model, x)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["Linear", "Conv1d", "Conv2d", "ConvTranspose2d"])
def test_default_weights_are_spread_as_in_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs partc[torch]")
    torch.manual_seed(0)
    args = (40, 600) if name == "Linear" else (40, 600, 3)
    theirs = getattr(torch.nn, name)(*args)
    layer = getattr(nn, name)(*args)
    model = built(layer, floats(2, 40, *[5] * (theirs.weight.dim() - 2)))
    for key, array in weights(model).items():
        bound = theirs.state_dict()[key].abs().max().item()
        assert array.shape == tuple(theirs.state_dict()[key].shape)
        assert np.abs(array).max() == pytest.approx(bound, rel=0.1)


def test_linear_is_one_gemm_for_a_matrix_and_a_matmul_otherwise() -> None:
    assert [node.op_type for node in built(nn.Linear(5, 7), floats(3, 5)).graph] == ["Gemm"]
    assert [node.op_type for node in built(nn.Linear(5, 7), floats(2, 3, 5)).graph] == ["Transpose", "MatMul", "Add"]


def test_linear_and_embedding_equal_numpy() -> None:
    x = floats(2, 3, 5)
    model = built(nn.Linear(5, 7), x)
    w = weights(model)
    np.testing.assert_allclose(run(model, x), x @ w["weight"].T + w["bias"], rtol=1e-5, atol=1e-6)
    indices = np.array([[3, 0, 10], [4, 4, 1]])
    model = built(nn.Embedding(11, 5, padding_idx=4), indices)
    rows = weights(model)["weight"]
    np.testing.assert_array_equal(run(model, indices), rows[indices])
    assert not rows[4].any()
    assert rows[[0, 1, 2, 3, 5]].all()


def test_conv2d_equals_loops() -> None:
    x = floats(2, 4, 6, 7)
    model = built(nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2), x)
    w, b = weights(model)["weight"], weights(model)["bias"]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
    expected = np.zeros((2, 6, 3, 6), np.float32)
    for out in range(6):
        group = padded[:, 2 * (out // 3) : 2 * (out // 3) + 2]
        for i in range(3):
            for j in range(6):
                window = group[:, :, 2 * i : 2 * i + 3, j : j + 2]
                expected[:, out, i, j] = (window * w[out]).sum((1, 2, 3)) + b[out]
    np.testing.assert_allclose(run(model, x), expected, rtol=1e-5, atol=1e-5)


def normalized(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


REFERENCES: list[tuple[nn.Module, Callable[[Array], Array]]] = [
    (nn.LayerNorm((5, 7), eps=0.1), lambda x: normalized(x, (2, 3), 0.1)),
    (nn.RMSNorm(7, eps=0.1), lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1)),
    (nn.RMSNorm(7), lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + np.finfo(np.float32).eps)),
    (nn.InstanceNorm2d(6, eps=0.1), lambda x: normalized(x, (2, 3), 0.1)),
    (nn.GroupNorm(2, 6, eps=0.1), lambda x: normalized(x.reshape(3, 2, 3, 5, 7), (2, 3, 4), 0.1).reshape(x.shape)),
    (nn.BatchNorm2d(6, eps=0.5), lambda x: x / np.sqrt(1.5)),
    (nn.GlobalAvgPool2d(), lambda x: x.mean((2, 3), keepdims=True)),
    (nn.MaxPool2d((5, 7)), lambda x: x.max((2, 3), keepdims=True)),
    (nn.AvgPool2d((5, 7)), lambda x: x.mean((2, 3), keepdims=True)),
    (nn.Softmax(1), softmax),
    (nn.LogSoftmax(1), lambda x: np.log(softmax(x))),
    (nn.GELU(), lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2),
    (nn.SiLU(), lambda x: x / (1 + np.exp(-x))),
    (nn.LeakyReLU(0.25), lambda x: np.where(x > 0, x, 0.25 * x)),
    (nn.Flatten(2), lambda x: x.reshape(3, 6, 35)),
    (nn.Flatten(1, 2), lambda x: x.reshape(3, 30, 7)),
    (nn.Sequential(nn.Flatten(), nn.Identity(), nn.Tanh()), lambda x: np.tanh(x.reshape(3, 210))),
]


@pytest.mark.parametrize(("layer", "expected"), REFERENCES, ids=[type(layer).__name__ for layer, _ in REFERENCES])
def test_layer_equals_its_formula(layer: nn.Module, expected: Callable[[Array], Array]) -> None:
    x = floats(3, 6, 5, 7)
    np.testing.assert_allclose(run(built(layer, x), x), expected(x), rtol=1e-4, atol=1e-5)


def test_training_batch_norm_equals_numpy_and_hands_out_the_moved_statistics() -> None:
    """The weights differ from each other: onnxruntime 1.31 shares equal ones and then overwrites them."""
    layer, x = nn.BatchNorm2d(3, eps=0.5, momentum=0.25).train(), floats(2, 3, 5, 7) * 2 + 1
    for parameter in layer.parameters():
        assert isinstance(parameter, nn.Parameter)
        parameter.init = nn.init.uniform(0.5, 1.5)
    model = built(layer, x)
    node = model.graph[0]
    for name, value in zip(("mean", "var"), node.outputs[1:], strict=True):
        value.name = name
        model.graph.outputs.append(value)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    y, mean, var = session.run(None, {"x": x})
    w = weights(model)
    expected = normalized(x, (0, 2, 3), 0.5) * w["weight"][:, None, None] + w["bias"][:, None, None]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mean, 0.75 * w["running_mean"] + 0.25 * x.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(var, 0.75 * w["running_var"] + 0.25 * x.var((0, 2, 3)), rtol=1e-5)


def test_dropout_drops_in_training_only() -> None:
    x = np.ones((50, 60), np.float32)
    layer = nn.Dropout(0.25)
    assert [node.op_type for node in built(layer, x).graph] == ["Identity"]
    dropped = run(built(nn.Dropout(0.25).train(), x), x)
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (dropped == 0).mean() == pytest.approx(0.25, abs=0.04)


def test_train_reaches_all_modules_and_eval_takes_it_back() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm2d(3)))
    assert not any(module.training for module in net.modules())
    assert all(module.training for module in net.train().modules())
    assert not any(module.training for module in net.eval().modules())


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtype_of_the_weights(dtype: str) -> None:
    layer = nn.Linear(3, 5, dtype=dtype)
    model = trace(layer, [Spec("x", (2, 3), data_type(dtype))], [], "test")
    assert {array.dtype.name for array in weights(model).values()} == {dtype}
    assert model.graph.outputs[0].dtype == data_type(dtype)


GOLDEN = {
    "normal(1.0, 0.0)": "17d13dc6b6b7b3ef",
    "truncated_normal(1.0, 0.0)": "fe06422656e5cfe2",
    "uniform(0.0, 1.0)": "e6cf1df300214812",
}


@pytest.mark.parametrize(
    ("init", "mean", "std", "bound"),
    [
        (nn.init.normal(0.5, 2.0), 2.0, 0.5, math.inf),
        (nn.init.truncated_normal(0.02), 0.0, 0.02 * 0.87962566, 0.04),
        (nn.init.uniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12), 3.0),
        (nn.init.he_normal(), 0.0, math.sqrt(2 / 270), math.inf),
        (nn.init.he_normal(math.sqrt(5), "fan_out"), 0.0, math.sqrt(2 / 6 / 360), math.inf),
        (nn.init.he_uniform(), 0.0, math.sqrt(2 / 270), math.sqrt(6 / 270)),
        (nn.init.xavier_normal(2.0), 0.0, 2 * math.sqrt(2 / 630), math.inf),
        (nn.init.xavier_uniform(), 0.0, math.sqrt(2 / 630), math.sqrt(6 / 630)),
        (nn.init.constant(0.25), 0.25, 0.0, 0.25),
        (nn.init.zeros(), 0.0, 0.0, 0.0),
        (nn.init.ones(), 1.0, 0.0, 1.0),
    ],
    ids=repr,
)
def test_initializers_have_their_moments(init: nn.init.Initializer, mean: float, std: float, bound: float) -> None:
    drawn = values(init, 40, 30, 3, 3).astype(np.float64)
    assert drawn.mean() == pytest.approx(mean, abs=4 * std / math.sqrt(drawn.size) + 1e-9)
    assert drawn.std() == pytest.approx(std, rel=0.03)
    assert np.abs(drawn).max() <= bound * (1 + 1e-6)


def test_the_normal_quantile_is_right_to_the_last_digits() -> None:
    probability = np.array([2.0**-33, 1e-7, 1e-3, 0.0749, 0.0751, 0.3, 0.5, 0.7, 0.93, 0.9999, 1 - 2.0**-33])
    expected = [NormalDist().inv_cdf(p) for p in probability]
    np.testing.assert_allclose(draw.normal_quantile(probability), expected, rtol=1e-14, atol=1e-16)


def test_draws_are_these_bytes_on_every_machine() -> None:
    """Blocks of 32,768 are crossed on purpose; a change here changes the weights of every user's model."""
    drawn = {
        init.text: values(init, 211, 313) for init in (nn.init.normal(), nn.init.truncated_normal(), nn.init.uniform())
    }
    digests = {text: hashlib.sha256(array.tobytes()).hexdigest()[:16] for text, array in drawn.items()}
    assert digests == GOLDEN


class Two(nn.Module):
    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        if extra:
            self.extra = nn.Linear(5, 5)
        self.fc1, self.fc2 = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, op, x):  # type: ignore[no-untyped-def]
        x = self.extra(op, x) if hasattr(self, "extra") else x
        return self.fc2(op, self.fc1(op, x))


def test_weights_follow_seed_and_path_alone() -> None:
    x = floats(3, 5)
    first, more = weights(built(Two(), x)), weights(built(Two(extra=True), x))
    assert set(more) - set(first) == {"extra.weight", "extra.bias"}
    for name, array in first.items():
        np.testing.assert_array_equal(array, more[name])
    assert not np.array_equal(first["fc1.weight"], first["fc2.weight"])
    nn.seed(8)
    try:
        other = weights(built(Two(), x))
    finally:
        nn.seed(0)
    assert not any(np.array_equal(array, other[name]) for name, array in first.items())


def test_no_weight_is_drawn_while_the_model_is_built() -> None:
    """5.6 TB, were they drawn."""
    layer = nn.Sequential(nn.Linear(1_000_003, 700_001), nn.Linear(700_001, 1_000_003, init=nn.init.normal()))
    model = trace(layer, [Spec("input", ("n", 1_000_003), ir.DataType.FLOAT)], [], "test")
    sizes = [value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value]
    assert sum(sizes) > 5.6e12


def test_a_parameter_has_no_values_before_its_path() -> None:
    parameter = nn.Parameter([3, 5], init=nn.init.ones())
    assert parameter.const_value is not None
    with pytest.raises(RuntimeError, match="only when the model is compiled"):
        parameter.const_value.numpy()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: nn.Linear(0, 3), ValueError, "in_features is at least 1, got 0"),
        (lambda: nn.Linear(2.0, 3), TypeError, "in_features is an int, got 2.0 of type float"),
        (lambda: nn.Linear(2, 3, init=nn.init.zeros), TypeError, "init takes an initializer such as"),
        (lambda: nn.Conv2d(3, 4, 5, groups=2), ValueError, "in_channels 3 is not divisible by groups 2"),
        (lambda: nn.Conv2d(4, 3, 5, groups=2), ValueError, "out_channels 3 is not divisible by groups 2"),
        (lambda: nn.Conv2d(3, 4, (5, 5, 5)), ValueError, "kernel_size has one entry for each of 2 axes, got 3"),
        (lambda: nn.Conv2d(3, 4, 5, stride=0), ValueError, "stride is at least 1, got 0"),
        (lambda: nn.Conv2d(3, 4, 5, padding="full"), ValueError, "padding is a size, 'valid' or 'same', got 'full'"),
        (lambda: nn.Conv2d(3, 4, 5, 2, "same"), ValueError, "padding='same' needs a stride of 1"),
        (lambda: nn.ConvTranspose2d(3, 4, 5, output_padding=1), ValueError, "output_padding .* is not smaller"),
        (lambda: nn.MaxPool2d(3, padding=2), ValueError, "more than half of kernel_size"),
        (lambda: nn.AdaptiveAvgPool2d((1, 2)), ValueError, "output_size is 1, got"),
        (lambda: nn.GroupNorm(4, 6), ValueError, "num_channels 6 is not divisible by num_groups 4"),
        (lambda: nn.LayerNorm([]), ValueError, "normalized_shape names at least one axis"),
        (lambda: nn.Embedding(5, 3, padding_idx=5), ValueError, "padding_idx 5 is outside of the 5 embeddings"),
        (lambda: nn.Dropout(1.5), ValueError, "p is a probability below 1, got 1.5"),
        (lambda: nn.GELU("quick"), ValueError, "approximate is 'none' or 'tanh', got 'quick'"),
        (lambda: nn.Flatten(3, 1), ValueError, "start_dim 3 comes after end_dim 1"),
        (lambda: nn.seed("x"), TypeError, "a seed is an int"),
        (lambda: nn.Parameter([2, -1]), ValueError, "a parameter's shape is of ints"),
        (
            lambda: nn.Parameter([2], data=np.ones(3)),
            ValueError,
            r"the data's shape \[3\] is not the parameter's shape \[2\]",
        ),
        (lambda: nn.Parameter([2], data=np.ones(2), init=nn.init.ones()), ValueError, "not from both"),
        (lambda: values(nn.init.he_normal(), 5), ValueError, "at least two dims"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_named(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
