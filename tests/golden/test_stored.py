"""Files that an earlier Quire wrote: this one reads them, and writes them with the same parts."""

import sqlite3

import pytest

from golden.catalogue import STORED
from golden.shape import differences
from golden.stored import FILES, MAX_BYTES
from golden.workshop import Workshop
from quire.errors import StorageError
from quire.offload.prefix_store.prefix_kv import read_file
from quire.offload.tiers.file import FileTier
from quire.plan.ceilings import Machine, NotUsable, read_ceilings


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize("name", STORED)
def test_files_are_written_with_the_same_parts_as_the_committed_ones(workshop, name):
    found = STORED[name]
    lines = differences(found.shape(found.folder), found.shape(found.written(workshop)))
    if lines:
        again = f"python -m tests.golden --write-stored {name}"
        text = f"{name}: what is written differs from the committed files (- committed, + now)"
        pytest.fail("\n".join([text, *lines, f"If the format is to change: {again}"]), False)


def test_stored_files_are_small():
    sizes = {path: path.stat().st_size for path in FILES.rglob("*") if path.is_file()}

    assert sizes
    assert max(sizes.values()) < MAX_BYTES


# ---- another version is refused by name --------------------------------------------------------


def test_an_index_of_another_format_is_refused(workshop):
    folder = STORED["file_tier"].copied(workshop)
    database = sqlite3.connect(folder / "index.sqlite3")
    database.execute("PRAGMA user_version = 99")
    database.close()

    with pytest.raises(StorageError, match="format 1, got 99"):
        FileTier(folder, 1 << 20)


def test_rates_of_another_format_are_not_used(workshop):
    folder = STORED["ceilings"].copied(workshop)
    path = folder / "ceilings.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 99'))
    found = read_ceilings(path, Machine(cpu="a processor", threads=1, torch="2.0"))

    assert isinstance(found, NotUsable)
    assert "expected format 2" in found.reason


def test_kv_of_another_format_is_refused(workshop):
    folder = STORED["exported_kv"].copied(workshop)
    path = folder / "prefix.safetensors"
    path.write_bytes(path.read_bytes().replace(b"quire kv 1", b"quire kv 9"))

    with pytest.raises(StorageError, match="expected a file of KV in the format 'quire kv 1'"):
        read_file(path)
