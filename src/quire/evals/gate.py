"""The gate: a check of whether a model can evaluate an eviction policy.

The model must answer from its context, and must fail if the context is evicted. Two variants:

    variant  cache                                  depths             threshold
    full     every token                            all five depths    >= 0.90 exact answers
    recent   sinks and the newest half, no more     depths 0 and .25   <= 0.05 exact answers

The records at depths 0 and .25 are outside the recent half. A model that answers them without the
context knows the answer from another source, and would rate every policy as good. Depths above .5
are inside the recent half and are not counted. This module generates prompts and counts answers;
the caller passes the model as a function.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError
from quire.evals.tasks import Filler, Measure, Task, make
from quire.evals.tasks.words import haystack

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DOCUMENT_START = "<|doc|>"
"""The beginning of every training sequence of quire-tiny; plain text for other models."""
_MIN_TOKENS = 16
_SHRINK = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, its expected answer, and the depth of the answer in the prompt."""

    prompt: str
    question: str = ""  # end of the prompt, after the context
    answer: str  # text that a greedy continuation must begin with
    depth: float  # requested, one of DEPTHS
    # actual depth, 0 (first) to 1 (last); None if the answer has no single location
    place: float | None = None
    # all texts that a correct continuation contains; empty: the answer only
    answers: tuple[str, ...] = ()
    chance: float = 0.0  # accuracy of random guessing (0 to 1)


def make_questions(
    task: str,
    tokens: int,
    n: int,
    *,
    measure: Measure,
    filler: Filler | None = None,
    seed: int = 1,
    **options: Any,
) -> list[Question]:
    """The first `n` prompts of a task; equal arguments give equal prompts.

    Raises:
        ConfigError: a prompt is longer; states the length that the `n` prompts need.
    """
    questions, least = [], 0
    for index in range(n):
        depth = DEPTHS[index % len(DEPTHS)]
        shared = {"measure": measure, "filler": filler or haystack(), "depth": depth}
        found, size = _fitting(task, seed * 10_000 + index, tokens, shared | options)
        questions.append(_question(found, depth))
        least = max(least, size)
    if least > tokens:
        raise ConfigError(
            f"no prompt of task {task!r} fits into {tokens} tokens: expected --tokens of {least} "
            "or more"
        )
    return questions


def _question(task: Task, depth: float) -> Question:
    query = task.queries[0]
    return Question(
        prompt=DOCUMENT_START + task.prompt(),
        question=query.question,
        answer=query.answer,
        depth=depth,
        place=query.depth,
        answers=query.answers,
        chance=task.chance,
    )


def _fitting(task: str, seed: int, tokens: int, options: dict[str, Any]) -> tuple[Task, int]:
    """A task and its length with the answer; the shortest task if none fits."""
    measure: Measure = options["measure"]
    target_tokens = tokens - 2  # the start of the document, and a token that is split at a boundary
    while True:
        target_tokens = max(target_tokens, _MIN_TOKENS)
        found = make(task, seed, target_tokens, **options)
        size = measure(DOCUMENT_START + found.prompt() + found.queries[0].answer)
        if size <= tokens or target_tokens == _MIN_TOKENS:
            return found, size
        target_tokens = int(_SHRINK * target_tokens)


OLD_DEPTH = 0.25
"""The largest depth that is certainly outside the recent half."""
MIN_FULL = 0.9
MAX_EVICTED = 0.05

EvictFor = Callable[[int], str]
"""(prompt tokens) -> policy text such as "recent:cap=256,every=32,sinks=4"."""

AnswerFunction = Callable[[list[str], str, int], list[str]]
"""(prompts, policy text, maximum new tokens) -> greedy continuations, in the prompts' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    """One task at one length."""

    task: str  # a registered family whose records have a depth
    tokens: int  # of a prompt and its answer
    n: int  # the depths alternate, so a multiple of 5 weights them equally

    def __post_init__(self) -> None:
        if self.n < len(DEPTHS):
            raise ConfigError(
                f"expected n >= {len(DEPTHS)}, one prompt for each depth, got {self.n}; raise n"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """Results of one variant at one depth of one case."""

    task: str
    tokens: int
    arm: str
    depth: float
    correct: int
    requested: int

    @property
    def accuracy(self) -> float:
        """Fraction of exact answers (0 to 1)."""
        return self.correct / self.requested


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The result of one case, compared with the two thresholds."""

    task: str
    tokens: int
    full: float  # fraction of exact answers with the full cache, all depths
    evicted: float  # about old records, with sinks and the newest half only

    @property
    def passed(self) -> bool:
        return self.full >= MIN_FULL and self.evicted <= MAX_EVICTED


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """All counts, and one verdict per case."""

    rows: tuple[GateRow, ...]
    verdicts: tuple[GateVerdict, ...]

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def claims(self) -> dict[str, float]:
        """Flat name, such as `lines_512_full` -> fraction of exact answers."""
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
    """The policy text of the full cache, for prompts of any length."""
    return "full"


def keep_recent_half(tokens: int) -> str:
    """The policy text of a cap of half the prompt: four sinks and the newest tokens."""
    return f"recent:cap={tokens // 2},every=32,sinks=4"


def keep_recent_quarter(tokens: int) -> str:
    """The policy text of a cap of a quarter of the prompt: four sinks and the newest tokens."""
    return f"recent:cap={tokens // 4},every=16,sinks=4"


GATE_ARMS: Mapping[str, EvictFor] = MappingProxyType({"full": keep_all, "recent": keep_recent_half})
QUARTER_ARMS: Mapping[str, EvictFor] = MappingProxyType(
    {"full": keep_all, "recent": keep_recent_quarter}
)
"""The variants of the sanity check of `quire eval run`."""
QUARTER_OLD_DEPTH = 0.5
"""The largest depth that is certainly outside the recent quarter."""


def questions(
    case: GateCase, *, measure: Measure, filler: Filler | None = None, seed: int = 1
) -> list[Question]:
    """The prompts of one case; equal arguments give equal prompts."""
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
    """Evaluate every case with every variant and count exact answers by depth.

    A hit is a continuation that begins with the expected answer. `answer` is called once for each
    case and variant, with all prompts, so that an engine can batch them. The policy text of a
    variant depends on the length of the case; no prompt is longer.
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
    arms: Mapping[str, EvictFor] = GATE_ARMS,
    old_depth: float = OLD_DEPTH,
) -> GateReport:
    """Evaluate the gate's cases with a full cache and with the recent half."""
    rows = evaluate(cases, arms, answer, measure=measure, filler=filler, seed=seed)
    verdicts = tuple(_judge(case, rows, old_depth) for case in cases)
    return GateReport(rows=rows, verdicts=verdicts)


def _judge(case: GateCase, rows: Iterable[GateRow], old_depth: float) -> GateVerdict:
    mine = [row for row in rows if (row.task, row.tokens) == (case.task, case.tokens)]
    full = [row for row in mine if row.arm == "full"]
    old = [row for row in mine if row.arm == "recent" and row.depth <= old_depth]
    return GateVerdict(
        task=case.task, tokens=case.tokens, full=_accuracy(full), evicted=_accuracy(old)
    )


def _accuracy(rows: Sequence[GateRow]) -> float:
    return sum(row.correct for row in rows) / sum(row.requested for row in rows)
