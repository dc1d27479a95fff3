"""How pages store numbers, as far as bytes go: which planes a codec needs, and how wide they are.

Which codecs there are says `quire.layout.codec_names`, and what becomes of a vector `quire.codecs`.
"""

from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from quire.errors import ConfigError

NONE, VECTOR, GROUP, PAGE = "none", "vector", "group", "page"
WIDEST_GROUP = 64
NARROW_INDEX_DIM = 256  # channels that one byte tells apart
ELEMENT_BYTES = MappingProxyType(
    {"uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}
)


@dataclass(frozen=True, slots=True)
class Plane:
    """Numbers of one kind that a codec stores.

    Attributes:
        name: what they are: `codes`, `scales`, `zeros`, `outlier_indices`, `outlier_values`.
        dtype: of one number.
        width: numbers of a record.
        per_page: one record for each head of a page; else one for each head and slot.
    """

    name: str
    dtype: str
    width: int
    per_page: bool = False

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.width * ELEMENT_BYTES[self.dtype]

    def num_bytes(self, heads: int, tokens: int) -> int:
        """Bytes of the records of a page."""
        return self.record_bytes * heads * (1 if self.per_page else tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """What of a vector is stored, and in how many bytes.

    Attributes:
        name: as it is written, options included.
        rule: the registered name.
        summary: one sentence.
        code_bits: bits of one code.
        codes: type of a code, or of the bytes that several are packed into.
        scaled: which numbers share a scale: NONE, VECTOR (a head's numbers of one token), GROUP
            (neighbours among them), PAGE (one channel of all tokens of a page).
        has_zeros: whether the smallest of these numbers is stored beside the scale.
        group: numbers of a group; 0: the most up to 64 that divide head_dim.
        percent: of a vector's numbers are kept as they are, at least one; 0: none.
        equalise: 1: channels are brought to like size by measured numbers before all else.
        constants: names of what is measured once for a model, and kept beside it.
        options: attributes that can be written behind the name.
    """

    name: str
    rule: str
    summary: str
    code_bits: int
    codes: str = "uint8"
    scaled: str = NONE
    has_zeros: bool = False
    group: int = 0
    percent: float = 0.0
    equalise: int = 0
    constants: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether numbers are stored as they are, in a type that models compute in."""
        return self.code_bits >= 16

    @property
    def per_page(self) -> bool:
        """Whether a page is encoded as a whole, so that its tokens stay or leave together."""
        return self.scaled == PAGE

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """What is stored of vectors of so many numbers; codes first.

        Raises:
            ConfigError: codes do not fill whole bytes, or groups do not divide head_dim.
        """
        if self.is_plain:
            return (Plane("numbers", self.codes, head_dim),)
        planes = [Plane("codes", self.codes, self._codes_width(head_dim))]
        if self.scaled != NONE:
            per_page = self.scaled == PAGE
            width = {VECTOR: 1, PAGE: head_dim}.get(self.scaled) or self.num_groups(head_dim)
            names = ("scales", "zeros") if self.has_zeros else ("scales",)
            planes += [Plane(name, "float16", width, per_page) for name in names]
        if self.percent:
            index = "uint8" if head_dim <= NARROW_INDEX_DIM else "int16"
            width = self.num_outliers(head_dim)
            planes += [Plane("outlier_indices", index, width)]
            planes += [Plane("outlier_values", "float16", width)]
        return tuple(planes)

    def group_of(self, head_dim: int) -> int:
        """Numbers of a group.

        Raises:
            ConfigError: they do not divide head_dim.
        """
        if not self.group:
            return max(g for g in range(1, WIDEST_GROUP + 1) if head_dim % g == 0)
        if head_dim % self.group:
            fit = [g for g in range(min(8, head_dim), head_dim + 1) if head_dim % g == 0]
            raise ConfigError(
                f"codec {self.name!r}: groups of {self.group} do not divide head_dim {head_dim}; "
                f"choose group={' or '.join(map(str, fit))}, or leave it out"
            )
        return self.group

    def num_groups(self, head_dim: int) -> int:
        """Groups of a vector."""
        return head_dim // self.group_of(head_dim)

    def num_outliers(self, head_dim: int) -> int:
        """Numbers of a vector that are kept as they are."""
        return max(1, ceil(self.percent * head_dim / 100)) if self.percent else 0

    def vector_bytes(self, head_dim: int, page_tokens: int) -> float:
        """Bytes of a vector and its part of what the page holds once."""
        planes = self.planes(head_dim)
        return sum(plane.num_bytes(1, page_tokens) for plane in planes) / page_tokens

    def effective_bits(self, head_dim: int, page_tokens: int) -> float:
        """Bits of a stored number, all that is stored beside the codes counted."""
        return self.vector_bytes(head_dim, page_tokens) * 8 / head_dim

    def _codes_width(self, head_dim: int) -> int:
        # parts of a byte come from as many stretches of a vector, which must be equally long
        stretches = {2: 4, 3: 8, 4: 2, 8: 1}[self.code_bits]
        if head_dim % stretches:
            raise ConfigError(
                f"codec {self.name!r} packs codes of {self.code_bits} bits into whole bytes, which "
                f"needs a head_dim that {stretches} divides, got {head_dim}; use int8"
            )
        return head_dim * self.code_bits // 8
