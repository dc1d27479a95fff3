"""Text to token ids: a model's tokenizer, and plain prompts.

Only the tokenizer adds special tokens. The tokenizer of quire-tiny adds none: the caller must begin
a plain prompt with `<|doc|>`, while its chat template writes that token itself.
"""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quire.errors import ModelError, RequestError
from quire.models.foreign import foreign_code

_WINDOWS, _WINDOW_TOKENS = (2048, 16_384), 64
"""Characters after a cut within which the tokens must not depend on it any more, and how many
tokens at their end must be equal."""

_TAIL_CHARACTERS_PER_TOKEN, _MAX_SHIFTS = 8, 256

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
    """Load the tokenizer of a model folder; None if the folder has none."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with foreign_code(f"the tokenizer in {folder} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"the tokenizer in {folder} is a {type(tokenizer).__name__}")
    return tokenizer


def undecodable_ids(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Token ids of a model that have no text: padding of its embedding, and unused ids."""
    if tokenizer is None:
        return []
    try:
        known = set(tokenizer.get_vocab().values()) | tokenizer.added_tokens_decoder.keys()
    except NotImplementedError:  # a tokenizer that only decodes
        return []
    # a vocabulary by text names one id of several with equal texts
    return [
        token
        for token in range(vocab_size)
        if token not in known and (token >= len(tokenizer) or not _decodes(tokenizer, token))
    ]


def _decodes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bool:
    try:
        return bool(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    except (LookupError, TypeError, ValueError):  # of a tokenizer written in Python
        return False


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    add_special_tokens: bool = True,
    keep: int | None = None,
) -> list[int]:
    """Token ids of a plain prompt, or its last `keep` ones."""
    check_unicode(text, "prompt")
    token_ids = _token_ids(tokenizer, text, keep, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise RequestError(
            "expected a prompt of at least one token, got an empty text", param="prompt"
        )
    return token_ids


def encode_rendered(
    tokenizer: PreTrainedTokenizerBase, text: str, keep: int | None = None
) -> list[int]:
    """Token ids of a chat text that `ChatTemplate.render` returned."""
    token_ids = _token_ids(tokenizer, text, keep, add_special_tokens=False)
    if not token_ids:
        raise RequestError(
            "expected a chat of at least one token, got an empty text", param="messages"
        )
    return token_ids


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, keep: int | None, *, add_special_tokens: bool
) -> list[int]:
    def encode(part: str) -> list[int]:
        return _encode(tokenizer, part, add_special_tokens=add_special_tokens)

    if keep is None:
        return encode(text)
    for window in _WINDOWS:
        if (found := _last_token_ids(tokenizer, encode, text, keep, window)) is not None:
            return found
    return encode(text)[-keep:]


def _last_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    encode: Callable[[str], list[int]],
    text: str,
    keep: int,
    window: int,
) -> list[int] | None:
    """The last token ids of a long text, from its end; None if they may depend on the rest.

    The tokens after a token boundary depend only on the text after it. One of the last characters
    before a cut, as many as the longest token has, begins a token. So if tokenization from each of
    them gives equal tokens at the end of a window after the cut, the whole text has them too.
    """
    size = window + _TAIL_CHARACTERS_PER_TOKEN * keep
    if 4 * (size + window) > len(text):
        return None
    shifts = min(_MAX_SHIFTS, max(map(len, tokenizer.get_vocab()), default=1))
    if shifts * window + 2 * size > len(text):  # more than the whole text is read in one piece
        return None
    while 2 * (size + shifts) < len(text):
        start = len(text) - size
        first = encode(text[start : start + window])
        heads = (encode(text[start - shift : start + window]) for shift in range(1, shifts))
        end = first[-_WINDOW_TOKENS:]
        if len(first) <= len(end) or any(head[-_WINDOW_TOKENS:] != end for head in heads):
            return None
        found = encode(text[start:])
        if len(found) >= len(first) + keep:
            return found[-keep:]
        size *= 2
    return None


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


def check_unicode(text: str, param: str = "messages") -> None:
    """Refuse a text that UTF-8 cannot encode."""
    # JSON can encode half of a surrogate pair, for which tokenizers raise a TypeError
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not Unicode at character {error.start}: {text[error.start]!r} is half of "
            "a surrogate pair",
            param=param,
        ) from error
