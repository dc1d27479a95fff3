"""The chat template of --chat-template, instead of the one in the model's folder."""

import copy
from dataclasses import replace
from pathlib import Path

from jinja2.exceptions import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from quire.errors import ConfigError
from quire.models.loader import LoadedModel
from quire.models.tokenizer import TEMPLATE_ERRORS

_INLINE = ("{{", "{%")


def with_chat_template(model: LoadedModel, option: str | None) -> LoadedModel:
    """The model with the chat template of `--chat-template`.

    Args:
        model: the model; its tokenizer is not changed.
        option: a file, or a template on one line; None: the template of the model.

    Raises:
        ConfigError: no file, a syntax error in the template, or a model without a tokenizer.
    """
    if option is None:
        return model
    if model.tokenizer is None:
        raise ConfigError(
            f"--chat-template has no effect: {model.name} has no tokenizer; leave it out, or use a "
            "model folder with a tokenizer"
        )
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = _read_template(option)
    _check_syntax(tokenizer, option)
    return replace(model, tokenizer=tokenizer)


def _read_template(option: str) -> str:
    if any(mark in option for mark in _INLINE):
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(
            f"cannot read --chat-template {option}: {reason}; expected a file with a Jinja "
            "template, or a template with {{ }} or {% %}"
        ) from None


def _check_syntax(tokenizer: PreTrainedTokenizerBase, option: str) -> None:
    """Compile the template, in the sandbox of Transformers.

    Raises:
        ConfigError: a syntax error, with its line.
    """
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        name = "its text" if any(mark in option for mark in _INLINE) else option
        raise ConfigError(
            f"--chat-template: {name}, line {error.lineno}: {error.message}"
        ) from None
    except TEMPLATE_ERRORS:  # it refuses this chat; others get the same message as an error
        return
