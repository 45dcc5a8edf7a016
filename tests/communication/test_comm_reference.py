"""The ops of `partc.comm`: their schemas satisfy the checker, and the numpy reference runs the files that the runtime runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_text import write
from onnx.reference import ReferenceEvaluator
from partc.runtime import load_local
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.artifact.graph.targets import copied_to
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.errors import ArtifactError
from reference_ops import reference_ops

GRAPHS = [
    """rank0 (float[n, 3] x, string[n] s) => (float[n, 3] y) <float[n, 3] h, float[n, 3] k>
    { h = Relu(x)
      = partc.comm.Send <peer = 1, tag = 0> (h)
      = partc.comm.Send <peer = 1, tag = 2> (s)
      k = partc.comm.Recv <peer = 1, tag = 1> ()
      y = Sub(k, h) }""",
    """rank1 () => (string[n] s) <float[n, 3] h, float[n, 3] k, float c = {0.5}>
    { h = partc.comm.Recv <peer = 0, tag = 0> ()
      s = partc.comm.Recv <peer = 0, tag = 2> ()
      k = Mul(h, c)
      = partc.comm.Send <peer = 0, tag = 1> (k) }""",
]


def models(folder: Path) -> list[onnx.ModelProto]:
    return [onnx.load(folder / f"rank_{rank:04d}.onnx") for rank in range(2)]


def test_the_reference_and_the_runtime_agree(tmp_path: Path) -> None:
    write(tmp_path, GRAPHS)
    inputs = {"x": np.arange(-6, 6, dtype=np.float32).reshape(4, 3), "s": np.array(["a", "b", "ü", ""], object)}
    world = LocalWorld(2)

    def run(rank: int) -> dict[str, np.ndarray]:
        try:
            evaluator = ReferenceEvaluator(models(tmp_path)[rank], new_ops=reference_ops(world.transport(rank)))
            found = evaluator.run(None, inputs if rank == 0 else {})
            return dict(zip(evaluator.output_names, found, strict=True))
        except BaseException as error:
            world.fail(str(error))
            raise

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    with load_local(tmp_path) as program:
        expected = program(inputs)
    np.testing.assert_array_equal(first["y"], expected["y"])
    assert second["s"].tolist() == expected["s"].tolist() == ["a", "b", "ü", ""]


def test_the_checker_knows_the_ops(tmp_path: Path) -> None:
    register()
    register()
    for model in models(write(tmp_path, GRAPHS)):
        onnx.checker.check_model(model)
        broken = onnx.ModelProto()
        broken.CopyFrom(model)
        node = next(node for node in broken.graph.node if node.domain)
        del node.attribute[:]
        with pytest.raises(onnx.checker.ValidationError, match=r"Required attribute '(peer|tag)' is missing"):
            onnx.checker.check_model(broken)


def test_a_copy_is_the_identity(tmp_path: Path) -> None:
    graph = """rank0 (float[2, 3] x) => (float[2, 3] y) <float[2, 3] h, float[2, 3] c>
    { h = Relu(x)
      c = partc.comm.Copy <to = "cpu"> (h)
      y = Neg(c) }"""
    model = onnx.load(write(tmp_path, [graph]) / "rank_0000.onnx")
    register()
    onnx.checker.check_model(model)
    del model.graph.value_info[:]
    known = {one.name: one for one in onnx.shape_inference.infer_shapes(model, check_type=True).graph.value_info}
    assert [dim.dim_value for dim in known["c"].type.tensor_type.shape.dim] == [2, 3]
    x = np.arange(-3, 3, dtype=np.float32).reshape(2, 3)
    evaluator = ReferenceEvaluator(model, new_ops=reference_ops(LocalWorld(1).transport(0)))
    np.testing.assert_array_equal(evaluator.run(None, {"x": x})[0], -np.maximum(x, 0))
    assert copied_to(model.graph.node[1], "") == "cpu"
    model.graph.node[1].attribute[0].s = b"tpu"
    with pytest.raises(ArtifactError, match="it leads to 'tpu'; a target is one of cpu, cuda, device"):
        copied_to(model.graph.node[1], "")
