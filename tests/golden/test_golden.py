"""Outputs that users and programs read equal the golden files; stored files are still read.

`python -m tests.golden --write [NAME]` writes them again; review the difference.
"""

import sqlite3

import pytest

from golden.cases import MAX_BYTES, STORED_FILES, VALUES
from golden.command import CASES, STORED
from golden.shape import Rule, differences, shape_of
from golden.workshop import Workshop
from quire.errors import StorageError
from quire.offload.prefix_store.prefix_kv import read_file
from quire.offload.tiers.file import FileTier
from quire.plan.ceilings import Machine, NotUsable, read_ceilings


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_the_golden_files(workshop, name):
    case = CASES[name]
    text = case.explain(case.found(workshop))
    if text:
        pytest.fail(text, pytrace=False)


def test_every_golden_file_has_a_case_and_stored_files_are_small():
    assert sorted(path.stem for path in VALUES.glob("*.json")) == sorted(CASES)
    sizes = {path: path.stat().st_size for path in STORED_FILES.rglob("*") if path.is_file()}
    assert sizes
    assert max(sizes.values()) < MAX_BYTES


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


# ---- files that an earlier Quire wrote; another version is refused by name -----------------------


@pytest.mark.parametrize("name", STORED)
def test_files_are_written_with_the_same_parts_as_the_committed_ones(workshop, name):
    found = STORED[name]
    lines = differences(found.shape(found.folder), found.shape(found.written(workshop)))
    if lines:
        again = f"python -m tests.golden --write-stored {name}"
        text = f"{name}: what is written differs from the committed files (- committed, + now)"
        pytest.fail("\n".join([text, *lines, f"If the format is to change: {again}"]), False)


def test_files_of_another_format_are_refused_or_not_used(workshop):
    folder = STORED["file_tier"].copied(workshop)
    database = sqlite3.connect(folder / "index.sqlite3")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StorageError, match="format 1, got 99"):
        FileTier(folder, 1 << 20)
    path = STORED["ceilings"].copied(workshop) / "ceilings.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 99'))
    found = read_ceilings(path, Machine(cpu="a processor", threads=1, torch="2.0"))
    assert isinstance(found, NotUsable)
    assert "expected format 2" in found.reason

    path = STORED["exported_kv"].copied(workshop) / "prefix.safetensors"
    path.write_bytes(path.read_bytes().replace(b"quire kv 1", b"quire kv 9"))
    with pytest.raises(StorageError, match="expected a file of KV in the format 'quire kv 1'"):
        read_file(path)
