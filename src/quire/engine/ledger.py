"""Who holds every byte of KV: extents with their owners, as a snapshot for people and programs.

An extent stands on axes that do not depend on each other: residency, codec, exactness, sharing and
owner. On every axis the extents of the arena add up to the bytes of pages in use; with what is free
and what slab borders waste, to the arena.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from quire.errors import InvariantError
from quire.kv.ledger import NO_ROW, Extent, codec_name, extents_of, is_plain, prove_extents
from quire.kv.memory import KVMemory
from quire.kv.stored_sequences import Swapped
from quire.offload.swap.host_pool import HostPool
from quire.scheduler.request import Request

Snapshot = dict[str, Any]
NOBODY = ""
"""Request and tenant of rows that belong to no request of this engine."""


@dataclass(frozen=True, slots=True)
class HostExtent:
    """Pages of a swapped request in one class.

    Attributes:
        request: whose.
        codec: how the numbers are stored.
        num_bytes: its part of them; requests that were swapped together share theirs.
        exact: as of the request when it left.
    """

    request: Request
    codec: str
    num_bytes: int
    exact: bool


@runtime_checkable
class OnHost(Protocol):
    """First pages of running requests on the host."""

    def totals(self) -> dict[str, int]:
        """Bytes of their KV, and of what it is made of, under the names of `EngineStats`."""
        ...

    def check(self) -> None:
        """Prove these bytes."""
        ...


class Ledger:
    """Reads the books of an engine. Keeps none of its own: see `quire.kv.ledger`.

    Args:
        memory: the arena.
        requests: gives all requests that have not ended.
        host: where swapped requests wait; None where none are.
        in_flight: bytes of pages that are being filled with prefixes from a tier.
        offload: first pages of running requests on the host; None where none are.
    """

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
        """Totals on each axis, then tenants, requests and the prefix cache: plain JSON values.

        All numbers whose names end in `bytes` are bytes. `docs/ledger.md` has an example.
        """
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

    def _axes(self, extents: list[Extent], host: list[HostExtent]) -> Mapping[str, object]:
        pools = self._memory.pools.values()
        device_bytes = sum(e.num_bytes for e in extents)
        cached = _sum((str(e.row == NO_ROW), e.num_bytes) for e in extents)
        in_flight_bytes = self._in_flight()
        return {
            "residency": {"device": device_bytes, "host": sum(e.num_bytes for e in host)},
            "owner": {
                "requests": cached.get("False", 0),
                "prefix_cache": cached.get("True", 0) - in_flight_bytes,
                "arriving": in_flight_bytes,
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
        """Of first pages, where there may be any."""
        totals = {} if self._offload is None else self._offload.totals()
        return {name: totals[name] for name in ("offloaded_bytes", "input_bytes") if totals}

    def check(self) -> None:
        """Prove the ledger against a count of every page by itself. Slow.

        Raises:
            InvariantError: they differ.
        """
        prove_extents(self._memory, extents_of(self._memory))
        if self._offload is not None:
            self._offload.check()
        swapped_bytes = sum(e.num_bytes for e in _host_extents(list(self._requests())))
        if self._host is not None and swapped_bytes != self._host.used_bytes:
            raise InvariantError(
                f"requests hold {swapped_bytes:,} B on the host, {self._host.used_bytes:,} are used"
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
            for place, request in enumerate(together):
                part = num_bytes * (place + 1) // len(together) - num_bytes * place // len(together)
                exact = request.eviction.exact and is_plain(page_class)
                yield HostExtent(request, codec_name(page_class), part, exact)


def _rows(requests: list[Request], extents: list[Extent], host: list[HostExtent]) -> list[Snapshot]:
    """One row a request, those that wait without KV included."""
    owned: dict[int, list[Extent]] = {}
    for extent in extents:
        if extent.row != NO_ROW:
            owned.setdefault(extent.row, []).append(extent)
    swapped = _sum((e.request.request_id, e.num_bytes) for e in host)
    found = [
        _row(_whose(r), owned.pop(r.memory.row, []), swapped.get(r.request_id, 0)) for r in requests
    ]
    nobody = {"request_id": NOBODY, "tenant": NOBODY, "state": "unknown"}
    return found + [_row(nobody, extents, 0) for extents in owned.values()]


def _whose(request: Request) -> Snapshot:
    return {
        "request_id": request.request_id,
        "tenant": request.tenant,
        "state": request.progress.state.value,
        "tokens": request.num_tokens,
        "computed_tokens": request.progress.num_computed,
    }


def _row(owner: Snapshot, extents: list[Extent], host_bytes: int) -> Snapshot:
    return {
        **owner,
        "kv_bytes": sum(e.num_bytes for e in extents),
        "alone_bytes": sum(e.num_bytes for e in extents if e.sequences == 1),
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


def _shown(extent: Extent) -> Snapshot:
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


def _sharing(extent: Extent) -> str:
    return "private" if extent.references == 1 else "shared"


def _sum(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, num_bytes in parts:
        total[name] += num_bytes
    return dict(total)
