"""Runs a case in little memory and in ample memory, and compares."""

import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

import torch

from fuzz.build import ample_engine, products, scarce_engine, submit, try_options, with_tiers
from fuzz.case import Case
from fuzz.watch import SeenLogits, Watched, difference, worst_against_replay
from quire.errors import ConfigError, InvariantError, NeverFits, RequestError
from quire.sampling.outputs import Choice, RequestOutput

OK, REFUSED, FAILED = "ok", "refused", "failed"
SERVED = "cannot be served here"
"""In errors about a rule of a request that the options of an engine exclude."""
TOLERANCE = 1e-4
"""Of logits in float32 between two runs, as in `tests/reference`; see `watch.difference`."""

ROUNDING = {"qwen3_5": 5e-3, "gemma4": 3e-4, "gemma4_unified": 3e-4}
"""Tolerances of models that round more: a scan in float32 depends on its chunks, also with exact
products."""

LOGPROB_TOLERANCE = 1e-3


@dataclass(kw_only=True)
class Outcome:
    """What came of a seed.

    Attributes:
        compared, replayed: contexts whose logits were compared with the ample run and a replay.
    """

    seed: int
    outcome: str = OK  # ok, refused (the options do not go together) or failed
    why: str = ""  # of a refusal or a failure
    near_tie: str = ""  # why outputs that differ are not a fault; "" where none do
    worst: float = 0.0  # largest difference of logits, as `watch.difference` counts it
    compared: int = 0
    replayed: int = 0
    steps: int = 0
    seconds: float = 0.0  # of the processor
    kinds: dict[str, int] = field(default_factory=Counter)  # events of the run in little memory

    def as_dict(self) -> dict[str, object]:
        """JSON values."""
        return asdict(self)


def run_case(case: Case) -> Outcome:
    """Run a case and check it; nothing is raised but what interrupts Python."""
    outcome, started_s = Outcome(seed=case.seed), time.process_time()
    try:
        with products(case):
            _run(case, outcome)
    except Refused as error:
        outcome.outcome, outcome.why = REFUSED, str(error)
    except Exception as error:  # noqa: BLE001 - every exception is a finding
        outcome.outcome = FAILED
        outcome.why = f"{type(error).__name__}: {error}\n{_frames(error)}"
    outcome.seconds = round(time.process_time() - started_s, 3)
    return outcome


def _frames(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-4:]
    return "\n".join(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in last)


class Refused(Exception):
    """The options of a case do not go together."""


class Differs(AssertionError):
    """A run in little memory gives another answer."""


def _run(case: Case, outcome: Outcome) -> None:
    with with_tiers(case) as case:
        ample = reference(case)
        try:
            scarce = run_scarce(case, ample, outcome)
        except RequestError as error:  # such as a rule that its offloaded weights exclude
            if SERVED not in str(error):
                raise
            raise Refused(f"{type(error).__name__}: {error}") from error
    check_run(case, scarce, ample, outcome)


def run_scarce(case: Case, ample: Watched, outcome: Outcome) -> Watched:
    """Run a case in little memory; with tiers a second time, in a new engine."""
    unit_bytes = max(answer.usage.kv_peak_bytes for answer in ample.answers.values())
    earlier: tuple[Watched, ...] = ()
    for _ in range(2 if case.tiers else 1):
        scarce = Watched(scarce_engine(case, unit_bytes), poisoned=case.poison, earlier=earlier)
        try:
            drive(case, scarce)
            scarce.engine.close()
        finally:
            outcome.kinds, outcome.steps = dict(scarce.kinds), scarce.steps
        scarce.require_nothing_held()
        earlier = (scarce,)
    return scarce


def check_run(case: Case, scarce: Watched, ample: Watched, outcome: Outcome) -> None:
    require_ends(case, scarce)
    require_scores(case, scarce)
    if not case.approximate:
        compare(case, scarce, ample, outcome)


def reference(case: Case) -> Watched:
    require_options(case)
    return answer_amply(case)


def require_options(case: Case) -> None:
    try:
        try_options(case)
    except NeverFits:
        raise
    except (ConfigError, RequestError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def answer_amply(case: Case) -> Watched:
    try:
        ample = Watched(ample_engine(case))
        for number, request in enumerate(case.requests):
            submit(ample.engine, f"r{number}", request)
            ample.open(f"r{number}", request.prompt)
    except NeverFits:
        raise
    except (ConfigError, RequestError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    while ample.engine.has_work:
        ample.step()
    ample.require_nothing_held()
    _require_no_errors(ample)
    return ample


def drive(case: Case, watched: Watched) -> None:
    engine, step = watched.engine, 0
    waiting = dict(enumerate(case.requests))
    while waiting or engine.has_work:
        if waiting and not engine.has_work:
            step = max(step, min(request.step for request in waiting.values()))
        for number, request in list(waiting.items()):
            if request.step <= step:
                submit(engine, f"r{number}", request)
                watched.open(f"r{number}", request.prompt)
                del waiting[number]
        for number, request in enumerate(case.requests):
            if request.cancel_step == step:
                engine.cancel(f"r{number}", request.cancel_index)
        if step in case.preempt_steps:
            _preempt(watched, -1 if case.preempt_whole else 1)
        watched.step()
        step += 1


def _preempt(watched: Watched, sign: int) -> None:
    """Preempt the running request with offloaded KV, the most evictions, or the most tokens."""
    engine = watched.engine
    offload = engine.pool.offload

    def rank(request) -> tuple[bool, int, int]:
        offloaded = offload is not None and request.memory.row in offload.prefixes.rows
        return offloaded, sign * request.eviction.num_evictions, request.progress.num_computed

    if engine.scheduler.running:
        engine.scheduler.lifecycle.preempt(max(engine.scheduler.running, key=rank), "for the test")


def require_ends(case: Case, watched: Watched) -> None:
    _require_no_errors(watched)
    for number, request in enumerate(case.requests):
        answer = watched.answers.get(f"r{number}")
        if answer is None:
            raise InvariantError(f"r{number} has not ended")
        aborted = any(choice.finish_reason == "abort" for choice in answer.choices)
        if aborted and request.cancel_step is None:
            raise InvariantError(f"r{number} was aborted without a cancel")


def require_scores(case: Case, watched: Watched) -> None:
    """Every token of a prompt has the score that some computed logits of its prefix give it."""
    rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for context, row in watched.seen.logits.items():
        rows.setdefault(context[0], []).extend([row, *watched.seen.again.get(context, ())])
    for number, request in enumerate(case.requests):
        answer = watched.answers[f"r{number}"]
        if "prompt_logprobs" not in request.params or answer.finish_reason == "abort":
            continue
        scores = answer.prompt_logprobs or ()
        if len(scores) != len(request.prompt):
            raise Differs(f"r{number}: {len(scores)} scores of {len(request.prompt)} tokens")
        for i, score in enumerate(scores):
            token, found = request.prompt[i], rows.get(request.prompt[:i], [])
            made = [float(row.log_softmax(dim=-1)[token]) for row in found]
            if score and not any(abs(score.logprob - m) <= LOGPROB_TOLERANCE for m in made):
                raise Differs(f"r{number}: token {i} has {score.logprob}, expected one of {made}")


def _require_no_errors(watched: Watched) -> None:
    for name, answer in watched.answers.items():
        if answer.error is not None:
            raise InvariantError(f"{name} ended with an error: {answer.error}")


# ---- comparing ---------------------------------------------------------------------------------


def compare(case: Case, scarce: Watched, ample: Watched, outcome: Outcome) -> None:
    worst, outcome.compared = _worst_in_common(scarce.seen, ample.seen)
    outcome.worst = max(worst, scarce.seen.worst)
    if case.under_pressure and "sparse" not in case.kv:  # a replay reads outputs as a prompt
        replayed, outcome.replayed = worst_against_replay(case, scarce.seen, ample.seen)
        outcome.worst = max(outcome.worst, replayed)
    exact_codes = case.exact or not case.lossy
    tolerance = ROUNDING.get(case.model.partition("*")[0], TOLERANCE)
    if exact_codes and not outcome.worst <= tolerance:
        raise Differs(f"logits of the same tokens and evictions differ by {outcome.worst:.3g}")
    if case.under_pressure and scarce.kinds["evicted"]:
        return
    differs = first_difference(case, scarce, ample)
    if differs is not None:
        outcome.near_tie = _explain(case, ample, differs)


def _worst_in_common(ours: SeenLogits, theirs: SeenLogits) -> tuple[float, int]:
    common = ours.logits.keys() & theirs.logits.keys()
    found = (difference(ours.logits[c], theirs.logits[c]) for c in common)
    return max(found, default=0.0), len(common)


def first_difference(case: Case, scarce: Watched, ample: Watched) -> str | None:
    """What differs between the answers of two runs, or None."""
    for number, request in enumerate(case.requests):
        name = f"r{number}"
        ours, theirs = scarce.answers[name], ample.answers[name]
        for choice in ours.choices:
            found = _choice_difference(choice, theirs.choices[choice.index])
            if found is not None and not (request.cancel_step is not None and _ranks(ours)):
                return f"{name}[{choice.index}]: {found}"
        if _scores_differ(ours, theirs):
            return f"{name}: log-probabilities of the prompt"
    return None


def _ranks(answer: RequestOutput) -> bool:
    """Whether a cancelled answer has no tokens because its choices were to be ranked."""
    return any(choice.finish_reason == "abort" for choice in answer.choices)


def _choice_difference(ours: Choice, theirs: Choice) -> str | None:
    if ours.finish_reason == "abort":
        same = theirs.token_ids[: len(ours.token_ids)] == ours.token_ids
        return None if same else f"{ours.token_ids}, cancelled, expected {theirs.token_ids}"
    if ours.token_ids != theirs.token_ids:
        return f"{ours.token_ids}, expected {theirs.token_ids}"
    if (ours.finish_reason, ours.stop_reason) != (theirs.finish_reason, theirs.stop_reason):
        return f"{ours.finish_reason}, expected {theirs.finish_reason}"
    pairs = zip(ours.logprobs or (), theirs.logprobs or (), strict=True)
    if any(abs(a.logprob - b.logprob) > LOGPROB_TOLERANCE for a, b in pairs):
        return "log-probabilities"
    return None


def _scores_differ(ours: RequestOutput, theirs: RequestOutput) -> bool:
    if ours.finish_reason == "abort":
        return False
    pairs = zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)
    told = [(a, b) for a, b in pairs if a is not None and b is not None]
    return any(abs(a.logprob - b.logprob) > LOGPROB_TOLERANCE for a, b in told)


# ---- near ties ---------------------------------------------------------------------------------


def _explain(case: Case, ample: Watched, differs: str) -> str:
    """Why runs whose logits agree have chosen differently: a choice that rounding decides."""
    if not case.exact:
        rerotates = str(case.kv.get("evict")).startswith("streaming")
        kv = {**case.kv, "attention": "auto" if rerotates else "gathered"}
        again = run_case(replace(case, exact=True, kv=kv))
        if again.outcome == OK and not again.near_tie:
            return f"with exact products nothing differs; {differs}"
    for schedule in ({"chunk_tokens": 7, "max_num_batched_tokens": 40}, {"max_num_seqs": 1}):
        other = Watched(ample_engine(case, **schedule))
        _answer_all(case, other)
        if first_difference(case, other, ample) is not None:
            return f"ample runs differ too ({schedule}); {differs}"
    raise Differs(differs)


def _answer_all(case: Case, watched: Watched) -> None:
    for number, request in enumerate(case.requests):
        submit(watched.engine, f"r{number}", request)
        watched.open(f"r{number}", request.prompt)
    while watched.engine.has_work:
        watched.step()
