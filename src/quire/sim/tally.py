"""What the scheduler's events add up to: work lost, and KV moved between device and host."""

from dataclasses import dataclass

from quire.scheduler.events import KVEvent

_SWAPS = ("swapped_out", "swapped_in")


@dataclass(slots=True)
class EventTally:
    """A listener of KV events.

    Attributes:
        lost_tokens: whose KV was thrown away by preemptions.
        num_swaps_out, num_swaps_in: sequences moved to the host and back.
        swapped_bytes: of both.
        copied_bytes: of pages copied because somebody else reads them.
    """

    lost_tokens: int = 0
    num_swaps_out: int = 0
    num_swaps_in: int = 0
    swapped_bytes: int = 0
    copied_bytes: int = 0

    def __call__(self, event: KVEvent) -> None:
        """Note an event."""
        if event.kind in _SWAPS:
            self.swapped_bytes += int(event.data["kv_bytes"])
            self.num_swaps_out += event.kind == "swapped_out"
            self.num_swaps_in += event.kind == "swapped_in"
        elif event.kind == "preempted":
            self.lost_tokens += int(event.data["lost_tokens"])
        elif event.kind == "copied":
            self.copied_bytes += int(event.data["kv_bytes"])
