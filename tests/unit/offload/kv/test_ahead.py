"""The first layers of offloaded prefixes are loaded at the end of the step before."""

import pytest
import torch

from quire.kv.sharing import fork
from quire.offload.kv.prefix_splits import Share
from quire.offload.swap.transfer import ThreadTransferWorker
from support.offloaded_kv import FULL_LAYERS, make, poison
from unit.offload.kv.test_offloaded_prefixes import step

AHEAD = 2  # layers of the next step


class Counting(ThreadTransferWorker):
    """Counts copies."""

    def __init__(self):
        super().__init__()
        self.num_copies = 0

    def submit(self, copy, num_bytes):
        self.num_copies += 1
        return super().submit(copy, num_bytes)


class Alternating:
    """Transfers all columns, or all but those that CPU attention would serve, in turn."""

    def __init__(self, hosts):
        self.hosts = list(hosts)

    def divide(self, prefixes, rows, batches=1):
        columns = self.hosts.pop(0)
        return {
            row: Share(host=range(prefix.columns - columns, prefix.columns))
            for row, prefix in prefixes.items()
        }

    def learn(self, timed):
        pass


def offloaded_and_whole(rows=1, tokens=16, slots=12):
    """Two memories with equal contents; in the first, rows have offloaded prefixes."""
    both = make(transfer_worker=Counting()), make()
    for kv in both:
        for row in [kv.memory.start() for _ in range(rows)]:
            step(kv, {row: tokens}, row)
    for row in range(rows):
        both[0].offload.prefixes.offload(row, slots)
    return both


def copies_of(kv, rows, seed):
    """Run a decode step; return its output and the number of copies that it submitted."""
    before = kv.offload.transfer_worker.num_copies
    out = step(kv, dict.fromkeys(rows, 1), seed)
    return out, kv.offload.transfer_worker.num_copies - before


def test_the_first_layers_are_loaded_once_for_two_steps():
    offloaded, whole = offloaded_and_whole()

    for number, expected in enumerate((FULL_LAYERS + AHEAD, FULL_LAYERS, FULL_LAYERS)):
        out, copies = copies_of(offloaded, [0], number)
        assert copies == expected
        assert torch.equal(out, step(whole, {0: 1}, number))


def test_rows_that_skip_a_step_find_their_first_layers():
    offloaded, whole = offloaded_and_whole(rows=2)
    for number, rows in enumerate(([0, 1], [1], [0], [0, 1])):
        out, _ = copies_of(offloaded, rows, number)
        assert torch.equal(out, step(whole, dict.fromkeys(rows, 1), number))


def test_first_layers_of_another_split_are_loaded_again():
    """Pages that a step left out are not taken for loaded in the step after it."""
    offloaded, whole = offloaded_and_whole()
    hosts = [0, 1, 0, 3, 1, 0]
    offloaded.offload.splits = Alternating(hosts)
    for number, host in enumerate(hosts):
        out, _ = copies_of(offloaded, [0], number)
        expected = step(whole, {0: 1}, number)
        if not host:  # otherwise the part of CPU attention is missing
            assert torch.equal(out, expected)


@pytest.mark.parametrize("change", ["offload", "halve", "repack", "read"])
def test_first_layers_stay_valid_when_bookkeeping_changes_pages(change):
    offloaded, whole = offloaded_and_whole(slots=8)
    prefixes = offloaded.offload.prefixes
    copies_of(offloaded, [0], 0), step(whole, {0: 1}, 0)
    if change == "offload":
        prefixes.offload(0, 16)
    elif change == "halve":
        prefixes.restage(0, 1)
    elif change == "repack":
        prefixes.restage(0, pack=True)
    else:
        poison(offloaded)

    for number in (1, 2):
        out, _ = copies_of(offloaded, [0], number)
        assert torch.equal(out, step(whole, {0: 1}, number))
    offloaded.memory.release([0])
    offloaded.memory.check()


def test_forks_share_offloaded_pages_and_their_first_layers():
    offloaded, whole = offloaded_and_whole()
    copies_of(offloaded, [0], 0), step(whole, {0: 1}, 0)
    for kv in (offloaded, whole):
        assert fork(kv.memory, 0) == 1
    used = offloaded.offload.prefixes.pool.used_bytes

    for number in (1, 2):
        out, copies = copies_of(offloaded, [0, 1], number)
        assert copies == FULL_LAYERS  # one copy of a layer for both
        assert torch.equal(out, step(whole, {0: 1, 1: 1}, number))
    assert offloaded.offload.batch_key(0) == offloaded.offload.batch_key(1) is not None
    offloaded.memory.check()
    offloaded.memory.release([0])
    assert offloaded.offload.prefixes.pool.used_bytes == used
    out, _ = copies_of(offloaded, [1], 3)
    whole.memory.release([0])
    assert torch.equal(out, step(whole, {1: 1}, 3))
    offloaded.memory.release([1])
    assert not offloaded.offload.prefixes.pool.used_bytes
    offloaded.memory.check()
