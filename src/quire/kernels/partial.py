"""Attention over some of a query's tokens, and what several such parts come to together.

Tokens of one query may lie in several places: some of them are attended where they lie, and only
what comes of it travels, one vector and one number for each head. A softmax over all tokens is a
mean of softmaxes over parts, each weighted by the sum of its exponentials:

    lse_i = log sum over part i of exp(logit)       lse = log sum over i of exp(lse_i)
    out   = sum over i of exp(lse_i - lse) out_i

Source: the merge of FlashAttention's blocks (Dao et al. 2022, section 3.1), between places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.kernels.backend import AttentionMath


@dataclass(frozen=True, slots=True)
class Partial:
    """What attention over some tokens came to, in float32.

    Attributes:
        out: weighted values, as if there were no other tokens; 0 where a query saw none.
        lse: logarithm of the sum of exponentials of the logits; -inf where it saw none.
    """

    out: Float[Tensor, "batch num_heads query head_dim"]
    lse: Float[Tensor, "batch num_heads query"]


def attend_partial(
    query: Float[Tensor, "batch num_heads query head_dim"],
    key: Float[Tensor, "batch num_kv_heads token head_dim"],
    value: Float[Tensor, "batch num_kv_heads token head_dim"],
    *,
    math: AttentionMath,
    seen: Bool[Tensor, "batch_or_1 1 query_or_1 token"] | None,
) -> Partial:
    """Attend over some tokens of each query.

    Args:
        query: num_heads is a multiple of num_kv_heads; heads of one group are neighbours.
        key: after RoPE. Slots that nobody sees must hold finite numbers; there may be none.
        value: like key.
        math: scale and softcap; sinks are left for `merge`, where they count once.
        seen: True where a query sees a slot; None for all.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    logits = grouped @ key.float()[:, :, None].transpose(-1, -2) * math.scale
    if math.softcap is not None:
        logits = math.softcap * torch.tanh(logits / math.softcap)
    if seen is not None:
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = weights @ value.float()[:, :, None]
    return Partial(out.reshape(query.shape), lse.reshape(batch, num_heads, num_queries))


def merge(parts: Sequence[Partial], sinks: Float[Tensor, " num_heads"] | None = None) -> Partial:
    """What attention over the tokens of all parts comes to.

    Args:
        parts: one at least, of the same queries; no token is in two of them.
        sinks: logits that join each softmax and carry no value; None for none. Give them at the
            last merge only.
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
