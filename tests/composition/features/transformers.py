"""Quire inside Transformers: a cache for generate, and dynamic batches."""

from composition.feature import Feature, setting
from composition.in_transformers import run_cache, run_dynamic

OF_TEXTS = ("structured output", "stop texts")
EVICTION = ("eviction schedule", "eviction granularity", "eviction budget")

FEATURES = (
    Feature(
        name="QuireCache",
        group="Transformers",
        option="`model.generate(..., cache=quire.hf.QuireCache(model, ...))`",
        draw=setting(),
        acted=lambda ran: True,
        alone_in="Transformers",
        only_with=("eviction rule", *EVICTION, "codec", "model"),
        never_with=("rules of requests", "pressure"),
        run=run_cache,
    ),
    Feature(
        name="DynamicBatch",
        group="Transformers",
        option="`quire.hf.DynamicBatch(model, ...)`",
        draw=setting(),
        acted=lambda ran: True,
        alone_in="Transformers",
        only_with=("batcher", "model", "sampling"),
        never_with=("baton_pd on the host", *OF_TEXTS, "logprobs", "prompt_logprobs"),
        run=run_dynamic,
    ),
)
