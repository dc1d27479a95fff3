"""`HostCopies` with real bytes, poisoned where they are free, that can raise an error."""

import numpy as np

from support.host_bytes import POISON


class CopyFailed(Exception):
    """Raised by an injected fault."""


class HostArray:
    """Copies synchronously between a `HostBytes` and an array; raises after `fail_after` calls."""

    def __init__(self, store, total_bytes):
        self.store = store
        self.bytes = np.full(total_bytes, POISON, dtype=np.uint8)
        self.fail_after = None
        self.copy_sizes = []

    def save(self, page_class, pages, start):
        self._call()
        self._view(page_class, pages, start)[:] = self.store.read_pages(page_class, pages)

    def load(self, page_class, pages, start):
        self._call()
        # a copy: the arena must not alias the host array
        self.store.write_pages(page_class, pages, self._view(page_class, pages, start).copy())

    def wait(self):
        self._call()

    def _view(self, page_class, pages, start):
        num_bytes = len(pages) * page_class.page_bytes
        self.copy_sizes.append(num_bytes)
        assert start + num_bytes <= len(self.bytes)
        return self.bytes[start : start + num_bytes].reshape(len(pages), page_class.page_bytes)

    def _call(self):
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise CopyFailed

    def poison_free(self, pool):
        """Overwrite every byte outside allocated spaces, so that stale reads are detected."""
        allocated = np.zeros(len(self.bytes), dtype=bool)
        for space in pool.spaces:
            for extents in space.extents.values():
                for extent in extents:
                    assert not allocated[extent.start : extent.end].any()
                    allocated[extent.start : extent.end] = True
        self.bytes[~allocated] = POISON
