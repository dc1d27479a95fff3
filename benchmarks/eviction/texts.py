"""Long texts as token ids: pieces of one running text, each begun as documents begin."""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningText:
    """What long texts are cut from.

    Attributes:
        text: in one piece.
        start: put in front of each piece; "" for nothing.
        name: for captions.
    """

    text: str
    start: str
    name: str


def pieces(model: LoadedModel, running: RunningText, tokens: int, n: int) -> list[list[int]]:
    """The first `n` pieces, side by side and of equal length.

    Args:
        model: whose tokenizer reads the text.
        running: what is cut.
        tokens: of a piece, its beginning included.
        n: how many.

    Raises:
        ConfigError: the model has no tokenizer, or the text is too short.
    """
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer: it cannot read texts")
    start = encode_prompt(model.tokenizer, running.start) if running.start else []
    ids = encode_prompt(model.tokenizer, running.text)
    length = tokens - len(start)
    if length < 1 or len(ids) < n * length:
        raise ConfigError(
            f"{running.name} has {len(ids):,} tokens, {n} pieces of {tokens:,} were asked for; "
            "name a longer text, or ask for fewer or shorter pieces"
        )
    return [start + ids[i * length : (i + 1) * length] for i in range(n)]
