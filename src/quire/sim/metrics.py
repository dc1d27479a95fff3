"""Metrics of a simulation: latencies, throughput, memory, sharing, fairness, as flat numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.sim.engine import SimResult, jain_index
from quire.sim.records import NEVER_FITS, TOO_LONG, RequestRecord
from quire.sim.traces.base import TraceRequest

PERCENTILES = (50, 90, 95, 99)
_SECONDS_PER_MINUTE, _SECONDS_PER_HOUR = 60, 3600
Numbers = dict[str, int | float]


def summarise(result: SimResult) -> Numbers:
    """All metrics of a run by flat name; undefined metrics are omitted."""
    finished = [record for record in result.records if record.finished]
    tally = result.tally
    return (
        _counts(result, finished)
        | latencies(finished)
        | _throughput(result, finished)
        | _deadlines(result)
        | _preemptions(result, finished)
        | {
            "swaps_out": tally.num_swaps_out,
            "swaps_in": tally.num_swaps_in,
            "swapped_bytes": tally.swapped_bytes,
            "copied_bytes": tally.copied_bytes,
        }
        | _memory(result)
        | _sharing(result, finished)
        | _fairness(result)
    )


def latencies(finished: Sequence[RequestRecord]) -> Numbers:
    """Percentiles of queue time, time to first token, time per token, and the whole, in seconds."""
    return (
        percentiles("queue", (record.queue_s for record in finished))
        | percentiles("ttft", (record.ttft_s for record in finished))
        | percentiles("tpot", (record.tpot_s for record in finished))
        | percentiles("e2e", (record.e2e_s for record in finished))
    )


def percentiles(name: str, values: Iterable[float]) -> Numbers:
    """`NAME_p50_s` and so on, interpolated linearly; NaN values do not count."""
    found = np.fromiter(values, dtype=np.float64)
    found = found[~np.isnan(found)]
    if not len(found):
        return {}
    cuts = np.percentile(found, PERCENTILES)
    return {f"{name}_p{q}_s": float(cut) for q, cut in zip(PERCENTILES, cuts, strict=True)}


def cost_of_tokens(summary: Numbers, price_per_hour: float, machines: int) -> Numbers:
    """Cost of a million tokens; empty if no request finished."""
    outputs, prompts = summary["generated_tokens_per_s"], summary["prompt_tokens_per_s"]
    if not outputs:
        return {}
    million_s = 1e6 / _SECONDS_PER_HOUR * price_per_hour * machines
    return {
        "cost_per_million_output_tokens": million_s / outputs,
        "cost_per_million_tokens": million_s / (outputs + prompts),
    }


def by_tenant(result: SimResult) -> dict[str, Numbers]:
    """Requests, latencies and tokens of each tenant."""
    found = {}
    for tenant in result.trace.tenants:
        records = [record for record in result.records if record.tenant == tenant]
        finished = [record for record in records if record.finished]
        found[tenant] = {
            "requests": len(records),
            "finished": len(finished),
            "preemptions": sum(record.preemptions for record in finished),
            "generated_tokens": sum(record.answer_tokens for record in finished),
            "served_while_all_wait_tokens": result.served.tokens[tenant],
        } | latencies(finished)
    return found


def _counts(result: SimResult, finished: Sequence[RequestRecord]) -> Numbers:
    refused = Counter(record.refused for record in result.records)
    return {
        "requests": len(result.records),
        "finished": len(finished),
        "refused_too_long": refused[TOO_LONG],
        "refused_never_fits": refused[NEVER_FITS],
        "left_out": result.trace.num_dropped,
        "cut_answers": sum(record.cut_tokens > 0 for record in finished),
        "steps": result.num_steps,
    }


def _throughput(result: SimResult, finished: Sequence[RequestRecord]) -> Numbers:
    seconds = result.gauges.time_s
    prompts = sum(record.prompt_tokens for record in finished)
    answers = sum(record.answer_tokens for record in finished)
    per_s = 1 / seconds if seconds else 0.0
    return {
        "virtual_s": seconds,
        "busy_share": result.busy_s * per_s,
        "requests_per_s": len(finished) * per_s,
        "prompt_tokens_per_s": prompts * per_s,
        "generated_tokens_per_s": answers * per_s,
    }


def _preemptions(result: SimResult, finished: Sequence[RequestRecord]) -> Numbers:
    """Preemptions and recomputed tokens; last output tokens and cached tokens need no steps."""
    needed = sum(r.prompt_tokens - r.cached_tokens + r.answer_tokens - 1 for r in finished)
    preemptions = sum(record.preemptions for record in finished)
    minutes = result.gauges.time_s / _SECONDS_PER_MINUTE
    again = result.processed_tokens - needed
    return {
        "preemptions": preemptions,
        "preemptions_per_minute": preemptions / minutes if minutes else 0.0,
        "lost_tokens": result.tally.lost_tokens,
        "recomputed_tokens": again,
        "recomputed_fraction": again / result.processed_tokens if result.processed_tokens else 0.0,
    }


def _deadlines(result: SimResult) -> Numbers:
    wanted = [record for record in result.records if record.deadline_s is not None]
    if not wanted:
        return {}
    return {"deadlines_met_fraction": sum(record.in_time for record in wanted) / len(wanted)}


def _memory(result: SimResult) -> Numbers:
    gauges = result.gauges
    return {
        "kv_total_bytes": result.memory_bytes,
        "kv_peak_bytes": gauges.peak_used_bytes,
        "kv_mean_bytes": gauges.mean("used_byte"),
        "kv_peak_share": gauges.peak_used_bytes / result.memory_bytes,
        "kv_mean_share": gauges.mean("used_byte") / result.memory_bytes,
        "waste_fraction": gauges.waste_fraction,
        "running_mean": gauges.mean("running"),
        "running_peak": gauges.peak_running,
        "waiting_mean": gauges.mean("waiting"),
        "waiting_peak": gauges.peak_waiting,
    }


def _sharing(result: SimResult, finished: Sequence[RequestRecord]) -> Numbers:
    """Cache hits, and the hits of an unlimited cache."""
    prompts = sum(record.prompt_tokens for record in finished)
    cached = sum(record.cached_tokens for record in finished)
    reuse = reusable(result.trace.requests)
    return {
        "cached_tokens": cached,
        "prefix_hit_fraction": cached / prompts if prompts else 0.0,
        "reusable_block_fraction": reuse.block_fraction,
        "reusable_token_fraction": reuse.token_fraction,
    }


def _fairness(result: SimResult) -> Numbers:
    if len(result.served.tokens) < 2:
        return {}
    found: Numbers = {"served_while_all_wait_tokens": sum(result.served.tokens.values())}
    index = jain_index(result.served.by_weight)
    return found if index is None else found | {"jain_index": index}


# The part of a trace's prompts that an unlimited prefix cache could serve.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Repeated content over all prompts of a trace.

    Attributes:
        block_fraction: prompt segments (for Mooncake one block of 512 tokens per hash id) that
            occur in an earlier prompt, over all segments: Mooncake's definition.
        token_fraction: tokens of the segments before the first new segment of each prompt, over
            all prompt tokens: the tokens that a prefix cache can save.
    """

    block_fraction: float
    token_fraction: float


def reusable(requests: Iterable[TraceRequest]) -> Reuse:
    """Count the content that requests share with earlier requests.

    Source: Mooncake section 4.2, cache hits with a pool of any size.
    """
    seen: set[int] = set()
    blocks = repeated_blocks = tokens = repeated_tokens = 0
    for request in requests:
        contents = [segment.content for segment in request.prompt]
        known = [content in seen for content in contents]
        blocks += len(known)
        repeated_blocks += sum(known)
        prefix = known.index(False) if False in known else len(known)
        tokens += request.prompt_tokens
        repeated_tokens += sum(segment.tokens for segment in request.prompt[:prefix])
        seen.update(contents)
        seen.add(request.answer.content)
    return Reuse(block_fraction=repeated_blocks / blocks, token_fraction=repeated_tokens / tokens)
