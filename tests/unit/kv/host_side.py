"""`HostCopies` with real bytes, poisoned where nothing lies, that fail when they are told to."""

import numpy as np

from unit.kv.host_bytes import POISON


class CopyFailed(Exception):
    """What an injected fault raises."""


class HostSide:
    """Copies at once between a `HostBytes` and an array of bytes.

    Attributes:
        bytes: the host's.
        fail_after: calls that still work; None for all.
        pieces: bytes of each copy.
    """

    def __init__(self, store, total_bytes):
        self.store = store
        self.bytes = np.full(total_bytes, POISON, dtype=np.uint8)
        self.fail_after = None
        self.pieces = []

    def save(self, page_class, pages, start):
        self._call()
        self._view(page_class, pages, start)[:] = self.store.read_pages(page_class, pages)

    def load(self, page_class, pages, start):
        self._call()
        # a copy: the bytes in the arena must not change with those of the host
        self.store.write_pages(page_class, pages, self._view(page_class, pages, start).copy())

    def wait(self):
        self._call()

    def _view(self, page_class, pages, start):
        num_bytes = len(pages) * page_class.page_bytes
        self.pieces.append(num_bytes)
        assert start + num_bytes <= len(self.bytes)
        return self.bytes[start : start + num_bytes].reshape(len(pages), page_class.page_bytes)

    def _call(self):
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise CopyFailed

    def poison_free(self, pool):
        """Overwrite what no space covers, so that reads of stale bytes show."""
        taken = np.zeros(len(self.bytes), dtype=bool)
        for space in pool.spaces:
            for extents in space.extents.values():
                for extent in extents:
                    assert not taken[extent.start : extent.end].any()
                    taken[extent.start : extent.end] = True
        self.bytes[~taken] = POISON
