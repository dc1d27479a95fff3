"""Unsupported combinations with codecs, in one table: reason and alternative of each."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError, UnsoundCombination
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """An unsupported combination.

    Attributes:
        codecs: the kind of codec, for the documentation.
        other: the feature with which the codec cannot be combined.
        meets: returns whether a configuration requests the combination.
        reason: why the combination is not supported.
        instead: what to use instead.
    """

    codecs: str
    other: str
    meets: Callable[[Storing], bool]
    reason: str
    instead: str


EXCLUDED: tuple[Excluded, ...] = (
    Excluded(
        codecs="calibrated codecs of keys (`int8_channel`, `kvquant4`, `kvquant3`, `equalise=1`)",
        other="`streaming`",
        meets=lambda requested: bool(requested.form.key.constants) and requested.rerotates,
        reason="constants are measured on keys after RoPE, and streaming stores keys before it",
        instead="int8 or int4_outliers for keys; values may have a calibrated codec",
    ),
    Excluded(
        codecs="`promoted`",
        other="no eviction",
        meets=lambda requested: requested.form.promoted is not None and not requested.evicts,
        reason="the scores of an eviction rule select promoted tokens, and eviction is off",
        instead="--evict with a rule, such as h2o, or a finer codec",
    ),
    Excluded(
        codecs="`promoted`",
        other="a `residual` below the rule's `every`",
        meets=lambda requested: (
            requested.form.promoted is not None
            and requested.evicts
            and requested.form.residual < requested.every
        ),
        reason="tokens would leave the residual window before the rule scores them",
        instead="residual=... of at least the rule's every=..., or a smaller every",
    ),
)


def refuse_excluded(text: str, requested: Storing) -> None:
    """Refuse unsupported combinations.

    Args:
        text: the KV codec as text, for the message.
        requested: the parsed configuration.

    Raises:
        UnsoundCombination: a combination is unsupported; the message states reason and alternative.
    """
    for row in EXCLUDED:
        if row.meets(requested):
            raise UnsoundCombination(
                f"KV codec {_as_written(text)!r}: {row.reason}; use {row.instead}"
            )


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
