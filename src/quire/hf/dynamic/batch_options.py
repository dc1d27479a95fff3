"""Options of a dynamic batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan
from typing import no_type_check

from transformers import PreTrainedTokenizerBase

from quire.config.generation_request import checked_option
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, NeverFits, RequestError
from quire.hf.dynamic.query import Query
from quire.layout.options import MaybeSize, option
from quire.layout.sizes import parse_size
from quire.models.generation import GenerationDefaults


@no_type_check  # run-time type checks in tests must not replace Quire's own errors
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of a dynamic batch.

    Attributes:
        batch_size: maximum number of rows.
        batcher: a rule of `quire.scheduler.batchers` with its options; `continuous` is for pages.
        capacity_tokens: maximum columns of the slab; None: the model's context.
        swap_space: CPU memory for KV of preempted queries, in bytes or as "64MiB"; None: no limit.
            If it is full, the KV is recomputed.
        scale_at: KV memory, in bytes or as "64MiB", above which queries are preempted; they resume
            when there is free memory. None: never.
        group_tokens: maximum tokens, pads counted, that are prefilled together.
        clock: returns seconds; the clock of deadlines and times.
        tokenizer: for stop texts and the text of outputs; None: token ids only.
    """

    batch_size: int = 8
    batcher: str = "baton_pd"
    capacity_tokens: int | None = None
    swap_space: MaybeSize = option(None)
    scale_at: MaybeSize = option(None)
    group_tokens: int = 256
    clock: Callable[[], float] = time.monotonic
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "group_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.capacity_tokens is not None and self.capacity_tokens < 2:
            raise ConfigError(f"expected capacity_tokens >= 2, got {self.capacity_tokens}")
        for name in ("swap_space", "scale_at"):
            size = getattr(self, name)
            object.__setattr__(self, name, None if size is None else parse_size(size))


# Checks of a dynamic batch before it allocates memory.


def read_params(
    params: SamplingParams | None, max_new_tokens: int | None, options: BatchOptions
) -> SamplingParams:
    """The sampling parameters of a query; default: greedy.

    Raises:
        RequestError: max_new_tokens below 1, or stop texts without a tokenizer.
    """
    found = params or SamplingParams()
    if max_new_tokens is not None:
        if max_new_tokens < 1:
            raise RequestError(f"expected max_new_tokens >= 1, got {max_new_tokens}")
        found = replace(found, max_tokens=max_new_tokens)
    if found.stop and options.tokenizer is None:
        raise RequestError(
            "stop texts need the text of the output: create the batch with tokenizer=, or use "
            "stop_token_ids"
        )
    return found


def dense_params(params: SamplingParams) -> SamplingParams:
    """Resolve the sampling parameters of a query in a dense row."""
    if (
        params.num_sequences != 1
        or params.use_beam_search
        or params.prompt_logprobs is not None
        or params.structured_outputs is not None
        or params.pooling is not None
    ):
        raise RequestError(
            "a DynamicBatch has no n above 1, best_of, beams, structured_outputs, prompt_logprobs "
            "or pooling; use quire.LLM, which takes the same model object"
        )
    return params.resolve(GenerationDefaults())


def check_query(
    query: Query,
    *,
    vocab_size: int,
    context_tokens: int | None,
    capacity_tokens: int | None,
) -> None:
    """Refuse a query that can never run."""
    prompt_token_ids, params = query.prompt_token_ids, query.params
    checked_option("priority", query.priority)
    checked_option("deadline_s", query.deadline_s)
    if query.deadline_s is not None and isnan(query.deadline_s):
        raise RequestError("expected deadline_s to be a time on the batch's clock, got NaN")
    if not prompt_token_ids:
        raise RequestError("expected a prompt of one token or more, got none")
    wrong = next((token for token in prompt_token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"expected token ids from 0 to {vocab_size - 1}, got {wrong}")
    params.validate_for(vocab_size)
    tokens = len(prompt_token_ids) + params.max_tokens
    if context_tokens is not None and tokens > context_tokens:
        raise RequestError(
            f"a prompt of {len(prompt_token_ids):,} tokens and max_new_tokens="
            f"{params.max_tokens:,} exceed the model's context of {context_tokens:,} tokens; lower "
            "one of them"
        )
    if capacity_tokens is not None and tokens - 1 > capacity_tokens:
        raise NeverFits(
            f"a prompt of {len(prompt_token_ids):,} tokens and max_new_tokens="
            f"{params.max_tokens:,} need {tokens - 1:,} columns, but capacity_tokens is "
            f"{capacity_tokens:,}; raise it, or lower max_new_tokens"
        )
