"""What a codec excludes, why, and what to use instead: one declared table."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError, UnsoundCombination
from quire.spec.codec_names import codec_pair, fill_plain
from quire.spec.codecs import CodecSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """A kind of codec that cannot be served.

    Attributes:
        codecs: the kind, for the documents.
        meets: whether a codec is of it.
        reason: why not.
        instead: what to use.
    """

    codecs: str
    meets: Callable[[CodecSpec], bool]
    reason: str
    instead: str


EXCLUDED: tuple[Excluded, ...] = (
    Excluded(
        codecs="codecs with measured constants (int8_channel, kvquant4, kvquant3)",
        meets=lambda codec: bool(codec.constants),
        reason="it needs constants that are measured for each layer of a model, and there are none",
        instead="int8 or int4_outliers, which need none",
    ),
    Excluded(
        codecs="codecs of whole pages (int4_page, int2_page, kivi4, kivi2)",
        meets=lambda codec: codec.per_page,
        reason="a page is encoded when its last token is there, and until then nothing holds it",
        instead="int4_hadamard or int4_outliers, which encode each token by itself",
    ),
)


def stored_codec(text: str, dtype: str) -> str:
    """The codec of an engine, nothing left to a default.

    Args:
        text: as `codec_pair` reads it; `none`, also for one of two, is what the model computes in.
        dtype: that.

    Raises:
        UnknownName: a codec is not known.
        ConfigError: an option's value cannot be, or a plain codec is not the model's own.
        UnsoundCombination: no engine could store it; says why and what to use instead.
    """
    written = fill_plain(text, dtype)
    for codec in codec_pair(written):
        for row in EXCLUDED:
            if row.meets(codec):
                raise UnsoundCombination(f"KV codec {text!r}: {row.reason}; use {row.instead}")
        if codec.is_plain and codec.name != dtype:
            raise ConfigError(
                f"KV codec {text!r}: the model computes in {dtype}, and plain KV is attended as it "
                f"is stored; use none, a codec that compresses, or --dtype {codec.name}"
            )
    return written
