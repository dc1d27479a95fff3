"""Attention with offloaded prefixes equals attention with all pages in the arena.

Two memories run the same steps. In one, prefixes are offloaded and loaded at random, and all
staging is filled with NaN after every step: attended pages must have been prefetched.
"""

import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, HostMemoryFull
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kv.sharing import fork, reference_pages, release_reference, start_from_references
from quire.kv.step import StepAttention
from quire.layout.layout import SLOTS
from quire.offload.kv.prefix_splits import (
    OffloadedPrefix,
    PrefixSplits,
    Share,
    SplitLimits,
    divide_prefixes,
)
from quire.offload.split import COPY, MeasuredRates, OffloadRates, pipelined_split
from quire.offload.step_log import (
    ATTEND,
    HOST_ATTEND,
    KV_IN,
    LAYER,
    PROJECT,
    X_IN,
    ClockMarks,
    Timed,
)
from quire.offload.swap.transfer import ThreadTransferWorker
from support.lanes import grown_step
from support.offloaded_kv import (
    CPU,
    FULL_LAYERS,
    HEAD_DIM,
    MATH,
    MODEL,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAGE,
    SlowTransferWorker,
    make,
    poison,
)


class FailingTransferWorker:
    def submit(self, copy, num_bytes):
        lost = Future()
        lost.set_exception(OSError("the link failed"))
        return lost

    def marks(self):
        return ClockMarks()


class OneCopyFails(ThreadTransferWorker):
    number = 8  # the first copy of the last of 5 layers: two copies per layer

    def __init__(self):
        super().__init__()
        self.copies = []

    def submit(self, copy, num_bytes):
        number = len(self.copies)

        def fail_or_copy():
            if number == self.number:
                raise OSError("the link failed")
            time.sleep(0.2 if number > self.number else 0)
            copy()

        self.copies.append(super().submit(fail_or_copy, num_bytes))
        return self.copies[-1]


def step(kv, tokens, seed):
    """Grow rows and compute attention in every layer: [layer, token, head, head_dim]."""
    attention, _, counts = grown_step(kv, tokens)
    generator = torch.Generator().manual_seed(seed)
    out = []
    for layer in range(MODEL.num_layers):
        query, key, value = (
            torch.randn(int(counts.sum()), heads, HEAD_DIM, generator=generator)
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        out.append(attention.attend(layer, MATH, query, key, value))
    return torch.stack(out)


def page_bytes(kv):
    """Bytes of used pages, without waste at slab borders."""
    return sum(pool.used_bytes for pool in kv.memory.pools.values())


@pytest.mark.parametrize(
    ("codec", "backend"),
    [
        ("float32", GatheredAttention),
        ("int8/int4", GatheredAttention),
        ("int4+sinks=2+residual=6+plain=float32", GatheredAttention),
        ("int4_page/int8+plain=float32", GatheredAttention),
        ("float32", ReferenceAttention),
    ],
)
@settings(max_examples=4)
@given(seed=st.integers(0, 10_000), evicting=st.booleans())
def test_attention_is_equal_with_offloaded_prefixes(codec, backend, seed, evicting):
    make_backend = ReferenceAttention if backend is ReferenceAttention else lambda: backend(CPU)
    offloaded, whole = (
        make(codec, backend=make_backend(), transfer_worker=transfer_worker, evicting=evicting)
        for transfer_worker in (SlowTransferWorker(), None)
    )
    rng, prefixes = np.random.default_rng(seed), offloaded.offload.prefixes
    rows = [offloaded.memory.start() for _ in range(3)]
    assert rows == [whole.memory.start() for _ in range(3)]
    for number in range(6):
        chosen = [row for row in rows if rng.random() < 0.8] or rows
        tokens = {row: int(rng.choice([1, 1, 3, 9])) for row in chosen}
        found, expected = (step(kv, tokens, seed + number) for kv in (offloaded, whole))
        assert torch.equal(found, expected)
        poison(offloaded)
        row = int(rng.choice(rows))
        length = int(offloaded.memory.lengths[row])
        if rng.random() < 0.7:
            tokens = int(rng.integers(length + 1)) if rng.random() < 0.5 else length
            before, gain = page_bytes(offloaded), prefixes.gain_bytes(row, tokens)
            prefixes.offload(row, tokens)
            assert page_bytes(offloaded) == before - gain
        row = int(rng.choice(rows))
        if rng.random() < 0.3:
            before = page_bytes(offloaded)
            freed = prefixes.restage(row, 1)
            assert page_bytes(offloaded) == before - freed
        if rng.random() < 0.3:
            before = page_bytes(offloaded)
            prefixes.restage(row, pack=True)
            assert page_bytes(offloaded) == before
        offloaded.memory.check()
    offloaded.memory.release(rows)
    offloaded.memory.check()
    assert not prefixes.rows
    assert not offloaded.memory.used_bytes
    assert not prefixes.pool.used_bytes


def test_offloaded_prefix_occupies_two_layers_of_staging():
    """24 tokens are 6 pages in each of 5 layers; 2 x 6 pages remain as staging."""
    kv = make()
    row = kv.memory.start()
    step(kv, {row: 24}, 0)
    each = kv.memory.tables["full"].group.page_class.page_bytes
    before = page_bytes(kv)

    gain = kv.offload.prefixes.gain_bytes(row, 24)
    moved = kv.offload.prefixes.offload(row, 24)

    assert gain == (FULL_LAYERS - SLOTS) * 6 * each
    assert moved == kv.offload.prefixes.pool.used_bytes == FULL_LAYERS * 6 * each
    assert page_bytes(kv) == before - gain
    assert kv.offload.prefixes.offload(row, 24) == 0
    kv.memory.check()


def test_halved_staging_holds_one_layer_at_a_time():
    """24 tokens are 6 pages in each of 5 layers; 6 pages remain as staging."""
    kv, whole = make(transfer_worker=SlowTransferWorker()), make()
    rows = [one.memory.start() for one in (kv, whole)]
    for one, row in zip((kv, whole), rows, strict=True):
        step(one, {row: 24}, 0)
    each = kv.memory.tables["full"].group.page_class.page_bytes
    before, held = page_bytes(kv), kv.memory.row_bytes(rows[0])
    kv.offload.prefixes.offload(rows[0], 24)

    freed = kv.offload.prefixes.restage(rows[0], 1)

    assert freed == (SLOTS - 1) * 6 * each
    assert page_bytes(kv) == before - (FULL_LAYERS - 1) * 6 * each
    assert kv.memory.row_bytes(rows[0]) == held - (FULL_LAYERS - 1) * 6 * each
    assert kv.offload.prefixes.restage(rows[0], 1) == 0
    kv.memory.check()
    for number in range(2):
        poison(kv)
        both = zip((kv, whole), rows, strict=True)
        assert torch.equal(*(step(one, {row: 1}, number) for one, row in both))


def test_offload_to_full_host_memory_changes_nothing_and_otherwise_frees_pages():
    kv = make(host_bytes=FULL_LAYERS * 2 * 256)
    row = kv.memory.start()
    step(kv, {row: 24}, 0)
    before = page_bytes(kv)

    with pytest.raises(HostMemoryFull):
        kv.offload.prefixes.offload(row, 24)

    assert not kv.offload.prefixes.pool.used_bytes
    assert page_bytes(kv) == before
    kv.memory.check()
    assert kv.offload.prefixes.offload(row, 4)

    # the offloaded pages free memory for their own staging, and then for new tokens
    kv = make(sequences=1)
    row = kv.memory.start()
    while kv.memory.can_grow(np.array([row]), np.array([PAGE], dtype=np.int32)):
        step(kv, {row: PAGE}, 1)
    held = int(kv.memory.lengths[row])

    kv.offload.prefixes.offload(row, held)
    step(kv, {row: PAGE}, 2)

    assert int(kv.memory.lengths[row]) == held + PAGE
    kv.memory.check()


def test_shared_prefix_is_offloaded_without_changing_its_source():
    kv, whole = make(), make()
    cached_references = []
    for one in (kv, whole):
        source = one.memory.start()
        step(one, {source: 12}, 3)
        # no window page has been freed yet
        cached_references.append(reference_pages(one.memory, source, 0, 8))
    both = zip((kv, whole), cached_references, strict=True)
    rows = [start_from_references(one.memory, [reference]) for one, reference in both]

    assert kv.offload.prefixes.gain_bytes(rows[0], 8) > 0  # the reference is offloaded too
    kv.offload.prefixes.offload(rows[0], 8)

    for number in range(3):
        both = zip((kv, whole), rows, strict=True)
        assert torch.equal(*(step(one, {0: 1, row: 2}, number) for one, row in both))
        poison(kv)
    kv.memory.release(rows[:1])
    release_reference(kv.memory, cached_references[0])
    kv.memory.check()


def test_offload_covers_existing_slots_and_other_operations_are_rejected():
    kv = make(evicting=True)
    row = kv.memory.start()
    step(kv, {row: 12}, 4)
    kv.offload.prefixes.offload(row, 8)
    for operation in (
        lambda: reference_pages(kv.memory, row, 0, 8),
        lambda: kv.memory.truncate(row, 5),
    ):
        with pytest.raises(ConfigError, match=r"first 2 pages .* are in CPU memory; load them"):
            operation()
    kv.memory.check()

    # after one eviction, 11 slots fill 2 pages
    kv = make(evicting=True)
    row = kv.memory.start()
    step(kv, {row: 12}, 5)
    kv.memory.tables["full"].num_slots[row] -= 1

    kv.offload.prefixes.offload(row, 12)

    assert kv.memory.tables["full"].staged[row] == 2


def test_failed_prefetch_raises_in_the_step():
    kv = make(transfer_worker=FailingTransferWorker())
    row = kv.memory.start()
    step(kv, {row: 12}, 7)
    kv.offload.prefixes.offload(row, 8)

    with pytest.raises(OSError, match="the link failed"):
        step(kv, {row: 1}, 8)
    kv.memory.release([row])
    kv.memory.check()


def test_other_copies_are_awaited_after_a_failed_copy():
    """A layer has one copy for prefixes with one staging slot and one for the others."""
    kv = make(transfer_worker=OneCopyFails())
    rows = [kv.memory.start() for _ in range(2)]
    for row in rows:
        step(kv, {row: 16}, 9)
        kv.offload.prefixes.offload(row, 16)
    kv.offload.prefixes.restage(rows[0], 1)

    with pytest.raises(OSError, match="the link failed"):
        step(kv, dict.fromkeys(rows, 1), 10)
    kv.memory.release(rows)

    copies = kv.offload.transfer_worker.copies
    assert len(copies) == 2 * FULL_LAYERS + 1  # one for the next step
    assert all(copy.done() for copy in copies)


def test_copies_of_an_aborted_step_end_before_its_pages_are_reused():
    """The copy for a layer that was not computed completes before its pages are freed."""
    kv = make(transfer_worker=SlowTransferWorker())
    row = kv.memory.start()
    step(kv, {row: 16}, 9)
    kv.offload.prefixes.offload(row, 16)
    kv.memory.grow(np.array([row]), np.array([1], dtype=np.int32))
    StepAttention(kv, np.array([row]), np.array([1], dtype=np.int32))  # no layer is computed

    kv.memory.release([row])
    kv.store.arena.fill_(0x11)
    time.sleep(0.02)

    assert (kv.store.arena == 0x11).all()


AHEAD = 2  # layers of the next step


class Counting(ThreadTransferWorker):
    num_copies = 0

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
    before = kv.offload.transfer_worker.num_copies
    out = step(kv, dict.fromkeys(rows, 1), seed)
    return out, kv.offload.transfer_worker.num_copies - before


def test_first_layers_are_loaded_once_for_two_steps_unless_the_split_changes():
    offloaded, whole = offloaded_and_whole()

    for number, expected in enumerate((FULL_LAYERS + AHEAD, FULL_LAYERS, FULL_LAYERS)):
        out, copies = copies_of(offloaded, [0], number)
        assert copies == expected
        assert torch.equal(out, step(whole, {0: 1}, number))
    offloaded, whole = offloaded_and_whole(rows=2)
    for number, rows in enumerate(([0, 1], [1], [0], [0, 1])):  # rows that skip a step find them
        out, _ = copies_of(offloaded, rows, number)
        assert torch.equal(out, step(whole, dict.fromkeys(rows, 1), number))

    # pages that a step left out are not taken for loaded in the step after it
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


# ---- splits --------------------------------------------------------------------------------------


KV_BYTES, X_BYTES, PAGE_TOKENS, COLUMNS, LAYERS = 100, 50, 4, 250, 8
TOKENS = PAGE_TOKENS * COLUMNS
PREFIXES = {0: OffloadedPrefix(COLUMNS, known=range(COLUMNS), on_host=True)}
RECOMPUTE_S, OTHER_S = 3e-6, 4e-4


def simulated_step(recomputed, link_bytes_per_s):
    """The timeline of a step: the link is two staging slots ahead of the device."""
    timed, layer_ends = [], []
    link = device = 0.0
    for layer in range(LAYERS):
        start = max(link, layer_ends[layer - 2] if layer > 1 else 0.0)
        x_end = start + recomputed * X_BYTES / link_bytes_per_s
        link = x_end + (TOKENS - recomputed) * KV_BYTES / link_bytes_per_s
        started = max(device, x_end)
        ready = max(started + recomputed * RECOMPUTE_S, link)
        layer_ends.append(ready + OTHER_S / 2)
        device = layer_ends[-1] + OTHER_S / 2
        timed += [
            Timed(X_IN, layer, recomputed, recomputed * X_BYTES, start, x_end),
            Timed(KV_IN, layer, TOKENS - recomputed, (TOKENS - recomputed) * KV_BYTES, x_end, link),
            Timed(PROJECT, layer, recomputed, 0, started, started + recomputed * RECOMPUTE_S),
            Timed(ATTEND, layer, TOKENS, 0, ready, layer_ends[-1]),
            Timed(LAYER, layer, 1, 0, layer_ends[-1], device),
        ]
    return timed


def make_splits(copy_call_s=0.0, **limits):
    prior = {COPY: (copy_call_s, 5e-8), PROJECT: (0.0, RECOMPUTE_S), HOST_ATTEND: (0.0, 5e-6)}
    return PrefixSplits(
        MeasuredRates(prior, kv_bytes=KV_BYTES, x_bytes=X_BYTES),
        page_tokens=PAGE_TOKENS,
        num_layers=LAYERS,
        requested=SplitLimits(**{"max_recomputed": TOKENS} | limits),
    )


def best(link_bytes_per_s):
    kv_s, x_s = KV_BYTES / link_bytes_per_s, X_BYTES / link_bytes_per_s
    rates = OffloadRates(kv_s=kv_s, x_s=x_s, recompute_s=RECOMPUTE_S, other_s=OTHER_S)
    return pipelined_split(rates, TOKENS)


@pytest.mark.parametrize(("before", "after"), [(40e6, 20e6), (20e6, 40e6)])
def test_split_follows_a_link_speed_change_within_ten_steps(before, after):
    splits = make_splits()
    found = []
    for step in range(40):
        splits.divide(PREFIXES, rows=1)
        found.append(splits.recomputed_tokens)
        splits.learn(simulated_step(splits.recomputed_tokens, before if step < 30 else after))
    assert abs(best(before) - best(after)) > 0.1 * TOKENS
    assert abs(found[29] - best(before)) <= 0.05 * TOKENS
    assert abs(found[39] - best(after)) <= 0.05 * TOKENS


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [
        *(({"recomputed": x}, x * TOKENS - PAGE_TOKENS, x * TOKENS) for x in (0.0, 0.25, 1.0)),
        ({"recomputed": 1.0, "max_recomputed": 100}, 99, 100),
        ({"copy_call_s": 1e-3}, -1, 0),  # the fixed times of more copies cost more than it gains
    ],
)
def test_requested_fraction_is_recomputed_within_its_limits(limits, least, most):
    splits = make_splits(**limits)
    splits.divide(PREFIXES, rows=1)
    assert least < splits.recomputed_tokens <= most


def test_splits_follow_rates_and_lengths_and_are_kept_for_small_gains():
    """x = k: T = S / (1 / k + 1 / u), so a = S k / (k + u) with k = u = 5 us."""
    splits = make_splits(recomputed=0.0, max_recomputed=0, host=None)
    shares = splits.divide(PREFIXES, rows=1)

    assert splits.host_tokens == TOKENS / 2
    assert shares[0].host == range(COLUMNS // 2, COLUMNS)
    splits.divide({0: OffloadedPrefix(COLUMNS + 1, on_host=True)}, rows=1)
    assert splits.host_tokens == TOKENS / 2

    splits = make_splits()
    splits.divide(PREFIXES, rows=1)
    first = splits.recomputed_tokens
    prior = {COPY: (0.0, 5e-8), PROJECT: (0.0, RECOMPUTE_S * 1.01)}
    splits.rates = MeasuredRates(prior, kv_bytes=KV_BYTES, x_bytes=X_BYTES)
    splits.divide(PREFIXES, rows=1)

    assert splits.recomputed_tokens == first
    splits.divide({0: OffloadedPrefix(COLUMNS // 2, known=range(COLUMNS // 2))}, rows=1)
    assert splits.recomputed_tokens == pytest.approx(first / 2, abs=PAGE_TOKENS)


@st.composite
def offloaded_prefixes(draw):
    prefixes = {}
    for row in range(draw(st.integers(1, 4))):
        columns = draw(st.integers(1, 9))
        first = draw(st.integers(0, columns))
        known = range(first, draw(st.integers(first, columns)))
        prefixes[row] = OffloadedPrefix(columns, known=known, on_host=draw(st.booleans()))
    return prefixes


@given(prefixes=offloaded_prefixes(), recomputed=st.integers(0, 200), host=st.integers(0, 200))
def test_every_page_is_in_exactly_one_share(prefixes, recomputed, host):
    share = Share(recomputed=range(2, 5), host=range(7, 9))  # runs are clipped to the range
    runs = [list(share.transferred(*span)) for span in ((0, 9), (3, 6), (2, 5))]
    assert runs == [[range(2), range(5, 7)], [range(5, 6)], []]
    shares = divide_prefixes(prefixes, recomputed, host, PAGE_TOKENS)

    known = sum(len(prefix.known) for prefix in prefixes.values()) * PAGE_TOKENS
    found = sum(len(share.recomputed) for share in shares.values()) * PAGE_TOKENS
    assert min(recomputed, known) - PAGE_TOKENS < found <= min(recomputed, known)
    assert sum(len(share.host) for share in shares.values()) * PAGE_TOKENS <= host
    for row, prefix in prefixes.items():
        share = shares[row]
        columns = [*share.recomputed, *share.host]
        columns += [c for run in share.transferred(0, prefix.columns) for c in run]
        assert sorted(columns) == list(range(prefix.columns))
        assert set(share.recomputed) <= set(prefix.known)
        assert prefix.on_host or not share.host
