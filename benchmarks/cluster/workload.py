"""Load of the simulated clusters: faster arrivals, fewer or more users, one big machine."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.cluster.config import ClusterBenchConfig
from quire.sim.machine import Rates
from quire.sim.run import SimConfig
from quire.sim.traces.base import Trace, TraceRequest
from quire.sim.traces.loading import with_copies


def at_load(trace: Trace, factor: float) -> Trace:
    """The trace with a multiple of its arrival rate."""
    requests = tuple(replace(r, arrival_s=r.arrival_s / factor) for r in trace.requests)
    return replace(trace, requests=requests)


def for_replicas(trace: Trace, replicas: int, recorded_for: int) -> Trace:
    """The load of as many users for each replica as in the recorded trace.

    More replicas get copies of the trace with other contents; fewer get a part of the
    conversations.

    Args:
        trace: the recorded trace.
        replicas: number of replicas.
        recorded_for: number of replicas that serve the recorded trace; the other number is a
            multiple or a divisor of it.
    """
    if replicas >= recorded_for:
        requests = with_copies(list(trace.requests), replicas // recorded_for)
    else:
        conversations = {_conversation(request) for request in trace.requests}
        every = recorded_for // replicas
        chosen = {each for i, each in enumerate(sorted(conversations)) if i % every == 0}
        requests = [r for r in trace.requests if _conversation(r) in chosen]
    return replace(trace, requests=_from_zero(requests))


def _conversation(request: TraceRequest) -> int:
    """Identity of a conversation: its first content after the one that all prompts share."""
    return request.prompt[min(1, len(request.prompt) - 1)].content


def _from_zero(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    first_s = requests[0].arrival_s
    return tuple(replace(request, arrival_s=request.arrival_s - first_s) for request in requests)


def one_machine(bench: ClusterBenchConfig) -> SimConfig:
    """One engine with the KV memory and the rates of all replicas together."""
    one, times = bench.engine(), bench.replicas
    rates = Rates(
        read_bytes_per_s=one.rates.read_bytes_per_s * times,
        flops_per_s=one.rates.flops_per_s * times,
        copy_bytes_per_s=one.rates.copy_bytes_per_s * times,
        overhead_s=one.rates.overhead_s,
    )
    schedule = replace(
        one.schedule,
        max_num_seqs=one.schedule.max_num_seqs * times,
        max_num_batched_tokens=one.schedule.max_num_batched_tokens * times,
        chunk_tokens=one.schedule.chunk_tokens * times,
    )
    kv = replace(one.kv, memory=bench.memory_bytes * times)
    return replace(one, rates=rates, schedule=schedule, kv=kv)
