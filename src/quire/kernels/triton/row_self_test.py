"""Runs the row-wise kernels once and compares them with PyTorch."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.rope_write import CosSin
from quire.kernels.triton import rope_calls, row_calls

_ROWS, _WIDTH, _HEAD_DIM, _EPS = 3, 320, 32, 1e-5
_HEADS = (6, 2)  # of queries and of keys; two more of values
_MOST_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def wrong_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the names of kernels with wrong results.

    Args:
        device: runs the kernels.
        dtype: of the numbers.
    """
    rows = _Rows(dtype)
    tests: Mapping[str, Callable[[torch.device], tuple[Tensor, Tensor]]] = {
        "RMSNorm": rows.norm,
        "the norms of heads": rows.head_norms,
        "the gated activation": rows.gate,
        "RoPE": rows.rope,
    }
    return [name for name, test in tests.items() if not _is_near(*test(device), dtype)]


def _is_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    difference = (found.cpu().float() - expected.float()).norm()
    return bool(difference <= _MOST_ERROR[dtype] * expected.float().norm())


class _Rows:
    """Random inputs, and the result of each kernel with that of PyTorch."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        made = torch.randn(4, _ROWS, _WIDTH, generator=generator).to(dtype)
        self._stream, self._delta, self._weights, self._turns = made.unbind()

    def norm(self, device: torch.device) -> tuple[Tensor, Tensor]:
        stream, delta, weight = (
            x.to(device, copy=True) for x in (self._stream, self._delta, self._weights[0])
        )
        found = row_calls.normed(stream, delta, weight, _EPS)
        summed = self._stream + self._delta
        expected = F.rms_norm(summed.float(), (_WIDTH,), self._weights[0].float(), _EPS)
        return torch.cat([stream, found]), torch.cat([summed.float(), expected])

    def head_norms(self, device: torch.device) -> tuple[Tensor, Tensor]:
        weights = self._weights[0, :_HEAD_DIM], self._weights[1, :_HEAD_DIM]
        found = self._stream.to(device, copy=True)
        own = weights[0].to(device), weights[1].to(device)
        row_calls.norm_query_and_key(found, _HEADS, own, _EPS)
        heads = self._stream.float().view(_ROWS, -1, _HEAD_DIM)
        counts = [*_HEADS, _WIDTH // _HEAD_DIM - sum(_HEADS)]
        *both, value = torch.split(heads, counts, dim=1)
        parts = [
            F.rms_norm(part, (_HEAD_DIM,), weight.float(), _EPS)
            for part, weight in zip(both, weights, strict=True)
        ]
        return found, torch.cat([*parts, value], dim=1).flatten(1)

    def gate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        gate, up = self._stream.float().chunk(2, dim=1)
        return row_calls.gated(self._stream.to(device)), F.silu(gate) * up

    def rope(self, device: torch.device) -> tuple[Tensor, Tensor]:
        angles = self._turns[:, : _HEAD_DIM // 4].float().repeat(1, 2)
        rope = CosSin(angles.cos(), angles.sin())
        heads = self._stream.view(_ROWS, -1, _HEAD_DIM)
        expected = torch.cat([rope.rotate(heads[:, : sum(_HEADS)]), heads[:, sum(_HEADS) :]], dim=1)
        found = heads.to(device, copy=True)
        query, key = found[:, : _HEADS[0]], found[:, _HEADS[0] : sum(_HEADS)]
        on_device = CosSin(rope.cosine.to(device), rope.sine.to(device))
        rope_calls.rotate(query, key, on_device)
        return found.flatten(1), expected.flatten(1)
