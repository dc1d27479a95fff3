"""Request bodies: OpenAI's API with the fields that vLLM adds.

Types are checked here, ranges in `SamplingParams` and the engine. `None` always means "unset".
"""

from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from quire.config.chat_messages import text_part
from quire.config.generation_request import OPTION_KINDS, RequestOptions
from quire.config.sampling_params import MAX_CHOICES, Pooling
from quire.config.structured_outputs import MAX_CHOICE_VALUES
from quire.errors import RequestError
from quire.serve.fields import MAX_EXTRA_FIELDS, unknown_fields
from quire.serve.structured import STRUCTURE_FIELDS
from quire.serve.tools.definitions import MAX_TOOLS

MAX_MESSAGES = 16_384
"""Limit of the messages of a chat; the template takes time for every message."""


class TextPart(BaseModel):
    """A content part of a message."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, value: object) -> object:
        """Refuse other kinds of content parts with what is not supported."""
        if isinstance(value, str) and value != "text":
            shown = f"{value[:40]}..." if len(value) > 40 else value
            raise ValueError(
                f"expected text, got {shown}: images, audio and files are not supported"
            )
        return value


class Message(BaseModel):
    """One message of a chat; other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: (
        str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None

    def as_dict(self) -> dict[str, Any]:
        fields = dict(self)
        if isinstance(self.content, list):
            fields["content"] = [text_part(part.text) for part in self.content]
        return fields


def checked_prompts(value: object) -> object:
    """Check the four formats in one pass; a union would report every element four times."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_uniform(value)):
        return value
    raise ValueError(
        "expected a text, a list of texts, a list of token ids or a list of lists of token ids, "
        "without empty lists"
    )


def as_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a checked field, which may be a single prompt."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _is_uniform(prompt: list[object]) -> bool:
    if isinstance(prompt[0], list):
        return all(isinstance(ids, list) and ids and are_ids(ids) for ids in prompt)
    return all(isinstance(text, str) for text in prompt) or are_ids(prompt)


def are_ids(values: list[object]) -> bool:
    """Whether all values are integers, and no booleans."""
    return all(type(value) is int for value in values)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Prompts = str | list[str] | list[int] | list[list[int]]

MAX_TOP_LOGPROBS = 20
"""Limit of the most likely tokens per position, as in OpenAI's chat API."""

MAX_STOPS = MAX_BAD_SEQUENCES = 1024
"""Limits of stop strings, stop tokens and bad sequences: every new token is compared with all."""

MAX_WORD_CHARACTERS = MAX_BAD_TOKENS = 256
"""Limits of the characters of a bad word, and of the tokens of a bad sequence."""

MAX_INTERVAL = 2**31 - 1

MAX_BIASES = 1 << 16
MAX_ALLOWED_TOKENS = 1 << 19
"""Larger than any vocabulary."""


def _most(length: int, least: int = 0) -> Any:
    """Length limits of a list; validation stops at the first error.

    Collecting all errors of a large list would block all threads.
    """
    return Field(min_length=least, max_length=length, fail_fast=True)


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARACTERS)]

BadSequence = Annotated[list[int], _most(MAX_BAD_TOKENS)]


class Body(BaseModel):
    """A request body. `quire.serve.fields` handles undeclared fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None

    def unknown_fields(self) -> list[str]:
        """Names of unknown fields, which have no effect."""
        return unknown_fields(self.model_extra or {}, type(self).model_fields)


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # pads chunks; ignored


class PromptBody(Body):
    """Common fields of all requests that the engine runs."""

    priority: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    deadline_s: float | None = None
    cache_salt: str | None = None
    evict: str | None = None
    sparse: str | None = None
    speculative: bool | None = None
    kv_budget: int | float | str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_as_number(cls, value: object, info: Any) -> object:
        """Refuse true and false except for boolean fields; pydantic would convert true to 1."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and bool not in get_args(field.annotation):
            raise ValueError(f"expected a value other than true or false, got {str(value).lower()}")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some_tokens(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("expected at least 1 token, or -1 for the longest prompt, got 0")
        return value

    def request_options(self) -> RequestOptions:
        names = OPTION_KINDS.keys() & type(self).model_fields.keys()
        found = {name: getattr(self, name) for name in sorted(names)}
        return cast("RequestOptions", {k: v for k, v in found.items() if v is not None})


class GenerationBody(PromptBody):
    """Common fields of completions and chats, with the names and meanings of SamplingParams."""

    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    use_beam_search: bool | None = None
    beam_width: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(default=None, ge=1, le=MAX_INTERVAL)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    limit_max_tokens: bool | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], _most(MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[int], _most(MAX_ALLOWED_TOKENS)] | None = None
    bad_token_ids: Annotated[list[BadSequence], _most(MAX_BAD_SEQUENCES)] | None = None
    bad_words: Annotated[list[BadWord], _most(MAX_BAD_SEQUENCES)] | None = None
    stop: str | Annotated[list[str], _most(MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], _most(MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: dict[str, str] | None = None
    do_sample: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], _most(MAX_CHOICE_VALUES, least=1)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    reasoning_effort: ReasoningEffort | None = None

    @field_validator("bad_token_ids", mode="before")
    @classmethod
    def _bad_sequences(cls, value: object) -> object:
        """Refuse a flat list of token ids with an example."""
        if isinstance(value, list) and any(type(one) is int for one in value):
            raise ValueError(
                "expected a list of token id sequences, such as [[5], [7, 8]], got a list of token "
                "ids: put each id into a separate list"
            )
        return value

    def structure_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in sorted(STRUCTURE_FIELDS)}

    def unknown_fields(self) -> list[str]:
        found = super().unknown_fields()
        if self.stream_options is not None and not self.stream:
            raise RequestError("`stream_options` needs `stream` to be true", param="stream_options")
        if self.stream_options is not None:
            extra = self.stream_options.model_extra or {}
            found += unknown_fields(extra, StreamOptions.model_fields, inside="stream_options.")
        return found


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _logprobs(cls, value: object) -> object:
        """Accept false, as in chats, as unset; refuse true, which gives no number."""
        if value is True:
            raise ValueError(
                "expected a number of logprobs, got true; use 0 for the sampled token only"
            )
        return None if value is False else value

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _prompt(cls, value: object) -> object:
        return checked_prompts(value)

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, each a text or token ids; the field may be a single prompt."""
        return as_prompts(self.prompt)


Tools = Annotated[list[dict[str, Any]], _most(MAX_TOOLS)]

TemplateKwargs = Annotated[dict[str, Any], Field(max_length=MAX_EXTRA_FIELDS)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], _most(MAX_MESSAGES, least=1)]
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], _most(MAX_MESSAGES, least=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]

    @field_validator("tokens", mode="plain", json_schema_input_type=list[int])
    @classmethod
    def _tokens(cls, value: object) -> object:
        """Check in Python: pydantic would block all threads for a list of millions of ids."""
        if isinstance(value, list) and are_ids(value):
            return value
        raise ValueError("expected a list of token ids")


class EmbeddingBody(PromptBody):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None

    @field_validator("input", mode="plain")
    @classmethod
    def _input(cls, value: object) -> object:
        return checked_prompts(value)
