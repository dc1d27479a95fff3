"""The best continuations of a search's open beams, from their logits."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from quire.sampling.beam import Candidate
from quire.sampling.logits import SamplingRow, column, edit


def best_continuations(
    logits: Float[Tensor, "beams vocab"],
    rows: Sequence[SamplingRow],
    scores: Sequence[float],
    count: int,
    eos_token_ids: tuple[int, ...],
) -> list[Candidate]:
    """Find the likeliest sequences that are one token longer.

    Masks, biases and penalties change the log-probabilities and are not normalised again, as in
    Transformers.

    Args:
        logits: of each open beam's last token, finite.
        rows: the beams.
        scores: summed log-probability of each.
        count: candidates to return, all beams together.
        eos_token_ids: the tokens that `min_tokens` holds back.

    Returns:
        At most `count`, best first; fewer where there are no more tokens that may be chosen.
    """
    log_probs = edit(torch.log_softmax(logits.float(), dim=-1), rows, eos_token_ids)
    sums = (log_probs + column(log_probs, scores, log_probs.dtype)[:, None]).flatten()
    best, places = sums.topk(min(count, len(sums)))
    vocab = logits.shape[1]
    return [
        Candidate(score, place // vocab, place % vocab)
        for score, place in zip(best.tolist(), places.tolist(), strict=True)
        if score > float("-inf")
    ]
