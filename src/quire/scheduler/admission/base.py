"""The seam of admission: what must have room before a waiting request may start."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

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
        [apart, whole] = self.peaks.counts([need, replace(need, streams=False)])
        missing = np.maximum(whole - self.peaks.shared_counts(need, cached_tokens), 0)
        least: Counts = np.minimum(apart, missing)
        return least
