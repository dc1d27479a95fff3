"""Who is thrown out when the KV memory is full, and what that costs."""

from collections.abc import Iterable

from quire.engine.request import Request


def choose_victim(running: Iterable[Request], spare: Request) -> Request | None:
    """The running request that gives way first: lowest priority, then the newest.

    Args:
        running: candidates.
        spare: the request that needs room; it and whatever goes before it never give way, so the
            first in line always moves on and nobody is thrown out in circles.
    """
    behind = [request for request in running if request.order > spare.order]
    return max(behind, key=lambda request: request.order, default=None)
