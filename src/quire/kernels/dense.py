"""Attention over keys and values that already lie side by side, on any device.

`scaled_dot_product_attention` where it can say what is meant; a plain product where it cannot
(softcap, sinks), in blocks of queries so that the weights never take more than a bounded scratch.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.backend import AttentionMath

PLAIN_BLOCK_QUERIES = 256


def attend_dense(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    value: Float[Tensor, "batch num_kv_heads token head_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
    causal: bool = False,
) -> Float[Tensor, "batch num_heads query head_dim"]:
    """Attend without repeating keys and values for grouped query heads.

    Args:
        query: num_heads is a multiple of num_kv_heads; heads of one group are neighbours.
        key: after RoPE. Slots that nobody sees must hold finite numbers.
        value: like key.
        math: scale, softcap, sinks.
        seen: True where a query sees a slot; None for all, or with `causal`.
        causal: query i of n sees slots 0 .. i of n; excludes `seen`.

    Returns:
        Like query.
    """
    if math.softcap is not None or math.sinks is not None:
        if causal:
            num_queries = query.shape[2]
            seen = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device)
            seen = seen.tril()[None, None]
        return _attend_plain(query, key, value, math, seen)
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_queries == 1 and num_heads != num_kv_heads:
        # one query a row: the group's heads become queries, so that a key is read once for all
        folded = query.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=math.scale)
        return out.reshape(query.shape)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        is_causal=causal,
        scale=math.scale,
        enable_gqa=num_heads != num_kv_heads,
    )


def _attend_plain(
    query: Tensor, key: Tensor, value: Tensor, math: AttentionMath, seen: Tensor | None
) -> Tensor:
    blocks = []
    for start in range(0, query.shape[2], PLAIN_BLOCK_QUERIES):
        part = slice(start, start + PLAIN_BLOCK_QUERIES)
        mask = seen if seen is None or seen.shape[2] == 1 else seen[:, :, part]
        blocks.append(_attend_block(query[:, :, part], key, value, math, mask))
    return torch.cat(blocks, dim=2)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, math: AttentionMath, seen: Tensor | None
) -> Tensor:
    weights = weights_dense(query, key, math=math, seen=seen).to(value.dtype)
    return (weights @ value[:, :, None]).reshape(query.shape)


def weights_dense(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
) -> Float[Tensor, "batch num_kv_heads group query token"]:
    """Attention weights in float32, or in float64 as queries are; arguments as `attend_dense`."""
    batch, _, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    products = grouped @ key[:, :, None].transpose(-1, -2)
    logits = products.to(torch.promote_types(products.dtype, torch.float32)) * math.scale
    if math.softcap is not None:
        logits = math.softcap * torch.tanh(logits / math.softcap)
    if seen is not None:
        logits = logits.masked_fill(~seen[:, :, None], float("-inf"))
    if math.sinks is not None:
        column = math.sinks.to(logits.dtype).view(-1, num_kv_heads, logits.shape[2], 1, 1)
        logits = torch.cat([logits, column.expand(*logits.shape[:-1], 1)], dim=-1)
    return torch.softmax(logits, dim=-1)[..., : key.shape[2]]


def column_sums_dense(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
) -> Float[Tensor, "batch num_heads token"]:
    """Attention weights summed over the queries, in blocks of queries.

    In float32, or in float64 as queries are. Arguments as for `attend_dense`; causal batches say
    so with `seen`.
    """
    batch, num_heads, num_queries, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = torch.zeros(batch, num_heads, key.shape[2], dtype=wide, device=query.device)
    for start in range(0, num_queries, PLAIN_BLOCK_QUERIES):
        part = slice(start, start + PLAIN_BLOCK_QUERIES)
        mask = seen if seen is None or seen.shape[2] == 1 else seen[:, :, part]
        weights = weights_dense(query[:, :, part].to(wide), key.to(wide), math=math, seen=mask)
        sums += weights.sum(dim=3).view(sums.shape)
    return sums
