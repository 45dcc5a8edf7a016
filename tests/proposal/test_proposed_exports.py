"""Proposals for what torch exports: attention by its fused op with a dynamic length, and a decoder's step with a cache."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import same, whole_outputs
from partc.compiler import compile_model
from partc.compiler.cost.memory import rank_memory
from partc.compiler.frontend import load
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.propose import propose
from partc.runtime import load_local
from partc.runtime.artifact.manifest import open_artifact

torch = pytest.importorskip("torch", reason="torch exports the models of these tests")
pytest.importorskip("onnxscript", reason="torch's exporter needs it")

HEADS, SIZE, LAYERS = 4, 8, 2
LARGE = {"batch": 8, "seq": 16, "past": 32}
WIDTH = HEADS * SIZE


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, past_k, past_v):
        batch, length, _ = x.shape
        h = self.norm(x)
        q, k, v = (one(h).view(batch, length, HEADS, SIZE).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        rows = torch.arange(length, device=x.device)[:, None] + past_k.shape[2]
        mask = torch.arange(k.shape[2], device=x.device)[None] <= rows
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(mixed.transpose(1, 2).reshape(batch, length, WIDTH)), k, v


class Decoder(torch.nn.Module):
    """Two layers, whose cache is scaled before the first layer runs, the last one's first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, k0, v0, k1, v1):
        scaled = [(k * 1.0, v * 1.0) for k, v in ((k1, v1), (k0, v0))][::-1]
        made = []
        for layer, (k, v) in zip(self.layers, scaled, strict=True):
            x, *cache = layer(x, k, v)
            made += cache
        return (x, *made)


@pytest.fixture(scope="module")
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported") / "decoder.onnx"
    past = {name: torch.randn(2, HEADS, 5, SIZE) for name in ("k0", "v0", "k1", "v1")}
    sizes = {"x": {0: "batch", 1: "seq"}, **{name: {0: "batch", 2: "past"} for name in past}}
    torch.onnx.export(
        Decoder().eval(),
        (),
        str(path),
        kwargs={"x": torch.randn(2, 3, WIDTH), **past},
        dynamic_shapes=sizes,
        output_names=["y", *(f"next_{name}" for name in past)],
        opset_version=request.param,
        dynamo=True,
        verbose=False,
    )
    return path


def step(batch: int, seq: int, past: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seq)
    made = {name: random.standard_normal((batch, HEADS, past, SIZE), np.float32) for name in ("k0", "v0", "k1", "v1")}
    return {"x": random.standard_normal((batch, seq, WIDTH), np.float32), **made}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("exported", "degrees", "sent"),
    [
        (18, Degrees(tp=2), {"AllReduce": 2}),
        (23, Degrees(tp=2, stages=2), {"AllReduce": 2, "Send": 3}),
    ],
    ids=["tp 2", "tp 2, 2 stages"],
    indirect=["exported"],
)
def test_a_step_with_a_cache(exported: Path, degrees: Degrees, sent: dict[str, int], tmp_path: Path) -> None:
    """One AllReduce a layer, what a stage hands on to each of its ranks, and the result to rank 0; caches stay."""
    text, missing = propose(load(exported), "decoder.onnx", degrees)
    assert not missing
    (tmp_path / "plan.yaml").write_text(text)
    report = compile_model(exported, tmp_path / "plan.yaml", tmp_path / "build")
    with load_local(report.out) as local:
        for fed in (step(2, 3, 5), step(3, 1, 4)):
            have = local(fed)
            for name, value in whole_outputs(onnx.load(exported), fed).items():
                same(have[name], value, name, rtol=1e-4, atol=1e-5)
    needed = (rank_memory(open_artifact(report.out), rank, LARGE) for rank in range(report.manifest.ranks))
    assert not any(one.unknown for one in needed), "partc inspect leaves values out of a peak"
    ops = [event.op_type for event in report.program.events]
    assert {op: ops.count(op) for op in ops} == sent
    plan = parse_plan(text, "plan.yaml")
    if degrees.tp > 1:
        styles = {rule.pattern: rule.style for rule in plan.sharding}
        assert styles == {f"layers.*.{name}": "rowwise" if name == "o" else "colwise" for name in "qkvo"}
    if degrees.stages > 1:
        assert [rule.pattern for rule in plan.placement] == ["layers.0", "layers.1"]
