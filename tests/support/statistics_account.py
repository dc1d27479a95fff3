"""Rows with attention statistics, and a plain account of them, token by token in float64."""

import ctypes
from dataclasses import replace

import numpy as np
import torch

from quire.kernels.backend import AttentionMath, HeadBuffers
from quire.kernels.native.library import load_library
from quire.kernels.reference_backend import ReferenceAttention
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.paged_kv import allocate_kv
from quire.kv.step import StepAttention
from quire.layout.layout import layout_for, statistics_used
from quire.layout.model import LayerSpec
from quire.layout.statistics import AttentionSum, LowAttentionCount, SquareSum
from support.model_specs import small_spec

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, WINDOW = 6, 2, 8, 4, 5
GROUP = NUM_HEADS // NUM_KV_HEADS
HEADS = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "hidden_size": 48}
MODEL = small_spec(None, WINDOW, None, head_dim=HEAD_DIM, value_dim=VALUE_DIM, **HEADS)
FULL_LAYERS = (0, 2)
SHARED = replace(MODEL, layers=(*MODEL.layers[:2], LayerSpec(source=0)))
"""The same with one lane group of both full layers: layer 2 reads the lanes of layer 0."""
MATH = AttentionMath(scale=0.6)


class PositionShift:
    """A stand-in for RoPE that adds a term proportional to the position."""

    def rotate(self, x, positions):
        return x + 0.1 * positions[:, None, None]

    def unrotate(self, rotated, positions):
        return rotated - 0.1 * positions[:, None, None]

    def rotate_pre_rope(self, pre_rope, positions):
        return pre_rope + 0.1 * positions[:, None, None]


def make_kv(statistics, *, backend=None, page_tokens=4, max_rows=6, model=MODEL, **options):
    options = {"codec": "float32", "evicting": True, "statistics": statistics} | options
    layout = layout_for(model, page_tokens=page_tokens, **options)
    total_bytes, backend = layout.smallest_sequence_bytes * 300, backend or ReferenceAttention()
    kv = allocate_kv(layout, total_bytes, max_rows, device=CPU, backend=backend)
    kv.store.arena.fill_(0xFF)  # NaN: detects reads of free or uncleared slots
    return kv


def start(kv, statistics):
    return kv.memory.start(statistics_used(kv.memory.layout, statistics))


class Sequence:
    """Queries before RoPE, keys and values of one sequence in every layer."""

    def __init__(self, tokens, seed=0):
        generator = torch.Generator().manual_seed(seed)
        shape = (MODEL.num_layers, tokens)
        self.raw = torch.randn(*shape, NUM_HEADS, HEAD_DIM, generator=generator)
        self.key = torch.randn(*shape, NUM_KV_HEADS, HEAD_DIM, generator=generator)
        self.value = torch.randn(*shape, NUM_KV_HEADS, VALUE_DIM, generator=generator)
        positions = torch.arange(tokens)
        self.query = torch.stack([PositionShift().rotate(q, positions) for q in self.raw])
        self.cosines = torch.rand(*shape, generator=generator)


def run_calls(layer):
    library = load_library()
    assert not library.write(ctypes.byref(layer.write), None)
    assert not library.attend(ctypes.byref(layer.attend), library.parallel_for, layer.num_threads)


def step(kv, chunks, math=MATH, *, chained=False):
    """Run a step over tokens [start, end) of {row: (sequence, start, end)}, or calls of a chain."""
    order = sorted(chunks, key=lambda row: chunks[row][2] - chunks[row][1] != 1)
    rows = np.array(order, dtype=np.int64)
    tokens = np.array([chunks[row][2] - chunks[row][1] for row in order], dtype=np.int32)
    kv.memory.grow(rows, tokens)
    attention = StepAttention(kv, rows, tokens)
    outputs, calls, heads = [], None, None
    if chained:
        dtype, count = next(iter(chunks.values()))[0].query.dtype, tokens.sum()
        heads = HeadBuffers(
            torch.empty(count, NUM_HEADS, HEAD_DIM, dtype=dtype),
            torch.empty(count, NUM_KV_HEADS, HEAD_DIM, dtype=dtype),
            torch.empty(count, NUM_KV_HEADS, VALUE_DIM, dtype=dtype),
            torch.empty(count, NUM_HEADS, VALUE_DIM, dtype=dtype),
        )
        calls = attention.chain([math] * MODEL.num_layers, heads)
    for layer in range(MODEL.num_layers):

        def flat(numbers, layer=layer):
            parts = ((chunks[row][0], slice(*chunks[row][1:])) for row in order)
            return torch.cat([getattr(own, numbers)[layer, tokens] for own, tokens in parts])

        query, key, value = map(flat, ("query", "key", "value"))
        if calls is not None:
            heads.query.copy_(query), heads.key.copy_(key), heads.value.copy_(value)
            run_calls(calls[layer])
            outputs.append(heads.out.clone())
            continue
        outputs.append(attention.attend(layer, math, query, key, value, PositionShift()))
        if attention.wants_residual_similarity:
            attention.note_residual_similarity(layer, flat("cosines"))
    return torch.stack(outputs)


def evict(kv, row, keep):
    commit_compaction(kv.memory, plan_compaction(kv.memory, "full", row, keep))
    held = kv.memory.tables["full"].num_slots[row]
    for group in kv.memory.layout.followers_of("full"):
        table = kv.memory.tables[group.name]
        if table.active[row] and (table.num_slots[row] != held).any():
            commit_compaction(kv.memory, plan_compaction(kv.memory, group.name, row, keep))


class Account:
    """Statistics of one KV head of one layer: {position: value} per statistic."""

    def __init__(self, sequence, layer, kv_head, math=MATH):
        self.sequence, self.layer, self.kv_head, self.math = sequence, layer, kv_head, math
        self.cached, self.numbers = [], {}

    def see(self, position, statistics):
        """Add the token at `position`; its query attends to all cached tokens."""
        self.cached.append(position)
        heads = slice(self.kv_head * GROUP, (self.kv_head + 1) * GROUP)
        query = self.sequence.query[self.layer, position, heads].double()
        keys = self.sequence.key[self.layer, self.cached, self.kv_head].double()
        logits = query @ keys.T * self.math.scale
        if self.math.softcap is not None:
            logits = self.math.softcap * torch.tanh(logits / self.math.softcap)
        if self.math.sinks is not None:
            logits = torch.cat([logits, self.math.sinks[heads, None].double()], dim=1)
        weights = logits.softmax(dim=1)[:, : len(self.cached)]
        for statistic in statistics:
            queries_seen = {
                "mean": weights.mean(0)[None],
                "max": weights.amax(0)[None],
                "sum": weights.sum(0)[None],
                "apart": weights,
            }[statistic.reduction]
            added = {
                AttentionSum: queries_seen,
                SquareSum: queries_seen.square(),
                LowAttentionCount: (queries_seen < 1 / len(self.cached) - 1e-12).double(),
            }[type(statistic)]
            values = self.numbers.setdefault(statistic, {})
            for cached, value in zip(self.cached, added.T, strict=True):
                values[cached] = values.get(cached, 0.0) + value

    def forget(self, positions):
        self.cached = [cached for cached in self.cached if cached not in positions]
        for values in self.numbers.values():
            for position in positions:
                values.pop(position, None)

    def by_position(self, statistic):
        """The statistic, [query heads or 1, slots], in order of position."""
        values = self.numbers[statistic]
        return torch.stack([values[position] for position in sorted(self.cached)], dim=1)


def accounts(sequence, math=MATH):
    return [Account(sequence, layer, head, math) for layer in FULL_LAYERS for head in range(2)]
