"""The minimal runtime of the samples: short, without partc, over MPI as its page says.

`tests/cost/test_samples_simulated.py` runs it on all samples.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from body_models import BRANCHES, WEIGHTS, WHILE, WIDTH, plan, weighed
from equivalence import compiled
from guide_pages import SAMPLES, follow
from minimal_ranks import FILE, minimal_runtime, same_as_partc
from partc.compiler.pipeline import compile_model
from partc.runtime import load_local
from training_equivalence import fed

MOST_LINES = 279
PAGE = SAMPLES / "minimal_runtime/README.md"


def test_it_is_short_and_does_not_import_partc() -> None:
    """Lines of code are counted: blank lines, comments and docstrings are not."""
    text = FILE.read_text()
    tree = ast.parse(text)
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == {"numpy", "onnx", "onnxruntime", "mpi4py"}
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {
        line
        for node in documented
        if ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in docstrings]
    assert len([line for line in lines if line and not line.startswith("#")]) <= MOST_LINES
    assert f"{MOST_LINES} lines" in PAGE.read_text()


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(), reason="the environment has no mpiexec of its own"
)
def test_its_page_shows_what_happens(tmp_path: Path) -> None:
    """Its commands start processes over MPI; what they write is what partc's runtime computes."""
    folder = tmp_path / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("build*", "resnet18.*", "__pycache__"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    number, trouble = follow(PAGE, folder, {**os.environ, **root, "PATH": path})
    assert not trouble, "\n".join(trouble)
    assert number == 8
    lenet = folder / "lenet"
    batches, have = dict(np.load(lenet / "batches.npz")), dict(np.load(lenet / "trained.npz"))
    with load_local(lenet / "build") as program:
        for step in range(3):
            batch = {name: array[32 * step : 32 * step + 32] for name, array in batches.items()}
            outputs = program({**fed(program, step), **batch})
            np.testing.assert_allclose(have["loss"][step], outputs["loss"], rtol=1e-6)
    with load_local(folder / "gpt/build") as program:
        want = program(dict(np.load(folder / "gpt/ids.npz")))["logits"]
    np.testing.assert_allclose(np.load(folder / "gpt/logits.npz")["logits"], want, rtol=0, atol=1e-6)


def test_it_runs_bodies_in_which_ranks_communicate(tmp_path: Path) -> None:
    x = np.random.default_rng(4).standard_normal((4, WIDTH)).astype(np.float32)
    compiled(weighed(WHILE, WEIGHTS), plan("refine", 2), tmp_path / "while", check=False)
    same_as_partc(tmp_path / "while", 2, [{"x": x, "tolerance": np.float32(limit)} for limit in (9, 0.01)], rtol=1e-5)
    compiled(weighed(BRANCHES, WEIGHTS), plan("choose", 2, "h"), tmp_path / "branches", check=False)
    same_as_partc(tmp_path / "branches", 2, [{"h": x, "limit": np.float32(limit)} for limit in (9, -9)], rtol=1e-5)


def test_it_reads_the_compressed_forms_of_many_ranks(tmp_path: Path) -> None:
    plan = re.sub(r"\b8\b", "16", (SAMPLES / "linear_dp/train.yaml").read_text())
    (tmp_path / "plan.yaml").write_text(plan)
    compile_model(SAMPLES / "linear_dp/model.py", tmp_path / "plan.yaml", tmp_path / "build", check=False)
    random = np.random.default_rng(3)
    step = {"x": random.standard_normal((32, 28, 28)).astype(np.float32), "label": random.integers(0, 10, 32)}
    same_as_partc(tmp_path / "build", 16, [step, step], rtol=1e-6)


def test_the_boxes_of_a_grid() -> None:
    """Both forms of boxes, and a part of a packed tensor: the grid [2, 2] cuts dim 0 by axis 1, dim 1 is the second of 3 parts."""
    record = {"ranks": "0-3", "boxes": {"mesh": [2, 2], "cuts": [[1], [0]], "part": [[0, 1, 1], [1, 2, 3]]}}
    assert minimal_runtime.box_of(record, 1) == [[1, 2, 2], [2, 3, 6]]
    assert minimal_runtime.ranks_of("0-2,8,16-32:8") == [0, 1, 2, 8, 16, 24, 32]


@pytest.mark.parametrize("dtype", [np.float32, minimal_runtime.dtype_of(minimal_runtime.BFLOAT16)])
def test_arrays_reach_sessions_as_they_are(dtype: np.dtype) -> None:
    """Also without a dim, and where a shard is not contiguous."""
    array = np.arange(12, dtype=np.float32).astype(dtype).reshape(3, 4)
    for value in (array, array[:, 1:3], array.T, array[1, 1], np.asarray(array[1, 1])):
        there = minimal_runtime.from_session(minimal_runtime.to_session(value))
        assert there.dtype == dtype
        np.testing.assert_array_equal(there, value)
