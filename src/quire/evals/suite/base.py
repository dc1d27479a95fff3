"""The interface of evaluation tasks: samples with references, and the score of an output."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quire.errors import InvariantError
from quire.evals.fidelity import ForcedToken
from quire.evals.tasks import Measure

MIN_FULL = 0.5
"""Least score with full KV at which a task with exact answers may judge a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt and what its output is compared with."""

    prompt: str
    question: str = ""  # end of the prompt, after the context; empty: the prompt is one text
    references: tuple[str, ...] = ()  # what several of them mean is up to the task
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    depth: float | None = None  # of the answer, 0 (first) to 1 (last); None: it has none
    chance: float = 0.0  # score of random guessing
    continuation: str = ""  # text whose log-probability is measured; no output is generated then
    # token ids of an output of full KV that is scored instead of an own output; None: none
    followed: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Which samples a task returns."""

    count: int
    measure: Measure  # counts the tokens of a text with the evaluated model's tokenizer
    tokens: int = 512  # maximum of a generated prompt and its answer
    seed: int = 1
    data: Path | None = None  # text file that a perplexity reads; None: packaged books


class EvalTask(ABC):
    """A task: a frozen dataclass whose fields are its options.

    Attributes:
        summary: one line for `quire eval tasks`.
        metrics: names of the scores; the first one is compared.
        needs_full: least score with full KV at which it may judge a rule; None: no bound.
        follows_full: whether outputs are not generated, but the output of full KV is scored.
    """

    __slots__ = ()

    name: str
    summary: str
    metrics: ClassVar[tuple[str, ...]]
    needs_full: ClassVar[float | None] = None
    lower_is_better: ClassVar[bool] = False
    follows_full: ClassVar[bool] = False

    @abstractmethod
    def samples(self, options: SampleOptions) -> list[Sample]:
        """The first samples, equal for equal options.

        Raises:
            ConfigError: a file is missing or invalid, or no prompt fits.
        """

    @abstractmethod
    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The value of each metric for one output."""

    def score_forced(self, tokens: Sequence[ForcedToken]) -> dict[str, float]:
        """The value of each metric for the tokens of a sample's continuation."""
        raise InvariantError(f"task {self.name!r} has no continuations, got {len(tokens)} tokens")
