"""From scores to a kept set: protected slots first, then the best, ties to the lower position."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def choose_slots(
    score: Float[Tensor, "lane slot"],
    live: Bool[Tensor, "lane slot"],
    protected: Bool[Tensor, "lane slot"],
    keep: Int[Tensor, " lane"],
) -> Bool[Tensor, "lane slot"]:
    """Keep `keep` slots of each lane.

    Args:
        score: finite where live; slots in the order of positions.
        live: slots that hold a token.
        protected: slots that stay whatever they score; at most `keep` of each lane.
        keep: how many stay; no more than are live.

    Returns:
        True where a slot stays.
    """
    rest = live & ~protected
    ranked = torch.where(rest, score, float("-inf"))
    wanted = (keep - protected.sum(dim=1)).clamp_min(0)
    most = int(wanted.max())
    if not most:
        return protected & live
    best = ranked.topk(most, dim=1).values  # values only: which of equal ones it names is not fixed
    border = best.gather(1, (wanted - 1).clamp_min(0)[:, None])
    above = rest & (ranked > border) & (wanted > 0)[:, None]
    tied = rest & (ranked == border) & (wanted > 0)[:, None]
    left = wanted[:, None] - above.sum(dim=1, keepdim=True)
    return (protected & live) | above | (tied & (tied.cumsum(dim=1) <= left))


def choose_pieces(
    score: Float[Tensor, "lane slot"],
    live: Bool[Tensor, "lane slot"],
    protected: Bool[Tensor, "lane slot"],
    keep: Int[Tensor, " lane"],
    piece_tokens: int,
) -> Bool[Tensor, "lane slot"]:
    """Keep whole pieces of `piece_tokens` neighbouring slots, at most `keep` slots of each lane.

    A piece scores the mean of its slots' scores. One that holds a protected slot stays, and so does
    what is left behind the last whole piece. Source: ChunkKV (Liu et al. 2025).

    Returns:
        True where a slot stays: as many pieces as `keep` covers.
    """
    lanes, slots = score.shape
    pieces = -(-slots // piece_tokens)
    spare = pieces * piece_tokens - slots

    def cut(numbers: Tensor) -> Tensor:
        return torch.nn.functional.pad(numbers, (0, spare)).view(lanes, pieces, piece_tokens)

    counts = cut(live.int()).sum(dim=2)
    sums = cut(torch.where(live, score, 0.0)).sum(dim=2)
    whole = counts == piece_tokens
    must = cut((protected & live).int()).any(dim=2) | ((counts > 0) & ~whole)
    left = ((keep - (counts * must).sum(dim=1)) // piece_tokens).clamp_min(0)
    free = whole & ~must
    most = torch.minimum(left, free.sum(dim=1))
    kept = choose_slots(sums / piece_tokens, free, torch.zeros_like(free), most) | must
    spread = kept[:, :, None].expand(-1, -1, piece_tokens).reshape(lanes, -1)[:, :slots]
    return spread & live
