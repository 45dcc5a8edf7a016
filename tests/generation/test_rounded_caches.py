"""`generate: {cache: int8}`: the tokens are those of the model that rounds its keys and values, in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoder_layouts import COUNTS, LAYOUTS, PROMPTS, TENSOR, requests
from decoders import Unsharded, decoder
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_model
from partc.compiler.plan.generate import GenerateRules
from partc.compiler.rewrite.generation.rounding import rounding_of
from partc.compiler.rounded_caches import round_caches
from partc.runtime import load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from rows import of_today

GENERATE = "generate: {slots: 2, length: 64, chunk: 8, cache: int8}\n"
REPEATED = f"ranks: 4\nmesh: {{tp: 4}}\n{TENSOR}"
RULES = GenerateRules.model_validate({"length": 64, "cache": "int8"})


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model that rounds its keys and values."""
    source = round_caches(Source(ir.serde.deserialize_model(model)), RULES, "model")
    made: onnx.ModelProto = ir.serde.serialize_model(source.model)
    return made


FUSED = [
    (LAYOUTS["tensor parallel stages"], {"fused": True}),
    (REPEATED, {"fused": True}),
    (REPEATED, {"fused": True, "single": True}),
]


@pytest.mark.parametrize(("layout", "form"), [(LAYOUTS["one rank"], {"window": 9}), *of_today(FUSED, 1)])
def test_tokens_are_those_of_the_model_that_rounds(tmp_path: Path, layout: str, form: dict[str, int]) -> None:
    model = decoder(**form)  # type: ignore[arg-type]
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(layout + GENERATE)
    manifest = compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build").manifest
    caches = [one for one in manifest.state if one.kind == "cache"]
    assert len(caches) == 4
    assert all(one.type == "tensor(int8)" for one in caches)
    alone = Unsharded(rounded(model))
    with load_local_generator(tmp_path / "build") as generator:
        tokens = [one.tokens for one in generator.run(requests())]
    assert tokens == [alone.tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    assert tokens != [Unsharded(model).tokens(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    is_fused = "single" not in form and "fused" in form
    ops = [node.op_type for node in open_artifact(tmp_path / "build").model(0).graph.node]
    assert ("GroupQueryAttention" in ops) is is_fused
    assert ("Round" in ops) is not is_fused


def test_a_number_is_off_by_half_a_scale_at_most() -> None:
    model = rounded(decoder(fused=True))
    graph = ir.serde.deserialize_model(model).graph
    found = [one for node in graph if (one := rounding_of(node.outputs[0])) is not None]
    assert len(found) == 4
    for one in found:
        model.graph.output.append(onnx.ValueInfoProto(name=one.source.name))
    whole = Unsharded(model)
    past = {name: np.zeros((1, heads, 0, 8), np.float32) for name, heads in whole.heads.items()}
    numbers = whole.session.run(None, {"ids": np.asarray(PROMPTS[2:3]), **past})[1:]
    for one, present, exact in zip(found, numbers[:4], numbers[4:], strict=True):
        assert one.scale.const_value is not None
        scale = one.scale.const_value.numpy()
        assert scale.shape == (1, exact.shape[1], 1, 8)
        inside = np.abs(exact) <= 127 * scale
        assert inside.mean() > 0.98
        assert (np.abs(present - exact) <= 0.5001 * scale)[inside].all()
        assert (np.abs(exact).max(axis=(0, 2)) > 40 * scale[0, :, 0]).all()  # no scale is much too large


def test_rounding_to_other_numbers_is_another_op() -> None:
    model = rounded(decoder(fused=True))
    bound = next(one for one in model.graph.initializer if one.name == "cache.constant.most")
    bound.CopyFrom(onnx.numpy_helper.from_array(np.float32(255), bound.name))
    graph = ir.serde.deserialize_model(model).graph
    assert not any(rounding_of(node.outputs[0]) for node in graph)


def test_what_cannot_be_rounded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(ir.serde.deserialize_model(decoder()))
    wide = decoder()
    for value in (*wide.graph.input, *wide.graph.output):
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.shape.dim[3].dim_param = "size"
    broken = decoder()
    for one in broken.graph.initializer:
        if one.name == "layers.1.k.weight":
            one.CopyFrom(onnx.numpy_helper.from_array(np.full([*one.dims], np.inf, np.float32), one.name))
    cases = [
        (replace(source, absent=True), "model has no weights"),
        (Source(ir.serde.deserialize_model(wide)), "is not [batch, heads, entries, size] of floats"),
        (Source(ir.serde.deserialize_model(broken)), "'present_k.1' has numbers that are not finite"),
    ]
    for given, told in cases:
        with pytest.raises(CompileError) as raised:
            round_caches(given, RULES, "model")
        assert told in str(raised.value)
        assert "leave out 'cache'" in str(raised.value)
    monkeypatch.setattr("partc.compiler.rounded_caches.free_memory", lambda: 1000)
    with pytest.raises(CompileError, match=r"the weights are .* and 1000 B of memory are free"):
        round_caches(source, RULES, "model")
