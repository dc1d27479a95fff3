"""The prefix index: matches, isolation of tenants, and eviction order."""

import pytest

from quire.kv import prefix as prefix_module
from quire.kv.prefix import Block, PrefixIdentity, PrefixIndex, private_salt, root_key
from quire.layout.pages import LaneGroup
from support.prefix_index import DEFAULT_IDENTITY, TOKENS, Listener, prefill
from support.small_memory import grow, keys, one_group, plain_class, with_groups, write_lane

WINDOW = LaneGroup(name="window", page_class=plain_class(), layers=(1,), window=6)
CHUNK = LaneGroup(name="chunk", page_class=plain_class(), layers=(1,), chunk=8)
FULL = LaneGroup(name="kv", page_class=plain_class(), layers=(0,))
OF_ROWS = plain_class(head_dim=32, value=False)
SUMS = LaneGroup(name="sums", page_class=OF_ROWS, layers=(0,), private=True)
OF_SUMS = frozenset({"sums"})


def close(index, row, lease):
    index.release(lease)
    index.memory.release([row])


def test_requests_of_one_step_share_blocks_and_publish_equal_prompts_once():
    index = PrefixIndex(one_group())
    memory = index.memory
    lease = index.match(DEFAULT_IDENTITY, TOKENS)
    row = memory.start()
    grow(memory, row, 20)
    index.publish(lease, row, TOKENS)

    other = index.match(DEFAULT_IDENTITY, TOKENS)

    assert other.tokens == 16
    assert index.is_pending(other)
    index.confirm()
    assert not index.is_pending(other)

    # Neither matches a prefix; the pages of the second stay private.
    index = PrefixIndex(one_group())
    memory = index.memory
    leases = [index.match(DEFAULT_IDENTITY, TOKENS) for _ in range(2)]
    rows = [memory.start(), memory.start()]
    for row, lease in zip(rows, leases, strict=True):
        grow(memory, row, 9)
        index.publish(lease, row, TOKENS[:9])

    assert len(index) == 2
    assert leases[0].nodes == leases[1].nodes
    assert [node.num_users for node in leases[0].nodes] == [2, 2]
    for row, lease in zip(rows, leases, strict=True):
        close(index, row, lease)
    assert index.num_idle == 2
    memory.check()


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_dropped_before_they_were_written_are_not_stored(fails):
    """A request of the planned step releases its blocks: their bytes must not be stored."""
    dropped, listener = [], Listener()
    index = PrefixIndex(one_group(max_rows=4), listener)
    index.on_drop(dropped.extend)
    close(index, *prefill(index, TOKENS[:8]))
    lease, row = index.match(DEFAULT_IDENTITY, TOKENS[:16]), index.memory.start()
    grow(index.memory, row, 16)
    index.publish(lease, row, TOKENS[lease.tokens : 16])

    index.release(lease)
    index.clear()

    assert [node.block.end for node in dropped] == [8, 4]
    assert not listener.known
    index.withdraw() if fails else index.confirm()
    assert not listener.known
    assert not index.memory.cached_references
    index.memory.check()


def identity(tenant, public_tokens=0, salt=""):
    return PrefixIdentity(root_key("a model"), private_salt(b"secret", tenant, salt), public_tokens)


def test_only_the_public_part_matches_for_another_tenant_salt_or_model():
    own = identity("a")
    others = [identity("b"), identity("a", salt="x"), PrefixIdentity(root_key("another"))]
    cases = [(own, other, 0) for other in others] + [(own, own, 16)]
    # whole pages of the public part; none of a private prefix
    cases.append((identity("a", public_tokens=10), identity("b", public_tokens=10), 8))
    cases.append((identity("a", public_tokens=8), own, 0))
    for publisher, asking, found in cases:
        index = PrefixIndex(one_group())
        prefill(index, TOKENS, publisher)
        assert index.match(asking, TOKENS).tokens == found, (publisher, asking)


def test_blocks_with_colliding_keys_are_distinguished_by_tokens(monkeypatch):
    """All keys are equal: every block collides with every other."""
    real = prefix_module.blocks_of

    def colliding(*args, **kwargs):
        for block in real(*args, **kwargs):
            yield Block(b"same", block.tokens, block.end)

    monkeypatch.setattr(prefix_module, "blocks_of", colliding)
    index = PrefixIndex(one_group())
    prefill(index, TOKENS[:5])
    row, lease = prefill(index, [1, 2, 3, 4, 5])

    assert (len(index), lease.nodes, lease.publishes) == (1, [], False)
    assert index.match(DEFAULT_IDENTITY, [*TOKENS[:4], 1]).tokens == 4
    assert keys(index.memory, row) == list(range(5))


def test_window_lane_starts_with_the_pages_its_window_needs_and_publishes_no_freed_ones():
    memory = with_groups(FULL, WINDOW)
    index = PrefixIndex(memory)
    lease = index.match(DEFAULT_IDENTITY, TOKENS)
    row = memory.start()
    for _ in range(20):  # published too late, after single-token steps
        grow(memory, row, 1)

    index.publish(lease, row, TOKENS)

    assert (lease.nodes, lease.publishes, len(index)) == ([], False, 0)

    # A match of 16: the next query sees positions 11 to 16; the pages at 0 and 4 are freed.
    # With chunks of 8 tokens the next query begins one.
    index = PrefixIndex(with_groups(FULL, WINDOW))
    prefill(index, TOKENS)

    lease = index.match(DEFAULT_IDENTITY, TOKENS)
    row = index.start(lease)
    grow(index.memory, row, 1)

    window = index.memory.tables["window"]
    assert lease.tokens == 16
    assert window.slot_positions(row, 0).tolist() == list(range(8, 17))
    index.memory.check()

    memory = with_groups(FULL, CHUNK)
    index = PrefixIndex(memory)
    lease, row = index.match(DEFAULT_IDENTITY, TOKENS), memory.start()
    for end in (8, 16):
        grow(memory, row, 8)
        index.publish(lease, row, TOKENS[lease.tokens : end])
    index.confirm()

    found = index.match(DEFAULT_IDENTITY, TOKENS)
    child = index.start(found)
    grow(memory, child, 1)

    assert found.tokens == 16
    assert memory.tables["chunk"].slot_positions(child, 0).tolist() == [16]
    memory.check()


def index_with_an_old_chain(total_bytes, tokens):
    """Idle blocks of a row without statistics."""
    index = PrefixIndex(memory := with_groups(FULL, SUMS, total_bytes=total_bytes))
    lease, old = index.match(DEFAULT_IDENTITY, [9] * tokens), memory.start(())
    grow(memory, old, tokens)
    index.publish(lease, old, [9] * tokens)
    close(index, old, lease)
    return index, memory


def test_idle_blocks_are_evicted_for_a_snapshot_that_then_fits_only():
    """Two pages of 256 B are needed and 384 B are free: the old chain's 128 B pages are evicted.

    Then 384 B are free and 128 B belong to an old chain: less than the copies need.
    """
    index, memory = index_with_an_old_chain(6 * 256, 13)
    row, lease = prefill(index, TOKENS[:8])
    assert (memory.free_bytes, index.idle_bytes) == (384, 3 * 128)

    index.snapshot(lease, row)

    assert index.match(DEFAULT_IDENTITY, TOKENS, statistics=OF_SUMS).tokens == 8
    assert index.match(DEFAULT_IDENTITY, [9] * 13).tokens < 12
    memory.check()

    index, memory = index_with_an_old_chain(7 * 256, 5)
    row, lease = prefill(index, TOKENS[:12])
    copies_bytes = 3 * 256
    assert memory.free_bytes + index.idle_bytes < copies_bytes

    index.snapshot(lease, row)

    assert lease.nodes[-1].statistics == {}
    assert index.match(DEFAULT_IDENTITY, [9] * 5).tokens == 4


def test_matches_end_at_snapshots_which_are_freed_with_their_blocks_or_at_the_limit():
    memory = with_groups(FULL, SUMS)
    index = PrefixIndex(memory)
    row, lease = prefill(index, TOKENS[:8])
    index.snapshot(lease, row)
    close(index, row, lease)

    assert index.idle_bytes == memory.used_bytes == 2 * 128 + 2 * 256
    lease = index.match(DEFAULT_IDENTITY, TOKENS, statistics=OF_SUMS)
    assert (lease.tokens, index.idle_bytes) == (8, 0)
    index.release(lease)
    assert index.idle_bytes == 2 * 128 + 2 * 256

    index.clear()
    assert (index.idle_bytes, memory.used_bytes) == (0, 0)

    memory = with_groups(FULL, SUMS)
    index = PrefixIndex(memory, snapshot_bytes=3 * 256)
    row, lease = prefill(index, TOKENS[:4])
    assert index.snapshot(lease, row)
    found = []
    for end in (8, 12, 16):  # of 512, 768 and 1,024 B
        grow(memory, row, 4)
        index.publish(lease, row, TOKENS[end - 4 : end])
        made = index.snapshot(lease, row)
        found.append((made, len(index.snapshots), index.snapshots.num_bytes))

    assert found == [(True, 2, 768), (True, 1, 768), (False, 1, 768)]
    memory.check()

    memory = with_groups(FULL, SUMS)
    index = PrefixIndex(memory)
    row, lease = prefill(index, TOKENS[:8])
    write_lane(memory, row, 0, name="sums")
    index.snapshot(lease, row)
    grow(memory, row, 4)
    index.publish(lease, row, TOKENS[8:12])

    assert index.match(DEFAULT_IDENTITY, TOKENS).tokens == 12
    other = index.match(DEFAULT_IDENTITY, TOKENS, statistics=OF_SUMS)
    child = index.start(other, statistics=OF_SUMS)

    assert other.tokens == 8
    assert keys(memory, child, name="sums") == list(range(8))
    table = memory.tables["sums"]
    assert not set(table.row_pages(child)) & set(table.row_pages(row))
    memory.check()


def test_snapshots_of_blocks_in_use_are_evicted_before_pages_run_out_but_not_pinned_ones():
    """Two rows of 8 tokens and two snapshots hold 2 x (256 + 512) + 1,024 of 2,816 B."""
    memory = with_groups(FULL, SUMS, total_bytes=11 * 256)
    index = PrefixIndex(memory)
    row, lease = prefill(index, TOKENS[:8])
    index.snapshot(lease, row)
    other, of_other = prefill(index, [7] * 8)
    index.snapshot(of_other, other)
    pinned = index.match(DEFAULT_IDENTITY, TOKENS, statistics=OF_SUMS)
    page_class = memory.tables["sums"].group.page_class

    assert index.idle_bytes == 2 * 256  # the other row's
    assert index.reclaim({page_class: 3})
    assert (len(lease.nodes[-1].statistics), of_other.nodes[-1].statistics) == (1, {})
    assert not index.reclaim({page_class: 4})
    index.release(pinned)
    assert index.reclaim({page_class: 4})
    assert index.match(DEFAULT_IDENTITY, TOKENS, statistics=OF_SUMS).nodes == []
    memory.check()


def test_queried_and_hit_tokens_are_counted_and_idle_blocks_not_in_the_peak():
    index = PrefixIndex(one_group())
    for _ in range(2):
        lease = index.match(DEFAULT_IDENTITY, TOKENS)
        index.count(len(TOKENS), lease)
        row = index.start(lease) if lease.nodes else index.memory.start()
        grow(index.memory, row, len(TOKENS) - lease.tokens)
        index.publish(lease, row, TOKENS[lease.tokens :])

    assert (index.queried_tokens, index.hit_tokens) == (40, 16)

    memory = one_group()
    index = PrefixIndex(memory)
    close(index, *prefill(index, TOKENS[:8]))
    close(index, *prefill(index, [1] * 8))

    assert memory.arena_peak_bytes == 2 * 128
    assert memory.used_bytes - memory.listeners.idle_bytes() == 0
