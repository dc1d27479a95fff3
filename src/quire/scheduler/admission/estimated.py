"""Estimated admission: enter when the peak that is expected over time fits.

pages  |      ____
|   __/    |__        each running request grows with every step until it ends; at each
|__/          |___    end its memory returns. What must fit is the highest point.
+-----------------> steps
"""

from collections.abc import Sequence

import numpy as np

from quire.scheduler.admission.base import AdmissionRule
from quire.scheduler.admission.peaks import Counts, Peaks
from quire.scheduler.request import Request

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
