"""Tasks over windows of running text: held-out perplexity, and summaries.

The context is prefilled, and each token of the continuation is a decode step. So an eviction rule
acts on the continuation as it acts on an output.

perplexity  the continuation of the text. `nll` is the mean negative log-probability of a token in
            nats; the perplexity is its exponential
summary     the summary that full KV generates. `top_1` is the fraction of its tokens that are also
            the most likely ones of the configuration; full KV's own is below 1 where its sums have
            another order. A prompt with an empty summary does not count
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from quire.errors import ConfigError
from quire.evals.fidelity import ForcedToken
from quire.evals.questions import DOCUMENT_START
from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.tasks.base import CHARACTERS_PER_TOKEN, trim
from quire.evals.tasks.words import book_text

NLL = "nll"
PERPLEXITY, SUMMARY = "perplexity", "summary"
CONTEXT_SHARE = 0.75
MAX_CONTINUATION = 64
"""Tokens of a continuation, at most, by the mean length of a token: each is a decode step."""
TOP_1 = "top_1"
SUMMARY_TOKENS = 48
_GOLDEN_RATIO = 0.6180339887498949  # multiples of it are spread evenly, modulo 1
_REQUEST = "\n\nA summary of the text above, in two sentences:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity(EvalTask):
    """Windows of a text at equal distances: the last quarter or less is measured."""

    name: str = "perplexity"
    summary: str = "log-probability of held-out text after a context (packaged books, or a file)"
    metrics: ClassVar[tuple[str, ...]] = (NLL,)
    lower_is_better: ClassVar[bool] = True

    def samples(self, options: SampleOptions) -> list[Sample]:
        text = book_text() if options.data is None else _read(options.data)
        characters = int(CHARACTERS_PER_TOKEN * options.tokens)
        starts = _starts(text, options)
        return [_window(text[start : start + characters], options) for start in starts]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        return {}

    def score_forced(self, tokens: Sequence[ForcedToken]) -> dict[str, float]:
        return {NLL: -fmean(token.logprob for token in tokens)}


def _starts(text: str, options: SampleOptions) -> range:
    """The first characters of the windows.

    Raises:
        ConfigError: the text is too short.
    """
    characters = int(CHARACTERS_PER_TOKEN * options.tokens)
    step = (len(text) - characters) // options.count
    if step < 1:
        raise ConfigError(
            f"expected a text of more than {characters + options.count} characters for "
            f"{options.count} windows of {options.tokens} tokens, got {len(text)}: use a "
            "longer text, or lower --tokens or --num-prompts"
        )
    # seeds move the windows by much of their distance: else most windows would be the same
    begin = (1 + int(step * ((options.seed - 1) * _GOLDEN_RATIO % 1))) % step
    return range(begin, begin + options.count * step, step)


def window_overlap(tokens: int, count: int) -> float:
    """Fraction of a window of the packaged books that is also in the next one; at least 0."""
    characters = int(CHARACTERS_PER_TOKEN * tokens)
    return max(0.0, 1 - (len(book_text()) - characters) // count / characters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(EvalTask):
    """Windows of the packaged books, each with the request for a summary."""

    name: str = "summary"
    summary: str = "agreement with the summary that full KV generates (packaged books)"
    metrics: ClassVar[tuple[str, ...]] = (TOP_1,)
    follows_full: ClassVar[bool] = True

    def samples(self, options: SampleOptions) -> list[Sample]:
        text, found = book_text(), []
        room = options.tokens - options.measure(_REQUEST) - SUMMARY_TOKENS
        characters = int(CHARACTERS_PER_TOKEN * options.tokens)
        for start in _starts(text, options):
            window = trim(text[start : start + characters], room, options.measure)
            context = window[window.find(" ") + 1 :]
            found.append(
                Sample(prompt=context + _REQUEST, question=_REQUEST, max_tokens=SUMMARY_TOKENS)
            )
        return found

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        return {}  # only tokens of full KV's output are scored

    def score_forced(self, tokens: Sequence[ForcedToken]) -> dict[str, float]:
        return {TOP_1: fmean(token.is_likeliest for token in tokens)}


def _window(text: str, options: SampleOptions) -> Sample:
    """A context and a continuation that together have at most `tokens` tokens."""
    text = text[text.find(" ") + 1 :]
    start = DOCUMENT_START if options.measure(DOCUMENT_START) == 1 else ""
    most = options.tokens - 2  # the document token, and a token that is split at the boundary
    while (length := options.measure(text)) > most:
        text = text[: int(len(text) * min(0.99, most / length))]
    share = max(CONTEXT_SHARE, 1 - MAX_CONTINUATION / max(1, length))
    cut = text.rfind(" ", 0, int(share * len(text)))
    return Sample(prompt=start + text[:cut], continuation=text[cut:])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; expected a text file in UTF-8") from error
