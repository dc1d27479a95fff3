"""Text to token ids: a model's tokenizer, plain prompts and chats.

Only the tokenizer adds special tokens. The tokenizer of quire-tiny adds none: the caller must begin
a plain prompt with `<|doc|>`, while its chat template writes that token itself.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quire.errors import ModelError, RequestError
from quire.models.foreign import foreign_code

KWARGS_FIELD = "chat_template_kwargs"
"""The field of a request that holds further variables of the chat template."""

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

_RESERVED_NAMES = frozenset(
    {
        "messages",
        "conversations",
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    }
)
"""Arguments of `apply_chat_template` and of the call that renders a template."""

TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of a template for messages or variables of an unexpected shape."""

_MIN_TAIL_CHARACTERS, _TAIL_CHARACTERS_PER_TOKEN, _TAIL_GROWTH = 16_384, 8, 4
_TAIL_MARGIN_TOKENS = 64
_TAIL_SHIFTS = (0, 1, 17)
"""Of the tail of a truncated text: its first length, and what must not change its tokens."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model folder; None if the folder has none.

    Raises:
        ModelError: tokenizer files exist but cannot be read.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with foreign_code(f"the tokenizer in {folder} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"the tokenizer in {folder} is a {type(tokenizer).__name__}")
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    add_special_tokens: bool = True,
    keep: int | None = None,
) -> list[int]:
    """Token ids of a plain prompt.

    Args:
        tokenizer: tokenizer of the model.
        text: the prompt.
        add_special_tokens: whether the tokenizer adds its special tokens.
        keep: return only this many last tokens; None: all.

    Raises:
        RequestError: the text has no tokens, or is not Unicode.
    """
    _check_unicode(text, "prompt")
    token_ids = _token_ids(tokenizer, text, keep, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise RequestError(
            "expected a prompt of at least one token, got an empty text", param="prompt"
        )
    return token_ids


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Render a chat to text with the model's chat template.

    Args:
        tokenizer: tokenizer of the model.
        messages: {"role": ..., "content": ...} each, oldest first.
        add_generation_prompt: end with the prefix of the assistant's message.
        template_kwargs: further variables of the template, such as `enable_thinking`.
        tools: definitions of tools for the template, in OpenAI's format.

    Raises:
        RequestError: the model has no template, or its template refuses these messages or
            variables.
    """
    if not tokenizer.chat_template:
        raise RequestError(
            "this model has no chat template, so messages cannot be converted to a prompt; send a "
            "plain prompt, or add a chat_template.jinja to the model's folder",
            param="messages",
        )
    if not messages:
        raise RequestError("expected at least one message, got none", param="messages")
    _check_template_kwargs(template_kwargs)
    render = partial(
        tokenizer.apply_chat_template,
        [dict(message) for message in messages],
        tools=None if tools is None else [dict(tool) for tool in tools],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    try:
        return _rendered(render, template_kwargs)
    except TEMPLATE_ERRORS as error:
        raise _refused_by_template(render, template_kwargs, error) from error


def _rendered(render: Callable[..., object], template_kwargs: Mapping[str, Any]) -> str:
    text = str(render(**template_kwargs))
    _check_unicode(text)
    return text


def template_reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the model's chat template mentions a variable."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else (template or "",)
    return any(name in _words(text) for text in texts)


@lru_cache(maxsize=16)
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def _check_template_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    """Refuse reserved names: `chat_template`, for example, would replace the template."""
    for name in template_kwargs:
        if name in _RESERVED_NAMES:
            raise RequestError(
                f"{KWARGS_FIELD} cannot contain {name!r}: the name is reserved, not a variable of "
                "the model's template; remove it",
                param=KWARGS_FIELD,
            )


def _refused_by_template(
    render: Callable[..., object], template_kwargs: Mapping[str, Any], error: BaseException
) -> RequestError:
    """Refuse the variables if the template accepts the messages without them, else the messages."""
    what, param = "these messages", "messages"
    if template_kwargs and _renders(render):
        what, param = f"these {KWARGS_FIELD}", KWARGS_FIELD
    elif isinstance(error, RequestError):
        return error
    reason = str(error) or type(error).__name__
    return RequestError(f"the model's chat template refuses {what}: {reason}", param=param)


def _renders(render: Callable[[], object]) -> bool:
    try:
        _rendered(render, NO_KWARGS)
    except TEMPLATE_ERRORS:
        return False
    return True


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> list[int]:
    """Token ids of a chat; the template writes all special tokens, the tokenizer adds none.

    Raises:
        RequestError: see `render_chat`.
    """
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
    )
    return encode_rendered(tokenizer, text)


def encode_rendered(
    tokenizer: PreTrainedTokenizerBase, text: str, keep: int | None = None
) -> list[int]:
    """Token ids of a chat text that `render_chat` returned.

    Raises:
        RequestError: the text is empty.
    """
    token_ids = _token_ids(tokenizer, text, keep, add_special_tokens=False)
    if not token_ids:
        raise RequestError(
            "expected a chat of at least one token, got an empty text", param="messages"
        )
    return token_ids


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, keep: int | None, *, add_special_tokens: bool
) -> list[int]:
    """All token ids of a text, or its last ones without tokenizing what precedes them by far.

    Where a text is cut decides the tokens after the cut, for a short way. A tail is therefore
    encoded from three places, two of them neighbours, until its last tokens are the same.
    """

    def encode(part: str) -> list[int]:
        return _encode(tokenizer, part, add_special_tokens=add_special_tokens)

    if keep is None:
        return encode(text)
    size = max(_MIN_TAIL_CHARACTERS, _TAIL_CHARACTERS_PER_TOKEN * (keep + _TAIL_MARGIN_TOKENS))
    while size * _TAIL_GROWTH <= len(text):
        first, *others = (encode(text[-size - shift :]) for shift in _TAIL_SHIFTS)
        wanted = keep + _TAIL_MARGIN_TOKENS
        if len(first) > wanted and all(other[-wanted:] == first[-wanted:] for other in others):
            return first[-keep:]
        size *= _TAIL_GROWTH
    return encode(text)[-keep:]


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool
) -> list[int]:
    # an attention mask would be as long as the ids, and it is not used
    encoded = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [int(token) for token in encoded.input_ids]


def _check_unicode(text: str, param: str = "messages") -> None:
    # JSON can encode half of a surrogate pair, for which tokenizers raise a TypeError
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not Unicode at character {error.start}: {text[error.start]!r} is half of "
            "a surrogate pair",
            param=param,
        ) from error
