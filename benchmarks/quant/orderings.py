"""Part `orderings`: which elements should get more bits, measured on the same texts.

* keys per channel (over the tokens of a page) against keys per token, plain values
* bits of keys against bits of values, for every pair of a grid
* outliers stored separately against outliers left in place
"""

from collections.abc import Mapping

from benchmarks.common.result import Cell, HeatMap, Numbers, PartResult, Table
from benchmarks.eviction.texts import RunningText, cut_texts
from benchmarks.quant.config import OrderingsConfig
from benchmarks.quant.text_scores import CodecTexts, score_texts
from quire.models.loader import LoadedModel

PAIRS: Mapping[str, tuple[str, str]] = {
    "channel_over_token_keys_4": ("int4_page/none", "int4/none"),
    "channel_over_token_keys_2": ("int2_page/none", "int2/none"),
    "channel_over_token_values_4": ("none/int4_page", "none/int4"),
    "channel_over_token_values_2": ("none/int2_page", "none/int2"),
    "key_over_value_bits_8_4": ("int8/int4", "int4/int8"),
    "key_over_value_bits_4_2": ("int4/int2", "int2/int4"),
    "outliers_over_none_4": ("int4_outliers", "int4"),
    "rotated_over_plain_4": ("int4_hadamard", "int4"),
    "rotated_over_plain_3": ("int3_hadamard", "int3"),
}
"""Codec pairs by claim name: the claim is the KL of the first over the KL of the second."""


def run_orderings(model: LoadedModel, config: OrderingsConfig, running: RunningText) -> PartResult:
    """Run the part."""
    texts = cut_texts(model, running, config.texts.tokens, config.texts.texts)
    grid = [pair(key, value) for key in config.grid for value in config.grid]
    codecs = dict.fromkeys([*(codec for both in PAIRS.values() for codec in both), *grid])
    found = score_texts(model, config.texts, tuple(codecs), texts)
    return PartResult(
        claims=claims(found),
        tables=(_pairs(config, found), _grid(config, found)),
        maps=(_map(config, found),),
        raw={"texts": [one.to_json() for one in found.values()]},
    )


def pair(key: str, value: str) -> str:
    """Codec name for a key codec and a value codec."""
    return key if key == value else f"{key}/{value}"


def claims(found: Mapping[str, CodecTexts]) -> Numbers:
    """KL ratios of the pairs; below 1 if the first codec is better."""
    return {name: found[a].mean_kl / found[b].mean_kl for name, (a, b) in PAIRS.items()}


def _pairs(config: OrderingsConfig, found: Mapping[str, CodecTexts]) -> Table:
    rows = tuple(
        (a, found[a].request_bytes / 1024, found[a].mean_kl, b, found[b].mean_kl, ratio)
        for (a, b), ratio in zip(PAIRS.values(), claims(found).values(), strict=True)
    )
    return Table(
        name="quant-orderings",
        caption=(
            f"KL in nats over {config.texts.texts} texts of {config.texts.tokens:,} tokens, pages "
            f"of {config.texts.page_tokens}. Below 1, the first codec is better."
        ),
        columns=("codec", "KV KiB", "KL", "compared with", "its KL", "KL ratio"),
        rows=rows,
    )


def _grid(config: OrderingsConfig, found: Mapping[str, CodecTexts]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (key, *(found[pair(key, value)].mean_kl for value in config.grid)) for key in config.grid
    )
    return Table(
        name="quant-grid",
        caption="KL in nats: key codecs in rows, value codecs in columns.",
        columns=("keys", *(f"values {value}" for value in config.grid)),
        rows=rows,
    )


def _map(config: OrderingsConfig, found: Mapping[str, CodecTexts]) -> HeatMap:
    most = max(one.mean_kl for one in found.values()) or 1.0
    return HeatMap(
        name="quant-grid",
        title=f"KL over the largest ({most:.3g} nats)",
        x_label=f"values: {', '.join(config.grid)}",
        y_label=f"keys: {', '.join(config.grid)}",
        panels={
            "all texts": tuple(
                tuple(found[pair(key, value)].mean_kl / most for value in config.grid)
                for key in config.grid
            )
        },
    )
