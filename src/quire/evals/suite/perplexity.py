"""Held-out perplexity: the log-probability of text after a context, token by token.

The context is prefilled, and each token of the continuation is a decode step. So an eviction rule
acts on the continuation as it acts on an output. `nll` is the mean negative log-probability of a
token in nats; the perplexity is its exponential.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quire.errors import ConfigError
from quire.evals.questions import DOCUMENT_START
from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.tasks.base import CHARACTERS_PER_TOKEN
from quire.evals.tasks.words import book_text

NLL = "nll"
PERPLEXITY = "perplexity"
CONTEXT_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity(EvalTask):
    """Windows of a text at equal distances: three quarters of context, one quarter measured."""

    name: str = "perplexity"
    summary: str = "log-probability of held-out text after a context (packaged books, or a file)"
    metrics: ClassVar[tuple[str, ...]] = (NLL,)
    lower_is_better: ClassVar[bool] = True

    def samples(self, options: SampleOptions) -> list[Sample]:
        text = book_text() if options.data is None else _read(options.data)
        characters = int(CHARACTERS_PER_TOKEN * options.tokens)
        step = (len(text) - characters) // options.count
        if step < 1:
            raise ConfigError(
                f"expected a text of more than {characters + options.count} characters for "
                f"{options.count} windows of {options.tokens} tokens, got {len(text)}: use a "
                "longer text, or lower --tokens or --num-prompts"
            )
        starts = (options.seed + index * step for index in range(options.count))
        return [_window(text[start : start + characters], options) for start in starts]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        return {}


def _window(text: str, options: SampleOptions) -> Sample:
    """A context and a continuation that together have at most `tokens` tokens."""
    text = text[text.find(" ") + 1 :]
    start = DOCUMENT_START if options.measure(DOCUMENT_START) == 1 else ""
    most = options.tokens - 2  # the document token, and a token that is split at the boundary
    while (length := options.measure(text)) > most:
        text = text[: int(len(text) * min(0.99, most / length))]
    cut = text.rfind(" ", 0, int(CONTEXT_SHARE * len(text)))
    return Sample(prompt=start + text[:cut], continuation=text[cut:])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; expected a text file in UTF-8") from error
