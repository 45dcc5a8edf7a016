"""`quantize` of a plan: weights in blocks of 4 and 8 bits have the same bits in any layout, and what cannot be quantized is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from decoders import VOCABULARY, decoder
from onnx import TensorProto, helper, numpy_helper
from partc.cli.commands.plan import command as plan_command
from partc.cli.commands.verify import command as verify_command
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_model, compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.quantize import errors, quantized
from partc.runtime import Request, load_local, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.safetensors_stream import read_header
from partc.runtime.checker.check import check_artifact
from tokenizers import Tokenizer, models, pre_tokenizers

GENERATE = "generate: {slots: 2, length: 64, chunk: 8}\n"
TENSOR = """ranks: 2
mesh: {tp: 2}
sharding:
  "layers.*.{q,k,v,up}": colwise
  "layers.*.{o,down}": rowwise
  head: colwise
"""
MIXED = """quantize:
  "**": {block: 16}
  "layers.0.{q,o}": {bits: 8, block: 16, accuracy_level: 1}
  "layers.1.v": null
"""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [60, 2, 33, 4]]


def test_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    onnx.save(decoder(fused=True), tmp_path / "model.onnx")
    found = []
    for name, layout in (
        ("one", ""),
        ("rowwise", f"{TENSOR}  embed: rowwise\n"),
        ("colwise", f"{TENSOR}  embed: colwise\n"),
    ):
        (tmp_path / "plan.yaml").write_text((layout or "ranks: 1\n") + MIXED + GENERATE)
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / name)
        with load_local_generator(tmp_path / name) as generator:
            found.append([answer.tokens for answer in generator.run([Request(one, max_tokens=12) for one in PROMPTS])])
        if layout:
            assert found[0] == found[-1]
            nodes = open_artifact(tmp_path / name).model(1).graph.node
            made = [helper.get_node_attr_value(node, "bits") for node in nodes if node.op_type == "MatMulNBits"]
            assert sorted(made) == [4] * 10 + [8] * 2
            assert sum(node.op_type == "GatherBlockQuantized" for node in nodes) == 2


def test_verify_says_how_far_weights_are_from_the_model(tmp_path: Path) -> None:
    onnx.save(decoder(fused=True), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(TENSOR + MIXED + GENERATE.replace("slots", "cache: int8, slots"))
    words = np.random.default_rng(0).integers(1, VOCABULARY, 90)
    (tmp_path / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    known = models.WordLevel({"-": 0, **{f"w{k}": k for k in range(1, VOCABULARY)}}, unk_token="-")
    tokenizer = Tokenizer(known)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    given = [str(tmp_path / "model.onnx"), "--plan", str(tmp_path / "plan.yaml"), "--text", str(tmp_path / "text.txt")]
    result = CliRunner().invoke(verify_command, given)
    assert result.exit_code == 0, result.output
    assert "14 weights quantized" in result.output
    assert "caches in int8" in result.output
    assert "% in the median" in result.output
    pieces = [words[:65], words[64:]]  # of 64 tokens, which is the plan's length, each with the one after it
    exact = np.exp(sum(map(_surprise, [tmp_path / "model.onnx"] * 2, pieces)) / 89)
    assert f"perplexity of text.txt, 90 tokens: {exact:.3f}; quantized " in result.output


def _surprise(path: Path, words: Any) -> float:
    """The negative logarithms of the probabilities of all words but the first, by the file in a single run."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ports = session.get_inputs()[1:]
    past = {port.name: np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32) for port in ports}
    logits = session.run(["logits"], {"ids": words[None, :-1], **past})[0][0].astype(np.float64)
    return float(sum(np.log(np.exp(row - row[word]).sum()) for row, word in zip(logits, words[1:], strict=True)))


def test_a_proposal_quantizes_what_the_model_has(tmp_path: Path) -> None:
    onnx.save(decoder(fused=True), tmp_path / "model.onnx")
    plan = tmp_path / "plan.yaml"
    asked = [str(tmp_path / "model.onnx"), "--tp", "2", "--generate", "64", "--quantize", "8", "-o", str(plan)]
    result = CliRunner().invoke(plan_command, [*asked, "--cache", "int8"])
    assert result.exit_code == 0, result.output
    proposed = parse_plan(plan.read_text(), "plan.yaml")
    assert proposed.generate is not None
    assert proposed.generate.cache == "int8"
    rules = proposed.quantize
    assert {rule.pattern for rule in rules} >= {"layers.*.q", "layers.*.down", "head", "embed.positions"}
    blocks = {rule.pattern: (rule.blocks.bits, rule.blocks.block) for rule in rules if rule.blocks}
    assert blocks["layers.*.o"] == (8, 16)  # each rank has 16 of its 32 rows
    assert blocks["layers.*.down"] == (8, 32)


def _linear(**more: Any) -> Source:
    """A product with a bias, one of a transposed weight, one of a weight in float16, and one of two values."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int, dtype: type = np.float32) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(dtype), name)

    nodes = [
        helper.make_node("Gemm", ["x", "a", "bias"], ["y"], "gemm", transB=1),
        helper.make_node("Transpose", ["b"], ["bt"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["y", "bt"], ["z"], "turned"),
        helper.make_node("Cast", ["z"], ["h"], "cast", to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["h", "c"], ["out"], "half"),
        helper.make_node("Transpose", ["x"], ["xt"], "values_turned"),
        helper.make_node("MatMul", ["xt", "x"], ["gram"], "values"),
    ]
    weights = [weight("a", 48, 64), weight("bias", 48), weight("b", 32, 48), weight("c", 32, 24, dtype=np.float16)]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [
            helper.make_tensor_value_info("out", TensorProto.FLOAT16, ["batch", 24]),
            helper.make_tensor_value_info("gram", TensorProto.FLOAT, [64, 64]),
        ],
        weights,
    )
    return Source(ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)))


def test_products_with_a_bias_a_transposed_weight_and_half_a_type() -> None:
    source, plan = _linear(), parse_plan('ranks: 1\nquantize: {"**": {bits: 8, block: 16}}\n', "plan.yaml")
    found = quantized(source, plan, "model.onnx")
    assert quantized(found, plan, "model.onnx") is found
    assert [node.op_type for node in found.model.graph] == [
        *("MatMulNBits", "Add", "MatMulNBits", "Cast", "MatMulNBits", "Transpose", "MatMul")
    ]
    assert {*found.model.graph.initializers} == {
        "bias", *(f"{name}.8bits.{kind}" for name in "abc" for kind in ("blocks", "scales"))
    }  # fmt: skip
    import onnxruntime

    x = {"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}
    whole, small = (
        onnxruntime.InferenceSession(
            ir.to_proto(one.model).SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, x)[0]
        for one in (source, found)
    )
    assert np.abs(whole.astype(np.float32) - small).max() < 0.02 * np.abs(whole.astype(np.float32)).max()
    assert max(errors(source, plan, "model.onnx").values()) < 0.01


def test_a_shard_is_that_part_of_the_whole() -> None:
    plan = parse_plan('ranks: 1\nquantize: {"**": {bits: 4, block: 16}}\n', "plan.yaml")
    weights = quantized(_linear(), plan, "model.onnx").model.graph.initializers
    for name in ("a.4bits.blocks", "b.4bits.blocks", "c.4bits.scales"):
        tensor = weights[name].const_value
        box = (slice(5, 21), slice(1, 2), slice(0, 8))[: tensor.shape.rank()]
        assert (tensor.compute(box) == tensor.numpy()[box]).all()


def _tied(*last: str) -> onnx.ModelProto:
    """A table that is the weight of a product, too, and with `back` of another one the other way round."""
    rng = np.random.default_rng(0)
    table = numpy_helper.from_array(rng.standard_normal((128, 128)).astype(np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["h"], "embed"),
        helper.make_node("Transpose", ["table"], ["turned"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["h", "turned"], ["y"], "head"),
        *[helper.make_node("MatMul", ["y", "table"], ["z"], name) for name in last],
    ]
    ports = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
        helper.make_tensor_value_info("z" if last else "y", TensorProto.FLOAT, ["n", 128]),
    ]
    graph = helper.make_graph(nodes, "tied", ports[:1], ports[1:], [table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_weight_in_several_blocks_and_orders_has_tensors_for_each() -> None:
    """One table, looked up in blocks of 32, is the weight of a product in blocks of 16, and of another one the other way round."""
    model = _tied("back")
    rules = "ranks: 1\nquantize: {embed: {bits: 8, block: 32}, '{head,back}': {bits: 8, block: 16}}\n"
    found = quantized(Source(ir.from_proto(model)), parse_plan(rules, "plan.yaml"), "model.onnx").model
    import onnxruntime

    ids = {"ids": np.arange(8, dtype=np.int64)}
    whole, small = (
        onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, ids)[0]
        for one in (model, ir.to_proto(found))
    )
    assert np.abs(whole - small).max() < 0.02 * np.abs(whole).max()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_table_and_a_product_of_one_weight_have_their_blocks_once(tmp_path: Path, ranks: int) -> None:
    """On two ranks each has its rows of both; outputs are those of onnxruntime with two tensors."""
    import onnxruntime

    rules = f"ranks: {ranks}\nmesh: {{tp: {ranks}}}\nquantize: {{'**': {{bits: 4, block: 16, accuracy_level: 0}}}}\n"
    sharding = "sharding: {embed: rowwise, head: colwise}\n" if ranks > 1 else ""
    plan = parse_plan(rules + sharding, "plan.yaml")
    alone = quantized(Source(ir.from_proto(_tied())), plan, "model.onnx").model
    ids = {"ids": np.arange(5, 13, dtype=np.int64)}
    session = onnxruntime.InferenceSession(ir.to_proto(alone).SerializeToString(), providers=["CPUExecutionProvider"])
    compile_source(Source(ir.from_proto(_tied())), plan, tmp_path / "build")
    assert check_artifact(tmp_path / "build") == []
    for rank in range(ranks):
        header = read_header(tmp_path / f"build/weights/rank_{rank:04d}.safetensors")
        assert sum(one.bytes for one in header.values()) == (128 * 64 + 128 * 8 * 4) // ranks
    with load_local(tmp_path / "build", threads=1) as found:
        np.testing.assert_allclose(found(ids)["y"], session.run(None, ids)[0], rtol=1e-6, atol=1e-5)


def test_refusals_come_all_at_once() -> None:
    rules = """ranks: 1
quantize:
  "**": {block: 32}
  values: {bits: 4}
  nothing: {bits: 4}
"""
    with pytest.raises(CompileError) as error:
        quantized(_linear(), parse_plan(rules, "plan.yaml"), "model.onnx")
    text = str(error.value)
    assert "plan.yaml:4: 'values' matches no product with a constant weight and no table, but MatMul" in text
    assert "plan.yaml:5: 'nothing' matches no module or node" in text
    assert "'turned': the 48 rows of 'b' cannot be divided into blocks of 32" in text
    assert "write block: 16" in text


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ('quantize: {"**": {bits: 3}}', "bits: 4 or bits: 8"),
        ('quantize: {"**": {block: 24}}', "write block: 32"),
        ('quantize: {"**": {size: 4}}', "the keys here are bits, block, accuracy_level"),
        (
            'quantize: {"**": {bits: 4}}\ntrain: {loss: {type: output, output: y}, optimizer: {type: sgd, lr: 0.1}}',
            "has no gradient",
        ),
    ],
)
def test_a_plan_says_what_it_may_be(line: str, fact: str) -> None:
    with pytest.raises(CompileError, match=fact):
        parse_plan(f"ranks: 1\n{line}\n", "plan.yaml")


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = decoder(fused=True)
    weight = next(one for one in model.graph.initializer if one.name == "layers.1.up.weight")
    numbers = numpy_helper.to_array(weight).copy()
    numbers[3, 5] = np.nan
    weight.CopyFrom(numpy_helper.from_array(numbers, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 1\n" + MIXED + GENERATE)
    with pytest.raises(Exception, match=r"'layers\.1\.up\.weight' has NaN or infinite elements"):
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert not (tmp_path / "build").exists()


def test_products_of_a_file_without_accuracy_level_are_told_of() -> None:
    plan = parse_plan('ranks: 1\nquantize: {"**": {block: 16, accuracy_level: 0}}\n', "plan.yaml")
    slow = quantized(_linear(), plan, "model.onnx")
    again = quantized(Source(slow.model), None, "model.onnx")
    assert "3 of 3 MatMulNBits have no accuracy_level" in again.declared.warnings[0]
