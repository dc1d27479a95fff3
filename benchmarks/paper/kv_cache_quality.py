"""Paper 001: what the cache saves, and what codecs and eviction rules cost in quality."""

from collections.abc import Mapping

from benchmarks.eviction.cells import FULL
from benchmarks.eviction.config import ARTICLE_RULES, PerplexityConfig
from benchmarks.eviction.perplexity import score_texts as score_rule_texts
from benchmarks.eviction.texts import cut_texts
from benchmarks.memory.generation import GenerationConfig, measure_generation, medians, total_s
from benchmarks.paper.item import SCALED, Item, Measured, Ours, Values
from benchmarks.paper.kv_cache_sizes import GIB, TOKENS, kv_gib
from benchmarks.paper.material import Material, fewer
from benchmarks.paper.scores import (
    STAND_INS,
    TaskPrompts,
    few_shot_prompts,
    has_examples,
    score_codecs,
    stand_in_prompts,
)
from benchmarks.paper.shapes import shape
from benchmarks.quant.capacity import codes_bytes
from benchmarks.quant.config import PLAIN, CapacityConfig, TextsConfig
from benchmarks.quant.text_scores import score_texts as score_codec_texts

_LLAMA = "llama-3-70b"
_BATCH = 64

# ---- with and without a cache --------------------------------------------------------------------

_NO_CACHE, _CACHE = "No cache", "With KV cache"


def _cache_or_not(material: Material) -> Measured:
    tokens = material.context(TOKENS, 256) - 16
    lengths = (*(n for n in (16, 256, 512, 1_024, 2_048) if n < tokens), tokens)
    config = GenerationConfig(
        lengths=lengths, steps=2 if material.quick else 8, repeats=1 if material.quick else 3
    )
    without, with_cache = medians(measure_generation(config, material.model))
    seconds = {_NO_CACHE: total_s(without, tokens), _CACHE: total_s(with_cache, tokens)}
    differences = (
        f"{material.model_name} on {material.machine}; the article states no model",
        f"{tokens:,} tokens",
    )
    rows = {
        label: Ours(
            values=(one, seconds[_NO_CACHE] / one),
            differences=differences,
            note="sums over tokens; times between measured lengths are interpolated",
        )
        for label, one in seconds.items()
    }
    return Measured(rows=rows)


CACHE_OR_NOT = Item(
    id="cache-or-not",
    title="Computational Cost: With vs Without KV Cache",
    setting="4,096 tokens; estimated, no model and no machine are stated",
    columns=("seconds", "speed-up"),
    printed={_NO_CACHE: (180, 1.0), _CACHE: (12, 15)},
    measure=_cache_or_not,
    status=SCALED,
    reason="the printed times are estimates without a model; these are measured",
)

# ---- codecs --------------------------------------------------------------------------------------

_CODECS: Mapping[str, str] = {
    "FP16": PLAIN,
    "INT8": "int8",
    "INT4 + outliers": "int4_outliers",
    "INT4": "int4",
    "INT3": "int3",
    "INT2": "int2",
}


def kv_gib_of(codec: str) -> float:
    """KV of the article's 64 sequences of 4,096 tokens in a codec, with its metadata."""
    spec = shape(_LLAMA)
    if codec == PLAIN:
        return kv_gib(spec, _BATCH)
    vectors = spec.num_layers * spec.num_kv_heads * _BATCH * TOKENS
    return vectors * codes_bytes(CapacityConfig(head_dim=spec.head_dim), codec) / GIB


def _quantization(material: Material) -> Measured:
    tokens = material.context(1_024, 160)
    count = material.count(16, 2)
    first = min(64, tokens // 4)
    config = TextsConfig(codecs=(), tokens=tokens, texts=count, first=first)
    texts = cut_texts(material.model, material.running, tokens, count)
    codecs = [codec for label, codec in _CODECS.items() if label in _QUANTIZATION_ROWS]
    found = score_codec_texts(material.model, config, codecs, texts)
    differences = material.differences(
        _LLAMA, others=(f"{count} texts of {tokens:,} tokens from {material.running.name}",)
    )
    rows = {}
    for label in _QUANTIZATION_ROWS:
        codec = _CODECS[label]
        gib = kv_gib_of(codec)
        loss = 100 * (found[codec].perplexity / found[PLAIN].perplexity - 1)
        rows[label] = Ours(
            values=(2 * gib / kv_gib_of(PLAIN), gib, kv_gib_of(PLAIN) / gib, loss),
            differences=differences,
            note="bytes are of the article's model, with scales and outliers",
        )
    return Measured(rows=rows)


_QUANTIZATION_ROWS: Mapping[str, Values] = {
    "FP16": (2, 80, 1.0, 0.0),
    "INT8": (1, 40, 2.0, 0.1),
    "INT4": (0.5, 20, 4.0, 1.0),
    "INT4 + outliers": (0.6, 24, 3.3, 0.2),
    "INT2": (0.25, 10, 8.0, 5.0),
}
QUANTIZATION = Item(
    id="quantization",
    title="KV Cache Quantization Impact",
    setting="Llama 3 70B, batch 64, 4,096 tokens; upper ends of the printed losses",
    columns=("bytes/element", "KV GiB", "saving", "perplexity increase %"),
    printed=_QUANTIZATION_ROWS,
    measure=_quantization,
    status=SCALED,
    reason="printed sizes have no scales, and the text of the perplexities is not stated",
)


def _mmlu(material: Material) -> Measured:
    prompts = _mmlu_prompts(material)
    found = score_codecs(material.model, prompts, list(_CODECS.values()))
    differences = material.differences(
        _LLAMA, others=(f"{len(prompts.tokens)} questions", *prompts.differences)
    )
    rows = {
        label: Ours(
            values=(kv_gib_of(codec), 100 * found[codec].score),
            differences=differences,
            note="bytes are of the article's model",
        )
        for label, codec in _CODECS.items()
    }
    return Measured(rows=rows)


def _mmlu_prompts(material: Material) -> TaskPrompts:
    tokens, count = material.context(3_000, 256), material.count(500, 4)
    if has_examples(material, "mmlu"):
        return few_shot_prompts(material, "mmlu", tokens=tokens, prompts=count, new_tokens=4)
    return stand_in_prompts(material, "mmlu", STAND_INS[0], tokens=tokens, prompts=count)


MMLU = Item(
    id="mmlu",
    title="Memory Savings vs Quality Degradation (chart)",
    setting="Llama 3 70B on MMLU, KV of batch 64",
    columns=("KV GiB", "MMLU score"),
    printed={
        "FP16": (80, 79.5),
        "INT8": (40, 79.4),
        "INT4 + outliers": (24, 79.2),
        "INT4": (20, 78.8),
        "INT3": (15, 77.5),
        "INT2": (10, 75),
    },
    measure=_mmlu,
    status=SCALED,
    reason="needs the model and questions (--data mmlu=FILE); printed sizes have no scales",
)

# ---- eviction ------------------------------------------------------------------------------------

_RULES = dict(
    zip(
        ("Random eviction", "Recent-only", "Attention sinks (4+1020)", "H2O", "H2O + sinks"),
        ARTICLE_RULES,
        strict=True,
    )
)
_FULL_ROW = "Full cache"


def _eviction(material: Material) -> Measured:
    tokens, count = material.context(TOKENS, 256), material.count(24, 2)
    config = PerplexityConfig(tokens=tokens, texts=count, rows=4, every=min(32, tokens // 8))
    texts = cut_texts(material.model, material.running, tokens, count)
    full = score_rule_texts(material.model, config, texts, None)
    differences = material.differences(
        "llama-3-8b",
        others=(
            fewer(tokens, TOKENS, "tokens"),
            f"perplexity of {count} given texts from {material.running.name}, not of a generation",
        ),
    )
    found = {_FULL_ROW: full} | {
        label: score_rule_texts(material.model, config, texts, rule)
        for label, rule in _RULES.items()
    }
    rows = {
        label: Ours(
            values=(
                tokens if one.rule == FULL else config.cap,
                100 * one.request_bytes / full.request_bytes,
                one.perplexity,
            ),
            differences=differences,
            note="memory is the peak of a text, with statistics",
        )
        for label, one in found.items()
    }
    return Measured(rows=rows)


EVICTION = Item(
    id="eviction",
    title="Eviction Policy Comparison",
    setting="Llama 3 8B, 4,096 tokens, budget 1,024",
    columns=("tokens kept", "memory %", "perplexity"),
    printed={
        _FULL_ROW: (4096, 100, 5.12),
        "Random eviction": (1024, 25, 7.85),
        "Recent-only": (1024, 25, 6.41),
        "Attention sinks (4+1020)": (1024, 25, 5.38),
        "H2O": (1024, 25, 5.24),
        "H2O + sinks": (1024, 25, 5.19),
    },
    measure=_eviction,
    status=SCALED,
    reason="the article's text is not stated; the order of the rules can be compared",
)
