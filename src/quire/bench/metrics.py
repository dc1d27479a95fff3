"""Metrics of a run, with the names and definitions of `vllm bench serve`."""

from collections.abc import Sequence

import numpy as np

from quire.bench.config import METRICS, BenchServeConfig
from quire.bench.load import Run
from quire.bench.stream import Outcome

Numbers = dict[str, int | float]
_WINDOW_S = 1.0


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
    """Highest output throughput over a second or over the run, and most requests in flight."""
    return {
        "max_output_tokens_per_s": _peak_throughput(run, done),
        "max_concurrent_requests": _peak_concurrency(done),
    }


def _peak_throughput(run: Run, done: Sequence[Outcome]) -> float:
    """Most output tokens of any second; the tokens of a request are divided among its events."""
    begun = [one for one in done if one.first_s is not None]
    if not begun:
        return 0.0
    arrivals_s = np.concatenate([np.cumsum([one.first_s, *one.itl_s]) for one in begun])
    events = [1 + len(one.itl_s) for one in begun]
    shares = np.repeat([one.output_tokens for one in begun] / np.array(events), events)
    order = np.argsort(arrivals_s, kind="stable")
    times_s, tokens = arrivals_s[order], np.concatenate(([0.0], np.cumsum(shares[order])))
    whole_s = max(run.duration_s, 1e-9)
    window_s = min(_WINDOW_S, whole_s)
    starts = np.searchsorted(times_s, times_s - window_s, side="right")
    in_window = tokens[1:] - tokens[starts]
    return float(max(in_window.max() / window_s, tokens[-1] / whole_s))


def _peak_concurrency(done: Sequence[Outcome]) -> int:
    """Most requests in flight; a request that ends when another one starts does not count."""
    changes = sorted([(one.start_s, 1) for one in done] + [(one.end_s, -1) for one in done])
    flying = np.cumsum([change for _, change in changes] or [0])
    return int(flying.max())
