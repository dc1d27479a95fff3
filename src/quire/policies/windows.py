"""Attention of remembered queries over the keys cached now.

A ring holds queries as they were when they were computed, each rotated to its own position. Their
weights are computed when tokens leave: softmax over the keys that are still cached and not newer
than the query, in float32. Only the scale enters: no soft cap of logits, no learned sinks.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import PolicyError
from quire.layout.statistics import QueryRing
from quire.policies.scratch import slices
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
