"""Tokens in a finer precision than the codes of their lane: as the model made them, or promoted.

A sequence has some records of its own in each lane:

    record    0 .. sinks - 1             the tokens at these positions
              sinks + (p - sinks) % recent   the newest tokens, each at its position p

A query at position t attends to them in place of their codes where a position p is below `sinks`,
or is one of the newest, p > t - residual, or where its page is encoded as a whole and was not full
when the query came. So it does not matter how a prompt is cut into chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.codec_names import codec_pair
from quire.layout.codecs import CodecSpec

# Tokens that are kept as the model made them, beside pages that hold them in codes.


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrecisionTokens:
    """Which tokens are kept, and which of them are attended.

    Attributes:
        of: name of the group whose tokens they are: same lanes.
        sinks: first tokens.
        residual: newest tokens that are attended as they were made, the query's own included.
        recent: newest tokens that are kept; at least `residual`.
        page_tokens: of the pages that are encoded as a whole; 1 where each token is by itself.
    """

    of: str
    sinks: int
    residual: int
    recent: int
    page_tokens: int = 1

    @property
    def records(self) -> int:
        """Tokens of a lane."""
        return self.sinks + self.recent


# ---- promoted tokens -----------------------------------------------------------------------------

# Tokens in a finer codec than the others of their lane, because eviction found them important.
#
# A sequence has some records of its own in each lane, beside pages that hold all its tokens in the
# codec of the body. When tokens are evicted, of those that stay and are about to leave the residual
# window the ones with the highest scores get a free record, encoded from what the model made them
# as. They keep it until they leave the lane; what gets none stays in the codec of the body for
# good.

PROMOTED = "promoted"
MOST_RECORDS = 1 << 16
_COMPARED = 128  # channels of a vector and slots of a page for which codecs are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What is asked for.

    Attributes:
        count: records of a lane.
        key, value: how they hold a token.
    """

    count: int
    key: CodecSpec
    value: CodecSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedTokens:
    """Records of a lane group.

    Attributes:
        of: name of the group whose tokens they hold: same lanes.
        count: of a lane.
    """

    of: str
    count: int

    def quota(self, candidates: int, kept: int) -> int:
        """How many of a lane's candidates may have a record, so that later ones find some too.

        Args:
            candidates: tokens that stay and are about to leave the residual window.
            kept: all tokens that stay.
        """
        return -(-self.count * candidates // max(1, kept))


def read_records(text: str, given: str) -> Records:
    """Read `COUNT:CODEC`, such as `32:int8`.

    Args:
        text: the KV codec, for messages.
        given: what stands behind `promoted=`.

    Raises:
        UnknownName: no such codec.
        ConfigError: not of this form, or a codec that no single token can be encoded in.
    """
    count, _, codecs = given.partition(":")
    if not count.isdecimal() or not 1 <= int(count) <= MOST_RECORDS or not codecs:
        raise ConfigError(
            f"KV codec {text!r}: {PROMOTED} needs a number of records, from 1 to {MOST_RECORDS}, "
            f"and their codec, such as {PROMOTED}=32:int8, got {given!r}"
        )
    key, value = codec_pair(codecs)
    for codec in (key, value):
        if codec.is_plain:
            raise ConfigError(
                f"KV codec {text!r}: records of important tokens hold codes, got {codec.name!r}; "
                "sinks= and residual= keep tokens as they were made"
            )
        if codec.per_page or codec.constants:
            raise ConfigError(
                f"KV codec {text!r}: each important token is encoded by itself, without measured "
                f"constants, which {codec.name!r} is not; use int8"
            )
    return Records(count=int(count), key=key, value=value)


def check_finer(text: str, records: Records, body: Sequence[CodecSpec]) -> None:
    """Refuse records that hold no more of a token than the pages do.

    Raises:
        ConfigError: with the bits of both.
    """
    own = [_bits(codec) for codec in (records.key, records.value)]
    others = [_bits(codec) for codec in body]
    coarser = any(mine < other for mine, other in zip(own, others, strict=True))
    if coarser or own == others:
        raise ConfigError(
            f"KV codec {text!r}: important tokens need more bits than the others, which have "
            f"{others[0]:g} for keys and {others[1]:g} for values, got {own[0]:g} and {own[1]:g}"
        )


def _bits(codec: CodecSpec) -> float:
    return round(codec.effective_bits(_COMPARED, _COMPARED), 2)
