"""Mixed precision by importance in an engine: promoted once, until the token is evicted; replayed.

Every rule is included automatically. Requests are preempted as in the conformance
tests of codecs.
"""

from itertools import pairwise

import pytest

from quire.codecs.fp8 import Float8
from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.policies.eviction import make_eviction
from quire.policies.registry import registered
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_codec_conformance import Encoders, disturbed, rule_of
from reference.test_eviction_engine import Run, run
from support.engines import greedy, largest_difference, load
from support.exact_products import use_exact_products
from support.kv_options import kv_config

PROMPTS = {"a": [5, 9, 2, 7] * 11, "b": [3 + i * i % 60 for i in range(55)]}
RECORDS, EVERY = 5, 8
CODEC = f"int2+residual={EVERY}+promoted={RECORDS}:int8"
RULE = f"h2o:cap=30,every={EVERY}"


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        yield


def answer(rule: str = RULE, codec: str = CODEC, *, prompts=PROMPTS, **options) -> Run:
    kv = {"codec": codec, "evict": rule, "evict_allow": "", "enable_prefix_caching": False}
    kv |= options.pop("kv", {})
    jobs = {name: (prompt, rule) for name, prompt in prompts.items()}
    return run(jobs, model="qwen3", kv=kv, **options)


def promoted(done: Run) -> dict[str, list]:
    """For each request and eviction, the tokens of each lane that have a record."""
    traces = {name: done.engine.eviction_trace(name) for name in done.usages}
    return {n: [[p.tolist() for p in sets.promoted] for sets in traces[n]] for n in traces}


def preempted() -> list:
    """Each rule, by token and by page, preempted in both ways; half with a body of whole pages.

    One rule of nine is fast, in one of the ways.
    """
    found = []
    rules = [(p, g, rule_of(p, g)) for g in ("token", "page") for p in registered()]
    for number, (policy, granularity, rule) in enumerate(one for one in rules if one[2]):
        for turn, preempt in enumerate(("swap", "recompute")):
            marks = [pytest.mark.slow] * (number % 9 > 0 or number % 2 != turn)
            body, name = ("int2", "int2_page")[(number + turn) % 2], f"{policy}-{granularity}"
            found.append(pytest.param(rule, body, preempt, id=f"{name}-{preempt}", marks=marks))
    return found


@pytest.mark.parametrize(("rule", "body", "preempt"), preempted())
def test_a_preempted_request_promotes_the_same_tokens(rule, body, preempt):
    residual = make_eviction(rule).every
    codec = CODEC.replace(f"residual={EVERY}", f"residual={residual}").replace("int2", body)
    expected, other = answer(rule, codec, max_num_seqs=1), answer(rule, codec, **disturbed(preempt))
    assert all(usage.preemptions for usage in other.usages.values())
    assert other.traces() == expected.traces()
    assert promoted(other) == promoted(expected)
    assert any(lane for found in promoted(expected).values() for lane in found[-1])
    assert largest_difference(other.logits, expected.logits) <= 1e-4


def test_tokens_are_promoted_once_and_never_demoted():
    """A record is freed when its token is evicted; only tokens of the residual are promoted."""
    done = answer()

    for name in PROMPTS:
        sets = done.engine.eviction_trace(name)
        for before, after in pairwise(sets):
            for lane in range(len(after.retained)):
                kept, old, new = (
                    set(x.tolist())
                    for x in (after.retained[lane], before.promoted[lane], after.promoted[lane])
                )
                assert old & kept <= new <= kept
                assert len(new) <= RECORDS
                assert all(p >= after.num_computed - EVERY for p in new - old)


def test_the_tokens_with_the_highest_scores_are_promoted(monkeypatch):
    """The scores of `keydiff` depend only on the current keys, so the test recomputes them."""
    seen, rule, checked = [], f"keydiff:cap=30,every={EVERY}", 0
    policy = type(make_eviction(rule).policy)
    score = policy.score

    def scoring(rule, view):
        found = score(rule, view)
        seen.append((view.positions.clone(), view.next_position, found.clone()))
        return found

    monkeypatch.setattr(policy, "score", scoring)
    sets = answer(rule, prompts={"r": PROMPTS["b"]}).engine.eviction_trace("r")
    at = {one.num_computed: (number, one) for number, one in enumerate(sets)}
    for positions, num_computed, scores in seen:
        number, now = at[num_computed]
        for lane, (kept, promoted) in enumerate(zip(now.retained, now.promoted, strict=True)):
            old = set(sets[number - 1].promoted[lane].tolist()) if number else set()
            new = set(promoted.tolist()) - old
            candidates = {p for p in kept.tolist() if p >= num_computed - EVERY} - old
            of = dict(zip(positions[lane].tolist(), scores[lane].tolist(), strict=True))
            assert new <= candidates
            if new:
                assert all(of[p] <= min(of[q] for q in new) for p in candidates - new)
                checked += len(candidates - new)
    assert checked


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_a_promoted_token_is_encoded_once_more_from_full_precision(preempt, monkeypatch):
    """Body and record, key and value, two heads, two layers; bodies never from decoded values."""
    seen = Encoders(monkeypatch, residuals="int8")
    host = "4MiB" if preempt == "swap" else 0

    done = answer(host=host, preempt=preempt, preempts=2)

    recorded = done.engine._traces._recorded
    promoted = sum(entry.promoted.num_slots for name in PROMPTS for entry in recorded[name])
    heads_of_lane = 2 * 2 // len(done.engine.eviction_trace("a")[0].retained)
    bodies = 2 * 2 * 2 * done.engine.stats().num_processed_tokens
    if preempt == "swap":
        assert seen.vectors == bodies + 2 * heads_of_lane * promoted
    else:  # evictions are played again, with the same tokens raised
        assert seen.vectors > bodies + 2 * heads_of_lane * promoted


def test_sinks_need_no_record_and_records_are_counted_in_bytes():
    """The six first tokens in full precision; all six are in a window of 28."""
    sinks, first = 6, 30 - 28
    done = answer(codec=f"int2+sinks={sinks}+residual=28+promoted={RECORDS}:int8")
    records = [lane for found in promoted(done).values() for lanes in found for lane in lanes]
    assert first < sinks
    assert any(records)
    assert all(min(lane, default=sinks) >= sinks for lane in records)

    # for 2 layers x 2 lanes a page of 5 records: codes, scales, positions
    plain = answer(codec=f"int2+residual={EVERY}")
    finer = answer()
    [group] = [g for g in finer.engine.pool.kv.memory.layout.groups if g.promoted is not None]

    for name in PROMPTS:
        more = finer.usages[name].kv_peak_bytes - plain.usages[name].kv_peak_bytes
        assert more == group.num_lanes * group.page_class.page_bytes
    vector = RECORDS * group.page_class.heads * (group.page_class.head_dim + 2)
    least = 2 * vector + 4 * RECORDS
    assert least <= group.page_class.page_bytes < least + 256


def engine_of(**kv) -> Engine:
    return Engine(load("qwen3"), kv_config(memory="8MiB", **kv), ScheduleConfig())


def test_promotion_without_a_timely_rule_is_rejected(monkeypatch):
    with pytest.raises(UnsoundCombination, match="eviction is off; use --evict with a rule"):
        engine_of(codec=CODEC)
    late = f"h2o:cap=30,every={EVERY + 1}"
    with pytest.raises(UnsoundCombination, match=r"before the rule scores them.*; use residual="):
        engine_of(codec=CODEC, evict=late)
    request = GenerationRequest(PROMPTS["a"], greedy(2), evict=late.replace("30", "40"))
    with pytest.raises(RequestError, match=r"every=.*, or a smaller every"):
        engine_of(codec=CODEC, evict=RULE).submit(request)
    monkeypatch.setattr(Float8, "why_not", classmethod(lambda cls, device: "no such type"))
    with pytest.raises(ConfigError, match="cannot run on cpu: no such type; use int8"):
        engine_of(codec=CODEC.replace("int8", "int8/fp8"), evict=RULE)


def test_a_shared_prefix_has_no_promoted_records():
    """Later requests share pages of codes and promote tokens independently."""
    prompts = {f"r{i}": PROMPTS["b"][:24] + [9 + i] * 20 for i in range(3)}
    shared, alone = (
        answer(prompts=prompts, kv={"enable_prefix_caching": caching}, max_num_seqs=1)
        for caching in (True, False)
    )
    assert shared.traces() == alone.traces()
    assert largest_difference(shared.logits, alone.logits) <= 1e-4
    assert promoted(shared) == promoted(alone)
