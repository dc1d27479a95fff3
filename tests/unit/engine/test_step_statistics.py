"""Attention statistics of real models' steps, for whole prompts and for chunks."""

import numpy as np
import pytest
import torch

from quire.engine.runner import StepBridge
from quire.kernels.gathered import GatheredAttention
from quire.kv.lane_reader import LaneReader
from quire.kv.paged_kv import allocate_kv
from quire.kv.step import StepAttention
from quire.layout.layout import layout_for
from quire.layout.statistics import AttentionSum, QueryMoments, QueryRing, ResidualSimilarity
from quire.models.adapter import TransformersDecoder
from support import zoo
from support.flat import sequences

CPU = torch.device("cpu")
STATISTICS = (AttentionSum(), QueryRing(4), QueryMoments(2), ResidualSimilarity())


def statistics_after_prefill(name, chunk_ends):
    """Prefill a prompt in chunks that end at `chunk_ends`; return decoder and statistics."""
    decoder = TransformersDecoder(zoo.build(name))
    assert [decoder.prepare(statistic) for statistic in STATISTICS] == [None] * 4
    layout = layout_for(
        decoder.spec, codec="float32", page_tokens=4, evicting=True, statistics=STATISTICS
    )
    backend = GatheredAttention(CPU)
    kv = allocate_kv(layout, layout.smallest_sequence_bytes * 40, 2, device=CPU, backend=backend)
    row = kv.memory.start()
    (prompt,), start = sequences(17, vocab_size=zoo.VOCAB_SIZE), 0
    for end in chunk_ends:
        rows, tokens = np.array([row]), np.array([end - start], dtype=np.int32)
        kv.memory.grow(rows, tokens)
        attention = StepBridge(StepAttention(kv, rows, tokens))
        positions = torch.arange(start, end)
        decoder.forward(prompt[start:end], positions, positions[:0], attention)
        start = end
    return decoder, LaneReader(kv, "full", row).statistics


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_statistics_are_equal_for_chunks_single_tokens_and_the_whole_prompt(name):
    decoder, whole = statistics_after_prefill(name, [17])
    full = sum(layer.window is None for layer in decoder.spec.layers)
    for chunk_ends in ([6, 7, 15, 17], range(1, 18)):
        _, chunked = statistics_after_prefill(name, chunk_ends)
        for statistic, numbers in whole.items():
            tolerance = {"atol": 1e-4, "rtol": 1e-4}
            torch.testing.assert_close(chunked[statistic], numbers, **tolerance, msg=statistic)

    assert len(whole) == 4
    lanes = full * decoder.spec.num_kv_heads
    torch.testing.assert_close(whole["attention_sum.mean"].sum(dim=1), torch.full((lanes,), 17.0))
    assert whole["residual_similarity"][:, 0, 1].tolist() == [17] * lanes
    assert whole["query_moments.2"][:, 0, 0].tolist() == [15] * lanes
    assert whole["query_ring.4"][0, :, -1].tolist() == [17, 14, 15, 16]
