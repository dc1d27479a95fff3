"""The KV format of a model: codecs, full-precision tokens and layers, mixed precision.

    int4_outliers+residual=64           the newest 64 tokens in full precision (residual window)
    kivi4+sinks=4+residual=128          also the first 4 tokens in full precision
    int8+plain_layers=2                 the first two and the last two layers unquantized
    int2+residual=64+promoted=32:int4   4 more bits for the 32 tokens of a lane with top scores
    int8+states=bfloat16                recurrent states in bfloat16 instead of float32

In latent attention the values are the latents, and the keys their rotated parts. A single codec
applies to the latents only: `int8` is `none/int8`. Both sides are written to change that.

Full-precision tokens are stored in addition to their codes, in private pages of the sequence. Every
token is encoded once, when it is written, so no work is needed when it leaves the window. What the
code of a promoted token lost is encoded in addition, before the token leaves the window.

`stored_codec` is the codec of an engine with all defaults; `refuse_excluded` refuses what a codec
cannot be combined with.
"""

import re
from dataclasses import dataclass

from quire.errors import ConfigError, UnknownName
from quire.layout import limits
from quire.layout.codec_names import AS_COMPUTED, PAIRS, codec_pair, codec_spec
from quire.layout.codecs import CodecSpec
from quire.layout.token_precision import PROMOTED, Records, read_records

COUNTS = ("sinks", "residual", "plain_layers")
PLAIN, STATES = "plain", "states"
STATE_CODECS = ("float32", "bfloat16", "int8")
MAX_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """The storage format of a model's KV.

    Attributes:
        key, value: codecs of keys and of values.
        sinks: number of first tokens of a sequence in full precision.
        residual: number of newest tokens in full precision (residual window).
        plain_layers: number of first layers, and of last layers, that are unquantized.
        plain: codec of full-precision tokens and unquantized layers.
        promoted: records of promoted (mixed-precision) tokens; None for none.
        states: codec of recurrent states, of which `int8` applies to those of scans; None: float32.
    """

    key: CodecSpec
    value: CodecSpec
    sinks: int = 0
    residual: int = 0
    plain_layers: int = 0
    plain: CodecSpec | None = None
    promoted: Records | None = None
    states: CodecSpec | None = None

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are unquantized."""
        return self.key.is_plain and self.value.is_plain

    @property
    def per_page(self) -> bool:
        """Whether a codec encodes whole pages."""
        return self.key.per_page or self.value.per_page

    def recent(self, page_tokens: int) -> int:
        """Return the number of newest tokens to keep in full precision.

        With a codec of whole pages, up to `page_tokens - 1` tokens wait until their page is full.
        """
        return max(self.residual, page_tokens - 1 if self.per_page else 0)

    @property
    def needs_plain(self) -> bool:
        """Whether any token or layer is stored in full precision."""
        return self.per_page or any(getattr(self, name) for name in COUNTS)

    @property
    def required_plain(self) -> CodecSpec:
        """The codec of full-precision tokens and unquantized layers.

        Raises:
            ConfigError: `plain` is unset.
        """
        if self.plain is None:
            raise ConfigError(
                "a KV format with full-precision tokens needs their type, such as +plain=float32"
            )
        return self.plain


def read_format(text: str) -> KVFormat:
    """Parse `codec+option=value+option=value`.

    Args:
        text: a codec in the syntax of `codec_pair`, and the options `sinks`, `residual` and
            `plain_layers` (counts), `plain` (type of full-precision data), `promoted` (number of
            records, colon, their codec) and `states` (codec of recurrent states).

    Raises:
        UnknownName: a codec or an option is unknown.
        ConfigError: a value is invalid, an option is repeated, the codec is unquantized and so
            needs no full-precision tokens, or `promoted` is set without `residual`.
    """
    codecs, *options = (part.strip() for part in text.split("+"))
    key, value = codec_pair(codecs)
    values = _options(text, options)
    plain = _plain(text, values.pop(PLAIN)) if PLAIN in values else None
    promoted = read_records(text, values.pop(PROMOTED)) if PROMOTED in values else None
    stored = values.pop(STATES, None)
    if stored is not None and stored not in STATE_CODECS:
        raise ConfigError(
            f"KV codec {text!r}: expected {STATES} to be {', '.join(STATE_CODECS)}, got {stored!r}"
        )
    states = None if stored is None else codec_spec(stored)
    counts = {name: _count(text, name, values.get(name, "0")) for name in COUNTS}
    found = KVFormat(key=key, value=value, plain=plain, promoted=promoted, states=states, **counts)
    if found.is_plain and (any(counts.values()) or promoted is not None):
        raise ConfigError(
            f"KV codec {text!r} is unquantized: remove sinks, residual, plain_layers and promoted"
        )
    if promoted is not None and not found.residual:
        raise ConfigError(
            f"KV codec {text!r}: {PROMOTED} tokens are encoded from the residual window, which "
            "is unset; add residual=64, or at least the eviction rule's every="
        )
    return found


def fill_plain(text: str, plain: str, *, latent: bool = False) -> str:
    """Replace `none` by the model's type in a KV codec, and add `plain` if it is needed.

    Latents can have index keys, which are not quantized.

    Args:
        text: KV codec in the syntax of `read_format`, with `none` for one codec or both.
        plain: the unquantized codec of the type that the model computes in.
        latent: whether the model stores latents; then one codec is that of latents only.
    """
    codecs, *options = (part.strip() for part in text.split("+"))
    sides = [plain if side.strip() == AS_COMPUTED else side.strip() for side in codecs.split("/")]
    if latent and len(sides) == 1 and codecs not in PAIRS:
        sides = [plain, *sides]
    same = len(sides) == 2 and sides[0] == sides[1] and not (latent and sides[0] != plain)
    written = "+".join((sides[0] if same else "/".join(sides), *options))
    found = read_format(written)
    has_plain = found.key.is_plain or found.value.is_plain
    if found.plain is None and (found.needs_plain or (latent and not has_plain)):
        return f"{written}+plain={plain}"
    return written


def without_records(text: str) -> str:
    """Remove `promoted` from a KV codec, for sequences without eviction."""
    parts = text.split("+")
    return "+".join(part for part in parts if part.partition("=")[0].strip() != PROMOTED)


def _options(text: str, parts: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in (*COUNTS, PLAIN, PROMOTED, STATES):
            raise UnknownName("option of a KV codec", name, (*COUNTS, PROMOTED, STATES))
        if name in options:
            raise ConfigError(f"KV codec {text!r}: {name} is repeated; keep one")
        options[name] = value
    return options


def _plain(text: str, value: str) -> CodecSpec:
    """Parse `plain`, which must be unquantized: full-precision tokens are copied, not encoded."""
    plain = codec_spec(value)
    if not plain.is_plain:
        raise ConfigError(
            f"KV codec {text!r}: expected {PLAIN} to be a type that models compute in, such as "
            f"float32, got {value!r}; remove it"
        )
    return plain


def _count(text: str, name: str, value: str) -> int:
    if not value.isdecimal() or int(value) > MAX_TOKENS:
        raise ConfigError(
            f"KV codec {text!r}: expected {name} to be an integer from 0 to {MAX_TOKENS}, got "
            f"{value!r}"
        )
    return int(value)


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


def stored_codec(text: str, dtype: str, *, latent: bool = False) -> str:
    """Return the KV codec of an engine with all defaults filled in.

    Args:
        text: KV codec in the syntax of `read_format`; `none`, for keys, values or both, is `dtype`.
        dtype: type that the model computes in.
        latent: whether the model stores latents; see `fill_plain`.

    Raises:
        UnknownName: a codec is unknown.
        ConfigError: an option's value is invalid, or an unquantized codec is not `dtype`.
    """
    written = fill_plain(text, dtype, latent=latent)
    form = read_format(written)
    for codec in (form.key, form.value, *([form.plain] if form.plain else [])):
        if codec.is_plain and codec.name != dtype:
            raise ConfigError(
                f"KV codec {text!r}: the model computes in {dtype}, and unquantized KV must have "
                f"the same type; use none, a quantizing codec, or --dtype {codec.name}"
            )
    return written
