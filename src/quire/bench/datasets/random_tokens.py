"""Requests of random tokens."""

import numpy as np

from quire.bench.config import BenchServeConfig
from quire.bench.prompts import BenchRequest, PromptMaker


def random_requests(
    config: BenchServeConfig, maker: PromptMaker, random: np.random.Generator
) -> list[BenchRequest]:
    """Prompts of random tokens after a common prefix; lengths vary by `random_range_ratio`."""
    prefix = maker.random_ids(random, config.random_prefix_len)
    inputs = _lengths(random, config.random_input_len, config)
    outputs = _lengths(random, config.random_output_len, config)
    return [
        BenchRequest(maker.prompt([*prefix, *maker.random_ids(random, tokens)], random), output)
        for tokens, output in zip(inputs, outputs, strict=True)
    ]


def _lengths(random: np.random.Generator, length: int, config: BenchServeConfig) -> list[int]:
    low = max(1, int(length * (1 - config.random_range_ratio)))
    high = max(low, int(length * (1 + config.random_range_ratio)))
    drawn: list[int] = random.integers(low, high + 1, size=config.num_prompts).tolist()
    return drawn
