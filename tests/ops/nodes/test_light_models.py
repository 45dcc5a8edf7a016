"""The real networks that onnx carries, each placed on four ranks by its nodes, against the unsharded model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from partc.compiler.frontend import load
from partc.compiler.frontend.names import node_paths
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from rows import of_today

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
RANKS = 4
LIKE_OTHERS = ("light_vgg19", "light_zfnet512", "light_densenet121")
"""Networks of the kinds of layers that others have, and nothing else: of light_bvlc_alexnet, and the last of inception and squeezenet."""
NETWORKS = sorted(path for path in LIGHT.glob("*.onnx") if path.stem not in LIKE_OTHERS)


@pytest.mark.parametrize("path", of_today(NETWORKS, 2), ids=lambda path: path.stem)
def test_light_model_on_four_ranks(path: Path, tmp_path: Path) -> None:
    source = load(path)
    # these models make their weights by ConstantOfShape; constants are wherever they are read, so they are not dealt
    paths = [path for node, path in node_paths(source.model).items() if not node.op_type.startswith("Constant")]
    rules = [f'  "{name}": {k * RANKS // len(paths)}' for k, name in enumerate(paths)]
    program = compile_source(
        source,
        parse_plan("\n".join([f"ranks: {RANKS}", "placement:", *rules, ""]), "plan.yaml"),
        tmp_path / "build",
        path.name,
    ).program
    assert all(part.steps for part in program.parts)
    (value,) = program.model.graph.inputs
    shape = [dim if isinstance(dim, int) else 1 for dim in value.shape]
    # the input that the expected outputs in onnx were made from
    x = (np.arange(np.prod(shape)) / np.prod(shape)).reshape(shape).astype(np.float32)
    want = numpy_helper.to_array(onnx.load_tensor(str(path.with_name(f"{path.stem}_output_0.pb"))))
    whole = whole_output(path, value.name, x)
    with load_local(tmp_path / "build", threads=1) as ranks:
        (have,) = ranks({value.name: x}).values()
    assert np.abs(have - whole).max() <= 1e-5 * np.abs(whole).max()
    assert np.abs(have - want).max() <= 1e-3 * np.abs(want).max()


def whole_output(path: Path, name: str, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    (y,) = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, {name: x})
    return y
