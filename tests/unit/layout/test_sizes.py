"""Byte sizes as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.layout.sizes import format_size, option_size, parse_size, rounded_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64MiB", 64 * 1024**2),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("8MB", 8_000_000),
        ("8 mb", 8_000_000),
        ("2kB", 2000),
        ("1TiB", 1024**4),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        ("0", 0),
        ("0.1KiB", 102),
    ],
)
def test_parse_size_with_units(text: str | int, size_bytes: int):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *(
            "-1",
            "-64MiB",
            -1,
            "",
            "MiB",
            "64M",
            "64 miles",
            "1e9",
            "nan",
            "inf",
            "1,000",
            "٣MiB",
            True,
        ),
        *("9" * 5_000, "9" * 400 + "MiB", "1." + "9" * 400 + "GiB", 2**63, 10**4_000, "8388608TiB"),
    ],
)
def test_invalid_size_is_rejected_with_an_example(text: str | int):
    with pytest.raises(ConfigError, match="64MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 1024**3 // 2, "1.50 GiB"),
        (4608 * 1024**3, "4.50 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format_size_uses_binary_units(size_bytes: int, text: str):
    assert format_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=1 << 50))
def test_parse_size_of_format_size_is_equal_within_rounding(size_bytes: int):
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006, abs=1)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (1, "1KiB"),
        (1024 * 1000, "1000KiB"),
        (2**20, "1MiB"),
        (12672 * 1024, "12.5MiB"),
        (2**26 - 1, "64MiB"),
        (2**26 + 1, "65MiB"),
        (2**44, "16777216MiB"),
    ],
)
def test_size_of_an_option_is_rounded_up_and_read_back(size_bytes: int, text: str):
    assert option_size(rounded_size(size_bytes)) == text
    assert parse_size(text) == rounded_size(size_bytes) >= size_bytes
