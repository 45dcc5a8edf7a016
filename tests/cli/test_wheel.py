"""What users install is the wheel: it has every module, its types are marked, and its commands run without the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_COMMAND = """
import partc, partc.cli.main as a, partc.compiler as b, partc.runtime as c
print(a.__file__, b.__file__, c.__file__)
print(partc.__version__, flush=True)
a.main()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, without its dependencies: a wheel of pure Python is installed by being unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("compiler", "runtime", "cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "py.typed", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], capture_output=True, text=True, check=False
    )
    if built.returncode and "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("setuptools, which builds the wheel, is not to be had")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_all_modules_and_marks_their_types(installed: Path) -> None:
    have = {str(path.relative_to(installed / "partc")) for path in (installed / "partc").rglob("*.py")}
    want = {
        str(path.relative_to(ROOT)) for name in ("compiler", "runtime", "cli") for path in (ROOT / name).rglob("*.py")
    }
    assert have == want | {"__init__.py"}
    page = [path.relative_to(ROOT) for path in (ROOT / "cli/report").rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert [str(path) for path in page if not (installed / "partc" / path).is_file()] == []
    assert (installed / "partc/py.typed").is_file()


def test_its_commands_run_without_the_tree(installed: Path, tmp_path: Path) -> None:
    for name in ("model.py", "plan.yaml"):
        shutil.copy(ROOT / "samples/ffn_dynamic" / name, tmp_path / name)
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    words = ("verify", "model.py", "--plan", "plan.yaml")
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    paths, version, *verdict = ended.stdout.splitlines()
    assert all(path.startswith(str(installed)) for path in paths.split())
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert "equal" in "".join(verdict)
