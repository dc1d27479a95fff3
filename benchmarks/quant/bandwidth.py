"""Part `bandwidth`: bytes read by a decode step and its time, from small batches to large ones.

The article's table, measured: weights are read once per step and KV once per sequence. The larger
the batch, the larger the fraction of bytes that a codec shrinks. The prediction is the time to read
the bytes.

A step is one forward of the model with all its attention, with random data in every page. It
includes no scheduler and no sampler.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.common.workload import SHAPES
from benchmarks.quality.texts import PLAIN
from benchmarks.quant.config import BandwidthConfig
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.engine.pool import KVPool, build_pool
from quire.engine.step_bridge import StepBridge
from quire.kv.step import StepAttention
from quire.models.linear_weights import multiplies
from quire.models.loader import LoadedModel
from quire.plan.roofline import weights_read_bytes
from quire.profile.ceilings import MemoryProbe, fill_pages, seconds
from quire.scheduler.schedule_config import ScheduleConfig

_SPARE_BYTES = 64 << 20  # unused bytes of slabs


class DecodeSteps:
    """Sequences in their own KV memory; a call runs a step that adds a token to each.

    Args:
        model: model with random weights.
        codec: KV codec.
        batch: number of sequences.
        tokens: tokens of each sequence before the first step.
        steps: most steps.
    """

    def __init__(self, model: LoadedModel, codec: str, batch: int, tokens: int, steps: int) -> None:
        self._model, self.batch = model, batch
        longest = tokens + steps + 16  # the last page may be partly filled
        plain_bytes = model.spec.kv_bytes(longest, model.decoder.dtype.itemsize) * batch
        kv = KVConfig(
            memory=plain_bytes + _SPARE_BYTES,
            codec=codec,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )
        self._pool: KVPool = build_pool(model, kv, ScheduleConfig(max_num_seqs=batch))
        memory = self._pool.kv.memory
        self._rows = np.array([memory.start() for _ in range(batch)], dtype=np.int64)
        memory.grow(self._rows, np.full(batch, tokens, dtype=np.int32))
        generator = torch.Generator(model.decoder.device)
        generator.manual_seed(0)
        for page_class in memory.layout.page_classes:
            views = self._pool.kv.store.views(page_class)
            fill_pages(views, page_class.head_dim, generator)
        self._ones = np.ones(batch, dtype=np.int32)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages that a step reads."""
        return self._pool.kv.memory.used_bytes

    def __call__(self) -> None:
        """Run one step."""
        memory = self._pool.kv.memory
        memory.grow(self._rows, self._ones)
        device = self._model.decoder.device
        positions = torch.from_numpy(memory.lengths[self._rows] - 1).to(device)
        bridge = StepBridge(StepAttention(self._pool.kv, self._rows, self._ones))
        samples = torch.arange(self.batch, device=device)
        with torch.inference_mode():
            self._model.decoder.forward(samples, positions, samples, bridge)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Measurements of one batch with one codec.

    Attributes:
        codec: name of the codec.
        batch: number of sequences.
        weight_bytes: weight bytes, read once per step.
        kv_bytes: bytes of the pages of all sequences.
        read_s: time to read these bytes at the machine's bandwidth.
        step_s: measured step time of each round.
    """

    codec: str
    batch: int
    weight_bytes: int
    kv_bytes: int
    read_s: float
    step_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second at the median step time."""
        return self.batch / statistics.median(self.step_s)


def run_bandwidth(config: BandwidthConfig) -> PartResult:
    """Run the part."""
    found = measure_steps(config)
    return PartResult(
        claims=claims(found),
        tables=(_table(config, found),),
        charts=(_chart(found),),
        raw={"steps": [asdict(one) for one in found]},
    )


def measure_steps(config: BandwidthConfig) -> list[StepTime]:
    """Measure all codecs of a batch in turn, for each batch."""
    model = random_model(SHAPES[config.model](), dtype=torch.bfloat16)
    memory = MemoryProbe(config.buffer_bytes)
    bytes_per_s = statistics.median(memory.read_rate() for _ in range(5))
    value_bytes = 2 if multiplies(torch.bfloat16) else 4
    found = []
    for batch in config.batches:
        steps = {
            codec: DecodeSteps(model, codec, batch, config.tokens, config.repeats + 1)
            for codec in (PLAIN, *config.codecs)
        }
        times_s: dict[str, list[float]] = {codec: [] for codec in steps}
        for i in range(config.repeats + 1):
            for codec, step in steps.items():
                step_s = seconds(step)
                times_s[codec] += [step_s] if i else []
        weight_bytes = weights_read_bytes(model.spec, batch, value_bytes)
        found += [
            StepTime(
                codec=codec,
                batch=batch,
                weight_bytes=weight_bytes,
                kv_bytes=step.kv_bytes,
                read_s=(weight_bytes + step.kv_bytes) / bytes_per_s,
                step_s=tuple(times_s[codec]),
            )
            for codec, step in steps.items()
        ]
    return found


def claims(found: Sequence[StepTime]) -> Numbers:
    """Gains over plain KV at the largest batch, in tokens per second at equal lengths.

    CODEC_gain_same_batch: median of the ratios within rounds.
    CODEC_predicted_gain: prediction by the bytes alone.
    """
    plain, *coded = (one for one in found if one.batch == found[-1].batch)
    made: Numbers = {"bandwidth_batch": plain.batch}
    for one in coded:
        name = one.codec.replace("/", "_")
        pairs = zip(plain.step_s, one.step_s, strict=True)
        made[f"{name}_gain_same_batch"] = statistics.median(a / b for a, b in pairs)
        made[f"{name}_predicted_gain"] = plain.read_s / one.read_s
    return made


def _table(config: BandwidthConfig, found: Sequence[StepTime]) -> Table:
    return table_of(
        "quant-bandwidth",
        f"A decode step of a random-weight Llama ({config.model}), sequences of "
        f"{config.tokens:,} tokens; medians of {config.repeats} rounds, codecs in turn. By "
        "bytes: weights and KV at the memory bandwidth.",
        found,
        {
            "batch": lambda one: one.batch,
            "codec": lambda one: one.codec,
            "weights MB": lambda one: one.weight_bytes / 1e6,
            "KV MB": lambda one: one.kv_bytes / 1e6,
            "KV fraction": lambda one: one.kv_bytes / (one.kv_bytes + one.weight_bytes),
            "by bytes ms": lambda one: 1e3 * one.read_s,
            "measured ms": lambda one: 1e3 * statistics.median(one.step_s),
            "tokens/s": lambda one: one.tokens_per_s,
        },
    )


def _chart(found: Sequence[StepTime]) -> Chart:
    lines: dict[str, tuple[tuple[float, float], ...]] = {}
    for codec in dict.fromkeys(one.codec for one in found):
        steps = [one for one in found if one.codec == codec]
        lines[codec] = tuple((float(one.batch), one.tokens_per_s) for one in steps)
        lines[f"{codec}, predicted"] = tuple((float(o.batch), o.batch / o.read_s) for o in steps)
    return Chart(
        name="quant-bandwidth",
        title="Decoding by batch",
        x_label="sequences",
        y_label="tokens/s",
        lines=lines,
        log_x=True,
        log_y=True,
    )
