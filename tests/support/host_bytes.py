"""A `PageBytes` with real bytes: one NumPy array, page n of a class at byte n * page_bytes."""

import numpy as np

from quire.layout.codecs import CodecSpec

POISON = 0xFF


def vector_bytes(codec: CodecSpec, head_dim: int) -> tuple[int, int]:
    """Bytes of the codes and of the metadata of one vector."""
    codes, *metadata = (plane.record_bytes for plane in codec.planes(head_dim))
    return codes, sum(metadata)


class HostBytes:
    """Pages in CPU memory with the planes of `quire.layout.pages`, initialized with poison.

    A slot is addressed as (pages, offsets), two arrays; its planes are raw bytes
    [slots, heads, codes + metadata].
    """

    def __init__(self, total_bytes):
        self.arena = np.full(total_bytes, POISON, dtype=np.uint8)
        self._views = {}  # (page class, first byte of its first plane) -> planes
        self.copied_pages = self.moved_slots = self.cleared_pages = self.num_copies = 0

    def copy_pages(self, page_class, source, target):
        assert not set(source.tolist()) & set(target.tolist())
        self.num_copies += 1
        self.copied_pages += len(source)
        pages = self.pages_of(page_class)
        pages[target] = pages[source]

    def clear_pages(self, page_class, pages):
        self.cleared_pages += len(pages)
        self.pages_of(page_class)[pages] = 0

    def set_bounds(self, page_class, pages, held):
        raise AssertionError("no page class of these tests has bounds")

    def move_slots(self, page_class, source, target):
        self.moved_slots += len(source[0])
        self.write_slots(page_class, target, *self.read_slots(page_class, source))

    def read_pages(self, page_class, pages):
        return self.pages_of(page_class)[pages]

    def write_pages(self, page_class, pages, payload):
        self.pages_of(page_class)[pages] = payload

    def write_slots(self, page_class, places, planes, positions):
        """Write the vectors of each plane; `positions` are ignored if the class has none."""
        page, offset = places
        for placed, vectors in zip(page_class.placed, planes, strict=True):
            first = 0
            for plane in self._planes(page_class, placed):
                plane[page, :, offset] = vectors[..., first : first + plane.shape[3]]
                first += plane.shape[3]
        if page_class.positions:
            self._positions(page_class)[page, offset] = positions

    def read_slots(self, page_class, places):
        """The vectors of each plane, and the positions of slots; empty if the class has none."""
        page, offset = places
        planes = [
            np.concatenate([of[page, :, offset] for of in self._planes(page_class, placed)], axis=2)
            for placed in page_class.placed
        ]
        positions = np.empty(0, dtype=np.int32)
        if page_class.positions:
            positions = self._positions(page_class)[page, offset]
        return planes, positions

    def pages_of(self, page_class):
        """The arena seen as pages of one class, [pages, page_bytes]."""
        size = page_class.page_bytes
        num_pages = len(self.arena) // size
        return self.arena[: num_pages * size].reshape(num_pages, size)

    def _planes(self, page_class, placed):
        first = placed[0].offset_bytes
        if (page_class, first) not in self._views:
            self._views[page_class, first] = [self._make_plane(page_class, p) for p in placed]
        return self._views[page_class, first]

    def _make_plane(self, page_class, placed):
        pages, (heads, records, _) = self.pages_of(page_class), placed.shape
        assert records == page_class.tokens, "slots with shared scales cannot move"
        plane = pages[:, placed.offset_bytes : placed.end_bytes]
        view = plane.reshape(len(pages), heads, records, placed.plane.record_bytes)
        assert np.shares_memory(view, self.arena)
        return view

    def _positions(self, page_class):
        start = page_class.positions_offset_bytes
        return self.pages_of(page_class)[:, start : start + 4 * page_class.tokens].view(np.int32)

    def poison_free(self, memory):
        """Overwrite every byte outside pages in use, so that reads of stale pages are detected."""
        in_use = np.zeros(len(self.arena), dtype=bool)
        for page_class, pool in memory.pools.items():
            size = page_class.page_bytes
            pages = in_use[: len(in_use) // size * size].reshape(-1, size)
            pages[np.flatnonzero(pool.ref_counts)] = True
        self.arena[~in_use] = POISON
