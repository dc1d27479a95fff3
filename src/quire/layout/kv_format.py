"""How the KV of a model is stored: codecs, and what of it stays as the model made it.

    int4_outliers+residual=64           the newest 64 tokens are attended as they were made
    kivi4+sinks=4+residual=128          and the first 4
    int8+plain_layers=2                 the first two layers and the last two hold plain numbers
    int2+residual=64+promoted=32:int8  32 tokens of a lane, which eviction found important, in int8

What stays as it was stands beside the codes, in pages of a sequence's own: every token is encoded
when it is written, once, and nothing has to be done when it leaves the window. Important tokens
are encoded once more, from what they were made as, before they leave it.
"""

from dataclasses import dataclass

from quire.errors import ConfigError, UnknownName
from quire.layout.codec_names import AS_COMPUTED, codec_pair, codec_spec
from quire.layout.codecs import CodecSpec
from quire.layout.token_precision import PROMOTED, Records, check_finer, read_records

COUNTS = ("sinks", "residual", "plain_layers")
PLAIN = "plain"
MOST_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """What pages of a model hold.

    Attributes:
        key, value: codecs.
        sinks: so many of the first tokens of a sequence are kept as they were made.
        residual: so many of the newest ones.
        plain_layers: so many of the first layers, and of the last, hold plain numbers.
        plain: the codec of what is kept as it was made.
        promoted: records for tokens that eviction finds important; None for none.
    """

    key: CodecSpec
    value: CodecSpec
    sinks: int = 0
    residual: int = 0
    plain_layers: int = 0
    plain: CodecSpec | None = None
    promoted: Records | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all numbers are stored as they are."""
        return self.key.is_plain and self.value.is_plain

    @property
    def per_page(self) -> bool:
        """Whether pages are encoded as a whole."""
        return self.key.per_page or self.value.per_page

    def recent(self, page_tokens: int) -> int:
        """How many of the newest tokens are kept as they were made, encoded or not.

        Where pages are encoded as a whole, a page but one token has to wait for its last one.
        """
        return max(self.residual, page_tokens - 1 if self.per_page else 0)

    @property
    def needs_plain(self) -> bool:
        """Whether anything is kept as it was made."""
        return self.per_page or any(getattr(self, name) for name in COUNTS)

    @property
    def required_plain(self) -> CodecSpec:
        """The codec of what is kept as it was made.

        Raises:
            ConfigError: the text does not say what the model computes in.
        """
        if self.plain is None:
            raise ConfigError(
                "a KV format that keeps tokens as they were made needs +plain=float32"
            )
        return self.plain


def read_format(text: str) -> KVFormat:
    """Read `codec+option=value+option=value`.

    Args:
        text: a codec as `codec_pair` reads it, and what is kept plain: sinks, residual,
            plain_layers; `plain` says in which type. `promoted` is how many records, and behind a
            colon their codec.

    Raises:
        UnknownName: a codec or an option is not known.
        ConfigError: a value cannot be, an option stands twice, plain numbers would be kept beside
            plain numbers, or nothing is kept that records could be encoded from.
    """
    codecs, *options = (part.strip() for part in text.split("+"))
    key, value = codec_pair(codecs)
    given = _options(text, options)
    plain = _plain(text, given.pop(PLAIN)) if PLAIN in given else None
    promoted = read_records(text, given.pop(PROMOTED)) if PROMOTED in given else None
    counts = {name: _count(text, name, given.get(name, "0")) for name in COUNTS}
    found = KVFormat(key=key, value=value, plain=plain, promoted=promoted, **counts)
    if found.is_plain and (any(counts.values()) or promoted is not None):
        raise ConfigError(f"KV codec {text!r} stores plain numbers, beside which none need be kept")
    if promoted is not None:
        if not found.residual:
            raise ConfigError(
                f"KV codec {text!r}: {PROMOTED} tokens are encoded from the residual window, and "
                "there is none; add residual=64, or as much as the eviction rule's every="
            )
        check_finer(text, promoted, (key, value))
    return found


def fill_plain(text: str, plain: str) -> str:
    """A KV codec without anything left to the model: what is plain has a name.

    Args:
        text: as `read_format` reads it, with `none` for one codec or both.
        plain: the plain codec of the model's numbers.
    """
    codecs, *options = (part.strip() for part in text.split("+"))
    sides = [plain if side.strip() == AS_COMPUTED else side.strip() for side in codecs.split("/")]
    written = sides[0] if len(sides) == 2 and sides[0] == sides[1] else "/".join(sides)
    written = "+".join((written, *options))
    found = read_format(written)
    if found.plain is None and found.needs_plain:
        return f"{written}+plain={plain}"
    return written


def without_records(text: str) -> str:
    """A KV codec for sequences that lose no tokens: none of them is important."""
    parts = text.split("+")
    return "+".join(part for part in parts if part.partition("=")[0].strip() != PROMOTED)


def _options(text: str, parts: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        name, _, given = (piece.strip() for piece in part.partition("="))
        if name not in (*COUNTS, PLAIN, PROMOTED):
            raise UnknownName("option of a KV codec", name, (*COUNTS, PROMOTED))
        if name in options:
            raise ConfigError(f"KV codec {text!r}: {name} stands twice; say it once")
        options[name] = given
    return options


def _plain(text: str, given: str) -> CodecSpec:
    """What is kept as the model made it is copied, so codes cannot hold it."""
    plain = codec_spec(given)
    if not plain.is_plain:
        raise ConfigError(
            f"KV codec {text!r}: {PLAIN} needs a type that models compute in, such as float32, got "
            f"{given!r}; leave it out"
        )
    return plain


def _count(text: str, name: str, given: str) -> int:
    if not given.isdecimal() or int(given) > MOST_TOKENS:
        raise ConfigError(
            f"KV codec {text!r}: {name} needs a whole number from 0 to {MOST_TOKENS}, got {given!r}"
        )
    return int(given)
