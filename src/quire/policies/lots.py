"""Stateless random numbers by hashing: the mixing function of SplitMix64 (Steele et al. 2014).

A number depends only on its inputs: not on the batch, the slot order or the number of calls.
"""

import torch
from jaxtyping import Int
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # int64 wraps around as uint64 does
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def lots_of(seed: int, numbers: Int[Tensor, "..."], more: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return a random number of 53 bits for each pair of numbers.

    Args:
        seed: seed of the hash.
        numbers: the first of each pair.
        more: the second of each pair; shapes broadcast, such as layers [layer, 1] and positions.
    """
    first = torch.full((), seed % (1 << 63), device=numbers.device)
    return _shifted(_scrambled(_scrambled(_scrambled(first) + numbers) + more), 11)


def _scrambled(numbers: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    numbers = numbers + _STEP
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Shift right, filling with zeros; int64's own shift would copy the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
