"""torch modules in a model.py: names, weights and layers in training survive the export."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from partc.compiler.directives.input import Input
from partc.compiler.errors import CompileError
from partc.compiler.frontend.huggingface import settings
from partc.compiler.frontend.huggingface.ports import image_inputs
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.python import load_python
from partc.compiler.frontend.source import Source
from partc.compiler.training.trainable import trainable_names

torch = pytest.importorskip("torch", reason="needs partc[torch]")

NET = """
import torch
from torch import nn
from partc.compiler import Input, Symbol, place

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 24)
        self.ln = nn.LayerNorm(8)

    def forward(self, x):
        a, b, c = self.fc(self.ln(x)).split(8, dim=-1)
        return a * b + c

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.25)
        self.relu = nn.ReLU()
        self.layers = nn.ModuleList([Block(), Block()])
        self.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        x = self.drop(self.relu(self.bn(self.conv1(x))))
        x = x.mean((2,)).flatten(1)[:, :8]
        for layer in self.layers:
            x = self.relu(layer(x))
        return {"logits": self.seq(x), "aux": x}

torch.manual_seed(3)
"""
INPUTS = 'inputs = {"x": Input(["batch", 1, 5, 7])}\n'
PATHS = [
    "conv1.Conv",
    "bn.BatchNormalization",
    "relu.Relu",
    "ReduceMean",
    "Reshape",
    "Slice",
    "layers.0.ln.LayerNormalization",
    "layers.0.fc.Gemm",
    "layers.0.Split",
    "layers.0.Mul",
    "layers.0.Add",
    "relu.Relu_1",
    "layers.1.ln.LayerNormalization",
    "layers.1.fc.Gemm",
    "layers.1.Split",
    "layers.1.Mul",
    "layers.1.Add",
    "relu.Relu_2",
    "seq.0.Gemm",
    "seq.1.Relu",
]


BRANCH = """import torch

class Net(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x

model = Net()
inputs = {"x": ["n", 4]}
"""


def load(folder: Path, text: str) -> Source:
    path = folder / "model.py"
    path.write_text(text)
    return load_python(path)


def run(model: ir.Model, **inputs: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def test_inference_keeps_names_weights_and_numbers(tmp_path: Path) -> None:
    source = load(tmp_path, NET + INPUTS + "model = Net().eval()\nplace(model.layers[1], 2)\nplace(model.seq[0], 1)\n")
    graph = source.model.graph
    assert list(node_paths(source.model).values()) == PATHS
    assert [value.name for value in graph.outputs] == ["logits", "aux"]
    assert [(value.name, str(value.shape)) for value in graph.inputs] == [("x", "[batch,1,5,7]")]
    assert [placement.pattern for placement in source.declared.placements] == ["layers.1", "seq.0"]
    scope: dict[str, object] = {}
    exec(NET + "model = Net().eval()", scope)
    theirs = scope["model"]
    state = theirs.state_dict()  # type: ignore[attr-defined]
    del state["bn.num_batches_tracked"]
    ours = {name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value}
    assert set(state) < set(ours)
    for name, tensor in state.items():
        np.testing.assert_array_equal(ours[name], tensor.numpy())
    for batch in (1, 6):
        x = np.random.default_rng(batch).standard_normal((batch, 1, 5, 7)).astype(np.float32)
        expected = theirs(torch.from_numpy(x))  # type: ignore[operator]
        for name, actual in zip(("logits", "aux"), run(source.model, x=x), strict=True):
            np.testing.assert_allclose(actual, expected[name].detach().numpy(), rtol=1e-4, atol=1e-5)


WITHOUT_GRADIENTS = """
import torch
from torch import nn
from partc.compiler import Input

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x))

class Angles(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x * 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student, self.angles = nn.Sequential(Block(), Block()), nn.Linear(8, 8), Angles()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        with torch.no_grad():
            taught = self.teacher(x) * 2
        again = self.student(taught)
        with torch.set_grad_enabled(False):
            scaled = self.angles(self.student(x))
        return self.encoder(scaled - taught + again)

torch.manual_seed(3)
model = Net().eval()
inputs = {"x": Input(["batch", 3, 8])}
"""


def test_blocks_without_gradients_keep_their_modules(tmp_path: Path) -> None:
    """And layers of attention the ops of ONNX, which torch's own kernels for inference are not."""
    source = load(tmp_path, WITHOUT_GRADIENTS)
    paths = set(node_paths(source.model).values())
    assert {"teacher.0.fc.Gemm", "teacher.1.act.Relu", "angles.Mul", "student.Gemm"} <= {
        path.replace("MatMul", "Gemm") for path in paths
    }
    assert not [path for path in paths if path.startswith(("Gemm", "MatMul", "Relu"))], paths
    assert {node.domain for node in source.model.graph} <= {""}
    assert any(path.startswith("encoder.self_attn.") for path in paths)
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_layers_in_training_stay(tmp_path: Path) -> None:
    graph = load(tmp_path, NET + INPUTS + "model = Net()\n").model.graph
    nodes = {str(node.name): node for node in graph}
    norm, drop = nodes["bn.BatchNormalization"], nodes["drop.Dropout"]
    assert norm.attributes["training_mode"].as_int() == 1
    assert len(norm.outputs) == 3
    assert [value.name for value in norm.inputs if value][1:] == [
        "bn.weight",
        "bn.bias",
        "bn.running_mean",
        "bn.running_var",
    ]
    assert bool(graph.initializers[str(drop.inputs[2].name)].const_value.numpy())


def test_equal_weights_are_not_merged_and_nothing_of_the_machine_is_kept(tmp_path: Path) -> None:
    model = load(tmp_path, NET + INPUTS + "model = Net().eval()\n").model
    assert {"layers.0.ln.weight", "layers.1.ln.weight", "layers.0.ln.bias", "layers.1.ln.bias"} <= set(
        model.graph.initializers
    )
    data = ir.to_proto(model).SerializeToString()
    assert b".py" not in data
    assert str(tmp_path).encode() not in data
    assert ir.to_proto(load(tmp_path, NET + INPUTS + "model = Net().eval()\n").model).SerializeToString() == data


@pytest.mark.parametrize(
    "inputs",
    [
        'inputs = {"x": torch.zeros(3, 1, 5, 7)}\ndynamic_shapes = {"x": {0: "batch"}}\n',
        "inputs = (torch.zeros(3, 1, 5, 7),)\nbatch = Symbol(divisor=4)\ndynamic_shapes = ((batch, None, None, None),)\n",
        'inputs = [torch.zeros(3, 1, 5, 7)]\ndynamic_shapes = {"x": {0: torch.export.Dim("batch", min=2)}}\n',
        'batch = Symbol(divisor=4)\ninputs = {"x": Input([batch, 1, 5, 7])}\n',
    ],
)
def test_dynamic_dims_by_example_or_by_shape(tmp_path: Path, inputs: str) -> None:
    source = load(tmp_path, NET + inputs + "model = Net().eval()\n")
    assert str(source.model.graph.inputs[0].shape) == "[batch,1,5,7]"
    assert ("batch" in source.declared.symbols) == ("Symbol" in inputs)


def test_static_examples_several_inputs_and_output_names(tmp_path: Path) -> None:
    text = """
import torch
class Net(torch.nn.Module):
    def forward(self, a, tokens, scale=None):
        return a + 1, a[tokens], a
model = Net()
inputs = {"tokens": torch.tensor([2, 0, 1]), "a": torch.zeros(4, 5)}
outputs = ["p", "q", "r"]
"""
    model = load(tmp_path, text).model
    assert [(value.name, str(value.shape)) for value in model.graph.inputs] == [("tokens", "[3]"), ("a", "[4,5]")]
    a = np.arange(20, dtype=np.float32).reshape(4, 5)
    tokens = np.array([3, 1, 1])
    for actual, expected in zip(run(model, a=a, tokens=tokens), (a + 1, a[tokens], a), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_sequential_takes_its_input_by_any_name(tmp_path: Path) -> None:
    text = 'import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(5, 3))\ninputs = {"pixels": ["n", 5]}\n'
    model = load(tmp_path, text).model
    assert [value.name for value in model.graph.inputs] == ["pixels"]
    assert list(node_paths(model).values()) == ["0.Gemm"]


def test_mistakes(tmp_path: Path) -> None:
    def refused(text: str) -> str:
        with pytest.raises(CompileError) as caught:
            load(tmp_path, text)
        return str(caught.value)

    message = refused(NET + 'inputs = {"y": [3]}\nmodel = Net()\n')
    assert message.startswith("model.py:34: inputs names 'y', but forward takes 'x'\n")
    assert "model.py:34: forward takes 'x', which inputs does not name\n" in message
    message = refused(NET + 'inputs = {"x": [3, 2, 5, 7]}\nmodel = Net()\n')
    assert message.startswith("model.py:27: RuntimeError: Given groups=1, weight of size [4, 1, 3, 3]")
    message = refused('import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(5, 3))\ninputs = [["n", "m"]]\n')
    assert message.startswith("model.py:3: torch cannot export the module: ")
    message = refused(BRANCH)
    assert message.startswith(
        "model.py:5: torch cannot export the module: Could not guard on data-dependent expression"
    )
    assert "\n  if x.sum() > 0:\n" in message
    message = refused(NET + INPUTS + 'dynamic_shapes = {"y": {0: "batch"}}\nmodel = Net()\n')
    assert "dynamic_shapes is" in message


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional
from partc.compiler import Input

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

torch.manual_seed(3)
model = Attention().eval()
inputs = {"x": Input(["batch", "seq", 16])}
"""


def test_attention_is_cut_without_a_message_but_one(tmp_path: Path) -> None:
    """Exported at the opset whose ops are all cut: packed queries, keys and values by colwise alone, and torch's fused attention."""
    from partc.compiler.pipeline import compile_model
    from partc.runtime import load_local

    (tmp_path / "model.py").write_text(ATTENTION)
    (tmp_path / "plan.yaml").write_text("ranks: 2\nsharding: {qkv: colwise, out: rowwise}\n")
    report = compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")
    assert report.program.model.opset_imports[""] == 21
    assert len(report.program.events) == 1
    assert report.program.events[0].op_type in ("AllReduce", "Reduce")
    scope: dict[str, object] = {}
    exec(ATTENTION, scope)
    module = scope["model"]
    with load_local(report.out) as ranks:
        for batch, length in ((2, 5), (3, 9)):
            x = torch.randn(batch, length, 16)
            have = ranks({"x": x.numpy()})["output"]
            np.testing.assert_allclose(have, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


MIXTRAL = """import torch
transformers = __import__("transformers")
config = transformers.MixtralConfig(
    vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=16,
)
model = transformers.MixtralForCausalLM(config).eval()
model.model.embed_tokens.weight.requires_grad = False
inputs = ["input_ids", "labels"]
"""


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written first: torch exports neither its cache nor its grouped experts, and nobody says its inputs."""
    pytest.importorskip("transformers")
    calls: list[object] = []
    export = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *given, **how: calls.append(given) or export(*given, **how))
    source = load(tmp_path, MIXTRAL)
    graph = source.model.graph
    assert len(calls) == 1, "it has the settings before it is exported"
    shapes = {value.name: [str(dim) for dim in value.shape or ()] for value in graph.inputs}
    assert shapes == {name: ["batch", "sequence"] for name in ("input_ids", "labels")}
    symbol = source.declared.symbols["sequence"]
    assert (symbol.min, symbol.max) == (2, 16), "the loss compares a position with the next token, and there are 16"
    assert [value.name for value in graph.outputs] == ["loss", "logits"]
    trained = set(trainable_names(source.model))
    assert "lm_head.weight" in trained
    assert "model.embed_tokens.weight" not in trained, "it requires no gradient"
    forward = inspect.signature(pytest.importorskip("transformers").MixtralForCausalLM.forward).parameters
    cache = "cache" if "cache" in forward else "past_key_values"  # renamed by transformers 5.24
    misspelled = MIXTRAL.replace('"labels"]', f'"label", "{cache}"]')
    with pytest.raises(CompileError) as caught:
        load(tmp_path, misspelled)
    assert "the forward of MixtralForCausalLM takes no 'label'\n  help: the nearest names are 'labels'" in str(
        caught.value
    )
    assert f"the shape of '{cache}' of MixtralForCausalLM is not known" in str(caught.value)

    def refuse(*arguments: object, **options: object) -> object:
        raise RuntimeError("DynamicCache has no pytree")

    monkeypatch.setattr(torch.onnx, "export", refuse)  # a model that takes no setting
    monkeypatch.setattr(settings, "settle", lambda module, setting: False)
    with pytest.raises(CompileError) as caught:
        load(tmp_path, MIXTRAL)
    assert caught.value.problems[0].help.startswith("set config.use_cache = False, or wrap the model")


def test_a_model_of_timm_or_torchvision_needs_no_inputs(tmp_path: Path) -> None:
    """They take images: of the size that `pretrained_cfg` says, else of the usual one, and the user is told."""
    found = []
    for library, said in (
        ("timm", {"pretrained_cfg": {"input_size": (3, 32, 32)}}),
        ("torchvision", {}),
        ("torch", {}),
    ):
        members = {"__module__": f"{library}.models.net", "forward": lambda self, images: images, **said}
        found.append(image_inputs(type("Net", (), members)()))
    timm, torchvision, other = found
    assert timm == ({"images": Input(["batch", 3, 32, 32])}, "its pretrained_cfg")
    assert torchvision == ({"images": Input(["batch", 3, 224, 224])}, "the usual one of torchvision")
    assert other is None
    net = "from torch import nn\nmodel = nn.Sequential(nn.Conv2d(3, 4, 7, 8), nn.ReLU())\ntype(model).__module__ = 'torchvision.models'"
    (tmp_path / "model.py").write_text(f"{net}\n")
    try:
        (warning,) = load_python(tmp_path / "model.py").declared.warnings
    finally:
        torch.nn.Sequential.__module__ = "torch.nn.modules.container"
    assert warning.startswith("model.py:2: the input 'input' is ['batch', 3, 224, 224], the usual one of torchvision; ")
