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
    SampledToken,
    Sampler,
    prompt_logprobs,
    why_none,
)
from quire.scheduler.request import RequestGroup


def best_continuations(
    logits: Float[Tensor, "beams vocab"],
    rows: Sequence[SamplingRow],
    scores: Sequence[float],
    count: int,
    sampler: Sampler,
) -> list[Candidate]:
    """Find the most likely continuations of all beams by one token.

    Masks, biases and penalties change the log-probabilities, which are not normalized again, as in
    Transformers.

    Returns:
        At most `count` candidates, best first; fewer if masks leave fewer tokens.
    """
    log_probs = sampler.candidates(torch.log_softmax(logits.float(), dim=-1), rows)
    log_probs = edit(log_probs, rows, sampler.eos_token_ids)
    sums = (log_probs + column(log_probs, scores, log_probs.dtype)[:, None]).flatten()
    best, indices = sums.topk(min(count, len(sums)))
    vocab = log_probs.shape[1]
    return [
        Candidate(score, index // vocab, index % vocab)
        for score, index in zip(best.tolist(), indices.tolist(), strict=True)
        if score > float("-inf")
    ]


Branch = Callable[[RequestGroup, Sequence[int]], None]


def advance_beams(
    search: BeamSearch, group: RequestGroup, logits: Tensor, sampler: Sampler, branch: Branch
) -> None:
    """Add a token to every beam, and replace the group's members by the new open beams."""
    logits = logits[:, : sampler.vocab_size]
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise RequestError(BAD_LOGITS)
    candidates = best_continuations(
        logits, group.members, search.scores, search.num_candidates, sampler
    )
    if not candidates:
        raise RequestError(why_none(group.members))
    num_top = search.params.logprobs
    if num_top is not None:
        unlisted = sampler.unlisted(logits.device)
        candidates = list(_reported(candidates, logits, num_top, unlisted))
    parents = search.advance(candidates)
    if not search.is_done:
        branch(group, parents)
        for member, beam in zip(group.members, search.beams, strict=True):
            member.output_token_ids.append(beam[-1].token_id)


def _reported(
    candidates: Sequence[Candidate], logits: Tensor, num_top: int, unlisted: Tensor | None
) -> Iterator[Candidate]:
    parents = [candidate.parent for candidate in candidates]
    tokens = [candidate.token_id for candidate in candidates]
    scored = prompt_logprobs(logits[parents], tokens, num_top, unlisted=unlisted)
    for candidate, score in zip(candidates, scored, strict=True):
        report = SampledToken(score.token_id, score.logprob, score.top_logprobs, score.rank)
        yield replace(candidate, report=report)


def tokens_of(path: Sequence[Candidate]) -> list[SampledToken]:
    """Return the tokens of a sequence with their reported log-probabilities."""
    return [
        candidate.report
        if isinstance(candidate.report, SampledToken)
        else SampledToken(candidate.token_id)
        for candidate in path
    ]
