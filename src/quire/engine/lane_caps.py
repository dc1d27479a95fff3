"""Keeps lanes at or under their cap: asks for an eviction before the next token is processed."""

from collections.abc import Callable

from quire.engine.request import Request, RequestState
from quire.engine.residency import Residency
from quire.errors import OutOfPages, PolicyError
from quire.spec.eviction import EvictionSpec

Evictor = Callable[[Request, int], None]  # (request, slots to keep in every evicting lane)


class LaneCaps:
    """Evicts from lanes that are full.

    Args:
        residency: requests' rows.
        eviction: how many tokens a lane may hold, and how many leave at a time.
        evict: chooses and moves; which tokens leave depends on tensors.
        fail: called with a request whose policy broke its contract.
    """

    def __init__(
        self,
        residency: Residency,
        eviction: EvictionSpec,
        evict: Evictor,
        fail: Callable[[Request, PolicyError], None],
    ) -> None:
        self._residency, self._eviction, self._evict = residency, eviction, evict
        self._fail = fail

    def bring_down(self, requests: list[Request]) -> list[Request]:
        """Evict from those whose lanes are full; return the requests that can go on."""
        cap = self._eviction.cap
        if cap is None:
            return requests
        full = [r for r in requests if self._held_tokens(r) >= cap]
        failed = [r for r in full if not self._try(r, cap - self._eviction.every)]
        if not failed:
            return requests
        # others of a group leave with the member they were to be copied from
        return [r for r in requests if r not in failed and r.state is RequestState.RUNNING]

    def _try(self, request: Request, keep: int) -> bool:
        """Evict; False where the policy failed, or private copies of shared pages found no room."""
        self._residency.stop_sharing(request)
        request.exact = False
        try:
            self._evict_unsharing(request, keep)
        except OutOfPages:
            return False
        except PolicyError as error:
            self._fail(request, error)
            return False
        return True

    def _evict_unsharing(self, request: Request, keep: int) -> None:
        """Evict; where copies of shared pages find no room, after the cached prefixes are gone."""
        try:
            self._evict(request, keep)
        except OutOfPages:
            self._residency.drop_cached()
            self._evict(request, keep)

    def _held_tokens(self, request: Request) -> int:
        """Most slots any evicting lane of the request holds."""
        tables = self._residency.memory.tables.values()
        evicting = (t for t in tables if not t.group.ordered and not t.group.private)
        return max((int(t.num_slots[request.row].max()) for t in evicting), default=0)
