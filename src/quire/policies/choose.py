"""From scores to a kept set: protected slots first, then the best, ties to the lower position."""

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
    """Keep `keep` slots of each lane.

    Args:
        score: finite where live; slots in the order of positions.
        live: slots that hold a token.
        protected: slots that stay whatever they score; at most `keep` of each lane.
        keep: how many stay; no more than are live.

    Returns:
        True where a slot stays.
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
    """Keep whole pieces of `piece_tokens` neighbouring slots, at most `keep` slots of each lane.

    A piece scores the mean of its slots' scores. One that holds a protected slot stays, and so does
    what is left behind the last whole piece. Source: ChunkKV (Liu et al. 2025).

    Returns:
        True where a slot stays: as many pieces as `keep` covers.

    Raises:
        PolicyError: what must stay, in whole pieces, is more than may.
    """
    cut = cut_pieces(live, piece_tokens)
    counts = cut.sum(dim=2)
    must = held_pieces(cut, cut_pieces(protected & live, piece_tokens))
    room = keep - (counts * must).sum(dim=1)
    if bool((room < 0).any()):
        lane = int(room.argmin())
        raise PolicyError(
            f"protected slots lie in pieces of {int(keep[lane] - room[lane])} tokens together, but "
            f"{int(keep[lane])} may stay; raise cap, or use smaller pieces"
        )
    free = (counts > 0) & ~must
    means = cut_pieces(torch.where(live, score, 0.0), piece_tokens).mean(dim=2)
    most = torch.minimum(room // piece_tokens, free.sum(dim=1))
    return spread_pieces(choose_slots(means, free, must & ~must, most) | must, live, piece_tokens)


def in_whole_pieces(
    protected: Bool[Tensor, "lane slot"], live: Bool[Tensor, "lane slot"], piece_tokens: int
) -> Bool[Tensor, "lane slot"]:
    """All slots that must stay where slots are protected: their pieces, and the rest at the end."""
    if piece_tokens == 1:
        return protected & live
    cut = cut_pieces(live, piece_tokens)
    return spread_pieces(
        held_pieces(cut, cut_pieces(protected & live, piece_tokens)), live, piece_tokens
    )


def held_pieces(
    live: Bool[Tensor, "lane piece token"], protected: Bool[Tensor, "lane piece token"]
) -> Bool[Tensor, "lane piece"]:
    """Pieces that stay: one of their slots is protected, or they are not whole."""
    return protected.any(dim=2) | (live.any(dim=2) & ~live.all(dim=2))


def cut_pieces(
    numbers: Shaped[Tensor, "lane slot"], piece_tokens: int
) -> Shaped[Tensor, "lane piece token"]:
    """Neighbouring slots together; the last piece is filled up with zeros."""
    lanes, slots = numbers.shape
    pieces = -(-slots // piece_tokens)
    padded = torch.nn.functional.pad(numbers, (0, pieces * piece_tokens - slots))
    return padded.view(lanes, pieces, piece_tokens)


def spread_pieces(
    pieces: Bool[Tensor, "lane piece"], live: Bool[Tensor, "lane slot"], piece_tokens: int
) -> Bool[Tensor, "lane slot"]:
    """All slots of the pieces that are True."""
    return pieces.repeat_interleave(piece_tokens, dim=1)[:, : live.shape[1]] & live
