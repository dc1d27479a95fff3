"""Admission rules: which pages must be free before a waiting request may start.

optimistic   pages of the known tokens; requests are preempted if outputs outgrow the memory
reserved     pages of prompt and max_tokens of all requests; no preemptions
estimated    the peak over time, estimated from the lengths of past outputs

pages  |      ____
|   __/    |__        each running request grows with every step until it ends, and then its
|__/          |___    pages are freed; the peak must fit.
+-----------------> steps
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.errors import UnknownName
from quire.scheduler.peaks import Counts, Peaks, need_of
from quire.scheduler.request import Request


class AdmissionRule(ABC):
    """Computes the pages promised to a new request and to the running requests.

    Args:
        peaks: page arithmetic.

    Attributes:
        name: name in options.
        promises_growth: whether the promised pages include those of tokens to come.
    """

    name: str
    promises_growth = True

    def __init__(self, peaks: Peaks) -> None:
        self.peaks = peaks

    @abstractmethod
    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """Pages that must be free, or unused in the prefix cache, for `request` to start.

        Args:
            request: a waiting request.
            running: the running requests.
            cached_tokens: tokens of `request` whose pages are found in the prefix cache.

        Returns:
            [page classes], in the order of `Peaks.page_classes`.
        """

    def learn(self, request: Request) -> None:  # noqa: B027 - most rules learn nothing
        """Record a request that finished normally."""

    def new_request(self, request: Request, tokens: int, cached_tokens: int) -> Counts:
        """Pages that a waiting request allocates until `tokens` tokens, without shared pages.

        Offloading a shared page frees no memory, so the request either offloads or shares. A longer
        sequence may need fewer pages, because it is computed in smaller steps: the request was
        accepted with the pages of its final length, so it never needs more.
        """
        needs = [need_of(request, n) for n in (tokens, max(tokens, request.final_tokens))]
        offloaded = self.peaks.counts(needs).min(axis=0)
        whole = self.peaks.counts([replace(need, may_offload=False) for need in needs]).min(axis=0)
        missing = np.maximum(whole - self.peaks.shared_counts(needs[0], cached_tokens), 0)
        least: Counts = np.minimum(offloaded, missing)
        return least


class Optimistic(AdmissionRule):
    """Largest batches; requests are preempted when outputs outgrow the memory.

    Source: the admission of vLLM. The pages that running prefills will still allocate are counted,
    as with vLLM's option `scheduler_reserve_full_isl`.
    """

    name = "optimistic"
    promises_growth = False

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        prefills = [other for other in running if other.num_uncomputed > 1]
        further = self.peaks.further_pages(prefills, [other.num_tokens for other in prefills])
        promised: Counts = self.new_request(
            request, request.num_tokens, cached_tokens
        ) + further.sum(axis=0)
        return promised


class Reserved(AdmissionRule):
    """No preemptions for lack of memory; small batches if outputs end early.

    Source: the admission of Orca and of Text Generation Inference: input and longest output.
    """

    name = "reserved"

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        further = self.peaks.further_pages(running, [other.final_tokens for other in running])
        promised: Counts = self.new_request(
            request, request.final_tokens, cached_tokens
        ) + further.sum(axis=0)
        return promised


AUTO = "auto"
INITIAL_RATIO = 1.0
LEARNING_RATE = 0.05
CAUTION = 1.2
ROUNDING = 1e-6  # pages; counts are in the thousands


class Estimated(AdmissionRule):
    """Compromise between the other two rules, from the lengths of past outputs.

    The fraction of `max_tokens` that outputs use is learned from finished requests: their mean at
    first, then a moving average, times a margin. It starts at 1, which equals the reserved rule.
    Outputs that cannot end early (`ignore_eos` without stop tokens) use all of `max_tokens`.

    Source: the ratio of new tokens follows SGLang's `new_token_ratio`; the peak over time follows
    LightLLM's Past-Future estimator. Differs from them: the ratio is learned from finished requests
    instead of decaying with every step, and pages are counted instead of tokens.

    Attributes:
        ratio: fraction of `max_tokens` that an output is expected to use.
    """

    name = "estimated"

    def __init__(self, peaks: Peaks) -> None:
        super().__init__(peaks)
        self.ratio = INITIAL_RATIO
        self._num_learned = 0

    def learn(self, request: Request) -> None:
        """Move the ratio towards the fraction of `max_tokens` that this output used."""
        if request.params.max_tokens and not has_fixed_length(request):
            self._num_learned += 1
            used = len(request.output_token_ids) / request.params.max_tokens
            rate = max(LEARNING_RATE, 1 / (1 + self._num_learned))  # the initial ratio counts once
            self.ratio += rate * (used - self.ratio)

    def expected_tokens(self, request: Request) -> int:
        """Length at which a request is expected to end: at least one token more than now."""
        ratio = 1.0 if has_fixed_length(request) else min(1.0, CAUTION * self.ratio)
        output = round(ratio * request.params.max_tokens)
        ended = max(len(request.prompt_token_ids) + output - 1, request.num_tokens + 1)
        return max(request.num_tokens, min(ended, request.final_tokens))

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """The peak of further pages over time."""
        ends = [self.expected_tokens(other) for other in running]
        end = self.expected_tokens(request)
        further = self.peaks.further_pages(running, ends)
        new_request = self.new_request(request, end, cached_tokens)
        held = self.peaks.held(running)
        steps = [e - other.num_tokens for e, other in zip(ends, running, strict=True)]
        return highest_point(
            np.array([*steps, end - request.num_tokens]),
            np.vstack([further, new_request]),
            np.vstack([held + further, new_request]),
        )


def has_fixed_length(request: Request) -> bool:
    """Whether the output of a request always has `max_tokens` tokens."""
    params = request.params
    return params.ignore_eos and not (params.stop or params.stop_token_ids)


def highest_point(steps: Counts, further: Counts, returned: Counts) -> Counts:
    """Peak of further pages of each class over time.

    Args:
        steps: [n] steps until each sequence ends.
        further: [n, page classes] pages it allocates until then, at a constant rate.
        returned: [n, page classes] pages it frees at its end.

    Returns:
        [page classes]; at least 0.
    """
    order = np.argsort(steps, kind="stable")
    steps, further, returned = steps[order], further[order], returned[order]
    rate = further / np.maximum(steps, 1)[:, None]
    # at the i-th end, later sequences have grown for as many steps and earlier ones are freed
    growing = np.cumsum(rate[::-1], axis=0)[::-1] * np.maximum(steps, 1)[:, None]
    freed = np.cumsum(returned, axis=0) - returned
    allocated = np.cumsum(further, axis=0) - further  # by the ended sequences; part of `freed`
    level = growing + allocated - freed
    # rounding errors of rate times steps must not count as a page
    highest: Counts = np.ceil(level.max(axis=0, initial=0) - ROUNDING).astype(np.int64)
    return highest


RULES: dict[str, type[AdmissionRule]] = {
    rule.name: rule for rule in (Optimistic, Reserved, Estimated)
}


def make_admission(name: str, peaks: Peaks, *, can_swap: bool = False) -> AdmissionRule:
    """Create the admission rule with this name.

    Args:
        name: a name in `RULES`, or "auto": `optimistic` if preempted requests can be swapped out,
            which costs little, else `estimated`.
        peaks: page arithmetic.
        can_swap: whether preempted requests can be swapped out.

    Raises:
        UnknownName: an unknown rule.
    """
    if name == AUTO:
        name = Optimistic.name if can_swap else Estimated.name
    if name not in RULES:
        raise UnknownName("admission rule", name, (AUTO, *RULES))
    return RULES[name](peaks)
