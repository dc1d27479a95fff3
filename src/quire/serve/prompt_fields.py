"""Request fields that change the prompt or are tokenized with it.

They are `bad_words` and `kv_budget`, and the option `--chat-template`.
"""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from quire.errors import ConfigError
from quire.layout.eviction import Cap, parse_policy
from quire.serve.errors import FieldError, bounded

FULL = "full"


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
        budget: tokens of a lane, a fraction of the prompt such as 0.25 or "25%", or bytes such as
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
