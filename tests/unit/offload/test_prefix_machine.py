"""Prefixes in a disk tier, also below CPU memory, under random load, restarts, crashes and damage.

Every byte of a page encodes its token and position; free pages are poison. A row assembled from
cached, loaded and prefilled blocks must have the bytes of its own tokens.
"""

import contextlib
import itertools
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.errors import OutOfPages
from quire.kv.block_records import BlockRecords
from quire.kv.prefix import Block, PrefixIdentity, PrefixIndex, blocks_of, private_salt, root_key
from quire.layout.pages import LaneGroup
from quire.offload.prefix_store.in_flight_pages import InFlightPages
from quire.offload.prefix_store.levels import PrefixLevels
from quire.offload.prefix_store.prefix_load import PrefixLoad
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.offload.prefix_store.store import CPU, PrefixStore
from quire.offload.tiers.file import FileTier
from quire.offload.tiers.host import HostTier
from quire.plan.fitting import RateEstimator
from support.prefix_index import Listener
from support.small_memory import latent_class, places, plain_class, same_bytes, with_groups
from unit.offload.test_file_tier import file_of

PAGE = 2
FULL = LaneGroup(name="full", page_class=plain_class(tokens=PAGE), layers=(0, 1))
WINDOW = LaneGroup(name="window", page_class=plain_class(tokens=2 * PAGE), layers=(2,), window=5)
INDEXED = LaneGroup(name="indexed", page_class=latent_class(tokens=2 * PAGE), layers=(2,), topk=3)
BLOCK = 2 * PAGE
ORIGIN = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1] * 3
TEXTS = st.builds(  # texts differ from some position on, or not at all
    lambda parts, end: ([*ORIGIN[:parts], 2, *ORIGIN])[:end], st.integers(0, 30), st.integers(2, 30)
)
PICK = st.integers(0, 1 << 20)


class PrefixTierMachine(RuleBasedStateMachine):
    @initialize(
        others=st.sampled_from([(), (WINDOW,), (INDEXED,)]),
        pages=st.integers(150, 400),
        disk_kib=st.sampled_from([64, 4096]),
        cpu_kib=st.sampled_from([0, 16, 4096]),
    )
    def build(self, others, pages, disk_kib, cpu_kib):
        self.cpu_kib = cpu_kib
        self.groups = (FULL, *others)
        self.block = BLOCK if others else PAGE
        self.total_bytes = pages * FULL.page_class.page_bytes
        self.disk_kib = disk_kib
        self.folder = Path(tempfile.mkdtemp())
        self.damaged = self.opened = False
        self.num_loaded = 0
        self.open()

    def open(self):
        self.memory = with_groups(*self.groups, total_bytes=self.total_bytes, max_rows=3)
        self.listener = Listener()
        self.index = PrefixIndex(self.memory, self.listener)
        self.disk = FileTier(self.folder, self.disk_kib << 10, direct=False)
        records = BlockRecords(self.memory, self.index.block_tokens)
        record_bytes, level = records.record_bytes, int(self.cpu_kib > 0)
        hours = itertools.count(step=3600.0)  # a damaged tier is tried again at every call
        clock = lambda: next(hours)  # noqa: E731
        self.store = PrefixStore(self.disk, "nature", record_bytes, level=level, clock=clock)
        stores = [self.store]
        if self.cpu_kib:
            cpu = HostTier(self.cpu_kib << 10)
            stores.insert(0, PrefixStore(cpu, "nature", record_bytes, kind=CPU, below=self.store))
        stores[0].run_blocks = 3
        self.levels = PrefixLevels(stores, [RateEstimator((1e-4, 1e-9)) for _ in stores])
        self.tier = PrefixTier(self.index, self.levels)
        self.opened = True

    # ---- rules ---------------------------------------------------------------------------------

    @rule(texts=st.lists(TEXTS, min_size=3, max_size=6), pick=PICK, late=st.booleans())
    def prefill_some(self, texts, pick, late):
        for number, tokens in enumerate(texts):
            self.prefill("aab"[number % 3], tokens, pick + number, late)

    def prefill(self, tenant, tokens, pick, late):
        """Start from the cached prefix, load some stored blocks, prefill the rest, release."""
        if not self.index.reclaim(self.pages_of(len(tokens) + BLOCK)):
            return
        identity = PrefixIdentity(root_key("machine"), private_salt(b"key", tenant, ""))
        lease = self.index.match(identity, tokens)
        row = self.index.start(lease) if lease.nodes else self.memory.start()
        at = lease.tokens
        self.tier.transfer_worker.drain()
        blocks = list(blocks_of(identity, tokens[: len(tokens) - 1], self.index.block_tokens))
        found = self.levels.find(block for block in blocks if block.end > at)
        if found:
            at = self.restore(row, tokens, at, found, pick, late=late)
        self.grow(row, tokens, at, len(tokens))
        self.check_row(row, tokens)
        if lease.publishes:
            self.index.publish(lease, row, tokens[lease.tokens :])
        self.index.confirm()
        self.index.release(lease)
        self.memory.release([row])

    def restore(self, row, tokens, at, found, pick, *, late):
        end, size = found[-1][0].end, self.index.block_tokens
        first = at + pick % ((end - at) // size + 1) * size
        if first == end:
            return at
        try:
            pages = InFlightPages(self.memory, min(first + size, end), end, size)
        except OutOfPages:
            return at
        load = PrefixLoad(self.tier, pages, found)
        with contextlib.suppress(OutOfPages):
            load.extend_down(first)
        moves = random.Random(pick)
        for _ in range(moves.randrange(8) if late else 99):  # a late load finds only some segments
            if not load.load_segment():
                break
        assert self.damaged or late or load.loaded_from <= max(first, pages.first)
        self.num_loaded += load.loaded_from < end
        target = max(at, min(load.loaded_from + moves.randrange(2) * size, end))
        # pages in flight below `loaded_from` are freed only by `stop`: both may not fit at once
        fits = self.index.reclaim(self.pages_of(target - at))
        if fits:
            self.grow(row, tokens, at, target)
        load.stop()
        assert not load.load_segment()
        if not fits:
            pages.release()
            return at
        if target < end:
            assert pages.attach(row)
        else:
            pages.release()
        return end

    def grow(self, row, tokens, start, end):
        if end > start:
            self.memory.grow(np.array([row]), np.array([end - start], dtype=np.int32))
            self.write(row, tokens, start, end)

    @rule(pages=st.integers(1, 40))
    def reclaim(self, pages):
        self.index.reclaim({FULL.page_class: pages})

    @rule(killed=st.booleans())
    def reopen(self, killed):
        if killed:
            self.crash()
        else:
            self.restart()

    def restart(self):
        """Cached blocks are stored after a restart, if the disk is large enough and undamaged."""
        cached = set(self.listener.known)
        self.tier.close()
        self.tier.close()
        assert cached == set(self.listener.known)
        self.index.clear()
        assert not any(pool.num_used for pool in self.memory.pools.values())
        self.open()
        if not self.damaged and self.disk.used_bytes < self.disk.total_bytes / 2:  # none evicted
            assert not any(map(self.store.lacks, cached))

    def crash(self):
        """Only written blocks are stored after a crash."""
        self.tier.transfer_worker.close()
        written = set(self.stored_places())
        self.store.close()
        self.open()
        assert self.damaged or set(self.stored_places()) == written

    def stored_places(self):
        """The places of all blocks in the store, by key; checks that the disk lists their keys."""
        listed = {key for stored in self.disk.stored().values() for key in stored.facts["keys"]}
        blocks = [Block(bytes.fromhex(key), b"", 0) for key in sorted(listed)]
        found = [pair for block in blocks for pair in self.store.find([block])]
        assert len(found) == len(self.store)
        return {block.key: place for block, place in found}

    @rule(pick=PICK)
    def damage(self, pick):
        self.tier.transfer_worker.drain()
        if not len(self.store):
            return
        self.damaged = True
        place = random.Random(pick).choice(list(self.stored_places().values()))
        num_bytes = self.disk.stored()[place.entry].num_bytes
        offset = pick % num_bytes
        with open(file_of(self.folder, place.entry), "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0x55]))

    # ---- bytes ---------------------------------------------------------------------------------

    def pages_of(self, tokens):
        needed = {}
        for group in self.groups:
            count = (-(-tokens // group.page_class.tokens) + 1) * group.num_lanes
            needed[group.page_class] = needed.get(group.page_class, 0) + count
        return needed

    @staticmethod
    def values(tokens, positions):
        return (np.array(tokens)[positions] * 100 + positions).astype(np.uint8)

    def write(self, row, tokens, start, end):
        for table in self.memory.tables.values():
            for lane in range(table.group.num_lanes):
                page, offset = places(table, row, lane)
                positions = table.slot_positions(row, lane)
                new = (positions >= start) & (positions < end)
                page_class, slots = table.group.page_class, (page[new], offset[new])
                planes = same_bytes(page_class, self.values(tokens, positions[new]))
                self.memory.store.write_slots(page_class, slots, planes, None)

    def check_row(self, row, tokens):
        self.memory.store.poison_free(self.memory)
        for table in self.memory.tables.values():
            for lane in range(table.group.num_lanes):
                place, positions = places(table, row, lane), table.slot_positions(row, lane)
                planes, _ = self.memory.store.read_slots(table.group.page_class, place)
                expected = self.values(tokens, positions)[:, None]
                assert all((plane[:, 0] == expected).all() for plane in planes)
                assert positions[-1] == len(tokens) - 1

    # ---- invariants ----------------------------------------------------------------------------

    @invariant()
    def check_accounts(self):
        if not getattr(self, "opened", False):
            return
        self.memory.check()
        self.tier.transfer_worker.drain()
        self.disk.check()
        stored = self.disk.stored()
        assert {place.entry for place in self.stored_places().values()} <= set(stored)
        assert self.disk.used_bytes <= self.disk.total_bytes

    def teardown(self):
        if getattr(self, "opened", False):
            self.tier.close()
            shutil.rmtree(self.folder)


PrefixTierMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None
)
TestPrefixTier = PrefixTierMachine.TestCase
