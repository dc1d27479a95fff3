"""Fronts of which any part is made again from X, carried, or attended to where it lies.

Two memories take the same steps, as in `test_hosted`; staging and X are NaN behind every step,
copies dawdle, and each step divides its fronts anew. Eviction moves slots, and X with them.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.step import PagedKV, StepAttention
from quire.offload.kv.cpu_attention import CPUAttention, can_attend_in_parts
from quire.offload.kv.prefix_splits import divide_prefixes
from quire.offload.recompute.activation_allocator import ActivationAllocator
from quire.offload.recompute.activation_store import ActivationCodec, ActivationStore
from quire.offload.recompute.kv_recompute import KVRecompute, can_recompute
from quire.offload.swap.transfer import ThreadTransferWorker
from unit.offload.kv.test_offloaded_prefixes import (
    CPU,
    FULL_LAYERS,
    HEAD_DIM,
    MATH,
    MODEL,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAGE,
    SlowCarrier,
    make,
    poison,
)

HIDDEN, WIDTH = MODEL.hidden_size, NUM_KV_HEADS * HEAD_DIM
LAYERS = (1, 3, 4, 5)  # of the group with full attention, the first left out


class Linear:
    """Keys and values are products of X; keys know their position."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(MODEL.num_layers, 2, HIDDEN, WIDTH, generator=generator) / 6
        self.embedding = torch.randn(MODEL.vocab_size, HIDDEN, generator=generator)

    def keys_and_values(self, layer, inputs, positions, *, rope_variant=0):
        assert not inputs.isnan().any()
        key, value = (inputs @ self.weights[layer, side] for side in (0, 1))
        shape = (-1, NUM_KV_HEADS, HEAD_DIM)
        return (key + positions[:, None] * 0.01).view(shape), value.view(shape)

    def first_layer(self, token_ids, positions, *, rope_variant=0):
        return self.keys_and_values(0, self.embedding[token_ids], positions)


class Known:
    """Tokens of rows."""

    def __init__(self):
        self.tokens, self.until = {}, 1 << 30

    def token_ids(self, row, positions):
        return [self.tokens[row][p] for p in positions.tolist()]

    def rope_variant(self, row):
        return 0

    def inputs_until(self, row):
        return self.until


class Anyhow:
    """Divides fronts as a seed says, none and all included."""

    def __init__(self, seed):
        self.rng, self.timed, self.shares = np.random.default_rng(seed), [], {}

    def divide(self, prefixes, rows):
        total = sum(front.columns for front in prefixes.values()) * PAGE
        made, host = (int(self.rng.choice([0, total // 3, total])) for _ in range(2))
        self.shares = divide_prefixes(prefixes, made, host, PAGE)
        return self.shares

    def learn(self, timed):
        self.timed.append(timed)


def kv_offload(kv, seed, *, blocks=64):
    """Let a memory make again and attend on the host."""
    first = kv.offload
    groups = [table.group for table in kv.memory.tables.values()]
    made = [group.name for group in groups if group.window is None and can_recompute(group)]
    store = ActivationStore(
        ActivationAllocator(blocks, 2 * PAGE, PAGE),
        LAYERS,
        ActivationCodec(None, HIDDEN, torch.float32),
        CPU,
    )
    kv_recompute = KVRecompute(Linear(), store, Known(), CPU)
    kv_recompute.chunk_tokens = 5  # ends inside of pages
    in_parts = [group.name for group in groups if can_attend_in_parts(group)]
    offload = type(first)(
        kv.memory,
        first.prefixes,
        first.transfer_worker,
        splits=Anyhow(seed),
        kv_recompute=kv_recompute,
        recomputed_groups=made,
        attention=CPUAttention(kv.memory, kv.store, kv.coded, first.prefixes, in_parts),
    )
    return PagedKV(kv.memory, kv.store, kv.backend, offload=offload)


def step(kv, model, known, tokens, seed):
    """Grow rows and attend in every layer: [layer, token, head, number]."""
    order = sorted(tokens, key=lambda row: tokens[row] != 1)
    rows = np.array(order, dtype=np.int64)
    counts = np.array([tokens[row] for row in order], dtype=np.int32)
    starts = kv.memory.lengths[rows].copy()
    kv.memory.grow(rows, counts)
    attention = StepAttention(kv, rows, counts)
    generator = torch.Generator().manual_seed(seed)
    ids, positions = [], []
    for row, start, count in zip(order, starts.tolist(), counts.tolist(), strict=True):
        held = known.setdefault(row, [])
        more = torch.randint(MODEL.vocab_size, (count,), generator=generator).tolist()
        known[row] = [*held[:start], *more]
        ids, positions = ids + more, positions + list(range(start, start + count))
    out, places = [], torch.tensor(positions)
    for layer in range(MODEL.num_layers):
        inputs = torch.randn(len(ids), HIDDEN, generator=generator)
        if layer == 0:
            inputs = model.embedding[torch.tensor(ids)]
        if attention.wants_inputs:
            attention.note_input(layer, inputs)
        query = torch.randn(len(ids), NUM_HEADS, HEAD_DIM, generator=generator)
        key, value = model.keys_and_values(layer, inputs, places)
        out.append(attention.attend(layer, MATH, query, key, value))
    return torch.stack(out)


def spoil(kv):
    """What a step staged is gone."""
    kv.offload.prefixes.use.finalize()
    poison(kv)
    for staging in kv.offload.kv_recompute._staging.values():
        staging.fill_(0xFF)  # NaN as float32


def lose(memories, row, rng):
    """Let a row lose tokens, as many in each layer, others in each."""
    slots = int(memories[0].memory.tables["full"].num_slots[row, 0])
    kept = int(rng.integers(1, slots + 1))
    keep = np.zeros((FULL_LAYERS, slots), dtype=bool)
    for lane in keep:
        lane[rng.permutation(slots)[:kept]] = True
    for kv in memories:
        plan = plan_compaction(kv.memory, "full", row, keep)
        commit_compaction(kv.memory, plan)


@pytest.mark.parametrize(("codec", "tolerance"), [("float32", 1e-5), ("int8+plain=float32", 2e-2)])
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), evicting=st.booleans(), until=st.sampled_from([13, 1 << 30]))
def test_however_a_front_is_divided_attention_is_the_same(codec, tolerance, seed, evicting, until):
    split = kv_offload(make(codec, transfer_worker=SlowCarrier(), evicting=evicting), seed)
    whole, rng, model, known = (
        make(codec, evicting=evicting),
        np.random.default_rng(seed),
        Linear(),
        {},
    )
    kv_recompute, prefixes = split.offload.kv_recompute, split.offload.prefixes
    kv_recompute.tokens.tokens, kv_recompute.tokens.until = known, until
    rows = [split.memory.start() for _ in range(3)]
    assert rows == [whole.memory.start() for _ in range(3)]
    for number in range(8):
        chosen = [row for row in rows if rng.random() < 0.8] or rows
        tokens = {row: int(rng.choice([1, 1, 3, 9])) for row in chosen}
        found, expected = (step(kv, model, known, tokens, seed + number) for kv in (split, whole))
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
        spoil(split)
        row = int(rng.choice(rows))
        if rng.random() < 0.7:
            prefixes.offload(row, int(split.memory.lengths[row]))
        elif row in prefixes.rows:
            prefixes.load_back(row)
        if (
            evicting
            and rng.random() < 0.3
            and row not in prefixes.rows
            and split.memory.lengths[row]
        ):
            lose((split, whole), row, rng)
        split.memory.check()
        kv_recompute.store.allocator.check()
    split.memory.release(rows)
    assert not kv_recompute.store.used_bytes
    assert not prefixes.pool.used_bytes


def test_all_of_a_front_can_be_made_again_or_attended_to_on_the_host():
    """And what there is no X of is carried."""
    total = 24
    for made, host in ((total, 0), (0, total)):
        kv, model, known = kv_offload(make(), 0), Linear(), {}
        kv.offload.kv_recompute.tokens.tokens = known
        kv.offload.splits.divide = lambda prefixes, rows, made=made, host=host: divide_prefixes(
            prefixes, made, host, PAGE
        )
        row = kv.memory.start()
        step(kv, model, known, {row: total + 1}, 3)
        kv.offload.prefixes.offload(row, total)
        step(kv, model, known, {row: 1}, 4)

        assert kv.offload.kv_recompute.num_recomputed == made * FULL_LAYERS
        assert kv.offload.attention.num_attended == host * FULL_LAYERS
        kv.offload.step(kv.flat_batch(np.array([row]), np.array([1], dtype=np.int32)))
        transferred = [t for t in kv.offload.splits.timed[-1] if t.kind == "KV in"]
        assert not transferred


def test_without_room_for_x_all_is_carried():
    kv, model, known = kv_offload(make(), 0, blocks=1), Linear(), {}
    kv.offload.kv_recompute.tokens.tokens = known
    kv.offload.splits.divide = lambda prefixes, rows: divide_prefixes(prefixes, 1000, 0, PAGE)
    row = kv.memory.start()
    step(kv, model, known, {row: 25}, 3)
    kv.offload.prefixes.offload(row, 24)
    step(kv, model, known, {row: 1}, 4)

    assert kv.offload.kv_recompute.num_recomputed == 2 * PAGE * FULL_LAYERS


class Failing(ThreadTransferWorker):
    """Loses copies of one kind."""

    def submit(self, copy, num_bytes):
        def lost():
            raise OSError("the link is gone")

        return super().submit(lost, num_bytes)


@pytest.mark.parametrize("made", [0, 1])
def test_a_copy_that_fails_is_told_and_nothing_is_left_under_way(made):
    kv, model, known = kv_offload(make(transfer_worker=Failing()), 0), Linear(), {}
    kv.offload.kv_recompute.tokens.tokens = known
    kv.offload.splits.divide = lambda prefixes, rows: divide_prefixes(prefixes, made * 8, 0, PAGE)
    row = kv.memory.start()
    step(kv, model, known, {row: 12}, 3)
    kv.offload.prefixes.offload(row, 8)

    with pytest.raises(OSError, match="the link is gone"):
        step(kv, model, known, {row: 1}, 4)
    kv.memory.release([row])
    kv.memory.check()
    kv.offload.kv_recompute.store.allocator.check()
