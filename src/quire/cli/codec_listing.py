"""`quire codecs`: lists the KV codecs and their sizes in bytes."""

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from quire.cli.common import PACKAGED_MODEL, AsJson
from quire.cli.completion import complete_codec
from quire.cli.json_output import print_json
from quire.cli.options import documented_attributes
from quire.cli.startup import fast_imports, status
from quire.errors import UnknownName
from quire.layout.codec_names import CODECS, PAIRS

_MODIFIERS = (
    ("+sinks=N", "The first N tokens stay in full precision."),
    ("+residual=N", "The newest N tokens stay in full precision."),
    ("+plain_layers=N", "The first N and the last N layers stay in full precision."),
    (
        "+promoted=N:CODEC",
        "N tokens with the highest scores of a rule are stored in CODEC as well.",
    ),
)
SHOWN_HEAD_DIM, SHOWN_PAGE_TOKENS = 128, 32  # head size and page size of the shown vector sizes

CodecName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A codec to show in full. Default: one line for each.",
        show_default=False,
        autocompletion=complete_codec,
    ),
]


def codecs(name: CodecName = None, *, as_json: AsJson = False) -> None:
    """List the KV codecs; with NAME show size, options, defaults and an example."""
    rows = codec_rows()
    if name is not None and name in PAIRS and not as_json:
        from quire.cli.listing_views import show_entry

        show_entry(name, "A codec for keys and another one for values.", _pair_facts(name))
        return
    if name is not None:
        keys_and_values = [part.partition(":")[0] for part in PAIRS.get(name, (name,))]
        rows = [row for row in rows if row["name"] in keys_and_values]
        if not rows:
            raise UnknownName("codec", name, [*CODECS, *PAIRS])
    if as_json:
        print_json({"name": "codecs", "codecs": rows})
        return
    from quire.cli.listing_views import show_entry, show_summaries, show_text

    if name is not None:
        show_entry(name, str(rows[0]["summary"]), _codec_facts(name, rows[0]))
        return
    show_summaries(
        "KV codecs, as in --kv-codec NAME, or KEYS/VALUES such as int8/int4 (default: none, the "
        "model's dtype)",
        [(str(row["name"]), _codec_line(row)) for row in rows],
    )
    show_summaries(
        "\nPairs of codecs", [(pair, f"keys {k}, values {v}.") for pair, (k, v) in PAIRS.items()]
    )
    show_summaries("\nModifiers, as in --kv-codec int8+sinks=4+residual=128", _MODIFIERS)
    show_text("\nquire codecs NAME shows size, options, defaults and an example.")


def _pair_facts(name: str) -> dict[str, str]:
    keys, values = PAIRS[name]
    return {
        "keys": keys,
        "values": values,
        "details": f"quire codecs {keys.partition(':')[0]}, {values.partition(':')[0]}",
        "example": f"quire generate {PACKAGED_MODEL} PROMPT --kv-codec {name}+sinks=4+residual=128",
    }


def _codec_line(row: Mapping[str, object]) -> str:
    return f"{row['summary']} {row['effective_bits']:g} bits per element."


def _codec_facts(name: str, row: Mapping[str, object]) -> dict[str, str]:
    codec = CODECS[name]
    helps = documented_attributes(type(codec).__doc__ or "")
    facts = {f"{option}={getattr(codec, option):g}": helps[option] for option in codec.options}
    facts["bits of a code"] = f"{codec.code_bits}"
    facts["bits per element"] = f"{row['effective_bits']:g}, scales and other data included"
    facts[f"{SHOWN_HEAD_DIM} elements"] = f"{row['vector_bytes']:g} bytes"
    facts["calibration"] = (
        f"needs quire calibrate MODEL --kv-codec {name}" if codec.constants else ""
    )
    facts["source"] = _codec_source(codec.rule)
    facts["example"] = f"quire generate {PACKAGED_MODEL} PROMPT --kv-codec {name}"
    return facts


def _codec_source(rule: str) -> str:
    """The first paragraph of the documentation of the module that implements a codec."""
    with status("starting"), fast_imports():
        from quire.codecs.registry import registered  # imports torch

    documentation = sys.modules[registered()[rule].__module__].__doc__ or ""
    _, _, source = documentation.partition("\nSource: ")
    return " ".join(source.split())


def codec_rows() -> list[dict[str, object]]:
    """All codecs with their sizes, including scales and other data stored with the codes."""
    return [
        {
            "name": codec.name,
            "code_bits": codec.code_bits,
            "effective_bits": codec.effective_bits(SHOWN_HEAD_DIM, SHOWN_PAGE_TOKENS),
            "vector_bytes": codec.vector_bytes(SHOWN_HEAD_DIM, SHOWN_PAGE_TOKENS),
            "options": ", ".join(codec.options),
            "summary": codec.summary,
        }
        for codec in CODECS.values()
    ]
