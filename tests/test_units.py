"""Sizes as people write and read them: what is printed can be read again, and never says less than was asked for."""

import pytest
from partc.runtime.units import operations_text, parse_bytes, parse_duration, parse_operations, seconds, size_text


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


@pytest.mark.parametrize(
    ("text", "time"), [("1.5ms", 0.0015), ("789 us", 789e-6), ("3ns", 3e-9), ("2 s", 2), ("0.25", 0.25)]
)
def test_durations(text: str, time: float) -> None:
    assert parse_duration(text) == pytest.approx(time)


@pytest.mark.parametrize("text", ["", "ms", "-1ms", "1 min", "1.2 m s", "nan"])
def test_what_is_no_duration(text: str) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize("count", [1, 999, 1000, 33_554_432, 999_499, 999_500, 1.5e9, 7.25e12])
def test_printed_operations_and_durations_are_read_again(count: float) -> None:
    assert parse_operations(operations_text(count)) == pytest.approx(count, rel=0.006)
    assert parse_duration(seconds(count * 1e-9)) == pytest.approx(count * 1e-9, rel=0.006)


@pytest.mark.parametrize("text", ["", "12", "-3 MFLOP", "3 MB", "3 FLOPS"])
def test_what_is_no_number_of_operations(text: str) -> None:
    assert parse_operations(text) is None
