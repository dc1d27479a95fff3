"""Optimistic admission: enter when the known tokens fit; find room for the others as they come."""

from collections.abc import Sequence

from quire.scheduler.admission.base import AdmissionRule
from quire.scheduler.admission.peaks import Counts
from quire.scheduler.request import Request


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
