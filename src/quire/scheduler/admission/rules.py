"""Admission rules: which pages must be free before a waiting request may start.

optimistic   the known tokens; preemptions where answers outgrow the memory
reserved     prompt and max_tokens of all; no preemptions
estimated    the highest point over time, expected from the lengths of past answers

pages  |      ____
|   __/    |__        each running request grows with every step until it ends; at each
|__/          |___    end its memory returns. What must fit is the highest point.
+-----------------> steps
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.errors import UnknownName
from quire.scheduler.admission.need import need_of
from quire.scheduler.admission.peaks import Counts, Peaks
from quire.scheduler.request import Request


class AdmissionRule(ABC):
    """Says how many pages are promised to a newcomer and to those that run.

    Args:
        peaks: pages by what sequences need.
    """

    name: str

    def __init__(self, peaks: Peaks) -> None:
        self.peaks = peaks

    @abstractmethod
    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """Pages that must be free, or idle in the prefix cache, for `request` to start.

        Args:
            request: waits.
            running: hold KV.
            cached_tokens: tokens of `request` whose pages are there already and are shared.

        Returns:
            [page classes], as `Peaks.page_classes`.
        """

    def learn(self, request: Request) -> None:  # noqa: B027 - most rules learn nothing
        """Note a request that has ended by itself."""

    def new_request(self, request: Request, tokens: int, cached_tokens: int) -> Counts:
        """Pages a waiting request takes to have had `tokens` tokens, without those it shares.

        What it shares it cannot move to the host with gain: it does one or the other.
        """
        need = need_of(request, tokens)
        [apart, whole] = self.peaks.counts([need, replace(need, may_offload=False)])
        missing = np.maximum(whole - self.peaks.shared_counts(need, cached_tokens), 0)
        least: Counts = np.minimum(apart, missing)
        return least


class Optimistic(AdmissionRule):
    """Largest batches, and preemptions when answers outgrow the pool.

    Source: the admission of vLLM; what prompts that are being read will still take is counted in,
    as its option `scheduler_reserve_full_isl` does.
    """

    name = "optimistic"

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """See `AdmissionRule`."""
        readers = [other for other in running if other.num_uncomputed > 1]
        owed = self.peaks.owed(readers, [reader.num_tokens for reader in readers])
        promised: Counts = self.new_request(request, request.num_tokens, cached_tokens) + owed.sum(
            axis=0
        )
        return promised


class Reserved(AdmissionRule):
    """No preemption for want of memory, ever; small batches where answers end early.

    Source: the admission of Orca and of Text Generation Inference: input and longest output.
    """

    name = "reserved"

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """See `AdmissionRule`."""
        owed = self.peaks.owed(running, [other.final_tokens for other in running])
        promised: Counts = self.new_request(
            request, request.final_tokens, cached_tokens
        ) + owed.sum(axis=0)
        return promised


INITIAL_RATIO = 1.0
LEARNING_RATE = 0.05
CAUTION = 1.2
ROUNDING = 1e-6  # of pages, which are counted in thousands


class Estimated(AdmissionRule):
    """Between the other two, by what answers have turned out to be.

    The share of `max_tokens` that answers use is learned from those that have ended, as a moving
    average times a margin; it starts at 1, which is the reserved rule, and decays from there.

    Source: the ratio of new tokens follows SGLang's `new_token_ratio`; the peak over time follows
    LightLLM's Past-Future estimator. Differs: the ratio is learned from ended answers instead of
    decaying with every step, and pages are counted instead of tokens.

    Attributes:
        ratio: share of `max_tokens` an answer is expected to use.
    """

    name = "estimated"

    def __init__(self, peaks: Peaks) -> None:
        super().__init__(peaks)
        self.ratio = INITIAL_RATIO

    def learn(self, request: Request) -> None:
        """Move the ratio towards what this answer used."""
        if request.params.max_tokens:
            used = len(request.output_token_ids) / request.params.max_tokens
            self.ratio += LEARNING_RATE * (used - self.ratio)

    def expected_tokens(self, request: Request) -> int:
        """Length at which a request is expected to end: at least one token further on."""
        answer = round(min(1.0, CAUTION * self.ratio) * request.params.max_tokens)
        ended = max(len(request.prompt_token_ids) + answer - 1, request.num_tokens + 1)
        return max(request.num_tokens, min(ended, request.final_tokens))

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """See `AdmissionRule`: the highest point of the pages to come."""
        ends = [self.expected_tokens(other) for other in running]
        end = self.expected_tokens(request)
        owed = self.peaks.owed(running, ends)
        new_request = self.new_request(request, end, cached_tokens)
        held = self.peaks.held(running)
        steps = [e - other.num_tokens for e, other in zip(ends, running, strict=True)]
        return highest_point(
            np.array([*steps, end - request.num_tokens]),
            np.vstack([owed, new_request]),
            np.vstack([held + owed, new_request]),
        )


def highest_point(steps: Counts, owed: Counts, returned: Counts) -> Counts:
    """Most further pages of each class that are taken at any time.

    Args:
        steps: [n] until each sequence ends.
        owed: [n, page classes] it takes until then, evenly.
        returned: [n, page classes] it gives back then.

    Returns:
        [page classes]; at least 0.
    """
    order = np.argsort(steps, kind="stable")
    steps, owed, returned = steps[order], owed[order], returned[order]
    rate = owed / np.maximum(steps, 1)[:, None]
    # at the i-th end all that end later have grown as long, and the earlier ones are gone
    growing = np.cumsum(rate[::-1], axis=0)[::-1] * np.maximum(steps, 1)[:, None]
    gone = np.cumsum(returned, axis=0) - returned
    grown_whole = np.cumsum(owed, axis=0) - owed  # what the gone ones had taken besides
    level = growing + grown_whole - gone
    # a page that is there by the rounding of a rate times its steps only is not taken
    highest: Counts = np.ceil(level.max(axis=0, initial=0) - ROUNDING).astype(np.int64)
    return highest


RULES: dict[str, type[AdmissionRule]] = {
    rule.name: rule for rule in (Optimistic, Reserved, Estimated)
}


def make_admission(name: str, peaks: Peaks) -> AdmissionRule:
    """The rule of this name.

    Raises:
        UnknownName: there is none.
    """
    if name not in RULES:
        raise UnknownName("admission rule", name, RULES)
    return RULES[name](peaks)
