"""Metrics of a run, with the names and definitions of `vllm bench serve`."""

from collections.abc import Sequence

import numpy as np

from quire.bench.config import METRICS, BenchServeConfig
from quire.bench.load import Run
from quire.bench.stream import Outcome

Numbers = dict[str, int | float]


def metrics(run: Run, config: BenchServeConfig) -> Numbers:
    """Counts, throughput, and the latencies of successful requests in milliseconds.

    TPOT is that of requests with two tokens or more; ITL is over all events of all requests.
    """
    done = [outcome for outcome in run.outcomes if outcome.succeeded]
    seconds = max(run.duration_s, 1e-9)
    inputs = sum(outcome.prompt_tokens for outcome in done)
    outputs = sum(outcome.output_tokens for outcome in done)
    found: Numbers = {
        "duration": run.duration_s,
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        **_peaks(run, done),
    }
    limits = config.slos()
    if limits:
        found["request_goodput"] = sum(_is_good(one, limits) for one in done) / seconds
    for name in METRICS:
        values = np.array([v for one in done for v in _values(one, name)], dtype=np.float64)
        found |= _spread(name, 1e3 * values, config.percentiles())
    return found


def _values(outcome: Outcome, metric: str) -> Sequence[float]:
    if metric == "itl":
        return outcome.itl_s
    value: float | None = getattr(outcome, f"{metric}_s")
    return [] if value is None else [value]


def _spread(name: str, values_ms: np.ndarray, percentiles: Sequence[float]) -> Numbers:
    if not len(values_ms):
        values_ms = np.zeros(1)
    found: Numbers = {
        f"mean_{name}_ms": float(np.mean(values_ms)),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(np.std(values_ms)),
    }
    for percent in percentiles:
        found[f"p{percent:g}_{name}_ms"] = float(np.percentile(values_ms, percent))
    return found


def _is_good(outcome: Outcome, limits_ms: dict[str, float]) -> bool:
    times_s = {name: _values(outcome, name) for name in limits_ms}
    return all(
        1e3 * value <= limits_ms[name] for name, values in times_s.items() for value in values
    )


def _peaks(run: Run, done: Sequence[Outcome]) -> Numbers:
    """Most output tokens in a second of the run, and most requests in flight."""
    seconds = int(run.duration_s) + 1
    tokens, flying = np.zeros(seconds + 1), np.zeros(seconds + 2)
    for one in done:
        if one.first_s is None:
            continue
        times_s = np.cumsum([one.first_s, *one.itl_s]) - run.start_s
        np.add.at(tokens, times_s.astype(int), one.output_tokens / len(times_s))
        flying[int(one.start_s - run.start_s)] += 1
        flying[int(one.end_s - run.start_s) + 1] -= 1
    return {
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(np.cumsum(flying).max()),
    }
