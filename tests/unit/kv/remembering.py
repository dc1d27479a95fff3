"""Rows that remember things, and a plain account of what they should: token by token, float64."""

import numpy as np
import torch

from quire.kernels.backend import AttentionMath
from quire.kernels.reference_backend import ReferenceAttention
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.step import StepAttention, allocate_kv
from quire.layout.layout import layout_for, statistics_used
from quire.layout.model import LayerSpec, ModelSpec
from quire.layout.statistics import AttentionSum, LowAttentionCount, SquareSum

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOW = 6, 2, 8, 5
GROUP = NUM_HEADS // NUM_KV_HEADS
MODEL = ModelSpec(
    architecture="llama",
    num_layers=3,
    num_heads=NUM_HEADS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    hidden_size=48,
    intermediate_size=64,
    vocab_size=128,
    max_positions=512,
    tied_embeddings=False,
    gated_mlp=True,
    layers=(LayerSpec(), LayerSpec(window=WINDOW), LayerSpec()),
)
FULL_LAYERS = (0, 2)
MATH = AttentionMath(scale=0.6)


class Turning:
    """Stands in for RoPE: adds something that depends on the position."""

    def rotate(self, x, positions):
        return x + 0.1 * positions[:, None, None]

    def unrotate(self, rotated, positions):
        return rotated - 0.1 * positions[:, None, None]

    def move(self, still, positions):
        return still + 0.1 * positions[:, None, None]


def make_kv(
    statistics, *, backend=None, heads_apart=False, page_tokens=4, max_rows=6, codec="float32"
):
    layout = layout_for(
        MODEL,
        codec=codec,
        page_tokens=page_tokens,
        evicting=True,
        heads_apart=heads_apart,
        statistics=statistics,
    )
    total_bytes, backend = layout.smallest_sequence_bytes * 300, backend or ReferenceAttention()
    kv = allocate_kv(layout, total_bytes, max_rows, device=CPU, backend=backend)
    kv.store.arena.fill_(0xFF)  # NaN: a free slot that is read, or not cleared, shows
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
        self.value = torch.randn(*shape, NUM_KV_HEADS, HEAD_DIM, generator=generator)
        places = torch.arange(tokens)
        self.query = torch.stack([Turning().rotate(q, places) for q in self.raw])
        self.cosines = torch.rand(*shape, generator=generator)


def step(kv, chunks, math=MATH):
    """Process tokens [start, end) of some sequences together: {row: (sequence, start, end)}."""
    order = sorted(chunks, key=lambda row: chunks[row][2] - chunks[row][1] != 1)
    rows = np.array(order, dtype=np.int64)
    tokens = np.array([chunks[row][2] - chunks[row][1] for row in order], dtype=np.int32)
    kv.memory.grow(rows, tokens)
    attention = StepAttention(kv, rows, tokens)
    outputs = []
    for layer in range(MODEL.num_layers):

        def flat(numbers, layer=layer):
            parts = [
                getattr(chunks[row][0], numbers)[layer, slice(*chunks[row][1:])] for row in order
            ]
            return torch.cat(parts)

        query, key, value = map(flat, ("query", "key", "value"))
        outputs.append(attention.attend(layer, math, query, key, value, Turning()))
        if attention.wants_residual_similarity:
            attention.note_residual_similarity(layer, flat("cosines"))
    return torch.stack(outputs)


def evict(kv, row, keep):
    """Compact a row to `keep` [lanes, slots] of the full group."""
    commit_compaction(kv.memory, plan_compaction(kv.memory, "full", row, keep))
    held = kv.memory.tables["full"].num_slots[row]
    for group in kv.memory.layout.mirrors_of("full"):
        table = kv.memory.tables[group.name]
        if table.active[row] and (table.num_slots[row] != held).any():
            commit_compaction(kv.memory, plan_compaction(kv.memory, group.name, row, keep))


class Account:
    """What one KV head of one layer remembers of a sequence: {position: number}, per statistic."""

    def __init__(self, sequence, layer, kv_head, math=MATH):
        self.sequence, self.layer, self.kv_head, self.math = sequence, layer, kv_head, math
        self.cached, self.numbers = [], {}

    def see(self, position, statistics):
        """The token at `position` comes, and its query looks at all that is cached."""
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
            of = self.numbers.setdefault(statistic, {})
            for place, numbers in zip(self.cached, added.T, strict=True):
                of[place] = of.get(place, 0.0) + numbers

    def forget(self, positions):
        """These tokens are evicted, and what was remembered of them is gone."""
        self.cached = [place for place in self.cached if place not in positions]
        for of in self.numbers.values():
            for place in positions:
                of.pop(place, None)

    def by_position(self, statistic):
        """[query heads with a number of their own, or 1; slots]."""
        return torch.stack([self.numbers[statistic][place] for place in sorted(self.cached)], dim=1)


def accounts(sequence, math=MATH):
    """One for each lane of a view, layer-major."""
    return [Account(sequence, layer, head, math) for layer in FULL_LAYERS for head in range(2)]
