"""Validation of policies on registration and of their selections."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, PolicyError
from quire.policies import registry
from quire.policies.base import EvictionPolicy, ScorePolicy
from quire.policies.eviction import Eviction
from quire.policies.recent import Recent
from quire.policies.view import KVView
from support import engines

VIEW = KVView(torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1]]), next_position=4)


def both_lanes(tokens: int) -> torch.Tensor:
    """This number of tokens in both lanes."""
    return torch.full((2,), tokens)


@dataclass(frozen=True)
class Masked(EvictionPolicy):
    """Returns a given mask."""

    make_mask: object

    def select(self, view, keep, piece_tokens=1):
        return self.make_mask(view, keep)


@dataclass(frozen=True)
class Scored(ScorePolicy):
    """Returns given scores, and protects the first slots."""

    scores: torch.Tensor
    num_protected: int = 0

    def score(self, view):
        return self.scores

    def protected(self, view, keep):
        return view.oldest_positions(self.num_protected)


@pytest.fixture
def policies():
    with registry.temporary_registrations():
        yield


def test_non_finite_score_of_a_live_slot_is_refused():
    scores = torch.zeros(2, 4)
    scores[1, 3] = torch.nan
    Scored(scores).select(VIEW, both_lanes(2))

    scores[0, 0] = torch.inf
    with pytest.raises(PolicyError, match="not finite"):
        Scored(scores).select(VIEW, both_lanes(2))


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        (torch.zeros(3, 5), "[3, 5]"),
        (torch.zeros(4), "[4]"),
        ([0.0], "a list"),
        (None, "a NoneType"),
    ],
)
def test_score_of_a_wrong_shape_is_refused_with_the_names_of_the_dimensions(scores, found):
    with pytest.raises(PolicyError) as refused:
        Scored(scores).select(VIEW, both_lanes(2))

    wanted = "Scored.score must return a tensor of shape [lanes, slots] = [2, 4], got "
    assert str(refused.value).startswith(wanted)
    assert str(refused.value).endswith(found)


def test_too_many_protected_slots_are_refused():
    with pytest.raises(PolicyError, match="protects 3 slots of a lane, but only 2 may be retained"):
        Scored(torch.zeros(2, 4), num_protected=3).select(VIEW, both_lanes(2))


class Unchecked(Eviction):
    """Returns the selection of the policy unchecked, as without runtime type checks."""

    def select(self, view, keep):
        return self.policy.select(view, keep, self.piece_tokens)


def submit_with_policy(engine: Engine, policy: EvictionPolicy) -> None:
    """Submit a request with a policy that is not registered."""
    engine.submit(GenerationRequest([3] * 40, engines.greedy(), request_id="long"))
    [request] = engine.scheduler.waiting.of_tenant("default")
    request.eviction.selection = Unchecked(
        policy=policy, spec=request.eviction.spec, text=request.spec.evict
    )


@pytest.mark.parametrize(
    ("make_mask", "hint"),
    [
        (lambda view, keep: view.live, "must retain 18"),
        (
            lambda view, keep: torch.zeros(3, 5, dtype=torch.bool),
            "bool and shape [lanes, slots] = [4, 24]",
        ),
        (lambda view, keep: view.positions.double(), "got torch.float64"),
        (lambda view, keep: view.live.tolist(), "got a list"),
        (lambda view, keep: view.positions[7], "policy Masked raised IndexError: "),
        (lambda view, keep: {}["key"], "raised KeyError: 'key' (test_policies.py, line "),
    ],
    ids=["count", "shape", "type", "list", "torch error", "python error"],
)
def test_invalid_mask_fails_only_its_request(make_mask, hint):
    model = engines.load("llama")
    config = KVConfig(memory="1MiB", page_tokens=4, evict="recent:cap=24,every=6")
    engine = Engine(model, config)
    submit_with_policy(engine, Masked(make_mask))
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
class ModifiesView(Recent):
    """Modifies its view."""

    def score(self, view):
        score = super().score(view)
        view.positions.clamp_(max=3)
        return score


def test_rule_that_modifies_its_view_does_not_change_the_eviction_trace():
    retained = []
    for policy in (Recent(), ModifiesView()):
        config = KVConfig(memory="1MiB", page_tokens=4, evict="recent:cap=24,every=6")
        engine = Engine(engines.load("llama"), replace(config, record_evictions=True))
        submit_with_policy(engine, policy)
        while engine.has_work:
            engine.step()
        retained.append([[k.tolist() for k in e.retained] for e in engine.eviction_trace("long")])

    assert retained[0] == retained[1]
    assert retained[0][0] == [list(range(6, 24))] * 2


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
def test_option_without_a_plain_default_is_refused_on_registration(policy):
    with pytest.raises(ConfigError, match="option 'size' of policy 'odd' needs a default"):
        registry.register("odd")(policy)


@pytest.mark.usefixtures("policies")
def test_class_that_is_not_a_dataclass_is_refused():
    class Plain(EvictionPolicy):
        def select(self, view, keep):
            return view.live

    with pytest.raises(ConfigError, match="dataclass"):
        registry.register("plain")(Plain)


@pytest.mark.usefixtures("policies")
def test_duplicate_policy_name_is_refused():
    with pytest.raises(ConfigError, match="two policies are called 'recent'"):
        registry.register("recent")(dataclass(frozen=True)(type("Other", (Recent,), {})))
