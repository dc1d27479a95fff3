"""The sanity check: whether a model may judge an eviction rule or a codec.

    full KV                                  at least 0.50 exact answers, all depths
    sinks and the newest quarter, no more    at most 0.05 exact answers, depths 0 to 0.5

The records at depths up to 0.5 are outside the newest quarter. A model that answers them without
the context knows the answer from another source, and would rate every policy as good. A model that
fails on a task does not use its context there, or answers without it. Its verdicts about this task
are left out; those about other tasks are not. Only the cases of the evaluated tasks run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.evals.questions import make_questions
from quire.evals.suite.base import MIN_FULL
from quire.evals.suite.cells import CellFolder
from quire.evals.suite.engines import Engines
from quire.evals.tasks import Measure
from quire.evals.tune.scores import fingerprint_of

PASSED, FAILED, NOT_RUN, NO_CASE = "passed", "failed", "not run", "no case for these tasks"
_PROMPTS = 10  # of each task; the depths alternate, so a multiple of 5 weights them equally
_CASES = (("lines", 256), ("kv", 256), ("niah", 512))  # tasks and tokens of a prompt
_MAX_EVICTED = 0.05
_OLD_DEPTH = 0.5
_NAME = "sanity"

AnswerFunction = Callable[[list[str], str, int], list[str]]
"""(prompts, policy text, maximum new tokens) -> greedy continuations, in the prompts' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanity:
    """Result of the check."""

    status: str  # one of `PASSED`, `FAILED`, `NOT_RUN`, `NO_CASE`
    reason: str = ""  # why the model may not judge; empty if it may
    cases: tuple[dict[str, object], ...] = ()  # task, tokens, and fractions of exact answers

    @property
    def passed(self) -> bool:
        return not self.reason

    def refusal(self, task: str) -> str:
        """Why the model may not judge a rule on a task; empty if no case of the task failed."""
        if not self.cases:
            return self.reason
        return _failures([case for case in self.cases if case["task"] == task])

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> "Sanity":
        return cls(status=values["status"], reason=values["reason"], cases=tuple(values["cases"]))

    def as_dict(self) -> dict[str, object]:
        return {"status": self.status, "reason": self.reason, "cases": list(self.cases)}


SKIPPED = Sanity(status=NOT_RUN, reason="the sanity check was left out (--no-sanity-check)")


def sanity_of(  # noqa: PLR0913 - one parameter per input
    engines: Engines,
    full: KVConfig,
    *,
    tasks: Sequence[str],
    seed: int,
    identity: Sequence[object],
    stored: CellFolder,
    report: Callable[[str], None],
    make_prompts: Callable[[], object],
) -> Sanity:
    """The result for a model and tasks: the stored one, or that of a run.

    `make_prompts` makes the prompts that the model answers after it, in an open engine. A length
    that they do not fit is refused before the check, which can take minutes.
    """
    tasks = [task for task, _ in _CASES if task in tasks]
    fingerprint = fingerprint_of(*identity, full, seed, tasks)
    values = stored.read(_NAME, fingerprint)
    if values is None:
        engines.of(full)
        make_prompts()
    found = _run(engines, full, tasks, seed) if values is None else Sanity.stored(values)
    stored.write(_NAME, fingerprint, found.as_dict())
    report(f"sanity check: {found.status}{found.reason and f': {found.reason}'}")
    return found


def _run(engines: Engines, full: KVConfig, tasks: Sequence[str], seed: int) -> Sanity:
    def answer(prompts: list[str], evict: str, max_tokens: int) -> list[str]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        outputs = engines.of(replace(full, evict=evict)).generate(prompts, params)
        return [output.text for output in outputs]

    context_tokens = engines.of(full).model.spec.max_positions
    return check(
        answer, tasks=tasks, measure=engines.measure, context_tokens=context_tokens, seed=seed
    )


def check(
    answer: AnswerFunction,
    *,
    tasks: Sequence[str],
    measure: Measure,
    context_tokens: int,
    seed: int,
) -> Sanity:
    """Run the cases of the tasks."""
    try:
        cases = tuple(
            _case(task, min(tokens, context_tokens), answer, measure, seed)
            for task, tokens in _CASES
            if task in tasks
        )
    except ConfigError as error:  # the model does not support eviction, or its context is too short
        return Sanity(status=FAILED, reason=f"the check cannot run: {error}")
    reason = _failures(cases)
    status = FAILED if reason else PASSED if cases else NO_CASE
    return Sanity(status=status, reason=reason, cases=cases)


def _case(
    task: str, tokens: int, answer: AnswerFunction, measure: Measure, seed: int
) -> dict[str, object]:
    """Fractions of continuations that begin with the answer: of all, and of old records."""
    asked = make_questions(task, tokens, _PROMPTS, measure=measure, seed=seed)
    max_tokens = max(measure(question.answer) for question in asked)

    def exact(evict: str, max_depth: float) -> float:
        texts = answer([question.prompt for question in asked], evict, max_tokens)
        pairs = zip(asked, texts, strict=True)
        hits = [text.startswith(one.answer) for one, text in pairs if one.depth <= max_depth]
        return sum(hits) / len(hits)

    full, evicted = (
        exact("full", 1.0),
        exact(f"recent:cap={tokens // 4},every=16,sinks=4", _OLD_DEPTH),
    )
    passed = full >= MIN_FULL and evicted <= _MAX_EVICTED
    return {"task": task, "tokens": tokens, "full": full, "evicted": evicted, "passed": passed}


def _failures(cases: Sequence[Mapping[str, Any]]) -> str:
    failed = "; ".join(
        f"{case['task']} at {case['tokens']} tokens: {case['full']:.0%} with full KV, "
        f"{case['evicted']:.0%} with the records evicted"
        for case in cases
        if not case["passed"]
    )
    expected = "expected at least 50% with full KV and at most 5% after eviction, got "
    return failed and expected + failed
