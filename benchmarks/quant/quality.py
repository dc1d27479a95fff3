"""Parts of the codec benchmark; quality of texts and tasks with quantized KV, and KV bytes.

quality     every codec on texts, and on the tasks of the eviction benchmark
orderings   which elements should get more bits, on the same texts: keys per channel (over the
            tokens of a page) against keys per token; bits of keys against bits of values, for every
            pair of a grid; outliers stored separately against outliers left in place
eviction    fewer tokens or fewer bits, in the same bytes of a sequence: a rule with a cap in bytes
            retains as many tokens as fit with a codec, so every row of a table has the same bytes
"""

from collections.abc import Callable, Mapping

from benchmarks.common.result import Chart, HeatMap, Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.quality.cells import Cell, CellKey, Judge, Material, mean_share, tasks_table
from benchmarks.quality.texts import PLAIN, TextsConfig, TextScores, cut_texts, score_codecs
from benchmarks.quant.attention import run_attention
from benchmarks.quant.capacity import run_capacity
from benchmarks.quant.config import EvictingConfig, OrderingsConfig, QuantBenchConfig
from benchmarks.quant.throughput import run_throughput
from quire.config.kv_config import KVConfig, PrefixCacheConfig

Part = Callable[[QuantBenchConfig], PartResult]
Found = Mapping[str, TextScores]
"""Scores of texts by codec."""


def make_parts(material: Material) -> Mapping[str, Part]:
    """Create all parts; the model is loaded on first use."""
    return {
        "capacity": lambda c: run_capacity(c.capacity),
        "attention": lambda c: run_attention(c.attention),
        "throughput": lambda c: run_throughput(c.throughput),
        "quality": lambda c: run_quality(c, material),
        "orderings": lambda c: run_orderings(c.orderings, material),
        "eviction": lambda c: run_evicting(c.evicting, material),
    }


# ---- texts and tasks -----------------------------------------------------------------------------


class CodecJudge(Judge):
    """Runs cells whose rule is a codec; no token is evicted."""

    def kv_config(self, key: CellKey, memory: int) -> KVConfig:
        return KVConfig(
            memory=memory,
            page_tokens=key.page_tokens,
            codec=key.rule,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )


def _texts(material: Material, config: TextsConfig) -> list[list[int]]:
    return cut_texts(material.model, material.running, config.tokens, config.texts)


def run_quality(config: QuantBenchConfig, material: Material) -> PartResult:
    """Run the part quality."""
    tasks, model = config.tasks, material.model
    judge = CodecJudge(model, tasks.rows, material.prompt_maker_for(model))
    keys = [
        CellKey(
            model=config.model,
            task=task,
            tokens=tasks.tokens,
            prompts=tasks.prompts,
            rule=codec,
            commit=material.commit,
        )
        for task in tasks.tasks
        for codec in (PLAIN, *config.task_codecs)
    ]
    cells = list(material.cells(judge.cell, keys))
    by_codec: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_codec.setdefault(cell.key.rule, {})[cell.key.task] = cell
    found = score_codecs(model, config.texts, config.texts.codecs, _texts(material, config.texts))
    accuracy = {f"{name_of(codec)}_tasks": mean_share(of) for codec, of in by_codec.items()}
    return PartResult(
        claims=claims(found) | accuracy,
        tables=(
            _texts_table(config.texts, material.running.name, found),
            tasks_table("quant-tasks", "codec", tasks, by_codec),
        ),
        charts=(_chart(found),),
        raw={"texts": _raw(found), "cells": [cell.to_json() for cell in cells]},
    )


def _raw(found: Found) -> list[dict[str, object]]:
    return [{"codec": codec} | one.to_json() for codec, one in found.items()]


def claims(found: Found, plain: str = PLAIN, prefix: str = "") -> Numbers:
    """KL, top-1 agreement and perplexity increase of every codec."""
    made: Numbers = {}
    for codec, one in found.items():
        if codec != plain:
            name = f"{prefix}{name_of(codec)}"
            made[f"{name}_kl"] = one.mean_kl
            made[f"{name}_top_1"] = one.mean_top_1
            made[f"{name}_perplexity_change"] = one.perplexity / found[plain].perplexity - 1
    return made


def name_of(codec: str) -> str:
    """A codec as a component of a claim's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in codec)


def _texts_table(config: TextsConfig, name: str, found: Found) -> Table:
    plain = found[PLAIN]
    return table_of(
        "quant-texts",
        f"{config.texts} texts of {config.tokens:,} tokens from {name}, with quantized KV, "
        f"scored from token {config.first} on, compared with plain KV. KL in nats; KV: most "
        f"bytes of a text, in pages of {config.page_tokens}.",
        found,
        {
            "codec": lambda codec: codec,
            "KV KiB": lambda codec: found[codec].request_bytes / 1024,
            "times smaller": lambda codec: plain.request_bytes / found[codec].request_bytes,
            "KL": lambda codec: found[codec].mean_kl,
            "top-1": lambda codec: found[codec].mean_top_1,
            "perplexity": lambda codec: found[codec].perplexity,
            "% more": lambda codec: 100 * (found[codec].perplexity / plain.perplexity - 1),
        },
    )


def _chart(found: Found) -> Chart:
    """One point per codec."""
    return Chart(
        name="quant-quality",
        title="Quality and size of codecs",
        x_label="KiB of KV",
        y_label="KL, nats",
        lines={
            codec: ((one.request_bytes / 1024, max(one.mean_kl, 1e-9)),)
            for codec, one in found.items()
            if codec != PLAIN
        },
        log_y=True,
    )


# ---- orderings -----------------------------------------------------------------------------------

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


def run_orderings(config: OrderingsConfig, material: Material) -> PartResult:
    """Run the part orderings."""
    grid = [pair(key, value) for key in config.grid for value in config.grid]
    codecs = dict.fromkeys([*(codec for both in PAIRS.values() for codec in both), *grid])
    found = score_codecs(
        material.model, config.texts, tuple(codecs), _texts(material, config.texts)
    )
    most = max(one.mean_kl for one in found.values()) or 1.0
    kl = [[found[pair(key, value)].mean_kl for value in config.grid] for key in config.grid]
    ratios = ordering_claims(found)
    pairs = table_of(
        "quant-orderings",
        f"KL in nats over {config.texts.texts} texts of {config.texts.tokens:,} tokens, pages "
        f"of {config.texts.page_tokens}. Below 1, the first codec is better.",
        PAIRS,
        {
            "codec": lambda name: PAIRS[name][0],
            "KV KiB": lambda name: found[PAIRS[name][0]].request_bytes / 1024,
            "KL": lambda name: found[PAIRS[name][0]].mean_kl,
            "compared with": lambda name: PAIRS[name][1],
            "its KL": lambda name: found[PAIRS[name][1]].mean_kl,
            "KL ratio": lambda name: ratios[name],
        },
    )
    by_grid = Table(
        name="quant-grid",
        caption="KL in nats: key codecs in rows, value codecs in columns.",
        columns=("keys", *(f"values {value}" for value in config.grid)),
        rows=tuple((key, *row) for key, row in zip(config.grid, kl, strict=True)),
    )
    picture = HeatMap(
        name="quant-grid",
        title=f"KL over the largest ({most:.3g} nats)",
        x_label=f"values: {', '.join(config.grid)}",
        y_label=f"keys: {', '.join(config.grid)}",
        panels={"all texts": tuple(tuple(one / most for one in row) for row in kl)},
    )
    return PartResult(
        claims=ratios, tables=(pairs, by_grid), maps=(picture,), raw={"texts": _raw(found)}
    )


def pair(key: str, value: str) -> str:
    """Codec name for a key codec and a value codec."""
    return key if key == value else f"{key}/{value}"


def ordering_claims(found: Found) -> Numbers:
    """KL ratios of the pairs; below 1 if the first codec is better."""
    return {name: found[a].mean_kl / found[b].mean_kl for name, (a, b) in PAIRS.items()}


# ---- eviction ------------------------------------------------------------------------------------


def run_evicting(config: EvictingConfig, material: Material) -> PartResult:
    """Run the part eviction."""
    model, texts = material.model, _texts(material, config.texts)
    whole = model.spec.kv_bytes(config.texts.tokens, model.decoder.dtype.itemsize)
    found = {
        share: score_codecs(
            model, config.texts, config.texts.codecs, texts, config.evict(int(share * whole))
        )
        for share in config.shares
    }
    chart = Chart(
        name="quant-eviction",
        title="Fewer tokens or fewer bits, in equal bytes",
        x_label="% of the bytes of all tokens in full precision",
        y_label="KL, nats",
        lines={
            codec: tuple((100 * share, of[codec].mean_kl) for share, of in sorted(found.items()))
            for codec in next(iter(found.values()))
        },
        log_y=True,
    )
    return PartResult(
        claims=evicting_claims(found),
        tables=tuple(
            _evicting_table(config, material.running.name, share, of) for share, of in found.items()
        ),
        charts=(chart,),
        raw={"texts": [{"share": s} | one for s, of in found.items() for one in _raw(of)]},
    )


def evicting_claims(found: Mapping[float, Found]) -> Numbers:
    """KL of mixed codecs over the best uniform codec's KL, in the same bytes.

    mixed_over_uniform_SHARE: below 1 if a finer codec for important tokens pays.
    mixed_over_CODEC_SHARE: the best mixed codec with this base codec over that codec alone.
    int8_over_plain_SHARE: below 1 if more tokens with fewer bits pay.
    """
    made: Numbers = {}
    for share, of in found.items():
        label = f"{round(100 * share)}"
        uniform: dict[str, float] = {}
        mixed: dict[str, float] = {}
        for codec, one in of.items():
            body, kl = codec.partition("+")[0], one.mean_kl
            if "promoted" in codec:  # some tokens have a finer codec
                mixed[body] = min(kl, mixed.get(body, kl))
            else:
                uniform[body] = kl
        made[f"mixed_over_uniform_{label}"] = min(mixed.values()) / min(uniform.values())
        made[f"int8_over_plain_{label}"] = uniform["int8"] / uniform[PLAIN]
        made |= {f"mixed_over_{body}_{label}": kl / uniform[body] for body, kl in mixed.items()}
    return made


def _evicting_table(config: EvictingConfig, name: str, share: float, of: Found) -> Table:
    texts = config.texts
    return table_of(
        f"quant-eviction-{round(100 * share)}",
        f"{texts.texts} texts of {texts.tokens:,} tokens from {name} under `{config.rule}`, "
        f"whose cap is {100 * share:g} % of the bytes of all tokens in plain KV; scored "
        f"from token {texts.first} on, compared with all tokens in plain KV.",
        of,
        {
            "codec": lambda codec: codec,
            "KV KiB": lambda codec: of[codec].request_bytes / 1024,
            "KL": lambda codec: of[codec].mean_kl,
            "top-1": lambda codec: of[codec].mean_top_1,
            "perplexity": lambda codec: of[codec].perplexity,
        },
    )
