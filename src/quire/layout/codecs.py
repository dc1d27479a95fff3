"""Byte layout of codecs: the planes that a codec stores and their widths.

`quire.layout.codec_names` lists the codecs; `quire.codecs` implements encoding and decoding.
"""

from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from quire.errors import ConfigError

NONE, VECTOR, GROUP, PAGE = "none", "vector", "group", "page"
WIDEST_GROUP = 64
NARROW_INDEX_DIM = 256  # channels that a one-byte index can address
ELEMENT_BYTES = MappingProxyType(
    {"uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}
)


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of data that a codec stores.

    Attributes:
        name: `numbers`, `codes`, `scales`, `zeros`, `outlier_indices` or `outlier_values`.
        dtype: type of an element.
        width: elements of a record.
        per_page: whether there is one record per head of a page; otherwise per head and slot.
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
    """The parameters of a codec, which determine its planes and bytes.

    Attributes:
        name: codec text, options included.
        rule: registered name.
        summary: one sentence; help text only.
        code_bits: bits of one code.
        codes: type of a code, or of the bytes into which codes are packed.
        scaled: elements that share a scale: NONE, VECTOR (a head's elements of one token), GROUP
            (a group of consecutive channels of a vector), PAGE (one channel of all tokens of a
            page).
        has_zeros: whether the minimum of these elements (the zero) is stored with the scale.
        group: channels of a group; 0 for the largest divisor of head_dim up to 64.
        percent: percentage of a vector's elements stored unquantized, at least one; 0 for none.
        equalise: 1 to scale channels to equal magnitude with measured factors before encoding.
        constants: names of constants that are measured once per model and stored with the model.
        options: attributes that can be set as options in the codec text.
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
    def fingerprint(self) -> str:
        """Identity of the codec's bytes: all attributes that they depend on, without the texts."""
        options = f"group={self.group} percent={self.percent} equalise={self.equalise}"
        return (
            f"{self.rule} bits={self.code_bits} codes={self.codes} scaled={self.scaled} "
            f"zeros={self.has_zeros} {options} constants={','.join(self.constants)}"
        )

    @property
    def is_plain(self) -> bool:
        """Whether elements are stored unquantized, in a type that models compute in."""
        return self.code_bits >= 16

    @property
    def per_page(self) -> bool:
        """Whether a page is encoded as a whole, so its tokens can only be evicted together."""
        return self.scaled == PAGE

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """Return the planes for vectors of `head_dim` elements, codes first.

        Raises:
            ConfigError: codes do not fill whole bytes, or groups do not divide head_dim.
        """
        if self.is_plain:
            return (Plane("numbers", self.codes, head_dim),)
        # the codes packed into one byte come from segments of the vector of equal length
        segments = {2: 4, 3: 8, 4: 2, 8: 1}[self.code_bits]
        if head_dim % segments:
            raise ConfigError(
                f"codec {self.name!r} packs codes of {self.code_bits} bits into whole bytes: "
                f"expected head_dim to be a multiple of {segments}, got {head_dim}; use int8"
            )
        planes = [Plane("codes", self.codes, head_dim * self.code_bits // 8)]
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
        """Return the channels of a group.

        Raises:
            ConfigError: the group size does not divide head_dim.
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
        """Return the number of groups of a vector."""
        return head_dim // self.group_of(head_dim)

    def num_outliers(self, head_dim: int) -> int:
        """Return the number of a vector's elements that are stored unquantized."""
        return max(1, ceil(self.percent * head_dim / 100)) if self.percent else 0

    def vector_bytes(self, head_dim: int, page_tokens: int) -> float:
        """Return the bytes of a vector, with its share of per-page records."""
        planes = self.planes(head_dim)
        return sum(plane.num_bytes(1, page_tokens) for plane in planes) / page_tokens

    def effective_bits(self, head_dim: int, page_tokens: int) -> float:
        """Return the bits per element, including scales, zeros and outliers."""
        return self.vector_bytes(head_dim, page_tokens) * 8 / head_dim
