"""Scores smoothed over neighbouring tokens, so that what is kept is no scatter of single ones."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from quire.errors import ConfigError, UnknownName

AVERAGE, MAXIMUM = "avg", "max"
POOLINGS = (AVERAGE, MAXIMUM)


def check_pooling(kernel: int, pooling: str) -> None:
    """Refuse what cannot be centred on a token.

    Raises:
        ConfigError: an even kernel, or no such pooling.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"expected kernel to be odd, so that it has a middle, got {kernel}")
    if pooling not in POOLINGS:
        raise UnknownName("pooling", pooling, POOLINGS)


def pool(
    numbers: Float[Tensor, "lane group slot"], kernel: int, pooling: str
) -> Float[Tensor, "lane group slot"]:
    """Pool each number with its neighbours, `kernel` in all.

    Neighbours are the cached tokens beside a token, holes closed. Beyond the ends stand zeros, and
    an average divides by the kernel there too: tokens at the ends score lower, as published.

    Args:
        numbers: 0 or more; 0 where a token is not to be looked at.
        kernel: odd.
        pooling: avg or max.
    """
    half = kernel // 2
    if pooling == MAXIMUM:
        return max_pool1d(numbers, kernel, stride=1, padding=half)
    return avg_pool1d(numbers, kernel, stride=1, padding=half, count_include_pad=True)
