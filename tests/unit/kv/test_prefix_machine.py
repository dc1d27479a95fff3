"""The prefix index under random load matches the longest text that was published and not evicted.

It returns pages with the right tokens, and evicts unused blocks, least recently used first.
"""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kv.prefix import PrefixIdentity, PrefixIndex, private_salt, root_key
from quire.layout.pages import LaneGroup
from support.small_memory import latent_class, places, plain_class, same_bytes, with_groups

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
