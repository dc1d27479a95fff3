"""The ledger as one tenant may see it: its own requests, and sums over these alone."""

from collections import Counter
from collections.abc import Iterable

from quire.engine.ledger import Snapshot

_AXES = ("codec", "exactness", "sharing", "references")


def ledger_of(snapshot: Snapshot, tenant: str) -> Snapshot:
    """The part of a ledger that is a tenant's own.

    Totals of the arena, of the swap space and of the prefix cache are left out, and the axes are
    summed anew: each of them would tell what the other tenants hold.

    Args:
        snapshot: of the engine.
        tenant: whose.
    """
    requests = [row for row in snapshot["requests"] if row["tenant"] == tenant]
    return {
        "axes": _axes(requests),
        "tenants": [row for row in snapshot["tenants"] if row["tenant"] == tenant],
        "requests": requests,
    }


def _axes(requests: list[Snapshot]) -> dict[str, dict[str, int]]:
    kv_bytes = sum(row["kv_bytes"] for row in requests)
    host_bytes = sum(row["host_bytes"] for row in requests)
    extents = [extent for row in requests for extent in row["extents"]]
    return {
        "residency": {"device": kv_bytes, "host": host_bytes},
        "owner": {"requests": kv_bytes},
        **{axis: _sum((str(e[axis]), e["bytes"]) for e in extents) for axis in _AXES},
    }


def _sum(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, num_bytes in parts:
        total[name] += num_bytes
    return dict(total)
