"""Converts the fields of a request to `SamplingParams`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.config.sampling_params import SamplingDefaults, SamplingParams
from quire.config.structured_outputs import FIELD
from quire.errors import RequestError
from quire.serve.errors import FieldError
from quire.serve.fields import temperature_of
from quire.serve.protocol import Body, ChatBody, CompletionBody, GenerationBody
from quire.serve.structured import param_of, read_structure
from quire.serve.tools.chat import ChatTools

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions."""

_SHARED = (
    {"min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    | {"presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "stop"}
    | {"bad_token_ids"}
    | {"stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "seed"}
    | {"n", "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping"}
)


def completion_params(
    body: CompletionBody, defaults: SamplingDefaults, bad_words: Sequence[tuple[int, ...]] = ()
) -> SamplingParams:
    """Sampling parameters of a completion."""
    requested = requested_tokens(body)
    max_tokens = COMPLETION_MAX_TOKENS if requested is None else requested
    if body.echo and body.logprobs is not None and body.stream:
        raise FieldError(
            "echo",
            "`echo` with `logprobs` cannot be streamed: the prompt is scored as a whole; leave "
            "out one of `echo`, `logprobs` and `stream`",
        )
    scores_prompt = body.echo and (body.logprobs is not None or max_tokens == 0)
    echoed = (body.logprobs or 0) if scores_prompt else None
    return _params(
        body,
        defaults,
        bad_words,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_most(echoed, _prompt_logprobs(body)),
    )


def chat_params(
    body: ChatBody,
    defaults: SamplingDefaults,
    available_tokens: int,
    tools: ChatTools,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> SamplingParams:
    """Sampling parameters of a chat completion."""
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs", "`top_logprobs` needs `logprobs` to be true")
    requested = requested_tokens(body)
    return _params(
        body,
        defaults,
        bad_words,
        max_tokens=available_tokens if requested is None else requested,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=_prompt_logprobs(body),
        **tools.sampling_options(body.structure_fields()),
    )


def requested_tokens(body: GenerationBody) -> int | None:
    """`max_completion_tokens` (OpenAI's newer name), else `max_tokens`; None: unset."""
    if body.max_completion_tokens is None:
        return body.max_tokens
    return body.max_completion_tokens


def _prompt_logprobs(body: GenerationBody) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise FieldError(
            "prompt_logprobs",
            "`prompt_logprobs` cannot be streamed: the prompt is scored as a whole; leave out "
            "`stream` or `prompt_logprobs`",
        )
    return body.prompt_logprobs


def _most(*numbers: int | None) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _params(
    body: GenerationBody,
    defaults: SamplingDefaults,
    bad_words: Sequence[tuple[int, ...]],
    **options: Any,
) -> SamplingParams:
    requested: dict[str, Any] = body.model_dump(include=_SHARED, exclude_none=True)
    own = temperature_of(body.do_sample, body.temperature)
    if own is not None:
        requested["temperature"] = own
    if bad_words:
        requested["bad_token_ids"] = [*requested.get("bad_token_ids", ()), *bad_words]
    structure = read_structure(body.structure_fields())
    if structure is not None:
        requested["structured_outputs"] = structure
    return SamplingParams(**requested | options).with_response_defaults(defaults)


# Maps an invalid option of the engine to the field of the body that sets it.

_PROMPT = ("prompt", "messages", "tokens", "input")
_FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    "prompt": _PROMPT,
    "max_tokens": ("max_completion_tokens", "max_tokens", *_PROMPT),
    "beam_width": ("beam_width", "best_of", "n", "use_beam_search"),
    "evict": ("kv_budget", "evict", *_PROMPT),
    "bad_token_ids": ("bad_words", "bad_token_ids"),
}
"""Fields that may set an option, in order of precedence."""


@contextmanager
def naming_fields_of(body: Body) -> Iterator[None]:
    """Name the field of the body in errors: the prompt of a chat is `messages`."""
    try:
        yield
    except RequestError as error:
        param = _field_of(body, error.param)
        if param == "max_completion_tokens":
            error.args = (re.sub(r"\bmax_tokens\b", param, str(error)),)
        error.param = param
        raise


def _field_of(body: Body, param: str | None) -> str | None:
    if param is None or param in (body.model_extra or {}):
        return param
    if isinstance(body, GenerationBody):
        param = param_of(body.structure_fields(), param)
        is_forced = isinstance(body, ChatBody) and (param or "").split(".")[0] == FIELD
        if is_forced and body.structured_outputs is None:  # by the schemas of the tools
            return "tools"
    declared = [name for name in _FIELDS_OF.get(param or "", ()) if name in type(body).model_fields]
    return next((name for name in declared if getattr(body, name) is not None), param)
