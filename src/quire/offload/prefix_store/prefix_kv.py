"""The KV of one cached prefix outside of an engine, and its file.

    gather   cached blocks of a chain, statistics at its end  -->  records
    insert   records  -->  pages of a new row  -->  published blocks, unused

A file is in the safetensors format: `tokens` [tokens], `blocks` [blocks, bytes of a block],
`statistics` [bytes], and metadata with the fingerprint of model, codec and layout, a checksum of
each tensor and the options of the request. Records are those of the tiers for prefixes.
"""

import json
import os
import secrets
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quire.errors import CorruptData, OutOfPages, RequestError, StorageError
from quire.kv.block_records import BlockRecords, Records, SnapshotRecords
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIdentity, PrefixIndex, PrefixLease, blocks_of
from quire.layout.pages import PageClass
from quire.offload.prefix_store.in_flight_pages import (
    InFlightPages,
    InFlightSnapshot,
    pages_needed,
    snapshot_pages_needed,
)

FORMAT = "quire kv 1"
_METADATA = "quire"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKV:
    """KV of the whole blocks of a prefix.

    Attributes:
        fingerprint: identity of model, precision, codec and layout.
        block_tokens: tokens of a block.
        tokens: token ids of all blocks.
        blocks: [blocks, bytes of a block] records; see `BlockRecords`.
        statistics: names of the private groups that `snapshot` holds; empty without statistics.
        snapshot: [bytes] record of the statistics at the end; empty without statistics.
        options: options of the request that computed it, as JSON values.
    """

    fingerprint: str
    block_tokens: int
    tokens: NDArray[np.int64]
    blocks: Records
    statistics: frozenset[str] = frozenset()
    snapshot: Records = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self.blocks.nbytes + self.snapshot.nbytes


def gather(
    index: PrefixIndex,
    lease: PrefixLease,
    fingerprint: str,
    *,
    statistics: frozenset[str] = frozenset(),
    options: Mapping[str, Any] | None = None,
) -> PrefixKV:
    """Copy the blocks of a lease and the statistics at their end.

    Args:
        index: the cached prefixes.
        lease: has one node or more, and was matched for these statistics.
        fingerprint: identity of model, precision, codec and layout.
        statistics: names of private groups.
        options: options of the request.
    """
    memory, nodes = index.memory, lease.nodes
    pages = {
        name: np.concatenate([node.cached_reference.pages[name] for node in nodes], axis=1)
        for name in nodes[0].cached_reference.pages
    }
    blocks = [node.block for node in nodes]
    snapshot = np.empty(0, dtype=np.uint8)
    if kept := memory.kept_with_prefix(statistics):
        records = SnapshotRecords(memory, index.block_tokens)
        snapshot = records.gather(blocks[-1], nodes[-1].statistics[kept])
    return PrefixKV(
        fingerprint=fingerprint,
        block_tokens=index.block_tokens,
        tokens=np.frombuffer(b"".join(block.tokens for block in blocks), dtype=np.int64),
        blocks=BlockRecords(memory, index.block_tokens).gather(blocks, pages),
        statistics=statistics,
        snapshot=snapshot,
        options=dict(options or {}),
    )


def insert(index: PrefixIndex, identity: PrefixIdentity, kv: PrefixKV) -> int:
    """Cache a prefix; return its tokens. No effect on blocks that are cached already.

    Args:
        index: receives the blocks; listeners are notified of them.
        identity: identity of the requests that may use the prefix.
        kv: has the fingerprint of this engine's KV.

    Raises:
        OutOfPages: too few pages, even after the eviction of all unused blocks; nothing changed.
        RequestError: the records have other sizes than those of this engine.
    """
    memory, tokens = index.memory, kv.tokens.tolist()
    _check_sizes(memory, index.block_tokens, kv)
    lease = index.match_blocks(
        identity, blocks_of(identity, tokens, index.block_tokens), statistics=kv.statistics
    )
    cached_tokens = lease.tokens
    index.release(lease)
    if cached_tokens == len(tokens):
        return cached_tokens
    _free_pages(index, kv)
    row = memory.start(kv.statistics)
    try:
        _fill(memory, row, index.block_tokens, kv)
        lease = PrefixLease(identity)
        index.publish(lease, row, tokens)
        index.confirm()
        index.snapshot(lease, row)
        published_tokens = lease.tokens
        index.release(lease)
    finally:
        memory.release([row])
    return published_tokens


def _fill(memory: KVMemory, row: int, block_tokens: int, kv: PrefixKV) -> None:
    """Write the records to new pages and append these to an empty row."""
    end = len(kv.tokens)
    with ExitStack() as undo:
        pages = InFlightPages(memory, 0, end, block_tokens)
        undo.callback(pages.release)
        BlockRecords(memory, block_tokens).scatter(kv.blocks, pages.block_pages(0, end))
        snapshot = None
        if kv.statistics:
            snapshot = InFlightSnapshot(memory, kv.statistics, end)
            undo.callback(snapshot.release)
            SnapshotRecords(memory, block_tokens).scatter(kv.snapshot, snapshot.pages)
        pages.attach(row)
        if snapshot is not None:
            snapshot.attach(row)


def _free_pages(index: PrefixIndex, kv: PrefixKV) -> None:
    """Evict unused blocks until the pages of a prefix and twice its statistics are free.

    Raises:
        OutOfPages: running requests hold too many pages.
    """
    memory, end = index.memory, len(kv.tokens)
    needed: dict[PageClass, int] = pages_needed(memory, end)
    for page_class, count in snapshot_pages_needed(memory, kv.statistics, end).items():
        needed[page_class] = needed.get(page_class, 0) + 2 * count
    if not memory.fits(needed) and not index.reclaim(needed):
        needed_bytes = sum(page_class.page_bytes * n for page_class, n in needed.items())
        raise OutOfPages(
            f"expected {needed_bytes:,} free B of KV memory for a prefix of {end:,} tokens, got "
            f"{memory.free_bytes:,} B; wait for running requests, or raise --kv-memory"
        )


def _check_sizes(memory: KVMemory, block_tokens: int, kv: PrefixKV) -> None:
    names = {group.name for group in memory.layout.groups if group.private}
    missing = sorted(kv.statistics - names)
    if missing:
        raise RequestError(
            f"the KV has statistics that this engine does not record: {', '.join(missing)}; start "
            "the engine with the eviction rule of the request"
        )
    snapshot_bytes = 0
    if memory.kept_with_prefix(kv.statistics):
        records = SnapshotRecords(memory, block_tokens)
        snapshot_bytes = records.num_bytes(len(kv.tokens), kv.statistics)
    shape = (len(kv.tokens) // block_tokens, BlockRecords(memory, block_tokens).record_bytes)
    if kv.block_tokens != block_tokens or len(kv.tokens) % block_tokens or not len(kv.tokens):
        raise RequestError(
            f"expected whole blocks of {block_tokens} tokens, got {len(kv.tokens):,} tokens in "
            f"blocks of {kv.block_tokens}"
        )
    if kv.blocks.shape != shape or kv.snapshot.nbytes != snapshot_bytes:
        raise RequestError(
            f"expected {shape[0]} blocks of {shape[1]:,} B and {snapshot_bytes:,} B of statistics, "
            f"got {kv.blocks.shape} and {kv.snapshot.nbytes:,} B"
        )


def write_file(kv: PrefixKV, path: Path) -> None:
    """Write a prefix to a file; the file appears under its name when it is complete.

    Raises:
        StorageError: the file cannot be written.
    """
    tensors: dict[str, NDArray[Any]] = {
        "tokens": kv.tokens,
        "blocks": kv.blocks,
        "statistics": kv.snapshot,
    }
    described = {
        "format": FORMAT,
        "fingerprint": kv.fingerprint,
        "block_tokens": kv.block_tokens,
        "statistics": sorted(kv.statistics),
        "options": dict(kv.options),
        "sums": {name: _sum(tensor) for name, tensor in tensors.items()},
    }
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        save_file(tensors, part, metadata={_METADATA: json.dumps(described)})
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink()
        raise StorageError(f"cannot write {path}: {error}; name another file") from error


def read_file(path: Path) -> PrefixKV:
    """Read a prefix from a file.

    Raises:
        StorageError: the file cannot be read, or is not such a file.
        CorruptData: a checksum is wrong.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
            if described.get("format") != FORMAT:
                raise StorageError(
                    f"expected a file of KV in the format {FORMAT!r}, got {path} in "
                    f"{described.get('format')!r}; save it again with LLM.export_kv"
                )
            tensors = {name: file.get_tensor(name) for name in ("tokens", "blocks", "statistics")}
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"cannot read {path} as KV of LLM.export_kv: {error}") from error
    damaged = [name for name, tensor in tensors.items() if _sum(tensor) != described["sums"][name]]
    if damaged:
        raise CorruptData(f"the checksum of {', '.join(damaged)} in {path} is wrong; save it again")
    return PrefixKV(
        fingerprint=described["fingerprint"],
        block_tokens=described["block_tokens"],
        tokens=tensors["tokens"],
        blocks=tensors["blocks"],
        statistics=frozenset(described["statistics"]),
        snapshot=tensors["statistics"],
        options=described["options"],
    )


def _sum(tensor: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
