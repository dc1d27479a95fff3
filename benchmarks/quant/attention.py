"""Part `attention`: decode attention over quantized KV, compared with bfloat16, without a model.

Every round first reads a buffer far larger than the caches, then runs attention once per codec, so
that a ratio compares measurements close in time. Pages are scattered at random; all are read.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.common.attention import PLAIN, AttentionBench
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.quant.config import QuantAttentionConfig
from quire.profile.ceilings import MemoryProbe, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """Measurements at one sequence length.

    Attributes:
        tokens: tokens of each sequence.
        read_bytes_per_s: memory bandwidth of each round.
        kv_bytes: KV bytes that a step reads, by codec.
        step_s: step times by codec and round.
    """

    tokens: int
    read_bytes_per_s: tuple[float, ...]
    kv_bytes: Mapping[str, int]
    step_s: Mapping[str, tuple[float, ...]]

    def speedup(self, codec: str) -> float:
        """Speed over bfloat16: median of the ratios within rounds."""
        pairs = zip(self.step_s[PLAIN], self.step_s[codec], strict=True)
        return statistics.median(plain / coded for plain, coded in pairs)

    def bytes_per_s(self, codec: str) -> float:
        """Bytes of pages read per second, median."""
        return self.kv_bytes[codec] / statistics.median(self.step_s[codec])

    def over_ceiling(self, codec: str) -> float:
        """Read rate over the memory bandwidth: median of the ratios within rounds."""
        rounds = zip(self.step_s[codec], self.read_bytes_per_s, strict=True)
        return statistics.median(self.kv_bytes[codec] / step_s / read for step_s, read in rounds)


def run_attention(config: QuantAttentionConfig) -> PartResult:
    """Run the part.

    Raises:
        ConfigError: the C extension cannot run on this machine.
    """
    found = [measure_length(config, tokens) for tokens in config.lengths]
    return PartResult(
        claims=claims(config, found),
        tables=tuple(_table(config, one) for one in found),
        charts=(_chart(found),),
        raw={"lengths": [asdict(one) for one in found]},
    )


def measure_length(config: QuantAttentionConfig, tokens: int) -> AttentionTimes:
    """Measure all codecs in turn at one length."""
    shape = replace(config.shape, tokens=tokens)
    benches = {codec: AttentionBench(shape, codec) for codec in (PLAIN, *config.codecs)}
    calls = {codec: bench.paged("native") for codec, bench in benches.items()}
    memory = MemoryProbe(config.buffer_bytes)
    read: list[float] = []
    step_s: dict[str, list[float]] = {codec: [] for codec in calls}
    for i in range(config.repeats + 1):
        rate = memory.read_rate()
        read += [rate] if i else []
        for codec, call in calls.items():
            elapsed_s = seconds(call)
            step_s[codec] += [elapsed_s] if i else []
    return AttentionTimes(
        tokens=tokens,
        read_bytes_per_s=tuple(read),
        kv_bytes={codec: bench.kv_bytes for codec, bench in benches.items()},
        step_s={codec: tuple(times) for codec, times in step_s.items()},
    )


def claims(config: QuantAttentionConfig, found: Sequence[AttentionTimes]) -> Numbers:
    """Speedups over bfloat16 and read rates over the memory bandwidth, at the claimed length."""
    [claimed] = (one for one in found if one.tokens == config.shape.tokens)
    made: Numbers = {"bfloat16_over_read_ceiling": claimed.over_ceiling(PLAIN)}
    for codec in config.codecs:
        name = codec.replace("/", "_")
        made[f"{name}_attention_speedup"] = claimed.speedup(codec)
        made[f"{name}_over_read_ceiling"] = claimed.over_ceiling(codec)
    return made


def _table(config: QuantAttentionConfig, one: AttentionTimes) -> Table:
    shape = config.shape
    return table_of(
        f"quant-attention-{one.tokens}",
        f"Attention of one step: {shape.batch} sequences x {one.tokens:,} tokens, "
        f"{shape.num_heads} heads over {shape.num_kv_heads} KV heads of {shape.head_dim}, "
        f"pages of {shape.page_tokens} scattered at random, the C extension. Medians of "
        f"{config.repeats} rounds, codecs in turn; memory bandwidth "
        f"{statistics.median(one.read_bytes_per_s) / 1e9:.1f} GB/s.",
        one.step_s,
        {
            "codec": lambda codec: codec,
            "MB": lambda codec: one.kv_bytes[codec] / 1e6,
            "times fewer bytes": lambda codec: one.kv_bytes[PLAIN] / one.kv_bytes[codec],
            "ms": lambda codec: 1e3 * statistics.median(one.step_s[codec]),
            "speed-up": one.speedup,
            "GB/s": lambda codec: one.bytes_per_s(codec) / 1e9,
            "of the read rate": one.over_ceiling,
        },
    )


def _chart(found: Sequence[AttentionTimes]) -> Chart:
    return Chart(
        name="quant-attention",
        title="Attention time of one step",
        x_label="tokens per sequence",
        y_label="ms",
        lines={
            codec: tuple((one.tokens, 1e3 * statistics.median(one.step_s[codec])) for one in found)
            for codec in found[0].step_s
        },
        log_x=True,
        log_y=True,
    )
