"""What a page holds and how many bytes it takes. The only place where page bytes are computed.

A page of `tokens` slots lies in memory as planes, one behind the other:

    | keys [heads, tokens, head_dim] | values [heads, tokens, head_dim] | positions [tokens] |
      codec `key`                      codec `value` (may be absent)      int32, if kept
    and padding to a multiple of 64 bytes and of a vector

Codecs that compress store codes there, and what decodes them behind the codes of both:

    | codes of keys | codes of values | scales, zeros, outliers of keys | of values | positions |

so that the codes of a head and token lie in one piece, those of a head's tokens side by side, and
all scales of a page together. Full-precision sinks, an INT4 body, heads of unequal length,
statistics: each is one `PageClass`; nothing else in Quire asks what is inside a page.
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
    """A plane of a page.

    Attributes:
        plane: what it holds.
        offset_bytes: where it starts in a page, a multiple of its numbers' size.
        shape: [heads, records, numbers].
    """

    plane: Plane
    offset_bytes: int
    shape: tuple[int, int, int]

    @property
    def end_bytes(self) -> int:
        """Where it ends."""
        heads, records, _ = self.shape
        return self.offset_bytes + heads * records * self.plane.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageClass:
    """Pages that are alike: same planes, same bytes, one pool.

    Attributes:
        key: codec of the first plane.
        value: codec of the second plane; None for one-plane pages (statistics).
        head_dim: numbers in a vector.
        heads: heads in a page (all KV heads of a layer, or one for ragged heads).
        tokens: slots in a page.
        positions: whether each slot carries its logical position (lanes whose slots lose order).
        rotated: whether keys are stored after RoPE; before it they are as at position 0. Pages of
            the two kinds are never mixed.
        layers: pages of so many layers that are counted as one, where nobody asks what is in them.
        page_bytes: of a whole page, padding included; follows from the others, as do
        key_planes, value_planes: where the planes are.
    """

    key: CodecSpec
    value: CodecSpec | None
    head_dim: int
    heads: int
    tokens: int
    positions: bool = False
    rotated: bool = True
    layers: int = 1
    page_bytes: int = field(init=False, repr=False, compare=False)  # asked for at every step
    key_planes: tuple[PlacedPlane, ...] = field(init=False, repr=False, compare=False)
    value_planes: tuple[PlacedPlane, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("head_dim", "heads", "tokens", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a page needs {name} >= 1, got {getattr(self, name)}")
        self._place_planes()
        end = self.positions_offset_bytes + (POSITION_BYTES * self.tokens if self.positions else 0)
        page_bytes = self.layers * _round_up(end, self.alignment_bytes)
        object.__setattr__(self, "page_bytes", page_bytes)

    def __hash__(self) -> int:
        """Of the numbers alone: pools are looked up by page class many times a step."""
        return hash((self.head_dim, self.heads, self.tokens, self.positions, self.rotated))

    def _place_planes(self) -> None:
        """Codes of keys and of values first, then what decodes them."""
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
        """Whether all numbers are stored as they are."""
        return self.key.is_plain and (self.value is None or self.value.is_plain)

    @property
    def per_page(self) -> bool:
        """Whether slots share what decodes them, so that none can move or leave alone."""
        return self.key.per_page or (self.value is not None and self.value.per_page)

    @property
    def key_bytes(self) -> int:
        """Bytes of keys, all that is stored beside their codes counted."""
        return (
            sum(p.plane.num_bytes(self.heads, self.tokens) for p in self.key_planes) * self.layers
        )

    @property
    def value_bytes(self) -> int:
        """Bytes of values, likewise."""
        one = sum(p.plane.num_bytes(self.heads, self.tokens) for p in self.value_planes)
        return one * self.layers

    @property
    def positions_offset_bytes(self) -> int:
        """Where the positions start: on a multiple of their own size."""
        end = max(p.end_bytes for p in (*self.key_planes, *self.value_planes))
        return _round_up(end, POSITION_BYTES)

    @property
    def alignment_bytes(self) -> int:
        """What page_bytes is a multiple of: a cache line and, for plain keys, a vector.

        So the arena, seen as vectors of head_dim numbers, has one at the start of every page.
        One-plane pages have none that are read so: there a wide record would only waste room.
        """
        if self.value is None or not self.is_plain:
            return PAGE_ALIGNMENT_BYTES
        return math.lcm(PAGE_ALIGNMENT_BYTES, self.key_planes[0].plane.record_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of what one slot holds, padding of the page not included."""
        position_bytes = POSITION_BYTES * self.layers if self.positions else 0
        return (self.key_bytes + self.value_bytes) // self.tokens + position_bytes

    def pages_for(self, slots: int) -> int:
        """Whole pages that hold `slots` slots."""
        return -(-slots // self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneGroup:
    """Lanes of a sequence that share a page class and its rules.

    A lane is what one page table describes: all KV heads of a layer (layer pages), or one KV head
    of it (one-head pages). A group has `len(layers) * lanes_per_layer` lanes, layer-major.

    Attributes:
        name: unique in a layout.
        page_class: what its pages hold.
        layers: model layers, ascending.
        lanes_per_layer: 1 for layer pages, the number of KV heads for one-head pages.
        window: tokens a query can look back, itself included; None for all. Pages behind it return.
        ordered: slots stay in position order (dropping whole pages, never moving slots).
        private: never shared: copied on fork, absent from lent prefixes (statistics). A row can
            do without such a group.
        mirrors: name of the group whose slots these describe one to one: same lanes, same slots,
            moved and freed with them. Such a group is private.
        fixed_slots: records of a lane, there from the row's first token on and never more. Such a
            group is private and has no order.
        statistic: what its records are; of private groups only.
        kept, promoted: what its records are, where they are tokens of another group: as the model
            made them, or in a finer codec.
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
    kept: FullPrecisionTokens | None = None
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
                f"lane group {self.name!r}: slots without order must carry their positions; "
                "set PageClass(positions=True)"
            )

    def _check_statistics(self) -> None:
        both = self.mirrors is not None and self.fixed_slots is not None
        no_slots = self.fixed_slots is not None and self.fixed_slots < 1
        if both or no_slots or self.window is not None:
            raise ConfigError(
                f"lane group {self.name!r} mirrors slots or has 1 or more fixed ones, and has no "
                f"window; got mirrors={self.mirrors!r}, fixed_slots={self.fixed_slots}, "
                f"window={self.window}"
            )

    @property
    def num_lanes(self) -> int:
        """Lanes of one sequence in this group."""
        return len(self.layers) * self.lanes_per_layer

    def slots_of(self, tokens: int) -> int:
        """Slots of a lane that has taken `tokens` tokens and lost none."""
        return tokens if self.fixed_slots is None else min(tokens, 1) * self.fixed_slots

    def slots_at_most(self, tokens: int, chunk_tokens: int) -> int:
        """Slots a lane holds at its peak while `tokens` tokens pass in chunks of `chunk_tokens`.

        A window lane keeps, when a chunk is written, the `window - 1` tokens before it, the chunk,
        and up to a page of tokens that have left the window but share a page with one that has not.
        """
        if self.window is None:
            return self.slots_of(tokens)
        return min(tokens, self.window - 1 + chunk_tokens + self.page_class.tokens - 1)

    def bytes_at_most(self, tokens: int, chunk_tokens: int) -> int:
        """Bytes of all lanes at that peak, in whole pages."""
        pages = self.page_class.pages_for(self.slots_at_most(tokens, chunk_tokens))
        return pages * self.page_class.page_bytes * self.num_lanes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All lane groups of a sequence.

    Attributes:
        groups: each layer's KV stands in exactly one of them; statistics groups come on top.
    """

    groups: tuple[LaneGroup, ...]

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"lane groups need unique names, got {names}")
        by_name = {group.name: group for group in self.groups}
        for group in self.groups:
            if group.mirrors is not None:
                _check_mirror(group, by_name.get(group.mirrors))

    def mirrors_of(self, name: str) -> tuple[LaneGroup, ...]:
        """The groups that hold statistics of a group's slots."""
        return tuple(group for group in self.groups if group.mirrors == name)

    @property
    def page_classes(self) -> tuple[PageClass, ...]:
        """The distinct page classes, in order of first use."""
        return tuple(dict.fromkeys(group.page_class for group in self.groups))

    @property
    def smallest_sequence_bytes(self) -> int:
        """Bytes of a sequence of one token with all statistics there are."""
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
