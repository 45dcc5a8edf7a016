"""Folders of GPTQ, AWQ, fp8 and MXFP4 give the logits of the float model that their numbers stand for; others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from onnx import helper
from partc.cli.commands.plan import command as plan_command
from partc.compiler.errors import CompileError
from partc.compiler.frontend.huggingface.quantized_files import float_weights
from partc.compiler.frontend.huggingface.safetensors_files import stored_tensors
from partc.compiler.frontend.huggingface.weights import stored_as
from partc.compiler.frontend.source import Source
from partc.compiler.ir.computed import shard_of
from partc.compiler.pipeline import compile_model
from partc.compiler.plan.read import parse_plan
from partc.compiler.quantize import quantized
from partc.runtime import load_local
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.errors import PartcError

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"'
)

SIZES: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
EXACT = 'quantize: {"**": {bits: %d, block: %d, accuracy_level: 1}}\n'
IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int64)

Array = NDArray[Any]
Packed = tuple[dict[str, Array], Array]
"""The tensors of a module, and the weight [N, K] that they stand for."""


def _words(numbers: Array, bits: int, places: list[int] | None = None) -> Array:
    """Numbers along the last dim in words; `places[i]` is the number at the i-th lowest bits of a word."""
    per_word = 32 // bits
    apart = numbers.reshape(*numbers.shape[:-1], -1, per_word)[..., places or list(range(per_word))]
    total = sum(apart[..., k].astype(np.uint64) << np.uint64(k * bits) for k in range(per_word))
    return np.asarray(total).astype(np.uint32).view(np.int32)


def _drawn(rng: np.random.Generator, size: int, columns: int, bits: int, group: int, symmetric: bool) -> list[Array]:
    """Numbers [K, N], zero points and scales [K / group, N]."""
    shape = (size // group, columns)
    points = np.full(shape, 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, shape)
    scales = (rng.random(shape) * 0.5 + 0.5) * 0.3 / (1 << (bits - 1))
    return [rng.integers(0, 1 << bits, (size, columns)), points, scales.astype(np.float16)]


def _gptq(bits: int, group: int, symmetric: bool, permuted: bool, form: str) -> Callable[..., Packed]:
    def pack(rng: np.random.Generator, size: int, columns: int) -> Packed:
        numbers, points, scales = _drawn(rng, size, columns, bits, group, symmetric)
        of_row = np.arange(size, dtype=np.int32) // group
        if permuted:
            rng.shuffle(of_row)
        zeros = _words(points, bits)
        if form == "gptq":
            zeros = (zeros.view(np.uint32) - np.uint32((1 << 32) // ((1 << bits) - 1))).view(np.int32)
        weight = (numbers - points[of_row]) * scales[of_row].astype(np.float32)
        words = np.ascontiguousarray(_words(np.ascontiguousarray(numbers.T), bits).T)
        return {"qweight": words, "qzeros": zeros, "scales": scales, "g_idx": of_row}, weight.T

    return pack


def _awq(bits: int, group: int) -> Callable[..., Packed]:
    places = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]

    def pack(rng: np.random.Generator, size: int, columns: int) -> Packed:
        numbers, points, scales = _drawn(rng, size, columns, bits, group, False)
        weight = (numbers - np.repeat(points, group, axis=0)) * np.repeat(scales, group, axis=0).astype(np.float32)
        tensors = {"qweight": _words(numbers, bits, places), "qzeros": _words(points, bits, places), "scales": scales}
        return tensors, weight.T

    return pack


def _fp8(rng: np.random.Generator, size: int, columns: int) -> Packed:
    import ml_dtypes

    numbers = rng.standard_normal((columns, size)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((-(-columns // 24), -(-size // 40))).astype(np.float32)
    factors = np.repeat(np.repeat(scales, 24, axis=0), 40, axis=1)[:columns, :size]
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.astype(np.float32) * factors


def _fp8_of_rows(rng: np.random.Generator, size: int, columns: int) -> Packed:
    import ml_dtypes

    numbers = rng.standard_normal((columns, size)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((columns, 1)).astype(np.float32)
    made = {"weight": numbers, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    return made, numbers.astype(np.float32) * scales


def _folder(folder: Path, pack: Callable[..., Packed], **settings: Any) -> Array:
    """A quantized Llama of float16 in a folder; returns the logits of its float model."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tensors = {}
    for name, value in list(model.state_dict().items()):
        if not name.endswith("_proj.weight"):
            tensors[name] = value.numpy().astype(np.float16)
            value.copy_(torch.from_numpy(tensors[name]))
            continue
        made, weight = pack(rng, *reversed(value.shape))
        value.copy_(torch.from_numpy(weight.astype(np.float32)))
        tensors |= {f"{name.removesuffix('weight')}{kind}": one for kind, one in made.items()}
    folder.mkdir()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    _save(tensors, folder / "model.safetensors")
    with torch.no_grad():
        logits: Array = model(torch.from_numpy(IDS), use_cache=False).logits.numpy()
    return logits


def _save(tensors: dict[str, Array], path: Path) -> None:
    from safetensors.torch import save_file

    def as_torch(array: Array) -> Any:
        whole = np.ascontiguousarray(array)
        is_fp8 = whole.dtype.name == "float8_e4m3fn"
        return torch.from_numpy(whole.view(np.uint8)).view(torch.float8_e4m3fn) if is_fp8 else torch.from_numpy(whole)

    save_file({name: as_torch(array) for name, array in tensors.items()}, path)


FOLDERS = {
    "gptq, 4 bits, symmetric": (
        _gptq(4, 32, True, False, "gptq"), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, 4),
    "gptq, rows in another order": (
        _gptq(4, 16, False, True, "gptq"),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": True}, 4),
    "gptq of the second form, 8 bits": (
        _gptq(8, 32, False, False, "gptq_v2"),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}, 8),
    "awq, 4 bits": (
        _awq(4, 16), {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, 4),
    "awq, 8 bits": (_awq(8, 32), {"quant_method": "awq", "bits": 8, "group_size": 32, "zero_point": True}, 8),
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [24, 40]}, 0),
    "fp8 of rows": (_fp8_of_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_product_is_that_of_the_float_weight(tmp_path: Path, kind: str) -> None:
    """Its numbers, any shard of them, and the quantized product, with a weight of distinct sizes."""
    import onnxruntime

    pack, settings, bits = FOLDERS[kind]
    tensors, weight = pack(np.random.default_rng(0), 96, 40)
    _save({f"up.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    files = float_weights({"quantization_config": settings}, stored_tensors(tmp_path), "llama")
    assert [*files] == ["up.weight"]
    tensor = stored_as(files["up.weight"], ir.DataType.FLOAT, "up.weight")
    np.testing.assert_array_equal(tensor.numpy(), weight.astype(np.float32))
    np.testing.assert_array_equal(
        shard_of(tensor, (slice(3, 29), slice(13, 70))), weight[3:29, 13:70].astype(np.float32)
    )
    x, w, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("x", "up.weight", "y"))
    w.const_value, w.shape, x.shape = tensor, ir.Shape([40, 96]), ir.Shape([3, 96])
    gemm = ir.Node("", "Gemm", [x, w], [ir.AttrInt64("transB", 1)], outputs=[y], name="up")
    graph = ir.Graph([x], [y], nodes=[gemm], initializers=[w], opset_imports={"": 21}, name="product")
    source = Source(ir.Model(graph, ir_version=10))
    exact = parse_plan("ranks: 1\n" + EXACT % (bits, settings["group_size"]), "plan.yaml") if bits else None
    model = quantized(source, exact, "llama").model
    assert [node.op_type for node in model.graph][-1] == ("MatMulNBits" if bits else "Gemm")
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    want = rows @ weight.T.astype(np.float32)
    assert np.abs(session.run(None, {"x": rows})[0] - want).max() < 1e-5 * np.abs(want).max()


def test_logits_are_those_of_the_float_model_on_any_ranks(tmp_path: Path) -> None:
    pack, settings, bits = FOLDERS["gptq, rows in another order"]
    want = _folder(tmp_path / "llama", pack, **settings)
    proposed = CliRunner().invoke(plan_command, [str(tmp_path / "llama"), "--tp", "2"])
    assert proposed.exit_code == 0, proposed.output
    for ranks, layout in ((1, "ranks: 1\n"), (2, proposed.stdout)):
        (tmp_path / "plan.yaml").write_text(layout + EXACT.replace("**", "**.*_proj") % (bits, 16))
        report = compile_model(tmp_path / "llama", tmp_path / "plan.yaml", tmp_path / f"{ranks}")
        assert any("float16 becomes float32" in warning for warning in report.warnings)
        nodes = open_artifact(tmp_path / f"{ranks}").model(ranks - 1).graph.node
        assert sum(node.op_type == "MatMulNBits" for node in nodes) == 14
        columns = [
            helper.get_node_attr_value(node, "N")
            for node in nodes
            if "gate_proj" in node.name and node.op_type == "MatMulNBits"
        ]
        assert columns == [64 // ranks] * 2
        with load_local(tmp_path / f"{ranks}") as step:
            have = step({"input_ids": IDS})["logits"]
        assert np.abs(have - want).max() < 1e-5 * np.abs(want).max()


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    sizes = {**SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    settings = transformers.GptOssConfig(**{**sizes, "intermediate_size": 96}, layer_types=["full_attention"])
    model = transformers.GptOssForCausalLM(settings).eval()
    tensors = {}
    for name, value in list(model.state_dict().items()):
        if not name.endswith("up_proj") and not name.endswith("down_proj"):
            tensors[name] = value.numpy()
            continue
        experts, rows, columns = value.shape
        blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 125, blocks.shape[:3], dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        packed = (torch.from_numpy(array) for array in (blocks, scales))
        value.copy_(convert_moe_packed_tensors(*packed, dtype=torch.float32))
    folder = tmp_path / "oss"
    folder.mkdir()
    config = {**settings.to_dict(), "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    _save(tensors, folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    files = float_weights({"quantization_config": quantization}, stored_tensors(folder), "oss")
    tensor, whole = stored_as(files[name], ir.DataType.FLOAT, name), model.state_dict()[name].numpy()
    box = (slice(1, 3), slice(30, 70), slice(5, 60))
    np.testing.assert_array_equal(shard_of(tensor, box), whole[box])
    compile_model(folder, None, tmp_path / "build", compare=False, keep=False)
    with load_local(tmp_path / "build") as step, torch.no_grad():
        want = model(torch.from_numpy(IDS), use_cache=False).logits.numpy()
        assert np.abs(step({"input_ids": IDS})["logits"] - want).max() < 1e-5 * np.abs(want).max()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}


@pytest.mark.parametrize(
    ("settings", "tensors", "fact"),
    [
        ({"quant_method": "bitsandbytes"}, {}, "the weights are quantized (bitsandbytes)"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, {}, "in the form 'gemv' of awq"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            {},
            "'pack-quantized' of compressed-tensors",
        ),
        (
            {"quant_method": "fbgemm_fp8"},
            {"weight": _fp8_of_rows(np.random.default_rng(0), 8, 6)[0]["weight"]},
            "'up.weight' [6, 8] has no scale",
        ),
        (
            {"quant_method": "mxfp4"},
            {"w_blocks": np.zeros((2, 6, 3, 8), np.uint8)},
            "'up.w' has blocks [2, 6, 3, 8], and",
        ),
        (
            {"quant_method": "mxfp4"},
            {"w_blocks": np.zeros((2, 6, 3, 16), np.uint8), "w_scales": np.zeros((2, 6, 2), np.uint8)},
            "'up.w' has blocks [2, 6, 3, 16] and scales [2, 6, 2]",
        ),
        ({**GPTQ, "bits": 3}, {}, "have 3 bits in groups of 16"),
        ({**GPTQ, "sym": True}, {}, "'up' has zero points other than 8"),
        (
            GPTQ,
            {"g_idx": np.array([0] * 17 + [1] * 15, np.int32)},
            "'up' has a g_idx whose groups are not 2 of 16 rows",
        ),
        (GPTQ, {"qzeros": np.zeros((2, 4), np.int32)}, "which do not fit 4 bits"),
        (GPTQ, {"qzeros": np.full((2, 5), 0x4F, np.int32)}, "'up.qzeros' has zero points of 0"),
        (GPTQ, {"scales": None}, "'up' has qweight without qzeros and scales"),
        ({**GPTQ, "group_size": 20}, {"g_idx": None}, "'up' has 32 rows in 2 groups of 20: the last one is shorter"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, settings: dict[str, Any], tensors: dict[str, Any], fact: str
) -> None:
    made = {**_gptq(4, 16, False, False, "gptq")(np.random.default_rng(0), 32, 40)[0], **tensors}
    _save({f"up.{name}": tensor for name, tensor in made.items() if tensor is not None}, tmp_path / "model.safetensors")
    files = stored_tensors(tmp_path)
    with pytest.raises(PartcError if "zero points o" in fact else CompileError) as error:
        float_weights({"quantization_config": settings}, files, "llama")["up.weight"].tensor(
            ir.DataType.FLOAT, ""
        ).numpy()  # type: ignore[attr-defined]
    assert fact in str(error.value)
    assert "use the folder of float weights" in str(error.value)
