"""Text to token ids: a model's tokenizer, plain prompts and chats.

Special tokens are added where the tokenizer adds them and nowhere else. The tokenizer of quire-tiny
adds none: a plain prompt for it begins with `<|doc|>` by the caller's hand, while its chat template
writes that token itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quire.errors import ModelError, RequestError
from quire.models.foreign import foreign_code

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
    """The tokenizer of a model folder, or None when the folder has none.

    Raises:
        ModelError: there are tokenizer files and they cannot be read.
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
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a plain prompt.

    Args:
        tokenizer: of the model.
        text: the prompt.
        add_special_tokens: those that the tokenizer adds by itself.

    Raises:
        RequestError: the text has no tokens, or is no Unicode text.
    """
    _check_unicode(text)
    token_ids = _token_ids(tokenizer, text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise RequestError("expected a prompt of at least one token, got an empty text")
    return token_ids


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text a chat becomes, by the model's own template.

    Args:
        tokenizer: of the model.
        messages: {"role": ..., "content": ...} each, oldest first.
        add_generation_prompt: end with what opens the assistant's answer.

    Raises:
        RequestError: the model has no template, or its template refuses these messages.
    """
    if not tokenizer.chat_template:
        raise RequestError(
            "this model has no chat template, so nobody knows what text a chat becomes; send a "
            "plain prompt, or add a chat_template.jinja to the model's folder"
        )
    if not messages:
        raise RequestError("expected at least one message, got none")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}") from error
    _check_unicode(str(text))
    return str(text)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a chat; the template writes all special tokens, the tokenizer adds none.

    Raises:
        RequestError: see `render_chat`.
    """
    text = render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return encode_rendered(tokenizer, text)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a chat that `render_chat` made a text of.

    Raises:
        RequestError: the text is empty.
    """
    token_ids = _token_ids(tokenizer, text, add_special_tokens=False)
    if not token_ids:
        raise RequestError("expected a chat of at least one token, got an empty text")
    return token_ids


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool
) -> list[int]:
    # a mask is as long as the ids, and nothing here reads one
    encoded = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [int(token) for token in encoded.input_ids]


def _check_unicode(text: str) -> None:
    # JSON can write half of a surrogate pair; tokenizers answer that with a TypeError
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not Unicode at character {error.start}: {text[error.start]!r} is half of "
            "a surrogate pair"
        ) from error
