"""A lower bound of the number of tokens of a text, from its length.

The server refuses long texts by this bound before tokenization. A token covers at most as many
characters as the longest vocabulary entry, if the tokenizer drops and merges no other characters.
If that cannot be verified, there is no bound. An added token with `lstrip` or `rstrip` (RoBERTa's
<mask>, special tokens of Phi-3) also covers any number of adjacent spaces: in a text with such a
token, spaces are not counted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

_COMPOSED_CHARACTERS = 4
"""Most characters that Unicode composes into one: U+1F82 is a letter with 3 marks."""

_SHRINKAGE = {"NFC": _COMPOSED_CHARACTERS, "NFKC": _COMPOSED_CHARACTERS}
_KEEP_LENGTH = frozenset({"NFD", "NFKD", "Prepend", "ByteLevel"})
_PROBES = (" ", "\n", "\t", "a", "ab ", "0", "\u00e9", "\u4f60", "\U0001f600", "\u200b")
_PROBE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class TextLength:
    """A lower bound of the number of tokens of texts.

    Attributes:
        characters_per_token: most characters of one token, without spaces next to `stripping`.
        stripping: added tokens that include adjacent spaces.
    """

    characters_per_token: int
    stripping: tuple[str, ...] = ()

    def least_tokens(self, text: str) -> int:
        """Lower bound of the number of tokens of a text."""
        characters = len(text)
        if any(token in text for token in self.stripping):
            characters = sum(map(len, text.split()))
        return -(-characters // self.characters_per_token)


def text_length(tokenizer: PreTrainedTokenizerBase) -> TextLength | None:
    """The bound for a tokenizer; None if there is no bound."""
    normalizer = _normalizer(tokenizer)
    shrinkage, stripping = _shrinkage(normalizer), _stripping(tokenizer)
    # a token that is matched in normalized text may not appear in the original text
    if shrinkage is None or (normalizer is not None and any(t.normalized for t in stripping)):
        return None
    longest = max(map(len, tokenizer.get_vocab()), default=0) * shrinkage
    if not all(_holds(tokenizer, probe, longest) for probe in _PROBES):
        return None
    return TextLength(longest, tuple(token.content for token in stripping))


def _stripping(tokenizer: PreTrainedTokenizerBase) -> list[AddedToken]:
    """Added tokens that include any number of adjacent spaces."""
    added = tokenizer.added_tokens_decoder.values()
    return [token for token in added if token.lstrip or token.rstrip]


def _holds(tokenizer: PreTrainedTokenizerBase, probe: str, longest: int) -> bool:
    """Whether the bound is valid for a long text of one repeated string.

    The bound is not valid if the tokenizer merges unknown characters or spaces into one token.
    """
    text = probe * (max(_PROBE_CHARACTERS, 2 * longest) // len(probe))
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return len(token_ids) * longest >= len(text)


def _normalizer(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """The normalizer in the format of `tokenizer.json`; type "unknown" for slow tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"type": "unknown"}
    if backend.normalizer is None:
        return None
    described: Mapping[str, Any] = json.loads(backend.normalizer.__getstate__())
    return described


def _shrinkage(normalizer: Mapping[str, Any] | None) -> int | None:
    """Most characters that a normalizer merges into one; None if it may drop any number."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for part in map(_shrinkage, normalizer["normalizers"]):
            if part is None:
                return None
            product *= part
        return product
    if kind == "Replace":
        replaced = normalizer["pattern"].get("String")
        is_shorter = replaced is None or len(normalizer["content"]) < len(replaced)
        return None if is_shorter else 1
    return 1 if kind in _KEEP_LENGTH else _SHRINKAGE.get(kind)
