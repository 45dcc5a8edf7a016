"""The clean-up of an export, and every pass of a compile, changes no bit: constants next to 0, 1 and -1 are not these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import Recorder
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local

torch = pytest.importorskip("torch")
functional = torch.nn.functional

NEXT_TO_0 = (0.0, -0.0, 1e-8, -1e-8, 1e-38, 1e-45, 1e-5)
NEXT_TO_1 = (1.0, -1.0, 1 + 5e-6, 1 - 5e-6, -1 - 5e-6, 1 + 1.2e-7)
X = np.array([[0, -0.0, 1, -1], [1e-8, -1e-8, 3e-9, 1e-4], [1e-45, 1e-38, 2.5, -3], [0, 0, 0, 0]], np.float32)
PLAN = "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"


class _Constants(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        made = []
        for c in (*NEXT_TO_0, *NEXT_TO_1):
            made += [x + c, x - c, c - x, x * c, torch.maximum(x, torch.tensor(c)), torch.minimum(torch.tensor(c), x)]
            made.append(torch.where(x > c, x, 1.0))
            made += [x / c, c / (x + 2)] if c else []
        for epsilon in (1e-8, 1e-12, 1e-38, 1e-5):
            made.append(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))
            made.append(functional.layer_norm(x, (4,), eps=epsilon))
        made += [x.abs().pow(c) for c in NEXT_TO_1[:5]]
        return tuple(made)


def exported(module: Any, outputs: list[str]) -> ir.Model:
    from partc.compiler.frontend.torch.torch_module import export

    return export(
        module, {"x": Input(["batch", 4])}, None, DimNames({}, set()), outputs, "model.py:1", Recorder(Path())
    )


def run(model: ir.Model) -> list[Any]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": X}))


def differing(have: list[Any], want: list[Any]) -> list[int]:
    return [k for k, (a, b) in enumerate(zip(have, want, strict=True)) if a.tobytes() != b.tobytes()]


def test_constants_next_to_others_stay_to_the_bit(tmp_path: Path) -> None:
    from partc.compiler.frontend.torch.torch_module import quiet

    module = _Constants().eval()
    with quiet():
        raw = torch.onnx.export(module, (torch.tensor(X),), dynamo=True, optimize=False, input_names=["x"])
    want = run(raw.model)
    outputs = [f"y{k}" for k in range(len(want))]
    model = exported(module, outputs)
    assert differing(run(model), want) == []
    compile_source(Source(model.clone()), parse_plan(PLAN, "plan.yaml"), tmp_path / "build", check=False)
    with load_local(tmp_path / "build") as ranks:
        made = ranks({"x": X})
    assert differing([made[output] for output in outputs], want) == []


class _Drawn(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        first, second = functional.dropout(x, 0.5, self.training), functional.dropout(x, 0.5, self.training)
        return first + second + x.sin() * x.sin()


def test_nodes_that_draw_are_not_merged_and_equal_ones_are() -> None:
    kinds = [node.op_type for node in exported(_Drawn().train(), ["y"]).graph]
    assert (kinds.count("Dropout"), kinds.count("Sin")) == (2, 1)


class _Moved(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        same = x.permute(0, 1)[:, :4] * 1.0 / 1 - 0.0
        return same, same.unsqueeze(0).unsqueeze(0), x.reshape(x.shape[0], -1, 2), x


def test_nodes_that_change_nothing_are_taken_out() -> None:
    model = exported(_Moved().eval(), ["a", "b", "c", "d"])
    assert sorted(node.op_type for node in model.graph) == ["Identity", "Identity", "Reshape", "Unsqueeze"]
    a, b, c, d = run(model)
    assert differing([a, b[0, 0], c.reshape(4, 4), d], [X] * 4) == []
