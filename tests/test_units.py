"""Sizes as people write and read them: what is printed can be read again, and never says less than was asked for."""

import pytest
from partc.runtime.units import parse_bytes, size_text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7", 7),
        ("7B", 7),
        ("2k", 2000),
        ("2 KiB", 2048),
        ("1.5GB", 1_500_000_000),
        ("3m", 3_000_000),
        ("1TiB", 1 << 40),
    ],
)
def test_forms(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "1e3", "-1", "4 GBs", "1i", "1 2", "٣MB"])
def test_what_is_no_size(text: str) -> None:
    assert parse_bytes(text) is None


def test_a_printed_size_is_read_again() -> None:
    for power in range(45):
        for count in {(1 << power) - 1, 1 << power, (1 << power) + 1, 3 * (1 << power) // 2 + 7}:
            near, enough = parse_bytes(size_text(count)), parse_bytes(size_text(count, at_least=True))
            assert near is not None
            assert enough is not None
            assert abs(near - count) <= count / 100
            assert count <= enough <= count * 1.011 + 1
