"""Flat batches, reused while the same sequences decode."""

import numpy as np
import torch

from quire.kv.flat_batch import FlatBatch

CPU = torch.device("cpu")


def batch(rows, tokens):
    return FlatBatch.of(np.array(rows), np.array(tokens, dtype=np.int32), CPU)


def test_tokens_have_their_row_and_their_offset_in_its_chunk():
    flat = batch([7, 2, 5], [1, 1, 3])

    assert flat.token_row.tolist() == [0, 1, 2, 2, 2]
    assert flat.token_offset.tolist() == [0, 0, 0, 1, 2]
    assert flat.shape.num_decode == 2
    assert flat.row_index.tolist() == [7, 2, 5]


def test_batch_is_reused_for_equal_rows_and_tokens_only():
    flat = batch([7, 2], [1, 1])

    def is_reused(rows, tokens):
        return flat.is_for(np.array(rows), np.array(tokens, dtype=np.int32))

    assert is_reused([7, 2], [1, 1])
    assert not is_reused([2, 7], [1, 1])
    assert not is_reused([7, 2], [1, 2])
    assert not is_reused([7, 2, 3], [1, 1, 1])
