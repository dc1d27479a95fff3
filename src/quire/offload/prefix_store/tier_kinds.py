"""The kinds of tiers for cached prefixes, and the counters of each tier."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStats:
    """Contents and counters of one tier for prefixes.

    Attributes:
        name: cpu, disk or remote.
        stored_bytes: bytes of the blocks and statistics that can be found in it.
        found_blocks: blocks that it held when the engine started.
        stored_blocks: blocks written since then.
        spilled_bytes: bytes of evicted entries that were written to the tier below.
        num_discarded: entries that were damaged or missing when they were read.
        num_failed: entries that could not be written.
    """

    name: str
    stored_bytes: int
    found_blocks: int
    stored_blocks: int
    spilled_bytes: int
    num_discarded: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class TierKind:
    """Kind of a tier for prefixes.

    Attributes:
        name: for reports.
        evicts_when_full: whether to evict the least recently used entry if the tier is full;
            otherwise the store server evicts entries, and other processes write to it too.
        persistent: whether entries outlive the tier; if not, they are written to the tier below
            when it is closed.
    """

    name: str
    evicts_when_full: bool = True
    persistent: bool = True


CPU = TierKind("cpu", persistent=False)
DISK = TierKind("disk")
REMOTE = TierKind("remote", evicts_when_full=False)
