"""State machines of the KV memory; see `support.memory_machine`."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from quire.errors import HostMemoryFull
from quire.kv.memory import KVMemory
from quire.kv.sharing import CachedReference
from quire.kv.swap import swap_in, swap_out
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.transfer import StreamedCopies
from quire.offload.tiers.file import FileTier
from support.host_array import CopyFailed, HostArray
from support.lazy_copies import LazyWorker
from support.memory_machine import LAYOUT, MAX_ROWS, SEEDS, MemoryMachine


def test_layout_has_page_sizes_that_do_not_divide_a_slab():
    memory = KVMemory(LAYOUT, 24 * 1024, MAX_ROWS)

    assert [c.page_bytes for c in LAYOUT.page_classes] == [64, 192, 192, 192, 448, 128, 128, 64, 64]
    assert memory.arena.slab_bytes % 192
    assert {c.tokens for c in LAYOUT.page_classes} == {1, 2, 3, 4, 8}


TestMemoryMachine = MemoryMachine.TestCase


TIER_BYTES = 1 << 20
CALLS = st.none() | st.integers(0, 8)  # number of copies before one fails


class TiersMachine(MemoryMachine):
    """With swap space whose copies sometimes fail, and a file tier.

    Sequences are swapped whole or together with sequences that share their pages; some are
    discarded. Cached prefixes and snapshots are exported to files, and restored from them. Bytes
    always equal those of the model, and a failed copy changes nothing.
    """

    # rules of other machines are left out, so that more steps swap
    swap_out = swap_in = repack_the_only_row = start_without_a_free_row = None
    grow_beyond_the_memory = reference_pages_that_cannot_be_shared = rewrite_statistics = None

    @initialize(kib=st.sampled_from([24, 40, 96]), host_kib=st.sampled_from([8, 32, 128]))
    def open_memory(self, kib, host_kib):
        MemoryMachine.open_memory(self, kib)
        self.host = HostArray(self.store, host_kib * 1024)
        self.pool = HostPool(host_kib * 1024, self.host)
        self.pooled = []
        self.folder = tempfile.TemporaryDirectory(prefix="tier-")
        self.tier = FileTier(Path(self.folder.name), TIER_BYTES)

    def stored_elsewhere(self, records):
        """Write records to the file tier instead of earlier ones; read them after a restart."""
        self.tier.write("records", records.tobytes(), {"shape": list(records.shape)})
        self.tier.close()
        self.tier = FileTier(Path(self.folder.name), TIER_BYTES)
        found = np.empty(self.tier.stored()["records"].facts["shape"], dtype=np.uint8)
        self.tier.read("records", memoryview(found.reshape(-1)))
        return found

    @precondition(lambda self: self.complete_rows())
    @rule(pick=SEEDS)
    def export_and_restore_private_pages(self, pick):
        """Replace the bytes of a row's statistics and recurrent state by those in the tier."""
        complete = self.complete_rows()
        row = complete[pick % len(complete)]
        tables = {name: self.memory.tables[name] for name in self.rows[row].statistics}
        pages = {name: t.pages[row, :, : t.num_pages[row, 0]] for name, t in tables.items()}
        self.restore_in_place(CachedReference(-1, 0, self.rows[row].length, pages))

    def complete_rows(self):
        rows = sorted(self.rows)
        return [row for row in rows if self.rows[row].length and self.has_complete_statistics(row)]

    @precondition(lambda self: self.rows)
    @rule(picks=st.lists(SEEDS, min_size=1, max_size=3), fail_after=CALLS)
    def swap_to_host(self, picks, fail_after):
        rows = sorted({self.pick_row(pick) for pick in picks})
        counts = {c: self.distinct_pages(c, rows) for c in LAYOUT.page_classes}
        needed = self.pages_in_bytes(counts)

        swapped = self.try_copy(lambda: swap_out(self.memory, rows, self.pool), fail_after)

        if swapped is not None:
            assert (swapped.num_bytes, dict(swapped.pages)) == (needed, counts)
            self.pooled.append((swapped, [self.rows.pop(row) for row in rows]))

    @precondition(lambda self: self.pooled)
    @rule(pick=SEEDS, fail_after=CALLS)
    def swap_from_host(self, pick, fail_after):
        index = pick % len(self.pooled)
        swapped, sequences = self.pooled[index]
        fits = len(self.rows) + len(sequences) <= MAX_ROWS and self.memory.fits(swapped.pages)
        used = self.bytes_in_use()

        def act():
            return self.attempt(lambda: swap_in(self.memory, swapped), fits)

        rows = self.try_copy(act, fail_after) if fits else act()

        if rows is not None:
            assert self.bytes_in_use() - used == swapped.num_bytes
            del self.pooled[index]
            for row, sequence in zip(rows, sequences, strict=True):
                self.add(row, sequence)

    @precondition(lambda self: self.pooled)
    @rule(pick=SEEDS)
    def cancel(self, pick):
        swapped, _ = self.pooled.pop(pick % len(self.pooled))
        swapped.discard()

    def try_copy(self, act, fail_after):
        """Call `act` with a fault; if it fails or the pool is full, check that nothing changed."""
        before, spaces = self.snapshot(), self.pool.spaces
        self.host.fail_after = fail_after
        try:
            return act()
        except (CopyFailed, HostMemoryFull):
            after = self.snapshot()
            del before["bytes"], after["bytes"]  # free pages may have been written
            assert after == before
            assert self.pool.spaces == spaces
            return None
        finally:
            self.host.fail_after = None

    @invariant()
    def check_host(self):
        self.pool.check()
        assert self.pool.used_bytes == sum(swapped.num_bytes for swapped, _ in self.pooled)
        self.host.poison_free(self.pool)

    def teardown(self):
        for swapped, _ in self.pooled:
            swapped.discard()
        assert self.pool.used_bytes == 0
        self.pool.check()
        self.tier.check()
        self.tier.close()
        self.folder.cleanup()
        super().teardown()


TestTiersMachine = TiersMachine.TestCase


class FailingLazyWorker(LazyWorker):
    """Fails to start copies when the host array is to fail."""

    def __init__(self, host):
        super().__init__()
        self.host = host

    def submit(self, copy, num_bytes):
        if num_bytes and self.host.fail_after is not None:
            self.host.fail_after -= 1
            if self.host.fail_after < 0:
                raise CopyFailed
        return super().submit(copy, num_bytes)

    def run_until(self, number):
        fail_after, self.host.fail_after = self.host.fail_after, None
        super().run_until(number)
        self.host.fail_after = fail_after


class StreamedSwapMachine(TiersMachine):
    """Swap copies run as late as their ordering allows.

    A page or host memory that is used again before its copy has run would have wrong bytes.
    """

    @initialize(kib=st.sampled_from([24, 40, 96]), host_kib=st.sampled_from([8, 32, 128]))
    def open_memory(self, kib, host_kib):
        TiersMachine.open_memory(self, kib, host_kib)
        self.worker = FailingLazyWorker(self.host)
        self.pool.copies = StreamedCopies(self.host, self.worker, self.memory.arena.fences)
        self.poison_free = self.store.poison_free
        self.store.poison_free = self.poison_free_once_copied

    def poison_free_once_copied(self, memory):
        """Free pages that a copy still reads have their bytes."""
        if not self.worker.num_waiting:
            self.poison_free(memory)

    @precondition(lambda self: self.worker.num_waiting)
    @rule(count=st.integers(1, 4))
    def copies_run(self, count):
        waiting = self.worker.num_waiting
        self.worker.run_until(self.worker.num_run + min(count, waiting) - 1)

    @invariant()
    def fences_are_copies_that_wait_or_ended(self):
        assert len(self.memory.arena.fences) <= len(self.worker.queued)


TestStreamedSwapMachine = StreamedSwapMachine.TestCase
