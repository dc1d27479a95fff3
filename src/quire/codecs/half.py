"""Float16 numbers beside codes: rounded down or up, so that a range never loses its ends."""

import torch
from jaxtyping import Float, Float16
from torch import Tensor

LARGEST = 65504.0


def finite(vectors: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Float32 numbers that float16 can reach; NaN stays."""
    return vectors.float().clamp(-LARGEST, LARGEST)


def half_below(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """The largest float16 that is not above a number."""
    nearest = numbers.half()
    bits = nearest.view(torch.int16)
    # sign and magnitude: one less above zero, one more below, and below zero comes the smallest
    lower = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -(2**15) + 1))
    return torch.where(nearest.float() > numbers, lower.to(torch.int16).view(torch.half), nearest)


def half_above(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """The smallest float16 that is not below a number."""
    return -half_below(-numbers)
