"""CONTRIBUTING.md's diff of a new check is all that a new check needs: applied to the product's files, it finds what it is to find."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from artifact_edit import chain
from contributing import patched
from mutated import change_manifest
from partc.runtime.checker import check as checker


def module(path: str, text: str) -> ModuleType:
    made = ModuleType("partc." + path.removesuffix(".py").replace("/", "."))
    exec(compile(text, path, "exec"), made.__dict__)
    return made


def test_a_check_is_a_function_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (new, text), (listed, rows) = patched("Add a check").items()
    chain(tmp_path)
    change_manifest(tmp_path, lambda data: data["transfers"][0].update(cause=""))
    assert checker.check_artifact(tmp_path) == []
    made = module(new, text)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(checker, "CHECKS", module(listed, rows).CHECKS)
    (found,) = checker.check_artifact(tmp_path)
    assert str(found).startswith("manifest.json: transfer ")
    assert "has no cause" in found.fact
