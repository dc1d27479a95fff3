"""Sampling step: prompt log-probabilities, next tokens and finished outputs of a step's logits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.errors import RequestError
from quire.sampling.beam_step import Branch, advance_beams
from quire.sampling.device_sampling import LaunchedTokens
from quire.sampling.logits import StepLogits, last_rows
from quire.sampling.output_processor import OutputProcessor
from quire.sampling.outputs import OutputDelta
from quire.sampling.pending_tokens import PendingTokens
from quire.sampling.pooling import StepHidden
from quire.sampling.sampler import SampledToken, Sampler, prompt_logprobs, waited
from quire.scheduler.fairness import TenantMeter
from quire.scheduler.request import PlannedFork, Request, RequestGroup, RequestState


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The tokens of a step that are being sampled on the device."""

    requests: tuple[Request, ...]
    tokens: LaunchedTokens

    @property
    def pending(self) -> PendingTokens:
        rows = {request: row for row, request in enumerate(self.requests)}
        return PendingTokens(self.tokens.token_ids, rows)


class SamplingStep:
    """Computes output deltas from the logits of steps.

    Args:
        sampler: samples the tokens.
        outputs: output states of the requests.
        changes: `Scheduler.branch` and `Scheduler.settle`.
        clock: time in seconds.
        meter: counts tokens of tenants.
    """

    def __init__(
        self,
        sampler: Sampler,
        outputs: OutputProcessor,
        changes: tuple[Branch, Callable[[Sequence[Request]], None]],
        clock: Callable[[], float],
        meter: TenantMeter,
    ) -> None:
        self.sampler = sampler
        self._outputs, self._clock, self._meter = outputs, clock, meter
        self._branch, self._settle = changes
        self.num_generated_tokens = 0

    def deltas(
        self,
        results: Sequence[StepLogits | StepHidden],
        requests: Sequence[Request],
        forks: Sequence[PlannedFork],
    ) -> Iterator[OutputDelta]:
        """Yield the deltas of a step as they are computed."""
        logits = [result for result in results if isinstance(result, StepLogits)]
        for result in results:
            if isinstance(result, StepHidden):
                self._outputs.add_hidden(result)
        yield from self._score_prompts(logits)
        ready = [r for r in (*logits, *_fork_logits(logits, forks)) if _is_ready(r.request)]
        rows = [result for result in ready if not _is_beam(result.request)]
        yield from self._sample([r for r in rows if not r.request.draft_token_ids])
        yield from self._verify([r for r in rows if r.request.draft_token_ids])
        yield from self._end_without_tokens([*requests, *(planned.child for planned in forks)])
        yield from self._advance_searches([result for result in ready if _is_beam(result.request)])

    @property
    def can_launch(self) -> bool:
        """Whether the sampler samples on the device; a sampler that replaced it may not."""
        return type(self.sampler).sample is Sampler.sample

    def launch(
        self, results: Sequence[StepLogits | StepHidden], forks: Sequence[PlannedFork]
    ) -> LaunchedStep | None:
        """Sample without waiting for the device; no request scores its prompt or is a beam."""
        logits = [result for result in results if isinstance(result, StepLogits)]
        ready = [r for r in (*logits, *_fork_logits(logits, forks)) if _is_ready(r.request)]
        if not ready:
            return None
        requests = tuple(result.request for result in ready)
        return LaunchedStep(requests, self.sampler.launch(last_rows(ready), requests))

    def collect(self, launched: LaunchedStep) -> Iterator[OutputDelta]:
        """Wait for the tokens of a launched step; yield the deltas of its unfinished requests."""
        tokens = waited(launched.tokens)
        yield from self._add(zip(launched.requests, tokens, strict=True))

    def fail(self, request: Request, error: str) -> list[OutputDelta]:
        return self._outputs.end(request, "error", self._clock(), error)

    def _score_prompts(self, results: Iterable[StepLogits]) -> Iterator[OutputDelta]:
        for result in results:
            request, num_top = result.request, result.request.params.prompt_logprobs
            first = result.first_position + 1  # the row of token i scores token i + 1
            if num_top is None or first > len(request.prompt_token_ids):
                continue
            following = request.prompt_token_ids[first : first + len(result.logits)]
            try:
                scored = prompt_logprobs(
                    result.logits[: len(following)],
                    following,
                    num_top,
                    one_by_one=self.sampler.one_by_one,
                    unlisted=self.sampler.unlisted(result.logits.device),
                )
            except RequestError as error:
                yield from self.fail(request, str(error))
                continue
            self._outputs.add_scores(request, first, scored)

    def _sample(self, ready: list[StepLogits]) -> Iterator[OutputDelta]:
        if not ready:
            return
        requests = [result.request for result in ready]
        tokens = self.sampler.sample(last_rows(ready), requests)
        yield from self._add(zip(requests, tokens, strict=True))

    def _verify(self, ready: list[StepLogits]) -> Iterator[OutputDelta]:
        """Sample after each proposed token that was sampled itself; see `speculation`."""
        place, left = 0, ready
        while left:
            yield from self._sample([result.only(place) for result in left])
            left = [result for result in left if _accepts(result.request, place)]
            place += 1
        self._settle([result.request for result in ready])

    def _add(self, sampled: Iterable[tuple[Request, SampledToken]]) -> Iterator[OutputDelta]:
        now_s = self._clock()
        for request, token in sampled:
            if request.progress.state is not RequestState.FINISHED:
                self._count(request, int(token.error is None))
                yield from self._outputs.add_token(request, token, now_s)

    def _advance_searches(self, ready: list[StepLogits]) -> Iterator[OutputDelta]:
        """Advance beam searches. Call it last, since branching beams may preempt other requests."""
        groups = {id(r.request.group): r.request.group for r in ready}
        for group in groups.values():
            if group is not None and all(map(_is_ready, group.members)):  # not if one has failed
                yield from self._search(group, [r for r in ready if r.request.group is group])

    def _search(self, group: RequestGroup, results: list[StepLogits]) -> Iterator[OutputDelta]:
        by_member = {id(result.request): result for result in results}
        rows = [by_member[id(member)] for member in group.members]
        first, search = group.members[0], self._outputs.search_of(group.members[0])
        try:
            logits = self.sampler.search_logits(last_rows(rows))
            advance_beams(search, group, logits, self.sampler, self._branch)
        except RequestError as error:
            yield from self.fail(first, str(error))
            return
        self._count(first, search.width)
        if search.is_done:
            yield from self._outputs.end_search(first, self._clock())

    def _count(self, request: Request, tokens: int) -> None:
        self.num_generated_tokens += tokens
        self._meter.served(request.tenant, output_tokens=tokens)

    def _end_without_tokens(self, requests: Iterable[Request]) -> Iterator[OutputDelta]:
        """End requests with `max_tokens=0`: prompt log-probabilities or embeddings."""
        for request in requests:
            running = request.is_running
            if running and request.num_uncomputed == 0 and not request.params.max_tokens:
                yield from self._outputs.end(request, "length", self._clock())


def _is_ready(request: Request) -> bool:
    running = request.is_running
    return running and request.num_uncomputed == 0 and bool(request.params.max_tokens)


def _accepts(request: Request, place: int) -> bool:
    """Whether the newest token is the proposed one at this place, and the output goes on."""
    drafts = request.drafts
    assert drafts is not None, "its proposals are verified"
    right = place < len(drafts.token_ids) and request.is_running
    right = right and request.output_token_ids[-1] == drafts.token_ids[place]
    drafts.num_accepted += right
    return right


def _is_beam(request: Request) -> bool:
    return request.group is not None and request.group.atomic


def _fork_logits(
    results: Iterable[StepLogits], forks: Iterable[PlannedFork]
) -> Iterator[StepLogits]:
    """Yield the parent's logits for each fork that has no further tokens to compute."""
    by_parent = {id(result.request): result for result in results}
    for planned in forks:
        result = by_parent.get(id(planned.parent))
        if result is not None and planned.child.num_uncomputed == 0:
            yield replace(result, request=planned.child)
