"""The host's bytes as a tensor, and the two ways to copy pages there and back.

On a CPU pages are gathered straight into their place. A device packs them first:

    pages in the arena --gather--> staging on the device --copy--> pinned memory of the host
    (16 KiB each, anywhere)        (up to 16 MiB, packed)          (one piece for each filling)

because a link moves few large pieces faster than many small ones: each copy costs some
microseconds of its own, as much as 100 KB take on a fast link.
"""

import weakref
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from quire.errors import ConfigError
from quire.kv.pages import PageNumbers
from quire.kv.store import PageStore, zero_bytes
from quire.layout.pages import PageClass

STAGING_BYTES = 16 << 20
_MOST_NUMBERS = 4096  # lists of pages that are remembered on a device


def pieces_of(num_pages: int, page_bytes: int, staging_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut pages into equal pieces (one page more or less) that the staging holds.

    Equal, so that none is small: where there is more than one, each is at least about half of what
    the staging holds.

    Yields:
        First page and the page behind the last one, of each piece.
    """
    most = max(1, staging_bytes // page_bytes)
    count = -(-num_pages // most)
    for i in range(count):
        yield num_pages * i // count, num_pages * (i + 1) // count


class DirectCopies:
    """`HostCopies` for an arena that lies on the host itself.

    Through NumPy, which copies whole pages with one `memcpy` each: torch puts rows of bytes into
    their places at an eighth of that speed.

    Args:
        store: the arena.
        host: the pool's bytes.

    Attributes:
        host: the pool's bytes.
    """

    def __init__(self, store: PageStore, host: UInt8[Tensor, " num_bytes"]) -> None:
        self._store, self.host = store, host

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Copy pages to the host, one behind the other from byte `start`."""
        target = _packed(self.host, page_class, len(pages), start).numpy()
        whole = self._store.views(page_class).whole.numpy()
        np.take(whole, pages, axis=0, out=target, mode="clip")  # "raise" would copy twice

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Copy bytes of the host into pages."""
        source = _packed(self.host, page_class, len(pages), start).numpy()
        self._store.views(page_class).whole.numpy()[pages] = source

    def wait(self) -> None:
        """Nothing to wait for: copies on a CPU are done when they return."""


class StagedCopies:
    """`HostCopies` for an arena on a device, in packed pieces that do not block.

    Args:
        store: the arena.
        host: the pool's bytes, pinned.
        staging_bytes: memory on the device that packs pieces; at least a page of any class.

    Attributes:
        host: the pool's bytes.
        num_pieces, num_bytes: copied so far, both ways.
    """

    def __init__(
        self,
        store: PageStore,
        host: UInt8[Tensor, " num_bytes"],
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._store, self.host = store, host
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=store.device)
        self.num_pieces = self.num_bytes = 0
        self._numbers: dict[bytes, Tensor] = {}

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Begin to copy pages to the host, one behind the other from byte `start`."""
        whole, index = self._store.views(page_class).whole, _index(pages).to(self._store.device)
        for first, end, staging, host in self._pieces(page_class, len(pages), start):
            torch.index_select(whole, 0, index[first:end], out=staging)
            host.copy_(staging, non_blocking=True)

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Begin to copy bytes of the host into pages."""
        whole, index = self._store.views(page_class).whole, self._on_device(pages)
        for first, end, staging, host in self._pieces(page_class, len(pages), start):
            staging.copy_(host, non_blocking=True)
            whole[index[first:end]] = staging

    def _pieces(
        self, page_class: PageClass, num_pages: int, start: int
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Pages of each piece, where it is packed, and where it lies on the host.

        The staging is used again for each: copies and gathers of one stream run in order.
        """
        page_bytes = page_class.page_bytes
        for first, end in pieces_of(num_pages, page_bytes, self._staging.numel()):
            count = end - first
            self.num_pieces += 1
            self.num_bytes += count * page_bytes
            host = _packed(self.host, page_class, count, start + first * page_bytes)
            yield first, end, _packed(self._staging, page_class, count, 0), host

    def _on_device(self, pages: PageNumbers) -> Tensor:
        """Page numbers on the device.

        The same ones come step after step, and a copy of pageable memory waits for its stream.
        """
        key = pages.tobytes()
        if key not in self._numbers:
            if len(self._numbers) >= _MOST_NUMBERS:
                self._numbers.clear()
            self._numbers[key] = _index(pages).to(self._store.device)
        return self._numbers[key]

    def wait(self) -> None:
        """Return when all copies that were begun are done."""
        if self._store.device.type == "cuda":
            torch.cuda.current_stream(self._store.device).synchronize()


def device_name(device: torch.device) -> str:
    """What rates of a device are stored under: `cpu`, or the accelerator's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def host_copies(
    store: PageStore, num_bytes: int, largest_page_bytes: int
) -> DirectCopies | StagedCopies:
    """Take the host's bytes, and copy in the way that suits the arena's device.

    Args:
        store: the arena.
        num_bytes: of the pool. On a CPU the system gives them when they are first written; for a
            device they are pinned, and so taken at once.
        largest_page_bytes: of all page classes.

    Raises:
        ConfigError: the system does not pin as much.
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


def _index(pages: PageNumbers) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pages, dtype=np.int64))


# ---- pinned --------------------------------------------------------------------------------------

# Host memory that a device copies from and to by itself: pinned in place, not a byte more.


def pin_memory(host: UInt8[Tensor, " num_bytes"], holder: object) -> None:
    """Pin memory for as long as its holder lives.

    Torch's own pinned tensors round up to a power of two, so a pool of 5 GiB would take 8.

    Raises:
        ConfigError: the system does not pin as much.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = host.data_ptr()
    code = int(runtime.cudaHostRegister(address, host.numel(), 0))
    if code:
        raise ConfigError(
            f"the system does not pin {host.numel():,} B of host memory (CUDA error {code}); "
            "lower --swap-space or raise the limit on locked memory (ulimit -l)"
        )
    weakref.finalize(holder, runtime.cudaHostUnregister, address)
