"""What a policy promises is checked: when it is registered, and whenever it is asked."""

import asyncio
from dataclasses import dataclass, field

import pytest
import torch

import engines
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import Engine
from quire.engine.eviction import Evictor
from quire.errors import ConfigError, PolicyError
from quire.kv.config import KVConfig
from quire.policies import registry
from quire.policies.base import EvictionPolicy, KVView, ScorePolicy
from quire.policies.recent import Recent

VIEW = KVView(torch.tensor([[0, 1, 2, 3], [3, 2, 1, -1]]), next_position=4)


@dataclass(frozen=True)
class Masked(EvictionPolicy):
    """Gives whatever mask it was made with."""

    make_mask: object

    def select(self, view, keep):
        return self.make_mask(view, keep)


@dataclass(frozen=True)
class Scored(ScorePolicy):
    """Gives whatever scores it was made with, and protects the first slots."""

    scores: torch.Tensor
    num_protected: int = 0

    def score(self, view):
        return self.scores

    def protected(self, view):
        return view.live & (view.positions < self.num_protected)


@pytest.fixture
def policies(monkeypatch):
    monkeypatch.setattr(registry, "_POLICIES", dict(registry.registered()))


def test_equal_scores_keep_the_lower_positions():
    kept = Scored(torch.zeros(2, 4)).select(VIEW, keep=2)

    assert kept.tolist() == [[True, True, False, False], [False, True, True, False]]


def test_recent_keeps_sinks_and_the_newest():
    kept = Recent(sinks=1).select(KVView(torch.tensor([[4, 0, 2, 3, 1]]), next_position=5), keep=3)

    assert kept.tolist() == [[True, True, False, True, False]]


def test_a_score_that_is_not_finite_is_refused_only_where_a_token_lives():
    scores = torch.zeros(2, 4)
    scores[1, 3] = torch.nan
    Scored(scores).select(VIEW, keep=2)

    scores[0, 0] = torch.inf
    with pytest.raises(PolicyError, match="not finite"):
        Scored(scores).select(VIEW, keep=2)


def test_more_protected_slots_than_may_stay_are_refused():
    with pytest.raises(PolicyError, match="protects 3 slots of a lane, but 2 may stay"):
        Scored(torch.zeros(2, 4), num_protected=3).select(VIEW, keep=2)


@pytest.mark.parametrize(
    ("make_mask", "hint"),
    [
        (lambda view, keep: view.live, "must keep 18"),
        (lambda view, keep: torch.zeros(3, 5, dtype=torch.bool), "bool [2, 24]"),
        (lambda view, keep: view.positions.double(), "got torch.float64"),
        (lambda view, keep: view.live.tolist(), "got a list"),
        (lambda view, keep: view.positions[7], "policy Masked raised IndexError: "),
        (lambda view, keep: {}["key"], "policy Masked raised KeyError: 'key'"),
    ],
    ids=["count", "shape", "type", "list", "torch error", "python error"],
)
def test_a_mask_that_breaks_the_contract_fails_its_request_only(make_mask, hint):
    model = engines.load("llama")
    config = KVConfig(memory="1MiB", page_tokens=4, evict="recent:cap=24,every=6")
    engine = Engine(model, config)
    engine.scheduler._caps._evict = Evictor(engine.pool.kv, Masked(make_mask))
    engine.submit([3] * 40, engines.greedy(), request_id="long")
    engine.submit([4] * 5, engines.greedy(), request_id="short")

    last = {}
    while engine.has_work:
        last |= {delta.request_id: delta for delta in engine.step()}

    assert last["long"].finish_reason == "error"
    assert hint in last["long"].error
    assert last["short"].finish_reason == "length"
    engine.check()


@dataclass(frozen=True)
class NoDefault(Recent):
    size: int = field(kw_only=True)


@dataclass(frozen=True)
class NoneDefault(Recent):
    size: int | None = None


@dataclass(frozen=True)
class ListDefault(Recent):
    size: list = field(default_factory=list)


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize("policy", [NoDefault, NoneDefault, ListDefault])
def test_an_option_without_a_plain_default_is_refused_when_its_policy_is_registered(policy):
    with pytest.raises(ConfigError, match="option 'size' of policy 'odd' needs a default"):
        registry.register("odd")(policy)


@pytest.mark.usefixtures("policies")
def test_a_class_that_is_no_dataclass_is_refused():
    class Plain(EvictionPolicy):
        def select(self, view, keep):
            return view.live

    with pytest.raises(ConfigError, match="dataclass"):
        registry.register("plain")(Plain)


@pytest.mark.usefixtures("policies")
def test_a_name_is_given_once():
    with pytest.raises(ConfigError, match="two policies are called 'recent'"):
        registry.register("recent")(dataclass(frozen=True)(type("Other", (Recent,), {})))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "recent:cap=10",
            "expected a cap of 65 tokens or more, of which 64 leave at a time, got 10",
        ),
        ("recent:cap=64", "expected a cap of 65 tokens or more"),
        ("recent:cap=68,sinks=4", "expected a cap of 69 tokens or more"),
        ("recent:cap=-1", "expected a cap of 65 tokens or more"),
    ],
)
def test_a_small_cap_is_refused_without_a_word_on_options_nobody_gave(text, says):
    with pytest.raises(ConfigError) as refused:
        registry.make_eviction(text)

    assert says in str(refused.value)
    assert "every" not in str(refused.value)


def test_the_smallest_cap_that_is_asked_for_is_taken():
    assert registry.make_eviction("recent:cap=65").spec.cap == 65
    assert registry.make_eviction("recent:cap=69,sinks=4").spec.cap == 69


def test_a_server_goes_on_after_a_policy_that_raises():
    def broken(view, keep):
        raise ZeroDivisionError("no budget")

    config = KVConfig(memory="1MiB", page_tokens=4, evict="recent:cap=24,every=6")
    engine = Engine(engines.load("llama"), config)
    engine.scheduler._caps._evict = Evictor(engine.pool.kv, Masked(broken))

    async def main():
        async with AsyncLLM(engine) as llm:
            failed = await llm.generate([3] * 40, engines.greedy())
            answered = await llm.generate([4] * 5, engines.greedy())
            return failed, answered, llm.is_alive

    failed, answered, alive = asyncio.run(main())

    assert "policy Masked raised ZeroDivisionError: no budget" in failed.error
    assert answered.finish_reason == "length"
    assert alive
