"""Long texts as token ids: excerpts of one running text, each with a document prefix."""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningText:
    """Source of long texts.

    Attributes:
        text: the whole text.
        start: prefix of each excerpt; "": no prefix.
        name: name for captions.
    """

    text: str
    start: str
    name: str


def cut_texts(model: LoadedModel, running: RunningText, tokens: int, n: int) -> list[list[int]]:
    """Cut the first `n` consecutive excerpts of equal length.

    Args:
        model: the model; its tokenizer encodes the text.
        running: source of the text.
        tokens: length of an excerpt, including its prefix.
        n: number of excerpts.

    Raises:
        ConfigError: the model has no tokenizer, or the text is too short.
    """
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer; texts cannot be encoded")
    start = encode_prompt(model.tokenizer, running.start) if running.start else []
    ids = encode_prompt(model.tokenizer, running.text)
    length = tokens - len(start)
    if length < 1 or len(ids) < n * length:
        raise ConfigError(
            f"expected at least {n * length:,} tokens for {n} texts of {tokens:,}, but "
            f"{running.name} has {len(ids):,}; name a longer text, or request less"
        )
    return [start + ids[i * length : (i + 1) * length] for i in range(n)]
