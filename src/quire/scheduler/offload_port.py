"""The scheduler's interface to `quire.offload`: two torch-free protocols."""

from typing import Protocol, runtime_checkable

from quire.layout.pages import PageClass
from quire.scheduler.request import Request


@runtime_checkable  # for the type checks in tests
class KVOffloader(Protocol):
    """Offloads KV of running requests; implemented by `quire.offload.kv.offloader.PrefixOffloader`.

    Attributes:
        offload_bytes: size of the offload memory, for KV and activations.
    """

    offload_bytes: int

    @property
    def offloaded_tokens(self) -> int:
        """Tokens of a single sequence that fit in the empty offload memory."""
        ...

    def offload_some(self) -> bool:
        """Offload pages of one request.

        Returns:
            False if no request has pages whose offload would free KV memory.
        """
        ...

    def halve_staging(self, request: Request) -> None:
        """Reduce a request to one staging slot and offload as many of its pages as possible."""
        ...

    def holds_unused(self, request: Request) -> bool:
        """Whether pages that were offloaded with those of a request occupy memory without use."""
        ...


@runtime_checkable
class PrefixLoads(Protocol):
    """Loads cached prefixes from a second tier; implemented by `PrefixLoader` of `quire.offload`.

    Attributes:
        waits: whether a request could not be planned since `begin_plan` because its pages are in
            flight.
    """

    waits: bool

    def begin(self, request: Request) -> None:
        """Start to load a request's prefix from the tier if that is faster than recomputing it."""
        ...

    def forget(self, request: Request) -> None:
        """Stop a request's load, because its row was freed."""
        ...

    def begin_plan(self) -> None:
        """Reset `waits` for the plan of a new step."""
        ...

    def wait(self) -> bool:
        """Wait briefly for pages in flight; return whether any have been loaded."""
        ...

    def is_waiting(self, request: Request) -> bool:
        """Whether a request waits for pages in flight, so that it cannot be planned."""
        ...

    def may_read(self, request: Request, budget: int) -> int:
        """Tokens of a prompt that may be computed before the pages in flight, up to `budget`."""
        ...

    def pages_in_flight(self, request: Request) -> dict[PageClass, int]:
        """Pages that are allocated for a request but not in its page table yet."""
        ...
