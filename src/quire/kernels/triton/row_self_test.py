"""Runs the row-wise kernels once and compares them with PyTorch."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.rope_write import CosSin
from quire.kernels.row_kernels import RowShape
from quire.kernels.triton import rope_calls, row_calls

_ROWS, _EPS = 3, 1e-5
_HEADS = (6, 2, 2)  # of queries, keys and values
_MOST_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def wrong_kernels(device: torch.device, dtype: torch.dtype, shape: RowShape) -> tuple[str, ...]:
    """Return the names of kernels with wrong results.

    Args:
        device: runs the kernels.
        dtype: of the numbers.
        shape: sizes of the model.
    """
    rows = _Rows(dtype, shape)
    tests: Mapping[str, Callable[[torch.device], tuple[Tensor, Tensor]]] = {
        "RMSNorm": rows.norm,
        "the norms of heads": rows.head_norms,
        "the gated activation": rows.gate,
        "RoPE": rows.rope,
    }
    return tuple(name for name, test in tests.items() if not _is_near(*test(device), dtype))


def _is_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    difference = (found.cpu().float() - expected.float()).norm()
    return bool(difference <= _MOST_ERROR[dtype] * expected.float().norm())


class _Rows:
    """Random inputs, and the result of each kernel with that of PyTorch."""

    def __init__(self, dtype: torch.dtype, shape: RowShape) -> None:
        generator = torch.Generator().manual_seed(0)
        self._shape = shape
        width, heads = shape.width, (_ROWS, sum(_HEADS), shape.head_dim)
        self._stream, self._delta, self._weight = (
            torch.randn(rows, width, generator=generator).to(dtype) for rows in (_ROWS, _ROWS, 1)
        )
        self._heads = torch.randn(heads, generator=generator).to(dtype)
        self._norms = torch.randn(2, shape.head_dim, generator=generator).to(dtype)
        self._angles = torch.randn(_ROWS, shape.rotary_dim // 2, generator=generator)

    def norm(self, device: torch.device) -> tuple[Tensor, Tensor]:
        weight = self._weight[0]
        stream, delta, own = (x.to(device, copy=True) for x in (self._stream, self._delta, weight))
        found = row_calls.normed(stream, delta, own, _EPS)
        summed = self._stream + self._delta
        expected = F.rms_norm(summed.float(), (len(weight),), weight.float(), _EPS)
        return torch.cat([stream, found]), torch.cat([summed.float(), expected])

    def head_norms(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found, norms = (x.to(device, copy=True) for x in (self._heads, self._norms))
        row_calls.norm_query_and_key(found.flatten(1), _HEADS[:2], (norms[0], norms[1]), _EPS)
        *both, value = torch.split(self._heads.float(), list(_HEADS), dim=1)
        parts = [
            F.rms_norm(part, (self._shape.head_dim,), weight.float(), _EPS)
            for part, weight in zip(both, self._norms, strict=True)
        ]
        return found, torch.cat([*parts, value], dim=1)

    def gate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        both = torch.cat([self._stream, self._delta], dim=1)
        expected = F.silu(self._stream.float()) * self._delta.float()
        return row_calls.gated(both.to(device)), expected

    def rope(self, device: torch.device) -> tuple[Tensor, Tensor]:
        angles = self._angles.repeat(1, 2)
        rope = CosSin(angles.cos(), angles.sin())
        found = self._heads.to(device, copy=True)
        query, key, value = torch.split(self._heads, list(_HEADS), dim=1)
        expected = torch.cat([rope.rotate(query), rope.rotate(key), value], dim=1)
        queries, keys, _ = torch.split(found, list(_HEADS), dim=1)
        on_device = CosSin(rope.cosine.to(device), rope.sine.to(device))
        rope_calls.rotate(queries, keys, on_device)
        return found, expected
