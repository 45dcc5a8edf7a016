"""CONTRIBUTING.md's diff of a new check is all that a new check needs: applied to the product's files, it finds what it is to find."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from artifact_edit import chain
from mutated import change_manifest
from partc.runtime.checker import check as checker

ROOT = Path(__file__).parents[2]


def patched() -> dict[str, str]:
    """By path the text of each file that the section's diff makes or changes, once it is applied."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a check")[1].split("\n## ")[0]
    lines = section.split("```diff\n")[1].split("```")[0].splitlines()
    texts: dict[str, str] = {}
    path, last = "", ""
    for line in lines:
        if line.startswith("+++ b/"):
            path, last = line.removeprefix("+++ b/"), ""
            texts[path] = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        elif line.startswith("+"):
            assert last or not (ROOT / path).exists(), "an added line follows one that is there"
            whole = f"{last}{line[1:]}\n"
            texts[path] = texts[path].replace(last, whole, 1) if last else texts[path] + whole
            last = whole if last else ""
        elif line.startswith(" "):
            last = f"{line[1:]}\n"
            assert texts[path].count(last) == 1, f"{path} has no line {line[1:]!r}"
    return texts


def module(path: str, text: str) -> ModuleType:
    made = ModuleType("partc." + path.removesuffix(".py").replace("/", "."))
    exec(compile(text, path, "exec"), made.__dict__)
    return made


def test_a_check_is_a_function_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (new, text), (listed, rows) = patched().items()
    chain(tmp_path)
    change_manifest(tmp_path, lambda data: data["transfers"][0].update(cause=""))
    assert checker.check_artifact(tmp_path) == []
    made = module(new, text)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(checker, "CHECKS", module(listed, rows).CHECKS)
    (found,) = checker.check_artifact(tmp_path)
    assert str(found).startswith("manifest.json: transfer ")
    assert "has no cause" in found.fact
