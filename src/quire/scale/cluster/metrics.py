"""Metrics of a simulated cluster, as flat numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.scale.cluster.cluster import ClusterResult
from quire.sim.engine import SimResult
from quire.sim.metrics import Numbers, latencies, reusable
from quire.sim.records import NEVER_FITS, TOO_LONG, RequestRecord


def summarise_cluster(result: ClusterResult) -> Numbers:
    """All deterministic metrics of a cluster by flat name; undefined metrics are omitted."""
    records = records_of(result)
    finished = [record for record in records if record.finished]
    refused = Counter(record.refused for record in records)
    counts: Numbers = {
        "replicas": len(result.replicas),
        "requests": len(records),
        "finished": len(finished),
        "refused_too_long": refused[TOO_LONG],
        "refused_never_fits": refused[NEVER_FITS],
        "left_out": result.trace.num_dropped,
        "cut_answers": sum(record.cut_tokens > 0 for record in finished),
        "steps": sum(replica.num_steps for replica in result.replicas),
    }
    # largest value of a replica over the mean
    replicas = result.replicas
    return (
        counts
        | latencies(finished)
        | _throughput(result, finished)
        | _sharing(result, finished)
        | _memory(result, finished)
        | {
            "busy_imbalance": _over_mean(replica.busy_s for replica in replicas),
            "token_imbalance": _over_mean(replica.processed_tokens for replica in replicas),
            "request_imbalance": _over_mean(len(replica.records) for replica in replicas),
        }
    )


def records_of(result: ClusterResult) -> list[RequestRecord]:
    """Records of all requests by arrival time."""
    found = [record for replica in result.replicas for record in replica.records]
    return sorted(found, key=lambda record: (record.arrival_s, record.line))


def _throughput(result: ClusterResult, finished: Sequence[RequestRecord]) -> Numbers:
    per_s = 1 / result.end_s if result.end_s else 0.0
    busy_s = sum(replica.busy_s for replica in result.replicas)
    return {
        "virtual_s": result.end_s,
        "busy_share": busy_s * per_s / len(result.replicas),
        "requests_per_s": len(finished) * per_s,
        "prompt_tokens_per_s": sum(record.prompt_tokens for record in finished) * per_s,
        "generated_tokens_per_s": sum(record.answer_tokens for record in finished) * per_s,
    }


def _sharing(result: ClusterResult, finished: Sequence[RequestRecord]) -> Numbers:
    prompts = sum(record.prompt_tokens for record in finished)
    cached = sum(record.cached_tokens for record in finished)
    return {
        "cached_tokens": cached,
        "prefix_hit_fraction": cached / prompts if prompts else 0.0,
        "reusable_token_fraction": reusable(result.trace.requests).token_fraction,
    }


def _memory(result: ClusterResult, finished: Sequence[RequestRecord]) -> Numbers:
    replicas = result.replicas
    return {
        "preemptions": sum(record.preemptions for record in finished),
        "lost_tokens": sum(replica.tally.lost_tokens for replica in replicas),
        "processed_tokens": sum(replica.processed_tokens for replica in replicas),
        "kv_total_bytes": sum(replica.memory_bytes for replica in replicas),
        "waiting_peak": max(replica.gauges.peak_waiting for replica in replicas),
        "running_peak": max(replica.gauges.peak_running for replica in replicas),
    }


def _over_mean(values: Iterable[int | float]) -> float:
    found = list(values)
    total = sum(found)
    return max(found) * len(found) / total if total else 1.0


def by_replica(result: ClusterResult) -> list[Numbers]:
    """Requests, tokens and busy time of each replica."""
    return [_of_replica(replica) for replica in result.replicas]


def _of_replica(replica: SimResult) -> Numbers:
    finished = [record for record in replica.records if record.finished]
    prompts = sum(record.prompt_tokens for record in finished)
    cached = sum(record.cached_tokens for record in finished)
    return {
        "requests": len(replica.records),
        "prompt_tokens": prompts,
        "prefix_hit_fraction": cached / prompts if prompts else 0.0,
        "generated_tokens": sum(record.answer_tokens for record in finished),
        "busy_s": replica.busy_s,
        "preemptions": sum(record.preemptions for record in finished),
    }
