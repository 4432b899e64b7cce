"""Tests of byte counts and durations, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.errors import UnitError
from outofcore.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6GiB", 6 * GIB),
        ("512 MB", 512_000_000),
        (" 1.5 gib ", 3 * GIB // 2),
        (".5k", 512),
        ("2.kb", 2000),
        ("4096", 4096),
        ("7b", 7),
        ("1T", TIB),
        ("1TB", 10**12),
        ("3m", 3 * MIB),
        ("1.0001KiB", 1024),
        ("1152921504606846976", 2**60),
        (4096, 4096),
        (1, 1),
    ],
)
def test_parse_bytes_reads_byte_counts(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(("letter", "power"), [("k", 1), ("M", 2), ("G", 3), ("T", 4)])
def test_parse_bytes_reads_decimal_and_binary_units(letter: str, power: int) -> None:
    assert parse_bytes(f"3 {letter}B") == 3 * 1000**power
    assert parse_bytes(f"3 {letter}iB") == parse_bytes(f"3{letter}") == 3 * 1024**power


@pytest.mark.parametrize("text", ["", "GiB", "six", "-1", "1e9", "1 GiB extra", "1.2.3", "5 XB", "1,000", "."])
def test_parse_bytes_refuses_invalid_text(text: str) -> None:
    with pytest.raises(UnitError, match="write for example '6GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("text", [0, -5, "0", "0.1", "0GiB"])
def test_parse_bytes_refuses_non_positive_counts(text: str | int) -> None:
    with pytest.raises(UnitError, match="above zero"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", [2**60 + 1, 2**70, "99999999999999999999", "9" * 400 + ".5", "9" * 5000, "2000000 TiB"]
)
def test_parse_bytes_refuses_too_large_counts(text: str | int) -> None:
    with pytest.raises(UnitError, match="at most 1048576 TiB"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [True, 1.5, None, b"1GiB"])
def test_parse_bytes_refuses_other_types(value: object) -> None:
    with pytest.raises(UnitError, match=type(value).__name__):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (10 * KIB, "10.0 KiB"),
        (100 * KIB, "100 KiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (2 * TIB, "2.00 TiB"),
        (-MIB, "-1.00 MiB"),
    ],
)
def test_format_bytes_writes_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0012, "1.20 ms"),
        (2.0, "2.00 s"),
        (12.0, "12.0 s"),
        (120.0, "120 s"),
        (1.5e-5, "15.0 µs"),
        (2e-9, "2 ns"),
        (0.0, "0 ns"),
    ],
)
def test_format_seconds_writes_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(1, 1 << 50))
def test_formatted_bytes_are_read_back_to_three_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 20))
def test_round_up_returns_the_next_multiple(count: int, multiple: int) -> None:
    rounded = round_up(count, multiple)
    assert rounded % multiple == 0
    assert count <= rounded < count + multiple
