"""Files that an earlier Quire wrote: this one reads them, and writes them with the same parts."""

import json
import socket
import zlib

import pytest

from golden.catalogue import STORED
from golden.shape import differences
from golden.stored import FILES, MOST_BYTES
from golden.workshop import Workshop
from quire.errors import ConfigError
from quire.offload.tiers.disk import DiskTier
from quire.offload.tiers.network import BadMessage, receive
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
    assert max(sizes.values()) < MOST_BYTES


# ---- another version is refused by name --------------------------------------------------------


def test_an_index_of_another_format_is_refused(workshop):
    folder = workshop.folder_for("another_index")
    rest = json.dumps({"format": 99}).encode()
    (folder / "index").write_bytes(b"%08x %s\n" % (zlib.crc32(rest), rest))

    with pytest.raises(ConfigError, match="format 1, got"):
        DiskTier(folder, 1 << 20)


def test_rates_of_another_format_are_not_used(workshop):
    folder = STORED["ceilings"].copied(workshop)
    path = folder / "ceilings.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 99'))
    found = read_ceilings(path, Machine(cpu="a processor", threads=1, torch="2.0"))

    assert isinstance(found, NotUsable)
    assert "expected format 2" in found.reason


def test_a_message_of_another_protocol_is_refused():
    data = (FILES / "network_tier" / "messages").read_bytes()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"QKV9" + data[4:])
        with pytest.raises(BadMessage, match="not a message of a network tier"):
            receive(ours, 1 << 20)
