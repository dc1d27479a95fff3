"""The gate: may this model judge an eviction rule?

A judge has to read its context, and has to fail when the context is gone. So two arms:

    arm      cache                                  asked where        bar
    full     every token                            all five depths    >= 0.90 exact answers
    recent   sinks and the newest half, no more     depths 0 and .25   <= 0.05 exact answers

The records at depth 0 and .25 lie outside the recent half: whoever answers them there knows the
answer from elsewhere, and would call every rule good. Depths beyond .5 lie inside it and say
nothing. This module knows prompts and counts; the model is a function that the caller brings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from quire.errors import ConfigError
from quire.evals.questions import DEPTHS, Question, make_questions
from quire.evals.tasks import Filler, Measure

OLD_DEPTH = 0.25
"""The deepest place that surely lies outside a recent half."""
MIN_FULL = 0.9
MAX_EVICTED = 0.05

EvictFor = Callable[[int], str]
"""(prompt tokens) -> policy text such as "recent:cap=256,every=32,sinks=4"."""

AnswerFunction = Callable[[list[str], str, int], list[str]]
"""(prompts, policy text, most new tokens) -> the greedy continuations, in the prompts' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    """One task at one length.

    Attributes:
        task: a registered task family whose records have a depth.
        tokens: length of a prompt with its answer.
        n: number of prompts; the depths take turns, so a multiple of 5 weighs them equally.
    """

    task: str
    tokens: int
    n: int

    def __post_init__(self) -> None:
        if self.n < len(DEPTHS):
            raise ConfigError(
                f"expected n >= {len(DEPTHS)}, one prompt for each depth, got {self.n}; raise n"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """What one arm answered at one depth of one case."""

    task: str
    tokens: int
    arm: str
    depth: float
    correct: int
    requested: int

    @property
    def accuracy(self) -> float:
        """Share of exact answers."""
        return self.correct / self.requested


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """One case against the two bars.

    Attributes:
        task: the task family.
        tokens: length of a prompt.
        full: exact answers with the full cache, all depths.
        evicted: exact answers about old records with sinks and the newest half only.
    """

    task: str
    tokens: int
    full: float
    evicted: float

    @property
    def passed(self) -> bool:
        """Whether the model reads this context, and only this context."""
        return self.full >= MIN_FULL and self.evicted <= MAX_EVICTED


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """All counts, and one verdict a case."""

    rows: tuple[GateRow, ...]
    verdicts: tuple[GateVerdict, ...]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(verdict.passed for verdict in self.verdicts)

    def claims(self) -> dict[str, float]:
        """Flat name -> share of exact answers, such as `lines_512_full`."""
        found: dict[str, float] = {}
        for verdict in self.verdicts:
            found[f"{verdict.task}_{verdict.tokens}_full"] = verdict.full
            found[f"{verdict.task}_{verdict.tokens}_evicted"] = verdict.evicted
        return found


GATE_CASES = (
    GateCase(task="lines", tokens=512, n=25),
    GateCase(task="kv", tokens=512, n=25),
    GateCase(task="niah", tokens=512, n=25),
    GateCase(task="niah", tokens=1024, n=25),
    GateCase(task="niah", tokens=2048, n=25),
)


def keep_all(tokens: int) -> str:
    """The policy text of the full cache, whatever the prompt."""
    return "full"


def keep_recent_half(tokens: int) -> str:
    """The policy text that keeps four sinks and the newest of half as many tokens."""
    return f"recent:cap={tokens // 2},every=32,sinks=4"


GATE_ARMS: Mapping[str, EvictFor] = MappingProxyType({"full": keep_all, "recent": keep_recent_half})


def questions(
    case: GateCase, *, measure: Measure, filler: Filler | None = None, seed: int = 1
) -> list[Question]:
    """The prompts of one case; they depend on nothing but the arguments.

    Args:
        case: task, length and number.
        measure: tokens of a text, as the judged model counts them.
        filler: the haystack; None takes the shipped books.
        seed: another seed gives other prompts.

    Returns:
        `case.n` questions, the depths taking turns.
    """
    return make_questions(case.task, case.tokens, case.n, measure=measure, filler=filler, seed=seed)


def evaluate(
    cases: Iterable[GateCase],
    arms: Mapping[str, EvictFor],
    answer: AnswerFunction,
    *,
    measure: Measure,
    filler: Filler | None = None,
    seed: int = 1,
) -> tuple[GateRow, ...]:
    """Ask every case under every arm and count exact answers by depth.

    A hit is a continuation that begins with the answer. `answer` is called once for each case
    and arm, with all prompts, so that an engine can batch them; the arm's policy text is made for
    the length of the case, which no prompt exceeds.

    Args:
        cases: what is asked.
        arms: name -> policy text for a prompt length in tokens.
        answer: the model.
        measure: tokens of a text, as the model counts them.
        filler: the haystack; None takes the shipped books.
        seed: of the prompts; all arms see the same ones.

    Returns:
        One row for each case, arm and depth, in that order.
    """
    rows: list[GateRow] = []
    for case in cases:
        requested = questions(case, measure=measure, filler=filler, seed=seed)
        prompts = [question.prompt for question in requested]
        max_tokens = max(measure(question.answer) for question in requested)
        for arm, evict_for in arms.items():
            texts = answer(prompts, evict_for(case.tokens), max_tokens)
            rows += _count(case, arm, requested, texts)
    return tuple(rows)


def _count(
    case: GateCase, arm: str, requested: Sequence[Question], texts: Sequence[str]
) -> list[GateRow]:
    tally = {depth: [0, 0] for depth in DEPTHS}
    for question, text in zip(requested, texts, strict=True):
        tally[question.depth][0] += text.startswith(question.answer)
        tally[question.depth][1] += 1
    return [
        GateRow(
            task=case.task, tokens=case.tokens, arm=arm, depth=depth, correct=hits, requested=count
        )
        for depth, (hits, count) in tally.items()
    ]


def run_gate(
    answer: AnswerFunction,
    *,
    measure: Measure,
    cases: Sequence[GateCase] = GATE_CASES,
    filler: Filler | None = None,
    seed: int = 1,
) -> GateReport:
    """Ask the gate's cases with a full cache and with the recent half, and judge.

    Args:
        answer: the model; `evict` is "full" or "recent:cap=...".
        measure: tokens of a text, as the model counts them.
        cases: what is asked.
        filler: the haystack; None takes the shipped books.
        seed: of the prompts.

    Returns:
        Counts by depth and one verdict a case; `report.passed` is the answer.
    """
    rows = evaluate(cases, GATE_ARMS, answer, measure=measure, filler=filler, seed=seed)
    verdicts = tuple(_judge(case, rows) for case in cases)
    return GateReport(rows=rows, verdicts=verdicts)


def _judge(case: GateCase, rows: Iterable[GateRow]) -> GateVerdict:
    mine = [row for row in rows if (row.task, row.tokens) == (case.task, case.tokens)]
    full = [row for row in mine if row.arm == "full"]
    old = [row for row in mine if row.arm == "recent" and row.depth <= OLD_DEPTH]
    return GateVerdict(
        task=case.task, tokens=case.tokens, full=_accuracy(full), evicted=_accuracy(old)
    )


def _accuracy(rows: Sequence[GateRow]) -> float:
    return sum(row.correct for row in rows) / sum(row.requested for row in rows)
