"""What drops in a torch module that trains: each function becomes a Dropout, with torch's law, that an evaluation turns off."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "partc[torch]"')

from partc.compiler.directives.recorder import Recorder  # noqa: E402
from partc.compiler.frontend.inputs import DimNames  # noqa: E402
from partc.compiler.frontend.source import Source  # noqa: E402
from partc.compiler.frontend.torch.torch_module import export  # noqa: E402
from partc.compiler.pipeline import compile_source  # noqa: E402
from partc.compiler.plan.read import parse_plan  # noqa: E402
from partc.compiler.rewrite.train_mode import to_evaluation, to_training  # noqa: E402
from partc.runtime import load_local  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

P = 0.25
BATCH, CHANNELS, LENGTH = 6, 4, 5


class Drops(nn.Module):
    """Before a comma stands what has a mask of its own: each element, or each channel of a record.

    Attention's values are the unit matrix, so that it gives its weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Dropout(P, inplace=True), nn.Dropout1d(P), nn.AlphaDropout(P)])
        self.attention = nn.MultiheadAttention(4, 2, dropout=P, batch_first=True)
        self.rnn = nn.RNN(LENGTH, 3, 3, dropout=P, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        on = self.training
        image = x[..., None] * torch.ones(2)
        keys, share = x[:, None], P if on else 0.0
        mask = torch.ones(CHANNELS, CHANNELS).tril().bool()
        unit = torch.eye(CHANNELS).expand(x.shape[0], 1, CHANNELS, CHANNELS)
        attend = functional.scaled_dot_product_attention
        return {
            "n c l, dropout": functional.dropout(x, P, on),
            "n c l, dropout in place": functional.dropout(x * 1, P, on, True),
            "n c l, Dropout(inplace)": self.layers[0](x * 1),
            "n c l, torch.dropout_": torch.dropout_(x * 1, P, on),
            "n c, Dropout1d": self.layers[1](x),
            "n c, dropout1d of a record": functional.dropout1d(x.flatten(0, 1), P, on).unflatten(0, (-1, CHANNELS)),
            "n c, dropout2d": functional.dropout2d(image, P, training=on)[..., 0],
            "n c, dropout3d in place": functional.dropout3d(image[..., None] * 1, P, on, inplace=True)[..., 0, 0],
            "n c, torch.feature_dropout": torch.feature_dropout(x, P, on),
            "n c l, AlphaDropout": self.layers[2](x),
            "n c l, torch.alpha_dropout_": torch.alpha_dropout_(x * 1, P, on),
            "n c, feature_alpha_dropout": functional.feature_alpha_dropout(x, P, on),
            "n c l, attention": attend(keys, keys, unit, dropout_p=share)[:, 0],
            "n c l, attention, causal": attend(keys, keys, unit, dropout_p=share, is_causal=True)[:, 0],
            "n c l, attention, mask": attend(keys, keys, unit, mask, share)[:, 0],
            "n c l, attention, scores": attend(keys, keys, unit, mask.float(), share)[:, 0],
            "layers": self.rnn(x)[0],
            "heads": self.attention(*[x[..., :4]] * 3, need_weights=False)[0],
        }


def ran(model: ir.Model, plan: str, out: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    compile_source(Source(model), parse_plan(plan, "plan.yaml"), out)
    with load_local(out) as ranks:
        return dict(ranks(inputs))


def test_every_dropout_of_torch_follows_its_law_on_any_number_of_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Drops()
    x = torch.rand(BATCH, CHANNELS, LENGTH) + 0.5
    dims = {"x": {0: "batch"}}
    model = export(module, {"x": x}, dims, DimNames({}, set()), [], "model.py", Recorder(tmp_path))
    names = [str(value.name) for value in model.graph.outputs]
    drawing = Counter(node.op_type for node in model.graph if node.op_type.startswith(("Dropout", "Random", "Bern")))
    assert drawing == {"Dropout": len(names) + 1}  # a layer of three has two
    evaluation = model.clone()
    to_evaluation(evaluation)
    with torch.no_grad():
        want = {name: one.numpy() for name, one in module.eval()(x).items()}
    have = ran(evaluation, "ranks: 1\n", tmp_path / "evaluation", {"x": x.numpy()})
    for name in names:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)

    to_training(model, cut=True, seed=7, frozen=lambda name: False)
    inputs = {"x": x.numpy(), "step": np.array(3)}
    whole = ran(model.clone(), "ranks: 1\n", tmp_path / "one", inputs)
    plan = "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"
    cut = ran(model, plan, tmp_path / "two", inputs)
    q = 1 - P
    a = (q + 1.7580993408473766**2 * P * q) ** -0.5
    for name in names:
        np.testing.assert_allclose(cut[name], whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
        kept, dropped = want[name] / q, np.float32(0)
        if "lpha" in name:
            kept, dropped = a * (want[name] + 1.7580993408473766 * P), np.float32(-1.7580993408473766 * a * q)
        is_kept = np.isclose(whole[name], kept, rtol=1e-4, atol=1e-6)
        if "," not in name:
            assert not is_kept.all(), name
            continue
        is_dropped = np.isclose(whole[name], dropped, rtol=1e-4, atol=1e-6)
        assert (is_kept | is_dropped).all(), name
        drawn = want[name] != 0
        assert 0.4 < is_kept[drawn].mean() < 0.97, name
        by_channel = (is_kept == is_kept[..., :1]).all()
        assert by_channel == name.startswith("n c,"), name
