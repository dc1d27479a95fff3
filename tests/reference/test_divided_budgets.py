"""Budgets that divide the cap by the cache: bounded at every step, refined with the prompt."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.errors import RequestError, UnsoundCombination
from quire.eviction.eviction_rules import EvictionRules
from quire.layout.eviction import PREFILL_AND_DECODE, PRESSURE
from quire.layout.model import HeadShape, LayerSpec
from reference.test_eviction_engine import run
from support.engines import greedy, load
from support.kv_options import kv_config
from support.model_specs import small_spec

CAP, EVERY = 30, 5
BUDGETS = ["(squeeze:share=0.5)", "(lazy:last=6,sinks=1,threshold=0.45)"]
BUDGETS += ["(fastgen:share=0.5)", "ada"]
RULES = ["h2o:recent=3,", "kvcrush:base=(h2o:recent=3),sets=head,share=0.5,"]
PROMPTS = {"a": [3 + i * i % 60 for i in range(95)], "b": [5 + i * i % 53 for i in range(70)]}

budgets = pytest.mark.parametrize("budget", BUDGETS, ids=lambda text: text.strip("()")[:4])
rules = pytest.mark.parametrize("rule", RULES, ids=["h2o", "kvcrush"])


def rule_of(rule: str, budget: str, when: str, piece: str = "") -> str:
    return f"{rule}cap={CAP},every={EVERY},when={when},budget={budget}{piece}"


def run_watched(text, watch=lambda engine: None, *, page_tokens=4, **options):
    jobs = {name: (prompt, text) for name, prompt in PROMPTS.items()}
    kv = {"evict": text, "evict_allow": ""}
    return run(jobs, kv=kv, before_step=watch, page_tokens=page_tokens, **options)


def held_slots(engine: Engine, request) -> list[int]:
    table = engine.pool.kv.memory.tables["full"]
    return table.num_slots[request.memory.row].tolist()


@budgets
@rules
@pytest.mark.parametrize("piece", ["", ",granularity=chunk,chunk_tokens=2"])
def test_lanes_hold_at_max_the_cap_on_average_at_every_step(rule, budget, piece):
    """Also in the steps of prefill, before the budget has read the whole prompt."""
    divisions: dict[str, set] = {name: set() for name in PROMPTS}
    during_prefill = set()

    def watch(engine: Engine) -> None:
        for request in engine.scheduler.running:
            held, spec = held_slots(engine, request), request.eviction.spec
            assert sum(held) <= CAP * len(held)
            if spec.lane_capacities is None:
                continue
            assert sum(spec.lane_capacities) <= CAP * len(spec.lane_capacities)
            assert all(n <= cap for n, cap in zip(held, spec.lane_capacities, strict=True))
            divisions[request.request_id].add(spec.lane_capacities)
            if request.eviction.pending:
                during_prefill.add(request.request_id)

    done = run_watched(rule_of(rule, budget, PREFILL_AND_DECODE, piece), watch)

    assert all(usage.evicted_tokens for usage in done.usages.values())
    if budget != "ada":
        assert all(divisions.values())
        assert during_prefill == set(PROMPTS)
    if "squeeze" in budget:  # the others compare attention, which a random model spreads evenly
        assert any(len(set(caps)) > 1 for found in divisions.values() for caps in found)


@budgets
def test_lanes_are_reduced_to_the_cap_on_average_within_the_admission_bound(budget):
    """A request is divided when it evicts; while it is not pressed it holds all tokens."""
    pressed: dict[str, int] = {}

    def watch(engine: Engine) -> None:
        for request in list(engine.scheduler.running):
            done, prompt = request.progress.num_computed, len(request.prompt_token_ids)
            held = held_slots(engine, request)
            if request.request_id not in pressed:
                assert held == [done] * len(held)
            if done > prompt + 3 and request.request_id not in pressed:
                assert engine.scheduler.capacities.evict_under_pressure([request])
                pressed[request.request_id] = done
                held = held_slots(engine, request)
                assert sum(held) <= CAP * len(held)
                assert not request.eviction.pending

    done = run_watched(rule_of(RULES[0], budget, PRESSURE), watch)

    assert set(pressed) == set(PROMPTS)
    assert all(usage.evicted_tokens for usage in done.usages.values())

    # unequal lanes need at most one more page each than equal ones
    text = rule_of(RULES[0], budget, PREFILL_AND_DECODE)
    wide = run_watched(text)
    needed = max(usage.kv_peak_bytes for usage in wide.usages.values())
    assert run_watched(text, memory=4 * needed).traces() == wide.traces()


def test_a_division_without_eviction_under_pressure_is_undone():
    """Nothing is evicted from a request whose lanes are within the cap."""

    def watch(engine: Engine) -> None:
        for request in list(engine.scheduler.running):
            if 0 < request.progress.num_computed <= CAP:
                assert not engine.scheduler.capacities.evict_under_pressure([request])
                assert request.eviction.pending
                assert request.eviction.spec.lane_capacities is None

    text = rule_of(RULES[0], BUDGETS[0], PRESSURE)
    run_watched(text, watch, chunk_tokens=7, max_num_batched_tokens=14)


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@budgets
def test_a_preempted_request_is_divided_as_without_preemption(budget, preempt):
    text = rule_of(RULES[1], budget, PREFILL_AND_DECODE)
    host = "4MiB" if preempt == "swap" else 0
    often = run_watched(text, host=host, preempt=preempt, preempts=3)
    assert sum(usage.preemptions for usage in often.usages.values()) > 0
    assert often.traces() == run_watched(text).traces()


_WIDE_VALUES = HeadShape(query_heads=4, kv_heads=2, key_dim=8, value_dim=16)
_WIDE_KEYS = replace(_WIDE_VALUES, key_dim=16)
_ONE_HEAD = HeadShape(query_heads=4, kv_heads=1, key_dim=8, value_dim=8)


KEYS, VALUES = LayerSpec(heads=_WIDE_KEYS), LayerSpec(heads=_WIDE_VALUES)


@pytest.mark.parametrize(
    ("layers", "rule", "reason"),
    [
        ((None, VALUES), "h2o:cap=16,budget=fastgen", ""),
        ((None, VALUES), "value_norm:cap=16,budget=fastgen", "unequal sizes"),
        ((None, KEYS), "keydiff:cap=16,budget=fastgen", "unequal sizes"),
        ((None, KEYS), "keydiff:cap=16,budget=squeeze", ""),
        ((None, replace(KEYS, window=8)), "keydiff:cap=16,budget=fastgen", ""),
        ((None, None, LayerSpec(source=1)), "snapkv:cap=40,budget=fastgen", "unequal sizes"),
        ((None, LayerSpec(source=0)), "snapkv:cap=40,budget=fastgen", ""),
        ((None, LayerSpec(heads=_ONE_HEAD)), "h2o:cap=16", "unequal numbers of them"),
    ],
)
def test_budgets_over_layers_whose_records_differ_are_refused(layers, rule, reason):
    refused = pytest.raises(UnsoundCombination, match=reason) if reason else nullcontext()
    with refused:
        EvictionRules(rule, "", model=small_spec(*layers), page_tokens=4, codec="float32")


def test_ada_is_refused_for_a_model_with_one_kv_head():
    ada = "h2o:recent=3,cap=16,every=4,budget=ada"
    with pytest.raises(UnsoundCombination, match="this model has one KV head per layer"):
        Engine(load("llama_mqa"), kv_config(memory="1MiB", evict=ada))
    engine = Engine(load("llama_mqa"), kv_config(memory="1MiB", evict_allow="h2o:budget=ada"))
    with pytest.raises(RequestError, match="this model has one KV head per layer"):
        engine.submit(GenerationRequest([5] * 30, greedy(4), evict=ada))
