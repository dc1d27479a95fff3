"""One number for the query heads that share a KV head."""

from jaxtyping import Float
from torch import Tensor

from quire.layout.statistics import MAX, MEAN


def reduce_group(
    numbers: Float[Tensor, "lane group slot"], heads: str
) -> Float[Tensor, "lane slot"]:
    """Reduce the query heads of each lane.

    Args:
        numbers: one for each query head of a lane.
        heads: mean, max or sum.
    """
    if heads == MAX:
        return numbers.amax(dim=1)
    return numbers.mean(dim=1) if heads == MEAN else numbers.sum(dim=1)
