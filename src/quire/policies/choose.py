"""From scores to a retained set: protected slots first, then the best, ties to lower positions."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from quire.errors import PolicyError
from quire.policies.best import best_slots


def choose_slots(
    score: Float[Tensor, "lane slot"],
    live: Bool[Tensor, "lane slot"],
    protected: Bool[Tensor, "lane slot"],
    keep: Int[Tensor, " lane"],
) -> Bool[Tensor, "lane slot"]:
    """Retain `keep` slots of each lane.

    Args:
        score: finite if live; slots in the order of positions.
        live: slots that hold a token.
        protected: slots retained regardless of score; at most `keep` per lane.
        keep: number of slots to retain; at most the number of live slots.

    Returns:
        True for each retained slot.
    """
    must = protected & live
    wanted = (keep - must.sum(dim=1)).clamp_min(0)
    return must | best_slots(score, live & ~must, wanted)


def choose_pieces(
    score: Float[Tensor, "lane slot"],
    live: Bool[Tensor, "lane slot"],
    protected: Bool[Tensor, "lane slot"],
    keep: Int[Tensor, " lane"],
    piece_tokens: int,
) -> Bool[Tensor, "lane slot"]:
    """Retain whole pieces of `piece_tokens` neighbouring slots, at most `keep` slots per lane.

    The score of a piece is the mean of its slots' scores. A piece that holds a protected slot is
    retained, and so is the partial piece at the end. Source: ChunkKV (Liu et al. 2025).

    Returns:
        True for each retained slot: as many pieces as `keep` covers.

    Raises:
        PolicyError: the pieces that must be retained hold more than `keep` slots.
    """
    cut = cut_pieces(live, piece_tokens)
    counts = cut.sum(dim=2)
    must = held_pieces(cut, cut_pieces(protected & live, piece_tokens))
    free_slots = keep - (counts * must).sum(dim=1)
    if bool((free_slots < 0).any()):
        lane = int(free_slots.argmin())
        raise PolicyError(
            f"the pieces of protected slots hold {int(keep[lane] - free_slots[lane])} tokens, but "
            f"only {int(keep[lane])} may be retained; raise cap, or use smaller pieces"
        )
    free = (counts > 0) & ~must
    means = cut_pieces(torch.where(live, score, 0.0), piece_tokens).mean(dim=2)
    most = torch.minimum(free_slots // piece_tokens, free.sum(dim=1))
    return spread_pieces(choose_slots(means, free, must & ~must, most) | must, live, piece_tokens)


def in_whole_pieces(
    protected: Bool[Tensor, "lane slot"], live: Bool[Tensor, "lane slot"], piece_tokens: int
) -> Bool[Tensor, "lane slot"]:
    """Widen protected slots to all that must be retained: whole pieces and the partial end."""
    if piece_tokens == 1:
        return protected & live
    cut = cut_pieces(live, piece_tokens)
    return spread_pieces(
        held_pieces(cut, cut_pieces(protected & live, piece_tokens)), live, piece_tokens
    )


def held_pieces(
    live: Bool[Tensor, "lane piece token"], protected: Bool[Tensor, "lane piece token"]
) -> Bool[Tensor, "lane piece"]:
    """Mark the pieces that must be retained: those with a protected slot, and partial ones."""
    return protected.any(dim=2) | (live.any(dim=2) & ~live.all(dim=2))


def cut_pieces(
    numbers: Shaped[Tensor, "lane slot"], piece_tokens: int
) -> Shaped[Tensor, "lane piece token"]:
    """Group neighbouring slots; the last piece is padded with zeros."""
    lanes, slots = numbers.shape
    pieces = -(-slots // piece_tokens)
    padded = torch.nn.functional.pad(numbers, (0, pieces * piece_tokens - slots))
    return padded.view(lanes, pieces, piece_tokens)


def spread_pieces(
    pieces: Bool[Tensor, "lane piece"], live: Bool[Tensor, "lane slot"], piece_tokens: int
) -> Bool[Tensor, "lane slot"]:
    """Mark all live slots of the marked pieces."""
    return pieces.repeat_interleave(piece_tokens, dim=1)[:, : live.shape[1]] & live
