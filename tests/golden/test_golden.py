"""Outputs that users and programs read equal the golden files.

`python -m tests.golden --write [NAME]` writes them again; review the difference.
"""

import pytest

from golden.cases import VALUES
from golden.catalogue import CASES
from golden.shape import Rule, differences, shape_of
from golden.workshop import Workshop


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_the_golden_files(workshop, name):
    case = CASES[name]
    text = case.explain(case.found(workshop))
    if text:
        pytest.fail(text, pytrace=False)


def test_every_golden_file_has_a_case():
    assert sorted(path.stem for path in VALUES.glob("*.json")) == sorted(CASES)


def test_a_shape_has_types_and_the_values_that_programs_compare():
    value = {
        "choices": [
            {"text": "a", "finish_reason": "length", "token_ids": [5, 6]},
            {"text": None, "finish_reason": "stop", "token_ids": []},
        ],
        "run_s": 1.5,
        "config": {"part": 0.5, "path": "/tmp/x"},
        "devices": {"this one": 3},
        "digest": b"12",
    }

    assert shape_of(value, Rule(loose=("devices.*",), maps=("devices",))) == {
        "choices[].finish_reason": "str 'length' | str 'stop'",
        "choices[].text": "null | str",
        "choices[].token_ids": "[5, 6]",
        "choices[].token_ids[]": "empty",
        "config.part": "float 0.5",
        "config.path": "str",
        "devices.*": "int",
        "digest": "bytes of 2",
        "run_s": "float",
    }


def test_what_is_lost_new_or_changed_is_named():
    before, now = {"a": "int 1", "b": "str", "c": "null"}, {"a": "int 2", "c": "null", "d": "str"}

    assert differences(before, now) == ["- a: int 1", "+ a: int 2", "- b: str", "+ d: str"]
