"""Plain attention, written to be read: the truth that every fast path is tested against."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kernels.backend import AttentionMath


def attend_reference(
    query: Float[Tensor, "query num_heads head_dim"],
    key: Float[Tensor, "token num_kv_heads head_dim"],
    value: Float[Tensor, "token num_kv_heads head_dim"],
    *,
    math: AttentionMath,
    query_positions: Int[Tensor, " query"],
    key_positions: Int[Tensor, " token"],
    window: int | None = None,
) -> tuple[Float[Tensor, "query num_heads head_dim"], Float[Tensor, "num_heads token"]]:
    """Attend one sequence in float32, and sum each slot's weights over the queries.

    Formula: w = softmax(cap(q k^T * scale)) over the slots a query sees (position p sees positions
    in (p - window, p]); out = w v; column_sums[h, t] = sum over queries of w[h, query, t].
    A sink is a logit that joins the softmax and carries no value.
    Source: the column sums are what H2O and Batch-Max (section 3.2) rank by.

    Args:
        query: after RoPE; num_heads is a multiple of num_kv_heads.
        key: after RoPE, in any order of slots.
        value: like key.
        math: scale, softcap, sinks [num_heads].
        query_positions: logical positions of the queries.
        key_positions: logical positions of the slots.
        window: positions a query looks back, itself included; None for all.

    Returns:
        out like query, in float32, and column_sums in float32.
    """
    num_heads, group = query.shape[1], query.shape[1] // key.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    logits = q @ k.transpose(1, 2) * math.scale
    if math.softcap is not None:
        logits = math.softcap * torch.tanh(logits / math.softcap)
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    logits = logits.masked_fill(~seen, float("-inf"))
    if math.sinks is not None:
        column = math.sinks.float()[:, None, None].expand(-1, len(query), 1)
        logits = torch.cat([logits, column], dim=2)
    weights = torch.softmax(logits, dim=-1)[:, :, : key.shape[0]]
    weights = weights.masked_fill(~seen, 0.0)
    out = torch.einsum("hqt,htd->qhd", weights, v)
    return out, weights.sum(dim=1).reshape(num_heads, -1)
