"""The running and waiting requests: state that all components of the scheduler share."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.scheduler.request import Request
from quire.tenancy.fair_queue import FairQueue
from quire.tenancy.tenants import TenantSpec


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The requests of one scheduler. Only its lifecycle and admission change them.

    Attributes:
        running: running requests, which hold KV, in the order of admission.
        waiting: waiting requests, in a queue that is fair by served tokens.
    """

    running: list[Request]
    waiting: FairQueue[Request]

    @classmethod
    def empty(cls, tenants: Sequence[TenantSpec] = ()) -> "SchedulerState":
        """Return the state before the first request.

        Args:
            tenants: the configured tenants.
        """
        return cls([], FairQueue({spec.name: spec.weight for spec in tenants}))
