"""Requests of a recorded trace, with its arrival times, lengths and common prefixes."""

import numpy as np

from quire.bench.config import BenchServeConfig
from quire.bench.datasets.files import dataset_file
from quire.bench.prompts import BenchRequest, PromptMaker
from quire.sim.traces.base import Segment, TraceOptions
from quire.sim.traces.loading import load_trace


def timed_trace_requests(
    config: BenchServeConfig, maker: PromptMaker, random: np.random.Generator
) -> list[BenchRequest]:
    """Requests of a trace of Mooncake, Azure, Vidur or ShareGPT; the format is detected.

    Segments of equal content (`hash_ids`) have equal tokens, drawn with the seed and their content.

    Raises:
        TraceError: the file cannot be read.
    """
    options = TraceOptions(
        requests=config.num_prompts,
        time_scale=config.time_scale,
        length_scale=config.length_scale,
        max_tokens=config.max_length,
    )
    trace = load_trace(dataset_file(config), options)
    return [
        BenchRequest(
            maker.prompt(
                [
                    token
                    for segment in request.prompt
                    for token in _tokens(maker, segment, config.seed)
                ],
                random,
            ),
            max(1, request.answer.tokens),
            request.arrival_s,
        )
        for request in trace.requests
    ]


def _tokens(maker: PromptMaker, segment: Segment, seed: int) -> list[int]:
    content = [seed, int(segment.content < 0), abs(segment.content)]
    return maker.random_ids(np.random.default_rng(content), segment.tokens)
