"""Bytes of pages by tenant: private, shared, public and idle pages."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.sharing import fork, reference_pages, start_from_references
from quire.layout.pages import LaneGroup
from quire.tenancy.accounts import bytes_by_tenant
from support.small_memory import grow, one_group, plain_class, started, with_groups

PAGE_BYTES = 128  # four tokens


def rows_with_a_prefix(memory):
    """The reference to a cached prefix of 8 tokens, and two rows that begin with it."""
    reference = reference_pages(memory, started(memory, 8), 0, 8)
    rows = [start_from_references(memory, [reference]) for _ in range(2)]
    for row in rows:
        grow(memory, row, 3)
    return reference, rows


def test_public_prefix_is_charged_to_no_tenant():
    memory = one_group(max_rows=8)
    reference, rows = rows_with_a_prefix(memory)
    pages = memory.cached_references[reference.key]

    public = bytes_by_tenant(memory, {"a": rows[:1], "b": rows[1:]}, {"public": [pages]})
    assert public == {"public": 2 * PAGE_BYTES, "a": PAGE_BYTES, "b": PAGE_BYTES}
    private = bytes_by_tenant(memory, {"a": rows[:1]}, {"a": [pages]})
    assert private == {"public": 0, "a": 3 * PAGE_BYTES}


def test_first_pages_of_a_row_can_be_public():
    memory = one_group(max_rows=8, num_lanes=2)
    _, rows = rows_with_a_prefix(memory)
    alone = started(memory, 8)  # no other row shares its pages: not a public prefix yet
    owned = {"a": [rows[0], alone], "b": rows[1:]}

    held = bytes_by_tenant(memory, owned, public_tokens={rows[0]: 7, alone: 8})

    first, second = 2 * PAGE_BYTES, 2 * PAGE_BYTES  # of both lanes; 7 tokens are one whole page
    assert held["public"] == first
    assert held["a"] == second + 2 * PAGE_BYTES + 4 * PAGE_BYTES
    assert held["b"] == 2 * PAGE_BYTES  # the prefix's second page is charged to a


def test_idle_prefix_is_charged_to_its_tenant():
    memory = one_group()
    row = started(memory, 8)
    reference = reference_pages(memory, row, 0, 8)
    memory.release([row])
    held = bytes_by_tenant(memory, {}, {"a": [memory.cached_references[reference.key]]})
    assert held == {"public": 0, "a": 2 * PAGE_BYTES}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 20), st.booleans()), max_size=6))
def test_bytes_by_tenant_add_up_to_the_used_pages(steps):
    """Compared with sets of page numbers."""
    groups = [
        LaneGroup(name="full", page_class=plain_class(), layers=(0, 1)),
        LaneGroup(name="wide", page_class=plain_class(head_dim=16), layers=(2,)),
    ]
    memory, rows = with_groups(*groups, max_rows=16), {}
    for tenant, tokens, forks in steps:
        row = memory.start()
        grow(memory, row, tokens)
        rows.setdefault(tenant, []).append(row)
        if forks:
            rows[tenant].append(fork(memory, row))

    held = bytes_by_tenant(memory, rows)

    for tenant, own in rows.items():
        pages = {
            (name, int(page))
            for name, table in memory.tables.items()
            for page in np.unique(table.pages[own])
            if page >= 0
        }
        size = sum(memory.tables[name].group.page_class.page_bytes for name, _ in pages)
        assert held[tenant] == size
    assert sum(held.values()) == sum(pool.used_bytes for pool in memory.pools.values())
