"""Which requests run and which wait: the one state that the scheduler and its parts share."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.scheduler.request import Request
from quire.tenancy.fair_queue import FairQueue
from quire.tenancy.tenants import TenantSpec


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The requests of one scheduler, whose lifecycle and admission alone change them.

    Attributes:
        running: requests that hold KV, in the order in which they were admitted.
        waiting: requests that do not, fair by served tokens.
    """

    running: list[Request]
    waiting: FairQueue[Request]

    @classmethod
    def empty(cls, tenants: Sequence[TenantSpec] = ()) -> "SchedulerState":
        """The state before the first request.

        Args:
            tenants: those that are configured.
        """
        return cls([], FairQueue({spec.name: spec.weight for spec in tenants}))
