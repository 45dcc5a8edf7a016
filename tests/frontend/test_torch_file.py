"""Files that torch's exporter writes: weights have the names and shapes of their modules, one for each."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from partc.compiler.frontend.onnx_file import from_proto, load_onnx
from partc.compiler.frontend.python import load_python
from partc.compiler.training.trainable import trainable_names

torch = pytest.importorskip("torch", reason="needs partc[torch]")


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Square and oblong products, norms that are equal as long as they are new, a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.square = nn.Linear(8, 6), nn.Linear(6, 8, bias=False), nn.Linear(8, 8)
        self.empty1, self.empty2 = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for one in (self.empty1, self.empty2):
            nn.init.zeros_(one.weight)
        self.own = nn.Parameter(torch.randn(5, 8))
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("fixed", torch.randn(8, 8))

    def forward(self, ids: Any) -> Any:
        x = self.norm1(self.embed(ids))
        x = self.norm2(self.square(self.down(self.up(x))))
        x = x + (x @ self.own.T) @ self.own + torch.nn.functional.linear(x, self.fixed)
        x = x + self.empty2(self.empty1(x))
        return self.head(self.lstm(x)[0])


def exported(path: Path, opset: int = 18) -> Any:
    """The module whose export a file becomes."""
    module, written = _exported(opset)
    path.write_bytes(written)
    return module


@cache
def _exported(opset: int) -> tuple[Any, bytes]:
    """A module and its file, exported once, since that takes seconds."""
    torch.manual_seed(4)
    module = Block().eval()
    batch = torch.export.Dim("batch")
    ids = torch.zeros(2, 7, dtype=torch.int64)
    dims = {"ids": {0: batch}}
    program = torch.onnx.export(module, (ids,), dynamo=True, dynamic_shapes=dims, verbose=False, opset_version=opset)
    return module, program.model_proto.SerializeToString()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [18, 23])
def test_weights_have_the_names_and_shapes_of_their_modules(opset: int, tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    module = exported(path, opset)
    written = set(ir.load(path).graph.initializers)
    assert not {"up.weight", "norm2.weight"} & written, "the exporter no longer folds and merges"
    model = load_onnx(path)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items() if not name.startswith("lstm")}
    assert not {"embed.weight", "head.weight"} <= set(model.graph.initializers), "a shared weight is one"
    del state["embed.weight" if "head.weight" in model.graph.initializers else "head.weight"]
    ours = {name: one.const_value.numpy() for name, one in model.graph.initializers.items() if one.const_value}
    assert set(state) <= set(ours)
    for name, array in state.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    assert {"lstm.LSTM.W", "lstm.LSTM.R", "lstm.LSTM.B"} <= set(ours)
    assert not [name for name in ours if name.startswith("val_")]
    trained = set(trainable_names(model))
    assert trained == {*state, "lstm.LSTM.W", "lstm.LSTM.R", "lstm.LSTM.B"} - {"fixed"}
    ids = np.random.default_rng(0).integers(0, 12, (3, 7))
    for one in (ir.to_proto(model).SerializeToString(), str(path)):
        result = ort.InferenceSession(one, providers=["CPUExecutionProvider"]).run(None, {"ids": ids})[0]
        np.testing.assert_allclose(result, module(torch.from_numpy(ids)).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["program.model", "program.model_proto"])
def test_a_model_py_that_exports_by_itself_has_them_too(form: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nmodule = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))\n"
        "shapes = ({0: torch.export.Dim('batch')},)\nx = torch.zeros(2, 5, 4)\n"
        f"program = torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)\nmodel = {form}\n"
    )
    weights = load_python(tmp_path / "model.py").model.graph.initializers
    assert {name: list(one.shape or ()) for name, one in weights.items()} == {
        "0.weight": [3, 4], "0.bias": [3], "2.weight": [4, 3], "2.bias": [4],
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_metadata_do_not_tell_stays_as_the_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    exported(path)
    model = ir.load(path)
    for node in model.graph:
        node.metadata_props.pop("pkg.torch.onnx.fx_node", None)
    ir.save(model, path)
    names = set(load_onnx(path).graph.initializers)
    assert {"up.MatMul.B", "square.MatMul.B", "norm1.weight"} <= names
    assert "norm2.weight" not in names
    for text in ("[", "['a\\nb']", "[1, 2]", "[]", "['']"):
        for value in model.graph.initializers.values():
            value.metadata_props["pkg.onnxscript.optimizer.folded_from"] = text
        ir.save(model, path)
        assert not any("\n" in name for name in load_onnx(path).graph.initializers)


@pytest.mark.filterwarnings("ignore")
def test_the_proto_that_is_loaded_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    exported(path)
    proto = onnx.load(path)
    before = proto.SerializeToString(deterministic=True)
    from_proto(proto, path)
    assert proto.SerializeToString(deterministic=True) == before
