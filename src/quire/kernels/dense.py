"""Attention over contiguous keys and values, on any device.

Uses `scaled_dot_product_attention` if it has a fused kernel for the operation. Softcap, sinks,
biases and values of another width than keys use explicit products, in blocks of queries to bound
the scratch memory of the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InvariantError
from quire.kernels.backend import AttentionMath

PLAIN_BLOCK_QUERIES = 256


def attend_dense(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    value: Float[Tensor, "batch num_kv_heads token value_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
    causal: bool = False,
) -> Float[Tensor, "batch num_heads query value_dim"]:
    """Compute attention without repeating keys and values for grouped query heads.

    Args:
        query: num_heads is a multiple of num_kv_heads; heads of one group are neighbours.
        key: after RoPE. Slots that no query sees must hold finite numbers.
        value: as many as keys.
        math: scale, softcap, sinks, biases of these keys.
        seen: True if a query sees a slot; None for all, or with `causal`.
        causal: query i of n sees slots 0 .. i of n; excludes `seen`.

    Returns:
        The attention output, in the type of query.
    """
    explicit = any(x is not None for x in (math.softcap, math.sinks, math.alibi, math.bias))
    if explicit or key.shape[3] != value.shape[3]:
        if causal:
            num_queries = query.shape[2]
            seen = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device)
            seen = seen.tril()[None, None]
        blocks = []
        for start in range(0, query.shape[2], PLAIN_BLOCK_QUERIES):
            part = slice(start, start + PLAIN_BLOCK_QUERIES)
            mask = seen if seen is None or seen.shape[2] == 1 else seen[:, :, part]
            blocks.append(_attend_block(query[:, :, part], key, value, math, mask))
        return torch.cat(blocks, dim=2)
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_queries == 1 and num_heads != num_kv_heads:
        # one query per row: the group's heads become queries, so that each key is read once
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


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, math: AttentionMath, seen: Tensor | None
) -> Tensor:
    weights = weights_dense(query, key, math=math, seen=seen).to(value.dtype)
    return (weights @ value[:, :, None]).reshape(*query.shape[:3], value.shape[3])


def weights_dense(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
) -> Float[Tensor, "batch num_kv_heads group query token"]:
    """Return attention weights in float32, or float64 for float64 queries; see `attend_dense`."""
    batch, _, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    products = grouped @ key[:, :, None].transpose(-1, -2)
    logits = products.to(torch.promote_types(products.dtype, torch.float32)) * math.scale
    logits = _capped_and_biased(logits, math)
    if seen is not None:
        logits = logits.masked_fill(~seen[:, :, None], float("-inf"))
    if math.sinks is not None:
        column = math.sinks.to(logits.dtype).view(-1, num_kv_heads, logits.shape[2], 1, 1)
        logits = torch.cat([logits, column.expand(*logits.shape[:-1], 1)], dim=-1)
    return torch.softmax(logits, dim=-1)[..., : key.shape[2]]


def _capped_and_biased(
    logits: Float[Tensor, "batch num_kv_heads group query token"], math: AttentionMath
) -> Float[Tensor, "batch num_kv_heads group query token"]:
    if math.alibi is not None:
        raise InvariantError("ALiBi needs the positions of the keys: see AttentionMath.at")
    if math.softcap is not None:
        logits = math.softcap * torch.tanh(logits / math.softcap)
    if math.bias is not None:
        logits = logits + math.bias.view(-1, *logits.shape[1:3], 1, logits.shape[4])
    return logits


def column_sums_dense(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
) -> Float[Tensor, "batch num_heads token"]:
    """Sum attention weights over the queries, in blocks of queries.

    In float32, or float64 for float64 queries. Arguments as for `attend_dense`; causal batches pass
    `seen`.
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


# Attention over some of a query's tokens, and the merge of such partial results.
#
# If the tokens of a query are on several devices, each device attends to its own tokens, and only
# the result is transferred: one vector and one number per head. A softmax over all tokens is a
# mean of softmaxes over parts, each weighted by the sum of its exponentials:
#
#     lse_i = log sum over part i of exp(logit)       lse = log sum over i of exp(lse_i)
#     out   = sum over i of exp(lse_i - lse) out_i
#
# Source: the merge of FlashAttention's blocks (Dao et al. 2022, section 3.1), between devices.


@dataclass(frozen=True, slots=True)
class Partial:
    """Result of attention over some tokens, in float32.

    Attributes:
        out: weighted values, as if there were no other tokens; 0 for a query that sees no token.
        lse: log of the sum of exponentials of the logits; -inf for a query that sees no token.
    """

    out: Float[Tensor, "batch num_heads query value_dim"]
    lse: Float[Tensor, "batch num_heads query"]


def attend_partial(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    value: Float[Tensor, "batch num_kv_heads token value_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
) -> Partial:
    """Compute attention over some tokens of each query.

    Args:
        query: num_heads is a multiple of num_kv_heads; heads of one group are neighbours.
        key: after RoPE; may be empty. Slots that no query sees must hold finite numbers.
        value: as many as keys.
        math: scale, softcap and biases of these keys; sinks are passed to `merge` instead, so that
            they count once.
        seen: True if a query sees a slot; None for all.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    logits = grouped @ key.float()[:, :, None].transpose(-1, -2) * math.scale
    logits = _capped_and_biased(logits, math)
    if seen is not None:
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = weights @ value.float()[:, :, None]
    return Partial(out.reshape(*query.shape[:3], -1), lse.reshape(batch, num_heads, num_queries))


def merge(parts: Sequence[Partial], sinks: Float[Tensor, " num_heads"] | None = None) -> Partial:
    """Merge partial results to attention over the tokens of all parts.

    Args:
        parts: at least one, of the same queries; no token is in two of them.
        sinks: logits that are added to each softmax without a value, or None. Pass them in the last
            merge only.
    """
    lses = torch.stack([part.lse for part in parts])
    if sinks is not None:
        column = sinks.float()[None, :, None].expand_as(lses[0])
        lses = torch.cat([lses, column[None]])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    pairs = zip(parts, weights, strict=False)  # sinks have a weight and no value
    out = sum((part.out * weight[..., None] for part, weight in pairs), torch.zeros(()))
    return Partial(out, lse)
