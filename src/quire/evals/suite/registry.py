"""All evaluation tasks by name, the generated ones, and the suites: lists of tasks with lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from quire.errors import UnknownName
from quire.evals.questions import Question, make_questions
from quire.evals.suite.base import MIN_FULL, EvalTask, Sample, SampleOptions
from quire.evals.suite.perplexity import Perplexity, Summary

ACCURACY, FOUND = "accuracy", "found"
_SPARE_TOKENS = 8
"""Output tokens for separators between several answers, for each answer."""
_MANY_KEYS = MappingProxyType({"needles": 8})

_ONE_ANSWER = (
    ("lines", "the value of one line among lines such as `line brisk-lamp: <48213>`"),
    ("longeval", "the same in LongEval's wording"),
    ("kv", "the value of one key among key-value pairs"),
    ("niah", "a number in running text, at five depths (needle in a haystack)"),
    ("passkey", "a number in repeated sentences"),
    ("facts", "a fact about a person in running text"),
    ("variables", "the value of a variable, some of which are assigned from another one"),
    ("copy", "a marked passage, which the output repeats"),
    ("headline", "the first line of an article"),
    ("labels", "few-shot classification of words with random labels"),
    ("quote", "the rest of one sentence of running text, of which the question has the beginning"),
    ("repeats", "the value of one line; every line is in the prompt four times"),
    ("retold", "a fact about a person, told four times in running text"),
    ("majority", "the most frequent label of a word, a fifth of whose lines have another one"),
    ("topics", "the label of two words of a class, of which many lines are labelled"),
    (
        "arithmetic",
        "few-shot sums; the answer follows from the question alone, so eviction loses little",
    ),
)
_SEVERAL_ANSWERS = (
    ("niah_multivalue", "four numbers of one key in running text (RULER)"),
    ("niah_multiquery", "the numbers of four keys in running text (RULER)"),
    ("tracking", "all variables of a chain of assignments (RULER)"),
    ("cwe", "the ten most common words of a list (RULER)"),
)


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


_ALL: tuple[EvalTask, ...] = (
    *(GeneratedTask(name=name, summary=text, family=name) for name, text in _ONE_ANSWER),
    GeneratedTask(
        name="niah_multikey",
        summary="one of eight numbers with different keys in running text (RULER)",
        family="niah",
        options=_MANY_KEYS,
    ),
    *(FoundTask(name=name, summary=text, family=name) for name, text in _SEVERAL_ANSWERS),
    Summary(),
    Perplexity(),
)
TASKS: Mapping[str, EvalTask] = MappingProxyType({task.name: task for task in _ALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tasks that run together."""

    tasks: tuple[str, ...]
    tokens: tuple[int, ...]  # lengths of the prompts that have a length
    count: int  # prompts of each task and length


_NEEDLES = ("niah", "niah_multikey", "niah_multivalue", "niah_multiquery")
QUICK = "quick"
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        QUICK: Suite(
            tasks=("lines", "kv", "niah", "labels", "arithmetic", "perplexity"),
            tokens=(256,),
            count=10,
        ),
        "recall": Suite(
            tasks=("lines", "longeval", "kv", *_NEEDLES, "passkey", "variables"),
            tokens=(512, 1024),
            count=25,
        ),
        "ruler": Suite(tasks=(*_NEEDLES, "tracking", "cwe"), tokens=(512, 1024, 2048), count=25),
        "redundant": Suite(
            tasks=("repeats", "retold", "majority", "topics", "labels"), tokens=(512,), count=50
        ),
        "few-shot": Suite(tasks=("labels", "arithmetic"), tokens=(512,), count=50),
        "all": Suite(tasks=tuple(task.name for task in _ALL), tokens=(512,), count=25),
    }
)


def task_of(name: str) -> EvalTask:
    """A task by its name."""
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    return TASKS[name]


def suite_of(name: str) -> Suite:
    """A suite by its name."""
    if name not in SUITES:
        raise UnknownName("suite", name, SUITES)
    return SUITES[name]


def suites_with(task: str) -> Sequence[str]:
    """Names of the suites that have a task."""
    return [name for name, suite in SUITES.items() if task in suite.tasks]
