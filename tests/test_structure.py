"""The house: packages match folders, imports point one way, heavy libraries are imported only where they are needed."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOR_THE_COMPILER = (
    "partc.runtime.artifact",
    "partc.runtime.errors",
    "partc.runtime.checker.written",
    "partc.runtime.program.ort",
    "partc.runtime.data.npy",
    "partc.runtime.files.regular",
    "partc.runtime.files.replace",
)
"""What the compiler knows of the runtime: the contract, the checker of what was written, and how
files are opened and replaced."""
SUBSYSTEMS = ("compiler", "runtime", "cli")


def sources() -> list[Path]:
    return [path for folder in SUBSYSTEMS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_packages_are_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {"partc." + ".".join(path.parent.relative_to(ROOT).parts) for path in sources()}
    assert sorted(listed) == sorted(folders)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    subsystem = path.relative_to(ROOT).parts[0]
    allowed = {"runtime": ("runtime",), "compiler": ("compiler", "runtime"), "cli": SUBSYSTEMS}[subsystem]
    own = {name for name in imports_of(path) if name.startswith("partc.")}
    wrong = [name for name in own if name.split(".")[1] not in allowed]
    assert not wrong, f"{subsystem} imports {wrong}"
    if subsystem == "compiler":
        assert all(
            name.startswith(FOR_THE_COMPILER) or name == "partc.runtime"
            for name in own
            if name.startswith("partc.runtime")
        )


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_one_idea(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert lines, "a file says in its first sentence what lives there"
    assert lines[0].startswith('"""')


def test_help_is_light() -> None:
    heavy = ("onnx", "onnxruntime", "onnx_ir", "onnxscript", "numpy", "pydantic", "sympy", "mpi4py", "torch")
    code = (
        f"import sys, partc.cli.main, partc.runtime, partc.compiler; print([m for m in {heavy!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


BLOCKING = {
    *("Barrier", "Bcast", "Allreduce", "Allgather", "Alltoall", "Reduce", "Gather", "Scatter", "Reduce_scatter_block"),
    *("barrier", "bcast", "allreduce", "allgather", "alltoall", "Dup", "Split", "Split_type", "Create_group", "Free"),
    *("Send", "Recv", "send", "recv", "Sendrecv", "Probe", "Wait", "Waitall", "Finalize", "Init_thread", "Abort"),
}


def test_calls_of_mpi_that_may_block_stand_in_one_file() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(names)
        for path in sources()
        if any(name.split(".")[0] == "mpi4py" for name in imports_of(path))
        and (
            names := BLOCKING
            & {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        )
    }
    assert list(found) == ["runtime/communication/mpi_calls.py"]
    assert {"Dup", "Create_group", "Free", "Allreduce", "Recv", "Abort"} <= set(
        found["runtime/communication/mpi_calls.py"]
    )
