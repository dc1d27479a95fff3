"""What clients may send: the requests of OpenAI's API, with the fields vLLM added to them.

Types are checked here, ranges by `SamplingParams` and the engine. `None` always means "not said".
"""

import logging
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from quire.engine.option_checks import MAX_CHOICES

Prompts = str | list[str] | list[int] | list[list[int]]

MAX_TOP_LOGPROBS = 20
"""Likeliest tokens shown beside each token, as in OpenAI's chat API."""

MAX_NAMES_LOGGED = 20

logger = logging.getLogger(__name__)


class Body(BaseModel):
    """A request body. Fields nobody knows are ignored, with a line in the debug log."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None

    @model_validator(mode="after")
    def _log_unknown(self) -> "Body":
        if self.model_extra and logger.isEnabledFor(logging.DEBUG):
            names = [name[:64] for name in list(self.model_extra)[:MAX_NAMES_LOGGED]]
            logger.debug("ignored fields of a %s: %s", type(self).__name__, names)
        return self


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What completions and chats have in common. Names and meanings are those of SamplingParams."""

    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    use_beam_search: bool | None = None
    beam_width: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    priority: int | None = None
    deadline_s: float | None = None
    cache_salt: str | None = None
    evict: str | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: object) -> object:
        """Tell the four shapes apart in one pass; a union would report every element four times."""
        if isinstance(value, str) or (isinstance(value, list) and value and _is_uniform(value)):
            return value
        raise ValueError(
            "expected a text, a list of texts, a list of token ids or a list of such lists, none "
            "of the lists empty"
        )


class Message(BaseModel):
    """One message of a chat; other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list["TextPart"] | None = None


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a chat."""

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


def _is_uniform(prompt: list[object]) -> bool:
    if isinstance(prompt[0], list):
        return all(isinstance(ids, list) and ids and _are_ids(ids) for ids in prompt)
    return all(isinstance(text, str) for text in prompt) or _are_ids(prompt)


def _are_ids(values: list[object]) -> bool:
    return all(type(value) is int for value in values)
