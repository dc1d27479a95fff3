"""Config dataclasses: fields are checked against their annotations."""

from dataclasses import dataclass, replace
from typing import Literal

import pytest

from quire.errors import ConfigError
from quire.layout.options import MaybeSize, check_options, choices_of, option, require_choice
from quire.layout.sizes import parse_size_or

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


@pytest.mark.parametrize("value", [None, 3, "", "purple"])
def test_invalid_choice_without_a_near_match_lists_all_choices(value):
    with pytest.raises(ConfigError, match=r"one of red, green, got .*[^?]$"):
        require_choice("colour", value, ("red", "green"))


def test_fields_without_choices_are_checked_by_type():
    assert Paint(coats=2).coats == 2
    with pytest.raises(ConfigError, match="expected coats to be int or None, got '2'"):
        Paint(coats="2")


def test_only_literal_types_have_choices():
    assert choices_of(Colour) == ("red", "green")
    assert choices_of(str) == choices_of(int | None) == ()


def test_parsed_field_stores_its_value_and_accepts_it_again():
    paint = Paint(can="2KiB")

    assert (Paint().can, paint.can) == (None, 2048)
    assert replace(paint, coats=1).can == 2048
    assert replace(Paint(), coats=1).can is None
    with pytest.raises(ConfigError, match=r"--can: 'much' is not a size: .*, or auto$"):
        Paint(can="much")
