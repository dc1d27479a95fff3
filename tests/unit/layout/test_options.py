"""Config dataclasses, byte sizes as text, and the table of refused combinations."""

import ast
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import layout
from quire.errors import ConfigError
from quire.layout import limits
from quire.layout.limits import LIMITS, refused
from quire.layout.options import MaybeSize, check_options, choices_of, option, require_choice
from quire.layout.sizes import format_size, option_size, parse_size, parse_size_or, rounded_size

Colour = Literal["red", "green"]


@dataclass(frozen=True, kw_only=True)
class Paint:
    """A config dataclass."""

    colour: Colour = option("red", help="its colour", flag="paint-colour")
    coats: int | None = option(None, help="layers of it")
    can: MaybeSize = option("auto", help="size of the can", parse=parse_size_or("auto"))

    def __post_init__(self) -> None:
        check_options(self)


def test_invalid_choice_is_rejected_with_its_flag_and_a_suggestion():
    assert Paint(colour="green").colour == "green"

    expected = "expected paint-colour to be one of red, green, got 'gren': did you mean green"
    with pytest.raises(ConfigError, match=expected):
        Paint(colour="gren")
    assert choices_of(Colour) == ("red", "green")
    assert choices_of(str) == choices_of(int | None) == ()


@pytest.mark.parametrize("value", [None, 3, "", "purple"])
def test_invalid_choice_without_a_near_match_lists_all_choices(value):
    with pytest.raises(ConfigError, match=r"one of red, green, got .*[^?]$"):
        require_choice("colour", value, ("red", "green"))


def test_fields_without_choices_are_checked_by_type():
    assert Paint(coats=2).coats == 2
    with pytest.raises(ConfigError, match="expected coats to be int or None, got '2'"):
        Paint(coats="2")


def test_parsed_field_stores_its_value_and_accepts_it_again():
    paint = Paint(can="2KiB")
    assert (Paint().can, paint.can) == (None, 2048)
    assert replace(paint, coats=1).can == 2048
    assert replace(Paint(), coats=1).can is None
    with pytest.raises(ConfigError, match=r"--can: 'much' is not a size: .*, or auto$"):
        Paint(can="much")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *(("64MiB", 64 * 1024**2), ("1.5GiB", 3 * 1024**3 // 2), ("1TiB", 1024**4)),
        *(("8MB", 8_000_000), ("8 mb", 8_000_000), ("2kB", 2000), ("0.1KiB", 102)),
        *(("4096", 4096), ("4096B", 4096), (4096, 4096), ("0", 0)),
    ],
)
def test_parse_size_with_units(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("-1", "-64MiB", -1, "", "MiB", "64M", "64 miles", "1e9", "nan", "inf", "1,000"),
        *("٣MiB", True),
        *("9" * 5_000, "9" * 400 + "MiB", "1." + "9" * 400 + "GiB", 2**63, 10**4_000, "8388608TiB"),
    ],
)
def test_invalid_size_is_rejected_with_an_example(text):
    with pytest.raises(ConfigError, match="64MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 1024**3 // 2, "1.50 GiB")),
        *((4608 * 1024**3, "4.50 TiB"), (-2048, "-2.00 KiB")),
    ],
)
def test_format_size_uses_binary_units(size_bytes, text):
    assert format_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=1 << 50))
def test_parse_size_of_format_size_is_equal_within_rounding(size_bytes):
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006, abs=1)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        *((1, "1KiB"), (1024 * 1000, "1000KiB"), (2**20, "1MiB"), (12672 * 1024, "12.5MiB")),
        *((2**26 - 1, "64MiB"), (2**26 + 1, "65MiB"), (2**44, "16777216MiB")),
    ],
)
def test_size_of_an_option_is_rounded_up_and_read_back(size_bytes, text):
    assert option_size(rounded_size(size_bytes)) == text
    assert parse_size(text) == rounded_size(size_bytes) >= size_bytes


SOURCE = Path(layout.__file__).parents[1]


def test_texts_are_filled_in():
    error = refused(limits.UNUSED_SWAP_SPACE, num_bytes=4096)
    assert str(error) == (
        "--swap-space 4,096 B would not be used, because --preempt recompute swaps no requests: "
        "use --preempt auto, swap or hybrid, or leave out --swap-space"
    )


def test_every_limit_is_used():
    used = Counter(
        node.attr
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    )
    names = [name for name, value in vars(limits).items() if value in LIMITS and name != "LIMITS"]

    assert len(names) == len(LIMITS)
    assert [name for name in names if not used[name]] == []
