"""Takes requests out of the KV memory to make room, and knows what that costs."""

from collections.abc import Iterable

from quire.engine.group import same_group, together
from quire.engine.preemption.victims import choose_victim, may_give_way, reclaimable_bytes
from quire.engine.request import Request
from quire.engine.residency import Residency
from quire.kv.swap import repack


class Preempter:
    """Chooses who gives way and takes it out.

    Args:
        residency: requests' rows in the pool.

    Attributes:
        num_preemptions: so far.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency, self._memory = residency, residency.memory
        self.num_preemptions = 0

    def victim(
        self, running: Iterable[Request], first: Request, *, even_returned: bool = False
    ) -> Request | None:
        """The request that gives way to `first`; None where nobody may.

        Args:
            running: all that hold KV.
            first: needs room. It and whatever goes before it never give way to it, so that the
                first in line always moves on; neither do those of its group.
            even_returned: also those that have not moved on since they came back; for when nobody
                moves at all.
        """
        candidates = [
            request
            for request in running
            if request.order > first.order
            and not same_group(request, first)
            and (even_returned or may_give_way(request))
        ]
        return choose_victim(candidates, self._worth, lambda request: False)

    def _worth(self, request: Request) -> float:
        """Bytes won for a token of lost work, less where the answer is nearly done.

        Source: vLLM's proposal 56897 (reclaimable blocks over tokens, times 1 - progress).
        """
        done = len(request.output_token_ids) / max(1, request.params.max_tokens)
        leaving = [member for member in together(request) if member.row >= 0]
        lost_tokens = sum(member.num_computed for member in leaving)
        return reclaimable_bytes(self._memory, leaving) / max(1, lost_tokens) * (1 - done)

    def take_out(self, request: Request, reason: str) -> None:
        """Free a request's memory; its KV is computed again when it comes back."""
        lost_tokens = request.num_computed
        request.preemptions += 1
        self.num_preemptions += 1
        freed_bytes = self._residency.leave(request, "preempted")
        self._residency.events.emit(
            "preempted",
            request,
            how="recompute",
            reason=reason,
            lost_tokens=lost_tokens,
            freed_bytes=freed_bytes,
        )

    def forget(self, request: Request) -> None:
        """A request that waits has ended: nothing of it stays anywhere."""
        request.swapped = None

    def pack(self, request: Request) -> None:
        """Move the pages of a request that is alone, or of its group, together.

        They may lie between places of pages that are gone, and so keep more slabs than they fill
        from the other page classes. Packed, a request that was admitted can always grow.
        """
        members = [member for member in together(request) if member.row >= 0]
        for member in members:
            self._residency.stop_sharing(member)
        self._residency.drop_cached()
        for member in members:
            repack(self._memory, member.row)
