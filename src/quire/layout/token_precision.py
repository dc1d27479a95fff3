"""Tokens in higher precision than the codes of their lane: full-precision and promoted tokens.

A sequence has private full-precision records in each lane:

    record    0 .. sinks - 1                 the tokens at these positions
              sinks + (p - sinks) % recent   the newest tokens; p is the position of a token
              sinks + recent + offset        relocated tokens, by their offset in the open page

A codec of whole pages encodes a page when it is full. If an eviction moves slots, older tokens can
end in the last page of a lane, which is open. These relocated tokens have records until the page is
full.

A query at position t reads the full-precision record of position p instead of its codes if p is
below `sinks`, if p > t - residual, or if p's page is encoded as a whole and was not full at the
time of the query. Results therefore do not depend on the chunking of a prompt.
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.codec_names import codec_pair
from quire.layout.codecs import CodecSpec

# Full-precision tokens, stored in addition to the pages that hold their codes.


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrecisionTokens:
    """The full-precision tokens of a lane group.

    Attributes:
        sinks: number of first tokens.
        residual: number of newest tokens that a query reads in full precision, its own included.
        recent: number of newest tokens that are stored; at least `residual`.
        page_tokens: tokens of a page if the codec encodes whole pages; otherwise 1.
        relocated: number of records for older tokens in a page that is not full; 0 if none moves.
    """

    sinks: int
    residual: int
    recent: int
    page_tokens: int = 1
    relocated: int = 0

    @property
    def first_relocated(self) -> int:
        """The first record of relocated tokens."""
        return self.sinks + self.recent

    @property
    def records(self) -> int:
        """Number of records of a lane."""
        return self.first_relocated + self.relocated


# Promoted tokens: tokens with high eviction scores, stored in more bits (mixed precision).
#
# A sequence has private records in each lane, in addition to the pages that hold all its tokens in
# the main codec. At an eviction, consider the retained tokens that are about to leave the residual
# window. Those with the highest scores get free records. A record holds the quantization residual:
# the difference between the token in full precision and its decoded code. So attention adds both,
# and the bits of the main codec are not stored twice. A token keeps its record until it is evicted.
# Tokens without a record stay in the main codec.

PROMOTED = "promoted"
MAX_RECORDS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The `promoted` option of a KV codec.

    Attributes:
        count: number of records of a lane.
        key, value: codecs of the records, which hold quantization residuals.
    """

    count: int
    key: CodecSpec
    value: CodecSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedTokens:
    """The promoted tokens of a lane group.

    Attributes:
        count: number of records of a lane.
    """

    count: int

    def quota(self, candidates: int, kept: int) -> int:
        """Return how many of a lane's candidates may be promoted, so that records remain for later.

        Args:
            candidates: number of retained tokens that are about to leave the residual window.
            kept: number of all retained tokens.
        """
        return -(-self.count * candidates // max(1, kept))


def read_records(text: str, option: str) -> Records:
    """Parse `COUNT:CODEC`, such as `32:int8`.

    Args:
        text: the KV codec, for messages.
        option: value of `promoted=`.

    Raises:
        UnknownName: the codec is unknown.
        ConfigError: the value has another form, or the codec cannot encode single tokens.
    """
    count, _, codecs = option.partition(":")
    if not count.isdecimal() or not 1 <= int(count) <= MAX_RECORDS or not codecs:
        raise ConfigError(
            f"KV codec {text!r}: expected {PROMOTED} to be a number of records, from 1 to "
            f"{MAX_RECORDS}, and their codec, such as {PROMOTED}=32:int8, got {option!r}"
        )
    key, value = codec_pair(codecs)
    for codec in (key, value):
        if codec.is_plain:
            raise ConfigError(
                f"KV codec {text!r}: expected a quantizing codec for promoted tokens, got "
                f"{codec.name!r}; sinks= and residual= keep tokens in full precision"
            )
        if codec.per_page or codec.constants:
            raise ConfigError(
                f"KV codec {text!r}: expected a codec for promoted tokens that encodes tokens one "
                f"by one, without measured constants, got {codec.name!r}; use int8"
            )
    return Records(count=int(count), key=key, value=value)
