"""Sends the requests of a benchmark at their arrival times."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.bench.arrivals import arrival_times
from quire.bench.config import BenchServeConfig
from quire.bench.prompts import BenchRequest
from quire.bench.stream import Outcome
from quire.bench.target import Target
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run.

    Attributes:
        outcomes: outcome of each request, in the order of the requests.
        duration_s: time from the first request to the end of the last response.
        start_s: start of the run.
    """

    outcomes: tuple[Outcome, ...]
    duration_s: float
    start_s: float


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    config: BenchServeConfig,
    model: str,
    on_end: Callable[[int], None] = lambda _: None,
) -> Run:
    """Send the warm-up requests, then all requests.

    Args:
        target: the server.
        requests: the measured requests; the first one is also the one of the warm-up.
        config: rate, concurrency and number of warm-up requests.
        model: model of the requests.
        on_end: is called with the number of ended requests.

    Raises:
        ConfigError: a warm-up request failed.
    """
    limit = asyncio.Semaphore(config.max_concurrency) if config.max_concurrency else None
    await _warm_up(target, requests[0], config, model)
    loop, ended = asyncio.get_running_loop(), 0
    times_s, began_s = arrival_times(requests, config), loop.time()

    async def one(request: BenchRequest, arrival_s: float) -> Outcome:
        nonlocal ended
        await asyncio.sleep(max(0.0, began_s + arrival_s - loop.time()))
        async with limit or contextlib.nullcontext():
            outcome = await target.send(request, model)
        ended += 1
        on_end(ended)
        return outcome

    outcomes = await asyncio.gather(*map(one, requests, times_s))
    start_s = min(outcome.start_s for outcome in outcomes)
    duration_s = max(outcome.end_s for outcome in outcomes) - start_s
    return Run(outcomes=tuple(outcomes), duration_s=duration_s, start_s=start_s)


async def _warm_up(
    target: Target, request: BenchRequest, config: BenchServeConfig, model: str
) -> None:
    most = config.max_concurrency or config.num_warmups
    for first in range(0, config.num_warmups, most or 1):
        count = min(most, config.num_warmups - first)
        outcomes = await asyncio.gather(*(target.send(request, model) for _ in range(count)))
        failed = next((outcome for outcome in outcomes if not outcome.succeeded), None)
        if failed is not None:
            raise ConfigError(f"a warm-up request failed: {failed.error}")
