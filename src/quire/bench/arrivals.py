"""Times at which the requests of a benchmark are sent."""

import math
from collections.abc import Sequence

import numpy as np

from quire.bench.config import BenchServeConfig
from quire.bench.prompts import BenchRequest


def arrival_times(requests: Sequence[BenchRequest], config: BenchServeConfig) -> list[float]:
    """Seconds after the start at which each request is sent, in order.

    A finite rate replaces the times of a trace. Times between arrivals have a gamma distribution
    of shape `burstiness` and mean 1 / rate. As in `vllm bench serve`, they are scaled so that the
    last request arrives after exactly the expected time.
    """
    rates = _rates(len(requests), config)
    if rates is None:
        return [request.arrival_s or 0.0 for request in requests]
    random = np.random.default_rng([config.seed, 1])
    gaps_s = random.gamma(config.burstiness, 1 / (rates * config.burstiness))
    times_s = np.cumsum(gaps_s)
    total_s = float(np.sum(1 / rates))
    scaled: list[float] = (times_s * (total_s / times_s[-1])).tolist()
    return scaled


def _rates(count: int, config: BenchServeConfig) -> "np.ndarray | None":
    """Request rate before each request; None: no rate is set."""
    part = np.arange(count) / max(1, count - 1)
    start, end = config.ramp_up_start_rps, config.ramp_up_end_rps
    if start is not None and end is not None:
        if config.ramp_up_strategy == "linear":
            return start + (end - start) * part
        return np.asarray(start * (end / start) ** part)
    return np.full(count, config.request_rate) if math.isfinite(config.request_rate) else None
