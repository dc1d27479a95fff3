"""Requests whose prompts share one of several prefixes."""

import numpy as np

from quire.bench.config import BenchServeConfig
from quire.bench.prompts import BenchRequest, PromptMaker
from quire.errors import ConfigError


def prefix_repetition_requests(
    config: BenchServeConfig, maker: PromptMaker, random: np.random.Generator
) -> list[BenchRequest]:
    """Equally many requests of each prefix, in random order.

    Raises:
        ConfigError: more prefixes than requests.
    """
    prefixes = config.prefix_repetition_num_prefixes
    if prefixes > config.num_prompts:
        raise ConfigError(
            f"expected --num-prompts of at least --prefix-repetition-num-prefixes {prefixes}, got "
            f"{config.num_prompts}"
        )
    output = config.prefix_repetition_output_len
    requests: list[BenchRequest] = []
    for number in range(prefixes):
        prefix = maker.random_ids(random, config.prefix_repetition_prefix_len)
        count = (config.num_prompts - number + prefixes - 1) // prefixes
        for _ in range(count):
            suffix = maker.random_ids(random, config.prefix_repetition_suffix_len)
            requests.append(BenchRequest(maker.prompt([*prefix, *suffix], random), output))
    return [requests[place] for place in random.permutation(len(requests))]
