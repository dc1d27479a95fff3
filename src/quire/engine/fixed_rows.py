"""A step as batches of the same number of rows: requests are cut, the last batch is padded.

tokens of a step     a a a a a a a b c c c        4 rows a batch
batches              a a a a | a a a b | c c c .  . is padding: computed, and thrown away
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.base import AttentionCall, PagedAttention
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class RowPart:
    """Neighbouring tokens of a request in a batch.

    Attributes:
        request: whose tokens.
        done: tokens of the step that earlier batches have.
        tokens: of this batch.
        later: tokens of the step that later batches have.
    """

    request: Request
    done: int
    tokens: int
    later: int


def in_parts(rows: Sequence[tuple[Request, int]], batch_tokens: int) -> list[list[RowPart]]:
    """Cut a step into full batches, in the order in which rows were planned.

    Args:
        rows: (request, tokens).
        batch_tokens: of every batch but the last.
    """
    batches: list[list[RowPart]] = [[]]
    left = batch_tokens
    for request, tokens in rows:
        done = 0
        while done < tokens:
            if not left:
                batches.append([])
                left = batch_tokens
            count = min(left, tokens - done)
            batches[-1].append(RowPart(request, done, count, tokens - done - count))
            done, left = done + count, left - count
    return batches


def padded(numbers: list[int], length: int) -> list[int]:
    """The numbers and zeros behind them."""
    return numbers + [0] * (length - len(numbers))


class PaddedBridge:
    """Attention for the first rows of a batch; padding attends to nothing and writes nothing.

    Args:
        bridge: of these rows.
        num_tokens: how many they are.
    """

    def __init__(self, bridge: PagedAttention, num_tokens: int) -> None:
        self._bridge, self._num_tokens = bridge, num_tokens

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        own = slice(self._num_tokens)
        if self._num_tokens == len(query):
            return self._bridge.attend(call, query, key, value)
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        out[own] = self._bridge.attend(call, query[own], key[own], value[own])
        return out
