"""Batches with a fixed number of rows: requests are split, and the last batch is padded.

tokens of a step     a a a a a a a b c c c        4 rows per batch
batches              a a a a | a a a b | c c c .  . is padding: computed and discarded
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMath
from quire.kernels.chains import HeadBuffers
from quire.models.base import AttentionCall, ChainedAttention, PagedAttention
from quire.sampling.logits import StepLogits
from quire.sampling.pooling import StepHidden
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class RowPart:
    """Consecutive tokens of a request in a batch.

    Attributes:
        request: the request.
        done: number of the request's tokens in earlier batches of the step.
        tokens: number of the request's tokens in this batch.
        later: number of the request's tokens in later batches of the step.
    """

    request: Request
    done: int
    tokens: int
    later: int


def in_parts(rows: Sequence[tuple[Request, int]], batch_tokens: int) -> list[list[RowPart]]:
    """Split a step into full batches, in the planned order of rows.

    Args:
        rows: (request, tokens).
        batch_tokens: tokens of every batch except the last.
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
    """Pad a list with zeros at the end."""
    return numbers + [0] * (length - len(numbers))


class PaddedBridge:
    """Attention for the first rows of a batch; padding rows are neither computed nor stored.

    Args:
        bridge: attention of the first rows.
        num_tokens: number of these rows.
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

    @property
    def hidden_rows(self) -> Tensor | None:
        """Rows of the batch whose hidden states are needed."""
        return getattr(self._bridge, "hidden_rows", None)

    def note_hidden_states(self, states: Tensor) -> None:
        """Forward the hidden states of these rows."""
        self._bridge.note_hidden_states(states)  # type: ignore[attr-defined]

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> Sequence[object] | None:
        """See `ChainedAttention.chain`."""
        if not isinstance(self._bridge, ChainedAttention):
            return None
        return self._bridge.chain(layers, heads.first(self._num_tokens))


def joined(results: list[StepLogits | StepHidden]) -> list[StepLogits | StepHidden]:
    """Concatenate the logits of each request: a scored prompt may span several batches."""
    by_request: dict[int, list[StepLogits]] = {}
    for result in results:
        if isinstance(result, StepLogits):
            by_request.setdefault(id(result.request), []).append(result)
    hidden = [result for result in results if isinstance(result, StepHidden)]
    return hidden + [
        _concatenated(parts) if len(parts) > 1 else parts[0] for parts in by_request.values()
    ]


def _concatenated(parts: Sequence[StepLogits]) -> StepLogits:
    logits = torch.cat([part.logits for part in parts])
    return replace(parts[0], batch=logits, first_row=0, num_rows=len(logits))
