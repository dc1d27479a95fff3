"""A `PageBytes` with real bytes: one NumPy array, page n of a class at byte n * page_bytes."""

import numpy as np

from quire.spec.pages import CodecSpec

POISON = 0xFF


def vector_bytes(codec: CodecSpec, head_dim: int) -> tuple[int, int]:
    """Bytes of the codes and of the metadata of one vector."""
    codes = -(-head_dim * codec.code_bits // 8)
    return codes, codec.block_bytes(1, head_dim) - codes


class HostBytes:
    """Pages in host memory, planes as `quire.spec.pages` draws them, all poison at first.

    A slot is addressed as (pages, offsets), two arrays; its key and value are raw bytes
    [slots, heads, codes + metadata].

    Attributes:
        arena: all bytes.
        copied_pages, moved_slots, cleared_pages: how many so far.
        num_copies: calls of `copy_pages`.
    """

    def __init__(self, total_bytes):
        self.arena = np.full(total_bytes, POISON, dtype=np.uint8)
        self._views = {}  # (page class, first byte of a plane) -> its codes, its metadata
        self.copied_pages = self.moved_slots = self.cleared_pages = self.num_copies = 0

    # ---- PageBytes -----------------------------------------------------------------------------

    def copy_pages(self, page_class, source, target):
        assert not set(source.tolist()) & set(target.tolist())
        self.num_copies += 1
        self.copied_pages += len(source)
        pages = self.pages_of(page_class)
        pages[target] = pages[source]

    def clear_pages(self, page_class, pages):
        self.cleared_pages += len(pages)
        self.pages_of(page_class)[pages] = 0

    def move_slots(self, page_class, source, target):
        self.moved_slots += len(source[0])
        key, value, positions = self.read_slots(page_class, source)
        self.write_slots(page_class, target, key, value, positions)

    def read_pages(self, page_class, pages):
        return self.pages_of(page_class)[pages]

    def write_pages(self, page_class, pages, payload):
        self.pages_of(page_class)[pages] = payload

    # ---- slots ---------------------------------------------------------------------------------

    def write_slots(self, page_class, places, key, value, positions):
        """Write slots; `value` is ignored in one-plane pages, `positions` where there are none."""
        page, offset = places
        planes = [(page_class.key, key, 0)]
        if page_class.value:
            planes.append((page_class.value, value, page_class.key_bytes))
        for codec, vectors, start in planes:
            codes, metadata = self._plane(page_class, codec, start)
            codes[page, :, offset] = vectors[..., : codes.shape[3]]
            metadata[page, :, offset] = vectors[..., codes.shape[3] :]
        if page_class.positions:
            self._positions(page_class)[page, offset] = positions

    def read_slots(self, page_class, places):
        """Key, value and positions of slots; empty arrays where the class has none."""
        page, offset = places
        key = self._read_plane(page_class, page_class.key, 0, places)
        value = np.empty((len(page), page_class.heads, 0), dtype=np.uint8)
        if page_class.value:
            value = self._read_plane(page_class, page_class.value, page_class.key_bytes, places)
        positions = np.empty(0, dtype=np.int32)
        if page_class.positions:
            positions = self._positions(page_class)[page, offset]
        return key, value, positions

    def _read_plane(self, page_class, codec, start, places):
        page, offset = places
        codes, metadata = self._plane(page_class, codec, start)
        if not metadata.size:
            return codes[page, :, offset]
        return np.concatenate([codes[page, :, offset], metadata[page, :, offset]], axis=2)

    # ---- views ---------------------------------------------------------------------------------

    def pages_of(self, page_class):
        """The arena seen as pages of one class, [pages, page_bytes]."""
        size = page_class.page_bytes
        num_pages = len(self.arena) // size
        return self.arena[: num_pages * size].reshape(num_pages, size)

    def _plane(self, page_class, codec, start):
        if (page_class, start) not in self._views:
            self._views[page_class, start] = self._make_plane(page_class, codec, start)
        return self._views[page_class, start]

    def _make_plane(self, page_class, codec, start):
        pages, shape = self.pages_of(page_class), (page_class.heads, page_class.tokens)
        codes, metadata = vector_bytes(codec, page_class.head_dim)
        vectors = page_class.heads * page_class.tokens
        middle, end = start + vectors * codes, start + vectors * (codes + metadata)
        views = (
            pages[:, start:middle].reshape(len(pages), *shape, codes),
            pages[:, middle:end].reshape(len(pages), *shape, metadata),
        )
        assert all(np.shares_memory(view, self.arena) for view in views if view.size)
        return views

    def _positions(self, page_class):
        start = page_class.positions_offset_bytes
        return self.pages_of(page_class)[:, start : start + 4 * page_class.tokens].view(np.int32)

    # ---- poison --------------------------------------------------------------------------------

    def poison_free(self, memory):
        """Overwrite every byte that no page in use covers, so that reads of stale pages show."""
        in_use = np.zeros(len(self.arena), dtype=bool)
        for page_class, pool in memory.pools.items():
            size = page_class.page_bytes
            pages = in_use[: len(in_use) // size * size].reshape(-1, size)
            pages[np.flatnonzero(pool.ref_counts)] = True
        self.arena[~in_use] = POISON
