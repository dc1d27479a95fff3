"""Offloaded prefixes that are partly recomputed from X, transferred, or attended on the CPU.

Two memories run the same steps, as in `test_offloaded_prefixes`. Staging and X are NaN after every
step, copies are delayed, and each step divides its prefixes at random. Evictions move slots and X.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.codecs.registry import make_codec
from quire.config.kv_config import parse_activation_codec
from quire.errors import ConfigError, UnknownName
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.flat_batch import FlatBatch
from quire.kv.paged_kv import PagedKV
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.layout import SLOTS
from quire.models.adapter import TransformersDecoder
from quire.offload.kv.build import can_recompute
from quire.offload.kv.cpu_attention import CPUAttention, can_attend_in_parts
from quire.offload.kv.offloader import RowRequests
from quire.offload.kv.prefix_splits import PrefixSplits, divide_prefixes
from quire.offload.recompute.activation_allocator import ActivationAllocator
from quire.offload.recompute.activation_store import ActivationCodec, ActivationStore
from quire.offload.recompute.kv_recompute import KVRecompute
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

HIDDEN, WIDTH = MODEL.hidden_size, NUM_KV_HEADS * HEAD_DIM
LAYERS = (1, 3, 4, 5)  # full-attention layers, without layer 0


class Linear(TransformersDecoder):
    """Keys and values are products of X; keys depend on their position."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(MODEL.num_layers, 2, HIDDEN, WIDTH, generator=generator) / 6
        self.embedding = torch.randn(MODEL.vocab_size, HIDDEN, generator=generator)

    def keys_and_values(self, layer, inputs, positions, *, rope_variant=0):
        assert not inputs.isnan().any()
        key, value = (inputs @ self.weights[layer, side] for side in (0, 1))
        shape = (-1, NUM_KV_HEADS, HEAD_DIM)
        return (key + positions[:, None] * 0.01).view(shape), value.view(shape)

    def arrive_kv(self, layer):
        """All weights are there."""

    def first_layer(self, token_ids, positions, *, rope_variant=0):
        return self.keys_and_values(0, self.embedding[token_ids], positions)


class RowTokens(RowRequests):
    def __init__(self):
        self.tokens, self.until = {}, 1 << 30

    def token_ids(self, row, positions):
        return [self.tokens[row][p] for p in positions.tolist()]

    def rope_variant(self, row):
        return 0

    def inputs_until(self, row):
        return self.until


class RandomSplits(PrefixSplits):
    """Divides prefixes at random, from none to all of their tokens."""

    def __init__(self, seed):
        self.rng, self.timed, self.shares = np.random.default_rng(seed), [], {}

    def divide(self, prefixes, rows, batches=1):
        total = sum(prefix.columns for prefix in prefixes.values()) * PAGE
        recomputed, host = (int(self.rng.choice([0, total // 3, total])) for _ in range(2))
        self.shares = divide_prefixes(prefixes, recomputed, host, PAGE)
        return self.shares

    def learn(self, timed):
        self.timed.append(timed)


def kv_offload(kv, seed, *, blocks=64):
    """Give a memory a KV offload with KV recompute and CPU attention."""
    first = kv.offload
    groups = [table.group for table in kv.memory.tables.values()]
    recomputed = [group.name for group in groups if group.window is None and can_recompute(group)]
    allocator = ActivationAllocator(blocks, 2 * PAGE, PAGE)
    codec = ActivationCodec(None, HIDDEN, torch.float32)
    store = ActivationStore(allocator, LAYERS, codec, CPU)
    kv_recompute = KVRecompute(Linear(), store, RowTokens(), CPU, groups=recomputed)
    kv_recompute.chunk_tokens = 5  # chunks end inside pages
    in_parts = [group.name for group in groups if can_attend_in_parts(group)]
    offload = type(first)(
        kv.memory,
        first.prefixes,
        first.transfer_worker,
        splits=RandomSplits(seed),
        kv_recompute=kv_recompute,
        attention=CPUAttention(kv.memory, kv.store, kv.coded, first.prefixes, in_parts),
    )
    return PagedKV(kv.memory, kv.store, kv.backend, offload=offload)


def fix_split(kv, recomputed, host):
    """Divide all prefixes with these numbers of recomputed and CPU-attended tokens."""
    kv.offload.splits.divide = lambda prefixes, rows, batches: divide_prefixes(
        prefixes, recomputed, host, PAGE
    )


def step(kv, model, known, tokens, seed):
    """Grow rows and compute attention in every layer: [layer, token, head, head_dim]."""
    attention, order, counts = grown_step(kv, tokens)
    starts = kv.memory.lengths[order] - counts
    generator = torch.Generator().manual_seed(seed)
    ids, positions = [], []
    for row, start, count in zip(order, starts.tolist(), counts.tolist(), strict=True):
        held = known.setdefault(row, [])
        more = torch.randint(MODEL.vocab_size, (count,), generator=generator).tolist()
        known[row] = [*held[:start], *more]
        ids, positions = ids + more, positions + list(range(start, start + count))
    out, token_positions = [], torch.tensor(positions)
    for layer in range(MODEL.num_layers):
        inputs = torch.randn(len(ids), HIDDEN, generator=generator)
        if layer == 0:
            inputs = model.embedding[torch.tensor(ids)]
        if attention.wants_inputs:
            attention.note_input(layer, inputs)
        query = torch.randn(len(ids), NUM_HEADS, HEAD_DIM, generator=generator)
        key, value = model.keys_and_values(layer, inputs, token_positions)
        out.append(attention.attend(layer, MATH, query, key, value))
    return torch.stack(out)


def poison_staging(kv):
    kv.offload.prefixes.use.finalize()
    poison(kv)
    kv_recompute = kv.offload.kv_recompute
    tokens = kv_recompute.staging_bytes // (SLOTS * kv_recompute.store.codec.row_bytes)
    kv_recompute.staging("full", tokens).fill_(0xFF)  # NaN as float32


def evict_random_tokens(memories, row, rng):
    slots = int(memories[0].memory.tables["full"].num_slots[row, 0])
    num_retained = int(rng.integers(1, slots + 1))
    keep = np.zeros((FULL_LAYERS, slots), dtype=bool)
    for lane in keep:
        lane[rng.permutation(slots)[:num_retained]] = True
    for kv in memories:
        commit_compaction(kv.memory, plan_compaction(kv.memory, "full", row, keep))


@pytest.mark.parametrize(("codec", "tolerance"), [("float32", 1e-5), ("int8+plain=float32", 2e-2)])
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), evicting=st.booleans(), until=st.sampled_from([13, 1 << 30]))
def test_attention_is_equal_for_all_divisions_of_a_prefix(codec, tolerance, seed, evicting, until):
    split = kv_offload(make(codec, transfer_worker=SlowTransferWorker(), evicting=evicting), seed)
    whole, rng = make(codec, evicting=evicting), np.random.default_rng(seed)
    model, known = Linear(), {}
    kv_recompute, prefixes = split.offload.kv_recompute, split.offload.prefixes
    kv_recompute.tokens.tokens, kv_recompute.tokens.until = known, until
    rows = [split.memory.start() for _ in range(3)]
    assert rows == [whole.memory.start() for _ in range(3)]
    for number in range(8):
        chosen = [row for row in rows if rng.random() < 0.8] or rows
        tokens = {row: int(rng.choice([1, 1, 3, 9])) for row in chosen}
        found, expected = (step(kv, model, known, tokens, seed + number) for kv in (split, whole))
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
        poison_staging(split)
        row = int(rng.choice(rows))
        if rng.random() < 0.7:
            prefixes.offload(row, int(split.memory.lengths[row]))
        if evicting and rng.random() < 0.3 and split.memory.lengths[row]:
            evict_random_tokens((split, whole), row, rng)
        split.memory.check()
        kv_recompute.store.allocator.check()
    split.memory.release(rows)
    assert not kv_recompute.store.used_bytes
    assert not prefixes.pool.used_bytes


def test_prefixes_are_recomputed_attended_or_transferred_without_x():
    """In both cases no KV is transferred."""
    total = 24
    for recomputed, host in ((total, 0), (0, total)):
        kv, model, known = kv_offload(make(), 0), Linear(), {}
        kv.offload.kv_recompute.tokens.tokens = known
        fix_split(kv, recomputed, host)
        row = kv.memory.start()
        step(kv, model, known, {row: total + 1}, 3)
        kv.offload.prefixes.offload(row, total)
        step(kv, model, known, {row: 1}, 4)

        assert kv.offload.kv_recompute.num_recomputed == recomputed * FULL_LAYERS
        assert kv.offload.attention.num_attended == host * FULL_LAYERS
        one = np.array([row]), np.array([1], dtype=np.int32)
        kv.offload.step(FlatBatch.of(*one, kv.store.device))
        assert not [t for t in kv.offload.splits.timed[-1] if t.kind == "KV in"]

    kv, model, known = kv_offload(make(), 0, blocks=1), Linear(), {}
    kv.offload.kv_recompute.tokens.tokens = known
    fix_split(kv, 1000, 0)
    row = kv.memory.start()
    step(kv, model, known, {row: 25}, 3)
    kv.offload.prefixes.offload(row, 24)
    step(kv, model, known, {row: 1}, 4)
    assert kv.offload.kv_recompute.num_recomputed == 2 * PAGE * FULL_LAYERS


class FailingTransferWorker(ThreadTransferWorker):
    def submit(self, copy, num_bytes):
        def lost():
            raise OSError("the link failed")

        return super().submit(lost, num_bytes)


@pytest.mark.parametrize("recomputed_pages", [0, 2])
def test_failed_copy_raises_and_leaves_no_transfer_in_flight(recomputed_pages):
    kv, model, known = kv_offload(make(transfer_worker=FailingTransferWorker()), 0), Linear(), {}
    kv.offload.kv_recompute.tokens.tokens = known
    fix_split(kv, recomputed_pages * PAGE, 0)
    row = kv.memory.start()
    step(kv, model, known, {row: 12}, 3)
    kv.offload.prefixes.offload(row, 8)

    with pytest.raises(OSError, match="the link failed"):
        step(kv, model, known, {row: 1}, 4)
    kv.memory.release([row])
    kv.memory.check()
    kv.offload.kv_recompute.store.allocator.check()


BLOCK = 2 * PAGE


@settings(max_examples=60)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["note"] * 3 + ["cut", "forget"]), st.integers(0, 2), st.integers(1, 13)
        ),
        max_size=30,
    ),
    until=st.integers(0, 60),
)
def test_known_inputs_are_at_their_recorded_slots(actions, until):
    """Compared with a record of the location of every slot."""
    allocator, length, places = ActivationAllocator(7, BLOCK, PAGE), {}, {}
    for kind, row, number in actions:
        held = length.get(row, 0)
        if kind == "note":
            for segment in allocator.note(row, held, number, until):
                for i in range(segment.tokens):
                    places[row, segment.start + i] = (segment.block, segment.offset + i)
            length[row] = held + number
        elif kind == "cut":
            length[row] = min(held, number)
            allocator.cut(row, length[row])
        else:
            length.pop(row, None)
            allocator.forget([row])
        allocator.check()
        for each in length:
            known = allocator.known(each)
            assert known.stop <= max(min(until, length[each]), known.start)
            assert known.start % PAGE == 0
            slot = known.start
            for segment in allocator.segments(each, known.start, known.stop) if known else ():
                assert segment.offset + segment.tokens <= BLOCK
                for i in range(segment.tokens):
                    assert places[each, slot + i] == (segment.block, segment.offset + i)
                slot += segment.tokens
            assert slot == max(known.stop, known.start) or not known


def test_inputs_start_at_a_page_after_a_cached_prefix_and_end_if_no_block_is_free():
    allocator = ActivationAllocator(4, BLOCK, PAGE)
    assert [s.start for s in allocator.note(0, 5, 9, 100)] == [8]
    assert allocator.known(0) == range(8, 14)

    allocator = ActivationAllocator(2, BLOCK, PAGE)
    allocator.note(0, 0, 30, 100)
    assert allocator.known(0) == range(2 * BLOCK)
    assert allocator.note(1, 0, 4, 100) == []
    assert allocator.known(1) == range(0)
    assert allocator.used_blocks == allocator.peak_blocks == 2


ONE_BY_ONE = [n for n, spec in CODECS.items() if not spec.per_page and not spec.constants]
VECTOR = 192  # three vectors of 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", *ONE_BY_ONE])
def test_decoded_rows_equal_the_codecs_decoded_vectors(name, dtype):
    codec = ActivationCodec(parse_activation_codec(name), VECTOR, dtype)
    inputs = torch.randn(7, VECTOR, generator=torch.Generator().manual_seed(0)).to(dtype)

    rows = codec.encode(inputs)

    assert rows.dtype == torch.uint8
    assert rows.shape == (7, codec.row_bytes)
    expected = inputs
    if name != "none":
        plain = make_codec(codec_spec(name), 64)
        vectors = inputs.float().view(7, 3, 64)
        expected = plain.decode(plain.encode(vectors)).view(7, VECTOR).to(dtype)
    assert torch.equal(codec.decode(rows), expected)
    assert torch.equal(codec.decode(rows[2:5]), expected[2:5])


def test_row_bytes_by_codec_and_codecs_that_are_not_per_token():
    """int8: 192 codes, three float16 scales; int4: 96 bytes, scales and zeros of three groups."""
    expected = {"none": 2 * 192, "int8": 192 + 3 * 2, "int4": 96 + 3 * 4}
    for name, num_bytes in expected.items():
        codec = ActivationCodec(parse_activation_codec(name), VECTOR, torch.bfloat16)
        assert codec.row_bytes == num_bytes
    for name in ("int4_page", "kivi4", "int8/int4"):
        with pytest.raises((ConfigError, UnknownName)):
            parse_activation_codec(name)
