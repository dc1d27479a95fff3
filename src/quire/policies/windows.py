"""Attention of remembered queries over the keys cached now.

A ring holds queries as they were when they were computed, each rotated to its own position. Their
weights are computed when tokens leave: softmax over the keys that are still cached and not newer
than the query, in float32. Only the scale enters: no soft cap of logits, no learned sinks.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from quire.errors import ConfigError, PolicyError, UnknownName
from quire.layout.statistics import MAX, MEAN, QueryRing
from quire.policies.view import KVView


def recorded(
    view: KVView, ring: QueryRing
) -> tuple[Float[Tensor, "lane group query head_dim"], Int[Tensor, "lane query"]]:
    """The queries of a ring, in no order, and their positions: -1 where none stands yet.

    Raises:
        PolicyError: a lane has none at all.
    """
    record = view.remembered(ring)
    requested = record[:, :, -1].long() - 1
    if bool((requested < 0).all(dim=1).any()):
        raise PolicyError(
            f"no query was recorded in {ring.name}: a rule with a window cannot tell which tokens "
            "matter before one has been asked"
        )
    lanes, window, width = record.shape
    queries = record[:, :, :-1].view(lanes, window, (width - 1) // view.head_dim, view.head_dim)
    return queries.transpose(1, 2), requested


def visible(view: KVView, requested: Int[Tensor, "lane query"]) -> Bool[Tensor, "lane query slot"]:
    """Which slots each query may look at: cached, and not newer than it."""
    known = view.positions[:, None, :] <= requested[:, :, None]
    return known & view.live[:, None, :] & (requested >= 0)[:, :, None]


def softmax_over(
    logits: Float[Tensor, "*rows query slot"], seen: Bool[Tensor, "*rows query slot"]
) -> Float[Tensor, "*rows query slot"]:
    """Softmax over what is seen; a query that sees nothing gives zeros."""
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill(~seen, least).softmax(dim=-1).masked_fill(~seen, 0.0)


def column_sums(view: KVView, ring: QueryRing) -> Float[Tensor, "lane group slot"]:
    """For each query head, the weights that a slot gets from the ring's queries, summed.

    Raises:
        PolicyError: no query was recorded.
    """
    queries, requested = recorded(view, ring)
    keys, seen = view.keys, visible(view, requested)
    lanes, group, window, _ = queries.shape
    sums = torch.zeros(lanes, group, keys.shape[1], device=keys.device)
    for part in slices(lanes, group * window * keys.shape[1]):
        logits = queries[part] @ keys[part, None].transpose(2, 3) * view.scale
        rows = seen[part, None].expand(-1, group, -1, -1)
        sums[part] = softmax_over(logits, rows).sum(dim=2)
    return sums


# ---- groups --------------------------------------------------------------------------------------

# One number for the query heads that share a KV head.


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


# ---- pooling -------------------------------------------------------------------------------------

# Scores smoothed over neighbouring tokens, so that what is kept is no scatter of single ones.

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


# ---- scratch -------------------------------------------------------------------------------------

# Bounds what a rule takes beside the cache: lanes are worked on a few at a time.

SCRATCH_NUMBERS = 1 << 22
"""float32 numbers of the largest tensor a rule makes where it can: 16 MiB."""


def slices(parts: int, numbers: int) -> Iterator[slice]:
    """Cut `parts` lanes (or blocks) into runs that fit, one at least.

    What is computed for a lane does not depend on which lanes run with it.

    Args:
        parts: how many there are.
        numbers: float32 numbers that one takes.
    """
    at_once = max(1, SCRATCH_NUMBERS // max(1, numbers))
    for start in range(0, parts, at_once):
        yield slice(start, start + at_once)
