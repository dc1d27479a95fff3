"""Page classes: the contents of a page and its bytes. Page bytes are computed only here.

A page of `tokens` slots consists of consecutive planes:

    | keys [heads, tokens, head_dim] | values [heads, tokens, head_dim] | positions [tokens] |
      codec `key`                      codec `value` (may be absent)      int32, if stored
    and padding to a multiple of 64 bytes and of a vector

Quantizing codecs store codes there, followed by the data that decodes them:

    | codes of keys | codes of values | scales, zeros, outliers of keys | of values | positions |

The codes of one head and token are contiguous, the codes of a head's tokens are adjacent, and all
scales of a page are together. Full-precision sinks, an INT4 body, lanes per KV head, statistics:
each is one `PageClass`. No other part of Quire depends on the contents of a page.
"""

import math
from dataclasses import dataclass, field

from quire.errors import ConfigError
from quire.layout.codecs import ELEMENT_BYTES, CodecSpec, Plane
from quire.layout.statistics import Statistic
from quire.layout.token_precision import FullPrecisionTokens, PromotedTokens

PAGE_ALIGNMENT_BYTES = 64  # a cache line; also keeps every typed view of a page aligned
POSITION_BYTES = 4


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageClass:
    """A class of pages with the same planes and the same bytes; each class has one page pool.

    Attributes:
        key: codec of the first plane.
        value: codec of the second plane; None for one-plane pages (statistics).
        head_dim: elements of a vector.
        heads: heads in a page (all KV heads of a layer, or one for lanes per KV head).
        tokens: slots in a page.
        positions: whether a page stores the logical position of each slot (unordered lanes).
        rotated: whether keys are stored after RoPE; otherwise before RoPE. Pages of the two kinds
            are never mixed.
        layers: number of layers whose pages are counted as one page, for simulations without bytes.
        page_bytes: bytes of a page, padding included; derived from the other attributes.
        key_planes, value_planes: locations of the planes; derived.
    """

    key: CodecSpec
    value: CodecSpec | None
    head_dim: int
    heads: int
    tokens: int
    positions: bool = False
    rotated: bool = True
    layers: int = 1
    page_bytes: int = field(init=False, repr=False, compare=False)  # cached: read in every step
    key_planes: tuple[PlacedPlane, ...] = field(init=False, repr=False, compare=False)
    value_planes: tuple[PlacedPlane, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("head_dim", "heads", "tokens", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected a page with {name} >= 1, got {getattr(self, name)}")
        self._place_planes()
        end = self.positions_offset_bytes + (POSITION_BYTES * self.tokens if self.positions else 0)
        page_bytes = self.layers * _round_up(end, self.alignment_bytes)
        object.__setattr__(self, "page_bytes", page_bytes)

    def __hash__(self) -> int:
        """Hash only the numbers: every step looks up pools by page class many times."""
        return hash((self.head_dim, self.heads, self.tokens, self.positions, self.rotated))

    def _place_planes(self) -> None:
        """Place the codes of keys and values first, then scales, zeros and outliers."""
        sides = [codec.planes(self.head_dim) for codec in (self.key, self.value) if codec]
        placed: list[list[PlacedPlane]] = [[] for _ in sides]
        offset = 0
        for part in (slice(0, 1), slice(1, None)):
            for planes, place in zip(sides, placed, strict=True):
                for plane in planes[part]:
                    records = 1 if plane.per_page else self.tokens
                    offset = _round_up(offset, ELEMENT_BYTES[plane.dtype])
                    place.append(PlacedPlane(plane, offset, (self.heads, records, plane.width)))
                    offset = place[-1].end_bytes
        object.__setattr__(self, "key_planes", tuple(placed[0]))
        object.__setattr__(self, "value_planes", tuple(placed[1]) if self.value else ())

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are unquantized."""
        return self.key.is_plain and (self.value is None or self.value.is_plain)

    @property
    def per_page(self) -> bool:
        """Whether slots share decoding data, so single slots cannot be moved or evicted."""
        return self.key.per_page or (self.value is not None and self.value.per_page)

    @property
    def key_bytes(self) -> int:
        """Bytes of a page's keys, with scales, zeros and outliers."""
        return (
            sum(p.plane.num_bytes(self.heads, self.tokens) for p in self.key_planes) * self.layers
        )

    @property
    def value_bytes(self) -> int:
        """Bytes of a page's values, with scales, zeros and outliers."""
        one = sum(p.plane.num_bytes(self.heads, self.tokens) for p in self.value_planes)
        return one * self.layers

    @property
    def positions_offset_bytes(self) -> int:
        """Offset of the positions, a multiple of their size."""
        end = max(p.end_bytes for p in (*self.key_planes, *self.value_planes))
        return _round_up(end, POSITION_BYTES)

    @property
    def alignment_bytes(self) -> int:
        """Alignment of page_bytes: a cache line and, for unquantized KV, a vector.

        Every page is then aligned in a view of the arena as vectors. Statistics need no such view.
        """
        if self.value is None or not self.is_plain:
            return PAGE_ALIGNMENT_BYTES
        return math.lcm(PAGE_ALIGNMENT_BYTES, self.key_planes[0].plane.record_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, without the padding of the page."""
        position_bytes = POSITION_BYTES * self.layers if self.positions else 0
        return (self.key_bytes + self.value_bytes) // self.tokens + position_bytes

    def pages_for(self, slots: int) -> int:
        """Return the number of pages that hold `slots` slots."""
        return -(-slots // self.tokens)


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
        ordered: whether slots stay in position order (whole pages are dropped, slots never move).
        private: never shared: copied on fork, not part of cached prefixes (statistics). A sequence
            need not use the group.
        mirrors: name of the group whose slots this group describes one to one: same lanes, same
            slots, moved and freed together. Such a group is private.
        fixed_slots: fixed number of records per lane, allocated with the row's first token. Such a
            group is private and unordered.
        statistic: statistic in its records; only for private groups.
        full_precision: set if its records are full-precision tokens of another group.
        promoted: set if its records are promoted tokens of another group, in a finer codec.
    """

    name: str
    page_class: PageClass
    layers: tuple[int, ...]
    lanes_per_layer: int = 1
    window: int | None = None
    ordered: bool = True
    private: bool = False
    mirrors: str | None = None
    fixed_slots: int | None = None
    statistic: Statistic | None = None
    full_precision: FullPrecisionTokens | None = None
    promoted: PromotedTokens | None = None

    def __post_init__(self) -> None:
        if self.mirrors is not None or self.fixed_slots is not None:
            object.__setattr__(self, "private", True)
            object.__setattr__(self, "ordered", False)
            self._check_statistics()
        if self.window is not None and (self.window < 1 or not self.ordered):
            raise ConfigError(
                f"lane group {self.name!r}: a window needs ordered lanes and at least 1 token, "
                f"got window={self.window}, ordered={self.ordered}"
            )
        if not self.ordered and not self.page_class.positions and not self.private:
            raise ConfigError(
                f"lane group {self.name!r}: unordered lanes need pages with positions; "
                "set PageClass(positions=True)"
            )

    def _check_statistics(self) -> None:
        both = self.mirrors is not None and self.fixed_slots is not None
        no_slots = self.fixed_slots is not None and self.fixed_slots < 1
        if both or no_slots or self.window is not None:
            raise ConfigError(
                f"lane group {self.name!r}: expected either mirrors or fixed_slots of 1 or more, "
                f"and no window; got mirrors={self.mirrors!r}, fixed_slots={self.fixed_slots}, "
                f"window={self.window}"
            )

    @property
    def contents(self) -> str:
        """What its pages hold, in the words of messages."""
        if self.full_precision is not None:
            return "full-precision tokens"
        if self.promoted is not None:
            return "promoted tokens"
        return "eviction statistics" if self.private else "KV"

    @property
    def num_lanes(self) -> int:
        """Number of lanes of one sequence in this group."""
        return len(self.layers) * self.lanes_per_layer

    def slots_of(self, tokens: int) -> int:
        """Return the slots of a lane with `tokens` tokens and no evictions."""
        return tokens if self.fixed_slots is None else min(tokens, 1) * self.fixed_slots

    def slots_at_most(self, tokens: int, chunk_tokens: int) -> int:
        """Return the peak slots of a lane while `tokens` tokens are processed in chunks.

        When a chunk of `chunk_tokens` tokens is written, a window lane holds the `window - 1`
        tokens before it, the chunk, and up to `page_tokens - 1` tokens outside the window that
        share a page with a token inside it.
        """
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
    """

    groups: tuple[LaneGroup, ...]

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"expected lane groups with unique names, got {names}")
        by_name = {group.name: group for group in self.groups}
        for group in self.groups:
            if group.mirrors is not None:
                _check_mirror(group, by_name.get(group.mirrors))

    def mirrors_of(self, name: str) -> tuple[LaneGroup, ...]:
        """Return the groups that hold per-slot statistics of a group."""
        return tuple(group for group in self.groups if group.mirrors == name)

    @property
    def page_classes(self) -> tuple[PageClass, ...]:
        """The distinct page classes, in order of first use."""
        return tuple(dict.fromkeys(group.page_class for group in self.groups))

    @property
    def smallest_sequence_bytes(self) -> int:
        """Bytes of a sequence of one token with all statistics."""
        return sum(group.bytes_at_most(1, 1) for group in self.groups)


def _check_mirror(group: LaneGroup, mirrored: LaneGroup | None) -> None:
    if (
        mirrored is None
        or mirrored.private
        or mirrored.window is not None
        or group.num_lanes != mirrored.num_lanes
        or group.page_class.tokens != mirrored.page_class.tokens
    ):
        raise ConfigError(
            f"lane group {group.name!r} mirrors {group.mirrors!r}: expected a group of KV without "
            f"a window, {group.num_lanes} lanes and {group.page_class.tokens} slots a page, got "
            f"{mirrored}"
        )
