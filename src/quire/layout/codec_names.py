"""The registered codecs, and the syntax of codec names.

A codec is written `name:option=value`, like a policy. A slash separates the codecs of keys and of
values; some pairs have a name:

    int8                        keys and values in int8
    int8/int4:group=32          keys in int8, values in int4
    kivi4                       int4_page/int4:group=32
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from quire.errors import ConfigError, UnknownName
from quire.layout.codecs import GROUP, PAGE, VECTOR, CodecSpec
from quire.layout.eviction import parse_policy

AS_COMPUTED = "none"  # unquantized, in the type that the model computes in


def _plain(name: str, bits: int) -> CodecSpec:
    summary = "Elements are stored unquantized."
    return CodecSpec(name=name, rule=name, summary=summary, code_bits=bits, codes=name)


def _grouped(rule: str, bits: int, summary: str) -> CodecSpec:
    return CodecSpec(
        name=rule,
        rule=rule,
        summary=summary,
        code_bits=bits,
        scaled=GROUP,
        has_zeros=True,
        options=("group", "equalise"),
    )


def _per_page(rule: str, bits: int) -> CodecSpec:
    summary = f"{bits}-bit codes with a scale and a zero for each channel of a page."
    return CodecSpec(
        name=rule, rule=rule, summary=summary, code_bits=bits, scaled=PAGE, has_zeros=True
    )


def _kvquant(bits: int) -> CodecSpec:
    return CodecSpec(
        name=f"kvquant{bits}",
        rule=f"kvquant{bits}",
        summary=f"{bits}-bit indices of a calibrated codebook, with a calibrated range for each "
        "channel; outliers in float16.",
        code_bits=bits,
        percent=1.0,
        constants=("low", "high", "codebook"),
        options=("percent",),
    )


CODECS: Mapping[str, CodecSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _plain("float32", 32),
            _plain("bfloat16", 16),
            _plain("float16", 16),
            CodecSpec(
                name="int8",
                rule="int8",
                summary="8-bit integers (-127 to 127) with a scale for each vector.",
                code_bits=8,
                codes="int8",
                scaled=VECTOR,
                options=("equalise",),
            ),
            CodecSpec(
                name="fp8",
                rule="fp8",
                summary="8-bit floats (e4m3) with a scale for each vector.",
                code_bits=8,
                scaled=VECTOR,
            ),
            CodecSpec(
                name="int8_channel",
                rule="int8_channel",
                summary="8-bit integers (-127 to 127) with a calibrated scale for each channel.",
                code_bits=8,
                codes="int8",
                constants=("scale",),
            ),
            _grouped("int4", 4, "4-bit codes with a scale and a zero for each group of channels."),
            _grouped("int3", 3, "3-bit codes with a scale and a zero for each group of channels."),
            _grouped("int2", 2, "2-bit codes with a scale and a zero for each group of channels."),
            replace(
                _grouped("int4_outliers", 4, "int4; the largest elements of a vector in float16."),
                percent=1.0,
                options=("group", "percent", "equalise"),
            ),
            _grouped(
                "int4_hadamard",
                4,
                "int4 after a Hadamard rotation; preserves vector norms.",
            ),
            _grouped(
                "int3_hadamard",
                3,
                "int3 after a Hadamard rotation; preserves vector norms.",
            ),
            _per_page("int4_page", 4),
            _per_page("int2_page", 2),
            _kvquant(4),
            _kvquant(3),
        )
    }
)
"""All codecs by name, with their default options."""

OPTIONS: Mapping[str, tuple[type[int] | type[float], float, float]] = MappingProxyType(
    {"group": (int, 1, 1 << 16), "percent": (float, 0.0, 50.0), "equalise": (int, 1, 1)}
)
"""Codec options: type, smallest and largest value; 0 is not allowed."""

PAIRS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"kivi4": ("int4_page", "int4:group=32"), "kivi2": ("int2_page", "int2:group=32")}
)
"""Names of pairs of a key codec and a value codec."""


def codec_spec(text: str) -> CodecSpec:
    """Parse one codec.

    Raises:
        UnknownName: no codec has this name, or it has no such option.
        ConfigError: an option's value is invalid, or the codec has no options.
    """
    if text in CODECS:
        return CODECS[text]
    name, _, rest = text.partition(":")
    if name in PAIRS:
        raise ConfigError(
            f"codec {text!r}: {name} is the pair {'/'.join(PAIRS[name])} of key and value codecs; "
            "write both codecs to change one of them"
        )
    if name not in CODECS and (name != AS_COMPUTED or not rest):
        raise UnknownName("codec", name, (AS_COMPUTED, *CODECS, *PAIRS))
    found = CODECS.get(name)
    if found is None or (rest and not found.options):
        raise ConfigError(f"codec {text!r}: {name} has no options, got {rest!r}; write {name}")
    options = parse_policy(text, "codec").options if rest else {}
    values: dict[str, int | float] = {}
    for option, value in options.items():
        if option not in found.options:
            raise UnknownName(f"option of codec {name!r}", option, found.options)
        values[option] = _number(text, option, value)
    written = ",".join(f"{option}={value:g}" for option, value in values.items())
    constants = (*found.constants, *(("equal",) if values.get("equalise") else ()))
    return replace(found, name=f"{name}:{written}", constants=constants, **values)  # type: ignore[arg-type]


def codec_pair(text: str) -> tuple[CodecSpec, CodecSpec]:
    """Parse the codecs of keys and of values.

    Args:
        text: a codec for both, or `keys/values`, or the name of a pair.

    Raises:
        UnknownName: a codec or an option is unknown.
        ConfigError: an option's value is invalid, or there are more than two codecs.
    """
    if text in PAIRS:
        key, value = PAIRS[text]
        return codec_spec(key), codec_spec(value)
    parts = text.split("/")
    if len(parts) > 2:
        raise ConfigError(f"expected one codec, or keys/values such as int8/int4, got {text!r}")
    return codec_spec(parts[0].strip()), codec_spec(parts[-1].strip())


def _number(text: str, option: str, value: str) -> int | float:
    kind, low, high = OPTIONS[option]
    try:
        number = kind(value)
    except ValueError:
        raise ConfigError(
            f"option {option} of codec {text!r}: expected a number, got {value}"
        ) from None
    if not low <= number <= high or not number:
        raise ConfigError(
            f"option {option} of codec {text!r}: expected above 0 and at most {high:g}, got {value}"
        )
    return number
