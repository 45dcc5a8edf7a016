"""A decoder with weights of four bits over two ranks makes the tokens of one rank."""

from __future__ import annotations

from pathlib import Path

import onnx
from decoders import decoder
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from partc.compiler.pipeline import compile_model
from partc.runtime import Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact

GENERATE = "generate: {slots: 2, length: 64, chunk: 8}\n"
TENSOR = """ranks: 2
mesh: {tp: 2}
sharding:
  "layers.*.{q,k,v,up}": colwise
  "layers.*.{o,down}": rowwise
  head: colwise
"""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [60, 2, 33, 4]]


def test_columns_are_cut_and_rows_in_whole_blocks(tmp_path: Path) -> None:
    quantizer = MatMulNBitsQuantizer(decoder(fused=True), block_size=16, is_symmetric=True)
    quantizer.process()
    onnx.save(quantizer.model.model, tmp_path / "model.onnx")
    found = []
    for name, layout in (("one", "ranks: 1\n"), ("two", TENSOR)):
        (tmp_path / "plan.yaml").write_text(layout + GENERATE)
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / name)
        with load_local_generator(tmp_path / name) as generator:
            found.append([answer.tokens for answer in generator.run([Request(one, max_tokens=12) for one in PROMPTS])])
    assert found[0] == found[1]
    model = open_artifact(tmp_path / "two").model(1)
    shapes = {tensor.name: [*tensor.dims] for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert [shapes[node.input[1]] for node in products[:4]] == [[16, 2, 8], [8, 2, 8], [8, 2, 8], [32, 1, 8]]
    assert len(products) == 13
