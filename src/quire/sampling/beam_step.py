"""A step of a beam search: from the logits of its beams to the best continuations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import RequestError
from quire.sampling.beam import BeamSearch, Candidate
from quire.sampling.logits import SamplingRow, column, edit
from quire.sampling.sampler import (
    BAD_LOGITS,
    NO_TOKEN_LEFT,
    SampledToken,
    Sampler,
    prompt_logprobs,
)
from quire.scheduler.request import RequestGroup


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


Branch = Callable[[RequestGroup, Sequence[int]], None]


def advance_beams(
    search: BeamSearch, group: RequestGroup, logits: Tensor, sampler: Sampler, branch: Branch
) -> None:
    """Add a token to every beam, and let the group's members be the beams that go on.

    Args:
        search: of the group.
        group: its members are the open beams, in their order.
        logits: [beams, vocab] of each member's last token.
        sampler: knows the vocabulary and its end tokens.
        branch: see `Scheduler.branch`.

    Raises:
        RequestError: the logits are not numbers, or no token may be chosen.
    """
    logits = logits[:, : sampler.vocab_size]
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise RequestError(BAD_LOGITS)
    candidates = best_continuations(
        logits, group.members, search.scores, search.num_candidates, sampler.eos_token_ids
    )
    if not candidates:
        raise RequestError(NO_TOKEN_LEFT)
    num_top = search.params.logprobs
    if num_top is not None:
        candidates = list(_reported(candidates, logits, num_top))
    parents = search.advance(candidates)
    if not search.is_done:
        branch(group, parents)
        for member, beam in zip(group.members, search.beams, strict=True):
            member.output_token_ids.append(beam[-1].token_id)


def _reported(candidates: Sequence[Candidate], logits: Tensor, num_top: int) -> Iterator[Candidate]:
    parents = [candidate.parent for candidate in candidates]
    tokens = [candidate.token_id for candidate in candidates]
    scored = prompt_logprobs(logits[parents], tokens, num_top)
    for candidate, score in zip(candidates, scored, strict=True):
        report = SampledToken(score.token_id, score.logprob, score.top_logprobs, score.rank)
        yield replace(candidate, report=report)


def tokens_of(path: Sequence[Candidate]) -> list[SampledToken]:
    """The tokens of a sequence with what was reported of them."""
    return [
        candidate.report
        if isinstance(candidate.report, SampledToken)
        else SampledToken(candidate.token_id)
        for candidate in path
    ]
