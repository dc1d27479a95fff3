"""What a policy promises is checked: when it is registered, and whenever it is asked."""

import asyncio
import re
from dataclasses import dataclass, field, replace

import pytest
import torch

from quire.api.async_llm import AsyncLLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, PolicyError
from quire.policies import registry
from quire.policies.base import EvictionPolicy, ScorePolicy
from quire.policies.eviction import Eviction, make_eviction
from quire.policies.lane_shape import LaneShape
from quire.policies.recent import Recent
from quire.policies.view import KVView
from support import engines

VIEW = KVView(torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1]]), next_position=4)
LANES = LaneShape(num_layers=2, heads=2, page_tokens=4, page_bytes=256)


def each(tokens: int) -> torch.Tensor:
    """So many of both lanes."""
    return torch.full((2,), tokens)


@dataclass(frozen=True)
class Masked(EvictionPolicy):
    """Gives whatever mask it was made with."""

    make_mask: object

    def select(self, view, keep, piece_tokens=1):
        return self.make_mask(view, keep)


@dataclass(frozen=True)
class Scored(ScorePolicy):
    """Gives whatever scores it was made with, and protects the first slots."""

    scores: torch.Tensor
    num_protected: int = 0

    def score(self, view):
        return self.scores

    def protected(self, view, keep):
        return view.oldest_positions(self.num_protected)


@pytest.fixture
def policies(monkeypatch):
    monkeypatch.setattr(registry, "_POLICIES", dict(registry.registered()))


def test_equal_scores_keep_the_lower_positions():
    kept = Scored(torch.zeros(2, 4)).select(VIEW, each(2))

    assert kept.tolist() == [[True, True, False, False], [True, True, False, False]]


def test_recent_keeps_sinks_and_the_newest():
    view = KVView(torch.tensor([[0, 1, 2, 3, 4]]), next_position=5)
    kept = Recent(sinks=1).select(view, torch.tensor([3]))

    assert kept.tolist() == [[True, False, False, True, True]]


def test_a_score_that_is_not_finite_is_refused_only_where_a_token_lives():
    scores = torch.zeros(2, 4)
    scores[1, 3] = torch.nan
    Scored(scores).select(VIEW, each(2))

    scores[0, 0] = torch.inf
    with pytest.raises(PolicyError, match="not finite"):
        Scored(scores).select(VIEW, each(2))


def test_more_protected_slots_than_may_stay_are_refused():
    with pytest.raises(PolicyError, match="protects 3 slots of a lane, but only 2 may be retained"):
        Scored(torch.zeros(2, 4), num_protected=3).select(VIEW, each(2))


class Unchecked(Eviction):
    """Passes on whatever the policy gives, as where types are not checked at run time."""

    def select(self, view, keep):
        return self.policy.select(view, keep, self.piece_tokens)


def ask(engine: Engine, policy: EvictionPolicy) -> None:
    """Submit a request that asks a policy which stands in no registry."""
    engine.submit(GenerationRequest([3] * 40, engines.greedy(), request_id="long"))
    [request] = engine.scheduler.waiting.of_tenant("default")
    request.eviction.selection = Unchecked(
        policy=policy, spec=request.eviction.spec, text=request.spec.evict
    )


@pytest.mark.parametrize(
    ("make_mask", "hint"),
    [
        (lambda view, keep: view.live, "must retain 18"),
        (lambda view, keep: torch.zeros(3, 5, dtype=torch.bool), "bool [4, 24]"),
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
    ask(engine, Masked(make_mask))
    engine.submit(GenerationRequest([4] * 5, engines.greedy(), request_id="short"))

    last = {}
    while engine.has_work:
        last |= {delta.request_id: delta for delta in engine.step()}

    assert last["long"].finish_reason == "error"
    assert hint in last["long"].error
    assert last["long"].error.startswith("'recent:cap=24,every=6': ")
    assert last["short"].finish_reason == "length"
    engine.check()


@dataclass(frozen=True)
class Scribbling(Recent):
    """Writes into what it was given to look at."""

    def score(self, view):
        score = super().score(view)
        view.positions.clamp_(max=3)
        return score


def test_a_rule_that_writes_into_its_view_spoils_no_record_of_what_left():
    kept = []
    for policy in (Recent(), Scribbling()):
        config = KVConfig(memory="1MiB", page_tokens=4, evict="recent:cap=24,every=6")
        engine = Engine(engines.load("llama"), replace(config, record_evictions=True))
        ask(engine, policy)
        while engine.has_work:
            engine.step()
        kept.append([[k.tolist() for k in one.retained] for one in engine.eviction_trace("long")])

    assert kept[0] == kept[1]
    assert kept[0][0] == [list(range(6, 24))] * 2


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
        ("recent:cap=10,every=64", "expected 1 <= every < cap, got every=64, cap=10"),
        ("recent:cap=64,every=64", "expected 1 <= every < cap, got every=64, cap=64"),
        (
            "recent:cap=68,sinks=4,every=64",
            "leaves 4 tokens after an eviction (cap 68, 64 evicted)",
        ),
        ("recent:cap=-1", "expected a cap from 1 to"),
    ],
)
def test_a_small_cap_is_refused_when_it_is_read(text, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_eviction(text)


def test_the_smallest_cap_that_is_asked_for_is_taken():
    for text, cap in {"recent:cap=65": 65, "recent:cap=69,sinks=4": 69}.items():
        assert make_eviction(text).for_request(100, LANES).spec.cap == cap


@dataclass(frozen=True)
class Broken(Recent):
    """Raises what Python raises."""

    def score(self, view):
        raise ZeroDivisionError("no budget")


@pytest.mark.usefixtures("policies")
def test_a_server_goes_on_after_a_policy_that_raises():
    registry.register("broken")(Broken)
    config = KVConfig(memory="1MiB", page_tokens=4, evict="broken:cap=24,every=6")
    engine = Engine(engines.load("llama"), config)

    async def main():
        async with AsyncLLM(engine) as llm:
            failed = await llm.generate([3] * 40, engines.greedy())
            answered = await llm.generate([4] * 5, engines.greedy())
            return failed, answered, llm.is_alive

    failed, answered, alive = asyncio.run(main())

    assert "policy Broken raised ZeroDivisionError: no budget" in failed.error
    assert answered.finish_reason == "length"
    assert alive
