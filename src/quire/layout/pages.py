"""Planes, page classes and lane groups: the declaration of every kind of cache.

A page of `tokens` slots consists of consecutive planes, in the order of their declaration:

    | key [heads, tokens, width] | value [heads, tokens, width] | ... | positions [tokens] |
      codec of the plane           codec of the plane                   int32, if stored
    and padding to a multiple of 64 bytes and of a vector

Quantizing codecs store codes there, followed by the data that decodes them:

    | codes of keys | codes of values | scales, zeros, outliers of keys | of values | positions |

The codes of one head and token are contiguous, the codes of a head's tokens are adjacent, and all
scales of a page are together. Planes of one page move, are copied and are freed together. Planes
that only some sequences use, or that have a fixed number of records, are in a lane group of their
own. Page bytes are computed only here, and no other part of Quire depends on the planes of a page
to copy, move, store or count it.

Slabs are the equal parts of a KV memory, each with pages of one class.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.layout.codecs import ELEMENT_BYTES, CodecSpec, Plane
from quire.layout.sizes import HUGE_PAGE_BYTES
from quire.layout.statistics import Statistic
from quire.layout.token_precision import FullPrecisionTokens, PromotedTokens

if TYPE_CHECKING:  # planning starts without NumPy
    from quire.layout.model import Counts, StateSpec

PAGE_ALIGNMENT_BYTES = 64  # a cache line; also keeps every typed view of a page aligned
POSITION_BYTES = 4
SLABS_OF_A_SMALL_ARENA = 64
PAGES_OF_A_SLAB = 32  # if the arena is large enough: allocating a slab costs more than a page


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


@dataclass(frozen=True, slots=True)
class PlacedPlane:
    """A plane of a page with its location.

    Attributes:
        plane: the plane.
        offset_bytes: offset in the page, a multiple of the element size.
        shape: [heads, records, elements].
    """

    plane: Plane
    offset_bytes: int
    shape: tuple[int, int, int]

    @property
    def end_bytes(self) -> int:
        """Offset of the byte after the plane."""
        heads, records, _ = self.shape
        return self.offset_bytes + heads * records * self.plane.record_bytes


KEY, VALUE, INDEX, NUMBERS, BOUNDS = "key", "value", "index", "numbers", "bounds"
"""Names of planes: keys, values and index keys of tokens, statistics, and bounds of the keys.

Bounds are the minimum of each element of a page's keys, followed by the maximum of each.
"""


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """A plane of a page: vectors of one kind, one for each head and slot.

    Attributes:
        name: unique in the page, such as KEY.
        codec: codec of the vectors.
        width: elements of a vector.
        heads: vectors of a slot.
        of_page: whether a page has one vector for each head, instead of one for each slot.
    """

    name: str
    codec: CodecSpec
    width: int
    heads: int = 1
    of_page: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"expected plane {self.name!r} with {name} >= 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PageClass:
    """A class of pages with the same planes and the same bytes; each class has one page pool.

    Attributes:
        planes: the planes, in the order of their codes in the page.
        tokens: slots in a page.
        positions: whether a page stores the logical position of each slot (unordered lanes).
        rotated: whether keys are stored after RoPE; otherwise before RoPE. Pages of the two kinds
            are never mixed.
        joined: whether the key of a slot is its value followed by its stored key (latents).
        layers: number of layers whose pages are counted as one page, for simulations without bytes.
        page_bytes: bytes of a page, padding included; derived from the other attributes.
        placed: locations of the data of each plane; derived.
    """

    planes: tuple[PlaneSpec, ...]
    tokens: int
    positions: bool = False
    rotated: bool = True
    joined: bool = False
    layers: int = 1
    page_bytes: int = field(init=False, repr=False, compare=False)  # cached: read in every step
    placed: tuple[tuple[PlacedPlane, ...], ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected a page with {name} >= 1, got {getattr(self, name)}")
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"expected a page of planes with unique names, got {names}")
        self._place_planes()
        end = self.positions_offset_bytes + (POSITION_BYTES * self.tokens if self.positions else 0)
        page_bytes = self.layers * _round_up(end, self.alignment_bytes)
        object.__setattr__(self, "page_bytes", page_bytes)
        numbers = (self.head_dim, self.heads, self.tokens, self.positions, self.rotated)
        object.__setattr__(self, "_hash", hash(numbers))

    def __hash__(self) -> int:
        """Cached: every step looks up pools by page class many times."""
        return self._hash

    def _place_planes(self) -> None:
        """Place the codes of all planes first, then scales, zeros and outliers."""
        parts = [
            tuple(replace(part, per_page=part.per_page or plane.of_page) for part in found)
            for plane in self.planes
            for found in [plane.codec.planes(plane.width)]
        ]
        placed: list[list[PlacedPlane]] = [[] for _ in parts]
        offset = 0
        for part in (slice(0, 1), slice(1, None)):
            for spec, planes, place in zip(self.planes, parts, placed, strict=True):
                for plane in planes[part]:
                    records = 1 if plane.per_page else self.tokens
                    offset = _round_up(offset, ELEMENT_BYTES[plane.dtype])
                    place.append(PlacedPlane(plane, offset, (spec.heads, records, plane.width)))
                    offset = place[-1].end_bytes
        object.__setattr__(self, "placed", tuple(map(tuple, placed)))

    @property
    def heads(self) -> int:
        """Vectors of a slot in the first plane: KV heads."""
        return self.planes[0].heads

    @property
    def head_dim(self) -> int:
        """Elements of a vector of the first plane."""
        return self.planes[0].width

    @property
    def value_dim(self) -> int:
        """Elements of a value; of a vector of the first plane in pages without values."""
        return self.planes[self.index(VALUE) or 0].width

    @property
    def query_dim(self) -> int:
        """Elements of a query that is compared with the keys."""
        return self.head_dim + self.value_dim if self.joined else self.head_dim

    def index(self, name: str) -> int | None:
        """The place of a plane in `planes`; None if a page has no such plane."""
        names = [plane.name for plane in self.planes]
        return names.index(name) if name in names else None

    @property
    def has_bounds(self) -> bool:
        """Whether a page has bounds of its keys."""
        return any(plane.of_page for plane in self.planes)

    @property
    def bounds_bytes(self) -> int:
        """Bytes of the bounds of a page."""
        parts = zip(self.planes, self.placed, strict=True)
        own = (placed for plane, parts in parts if plane.of_page for placed in parts)
        return sum(placed.end_bytes - placed.offset_bytes for placed in own)

    @property
    def head_parts(self) -> tuple[tuple[int, int], ...]:
        """Parts of keys and values: first byte in a page, and bytes of a KV head."""
        parts = zip(self.planes, self.placed, strict=True)
        own = [placed for plane, of in parts if plane.name in (KEY, VALUE) for placed in of]
        sizes = [(placed.end_bytes - placed.offset_bytes) // self.heads for placed in own]
        return tuple((p.offset_bytes, size) for p, size in zip(own, sizes, strict=True))

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys and values of a KV head in a page."""
        return sum(size for _, size in self.head_parts)

    @property
    def is_plain(self) -> bool:
        """Whether all planes are unquantized."""
        return all(plane.codec.is_plain for plane in self.planes)

    @property
    def per_page(self) -> bool:
        """Whether slots share decoding data, so single slots cannot be moved or evicted."""
        return any(plane.codec.per_page for plane in self.planes)

    @property
    def codec_name(self) -> str:
        """The codec of the planes, or all their codecs, such as "int8/int4"; not that of bounds."""
        names = (plane.codec.name for plane in self.planes if not plane.of_page)
        return "/".join(dict.fromkeys(names))

    @property
    def data_bytes(self) -> int:
        """Bytes of all planes with scales, zeros and outliers, without positions and padding."""
        return self.layers * sum(
            placed.plane.num_bytes(spec.heads, self.tokens)
            for spec, parts in zip(self.planes, self.placed, strict=True)
            for placed in parts
        )

    @property
    def positions_offset_bytes(self) -> int:
        """Offset of the positions, a multiple of their size."""
        end = max(placed.end_bytes for parts in self.placed for placed in parts)
        return _round_up(end, POSITION_BYTES)

    @property
    def alignment_bytes(self) -> int:
        """Alignment of page_bytes: a cache line and, for unquantized KV, the vectors.

        Every page is then aligned in a view of the arena as vectors, which gathered attention
        copies as a whole. Vectors of unequal bytes have no such view.
        """
        vectors = {
            parts[0].plane.record_bytes
            for spec, parts in zip(self.planes, self.placed, strict=True)
            if not spec.of_page
        }
        if self.index(KEY) is None or not self.is_plain or len(vectors) > 1:
            return PAGE_ALIGNMENT_BYTES
        return math.lcm(PAGE_ALIGNMENT_BYTES, *vectors)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, without the padding of the page."""
        position_bytes = POSITION_BYTES * self.layers if self.positions else 0
        return self.data_bytes // self.tokens + position_bytes

    def pages_for(self, slots: int) -> int:
        """Return the number of pages that hold `slots` slots."""
        return -(-slots // self.tokens)


def kv_pages(
    *,
    key: CodecSpec,
    value: CodecSpec,
    head_dim: int,
    heads: int,
    tokens: int,
    value_dim: int | None = None,
    more: tuple[PlaneSpec, ...] = (),
    **options: Any,
) -> PageClass:
    """Pages of keys of `head_dim` elements and values of `value_dim`, by default of `head_dim`.

    They have `more` planes after these. `options` are further attributes of `PageClass`.
    """
    width = head_dim if value_dim is None else value_dim
    planes = (PlaneSpec(KEY, key, head_dim, heads), PlaneSpec(VALUE, value, width, heads), *more)
    return PageClass(planes=planes, tokens=tokens, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneGroup:
    """A group of lanes of a sequence with the same page class and rules.

    A lane is the unit of a page table: all KV heads of a layer (layer pages), or one KV head of a
    layer (one-head pages). A group has `len(layers) * lanes_per_layer` lanes, layer-major.

    Attributes:
        name: unique name in a layout.
        page_class: class of its pages.
        layers: model layers, ascending.
        lanes_per_layer: 1 for layer pages, the number of KV heads for one-head pages.
        window: tokens that a query attends to, its own included; None for all. Pages outside the
            window are freed.
        chunk: C: a query at position p attends to tokens from p // C * C; None for all. The pages
            of a chunk are freed when it has ended; no step goes beyond the end of a chunk.
        topk: tokens that a query attends to, selected by an index; None: all.
        readers: number of layers that read each of its lanes.
        ordered: whether slots stay in position order (whole pages are dropped, slots never move).
        private: never shared: copied on fork, not part of the blocks of cached prefixes.
        of: name of the group whose tokens this group describes; such a group is private.
        records: fixed number of records per lane, allocated with the row's first token; None: one
            record per token. Such a group is private and unordered. With `of` and without
            `records`, the slots follow those of the other group one to one: same lanes, same slots,
            moved and freed together.
        optional: only the sequences that ask for the group use it.
        checkpointed: whether its records are kept with a cached prefix, so that a sequence can
            continue after it. Otherwise the records of a cached prefix are zeros.
        statistic: set if its records are an attention statistic.
        full_precision: set if its records are full-precision tokens of `of`.
        promoted: set if its records are promoted tokens of `of`, in a finer codec.
        state: set if its record is a recurrent state.
        dense_layers: first layers that sparse attention reads as a whole, if the others may be
            offloaded; see `staging_slot`.
    """

    name: str
    page_class: PageClass
    layers: tuple[int, ...]
    lanes_per_layer: int = 1
    window: int | None = None
    chunk: int | None = None
    topk: int | None = None
    readers: int = 1
    ordered: bool = True
    private: bool = False
    of: str | None = None
    records: int | None = None
    optional: bool = False
    checkpointed: bool = True
    statistic: Statistic | None = None
    full_precision: FullPrecisionTokens | None = None
    promoted: PromotedTokens | None = None
    state: "StateSpec | None" = None
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if self.of is not None or self.records is not None:
            object.__setattr__(self, "private", True)
            object.__setattr__(self, "ordered", False)
        if self.private and self.window is not None:
            raise ConfigError(
                f"lane group {self.name!r}: expected a private group without a window, got "
                f"window={self.window}"
            )
        if self.records is not None and self.records < 1:
            raise ConfigError(
                f"lane group {self.name!r}: expected records of 1 or more, got {self.records}"
            )
        if self.window is not None and (self.window < 1 or not self.ordered):
            raise ConfigError(
                f"lane group {self.name!r}: a window needs ordered lanes and at least 1 token, "
                f"got window={self.window}, ordered={self.ordered}"
            )
        if self.chunk is not None and (
            self.window is not None or not self.ordered or self.chunk % self.page_class.tokens
        ):
            raise ConfigError(
                f"lane group {self.name!r}: expected ordered lanes without a window, and a chunk of"
                f" whole pages of {self.page_class.tokens} tokens, got chunk={self.chunk}, "
                f"window={self.window}, ordered={self.ordered}; set --block-size to a divisor of "
                "the chunk"
            )
        if not self.ordered and not self.page_class.positions and not self.private:
            raise ConfigError(
                f"lane group {self.name!r}: unordered lanes need pages with positions; "
                "set PageClass(positions=True)"
            )

    def staging_slot(self, index: int, slots: int) -> int:
        """Return the staging slot of a layer of an offloaded prefix.

        Slots are used in turn. All layers that sparse attention reads as a whole are in slot 0, so
        that slot 1 can keep pages of the others.
        """
        return max(0, index + 1 - max(1, self.dense_layers)) % slots

    def next_staged(self, index: int, slots: int) -> int | None:
        """Return the next layer in the staging slot of a layer; None: there is none."""
        own = self.staging_slot(index, slots)
        later = range(index + 1, len(self.layers))
        return next((one for one in later if self.staging_slot(one, slots) == own), None)

    def first_staged(self, slots: int) -> tuple[int, ...]:
        """Return the first layer in each staging slot."""
        return (0, max(1, self.dense_layers))[:slots]

    @property
    def bounded(self) -> bool:
        """Whether a window or a chunk limits the tokens of a lane."""
        return self.window is not None or self.chunk is not None

    def first_needed(self, tokens: "Counts") -> "Counts":
        """Return the first position that the query at each position `tokens` attends to."""
        if self.chunk is not None:
            return tokens // self.chunk * self.chunk
        reach = 0 * tokens if self.window is None else tokens + 1 - self.window
        return reach * (reach > 0)

    @property
    def follows(self) -> str | None:
        """Name of the group whose slots this group follows one to one."""
        return self.of if self.records is None else None

    @property
    def contents(self) -> str:
        """What its pages hold, in the words of messages."""
        if self.full_precision is not None:
            return "full-precision tokens"
        if self.promoted is not None:
            return "promoted tokens"
        if self.statistic is not None:
            return "eviction statistics"
        if self.state is not None:
            return "recurrent states"
        return (
            " and ".join(plane.name for plane in self.page_class.planes) if self.private else "KV"
        )

    @property
    def num_lanes(self) -> int:
        """Number of lanes of one sequence in this group."""
        return len(self.layers) * self.lanes_per_layer

    def slots_of(self, tokens: int) -> int:
        """Return the slots of a lane with `tokens` tokens and no evictions."""
        return tokens if self.records is None else min(tokens, 1) * self.records

    def slots_at_most(self, tokens: int, chunk_tokens: int) -> int:
        """Return the peak slots of a lane while `tokens` tokens are processed in chunks.

        When a chunk of `chunk_tokens` tokens is written, a window lane holds the `window - 1`
        tokens before it, the chunk, and up to `page_tokens - 1` tokens outside the window that
        share a page with a token inside it.
        """
        if self.chunk is not None:
            return min(tokens, self.chunk)
        if self.window is None:
            return self.slots_of(tokens)
        return min(tokens, self.window - 1 + chunk_tokens + self.page_class.tokens - 1)

    def bytes_at_most(self, tokens: int, chunk_tokens: int) -> int:
        """Return the bytes of all lanes at the peak of `slots_at_most`, in whole pages."""
        pages = self.page_class.pages_for(self.slots_at_most(tokens, chunk_tokens))
        return pages * self.page_class.page_bytes * self.num_lanes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All lane groups of a sequence.

    Attributes:
        groups: the KV of each layer is in exactly one group; private groups are additional.
        shared: layers without lanes, and the layer whose lanes each of them reads.
    """

    groups: tuple[LaneGroup, ...]
    shared: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"expected lane groups with unique names, got {names}")
        by_name = {group.name: group for group in self.groups}
        for group in self.groups:
            if group.follows is not None:
                _check_follower(group, by_name.get(group.follows))

    @property
    def ends_by_layer(self) -> bool:
        """Whether all chunks of a prompt can be computed in a layer before the next layer."""
        return not self.shared and not any(group.chunk or group.state for group in self.groups)

    def until_chunk_end(self, tokens: int) -> int | None:
        """Return the tokens from position `tokens` to the next end of a chunk; None: no chunks."""
        ends = [group.chunk - tokens % group.chunk for group in self.groups if group.chunk]
        return min(ends, default=None)

    def followers_of(self, name: str) -> tuple[LaneGroup, ...]:
        """Return the groups whose slots follow those of a group."""
        return tuple(group for group in self.groups if group.follows == name)

    @property
    def page_classes(self) -> tuple[PageClass, ...]:
        """The distinct page classes, in order of first use."""
        return tuple(dict.fromkeys(group.page_class for group in self.groups))

    @property
    def smallest_sequence_bytes(self) -> int:
        """Bytes of a sequence of one token with all statistics."""
        return sum(group.bytes_at_most(1, 1) for group in self.groups)


def _check_follower(group: LaneGroup, followed: LaneGroup | None) -> None:
    if (
        followed is None
        or followed.private
        or followed.bounded
        or group.num_lanes != followed.num_lanes
        or group.page_class.tokens != followed.page_class.tokens
    ):
        raise ConfigError(
            f"lane group {group.name!r} follows {group.follows!r}: expected a group of KV without "
            f"a window, {group.num_lanes} lanes and {group.page_class.tokens} slots a page, got "
            f"{followed}"
        )


def choose_slab_bytes(total_bytes: int, page_bytes: Sequence[int]) -> int:
    """Return the bytes of a slab: about 2 MiB, at most 1/64 of a small arena."""
    wanted = max(HUGE_PAGE_BYTES, PAGES_OF_A_SLAB * max(page_bytes))
    target = min(wanted, total_bytes // SLABS_OF_A_SMALL_ARENA)
    common = math.lcm(*page_bytes)
    if common <= target:
        return target // common * common
    if len(set(page_bytes)) == 1:
        return common
    return min(
        common, max(target // PAGE_ALIGNMENT_BYTES * PAGE_ALIGNMENT_BYTES, 4 * max(page_bytes))
    )


def pages_per_slab(slab_bytes: int, page_bytes: int) -> int:
    """Return the minimum number of whole pages in a slab; a page can cross a slab boundary."""
    return slab_bytes // page_bytes - (1 if slab_bytes % page_bytes else 0)


def slabs_for(slab_bytes: int, pages: Iterable[tuple[int, int]]) -> int:
    """Return the maximum number of slabs for (page bytes, number of pages) of each page class."""
    return sum(-(-count // pages_per_slab(slab_bytes, page_bytes)) for page_bytes, count in pages)
