"""The KV codec of an engine with all defaults, and what it cannot be combined with."""

import re
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout import limits
from quire.layout.kv_format import PLAIN, KVFormat, fill_plain, read_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """A requested configuration of pages.

    Attributes:
        form: codecs of keys and values, and full-precision tokens.
        evicts: whether tokens are evicted.
        rerotates: whether keys are stored before RoPE.
        every: maximum number of tokens between two evictions.
    """

    form: KVFormat
    evicts: bool = False
    rerotates: bool = False
    every: int = 0


def refuse_excluded(text: str, requested: Storing) -> None:
    """Refuse unsupported combinations.

    Args:
        text: the KV codec as text, for the message.
        requested: the parsed configuration.

    Raises:
        UnsoundCombination: a combination is unsupported; the message states reason and alternative.
    """
    promoted = requested.form.promoted is not None
    limit = None
    if requested.form.key.constants and requested.rerotates:
        limit = limits.CALIBRATED_KEYS
    elif promoted and not requested.evicts:
        limit = limits.PROMOTED_WITHOUT_RULE
    elif promoted and requested.form.residual < requested.every:
        limit = limits.PROMOTED_TOO_LATE
    if limit is not None:
        raise limits.refused(limit, text=_as_written(text))


def _as_written(text: str) -> str:
    """Remove the option that `fill_plain` adds."""
    return re.sub(rf"\s*\+\s*{PLAIN}=[^+]*", "", text)


def stored_codec(text: str, dtype: str) -> str:
    """Return the KV codec of an engine with all defaults filled in.

    Args:
        text: KV codec in the syntax of `read_format`; `none`, for keys, values or both, is `dtype`.
        dtype: type that the model computes in.

    Raises:
        UnknownName: a codec is unknown.
        ConfigError: an option's value is invalid, or an unquantized codec is not `dtype`.
    """
    written = fill_plain(text, dtype)
    form = read_format(written)
    for codec in (form.key, form.value, *([form.plain] if form.plain else [])):
        if codec.is_plain and codec.name != dtype:
            raise ConfigError(
                f"KV codec {text!r}: the model computes in {dtype}, and unquantized KV must have "
                f"the same type; use none, a quantizing codec, or --dtype {codec.name}"
            )
    return written
