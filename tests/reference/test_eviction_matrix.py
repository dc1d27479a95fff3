"""Every rule x granularity x schedule, and every budget: only the rule decides what is retained.

The matrix is built from the registries: new rules and budgets are included automatically, with
small values for the usual options. KVCrush and its OpenVINO form wrap every base rule; each request
of such a run has a different anchor. Combinations that are declared unsound are left out. Each
case, with prompts of several lengths:

    a cap that is never reached     the logits of `full`
    other pages, batches, chunks    equal retained sets after every eviction, logits within 1e-4
    preemption by swap, by replay   likewise; the lanes hold the tokens of the trace
    rows of a padded batch          likewise, of Transformers' generate with a QuireCache; with one
                                    anchor for the batch if requests have different anchors

Retained sets may differ if scores are equal within 1e-6: `pytest -s` prints at the end how many
runs of which cases did.
"""

import sys
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import cycle

import pytest
import torch

from quire.engine.core import Engine
from quire.errors import UnsoundCombination
from quire.eviction.eviction import PolicyEvictor
from quire.hf import QuireCache
from quire.kv.lane_reader import LaneReader
from quire.layout.eviction import PREFILL_END, PRESSURE, SCHEDULES, scoring_of
from quire.policies.base import ScorePolicy
from quire.policies.crushed import CrushedShare
from quire.policies.eviction import CHUNK, GRANULARITIES, PAGE, TOKEN, Eviction, make_eviction
from quire.policies.registry import registered, registered_budgets
from quire.policies.signatures.anchors import ANCHORS
from quire.scheduler.eviction_trace import retained_sets
from reference.test_eviction_engine import NEW_TOKENS, Run, run
from support import zoo
from support.engines import largest_difference, make_prompts

CAP, EVERY, PIECE, PAGE_TOKENS = 36, 5, 3, 4
HIGH_AND_LOW = f"{CAP + 5}/{CAP - 5}"
SMALL = {"window": 6, "lag": 6, "recent": 5, "last": 6, "beta": 4, "threshold": 0.3} | {
    "caps": HIGH_AND_LOW,
    "scores": "0.9/0.1/0.3/0.2",
}
"""Option values of cases, for rules and budgets that have the option."""
NEAR_TIE, NEAR_TIES = 1e-6, Counter[str]()

PROMPTS = dict(zip("ab", ([*p, *[7] * 9] for p in make_prompts(2, 60, seed=3)), strict=True))
PROMPTS["long"] = [3 + i * i % 60 for i in range(95)]

ONE_ANCHOR = {anchor: f"anchor={anchor}" for anchor in ANCHORS}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    Attributes:
        base: of KVCrush and its relatives; "" for others, and for their default.
        piece: tokens of a chunk.
        options: further options of the policy.
    """

    policy: str
    granularity: str
    when: str
    budget: str = "uniform"
    base: str = ""
    piece: int = PIECE
    options: str = ""

    @property
    def text(self) -> str:
        return self.with_cap(CAP)

    @property
    def anchors(self) -> dict[str, str]:
        return ONE_ANCHOR if self.base else {}

    @property
    def requests(self) -> dict[str, tuple[list[int], str]]:
        """Name to prompt and options that precede those of its rule."""
        if not self.anchors:
            return {name: (prompt, "") for name, prompt in PROMPTS.items()}
        turns = zip(self.anchors.items(), cycle(PROMPTS.items()))
        return {f"{n} {anchor}": (p, option) for (anchor, option), (n, p) in turns}

    def with_cap(self, cap: int, option: str = "") -> str:
        made = registered()[self.policy]
        # of a cap this small a quarter is less than a page
        share = ["share=0.5"] * issubclass(made, CrushedShare)
        based = [f"base={_with_options(name, registered()[name])}" for name in [self.base] if name]
        own = [*(based or _small(made)), *share]
        budget = self.budget if cap == CAP else self.budget.replace(HIGH_AND_LOW, f"{cap}/{cap}")
        every = f"cap={cap},every={EVERY},when={self.when},budget={budget}"
        pieces = f"granularity={self.granularity},chunk_tokens={self.piece}"
        written = filter(None, (*own, self.options, option, every, pieces))
        return f"{self.policy}:{','.join(written)}"

    @property
    def is_sound(self) -> bool:
        try:
            make_eviction(self.text)
        except UnsoundCombination:
            return False
        return True

    def __str__(self) -> str:
        budget = self.budget.strip("()").partition(":")[0]
        last = f"around {self.base}" if self.base else budget
        options = f"-{self.options}" if self.options else ""
        return f"{self.policy}-{self.granularity}-{self.when}-{last}{options}"


def _small(made: type) -> list[str]:
    return [f"{f.name}={SMALL[f.name]}" for f in fields(made) if f.name in SMALL]


def _with_options(name: str, made: type) -> str:
    options = _small(made)
    return f"({name}:{','.join(options)})" if options else name


def _bases() -> list[str]:
    """Base rules of KVCrush: those with scores for each head."""
    made = {name: rule() for name, rule in registered().items()}
    return [n for n, rule in made.items() if isinstance(rule, ScorePolicy) and rule.scores_heads]


def _around() -> list[Case]:
    """KVCrush with every base rule; anchors alternate over requests, schedules over cases."""
    forms = [("kvcrush", TOKEN), ("kvcrush", CHUNK), ("kvcrush", PAGE), ("kvcrush_openvino", PAGE)]
    made = []
    for number, base in enumerate(_bases()):
        for turn, (policy, granularity) in enumerate(forms, start=number):
            when = SCHEDULES[turn % len(SCHEDULES)]
            # pieces of two: some bases protect so much that larger ones leave no representative
            case = Case(policy, granularity, when, base=base, piece=2)
            # a rule with a scoring pass has one schedule
            made.append(case if case.is_sound else replace(case, when=PREFILL_END))
    return made


def _of_heads() -> list[Case]:
    """KVCrush with a retained set per KV head, and with budgets over heads."""
    made = [
        Case("kvcrush", granularity, when, options="sets=head,pick=best")
        for granularity in GRANULARITIES
        for when in SCHEDULES
    ]
    for when in SCHEDULES:
        made.append(Case("kvcrush", TOKEN, when, options="pick=best"))
        made.append(Case("kvcrush_openvino", PAGE, when, options="sets=head"))
        made.append(Case("kmeans", CHUNK, when, options="sets=head"))
        made += [Case("kvcrush", TOKEN, when, b, options="sets=head") for b in ("ada", "fastgen")]
    return made


def _cases() -> list[Case]:
    split = [_with_options(name, made) for name, made in registered_budgets().items()]
    made = [
        *(Case(p, g, w) for p in registered() for g in GRANULARITIES for w in SCHEDULES),
        *(Case("h2o", g, w, b) for b in split for g in GRANULARITIES for w in SCHEDULES),
    ]
    return [*(case for case in dict.fromkeys(made) if case.is_sound), *_around(), *_of_heads()]


CASES = _cases()
_FAST = 53
"""Every 53rd case is fast: over the cases this covers all schedules and granularities."""

cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] if i % _FAST else [])
        for i, case in enumerate(CASES)
    ],
)


# ---- running a case ------------------------------------------------------------------------------


def press(engine: Engine) -> None:
    """Evict under pressure at the same tokens in every run, for every memory size."""
    for request in list(engine.scheduler.running):
        if request.progress.num_computed - len(request.prompt_token_ids) in (3, 9):
            engine.scheduler.capacities.evict_under_pressure([request])


def compare_lanes_with_traces(engine: Engine) -> None:
    """Lanes of running requests hold the tokens retained by their traces and all later tokens."""
    table = engine.pool.kv.memory.tables["full"]
    for request in engine.scheduler.running:
        if request.eviction.trace and request.eviction.replayed == len(request.eviction.trace):
            lying = LaneReader(engine.pool.kv, "full", request.memory.row).positions
            lanes = lying[:: table.group.page_class.heads].tolist()
            last = list(retained_sets(request.eviction.trace))[-1]
            left = [lane.tolist() for lane in last.retained]
            assert [[p for p in lane if p >= 0] for lane in lanes] == and_all_since(
                left, last.num_computed, request.progress.num_computed
            )


def and_all_since(lanes: list[list[int]], start: int, end: int) -> list[list[int]]:
    """Lanes with the tokens that came after an eviction."""
    return [[*lane, *range(start, end)] for lane in lanes]


def run_case(case: Case, evict: dict | None = None, *, traced: bool = False, **options) -> Run:
    """Generate for all prompts under a case's rules.

    Args:
        case: whose pages the engine has.
        evict: other rules than the case's, by the requests' names.
        traced: compare lanes with traces before every step.
        options: of `run`.
    """

    def before_step(engine: Engine) -> None:
        if traced:
            compare_lanes_with_traces(engine)
        if case.when == PRESSURE:
            press(engine)

    jobs = {
        name: (prompt, evict[name] if evict else case.with_cap(CAP, option))
        for name, (prompt, option) in case.requests.items()
    }
    kv = {"evict": case.text, "enable_prefix_caching": False, "evict_allow": ""}
    return run(jobs, kv=kv, before_step=before_step, **({"page_tokens": PAGE_TOKENS} | options))


@cache
def together(case: Case) -> Run:
    return run_case(case)


def assert_as_together(case: Case, other: Run) -> None:
    """Retained sets and logits are equal, except in near ties of scores."""
    ours, theirs = together(case).traces(), other.traces()
    if ours == theirs:
        assert largest_difference(together(case).logits, other.logits) <= 1e-4
        return
    scores = scores_of(case)
    for name, trace in ours.items():
        assert_near_ties(name, trace, theirs[name], scores)
    NEAR_TIES[str(case)] += 1


def scores_of(case: Case) -> dict[tuple[str, int], list[dict[int, float]]]:
    """Scores by position of every lane, by request and length at each eviction."""
    found: dict[tuple[str, int], list[dict[int, float]]] = {}
    lanes: list[dict[int, float]] = []
    evict, select = PolicyEvictor.evict, Eviction.select

    def record_request(self, request, keep, **options):
        lanes.clear()
        evicted = evict(self, request, keep, **options)
        if evicted is not None:
            found[request.request_id, request.progress.num_computed] = list(lanes)
        return evicted

    def record_scores(self, view, keep):
        rows = zip(view.positions.tolist(), self.policy.score(view).tolist(), strict=True)
        lanes.extend(dict(zip(*row, strict=True)) for row in rows)
        return select(self, view, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyEvictor, "evict_together", lambda evictor, due: [None] * len(due))
        patch.setattr(PolicyEvictor, "evict", record_request)
        patch.setattr(Eviction, "select", record_scores)
        run_case(case)
    return found


def assert_near_ties(name: str, ours: list, theirs: list, scores: dict) -> None:
    """The first evictions that differ do so in tokens with scores equal within 1e-6."""
    for (length, kept), (other_length, other) in zip(ours, theirs, strict=True):
        assert length == other_length
        if kept == other:
            continue
        lanes = scores[name, length][:: len(scores[name, length]) // len(kept)]
        for lane, mine, others in zip(lanes, kept, other, strict=True):
            apart = [lane[position] for position in set(mine) ^ set(others)]
            assert not apart or max(apart) - min(apart) <= NEAR_TIE, (name, length, apart)
        return


@pytest.fixture(scope="module", autouse=True)
def _say_near_ties():
    yield
    found = f"{sum(NEAR_TIES.values())} runs differ in near ties: {dict(NEAR_TIES)}"
    print(f"\n{found}", file=sys.stderr)  # with -s also shown by each of several workers


# ---- the invariances -----------------------------------------------------------------------------


@cases
def test_retained_tokens_depend_on_the_cap_but_not_on_pages_batches_or_chunks(case):
    requested = case.requests.items()
    evict = {name: case.with_cap(500, option) for name, (_, option) in requested}
    if case.budget == "uniform":  # the last answer is never processed
        evict = {n: case.with_cap(len(p) + NEW_TOKENS - 1, o) for n, (p, o) in requested}
    full, capped = run_case(case, dict.fromkeys(case.requests, "full")), run_case(case, evict)
    assert not any(usage.evicted_tokens for usage in capped.usages.values())
    assert largest_difference(full.logits, capped.logits) == 0

    others = [{"max_num_seqs": 1}, {"chunk_tokens": 7, "max_num_batched_tokens": 40}]
    if case.granularity != PAGE and case.when != PRESSURE:  # which evicts whole pages
        others += [{"page_tokens": 1}, {"page_tokens": 16}]

    for options in others:
        assert_as_together(case, run_case(case, **options))
    if make_eviction(case.text).budget.keeps_total:
        usages = together(case).usages
        assert all(usages[name].evicted_tokens for name in usages if name.startswith("long"))


def test_scores_are_recorded_for_every_eviction():
    case = Case("h2o", TOKEN, SCHEDULES[0])
    scores, traces = scores_of(case), together(case).traces()

    assert set(scores) == {(name, entry[0]) for name, trace in traces.items() for entry in trace}
    for name, trace in traces.items():
        assert_near_ties(name, trace, trace, scores)
        for length, kept in trace:
            lanes = scores[name, length][:: len(scores[name, length]) // len(kept)]
            assert all(set(k) <= set(lane) for lane, k in zip(lanes, kept, strict=True))


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@cases
def test_a_preempted_request_retains_the_same_tokens(case, preempt):
    host = "4MiB" if preempt == "swap" else 0
    often = run_case(case, traced=True, host=host, preempt=preempt, preempts=2)

    assert_as_together(case, often)
    evicted = [usage for usage in together(case).usages.values() if usage.evicted_tokens]
    assert sum(usage.preemptions for usage in often.usages.values()) > 0 or not evicted
    assert ("replay" in often.reasons) == (preempt == "recompute" and bool(evicted))


@cases
def test_rows_of_a_padded_batch_in_transformers_retain_what_the_engine_retains(case):
    rule = make_eviction(case.text)
    if rule.policy.rerotates_keys or case.when == PRESSURE or scoring_of(rule.statistics):
        pytest.skip("generate rotates keys, presses for memory of its own, and has no other pass")
    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    requested, traces = case.requests, together(case).traces()
    for option in {option for _, option in requested.values()}:
        names = [name for name, (_, own) in requested.items() if own == option]
        longest = max(len(requested[name][0]) for name in names)
        pads = [longest - len(requested[name][0]) for name in names]
        rows = [[0] * n + requested[name][0] for n, name in zip(pads, names, strict=True)]
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])
        evict = case.with_cap(CAP, option)
        with QuireCache(model, evict, page_tokens=PAGE_TOKENS, verify=False) as cache:
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            ids = torch.tensor(rows)
            model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
            for row, name in enumerate(names):
                held = [lane for layer in (0, 1) for lane in cache.retained_positions(row, layer)]
                start, kept = [(0, [[]]), *traces[name]][-1]
                every_head = [lane for lane in kept for _ in range(4 // len(kept))]
                tokens = len(requested[name][0]) + NEW_TOKENS - 1

                assert held == and_all_since(every_head, start, tokens)
