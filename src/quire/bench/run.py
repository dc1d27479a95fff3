"""Runs a benchmark from its options to its result."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.bench.config import BenchServeConfig
from quire.bench.datasets.registry import make_requests
from quire.bench.load import Run, run_load
from quire.bench.metrics import Numbers, metrics
from quire.bench.prompts import PromptMaker, open_tokenizer
from quire.bench.result import result_of
from quire.bench.target import Target
from quire.layout.open_files import raise_file_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A measured server.

    Attributes:
        numbers: the metrics.
        result: the whole result, as JSON values.
        run: outcomes of the requests.
    """

    numbers: Numbers
    result: dict[str, Any]
    run: Run


def bench_server(
    config: BenchServeConfig,
    api_key: str | None = None,
    on_end: Callable[[int], None] = lambda _: None,
) -> BenchResult:
    """Measure a server.

    Args:
        config: options of the benchmark.
        api_key: key of the server; None: no key is sent.
        on_end: is called with the number of ended requests.

    Raises:
        ConfigError: the server cannot be reached, or the data set cannot be read.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_bench(config, api_key, on_end))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Event loop of uvloop if it is installed: the client often runs on the cores of the server."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _bench(
    config: BenchServeConfig, api_key: str | None, on_end: Callable[[int], None]
) -> BenchResult:
    target = Target(config, api_key)
    try:
        card = (await target.models())[0]
        model = config.model or str(card["id"])
        tokenizer = None if config.vocab_size else config.tokenizer or _root(card, config)
        opened = None if tokenizer is None else open_tokenizer(tokenizer)
        requests = make_requests(config, PromptMaker(opened, config.vocab_size))
        run = await run_load(target, requests, config, model, on_end)
    finally:
        target.close()
    numbers = metrics(run, config)
    result = result_of(config, run, numbers, model=model, tokenizer=tokenizer)
    return BenchResult(numbers=numbers, result=result, run=run)


def _root(card: dict[str, Any], config: BenchServeConfig) -> str:
    """Name of the tokenizer if none is given: that of the model's files, else of the model."""
    return config.model or str(card.get("root") or card["id"])
