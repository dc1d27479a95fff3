"""Part `throughput`: decoding in one KV memory, each codec with as many rows as fit.

The memory holds `rows` sequences of plain KV at their final length. A codec has the most rows whose
pages fit. All prompts are prefilled first; decode steps of all engines are measured in turn.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.common.decoding import decoding_engine
from benchmarks.common.models import SHAPES, random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.quant.config import QuantThroughputConfig
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.layout.kv_format import fill_plain
from quire.layout.layout import layout_for
from quire.models.loader import LoadedModel
from quire.profile.ceilings import random_prompt, seconds

PLAIN = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRate:
    """Measurements of one codec in the memory.

    Attributes:
        codec: name of the codec.
        rows: number of rows that fit.
        attention: the attention backend.
        step_s: median decode step time of each round.
    """

    codec: str
    rows: int
    attention: str
    step_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """Tokens per second of each round."""
        return tuple(self.rows / step_s for step_s in self.step_s)


def run_throughput(config: QuantThroughputConfig) -> PartResult:
    """Run the part."""
    found = measure_rates(config)
    return PartResult(
        claims=claims(found),
        tables=(_table(config, found),),
        raw={"codecs": [asdict(one) for one in found]},
    )


def measure_rates(config: QuantThroughputConfig) -> list[CodecRate]:
    """Measure all codecs, plain KV first."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = random_model(SHAPES[config.model](), dtype=dtype)
    memory = config.rows * row_bytes(config, model, PLAIN)
    rows = {codec: memory // row_bytes(config, model, codec) for codec in (PLAIN, *config.codecs)}
    engines = {}
    for codec, num_rows in rows.items():
        prompts = [random_prompt(model, config.prompt_tokens, row) for row in range(num_rows)]
        # slabs are not filled to the last byte: one more row is always enough
        kv = KVConfig(
            memory=memory + row_bytes(config, model, codec),
            codec=codec,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )
        engines[codec] = decoding_engine(model, kv, prompts, _new_tokens(config))
    times_s: Mapping[str, list[float]] = {codec: [] for codec in engines}
    for _ in range(config.repeats):
        for codec, engine in engines.items():
            steps_s = [seconds(engine.step) for _ in range(config.steps)]
            times_s[codec].append(statistics.median(steps_s))
    return [
        CodecRate(
            codec=codec,
            rows=rows[codec],
            attention=engine.pool.kv.backend.name,
            step_s=tuple(times_s[codec]),
        )
        for codec, engine in engines.items()
    ]


def row_bytes(config: QuantThroughputConfig, model: LoadedModel, codec: str) -> int:
    """Bytes of a sequence at its final length, in whole pages."""
    layout = layout_for(model.spec, codec=fill_plain(codec, config.dtype), page_tokens=16)
    tokens = config.prompt_tokens + _new_tokens(config)
    return sum(group.bytes_at_most(tokens, config.prompt_tokens) for group in layout.groups)


def claims(found: Sequence[CodecRate]) -> Numbers:
    """Median ratios of tokens per second to plain KV within rounds, and ratios of rows."""
    plain, *coded = found
    made: Numbers = {"plain_tokens_per_s": statistics.median(plain.tokens_per_s)}
    for one in coded:
        name = one.codec.replace("/", "_")
        pairs = zip(one.tokens_per_s, plain.tokens_per_s, strict=True)
        made[f"{name}_gain_max_batch"] = statistics.median(a / b for a, b in pairs)
        made[f"{name}_max_batch_ratio"] = one.rows / plain.rows
    return made


def _new_tokens(config: QuantThroughputConfig) -> int:
    """Enough tokens for the rounds, and for rows that wait until the last prompt is prefilled."""
    return config.repeats * config.steps + 64


def _table(config: QuantThroughputConfig, found: Sequence[CodecRate]) -> Table:
    plain = statistics.median(found[0].tokens_per_s)
    return table_of(
        "quant-throughput",
        f"Decode steps after prompts of {config.prompt_tokens:,} tokens, random-weight Llama "
        f"({config.model}), {config.dtype}, in the KV memory that holds {config.rows} rows of "
        f"plain KV; medians of {config.repeats} rounds, codecs in turn.",
        found,
        {
            "codec": lambda one: one.codec,
            "attention": lambda one: one.attention,
            "rows": lambda one: one.rows,
            "step ms": lambda one: 1e3 * statistics.median(one.step_s),
            "tokens/s": lambda one: statistics.median(one.tokens_per_s),
            "over full precision": lambda one: statistics.median(one.tokens_per_s) / plain,
        },
    )
