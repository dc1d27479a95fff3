"""Reserved admission: enter only when prompt and max_tokens of all fit at once."""

from collections.abc import Sequence

from quire.scheduler.admission.base import AdmissionRule
from quire.scheduler.admission.peaks import Counts
from quire.scheduler.request import Request


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
