"""State machines of the KV memory (see `support.memory_machine`) and of the prefix index."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.errors import HostMemoryFull
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIdentity, PrefixIndex, private_salt, root_key
from quire.kv.sharing import CachedReference
from quire.kv.swap import swap_in, swap_out
from quire.layout.pages import LaneGroup
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.transfer import StreamedCopies
from quire.offload.tiers.file import FileTier
from support.host_array import CopyFailed, HostArray
from support.lazy_copies import LazyWorker
from support.memory_machine import LAYOUT, MAX_ROWS, SEEDS, MemoryMachine
from support.small_memory import latent_class, places, plain_class, same_bytes, with_groups


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


PAGE = 2
ROOT = root_key("machine")
FULL = LaneGroup(name="full", page_class=plain_class(tokens=PAGE), layers=(0,))
WINDOW = LaneGroup(name="window", page_class=plain_class(tokens=PAGE), layers=(1,), window=3)
CHUNK = LaneGroup(name="chunk", page_class=plain_class(tokens=PAGE), layers=(1,), chunk=4)
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)  # texts often share a prefix
PICK = st.integers(0, 1 << 20)


class Sequence:
    def __init__(self, row, lease, tenant, tokens):
        self.row, self.lease, self.tenant, self.tokens = row, lease, tenant, tokens


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        others=st.sampled_from([(), (WINDOW,), (CHUNK,)]),
        page_class=st.sampled_from([FULL.page_class, latent_class(tokens=PAGE)]),
        pages=st.integers(8, 40),
    )
    def build(self, others, page_class, pages):
        groups = [replace(group, page_class=page_class) for group in (FULL, *others)]
        self.page_class, page_bytes = page_class, page_class.page_bytes
        self.memory = with_groups(*groups, total_bytes=pages * page_bytes, max_rows=6)
        self.index = PrefixIndex(self.memory, self)
        self.open: list[Sequence] = []
        self.published: dict[str, set[tuple[int, ...]]] = {"a": set(), "b": set()}
        self.names: dict[bytes, tuple[str, tuple[int, ...]]] = {}
        self.unused: list[tuple[str, tuple[int, ...]]] = []  # least recently used first

    # ---- listener ------------------------------------------------------------------------------

    def stored(self, block_hashes, parent_hash, token_ids, page_tokens):
        """Ignored: the machine records its own publications."""

    def removed(self, block_hashes):
        evicted = [self.names.pop(key) for key in block_hashes]
        assert evicted == self.unused[: len(evicted)]
        del self.unused[: len(evicted)]
        for tenant, text in evicted:
            self.published[tenant].remove(text)

    # ---- rules ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < 6)
    @rule(tenant=st.sampled_from("ab"), tokens=TEXTS, late=st.booleans())
    def start_sequence(self, tenant, tokens, late):
        lease = self.index.match(self.identity(tenant), tokens)
        longest = self.longest(tenant, tokens)
        assert lease.tokens == longest
        self.mark_prefixes_used(tenant, tokens[:longest])
        if not self.can_grow(longest, len(tokens)):
            self.release(lease, tenant, tokens)
            return
        row = self.index.start(lease) if longest else self.memory.start()
        sequence = Sequence(row, lease, tenant, tokens[:longest])
        self.open.append(sequence)
        self.extend_by(sequence, tokens[longest:], publish=not late)

    def can_grow(self, found, length):
        """Whether pages for the whole text are free after eviction of idle blocks."""
        new = -(-(length - found) // PAGE) + 1
        needed = new * len(self.memory.tables)
        return self.index.reclaim({self.page_class: needed})

    @precondition(lambda self: self.open)
    @rule(pick=PICK, tokens=TEXTS, fails=st.booleans())
    def extend(self, pick, tokens, fails):
        sequence = self.open[pick % len(self.open)]
        if self.can_grow(len(sequence.tokens), len(sequence.tokens) + len(tokens)):
            self.extend_by(sequence, tokens, publish=True, fails=fails)

    def extend_by(self, sequence, tokens, *, publish, fails=False):
        """Extend a sequence in steps that end at the ends of chunks; only the last one may fail."""
        until_end = self.memory.layout.until_chunk_end(len(sequence.tokens)) or len(tokens)
        if until_end < len(tokens):
            self.step(sequence, tokens[:until_end], publish=publish)
            self.extend_by(sequence, tokens[until_end:], publish=publish, fails=fails)
        else:
            self.step(sequence, tokens, publish=publish, fails=fails)

    def step(self, sequence, tokens, *, publish, fails=False):
        before = len(sequence.tokens)
        rows = np.array([sequence.row])
        self.memory.grow(rows, np.array([len(tokens)], dtype=np.int32))
        sequence.tokens = [*sequence.tokens, *tokens]
        self.write(sequence, before)
        known = {tenant: set(texts) for tenant, texts in self.published.items()}
        if publish and sequence.lease.publishes:
            self.publish(sequence)
        if fails:
            self.index.withdraw()
            self.published = known
            self.close_sequence(sequence)
        else:
            self.index.confirm()

    def publish(self, sequence):
        start = sequence.lease.tokens
        self.index.publish(sequence.lease, sequence.row, sequence.tokens[start:])
        for node in sequence.lease.nodes[start // PAGE :]:
            text = tuple(sequence.tokens[: node.block.end])
            self.published[sequence.tenant].add(text)
            self.names[node.block.key] = (sequence.tenant, text)
            self.mark_used(sequence.tenant, text)

    @precondition(lambda self: self.open)
    @rule(pick=PICK)
    def close(self, pick):
        self.close_sequence(self.open[pick % len(self.open)])

    def close_sequence(self, sequence):
        self.open.remove(sequence)
        self.release(sequence.lease, sequence.tenant, sequence.tokens)
        self.memory.release([sequence.row])

    def release(self, lease, tenant, tokens):
        nodes = list(lease.nodes)
        self.index.release(lease)
        for node in reversed(nodes):
            text = tuple(tokens[: node.block.end])
            if text in self.published[tenant] and not self.in_use(tenant, text):
                self.unused.append((tenant, text))

    @rule(pages=st.integers(1, 12))
    def reclaim(self, pages):
        self.index.reclaim({self.page_class: pages})

    @rule()
    def clear(self):
        self.index.clear()
        assert not self.unused

    # ---- the reference -------------------------------------------------------------------------

    def identity(self, tenant):
        return PrefixIdentity(ROOT, private_salt(b"key", tenant, ""))

    def longest(self, tenant, tokens):
        """The length of the longest published prefix that leaves a token to compute."""
        length = 0
        while length + PAGE < len(tokens):
            if tuple(tokens[: length + PAGE]) not in self.published[tenant]:
                break
            length += PAGE
        return length

    def mark_prefixes_used(self, tenant, tokens):
        for end in range(PAGE, len(tokens) + 1, PAGE):
            self.mark_used(tenant, tuple(tokens[:end]))

    def mark_used(self, tenant, text):
        if (tenant, text) in self.unused:
            self.unused.remove((tenant, text))

    def in_use(self, tenant, text):
        return any(
            tuple(other.tokens[:end]) == text
            for other in self.open
            if other.tenant == tenant
            for end in (node.block.end for node in other.lease.nodes)
        )

    def write(self, sequence, first):
        """Write the tokens from `first` on, by position, into every lane."""
        for table in self.memory.tables.values():
            page, offset = places(table, sequence.row, 0)
            positions = table.slot_positions(sequence.row, 0)
            new = positions >= first
            values = np.array(sequence.tokens)[positions[new]].astype(np.uint8)
            planes, target = same_bytes(self.page_class, values), (page[new], offset[new])
            self.memory.store.write_slots(self.page_class, target, planes, None)

    # ---- invariants ----------------------------------------------------------------------------

    @invariant()
    def check_rows(self):
        if not hasattr(self, "open"):
            return
        self.memory.store.poison_free(self.memory)
        for sequence in self.open:
            for table in self.memory.tables.values():
                slots = places(table, sequence.row, 0)
                planes, _ = self.memory.store.read_slots(self.page_class, slots)
                positions = table.slot_positions(sequence.row, 0)
                expected = np.array(sequence.tokens)[positions]
                assert all((plane[:, 0] == expected[:, None]).all() for plane in planes)

    @invariant()
    def check_accounts(self):
        if not hasattr(self, "open"):
            return
        self.memory.check()
        assert len(self.index) == sum(map(len, self.published.values()))
        assert self.index.num_idle == len(self.unused)
        assert self.index.idle_bytes == len(self.unused) * self.index.block_bytes

    def teardown(self):
        if not hasattr(self, "open"):
            return
        for sequence in list(self.open):
            self.close_sequence(sequence)
        self.index.clear()
        self.memory.check()
        assert not len(self.index)
        assert not any(pool.num_used for pool in self.memory.pools.values())


TestPrefixIndex = PrefixMachine.TestCase
