"""The data sets by name."""

from collections.abc import Callable, Mapping

import numpy as np

from quire.bench.config import BenchServeConfig
from quire.bench.datasets.custom import custom_requests
from quire.bench.datasets.prefix_repetition import prefix_repetition_requests
from quire.bench.datasets.random_tokens import random_requests
from quire.bench.datasets.sharegpt import sharegpt_requests
from quire.bench.datasets.timed_trace import timed_trace_requests
from quire.bench.prompts import BenchRequest, PromptMaker

Dataset = Callable[[BenchServeConfig, PromptMaker, np.random.Generator], list[BenchRequest]]

DATASETS: Mapping[str, Dataset] = {
    "random": random_requests,
    "prefix_repetition": prefix_repetition_requests,
    "sharegpt": sharegpt_requests,
    "timed_trace": timed_trace_requests,
    "custom": custom_requests,
}


def make_requests(config: BenchServeConfig, maker: PromptMaker) -> list[BenchRequest]:
    """The requests of a benchmark; equal for the same options and tokenizer.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    random = np.random.default_rng(config.seed)
    return DATASETS[config.dataset_name](config, maker, random)
