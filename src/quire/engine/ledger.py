"""The ledger: owner of every byte of KV memory, as a JSON snapshot.

An extent has a value on each of several independent axes: location, codec, exactness, sharing and
owner. On every axis the extents add up to the bytes of pages in use. Together with free slabs and
the waste at slab boundaries they add up to the arena.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from quire.errors import InvariantError
from quire.kv.ledger import NO_ROW, LedgerExtent, extents_of, prove_extents
from quire.kv.memory import KVMemory
from quire.kv.swap import Swapped
from quire.offload.swap.host_pool import HostPool
from quire.scheduler.request import Request

Snapshot = dict[str, Any]
NO_OWNER = ""
"""Request id and tenant of rows without a request of this engine."""


@dataclass(frozen=True, slots=True)
class HostExtent:
    """Pages of a swapped request in one page class."""

    request: Request
    codec: str
    num_bytes: int  # the request's share; requests swapped together share pages
    exact: bool  # whether the KV was exact when the request was swapped out


@runtime_checkable
class OnHost(Protocol):
    """Offloaded KV pages of running requests."""

    def totals(self) -> dict[str, int]:
        """Bytes of offloaded KV and of activation checkpoints, with the names of `EngineStats`."""
        ...

    def check(self) -> None:
        """Verify these bytes."""


class Ledger:
    """Reports the memory accounts of an engine. Stores no counters: see `quire.kv.ledger`."""

    def __init__(
        self,
        memory: KVMemory,
        requests: Callable[[], Iterable[Request]],
        host: HostPool | None = None,
        in_flight: Callable[[], int] = int,
        offload: OnHost | None = None,
    ) -> None:
        self._memory, self._requests, self._host = memory, requests, host
        self._in_flight, self._offload = in_flight, offload

    def snapshot(self) -> Snapshot:
        """Keys that end in `bytes` are sizes in bytes. `docs/ledger.md` has an example."""
        requests = sorted(self._requests(), key=lambda r: r.order)
        extents = extents_of(self._memory)
        host = list(_host_extents(requests))
        rows = _rows(requests, extents, host)
        return {
            "total_bytes": self._memory.total_bytes,
            "used_bytes": self._memory.used_bytes,
            "free_bytes": self._memory.free_bytes,
            "peak_bytes": self._memory.arena_peak_bytes,
            "axes": self._axes(extents, host),
            "tenants": _tenants(rows),
            "requests": rows,
            "host": {**self._host_totals(), **self._offload_totals()},
            "prefix_cache": [_shown(e) for e in extents if e.row == NO_ROW],
        }

    def _axes(self, extents: list[LedgerExtent], host: list[HostExtent]) -> Mapping[str, object]:
        pools = self._memory.pools.values()
        device_bytes = sum(e.num_bytes for e in extents)
        cached = _sum((str(e.row == NO_ROW), e.num_bytes) for e in extents)
        in_flight_bytes = self._in_flight()
        return {
            "location": {"device": device_bytes, "host": sum(e.num_bytes for e in host)},
            "owner": {
                "requests": cached.get("False", 0),
                "prefix_cache": cached.get("True", 0) - in_flight_bytes,
                "in_flight_loads": in_flight_bytes,
                "free": self._memory.free_bytes,
                "slab_borders": sum(pool.tail_bytes for pool in pools),
            },
            "codec": _sum((e.codec, e.num_bytes) for e in extents),
            "exactness": _sum((_exactness(exact=e.exact), e.num_bytes) for e in extents),
            "sharing": _sum((_sharing(e), e.num_bytes) for e in extents),
            "references": _sum((str(e.references), e.num_bytes) for e in extents),
        }

    def _host_totals(self) -> Mapping[str, int]:
        host = self._host
        total_bytes, used_bytes = (host.total_bytes, host.used_bytes) if host else (0, 0)
        free_bytes = total_bytes - used_bytes
        return {"total_bytes": total_bytes, "used_bytes": used_bytes, "free_bytes": free_bytes}

    def _offload_totals(self) -> Mapping[str, int]:
        """Totals of KV offload; empty without KV offload."""
        totals = {} if self._offload is None else self._offload.totals()
        return {name: totals[name] for name in ("offloaded_bytes", "activation_bytes") if totals}

    def check(self) -> None:
        """Compare the ledger with a count of every page. Slow."""
        prove_extents(self._memory, extents_of(self._memory))
        if self._offload is not None:
            self._offload.check()
        swapped_bytes = sum(e.num_bytes for e in _host_extents(list(self._requests())))
        if self._host is not None and swapped_bytes != self._host.used_bytes:
            raise InvariantError(
                f"swapped requests hold {swapped_bytes:,} B, but {self._host.used_bytes:,} B of "
                "the swap space are used"
            )


def _host_extents(requests: list[Request]) -> Iterator[HostExtent]:
    sharers: dict[int, tuple[Swapped, list[Request]]] = {}
    for request in requests:
        if request.memory.swapped is not None:
            _, together = sharers.setdefault(
                id(request.memory.swapped), (request.memory.swapped, [])
            )
            together.append(request)
    for stored, together in sharers.values():
        for page_class, pages in stored.pages.items():
            num_bytes = pages * page_class.page_bytes
            for i, request in enumerate(together):
                share_bytes = num_bytes * (i + 1) // len(together) - num_bytes * i // len(together)
                exact = request.eviction.exact and page_class.is_plain
                yield HostExtent(request, page_class.codec_name, share_bytes, exact)


def _rows(
    requests: list[Request], extents: list[LedgerExtent], host: list[HostExtent]
) -> list[Snapshot]:
    """One row per request, including waiting requests without KV."""
    owned: dict[int, list[LedgerExtent]] = {}
    for extent in extents:
        if extent.row != NO_ROW:
            owned.setdefault(extent.row, []).append(extent)
    swapped = _sum((e.request.request_id, e.num_bytes) for e in host)
    found = [
        _row(_owner(r), owned.pop(r.memory.row, []), swapped.get(r.request_id, 0)) for r in requests
    ]
    unknown = {"request_id": NO_OWNER, "tenant": NO_OWNER, "state": "unknown"}
    return found + [_row(unknown, extents, 0) for extents in owned.values()]


def _owner(request: Request) -> Snapshot:
    return {
        "request_id": request.request_id,
        "tenant": request.tenant,
        "state": request.progress.state.value,
        "tokens": request.num_tokens,
        "computed_tokens": request.progress.num_computed,
    }


def _row(owner: Snapshot, extents: list[LedgerExtent], host_bytes: int) -> Snapshot:
    return {
        **owner,
        "kv_bytes": sum(e.num_bytes for e in extents),
        "exclusive_bytes": sum(e.num_bytes for e in extents if e.sequences == 1),
        "host_bytes": host_bytes,
        "exact": all(e.exact for e in extents),
        "extents": [_shown(e) for e in extents],
    }


def _tenants(rows: list[Snapshot]) -> list[Snapshot]:
    found: dict[object, Counter[str]] = {}
    for row in rows:
        tenant = found.setdefault(row["tenant"], Counter())
        tenant["requests"] += 1
        tenant["kv_bytes"] += row["kv_bytes"]
        tenant["host_bytes"] += row["host_bytes"]
    return [{"tenant": name, **numbers} for name, numbers in found.items()]


def _shown(extent: LedgerExtent) -> Snapshot:
    return {
        "group": extent.group,
        "codec": extent.codec,
        "exactness": _exactness(exact=extent.exact),
        "sharing": _sharing(extent),
        "references": extent.references,
        "sequences": extent.sequences,
        "pages": extent.pages,
        "bytes": extent.num_bytes,
    }


def _exactness(*, exact: bool) -> str:
    return "exact" if exact else "approximate"


def _sharing(extent: LedgerExtent) -> str:
    return "private" if extent.references == 1 else "shared"


def _sum(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, num_bytes in parts:
        total[name] += num_bytes
    return dict(total)
