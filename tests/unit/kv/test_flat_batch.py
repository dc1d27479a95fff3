"""The shape of a flat batch, made once while the same sequences decode."""

import numpy as np
import torch

from quire.kv.flat_batch import FlatBatch

CPU = torch.device("cpu")


def batch(rows, tokens):
    return FlatBatch.of(np.array(rows), np.array(tokens, dtype=np.int32), CPU)


def test_tokens_know_their_row_and_their_place_in_its_chunk():
    made = batch([7, 2, 5], [1, 1, 3])

    assert made.token_row.tolist() == [0, 1, 2, 2, 2]
    assert made.token_offset.tolist() == [0, 0, 0, 1, 2]
    assert made.shape.num_decode == 2
    assert made.row_index.tolist() == [7, 2, 5]


def test_a_batch_serves_the_same_rows_with_the_same_tokens_only():
    made = batch([7, 2], [1, 1])

    def serves(rows, tokens):
        return made.is_for(np.array(rows), np.array(tokens, dtype=np.int32))

    assert serves([7, 2], [1, 1])
    assert not serves([2, 7], [1, 1])
    assert not serves([7, 2], [1, 2])
    assert not serves([7, 2, 3], [1, 1, 1])
