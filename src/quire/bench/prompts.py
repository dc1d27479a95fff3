"""Prompts of a benchmark: texts of a tokenizer, or token ids without one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIES = 10


class Prompt(NamedTuple):
    """A prompt, and its length in tokens without special tokens.

    Attributes:
        content: a text, token ids, or the messages of a chat.
        tokens: number of tokens.
    """

    content: str | list[int] | list[dict[str, Any]]
    tokens: int


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark.

    Attributes:
        prompt: the prompt.
        output_tokens: `max_tokens` of the request.
        arrival_s: seconds after the start, if the data set has times; else None.
    """

    prompt: Prompt
    output_tokens: int
    arrival_s: float | None = None


class PromptMaker:
    """Makes prompts of random tokens.

    Args:
        tokenizer: tokenizer of the model; None: prompts are token ids.
        vocab_size: number of token ids; None: that of the tokenizer.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        if tokenizer is None:
            assert vocab_size is not None, "a tokenizer or a vocabulary size"
            self._ids = np.arange(vocab_size)
            return
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        ids = range(vocab_size or len(tokenizer))
        self._ids = np.array([token for token in ids if token not in special])

    def random_ids(self, random: np.random.Generator, tokens: int) -> list[int]:
        """Draw tokens that are not special."""
        drawn: list[int] = self._ids[random.integers(len(self._ids), size=tokens)].tolist()
        return drawn

    def prompt(self, ids: Sequence[int], random: np.random.Generator) -> Prompt:
        """The prompt of these tokens.

        The text of random tokens may have other tokens, so that it is tokenized, cut or extended
        up to 10 times. Its real length is returned.
        """
        ids = list(ids)
        if self.tokenizer is None:
            return Prompt(ids, len(ids))
        wanted, text = len(ids), ""
        for _ in range(_TRIES):
            text = str(self.tokenizer.decode(ids))
            ids = self.count_ids(text)
            if len(ids) == wanted:
                break
            more = self.random_ids(random, max(0, wanted - len(ids)))
            ids = [*ids, *more][:wanted]
        return Prompt(text, len(self.count_ids(text)))

    def count_ids(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        assert self.tokenizer is not None, "only with a tokenizer"
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def count(self, text: str) -> int:
        """Number of tokens of a text; without a tokenizer one for each 4 bytes."""
        if self.tokenizer is None:
            return -(-len(text.encode("utf-8", errors="replace")) // 4)
        return len(self.count_ids(text))


def open_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer.

    Args:
        name: folder, hub name or quire-tiny.

    Raises:
        ConfigError: no tokenizer is found.
    """
    from quire.models.source import find_model  # imports transformers
    from quire.models.tokenizer import load_tokenizer

    try:
        found = load_tokenizer(find_model(name)[0])
        why = "the folder has no tokenizer"
    except ModelError as error:
        found, why = None, str(error)
    if found is None:
        raise ConfigError(
            f"no tokenizer {name!r}: {why}; name one with --tokenizer, or send prompts of token "
            "ids with --vocab-size"
        )
    return found
