"""The sanity check: whether a model may judge an eviction rule or a codec.

    full KV                                  at least 0.90 exact answers, all depths
    sinks and the newest quarter, no more    at most 0.05 exact answers, depths 0 to 0.5

See `quire.evals.gate`. A model that fails on a task does not use its context there, or answers
without it. Its verdicts about this task are left out; those about other tasks are not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.evals.gate import (
    QUARTER_ARMS,
    QUARTER_OLD_DEPTH,
    AnswerFunction,
    GateCase,
    GateReport,
    run_gate,
)
from quire.evals.suite.cells import CellFolder
from quire.evals.suite.engines import Engines
from quire.evals.tasks import Measure
from quire.evals.tune.scores import fingerprint_of

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_PROMPTS = 10
_NAME = "sanity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanity:
    """Result of the check."""

    status: str  # one of `PASSED`, `FAILED`, `NOT_RUN`
    reason: str = ""  # why the model may not judge; empty if it may
    cases: tuple[dict[str, object], ...] = ()  # task, tokens, and fractions of exact answers

    @property
    def passed(self) -> bool:
        return self.status == PASSED

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


def sanity_of(
    engines: Engines,
    full: KVConfig,
    *,
    seed: int,
    identity: Sequence[object],
    stored: CellFolder,
    report: Callable[[str], None],
    make_prompts: Callable[[], object],
) -> Sanity:
    """The result for a model: the stored one, or that of a run.

    `make_prompts` makes the prompts that the model answers after it, in an open engine. A length
    that they do not fit is refused before the check, which can take minutes.
    """
    fingerprint = fingerprint_of(*identity, full, seed)
    values = stored.read(_NAME, fingerprint)
    if values is None:
        engines.of(full)
        make_prompts()
    found = _run(engines, full, seed) if values is None else Sanity.stored(values)
    stored.write(_NAME, fingerprint, found.as_dict())
    report(f"sanity check: {found.status}{found.reason and f': {found.reason}'}")
    return found


def _run(engines: Engines, full: KVConfig, seed: int) -> Sanity:
    def answer(prompts: list[str], evict: str, max_tokens: int) -> list[str]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        outputs = engines.of(replace(full, evict=evict)).generate(prompts, params)
        return [output.text for output in outputs]

    context_tokens = engines.of(full).model.spec.max_positions
    return check(answer, measure=engines.measure, context_tokens=context_tokens, seed=seed)


def check(answer: AnswerFunction, *, measure: Measure, context_tokens: int, seed: int) -> Sanity:
    """Run the check."""
    cases = tuple(
        GateCase(task=task, tokens=min(tokens, context_tokens), n=_PROMPTS)
        for task, tokens in (("lines", 256), ("kv", 256), ("niah", 512))
    )
    try:
        report = run_gate(
            answer,
            measure=measure,
            cases=cases,
            seed=seed,
            arms=QUARTER_ARMS,
            old_depth=QUARTER_OLD_DEPTH,
        )
    except ConfigError as error:  # the model does not support eviction, or its context is too short
        return Sanity(status=FAILED, reason=f"the check cannot run: {error}")
    return judged(report)


def judged(report: GateReport) -> Sanity:
    """The result of a finished gate."""
    cases = tuple(asdict(verdict) | {"passed": verdict.passed} for verdict in report.verdicts)
    status = PASSED if report.passed else FAILED
    return Sanity(status=status, reason=_failures(cases), cases=cases)


def _failures(cases: Sequence[Mapping[str, Any]]) -> str:
    failed = "; ".join(
        f"{case['task']} at {case['tokens']} tokens: {case['full']:.0%} with full KV, "
        f"{case['evicted']:.0%} with the records evicted"
        for case in cases
        if not case["passed"]
    )
    expected = "expected at least 90% with full KV and at most 5% after eviction, got "
    return failed and expected + failed
