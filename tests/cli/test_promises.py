"""Every promise of SECURITY.md names the tests that hold it, and each of them exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def promises(text: str) -> list[str]:
    """The promises for untrusted data, in a line each."""
    section = text.partition("## Guarantees for untrusted data")[2].partition("\n## ")[0]
    return [" ".join(one.split()) for one in re.findall(r"^- (.*(?:\n  .*)*)", section, re.MULTILINE)]


def unheld(text: str) -> list[str]:
    """Promises without a test, or with one that does not exist."""
    found = []
    for promise in promises(text):
        named = _TEST.findall(promise)
        absent = [f"{file}::{test}" for file, test in named if test not in named_tests(ROOT / file)]
        if absent or not named or not promise.endswith("]"):
            found.append(f"{promise[:80]}: {', '.join(absent) or 'no test'}")
    return found


def named_tests(file: Path) -> set[str]:
    """The names of a module's tests."""
    if not file.is_file():
        return set()
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_promise_has_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert len(promises(text)) > 20
    assert unheld(text) == []


def test_a_promise_without_a_test_is_found() -> None:
    head = "## Guarantees for untrusted data\n\n"
    assert unheld(head + "- All is well.\n") == ["All is well.: no test"]
    absent = "tests/cli/test_trust.py::test_that_nobody_wrote"
    assert unheld(f"{head}- All is well.\n  [`{absent}`]\n") == [f"All is well. [`{absent}`]: {absent}"]
    assert unheld(f"{head}- No pickle. [`tests/cli/test_trust.py::test_nothing_is_unpickled`]\n") == []
