"""Attention of recorded queries over the keys cached now.

A ring buffer holds recent queries, each rotated to its own position. Their weights are computed at
an eviction: softmax over the keys that are still cached and not newer than the query, in float32.
Only the scale is applied: no soft cap of logits, no learned sinks.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from quire.errors import ConfigError, PolicyError, UnknownName
from quire.kernels.backend import PageScores, WindowFinish
from quire.layout.pages import KEY
from quire.layout.statistics import MAX, MEAN, QueryRing
from quire.policies.view import KVView


def recorded(
    view: KVView, ring: QueryRing
) -> tuple[Float[Tensor, "lane group query head_dim"], Int[Tensor, "lane query"]]:
    """Return the queries of a ring, unordered, and their positions; -1 for empty entries.

    Raises:
        PolicyError: a lane has no query.
    """
    record = view.statistic(ring)
    query_positions = record[:, :, -1].long() - 1
    if view.breaks_contract((query_positions < 0).all(dim=1)):
        raise PolicyError(
            f"no query was recorded in {ring.name}: a rule with a window needs at least one query "
            "to score tokens"
        )
    lanes, window, width = record.shape
    queries = record[:, :, :-1].view(lanes, window, (width - 1) // view.head_dim, view.head_dim)
    return queries.transpose(1, 2), query_positions


def visible(
    view: KVView, query_positions: Int[Tensor, "lane query"]
) -> Bool[Tensor, "lane query slot"]:
    """Mark the slots each query may attend to: cached, and not newer than the query."""
    known = view.positions[:, None, :] <= query_positions[:, :, None]
    return known & view.live[:, None, :] & (query_positions >= 0)[:, :, None]


def softmax_over(
    logits: Float[Tensor, "*rows query slot"], seen: Bool[Tensor, "*rows query slot"]
) -> Float[Tensor, "*rows query slot"]:
    """Apply softmax over the visible slots; a query without visible slots gets zeros."""
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill(~seen, least).softmax(dim=-1).masked_fill(~seen, 0.0)


def window_logits(
    queries: Float[Tensor, "lane group query head_dim"],
    keys: Float[Tensor, "lane slot head_dim"],
    scales: Float[Tensor, "lane 1 1"],
    biases: Float[Tensor, "lane group 1 slot"] | None = None,
) -> Float[Tensor, "lane group query slot"]:
    """Return scaled products of queries and keys, plus biases.

    One product computes all heads of a lane: a broadcast one would copy the keys for each of them.
    """
    products = queries.flatten(1, 2) @ keys.transpose(1, 2)
    logits = products.view(*queries.shape[:3], -1).mul_(scales[:, None])
    return logits if biases is None else logits.add_(biases)


def _in_pages(view: KVView) -> PageScores | None:
    """Scores from the pages; None for logits with biases, which no backend adds there."""
    return None if view.alibi is not None else view.in_pages(KEY)


def column_sums(view: KVView, ring: QueryRing) -> Float[Tensor, "lane group slot"]:
    """Sum, per query head, the weights that each slot gets from the ring's queries.

    Raises:
        PolicyError: no query was recorded.
    """
    queries, query_positions = recorded(view, ring)
    pages = _in_pages(view)
    if pages is not None:
        return pages.window_sums(view.statistic(ring), view.lane_scales.view(-1))
    keys, seen, scales = view.keys, visible(view, query_positions), view.lane_scales
    lanes, group, window, _ = queries.shape
    biases = view.biases()
    sums = torch.zeros(lanes, group, keys.shape[1], device=keys.device)
    for part in slices(lanes, group * window * keys.shape[1]):
        own = None if biases is None else biases[part]
        logits = window_logits(queries[part], keys[part], scales[part], own)
        hidden = ~seen[part, None]
        weights = logits.masked_fill_(hidden, torch.finfo(logits.dtype).min).softmax(dim=-1)
        sums[part] = weights.masked_fill_(hidden, 0.0).sum(dim=2)
    return sums


# Reduction over the query heads that share a KV head.


def reduce_group(
    numbers: Float[Tensor, "lane group slot"], heads: str
) -> Float[Tensor, "lane slot"]:
    """Reduce over the query heads of each lane.

    Args:
        numbers: one for each query head of a lane.
        heads: mean, max or sum.
    """
    if heads == MAX:
        return numbers.amax(dim=1)
    return numbers.mean(dim=1) if heads == MEAN else numbers.sum(dim=1)


# Scores smoothed over neighbouring tokens, so that retained tokens form groups.

AVERAGE, MAXIMUM = "avg", "max"
POOLINGS = (AVERAGE, MAXIMUM)


def check_pooling(kernel: int, pooling: str) -> None:
    """Refuse an even kernel, which has no centre token, and unknown pooling.

    Raises:
        ConfigError: the kernel is even or below 1, or the pooling is unknown.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"expected an odd kernel of at least 1, got {kernel}")
    if pooling not in POOLINGS:
        raise UnknownName("pooling", pooling, POOLINGS)


def window_scores(
    view: KVView, ring: QueryRing, finish: WindowFinish
) -> Float[Tensor, "lane slot"]:
    """Return the column sums of a ring, pooled and then reduced over the query heads of a KV head.

    Raises:
        PolicyError: no query was recorded.
    """
    pages = _in_pages(view)
    if pages is None:
        sums = column_sums(view, ring)
        sums = sums.masked_fill(view.newest(finish.newest)[:, None, :], 0.0)
        return reduce_group(pool(sums, finish.kernel, finish.pooling), finish.heads)
    records = view.statistic(ring)
    # on a device, scores that are not finite report it after the step
    if view.breaches is None and not records[:, :, -1].amax(dim=1).all():
        recorded(view, ring)
    return pages.window_sums(records, view.lane_scales.view(-1), finish)


def pool(
    numbers: Float[Tensor, "lane group slot"], kernel: int, pooling: str
) -> Float[Tensor, "lane group slot"]:
    """Pool each number with its neighbours, `kernel` in all.

    Neighbours are adjacent cached tokens, without gaps. The ends are padded with zeros, and an
    average still divides by the kernel there: tokens at the ends score lower, as published.

    Args:
        numbers: 0 or more; 0 for a token to ignore.
        kernel: odd.
        pooling: avg or max.
    """
    half = kernel // 2
    if pooling == MAXIMUM:
        return max_pool1d(numbers, kernel, stride=1, padding=half)
    if not numbers.is_cpu:
        return avg_pool1d(numbers, kernel, stride=1, padding=half, count_include_pad=True)
    padded, slots = pad(numbers, (half, half)), numbers.shape[2]
    sums = padded[..., :slots].clone()
    for shift in range(1, kernel):  # an eighth of the time of torch's pooling
        sums += padded[..., shift : shift + slots]
    return sums.div_(kernel)


# Bounds the scratch memory of a rule: lanes are processed a few at a time.

SCRATCH_NUMBERS = 1 << 22
"""Target for the largest scratch tensor of a rule, in float32 numbers: 16 MiB."""


def slices(parts: int, numbers: int) -> Iterator[slice]:
    """Cut `parts` lanes (or blocks) into runs that fit in scratch memory, at least one per run.

    The result for a lane does not depend on which lanes run with it.

    Args:
        parts: number of lanes or blocks.
        numbers: float32 numbers that one of them needs.
    """
    at_once = max(1, SCRATCH_NUMBERS // max(1, numbers))
    for start in range(0, parts, at_once):
        yield slice(start, start + at_once)
