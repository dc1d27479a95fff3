"""Generated tasks: prompts of the families of `quire.evals.tasks`, exact and partial answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from quire.evals.gate import Question, make_questions
from quire.evals.suite.base import MIN_FULL, EvalTask, Sample, SampleOptions

ACCURACY, FOUND = "accuracy", "found"
_SPARE_TOKENS = 8
"""Output tokens for separators between several answers, for each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTask(EvalTask):
    """Prompts of one family; the output must begin with the answer."""

    name: str
    summary: str
    family: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    metrics: ClassVar[tuple[str, ...]] = (ACCURACY,)
    needs_full: ClassVar[float | None] = MIN_FULL

    def samples(self, options: SampleOptions) -> list[Sample]:
        questions = make_questions(
            self.family,
            options.tokens,
            options.count,
            measure=options.measure,
            seed=options.seed,
            **self.options,
        )
        return [self._sample(question, options) for question in questions]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        return {ACCURACY: float(output.startswith(sample.references[0]))}

    def _sample(self, question: Question, options: SampleOptions) -> Sample:
        return Sample(
            prompt=question.prompt,
            question=question.question,
            references=question.answers or (question.answer,),
            max_tokens=options.measure(question.answer) + _SPARE_TOKENS * len(question.answers),
            depth=None if question.place is None else question.depth,
            chance=question.chance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTask(GeneratedTask):
    """Prompts with several answers: the score is the fraction that the output contains."""

    metrics: ClassVar[tuple[str, ...]] = (FOUND,)

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        return {FOUND: fraction_found(output, sample.references)}


def fraction_found(output: str, references: Sequence[str]) -> float:
    """Fraction of the references that the output contains, ignoring case (RULER)."""
    lowered = output.lower()
    return sum(one.lower() in lowered for one in references) / len(references)
