"""Eviction in engines: only the rule of a request decides which of its tokens are retained."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.pool import MAX_GROUPS
from quire.errors import ConfigError, NeverFits, PolicyError, RequestError, UnsoundCombination
from quire.eviction.eviction import PolicyEvictor
from quire.eviction.eviction_rules import without_numbers
from quire.layout.eviction import EvictionSpec
from quire.policies import recommended
from quire.policies.registry import policy_of, registered
from quire.scheduler.peaks import need_of
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import (
    Answers,
    answer,
    greedy,
    largest_difference,
    load,
    make_prompts,
    requests_of,
)
from support.kv_options import kv_config

CAP, EVERY, NEW_TOKENS = 24, 6, 14
BLOCKS = f"cap={CAP},every={EVERY}"
RULES = {
    "recent": f"recent:{BLOCKS},sinks=2",
    "h2o": f"h2o:{BLOCKS},recent=4",
    "tova": f"tova:{BLOCKS}",
    "keydiff": f"keydiff:{BLOCKS}",
    "snapkv": "snapkv:cap=40,every=8,window=8",
    "in order": f"h2o:{BLOCKS},recent=4,granularity=chunk,chunk_tokens=2",
    "by page": "h2o:cap=40,every=8,recent=4,granularity=page",
    "decoding": f"h2o:{BLOCKS},recent=4,when=decode",
    "after the prompt": f"h2o:{BLOCKS},recent=4,when=prefill_end",
    "ragged": f"h2o:{BLOCKS},recent=4,budget=ada",
    "projected": f"criticalkv:{BLOCKS},base=(h2o:recent=4),budget=ada",
    "threshold": f"threshold:{BLOCKS},base=(h2o:recent=4),tau=0.8",
    "crushed": f"kvcrush:{BLOCKS},base=(h2o:recent=4)",
    "crushed pages": "kvcrush:cap=32,every=8,granularity=page,base=(h2o:recent=4),share=0.5",
    "heads": f"recent:{BLOCKS},sinks=2,budget=(duo:scores=0.9/0.1/0.3/0.2,streaming=0.6)",
    "settled": f"h2o:{BLOCKS},recent=4,when=decode,budget=squeeze",
}
ALLOW = (
    "recent; recent:budget=(duo:scores=0.5x4); h2o; h2o:budget=ada; h2o:budget=squeeze; tova; "
    "keydiff; snapkv:window=8; kvcrush:base=(h2o:recent=4); criticalkv:base=(h2o:recent=4); "
    "threshold:base=(h2o:recent=4)"
)


@dataclass(kw_only=True)
class Run(Answers):
    engine: Engine
    reasons: list[str] = field(default_factory=list)

    def traces(self) -> dict[str, list]:
        return {
            name: [(k.num_computed, [lane.tolist() for lane in k.retained]) for k in found]
            for name, found in ((n, self.engine.eviction_trace(n)) for n in self.usages)
        }


loaded = cache(load)


def run(
    jobs: dict[str, tuple[list[int], str]],
    *,
    model: str = "llama",
    host: int = 0,
    kv: dict[str, object] | None = None,
    engine: Engine | None = None,
    preempts: int = 0,
    before_step: Callable[[Engine], None] = lambda engine: None,
    memory: int | str = "8MiB",
    page_tokens: int = 4,
    **schedule: object,
) -> Run:
    """Generate for all prompts in one batch, each with its policy.

    Each request is preempted `preempts` times, some steps after an eviction.
    """
    if engine is None:
        options = {"memory": memory, "page_tokens": page_tokens, "swap_space": host}
        options |= {"evict_allow": ALLOW, "enable_prefix_caching": False} | (kv or {})
        config = kv_config(record_evictions=True, **options)
        engine = Engine(loaded(model), config, ScheduleConfig(**schedule))
    rng, reasons = random.Random(1), []
    engine.events.subscribe(
        lambda event: reasons.append(event.data["reason"]) if event.kind == "evicted" else None
    )

    def preempt_some(engine: Engine) -> None:
        before_step(engine)
        for request in list(engine.scheduler.running):
            done = request.progress.num_preemptions
            if request.eviction.num_evictions and done < preempts and rng.random() < 0.4:
                engine.scheduler.lifecycle.preempt(request, "for the test")

    requests = (
        GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=name, evict=evict)
        for name, (prompt, evict) in jobs.items()
    )
    found = answer(engine, requests, before_step=preempt_some)
    return Run(**vars(found), engine=engine, reasons=reasons)


def jobs_of(policies: dict[str, str], count: int = 1, longest: int = 90) -> dict:
    prompts = iter(make_prompts(count * len(policies), longest, seed=11))
    return {
        f"{name} {number}": (next(prompts) + [7] * 20, policy)
        for name, policy in policies.items()
        for number in range(count)
    }


@pytest.fixture(scope="module")
def apart() -> Run:
    return run(jobs_of(RULES), max_num_seqs=1)


@pytest.fixture(scope="module")
def everything() -> Engine:
    """An engine that allows all rules, which do not change each other's logits."""
    return engine_of(evict_allow="all", enable_prefix_caching=False)


def engine_of(model: str = "llama", memory: str = "8MiB", **kv: object) -> Engine:
    return Engine(loaded(model), kv_config(memory=memory, **kv))


def test_a_cap_that_is_never_reached_changes_no_bit_and_no_memory(everything):
    prompts = make_prompts(3, 40, seed=3)
    full = run({f"r{i}": (p, "full") for i, p in enumerate(prompts)}, engine=everything)
    capped = run({f"r{i}": (p, "h2o:cap=80") for i, p in enumerate(prompts)}, engine=everything)
    assert all(usage.evicted_tokens == 0 for usage in capped.usages.values())
    assert largest_difference(full.logits, capped.logits) == 0
    for name, usage in full.usages.items():
        assert usage.kv_peak_bytes == capped.usages[name].kv_peak_bytes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if i % 2 else [])
        for i, name in enumerate(n for n, rule in registered().items() if not rule().rerotates_keys)
    ],
)
def test_recorded_statistics_do_not_change_the_logits_of_a_prompt(everything, name):
    """Up to the first eviction, after the prompt, logits equal those without eviction."""
    rule = policy_of(name, {})
    cap = 290 if name == "lagkv" else 90  # it protects more than others
    held = cap + rule.added_tokens(cap, 16)
    how = ",granularity=page" if rule.needs_pieces else ""
    prompt = [3 + i * i % 60 for i in range(held + 10)]
    full = run({"r": (prompt, "full")}, engine=everything)
    capped = run({"r": (prompt, f"{name}:cap={cap},when=prefill_end{how}")}, engine=everything)
    assert capped.usages["r"].evicted_tokens >= 10
    assert torch.equal(full.logits["r"][0], capped.logits["r"][0])


def test_retained_tokens_do_not_depend_on_other_requests_or_their_policies(apart):
    together = run(jobs_of(RULES) | {"whole": ([5] * 40, "full")})
    del together.usages["whole"], together.logits["whole"]
    assert together.traces() == apart.traces()
    assert largest_difference(together.logits, apart.logits) <= 1e-4
    assert all(usage.evicted_tokens for usage in apart.usages.values())


@pytest.mark.parametrize("when", ["prefill_end", "prefill_and_decode", "decode"])
@pytest.mark.parametrize("options", ["", ",budget=ada", ",granularity=page"])
def test_what_a_threshold_evicts_is_free_at_once(when, options):
    """Lanes hold fewer tokens, in fewer pages, than with the base rule; full ones evict again."""
    prompt, cap, every = [3 + i * i % 90 for i in range(84)], 60, 8
    lanes, used_bytes, evicted = [], [], []
    for name in ("h2o:recent=4", "threshold:base=(h2o:recent=4),tau=1"):
        held: list[np.ndarray] = []
        used: list[int] = []

        def note(engine, held=held, used=used):
            for request in engine.scheduler.running:
                if request.eviction.num_evictions:
                    held.append(engine.scheduler.capacities.lanes.held(request))
                    used.append(engine.pool.kv.memory.used_bytes)

        evict = f"{name},cap={cap},every={every},when={when}{options}"
        found = run({"r": (prompt, evict)}, kv={"evict": evict}, before_step=note)
        evicted.append(found.usages["r"].evicted_tokens)
        lanes, used_bytes = held, [*used_bytes, np.mean(used)]

    assert 0 < evicted[0] < evicted[1]
    assert used_bytes[1] < used_bytes[0]
    later = NEW_TOKENS if when == "prefill_end" else 0
    assert max(of.reshape(2, 2).mean(axis=1).max() for of in lanes) <= cap + later
    if not options:
        for before, after in pairwise(lanes):
            assert (before[after < before] > cap - every).all()


OWN_NUMBERS = {
    "window": f"snapkv:window=5,{BLOCKS}",
    "other window": f"snapkv:window=9,{BLOCKS}",
    "largest head": f"h2o:heads=max,recent=4,{BLOCKS}",
    "sum of heads": f"average:heads=sum,{BLOCKS}",
    "moments": f"expected_attention:sinks=2,{BLOCKS}",
    "heads apart": f"tova:scope=lane,{BLOCKS}",
    "squeezed": f"recent:{BLOCKS},when=decode,budget=squeeze",
    "lazy": f"recent:{BLOCKS},when=prefill_end,budget=lazy",
}
"""Rules whose options determine their statistics, other than the default options."""


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_engine_that_allows_all_rules_serves_each_with_its_own_numbers(codec, preempt):
    jobs, host = jobs_of(OWN_NUMBERS), "8MiB" if preempt == "swap" else 0
    kv = {"evict_allow": "all", "codec": codec}
    together = run(jobs, kv=kv, host=host, preempt=preempt, preempts=1)

    for name, job in jobs.items():
        others = f"{without_numbers(job[1])}; h2o"  # h2o needs one-head pages, as some of all do
        alone = run({name: job}, kv=kv | {"evict": job[1], "evict_allow": others})
        assert together.traces()[name] == alone.traces()[name]
        logits = {name: together.logits[name]}
        assert largest_difference(logits, alone.logits) <= (1e-4 if codec == "none" else 2e-2)
    kept = {name for name, usage in together.usages.items() if not usage.evicted_tokens}
    assert kept <= {"lazy 0"}  # its budget may retain all tokens


def test_statistics_that_a_request_adds_count_in_its_bytes_only():
    """A page of 30 queries of two query heads for each of 2 x 2 lanes; others are as before."""
    engine = engine_of(page_tokens=4, evict_allow="all", enable_prefix_caching=False)
    prompt = [3 + i * i % 60 for i in range(60)]
    window = {size: f"snapkv:window={size},cap=40,every=6" for size in (20, 32, 30)}
    usages = {
        size: run({str(size): (prompt, rule)}, engine=engine).usages[str(size)]
        for size, rule in window.items()
    }
    again = run({"20": (prompt, window[20])}, engine=engine).usages["20"]

    spec = engine.model.spec
    lanes = spec.num_layers * spec.num_kv_heads
    width = 4 * (spec.num_heads // spec.num_kv_heads * spec.head_dim + 1)
    more = usages[30].kv_peak_bytes - usages[20].kv_peak_bytes
    assert abs(more - lanes * 10 * width) <= lanes * 64
    assert usages[20].kv_peak_bytes == again.kv_peak_bytes
    assert usages[20].kv_peak_bytes < usages[30].kv_peak_bytes < usages[32].kv_peak_bytes


def test_requests_may_not_add_statistics_without_limit():
    engine = engine_of(evict_allow="all", enable_prefix_caching=False)
    prompt = [3 + i * i % 60 for i in range(200)]

    def submit(windows: range) -> None:
        for window in windows:
            evict = f"snapkv:window={window},cap=170,every=6"
            engine.submit(GenerationRequest(prompt, greedy(), evict=evict))

    submit(range(1, MAX_GROUPS - len(engine.pool.kv.memory.layout.groups) + 1))
    with pytest.raises(RequestError, match="kinds of statistics and windows"):
        submit(range(1, MAX_GROUPS))
    assert len(engine.pool.kv.memory.layout.groups) == MAX_GROUPS


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_retained_tokens_do_not_depend_on_the_page_size_or_on_chunks(apart, page_tokens):
    jobs = {k: v for k, v in jobs_of(RULES).items() if "page" not in k}
    other, expected = run(jobs, page_tokens=page_tokens), apart.traces()
    assert other.traces() == {name: expected[name] for name in jobs}
    chunked = run(jobs_of(RULES), chunk_tokens=5, max_num_batched_tokens=40)
    assert chunked.traces() == expected


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_a_preempted_request_evicts_the_same_tokens(apart, preempt):
    host = "4MiB" if preempt == "swap" else 0
    often = run(jobs_of(RULES), host=host, preempt=preempt, preempts=2)

    assert sum(usage.preemptions > 1 for usage in often.usages.values()) > len(RULES) // 2
    assert ("replay" in often.reasons) == (preempt == "recompute")
    assert often.traces() == apart.traces()
    assert largest_difference(often.logits, apart.logits) <= 1e-4
    evicted = [{n: u.evicted_tokens for n, u in r.usages.items()} for r in (often, apart)]
    assert evicted[0] == evicted[1]


def test_each_of_several_outputs_evicts_what_it_evicts_alone():
    """Two samples and two beams of one prompt; recomputed, they diverge at the same tokens."""
    prompt, answers = [3 + i * i % 60 for i in range(40)], []
    drawn = SamplingParams(max_tokens=20, n=2, temperature=1.0, seed=5, ignore_eos=True)
    beams = SamplingParams(max_tokens=20, use_beam_search=True, beam_width=2, ignore_eos=True)

    def preempt(engine):
        if engine.num_steps in (12, 20, 28) and engine.scheduler.running:
            engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "for the test")

    kv = kv_config(memory="8MiB", page_tokens=4, evict=RULES["h2o"], enable_prefix_caching=False)
    for act in (lambda engine: None, preempt):
        engine = Engine(loaded("llama"), kv, ScheduleConfig(preempt="recompute"))
        requests = [
            GenerationRequest(prompt, params, request_id=name)
            for name, params in (("drawn", drawn), ("beams", beams))
        ]
        answers.append(answer(engine, requests, before_step=act).tokens)
        assert (engine.scheduler.num_preemptions > 0) == (act is preempt)

    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["recent", "h2o", "tova", "in order"])
def test_prompts_of_ten_times_the_cap_run_in_the_memory_of_the_cap(name):
    prompt = [3 + i * i % 60 for i in range(10 * CAP)]
    done = run({"long": (prompt, RULES[name])}, page_tokens=4)
    remembered = {"h2o": "attention_sum.", "in order": "attention_sum.", "tova": "query_ring.1"}
    used = remembered.get(name, "nothing")
    cap_bytes = sum(
        group.page_class.pages_for(CAP) * group.page_class.page_bytes * group.num_lanes
        for group in done.engine.pool.kv.memory.layout.groups
        if not group.private or f".{used}" in group.name
    )

    assert done.usages["long"].kv_peak_bytes <= cap_bytes
    assert done.usages["long"].evicted_tokens > 8 * CAP


def test_retained_sets_of_each_schedule_are_those_of_its_rule():
    """`recent` by hand: a prompt of 50, cap 24, 6 at a time, 14 output tokens."""
    prompt = list(range(2, 52))
    policies = {
        "prefill_and_decode": [24, 30, 36, 42, 48, 54, 60],
        "decode": [50, 56, 62],
        "prefill_end": [50],
    }
    jobs = {when: (prompt, f"recent:{BLOCKS},when={when}") for when in policies}
    traces = run(jobs).traces()
    for when, moments in policies.items():
        left = CAP if when == "prefill_end" else CAP - EVERY

        assert [length for length, _ in traces[when]] == moments
        for length, kept in traces[when]:
            assert all(lane == list(range(length - left, length)) for lane in kept)


def test_admission_by_caps_and_pressure_precedes_preemption():
    rule = f"h2o:{BLOCKS},recent=4,when=pressure"
    jobs = jobs_of({"a": rule}, count=4, longest=60)
    ample = run(jobs)
    most = max(usage.kv_peak_bytes for usage in ample.usages.values())
    short = run(jobs, memory=int(2 * most))
    assert all(usage.evicted_tokens == 0 for usage in ample.usages.values())
    assert set(short.reasons) == {"pressure"}
    assert short.engine.scheduler.num_preemptions == 0
    prompt = [3 + i % 50 for i in range(200)]
    tight = {"memory": "40KiB", "kv": {"evict_allow": ALLOW}}
    with pytest.raises(NeverFits):
        run({"whole": (prompt, "full")}, **tight)
    assert run({"capped": (prompt, RULES["h2o"])}, **tight).usages["capped"].evicted_tokens


# ---- with cached prefixes ----------------------------------------------------------------------


def check_prefixes(jobs: dict, cached_tokens: dict[str, int]) -> None:
    """Later requests find the prefixes of earlier ones, and give the logits without a cache."""
    runs = []
    for caching in (True, False):
        engine = engine_of(
            page_tokens=4, evict_allow=ALLOW, enable_prefix_caching=caching, record_evictions=True
        )
        done = Run(engine=engine)
        for name, job in jobs.items():
            found = run({name: job}, engine=engine)
            done.logits |= found.logits
            done.usages |= found.usages
        runs.append(done)
    cached, fresh = runs
    found = {name: usage.cached_tokens for name, usage in cached.usages.items()}
    assert found == cached_tokens
    assert cached.traces() == fresh.traces()
    assert largest_difference(cached.logits, fresh.logits) <= 1e-4


def test_cached_prefixes_are_shared_up_to_evictions_and_stored_statistics():
    prompt = [3 + i * i % 60 for i in range(50)]
    rules = {"first": "full", "recent": RULES["recent"], "keydiff": RULES["keydiff"]}
    rules |= {"decoding": f"recent:{BLOCKS},when=decode", "whole": "full"}
    cached = {"first": 0, "recent": CAP, "keydiff": CAP, "decoding": 48, "whole": 48}
    check_prefixes({name: (prompt, rule) for name, rule in rules.items()}, cached)

    # the first prompt stores them at its last block, the second where it diverged from it
    same, rule = [3 + i * i % 60 for i in range(37)], f"h2o:{BLOCKS},recent=4,when=decode"
    jobs = {
        "first": ([*same, *[5] * 20], rule),
        "again": ([*same, *[5] * 20, 9, 9], rule),
        "other": ([*same, *[6] * 20], rule),
        "third": ([*same, *[8] * 20], rule),
        "tova": ([*same, *[5] * 20], f"tova:{BLOCKS},when=decode"),
    }
    check_prefixes(jobs, {"first": 0, "again": 56, "other": 0, "third": 36, "tova": 56})


@pytest.mark.parametrize("when", ["prefill_end", "decode", "prefill_and_decode"])
def test_a_rule_with_the_newest_queries_needs_no_statistics_of_blocks_before_them(when):
    """Window 8, blocks of 4: a prompt of 44 or 45 tokens starts at 36, one of 42 at 32."""
    same = [3 + i * i % 60 for i in range(37)]
    rule = f"snapkv:cap=40,every=8,window=8,when={when}"
    jobs = {
        "first": ([*same, *[5] * 20], rule),
        "again": ([*same, *[5] * 20, 9, 9], rule),
        "other": ([*same, *[6] * 20], rule),
        "short": ([*same, *[7] * 5], rule),
        "next": ([*same, *[4] * 7], rule),  # its queries after 40 tokens are not stored: too few
        "after": ([*same, *[4] * 7, 9], rule),
    }
    early = {"again": 40, "other": 32, "short": 32, "next": 32, "after": 40}
    later = {"again": 56, "other": 36, "short": 32, "next": 36, "after": 36}
    check_prefixes(jobs, {"first": 0} | (early if when == "prefill_and_decode" else later))


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("started_with", "requested", "says"),
    [
        ({}, "h2o:cap=99", "serves full, got 'h2o:cap=99'; start it with --evict-allow 'h2o'"),
        ({"evict": RULES["recent"]}, "tova:cap=90", "serves full, recent, got 'tova:cap=90'"),
        ({"evict_allow": "recent"}, "h2o:cap=90", "serves full, recent"),
        ({"evict_allow": "snapkv"}, "snapkv:cap=90,window=9", "--evict-allow 'snapkv:window=9'"),
        ({"evict_allow": "tova"}, "tova:cap=90,scope=lane", "needs one-head pages"),
        ({"evict": "sinks:cap=9,every=1"}, "sinks:cap=90,budget=(duo:scores=1x4)", "one-head page"),
        ({"evict_allow": "all"}, "h2o:cap=9,budget=(duo:scores=/etc/hosts)", "name the file /etc/"),
        ({"evict_allow": "all"}, "h2o:cap=90,budget=(duo:scores=smollm2)", "expected 4 scores"),
        ({"evict": RULES["h2o"], "evict_allow": "none"}, "h2o:cap=90", "may not name a rule"),
        ({"evict_allow": "all"}, "h2o:cap=9,every=9", "expected 1 <= every < cap"),
        ({"evict_allow": "all"}, "h2p:cap=9", "unknown eviction policy 'h2p'"),
        ({"evict_allow": "h2o"}, "h2p:cap=9", "unknown eviction policy 'h2p'"),
        ({"evict_allow": "h2o"}, "snapkv:cap=32", "serves full, h2o, got 'snapkv'; start"),
        ({"evict_allow": "all"}, "h2o:cap=9000,every=3000", "a step of 2048 tokens is smaller"),
        ({"evict_allow": "all"}, "h2o:cap=1KiB", "B for one page of 16 tokens in every lane"),
    ],
)
def test_a_policy_that_the_engine_does_not_allow_is_rejected_by_name(started_with, requested, says):
    engine = engine_of(memory="2MiB", **started_with)

    with pytest.raises(RequestError, match=re.escape(says)):
        engine.submit(GenerationRequest([3, 4], greedy(), evict=requested))
    engine.check()
    assert not engine.has_work


@pytest.mark.parametrize("name", registered())
def test_a_default_rule_in_percent_serves_every_length_and_keeps_what_fits(name):
    pages = ",granularity=page" if policy_of(name, {}).needs_pieces else ""
    jobs = {str(n): ([2 + i % 90 for i in range(n)], None) for n in (1, 2, 9, 40)}

    found = run(jobs, kv={"evict": f"{name}:cap=50%{pages}", "evict_allow": "none"})

    rules = found.engine.pool.rules
    for text, (prompt, _) in jobs.items():
        assert len(found.logits[text]) == NEW_TOKENS
        if rules.resolve_default(len(prompt)).keeps_all(len(prompt), len(prompt) + NEW_TOKENS - 1):
            assert found.usages[text].evicted_tokens == 0


@pytest.mark.parametrize("name", registered())
@pytest.mark.parametrize("model", ["deepseek_v3", "glm_moe_dsa"])
def test_rules_on_latents_retain_what_attention_to_heads_retains(model, name):
    """The reference expands all latents to keys and values of heads; others fold queries.

    Of glm_moe_dsa, the second layer attends to what the index of the first selects.
    """
    pages = ",granularity=page" if policy_of(name, {}).needs_pieces else ""
    own = {"lagkv": ",lag=6", "snapkv": ",window=6", "kvcrush_openvino": ",blocks=1"}.get(name, "")
    options = {"evict": f"{name}:cap=40,every=8{own}{pages}", "evict_allow": "none"}
    if policy_of(name, {}).not_on_latents:
        with pytest.raises(UnsoundCombination, match="stores latents instead of keys"):
            run({}, model=model, kv=options)
        with pytest.raises(UnsoundCombination, match="stores latents instead of keys"):
            run({}, model=model, kv={"evict_allow": f"h2o; kvcrush:base={name}"})
        return
    if name == "streaming" and model == "glm_moe_dsa":
        with pytest.raises(UnsoundCombination, match="index keys, which are stored after RoPE"):
            run({}, model=model, kv=options)
        return
    jobs = jobs_of({"own": None}, count=3)
    backends = ("auto",) if name == "streaming" else ("reference", "gathered", "auto")
    first, *others = (
        run(jobs, model=model, kv=options | {"attention": backend}) for backend in backends
    )

    for request, usage in first.usages.items():  # kvzip evicts at the end of the prompt
        assert usage.evicted_tokens or len(jobs[request][0]) <= 40
    for other in others:
        assert other.traces() == first.traces()
        assert largest_difference(other.logits, first.logits) <= 1e-4


@pytest.mark.parametrize(
    ("codec", "evict"),
    [
        ("int8/int8", "none"),
        ("int8+sinks=4+residual=16", "recent:cap=32,every=4"),
        ("int4_page/int4:group=4", "h2o:cap=40,every=8,granularity=page"),
        ("int4_page/int4", "keydiff:cap=40,every=8"),
        ("int4+residual=16+promoted=8:int4", "h2o:cap=40,every=8"),
        ("int8+plain_layers=1", "h2o:cap=40,every=8"),
    ],
)
def test_selected_latents_are_read_in_the_precision_of_the_codec(codec, evict):
    """Codes, tokens in full precision, and promoted ones; layers of two kinds."""
    jobs = jobs_of({"own": None}, count=3)
    kv = {"codec": codec, "evict_allow": "none", **({} if evict == "none" else {"evict": evict})}
    first, other = (
        run(jobs, model="glm_moe_dsa", kv=kv | {"attention": backend})
        for backend in ("reference", "auto")
    )
    assert other.traces() == first.traces()
    assert largest_difference(other.logits, first.logits) <= 1e-4


def test_refused_bases_on_latents_and_unknown_rules_and_full_that_is_always_allowed():
    engine = engine_of("deepseek_v3", "2MiB", evict_allow="kvcrush")
    for base in ("knorm", "(value_norm:base=h2o)", "(criticalkv:base=h2o)"):
        with pytest.raises(RequestError, match="stores latents instead of keys"):
            engine.submit(GenerationRequest([3, 4], greedy(), evict=f"kvcrush:base={base},cap=40"))
    whole = run({"r": ([5] * 60, "full")}, kv={"evict": RULES["h2o"], "evict_allow": "none"})
    assert whole.usages["r"].evicted_tokens == 0
    with pytest.raises(ConfigError, match="unknown eviction policy"):
        engine_of(evict_allow="h2p")


def test_admission_counts_each_policy_and_traces_are_recorded_on_request():
    engine, needed = engine_of(evict_allow=ALLOW, page_tokens=4), {}
    prompt = [3 + i % 40 for i in range(120)]
    for name in ("recent", "h2o", "decoding", "full"):
        rule = RULES.get(name, name)
        engine.submit(GenerationRequest(prompt, greedy(), request_id=name, evict=rule))
    for request in engine.scheduler.waiting.of_tenant("default"):
        need = need_of(request, request.final_tokens)
        needed[request.request_id] = engine.scheduler.peaks.peak_bytes(need)

    assert needed["recent"] < needed["h2o"] < needed["full"] < needed["decoding"]
    for name, usage in answer(engine).usages.items():
        assert usage.kv_peak_bytes <= needed[name]

    engine = engine_of(memory="2MiB", evict=RULES["recent"])
    answer(engine, requests_of({"kept": [5] * 60}, 8, record_evictions=True))
    answer(engine, requests_of({"gone": [5] * 60}, 8))
    assert engine.eviction_trace("kept")[0].num_computed == CAP
    with pytest.raises(RequestError, match="record_evictions"):
        engine.eviction_trace("gone")


@pytest.mark.parametrize(
    "budget", ["(lazy:threshold=0)", "(fastgen:share=0.3)", "(squeeze:share=0.9)"]
)
@pytest.mark.parametrize("when", ["decode", "prefill_end"])
def test_budgets_finalized_after_prefill_evict_only_prompts_over_the_cap(budget, when):
    """The slots that they reserve for a lane before are not its cap."""
    rule = f"h2o:cap=40,every=4,recent=4,when={when},budget={budget}"
    prompts = {"over": [3 + i * i % 60 for i in range(42)], "under": [5] * (40 - NEW_TOKENS)}
    cut = run({n: (p, rule) for n, p in prompts.items()}, kv={"evict": rule, "evict_allow": ""})
    assert cut.usages["over"].evicted_tokens
    assert not cut.usages["under"].evicted_tokens


def test_a_pending_budget_reserves_its_largest_cap():
    """Squeeze, cap 24 and 11 of it in every lane: 14 are divided, at most 24 of them and 10."""
    engine = engine_of(memory="2MiB", evict=RULES["settled"])
    engine.submit(GenerationRequest([5] * 60, greedy(40), request_id="r"))
    [request] = engine.scheduler.waiting.of_tenant("default")
    assert request.eviction.pending
    assert request.eviction.spec.lane_capacities == (34,) * 4


# ---- prompts that are computed layer by layer ----------------------------------------------------

CHUNK, PROMPT = 40, [3 + i * i % 60 for i in range(110)]  # three chunks
AT_THE_END = "when=prefill_end"
BY_LAYER = [
    f"recent:cap=24,sinks=2,{AT_THE_END}",
    f"random:cap=20,{AT_THE_END}",
    f"h2o:cap=24,recent=4,{AT_THE_END}",
    f"h2o:cap=40,recent=4,granularity=page,{AT_THE_END}",
    f"h2o:cap=30,recent=4,budget=pyramid,{AT_THE_END}",
    f"sinks:cap=34,budget=(duo:scores=0.1/0.3/0.4/0.2),{AT_THE_END}",
    f"snapkv:cap=40,window=8,{AT_THE_END}",
    f"expected_attention:cap=24,{AT_THE_END}",
    f"kvcrush:cap=24,base=(h2o:recent=4),{AT_THE_END}",
]
NOT_BY_LAYER = [
    f"h2o:cap=24,recent=4,budget=ada,{AT_THE_END}",
    f"recent:cap=24,budget=squeeze,{AT_THE_END}",
]


def run_chunks(
    rule: str, *, prompts=(PROMPT,), model="llama", memory="8MiB", preempts=0, **kv
) -> list[Run]:
    """Run prompts one after the other in one engine, in chunks of `CHUNK` tokens."""
    options = {"evict_allow": "all", "record_evictions": True, "page_tokens": 4} | kv
    schedule = ScheduleConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4)
    engine = Engine(loaded(model), kv_config(memory=memory, **options), schedule)
    jobs = ({str(number): (prompt, rule)} for number, prompt in enumerate(prompts))
    return [run(job, engine=engine, preempts=preempts) for job in jobs]


def by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all layers of a chunk before the next chunk, and evict after the last one."""
    monkeypatch.setattr(EvictionSpec, "cuts_by_layer", False)


@pytest.mark.parametrize(
    ("rule", "model", "codec"),
    [
        *((rule, "llama", "none") for rule in BY_LAYER + NOT_BY_LAYER),
        *((BY_LAYER[2], model, "none") for model in ("wide_llama", "gemma3", "gpt2", "gpt_oss")),
        *((BY_LAYER[2], model, "none") for model in ("deepseek_v3", "deepseek_v32")),
        *((BY_LAYER[2], "llama", codec) for codec in ("int4", "int8+sinks=2+residual=8")),
    ],
)
def test_prompt_computed_by_layer_is_evicted_and_continued_as_by_chunk(
    rule, model, codec, monkeypatch
):
    [ours] = run_chunks(rule, model=model, codec=codec, enable_prefix_caching=False)
    by_chunk(monkeypatch)
    [reference] = run_chunks(rule, model=model, codec=codec, enable_prefix_caching=False)

    assert ours.traces() == reference.traces()
    assert largest_difference(ours.logits, reference.logits) == 0
    lower = ours.usages["0"].kv_peak_bytes < reference.usages["0"].kv_peak_bytes
    assert lower == (rule in BY_LAYER and model != "gpt_oss")  # its only full layer is one of two


@pytest.mark.parametrize("codec", ["none", "int8+plain_layers=1"])
def test_recomputed_prompt_is_cut_by_layer_as_recorded(codec):
    """A layer is cut again while later layers, of another lane group too, hold no token."""
    rule = BY_LAYER[0]
    options = {"codec": codec, "enable_prefix_caching": False, "evict": rule, "evict_allow": "none"}
    options["model"] = "qwen2_window"
    [expected], [ours] = (run_chunks(rule, preempts=n, **options) for n in (0, 2))
    assert ours.usages["0"].preemptions == ours.reasons.count("replay") == 2
    assert ours.traces() == expected.traces()
    assert largest_difference(ours.logits, expected.logits) <= 1e-4


@pytest.mark.parametrize("rule", [BY_LAYER[0], BY_LAYER[2], BY_LAYER[5], BY_LAYER[6]])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_prefixes_of_prompts_computed_by_layer_are_cached_as_by_chunk(rule, model, monkeypatch):
    other = PROMPT[:80] + [5] * 40
    prompts = [PROMPT, other, PROMPT, [*other, 6, 7, 8]]
    ours = run_chunks(rule, model=model, prompts=prompts)
    by_chunk(monkeypatch)
    reference = run_chunks(rule, model=model, prompts=prompts)

    for name, (one, expected) in enumerate(zip(ours, reference, strict=True)):
        assert one.traces() == expected.traces()
        assert largest_difference(one.logits, expected.logits) == 0
        cached = expected.usages[str(name)].cached_tokens
        assert one.usages[str(name)].cached_tokens == cached
        assert cached or name < 2


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("statistics", ["recent:sinks=2", "snapkv:window=8"])
def test_peak_of_a_prompt_computed_by_layer_is_one_layer_and_the_caps(statistics, caching):
    """Eight layers, 25 % retained: (1 + 7 / 4) / 8 of full KV, and the ends of pages."""
    model, peaks = load("llama", times=4), []
    options = {"enable_prefix_caching": caching, "evict_allow": ALLOW, "page_tokens": 4}
    for rule in ("full", f"{statistics},cap=25%,{AT_THE_END}"):
        config = kv_config(memory="8MiB", **options)
        engine = Engine(model, config, ScheduleConfig(max_num_batched_tokens=80))
        found = answer(engine, requests_of({"r": PROMPT * 2}, 2, evict=rule))
        peaks.append(found.usages["r"].kv_peak_bytes)
        assert engine.stats().kv_peak_bytes <= 1.2 * peaks[-1]  # copies of cached pages
    assert peaks[1] <= 0.4 * peaks[0]


def test_prompt_that_fits_only_by_layer_is_counted_and_runs(monkeypatch):
    rule, memory = BY_LAYER[0], "27KiB"  # full KV has 34
    options = {"memory": memory, "evict": rule, "evict_allow": "none"}
    [ours] = run_chunks(rule, **options)
    with pytest.raises(NeverFits, match="need 35,840 B"):
        run_chunks(rule, **options, prompts=[PROMPT * 2])
    by_chunk(monkeypatch)
    assert ours.usages["0"].preemptions == 0
    with pytest.raises(NeverFits, match="need 32,768 B"):
        run_chunks(rule, **options)


def test_error_of_a_policy_between_layers_ends_its_request_only(monkeypatch):
    evict, calls = PolicyEvictor.evict, []

    def fail_at_second_layer(evictor, request, keep, *, min_gain=None):
        calls.append(request.request_id)
        if request.request_id == "bad" and calls.count("bad") == 2:
            raise PolicyError("broken on purpose")
        return evict(evictor, request, keep, min_gain=min_gain)

    monkeypatch.setattr(PolicyEvictor, "evict", fail_at_second_layer)
    engine = engine_of(evict=BY_LAYER[0], page_tokens=4)
    for name in ("good", "bad"):
        engine.submit(GenerationRequest(PROMPT, greedy(4), request_id=name))
    ended = {}
    while engine.has_work:
        ended |= {d.request_id: d.error for d in engine.step() if d.finish_reason is not None}

    assert ended == {"good": None, "bad": "broken on purpose"}
    engine.check()


def test_prompt_whose_hidden_states_exceed_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr("quire.engine.core.free_host_bytes", lambda: 10_000)
    engine = engine_of(evict=BY_LAYER[0])
    engine.submit(GenerationRequest(PROMPT[:20], greedy(4)))  # nothing is evicted
    with pytest.raises(RequestError, match=r"110 prompt tokens .* hold 21,120 B of hidden states"):
        engine.submit(GenerationRequest(PROMPT, greedy(4)))


@pytest.mark.parametrize(
    ("rules", "chosen"),
    [
        (("recent:budget=(duo:scores=smollm2)", "keydiff"), "keydiff"),  # other KV heads
        (("streaming", "keydiff"), "streaming"),
        (("h2o:budget=lots", "tova", "keydiff"), "tova"),  # not a budget
        (("kvzip", "keydiff"), "keydiff"),  # no pass while the prompt is evicted
    ],
)
def test_auto_is_the_first_recommended_rule_that_the_engine_serves(monkeypatch, rules, chosen):
    monkeypatch.setattr(recommended, "RECOMMENDED", rules)
    text = f"{BLOCKS},when=prefill_and_decode"
    prompts = {str(i): prompt for i, prompt in enumerate(make_prompts(3, 60, seed=1))}

    def outputs(evict):
        engine = engine_of(memory="1MiB", evict=evict)
        tokens = answer(engine, requests_of(prompts, NEW_TOKENS)).tokens
        return engine.pool.rules.default.text, tokens

    assert outputs(f"auto:{text}") == outputs(f"{chosen}:{text}")
    name = "tova" if "tova" in rules else "keydiff"
    for allow, served in (("tova; keydiff", name), ("all", chosen)):
        engine = engine_of(memory="1MiB", evict="full", evict_allow=allow)
        engine.submit(GenerationRequest([5] * 40, greedy(2), evict=f"auto:{text}"))
        assert engine.requests()[0].spec.evict == f"{served}:{text}"


# ---- against Transformers ------------------------------------------------------------------------

SINKS, LATER = 2, 30
EVICT = f"recent:{BLOCKS},sinks={SINKS}"
LONG = dict(zip("abcd", make_prompts(4, 10 * CAP, seed=5), strict=True)) | {
    "e": [3, 5, 7] * (10 * CAP // 3)
}


def logits_of(name: str, prompts=LONG, device: str = "cpu", **schedule: int) -> dict:
    kv = kv_config(memory="32MiB", page_tokens=4, evict=EVICT)
    engine = Engine(load(name, device), kv, ScheduleConfig(**schedule))
    return answer(engine, requests_of(prompts, LATER)).logits


def seen_under_recent(length: int) -> torch.Tensor:
    """[query, key]: the keys that a query attends to, by the rule.

    Up to the cap all before it. After that tokens are read `every` at a time: a query finds the
    sinks, the newest that were left when its chunk began, and its chunk up to itself.
    """
    query, key = torch.arange(length)[:, None], torch.arange(length)
    chunk_start = CAP + (query - CAP) // EVERY * EVERY
    kept = (key < SINKS) | (key >= chunk_start - (CAP - EVERY - SINKS))
    return (key <= query) & (kept | (query < CAP))


def seen_in_window(length: int) -> torch.Tensor:
    query, key = torch.arange(length)[:, None], torch.arange(length)
    return (key <= query) & (key > query - zoo.WINDOW_TOKENS)


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3"])
def test_logits_equal_transformers_with_the_evicted_keys_masked(name):
    model, expected = zoo.build(name), logits_of(name)
    for key, prompt in LONG.items():
        ours = torch.stack(expected[key])
        ids = torch.tensor([prompt + ours[:-1].argmax(-1).tolist()])
        full, window = seen_under_recent(ids.shape[1]), seen_in_window(ids.shape[1])
        mask: object = additive(full)
        if name == "gemma2":  # its layers take turns
            mask = {"full_attention": additive(full), "sliding_attention": additive(window)}
        theirs = model(ids, attention_mask=mask, use_cache=False).logits[0]

        assert len(ids[0]) > CAP
        assert float((ours - theirs[len(prompt) - 1 :]).abs().max()) <= 1e-4
    alone = logits_of(name, max_num_seqs=1)
    chunked = logits_of(name, chunk_tokens=7, max_num_batched_tokens=40)
    assert largest_difference(expected, alone) <= 1e-4
    assert largest_difference(expected, chunked) <= 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_eviction_on_cuda_gives_the_logits_of_the_cpu(name):
    got = logits_of(name, device="cuda")

    on_cpu = {key: [row.cpu() for row in rows] for key, rows in got.items()}
    assert largest_difference(logits_of(name), on_cpu) <= 1e-3


def test_errors_of_a_policy_text_name_the_mistake():
    for text, hint in {
        "recant:cap=9": "recent",
        "recent": "needs a cap",
        "recent:cap=9,every=9": "every < cap",
        "recent:cap=9,every=4,sinks=5": "the rule needs 6",
        "recent:cap=9,every=4,sink=5": "sinks",
        "recent:cap=many": "expected a cap such as 512",
        "recent:cap=100,every=90": "step of 64 tokens",
        "full:cap=3": "no options",
    }.items():
        kv = kv_config(memory="1MiB", evict=text)
        schedule = ScheduleConfig(max_num_batched_tokens=64)
        with pytest.raises(ConfigError, match=hint):
            Engine(loaded("llama"), kv, schedule)
    with pytest.raises(UnsoundCombination, match="every layer of the model has a sliding window"):
        engine_of("mistral", evict=EVICT)
