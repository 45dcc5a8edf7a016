"""Files that docstrings and pages name are there: a file that is renamed, or goes, takes its mentions along.

A name with a folder is a file whose path ends so. A name alone is a file of the folder in which the docstring stands, of one below it, or
directly of one around it; on a page, which stands in no folder, it is any file.

    spec.py                     in a docstring of runtime/data    ->  runtime/data/spec.py
    artifact/format.py          anywhere                          ->  runtime/artifact/format.py
    tests/ops/rule_cases_*.py   on a page                         ->  some file that matches
"""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from source_trees import nodes_of

ROOT = Path(__file__).parent.parent
PAGES = ("compiler/README.md", "runtime/README.md", "CONTRIBUTING.md", "README.md")
EXAMPLES = {"layers.py", "loader.py", "model.py", "records.py", "watch.py"}
"""Files of a user, which examples name; so are those before a line or a function, `resize.py:to_32`."""
NAME = re.compile(r"(?<![\w./*~-])(?:[\w*]+/)*[a-z_*][\w*]*\.py\b(?!/|:\w)")
DIFF = re.compile(r"^```diff$.*?^```$", re.M | re.S)


@cache
def files() -> tuple[str, ...]:
    folders = ("compiler", "runtime", "cli", "tests", "samples")
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(path.relative_to(ROOT).as_posix() for path in paths)


def docstrings(path: Path) -> Iterator[str]:
    """Texts that stand by themselves in a file: of modules, classes, functions, and behind assignments."""
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def stale(text: str, folder: str | None, there: tuple[str, ...]) -> list[str]:
    """The names in a text of no file that is `there`; `folder`: of the docstring, None for a page."""

    def is_there(name: str) -> bool:
        if folder is None or "/" in name:
            return any(fnmatchcase(f"/{path}", f"*/{name}") for path in there)
        around = {f"{above}/{name}" for above in PurePosixPath(folder).parents}
        return any(
            path in around or (path.startswith(f"{folder}/") and fnmatchcase(path, f"*/{name}")) for path in there
        )

    names = dict.fromkeys(found.group() for found in NAME.finditer(text))
    return [name for name in names if name not in EXAMPLES and not is_there(name)]


def test_docstrings_name_files_that_are_there() -> None:
    found = {
        path: names
        for path in files()
        if path.split("/")[0] in ("compiler", "runtime", "cli")
        if (names := stale("\n".join(docstrings(ROOT / path)), PurePosixPath(path).parent.as_posix(), files()))
    }
    assert not found, "\n".join(f"{path}: there is no {', '.join(names)}" for path, names in found.items())


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_are_there(page: str) -> None:
    assert stale(DIFF.sub("", (ROOT / page).read_text()), None, files()) == []


def test_a_name_of_no_file_is_found() -> None:
    there = (
        "runtime/data/spec.py",
        "runtime/data/text/chars.py",
        "compiler/targets/order.py",
        "tests/ops/rule_cases_a.py",
    )
    table = "spec.py  the plan     order.py  records     chars.py     `targets/order.py`     `model.py`"
    assert stale(table, "runtime/data", there) == ["order.py"]
    assert stale("`order.py` and `data/order.py`, `ops/rule_cases_*.py`", None, there) == ["data/order.py"]
    assert stale(
        "`runtime.py`, `data.py` and `chars.py`", "runtime/data", ("runtime/runtime.py", "cli/data.py", *there)
    ) == ["data.py"]
    assert stale("`file.py:function` and `../x.py`, `<name>.py`, `ops/rules_*.py`", None, there) == ["ops/rules_*.py"]
