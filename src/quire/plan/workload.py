"""Whether KV memory management pays for a workload, from computed figures.

Three figures decide, in this order:

* *decode share*: fraction of a request's device time spent in decode. If it is small (long prompts,
  a few output tokens), KV is short-lived and prefill dominates the cost.
* *KV share*: KV of the wanted batch over the KV memory. A contiguous cache at maximum length wastes
  68 % on average over real traces, so it needs 1 / 0.32 = 3.1 times the used memory. The thresholds
  are where that reaches a sixth of the KV memory, half of it, and one and a half times all of it.
* *sequences that fit*: KV memory limits throughput if the KV share is above moderate and fewer
  requests fit than half of what the compute could serve at once.

Source: the table "When KV Cache Optimization Matters Most" of "KV Cache: The Hidden Memory Giant in
LLM Serving"; the results for its six scenarios are the printed ones. Differs from it: the article
gives ranges of lengths and batches for any model and memory; here both count.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import ConfigError
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout
from quire.layout.sizes import format_size
from quire.plan.capacity import MemoryLayout, bytes_per_value, sequence_bytes
from quire.plan.roofline import decode_step

Impact = Literal["low", "low-medium", "high", "very high", "critical"]

DEFAULT_FLOPS_PER_BYTE = 150.0
"""Machine balance: an A100 does 312e12 FLOP/s in 16 bits and reads 2.0e12 B/s. CPUs: 10 to 30."""

_USED_OF_CONTIGUOUS = 0.32  # the article's weighted average over four workloads: 68 % is wasted
_NEGLIGIBLE = _USED_OF_CONTIGUOUS / 6
_MODERATE = _USED_OF_CONTIGUOUS / 2
_HEAVY = _USED_OF_CONTIGUOUS * 1.5
_PREFILL_DOMINATED = 0.1  # decode share below which a faster or larger decode batch hardly matters


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of equal lengths.

    Attributes:
        input_tokens: length of a prompt.
        output_tokens: length of an output.
        batch: number of requests wanted at once.

    Raises:
        ConfigError: a count below 1.
    """

    input_tokens: int
    output_tokens: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.input_tokens, self.output_tokens, self.batch) < 1:
            raise ConfigError(
                f"workload {self.input_tokens},{self.output_tokens},{self.batch}: input tokens,"
                " output tokens and batch are all 1 or more"
            )

    @property
    def tokens(self) -> int:
        """Length of a finished request."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How much KV management matters for a workload, and why.

    Attributes:
        impact: from "low" (simple allocation suffices) to "critical" (the workload needs it).
        kv_bytes: KV of the whole batch at its longest, in whole pages.
        kv_share: that over the KV memory; above 1 it does not fit.
        sequences: number of requests of this length that fit at once.
        decode_share: fraction (0 to 1) of a request's device time spent in decode.
        reasons: sentences with the decisive figures.
    """

    impact: Impact
    kv_bytes: int
    kv_share: float
    sequences: int
    decode_share: float
    reasons: tuple[str, ...]

    @property
    def pays(self) -> bool:
        """Whether more than a simple allocator pays."""
        return self.impact not in ("low", "low-medium")


def assess(
    model: ModelSpec,
    memory: MemoryLayout,
    input_tokens: int,
    output_tokens: int,
    batch: int,
    *,
    layout: CacheLayout | None = None,
    flops_per_byte: int | float = DEFAULT_FLOPS_PER_BYTE,
) -> Verdict:
    """Assess how much KV management matters.

    Args:
        model: its dimensions.
        memory: division of the device's memory.
        input_tokens: length of a prompt.
        output_tokens: length of an output.
        batch: number of requests wanted at once.
        layout: layout of KV pages; default: 16-bit elements in pages of 16 tokens.
        flops_per_byte: floating-point operations of the device in the time it reads one byte.

    Raises:
        ConfigError: a count below 1, or a KV memory of 0.
    """
    workload = Workload(input_tokens=input_tokens, output_tokens=output_tokens, batch=batch)
    if memory.kv_bytes < 1 or flops_per_byte <= 0:
        raise ConfigError(
            f"kv_memory={memory.kv_bytes} B, flops_per_byte={flops_per_byte}: expected both above 0"
        )
    layout = layout or layout_for(model, page_tokens=16, codec="float16")
    each_bytes = sequence_bytes(layout, workload.tokens)
    weight_bytes_per_value = memory.weights_bytes / model.num_parameters
    sequences = memory.kv_bytes // each_bytes
    kv_share = batch * each_bytes / memory.kv_bytes
    share = decode_share(
        model,
        workload,
        weight_bytes_per_value=weight_bytes_per_value,
        kv_bytes_per_value=bytes_per_value(model, layout),
        flops_per_byte=flops_per_byte,
    )
    # two operations per weight and token: from this batch on the step is compute-bound
    full_batch = flops_per_byte * weight_bytes_per_value / 2
    impact, reason = _judge(kv_share, sequences, share, full_batch)
    verdict = Verdict(
        impact=impact,
        kv_bytes=batch * each_bytes,
        kv_share=kv_share,
        sequences=sequences,
        decode_share=share,
        reasons=(reason,),
    )
    return replace(verdict, reasons=(reason, *_figures(verdict, workload, model.max_positions)))


def _figures(verdict: Verdict, workload: Workload, max_positions: int) -> Iterator[str]:
    """Sentences with the figures of a verdict."""
    yield (
        f"KV of {workload.batch} requests of {workload.tokens:,} tokens:"
        f" {format_size(verdict.kv_bytes)}, {verdict.kv_share:.1%} of the KV memory;"
        f" {verdict.sequences:,} of them fit"
    )
    yield f"decode is {verdict.decode_share:.0%} of a request's time"
    if workload.tokens > max_positions:
        yield (
            f"{workload.tokens:,} tokens exceed the model's context of {max_positions:,}: such"
            " requests are refused"
        )


def decode_share(
    model: ModelSpec,
    workload: Workload,
    *,
    weight_bytes_per_value: int | float,
    kv_bytes_per_value: int | float,
    flops_per_byte: int | float,
) -> float:
    """Fraction (0 to 1) of one request's device time spent in decode.

    Times are in byte reads. Prefill: 2 * active weights operations per token. Decode step: the
    larger of its reads and its operations, shared by the batch, at half of the output.
    """
    operations = 2 * model.num_active_parameters
    prefill = workload.input_tokens * operations / flops_per_byte
    step = decode_step(
        model,
        batch=workload.batch,
        tokens=workload.input_tokens + workload.output_tokens // 2,
        weight_bytes_per_value=weight_bytes_per_value,
        kv_bytes_per_value=kv_bytes_per_value,
    )
    compute = workload.batch * operations / flops_per_byte
    decode = workload.output_tokens * max(step.read_bytes, compute) / workload.batch
    return decode / (prefill + decode)


def _judge(kv_share: float, sequences: int, share: float, full_batch: float) -> tuple[Impact, str]:
    if sequences < 1:
        return "critical", "no request fits: KV must be evicted, quantized or offloaded"
    if share < _PREFILL_DOMINATED:
        return "low", "prefill dominates: KV is short-lived; make prefill faster instead"
    if kv_share < _NEGLIGIBLE:
        return (
            "low",
            "KV is a small fraction of its memory: a simple contiguous allocation suffices",
        )
    if kv_share < _MODERATE:
        return "low-medium", "a contiguous allocation at maximum length still fits twice"
    if kv_share >= 1:
        return (
            "critical",
            "the batch does not fit: evict, quantize or offload KV, or queue requests",
        )
    if 2 * sequences < full_batch:
        return "critical", (
            f"memory holds {sequences:,} requests, the compute could serve"
            f" {full_batch:.0f}: saved KV memory increases throughput"
        )
    if kv_share >= _HEAVY:
        return "very high", "a contiguous allocation would need more than all KV memory"
    return "high", "a contiguous allocation would take more than half of the KV memory"
