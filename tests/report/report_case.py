"""Artifacts to report on, and the data of their pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model

ROOT = Path(__file__).parents[2]
Capture: TypeAlias = pytest.CaptureFixture[str]


def lenet(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    """LeNet by its plan, with changes of the plan's text."""
    text = (ROOT / "samples" / "lenet" / "plan.yaml").read_text()
    for old, new in changes:
        text = text.replace(old, new)
    (folder / f"{name}.yaml").write_text(text)
    compile_model(ROOT / "samples" / "lenet" / "model.py", folder / f"{name}.yaml", folder / name)
    return folder / name


def data_of(build: Path, folder: Path, *options: object) -> dict[str, Any]:
    """The data in the page, which is written to `report.html` in the folder."""
    page = folder / "report.html"
    assert invoke(["report", str(build), "-o", str(page), *map(str, options)]) == 0
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def printed(capsys: Capture, *arguments: object) -> dict[str, Any]:
    """What another command prints for machines."""
    capsys.readouterr()
    assert invoke([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Capture, code: int, *arguments: object) -> str:
    """What `partc report` says of bad input, beside its exit code."""
    capsys.readouterr()
    assert invoke(["report", *map(str, arguments)]) == code
    return capsys.readouterr().err
