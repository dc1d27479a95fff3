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
        num_discarded: entries that were damaged or missing when they were listed or read.
        num_damaged: damaged entries, and other damaged parts of the tier that were rebuilt.
        num_failed: entries that could not be written.
        num_outages: how often it stopped responding.
    """

    name: str
    stored_bytes: int
    found_blocks: int
    stored_blocks: int
    spilled_bytes: int
    num_discarded: int
    num_damaged: int
    num_failed: int
    num_outages: int


@dataclass(frozen=True, slots=True)
class TierKind:
    """Kind of a tier for prefixes.

    Attributes:
        name: for reports.
        persistent: whether entries outlive the tier; if not, they are written to the tier below
            when it is closed.
        is_shared: whether other processes may write to the tier too.
        looks_up: whether new requests look up what others have just written.
    """

    name: str
    persistent: bool = True
    is_shared: bool = True
    looks_up: bool = False


CPU = TierKind("cpu", persistent=False, is_shared=False)
DISK = TierKind("disk")
REMOTE = TierKind("remote", looks_up=True)
