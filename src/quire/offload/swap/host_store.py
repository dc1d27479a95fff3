"""The bytes of host memory as a tensor, and copies of pages to and from it.

On a CPU pages are copied directly. On a device they are packed first:

    pages in the arena --gather--> staging on the device --copy--> pinned host memory
    (16 KiB each, scattered)       (up to 16 MiB, packed)          (one segment for each batch)

because a link moves a few large segments faster than many small ones: each copy has a fixed cost of
some microseconds, the transfer time of about 100 KB on a fast link.
"""

import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.device_copies import to_device
from quire.kernels.page_copies import page_copies
from quire.kv.pages import PageNumbers
from quire.kv.store import PageStore, zero_bytes
from quire.layout.pages import PageClass

STAGING_BYTES = 16 << 20
_MAX_LISTS = 4096  # page lists cached on a device


def batches_of(num_pages: int, page_bytes: int, staging_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide pages into equal batches (one page more or less) that fit in the staging.

    Equal batches avoid a small last one: each of several fills about half of the staging or more.

    Yields:
        First page and the page after the last one, of each batch.
    """
    most = max(1, staging_bytes // page_bytes)
    count = -(-num_pages // most)
    for i in range(count):
        yield num_pages * i // count, num_pages * (i + 1) // count


class DirectCopies:
    """`HostCopies` for an arena in host memory.

    Copies use NumPy, which runs one `memcpy` for each page: torch is eight times slower at indexed
    copies of byte rows.

    Args:
        store: the arena.
        host: the bytes of the pool.

    Attributes:
        host: the bytes of the pool.
    """

    def __init__(self, store: PageStore, host: UInt8[Tensor, " num_bytes"]) -> None:
        self._store, self.host = store, host

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Copy pages to consecutive host bytes from `start`."""
        target = _packed(self.host, page_class, len(pages), start).numpy()
        whole = self._store.views(page_class).whole.numpy()
        np.take(whole, pages, axis=0, out=target, mode="clip")  # "raise" would copy twice

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Copy host bytes into pages."""
        source = _packed(self.host, page_class, len(pages), start).numpy()
        self._store.views(page_class).whole.numpy()[pages] = source

    def load_heads(
        self,
        page_class: PageClass,
        pages: PageNumbers,
        heads: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> None:
        """Copy the keys and values of one KV head of each page, saved from these bytes on."""
        arena, host = self._store.arena.numpy(), self.host.numpy()
        first = pages.astype(np.int64) * page_class.page_bytes
        for offset, size in page_class.head_parts:
            at = offset + heads * size
            target = sliding_window_view(arena, size, writeable=True)
            target[first + at] = sliding_window_view(host, size)[starts + at]

    def wait(self) -> None:
        """Do nothing: copies on a CPU are complete on return."""


def current_stream(device: torch.device) -> int:
    """Number of the current stream of a device; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class StagedCopies:
    """`HostCopies` for an arena on a device, in packed asynchronous batches.

    Args:
        store: the arena.
        host: the bytes of the pool, pinned.
        staging_bytes: device memory that batches of a stream are packed in; at least a page of any
            class.
        stream_of: returns the number of the current stream of a device.

    Attributes:
        host: the bytes of the pool.
        stagings: device memory that batches are packed in, by stream.
        num_batches, num_bytes: batches and bytes copied so far, in both directions.
    """

    def __init__(
        self,
        store: PageStore,
        host: UInt8[Tensor, " num_bytes"],
        staging_bytes: int = STAGING_BYTES,
        stream_of: Callable[[torch.device], int] = current_stream,
    ) -> None:
        self._store, self.host, self._stream_of = store, host, stream_of
        self._staging_bytes = staging_bytes
        self.stagings: dict[int, Tensor] = {}
        self.num_batches = self.num_bytes = 0
        self._numbers: dict[tuple[int, bytes], Tensor] = {}
        self._copies = page_copies(store.device)

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Start to copy pages to consecutive host bytes from `start`."""
        whole, index = self._store.views(page_class).whole, self._index(pages)
        for first, end, staging, host in self._batches(page_class, len(pages), start):
            self._copies.pack(whole, index[first:end], staging)
            host.copy_(staging, non_blocking=True)

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Start to copy host bytes into pages."""
        whole, index = self._store.views(page_class).whole, self._on_device(pages)
        for first, end, staging, host in self._batches(page_class, len(pages), start):
            staging.copy_(host, non_blocking=True)
            self._copies.unpack(whole, index[first:end], staging)

    def _batches(
        self, page_class: PageClass, num_pages: int, start: int
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Range of pages, staging and host bytes of each batch.

        All batches of a stream use the same staging: its copies and gathers run in order. Streams
        have different stagings: a prefetch may be in flight while pages are saved.
        """
        page_bytes, own = page_class.page_bytes, self._staging()
        for first, end in batches_of(num_pages, page_bytes, own.numel()):
            count = end - first
            self.num_batches += 1
            self.num_bytes += count * page_bytes
            host = _packed(self.host, page_class, count, start + first * page_bytes)
            yield first, end, _packed(own, page_class, count, 0), host

    def _staging(self) -> Tensor:
        """Staging of the current stream, allocated at its first use."""
        stream = self._stream_of(self._store.device)
        if stream not in self.stagings:
            self.stagings[stream] = torch.empty(
                self._staging_bytes, dtype=torch.uint8, device=self._store.device
            )
        return self.stagings[stream]

    def _on_device(self, pages: PageNumbers) -> Tensor:
        """Page numbers on the device, cached for each stream: steps repeat the same lists."""
        key = self._stream_of(self._store.device), pages.tobytes()
        if key not in self._numbers:
            if len(self._numbers) >= _MAX_LISTS:
                self._numbers.clear()
            self._numbers[key] = self._index(pages)
        return self._numbers[key]

    def _index(self, pages: PageNumbers) -> Tensor:
        return to_device(np.asarray(pages, dtype=np.int64), self._store.device)

    def wait(self) -> None:
        """Wait for all copies started on the current stream."""
        if self._store.device.type == "cuda":
            torch.cuda.current_stream(self._store.device).synchronize()


def device_name(device: torch.device) -> str:
    """Name that a device's rates are stored under: `cpu`, or the accelerator's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def host_copies(
    store: PageStore, num_bytes: int, largest_page_bytes: int
) -> DirectCopies | StagedCopies:
    """Allocate the host memory and the copies for the arena's device.

    Args:
        store: the arena.
        num_bytes: size of the pool. On a CPU the system commits the memory on first write; for
            a device it is pinned, and committed at once.
        largest_page_bytes: bytes of the largest page of all page classes.

    Raises:
        ConfigError: the system cannot pin the memory.
    """
    if store.device.type == "cpu":
        return DirectCopies(store, zero_bytes(num_bytes, store.device))
    host = zero_bytes(num_bytes, torch.device("cpu"))
    copies = StagedCopies(store, host, max(STAGING_BYTES, largest_page_bytes))
    pin_memory(host, copies)
    return copies


def _packed(
    buffer: UInt8[Tensor, " num_bytes"], page_class: PageClass, num_pages: int, start: int
) -> UInt8[Tensor, "num_pages page_bytes"]:
    num_bytes = num_pages * page_class.page_bytes
    return buffer[start : start + num_bytes].view(num_pages, page_class.page_bytes)


# Host memory for direct access by a device: pinned in place, at exact size.


def pin_memory(host: UInt8[Tensor, " num_bytes"], holder: object) -> None:
    """Pin memory until the object `holder` is garbage collected.

    Torch rounds pinned tensors up to a power of two, so that a pool of 5 GiB would take 8 GiB.

    Raises:
        ConfigError: the system cannot pin the memory.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = host.data_ptr()
    code = int(runtime.cudaHostRegister(address, host.numel(), 0))
    if code:
        raise ConfigError(
            f"the system cannot pin {host.numel():,} B of host memory (CUDA error {code}); "
            "lower --swap-space or raise the limit on locked memory (ulimit -l)"
        )
    weakref.finalize(holder, runtime.cudaHostUnregister, address)
