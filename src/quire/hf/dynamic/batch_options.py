"""What a user can say about a dynamic batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan
from typing import no_type_check

from quire.config.generation_request import checked_option
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, NeverFits, RequestError
from quire.hf.dynamic.query import Query
from quire.layout.options import MaybeSize, option
from quire.layout.sizes import parse_size
from quire.models.generation import GenerationDefaults

SYNC, ASYNC = "sync", "async"
DEVICE, HOST = "device", "host"


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How a dynamic batch runs.

    Attributes:
        batch_size: rows at most.
        batcher: a rule for dense rows of `quire.scheduler.batchers`, options and all.
        capacity_tokens: columns of the slab at most; None: the model's context.
        swap_space: for KV that was taken out, in bytes or as "64MiB"; None: no limit. What finds
            no room there is read again.
        scale_at: KV memory, in bytes or as "64MiB", from which rows are taken out; they come back
            when there is room. None: never.
        prefill: sync reads a prompt when there is a row for it; async reads ahead, at most
            `prefill_tokens` between two steps. Of the batchers that read ahead: baton_pd and
            baton_pd_best_fit; the others read a prompt when there is a row for it.
        prefill_tokens: see there.
        group_tokens: most tokens, pads counted, that are read together.
        queue: device or host: where prefilled queries wait, under the same two.
        clock: seconds; deadlines and times are on it.
    """

    batch_size: int = 8
    batcher: str = "baton_pd"
    capacity_tokens: int | None = None
    swap_space: MaybeSize = option(None)
    scale_at: MaybeSize = option(None)
    prefill: str = SYNC
    prefill_tokens: int = 64
    group_tokens: int = 256
    queue: str = DEVICE
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        for name in ("batch_size", "prefill_tokens", "group_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.capacity_tokens is not None and self.capacity_tokens < 2:
            raise ConfigError(f"expected capacity_tokens >= 2, got {self.capacity_tokens}")
        for name, known in (("prefill", (SYNC, ASYNC)), ("queue", (DEVICE, HOST))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"expected {name} to be {' or '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in ("swap_space", "scale_at"):
            size = getattr(self, name)
            object.__setattr__(self, name, None if size is None else parse_size(size))


# ---- checks --------------------------------------------------------------------------------------

# What a dynamic batch refuses before it takes any memory.


def read_params(params: SamplingParams | None, max_new_tokens: int | None) -> SamplingParams:
    """Options of a query, filled; greedy where nothing is said.

    Raises:
        RequestError: what needs text, more than one answer, or more than tokens in it.
    """
    found = params or SamplingParams()
    if max_new_tokens is not None:
        if max_new_tokens < 1:
            raise RequestError(f"expected max_new_tokens >= 1, got {max_new_tokens}")
        found = replace(found, max_tokens=max_new_tokens)
    if found.logprobs is not None:
        raise RequestError(
            "expected no logprobs: a DynamicBatch gives token ids alone; quire.LLM has them"
        )
    if (
        found.num_sequences != 1
        or found.use_beam_search
        or found.stop
        or found.prompt_logprobs is not None
    ):
        raise RequestError(
            "expected one answer a query, ended by token ids: a DynamicBatch has no n, best_of, "
            "beams, stop texts or prompt_logprobs; quire.LLM has"
        )
    return found.resolve(GenerationDefaults())


def check_query(
    query: Query,
    *,
    vocab_size: int,
    context_tokens: int | None,
    capacity_tokens: int | None,
) -> None:
    """Refuse a query that cannot ever be answered.

    Args:
        query: with its options filled.
        vocab_size: of the model.
        context_tokens: longest sequence of the model.
        capacity_tokens: most columns of the slab.

    Raises:
        RequestError: an empty prompt, a token that is none, more tokens than the model has places,
            a priority or deadline that is no number.
        NeverFits: more tokens than the slab may have columns.
    """
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
            f"a prompt of {len(prompt_token_ids):,} and max_new_tokens={params.max_tokens:,} are "
            f"over the model's {context_tokens:,} tokens: lower one of them"
        )
    if capacity_tokens is not None and tokens - 1 > capacity_tokens:
        raise NeverFits(
            f"a prompt of {len(prompt_token_ids):,} tokens and max_new_tokens="
            f"{params.max_tokens:,} need {tokens - 1:,} columns, capacity_tokens is "
            f"{capacity_tokens:,}: raise it, or lower max_new_tokens"
        )
