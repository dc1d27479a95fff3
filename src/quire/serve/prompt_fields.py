"""Request fields that change the prompt or are tokenized with it.

They are `truncate_prompt_tokens`, `bad_words` and `kv_budget`, and the option `--chat-template`.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from quire.errors import ConfigError
from quire.layout.eviction import Cap, parse_policy
from quire.models.loader import LoadedModel
from quire.serve.errors import FieldError, bounded

FULL = "full"
_INLINE = ("{{", "{%")


def truncated(token_ids: list[int], keep: int | None, longest: int) -> list[int]:
    """Keep the last tokens of a prompt.

    Args:
        token_ids: the prompt.
        keep: number of tokens to keep; -1: as many as leave room for one output token; None: all.
        longest: length of the longest sequence.
    """
    if keep is None:
        return token_ids
    return token_ids[-(longest - 1 if keep == -1 else keep) :]


def sequences_of_words(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str]
) -> list[tuple[int, ...]]:
    """Token sequences that write one of these words, at the beginning of a text or after a space.

    As in vLLM the sequence after a space is used only if it has as many tokens and another first
    token; other tokenizations of a word are not banned.

    Args:
        tokenizer: tokenizer of the model.
        words: texts that must not be generated.

    Raises:
        FieldError: a word without tokens.
    """
    return list(dict.fromkeys(ids for word in words for ids in _sequences(tokenizer, word)))


def _sequences(tokenizer: PreTrainedTokenizerBase, word: str) -> Iterator[tuple[int, ...]]:
    alone = _ids(tokenizer, word.lstrip())
    if not alone:
        raise FieldError("bad_words", f"expected words with tokens, got {bounded(word, 40)!r}")
    yield alone
    spaced = _ids(tokenizer, " " + word.lstrip())
    if len(spaced) == len(alone) and spaced[0] != alone[0]:
        yield spaced


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def with_budget(rule: str, budget: int | float | str) -> str:
    """An eviction rule with another cap.

    Args:
        rule: the rule of the request, or the default of its tenant or of the engine.
        budget: tokens of a lane, a share of the prompt such as 0.25 or "25%", or bytes such as
            "2MiB".

    Raises:
        FieldError: no cap, or a rule that evicts nothing.
    """
    text = str(budget)
    try:
        Cap.parse(text)
        policy = parse_policy(rule)
    except ConfigError as error:
        raise FieldError("kv_budget", f"kv_budget: {error}") from None
    if policy.name == FULL:
        raise FieldError(
            "kv_budget",
            "`kv_budget` needs an eviction rule, and the request has none: set `evict`, such as "
            f'"recent:cap={bounded(text, 20)}"; the server must allow it with --evict or '
            "--evict-allow",
        )
    options = {**policy.options, "cap": text.strip()}
    return f"{policy.name}:{','.join(f'{name}={value}' for name, value in options.items())}"


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
    except TemplateError:  # it refuses this chat; others get the same message as an error
        return
