"""What the scheduler knows of offload: two torch-free protocols that `quire.offload` implements."""

from typing import Protocol, runtime_checkable

from quire.layout.pages import PageClass
from quire.scheduler.request import Request


@runtime_checkable  # for the type checks in tests
class KVOffloader(Protocol):
    """Offloads KV of running requests; `quire.offload.kv.offloader.PrefixOffloader` is one.

    Attributes:
        offload_bytes: of offload memory, for KV and activations.
    """

    offload_bytes: int

    @property
    def offloaded_tokens(self) -> int:
        """Tokens of one sequence that offload memory holds when nothing else is there."""
        ...

    def is_staged(self, request: Request) -> bool:
        """Whether a running request has offloaded pages."""
        ...

    def stops_evicting(self, request: Request) -> bool:
        """Whether a running request could lose tokens if its offloaded pages were back."""
        ...

    def move_some(self, but: Request | None = None) -> bool:
        """Offload pages of a request; False where none has any that would free memory."""
        ...

    def load_back(self, request: Request) -> None:
        """Bring all pages of a request back into the arena, for it to evict.

        Raises:
            OutOfPages: no other request has pages that could be offloaded; nothing was changed.
        """
        ...

    def halve_staging(self, request: Request) -> None:
        """Leave a request one staging slot, and offload all of it that can be."""
        ...


@runtime_checkable
class PrefixLoads(Protocol):
    """Loads cached prefixes from a second tier; `PrefixLoader` of `quire.offload` is one.

    Attributes:
        waits: a request could not be planned since `begin_plan`: its pages are in flight.
    """

    waits: bool

    def begin(self, request: Request) -> None:
        """Begin to load what the tier has of a request's prefix, where that pays."""
        ...

    def forget(self, request: Request) -> None:
        """Stop a request's load: its row is gone."""
        ...

    def begin_plan(self) -> None:
        """Begin to plan a step."""
        ...

    def wait(self) -> bool:
        """Wait a moment for pages; whether any have arrived."""
        ...

    def is_waiting(self, request: Request) -> bool:
        """Whether a request waits for pages and can be planned no further."""
        ...

    def may_read(self, request: Request, budget: int) -> int:
        """Tokens of a prompt that may be read before the loaded ones."""
        ...

    def pages_in_flight(self, request: Request) -> dict[PageClass, int]:
        """Pages that are allocated for a request and that its row does not name yet."""
        ...
