"""Nothing that comes with an artifact runs or is written to by itself: neither beside it, nor what its manifest names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from handmade import chain

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
RUNS = "open('RAN', 'a').write(__file__)\nraise ImportError('stopped here')\n"


def test_ranks_import_nothing_from_the_folder_where_they_start(tmp_path: Path) -> None:
    chain(tmp_path)
    np.savez(tmp_path / "x.npz", x=np.zeros((8, 5), np.float32), index=np.array([4, 1]))
    for name in ("click", "numpy", "mpi4py", "onnxruntime"):
        (tmp_path / f"{name}.py").write_text(RUNS)
    words = [sys.executable, "-m", "partc.cli", "run", ".", "--input", "x.npz", "--threads", "1"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **AS_ROOT}, timeout=60
    )
    assert not (tmp_path / "RAN").exists()
    assert done.returncode == 0, done.stderr
