"""Golden texts: `golden(name, text)` compares with tests/golden/<name>; `pytest --update-golden` writes what it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

Golden: TypeAlias = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden instead of comparing with it")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The comparison of a text with the golden one of a name."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"there is no {path}; pytest --update-golden writes it"
        assert text.splitlines() == path.read_text().splitlines(), "pytest --update-golden accepts what is new"

    return compare
