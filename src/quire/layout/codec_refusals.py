"""What codecs exclude, why, and what to use instead: one declared table."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError, UnsoundCombination
from quire.layout.kv_format import PLAIN, KVFormat, fill_plain, read_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """What is asked of pages.

    Attributes:
        form: what they hold.
        evicts: tokens leave lanes.
        by_page: and whole pages of them only.
        in_runs: the store lays lanes out in runs, in which slots move where pages would leave.
        scores: the rules by which tokens leave say how important each is.
        every: most tokens that come between two evictions.
    """

    form: KVFormat
    evicts: bool = False
    by_page: bool = False
    in_runs: bool = False
    scores: bool = True
    every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Something that cannot be stored.

    Attributes:
        codecs: the kind of codec, for the documents.
        beside: what it does not go with.
        meets: whether it is asked for.
        reason: why not.
        instead: what to use.
    """

    codecs: str
    beside: str
    meets: Callable[[Storing], bool]
    reason: str
    instead: str


_OF_PAGES = "codecs of whole pages (`int4_page`, `int2_page`, `kivi4`, `kivi2`)"
EXCLUDED: tuple[Excluded, ...] = (
    Excluded(
        codecs=_OF_PAGES,
        beside="eviction of tokens or chunks",
        meets=lambda requested: (
            requested.form.per_page and requested.evicts and not requested.by_page
        ),
        reason="the tokens of a page share their scales, so none of them can leave or move alone",
        instead="granularity=page, or a codec that encodes each token by itself, as int4_outliers",
    ),
    Excluded(
        codecs=_OF_PAGES,
        beside="eviction in a store of runs (`contiguous_max`, `contiguous_growing`, `ring`)",
        meets=lambda requested: requested.form.per_page and requested.evicts and requested.in_runs,
        reason="in a run slots move where pages would leave, and the slots of a page share scales",
        instead="--kv-store paged, or a codec that encodes each token by itself, as int4_outliers",
    ),
    Excluded(
        codecs="`plain_layers`",
        beside="eviction",
        meets=lambda requested: requested.form.plain_layers > 0 and requested.evicts,
        reason="tokens leave all layers' lanes together, and the plain layers' are of another kind",
        instead="sinks=... and residual=..., which keep tokens of all layers as they were made",
    ),
    Excluded(
        codecs="`promoted`",
        beside="no eviction",
        meets=lambda requested: requested.form.promoted is not None and not requested.evicts,
        reason="which tokens are important is what an evicting rule says, and nothing evicts",
        instead="--evict with a rule that scores tokens, as h2o, or a finer codec for all tokens",
    ),
    Excluded(
        codecs="`promoted`",
        beside="rules without scores",
        meets=lambda requested: (
            requested.form.promoted is not None and requested.evicts and not requested.scores
        ),
        reason="the rule chooses tokens without a score by which some are more important",
        instead="a rule that scores tokens, as h2o, average or keydiff",
    ),
    Excluded(
        codecs="`promoted`",
        beside="a `residual` below the rule's `every`",
        meets=lambda requested: (
            requested.form.promoted is not None
            and requested.evicts
            and requested.form.residual < requested.every
        ),
        reason="tokens would leave the residual window before an eviction has looked at them",
        instead="residual=... of at least the rule's every=..., or a smaller every",
    ),
)


def refuse_excluded(text: str, requested: Storing) -> None:
    """Refuse what cannot be stored.

    Args:
        text: as written, for the message.
        requested: the same, read.

    Raises:
        UnsoundCombination: says why and what to use instead.
    """
    for row in EXCLUDED:
        if row.meets(requested):
            raise UnsoundCombination(
                f"KV codec {_as_written(text)!r}: {row.reason}; use {row.instead}"
            )


def _as_written(text: str) -> str:
    """Without what `fill_plain` has added."""
    return re.sub(rf"\s*\+\s*{PLAIN}=[^+]*", "", text)


def stored_codec(text: str, dtype: str) -> str:
    """The codec of an engine, nothing left to a default.

    Args:
        text: as `read_format` reads it; `none`, also for one of two, is what the model computes in.
        dtype: that.

    Raises:
        UnknownName: a codec is not known.
        ConfigError: an option's value cannot be, or a plain codec is not the model's own.
    """
    written = fill_plain(text, dtype)
    form = read_format(written)
    for codec in (form.key, form.value, *([form.plain] if form.plain else [])):
        if codec.is_plain and codec.name != dtype:
            raise ConfigError(
                f"KV codec {text!r}: the model computes in {dtype}, and plain KV is attended as it "
                f"is stored; use none, a codec that compresses, or --dtype {codec.name}"
            )
    return written
