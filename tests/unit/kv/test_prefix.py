"""The prefix index: what is found, who may share it, what goes first when room is needed."""

import pytest

from quire.kv import prefix as prefix_module
from quire.kv.prefix import PrefixIndex
from quire.kv.prefix_key import Block, PrefixIdentity, private_salt, root_key
from quire.layout.pages import LaneGroup
from unit.kv.small_memory import grow, keys, one_group, plain_class, with_groups, write_lane

EVERYBODY = PrefixIdentity(root_key("a model"))
TOKENS = list(range(50, 70))
WINDOW = LaneGroup(name="window", page_class=plain_class(), layers=(1,), window=6)
FULL = LaneGroup(name="kv", page_class=plain_class(), layers=(0,))
SUMS = LaneGroup(
    name="sums", page_class=plain_class(head_dim=32, value=False), layers=(0,), private=True
)
OF_SUMS = frozenset({"sums"})


class Listener:
    def __init__(self):
        self.known = {}

    def stored(self, block_hashes, parent_hash, token_ids, page_tokens):
        assert len(token_ids) == len(block_hashes) * page_tokens
        assert parent_hash is None or parent_hash in self.known
        for number, key in enumerate(block_hashes):
            assert key not in self.known
            self.known[key] = token_ids[number * page_tokens : (number + 1) * page_tokens]

    def removed(self, block_hashes):
        for key in block_hashes:
            del self.known[key]


def read(index, tokens, identity=EVERYBODY):
    """Enter with what is found, read the rest, publish; return the row and its lease."""
    memory = index.memory
    lease = index.match(identity, tokens)
    found = lease.tokens
    row = index.start(lease) if found else memory.start()
    grow(memory, row, len(tokens) - found)
    for name in ("kv", "window"):
        if name in memory.tables and found < len(tokens):
            write_new(memory, row, name, found)
    index.publish(lease, row, tokens[lease.tokens :])
    index.confirm()
    return row, lease


def write_new(memory, row, name, found):
    """Write only what was not found: shared pages are read-only."""
    before = keys(memory, row, name=name)
    write_lane(memory, row, 0, name=name)
    if name == "kv":
        assert keys(memory, row, name=name)[:found] == before[:found]


def close(index, row, lease):
    index.release(lease)
    index.memory.release([row])


def test_a_prompt_read_before_is_found_up_to_its_last_whole_page():
    index = PrefixIndex(one_group(max_rows=4))
    first = read(index, TOKENS[:10])

    row, lease = read(index, TOKENS[:11])

    assert lease.tokens == 8
    assert len(index) == 2
    assert keys(index.memory, row) == list(range(11))
    pages = index.memory.tables["kv"].pages
    assert pages[row, 0, :2].tolist() == pages[first[0], 0, :2].tolist()
    assert pages[row, 0, 2] != pages[first[0], 0, 2]
    index.memory.check()


def test_at_least_one_token_is_left_to_compute():
    index = PrefixIndex(one_group())
    close(index, *read(index, TOKENS[:8]))

    assert index.match(EVERYBODY, TOKENS[:8]).tokens == 4
    assert index.match(EVERYBODY, TOKENS[:9]).tokens == 8


def test_a_prompt_that_parts_from_another_shares_what_comes_before():
    index = PrefixIndex(one_group())
    read(index, TOKENS[:12])
    other = [*TOKENS[:5], 9, 9, 9, *TOKENS[8:12]]

    _, lease = read(index, other)

    assert len(lease.nodes) == 3
    assert lease.nodes[0].num_users == 2
    assert [node.num_users for node in lease.nodes[1:]] == [1, 1]
    assert len(index) == 5


def test_requests_of_one_step_share_before_anything_has_run():
    index = PrefixIndex(one_group())
    memory = index.memory
    lease = index.match(EVERYBODY, TOKENS)
    row = memory.start()
    grow(memory, row, 20)
    index.publish(lease, row, TOKENS)

    other = index.match(EVERYBODY, TOKENS)

    assert other.tokens == 16
    assert index.is_pending(other)
    index.confirm()
    assert not index.is_pending(other)


def test_what_a_failed_step_published_is_gone():
    index = PrefixIndex(one_group())
    memory = index.memory
    kept_row, kept = read(index, TOKENS[:4])
    lease = index.match(EVERYBODY, TOKENS)
    row = index.start(lease)
    grow(memory, row, 16)
    index.publish(lease, row, TOKENS[4:])

    index.withdraw()
    close(index, row, lease)

    assert len(index) == 1
    assert index.match(EVERYBODY, TOKENS).tokens == 4
    memory.check()
    close(index, kept_row, kept)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_dropped_before_it_was_written_is_kept_nowhere(fails):
    """A request of the step that is planned lets its blocks go: nobody may have their bytes."""
    kept, listener = [], Listener()
    index = PrefixIndex(one_group(max_rows=4), listener)
    index.on_drop(kept.extend)
    close(index, *read(index, TOKENS[:8]))
    lease, row = index.match(EVERYBODY, TOKENS[:16]), index.memory.start()
    grow(index.memory, row, 16)
    index.publish(lease, row, TOKENS[lease.tokens : 16])

    index.release(lease)
    index.clear()

    assert [node.block.end for node in kept] == [8, 4]
    assert not listener.known
    index.withdraw() if fails else index.confirm()
    assert not listener.known
    assert not index.memory.cached_references
    index.memory.check()


def test_two_that_read_the_same_at_once_publish_it_once():
    """Both found nothing; the second's pages stay its own."""
    index = PrefixIndex(one_group())
    memory = index.memory
    leases = [index.match(EVERYBODY, TOKENS) for _ in range(2)]
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


# ---- who may share -----------------------------------------------------------------------------


def identity(tenant, public_tokens=0, salt=""):
    return PrefixIdentity(root_key("a model"), private_salt(b"secret", tenant, salt), public_tokens)


@pytest.mark.parametrize(
    "other", [identity("b"), identity("a", salt="x"), PrefixIdentity(root_key("another"))]
)
def test_nobody_finds_what_another_tenant_salt_or_model_has_read(other):
    index = PrefixIndex(one_group())
    read(index, TOKENS, identity("a"))

    assert index.match(other, TOKENS).tokens == 0
    assert index.match(identity("a"), TOKENS).tokens == 16


def test_a_public_part_is_shared_by_all_and_what_follows_by_nobody():
    index = PrefixIndex(one_group())
    read(index, TOKENS, identity("a", public_tokens=10))

    found = index.match(identity("b", public_tokens=10), TOKENS)

    assert found.tokens == 8  # whole pages of the public part


def test_a_public_part_is_not_found_by_those_for_whom_it_is_private():
    index = PrefixIndex(one_group())
    read(index, TOKENS, identity("a", public_tokens=8))

    assert index.match(identity("a", public_tokens=0), TOKENS).tokens == 0


def test_texts_with_one_key_are_told_apart_by_their_tokens(monkeypatch):
    """Keys cut down to nothing: every block collides with every other."""
    real = prefix_module.blocks_of

    def colliding(*args, **kwargs):
        for block in real(*args, **kwargs):
            yield Block(b"same", block.tokens, block.end)

    monkeypatch.setattr(prefix_module, "blocks_of", colliding)
    index = PrefixIndex(one_group())
    read(index, TOKENS[:5])
    row, lease = read(index, [1, 2, 3, 4, 5])

    assert (len(index), lease.nodes, lease.publishes) == (1, [], False)
    assert index.match(EVERYBODY, [*TOKENS[:4], 1]).tokens == 4
    assert keys(index.memory, row) == list(range(5))


# ---- making room -------------------------------------------------------------------------------


def test_idle_blocks_are_dropped_longest_unused_first_and_tails_before_heads():
    memory = one_group(total_bytes=8 * 128, max_rows=8)  # eight pages
    index = PrefixIndex(memory, listener := Listener())
    old, new = [9] * 9, TOKENS[:13]
    close(index, *read(index, old))
    close(index, *read(index, new))
    assert (len(index), index.num_idle, index.idle_bytes) == (5, 5, 5 * 128)
    [page_class] = memory.pools

    for pages, left in ((4, [old[:4], new[:4], new[4:8], new[8:12]]), (6, [new[:4], new[4:8]])):
        assert index.reclaim({page_class: pages})
        assert list(listener.known.values()) == left
        assert len(index) == len(left)
    memory.check()


def test_blocks_in_use_stay_whatever_room_is_needed():
    memory = one_group(total_bytes=8 * 128)
    index = PrefixIndex(memory)
    row, _lease = read(index, TOKENS[:13])
    [page_class] = memory.pools

    assert not index.reclaim({page_class: 5})

    assert index.match(EVERYBODY, TOKENS[:13]).tokens == 12
    assert keys(memory, row) == list(range(13))


def test_a_prefix_found_again_is_young_again():
    memory = one_group(total_bytes=8 * 128, max_rows=8)
    index = PrefixIndex(memory)
    first, second = [9] * 5, TOKENS[:5]
    for tokens in (first, second, first):
        close(index, *read(index, tokens))
    [page_class] = memory.pools

    assert index.reclaim({page_class: 7})

    assert index.match(EVERYBODY, first).tokens == 4
    assert index.match(EVERYBODY, second).tokens == 0


def test_idle_blocks_are_not_part_of_the_peak():
    memory = one_group()
    index = PrefixIndex(memory)
    close(index, *read(index, TOKENS[:8]))
    close(index, *read(index, [1] * 8))

    assert memory.arena_peak_bytes == 2 * 128
    assert memory.used_bytes - memory.listeners.idle_bytes() == 0


def test_clear_leaves_nothing():
    index = PrefixIndex(one_group(), listener := Listener())
    close(index, *read(index, TOKENS))
    index.clear()

    assert (len(index), index.idle_bytes, listener.known) == (0, 0, {})
    assert not index.memory.cached_references
    index.memory.check()


# ---- windows and statistics --------------------------------------------------------------------


def test_a_window_lane_starts_with_what_its_window_still_sees():
    """Found at 16: the next query is at 16 and sees positions 11 on; pages 0 and 4 go back."""
    index = PrefixIndex(with_groups(FULL, WINDOW))
    read(index, TOKENS)

    lease = index.match(EVERYBODY, TOKENS)
    row = index.start(lease)
    grow(index.memory, row, 1)

    window = index.memory.tables["window"]
    assert lease.tokens == 16
    assert window.slot_positions(row, 0).tolist() == list(range(8, 17))
    index.memory.check()


def test_a_block_whose_window_pages_have_returned_is_not_published():
    memory = with_groups(FULL, WINDOW)
    index = PrefixIndex(memory)
    lease = index.match(EVERYBODY, TOKENS)
    row = memory.start()
    for _ in range(20):  # published too late, a token at a time
        grow(memory, row, 1)

    index.publish(lease, row, TOKENS)

    assert (lease.nodes, lease.publishes, len(index)) == ([], False, 0)


def test_statistics_are_found_only_where_they_were_kept():
    memory = with_groups(FULL, SUMS)
    index = PrefixIndex(memory)
    row, lease = read(index, TOKENS[:8])
    write_lane(memory, row, 0, name="sums")
    index.snapshot(lease, row)
    grow(memory, row, 4)
    index.publish(lease, row, TOKENS[8:12])

    assert index.match(EVERYBODY, TOKENS).tokens == 12
    other = index.match(EVERYBODY, TOKENS, statistics=OF_SUMS)
    child = index.start(other, statistics=OF_SUMS)

    assert other.tokens == 8
    assert keys(memory, child, name="sums") == list(range(8))
    table = memory.tables["sums"]
    assert not set(table.row_pages(child)) & set(table.row_pages(row))
    memory.check()


def test_a_snapshot_without_room_is_left_out():
    memory = with_groups(FULL, SUMS, total_bytes=4 * 256)
    index = PrefixIndex(memory)
    row, lease = read(index, TOKENS[:8])

    index.snapshot(lease, row)

    assert lease.nodes[-1].statistics == {}
    assert index.match(EVERYBODY, TOKENS, statistics=OF_SUMS).nodes == []


def test_blocks_that_nobody_uses_make_way_for_a_snapshot():
    """Two pages of 256 B are wanted and 384 B free: pages of the old chain, of 128 B each, go."""
    memory = with_groups(FULL, SUMS, total_bytes=6 * 256)
    index = PrefixIndex(memory)
    lease = index.match(EVERYBODY, [9] * 13)
    old = memory.start(())
    grow(memory, old, 13)
    index.publish(lease, old, [9] * 13)
    close(index, old, lease)
    row, lease = read(index, TOKENS[:8])
    assert (memory.free_bytes, index.idle_bytes) == (384, 3 * 128)

    index.snapshot(lease, row)

    assert index.match(EVERYBODY, TOKENS, statistics=OF_SUMS).tokens == 8
    assert index.match(EVERYBODY, [9] * 13).tokens < 12
    memory.check()


def test_a_snapshot_for_which_there_is_no_room_drops_nothing():
    """384 B free and 128 B of an old chain: less than the copies take."""
    memory = with_groups(FULL, SUMS, total_bytes=7 * 256)
    index = PrefixIndex(memory)
    lease = index.match(EVERYBODY, [9] * 5)
    old = memory.start(())
    grow(memory, old, 5)
    index.publish(lease, old, [9] * 5)
    close(index, old, lease)
    row, lease = read(index, TOKENS[:12])
    copies_bytes = 3 * 256
    assert memory.free_bytes + index.idle_bytes < copies_bytes

    index.snapshot(lease, row)

    assert lease.nodes[-1].statistics == {}
    assert index.match(EVERYBODY, [9] * 5).tokens == 4


def test_copies_of_statistics_can_be_had_again_with_the_blocks_that_have_them():
    memory = with_groups(FULL, SUMS)
    index = PrefixIndex(memory)
    row, lease = read(index, TOKENS[:8])
    index.snapshot(lease, row)
    close(index, row, lease)

    assert index.idle_bytes == memory.used_bytes == 2 * 128 + 2 * 256
    lease = index.match(EVERYBODY, TOKENS, statistics=OF_SUMS)
    assert (lease.tokens, index.idle_bytes) == (8, 0)
    index.release(lease)
    assert index.idle_bytes == 2 * 128 + 2 * 256

    index.clear()
    assert (index.idle_bytes, memory.used_bytes) == (0, 0)


def test_numbers_of_tokens_asked_for_and_found():
    index = PrefixIndex(one_group())
    for _ in range(2):
        lease = index.match(EVERYBODY, TOKENS)
        index.count(len(TOKENS), lease)
        row = index.start(lease) if lease.nodes else index.memory.start()
        grow(index.memory, row, len(TOKENS) - lease.tokens)
        index.publish(lease, row, TOKENS[lease.tokens :])

    assert (index.queried_tokens, index.hit_tokens) == (40, 16)
