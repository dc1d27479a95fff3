"""`quire kv-store` as a process: it stores KV across restarts, and ends on a signal."""

import signal
import subprocess
import sys

import pytest

from quire.errors import TierUnreachable
from quire.offload.tiers.network import NetworkTier

MIB = 1 << 20


def start(path):
    command = "from quire.cli.main import run; run()"
    options = ["kv-store", "--memory", "4MiB", "--path", str(path), "--port", "0"]
    store = subprocess.Popen(
        [sys.executable, "-c", command, *options], stdout=subprocess.PIPE, text=True
    )
    line = store.stdout.readline()
    assert line.startswith("Storing up to 4.00 MiB of prefixes in"), line
    host, port = line.rsplit(maxsplit=1)[1].split(":")
    return store, NetworkTier(host, int(port), tries=1)


@pytest.mark.parametrize("memory", ["0", "1B", "64kB"])
def test_too_small_memory_is_refused(quire, memory):
    result = quire("kv-store", "--memory", memory, "--port", "0")

    assert result.exit_code == 2
    assert f"expected --memory of 1.00 MiB or more, got {memory!r}" in result.stderr


def test_stored_kv_survives_a_restart_of_the_store(tmp_path):
    store, tier = start(tmp_path / "kv")
    for number in range(6):  # two more than fit
        tier.write(str(number), bytes([number]) * MIB)
    assert set(tier.stored()) == set("2345")
    tier.close()
    store.send_signal(signal.SIGTERM)
    assert store.wait(30) == 0
    store.stdout.close()
    with pytest.raises(TierUnreachable, match="did not respond"):
        tier.stored()

    store, tier = start(tmp_path / "kv")
    buffer = bytearray(3)
    tier.read("5", memoryview(buffer))
    assert buffer == b"\5\5\5"
    tier.close()
    store.send_signal(signal.SIGINT)
    assert store.wait(30) == 0
    store.stdout.close()
