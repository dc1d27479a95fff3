"""Every registered policy with its default options; validation of policies and selections."""

import sys
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.options import documented_attributes
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, PolicyError
from quire.layout.eviction import scoring_of
from quire.layout.statistics import QueryMoments, QueryRing
from quire.policies import registry
from quire.policies.base import LANE, LAYER, EvictionPolicy, ScorePolicy
from quire.policies.choose import best_of, best_slots, best_with_torch, choose_pieces, choose_slots
from quire.policies.eviction import Eviction, LaneShape, make_eviction
from quire.policies.recent import Recent
from quire.policies.registry import policy_of, registered
from quire.policies.view import KVView
from support import engines
from support.histories import Slots, changed, make_history, retained_positions, scale_of

PIECE = 4
NAMES = sorted(registered())
every_rule = pytest.mark.parametrize("name", NAMES)


def rules_that(condition):
    return pytest.mark.parametrize(
        "name", [name for name in NAMES if condition(policy_of(name, {}))]
    )


def reads_queries(policy):
    return any(isinstance(s, QueryRing | QueryMoments) for s in policy.statistics)


@cache
def history_of(*, ragged):
    """Long enough for every rule; a few tokens have been evicted before."""
    return make_history(tokens=310, fixed=40, evictions=4, group=2, layers=(1, 2), ragged=ragged)


@cache
def rule_and_view(name):
    policy = policy_of(name, {})
    return policy, history_of(ragged=policy.scope == LANE).view(policy.statistics)


def num_slots(view):
    return view.num_slots[:, 0]


def keep_counts(policy, view):
    """Numbers of tokens to retain, from the least cap to all."""
    least, most = policy.min_cap, int(num_slots(view).min())
    counts = {least, least + 1, (least + most) // 2, most - 1, most}
    return [torch.full_like(num_slots(view), count) for count in sorted(counts)] + [num_slots(view)]


def reordered(view, lanes, layers, heads):
    """The same lanes in another order, or a subset."""
    statistics = {}
    for name, values in view.statistics.items():  # rows of lanes or of their query heads
        each = len(values) // view.positions.shape[0]
        statistics[name] = values.unflatten(0, (-1, each))[lanes].flatten(0, 1)
    own = {"layers": layers, "heads_per_layer": heads, "statistics": statistics}
    own["layer_scales"] = tuple(scale_of(layer, view.head_dim) for layer in layers)
    slots = Slots(view.keys[lanes], view.values[lanes])
    return changed(view, positions=view.positions[lanes], slots=slots, **own)


def degenerate(view, slots=None):
    """Tokens that differ in position only: equal keys, zero sums and queries."""
    slots = slots or view.positions.shape[1]
    positions = torch.arange(slots).expand(view.positions.shape[0], slots)
    statistics = {}
    for name, values in view.statistics.items():
        statistics[name] = torch.zeros_like(values)
        if name.startswith("query_ring"):
            window = torch.arange(values.shape[1])
            statistics[name][:, slots % len(window) - 1, -1] = slots  # the last query only
        elif name.startswith("query_moments"):
            statistics[name] = torch.ones_like(values)
        elif values.dim() == 2:
            statistics[name] = statistics[name][:, :slots]
    keys = torch.ones(*positions.shape, view.head_dim)
    own = {"next_position": slots, "statistics": statistics, "slots": Slots(keys, keys)}
    return changed(view, positions=positions, **own)


@every_rule
def test_rule_documents_its_cost_and_options_and_refuses_a_too_small_cap(name):
    policy = policy_of(name, {})
    documented = documented_attributes(type(policy).__doc__ or "")

    assert policy.cost
    assert set(documented) >= {field.name for field in fields(policy)}
    assert policy.scope in (LANE, LAYER)
    source = (sys.modules[type(policy).__module__].__doc__ or "").replace("papers", "paper")
    assert "Differs from the paper" in source or name == "random"

    least, options = policy.min_cap, "granularity=page," if policy.needs_pieces else ""
    leaving = 0 if scoring_of(policy.statistics) else 3  # evicted once, to the cap
    assert make_eviction(f"{name}:{options}cap={least + leaving},every=3").policy == policy
    if least > 1:
        cap = least + leaving - 1
        with pytest.raises(ConfigError, match=r"raise cap\b.* every"):
            make_eviction(f"{name}:{options}cap={cap - policy.added_tokens(cap)},every=3")


def assert_counts(policy, view, retained, keep):
    """Lanes retain `keep` slots; lanes that evict, with a rule that may retain fewer, 1 to that."""
    count = retained.sum(dim=1)
    if not policy.retains_fewer:
        assert count.tolist() == keep.tolist()
    assert ((count >= 1) & (count <= keep)).all()
    assert (count == keep)[keep == num_slots(view)].all()


@every_rule
def test_rule_retains_exactly_the_requested_number_and_protected_slots(name):
    policy, view = rule_and_view(name)

    different = num_slots(view) - torch.arange(4) * 3
    if policy.scope == LAYER:
        different = view.by_layer(different).amin(dim=1, keepdim=True).expand(-1, 2).flatten()
    for keep in (*keep_counts(policy, view), different):
        retained = policy.select(view, keep)
        assert_counts(policy, view, retained, keep)
        assert not (retained & ~view.live).any()
        if isinstance(policy, ScorePolicy) and keep is not different:
            protected = policy.protected(view, keep)
            assert not (protected & ~retained).any()
            assert (protected.sum(dim=1) < keep).all()


@rules_that(lambda policy: isinstance(policy, ScorePolicy))
def test_ties_retain_the_lower_positions(name):
    policy, view = rule_and_view(name)
    same = degenerate(view)
    keep = torch.full_like(num_slots(same), policy.min_cap + 5)
    protected = policy.protected(same, keep)

    retained = policy.choose(same, torch.zeros(same.positions.shape), protected, keep)

    for lane in range(len(keep)):
        free = [p for p in range(same.positions.shape[1]) if not protected[lane, p]]
        lowest = free[: int(keep[lane] - protected[lane].sum())]
        expected = protected[lane].clone()
        expected[lowest] = True
        assert retained[lane].equal(expected)


@every_rule
@pytest.mark.parametrize("slots", [1, 2, None])
def test_scores_of_identical_tokens_are_finite(name, slots):
    policy, view = rule_and_view(name)
    same = degenerate(view, slots)

    if isinstance(policy, ScorePolicy):
        assert torch.isfinite(policy.score(same)).all()
    keep = torch.full_like(num_slots(same), policy.min_cap)
    if (keep <= num_slots(same)).all():
        assert policy.select(same, keep).sum(dim=1).tolist() == keep.tolist()


@every_rule
def test_selection_is_independent_of_other_lanes_their_order_and_padding(name):
    """It is also deterministic, and changes no input."""
    policy, view = rule_and_view(name)
    keep = torch.full_like(num_slots(view), policy.min_cap + 9)
    inputs = [view.positions, keep, view.keys, view.values, *view.statistics.values()]
    before = [values.clone() for values in inputs]
    together, again = policy.select(view, keep), policy.select(view, keep)
    assert torch.equal(together, again)
    assert all(torch.equal(value, copy) for value, copy in zip(inputs, before, strict=True))

    backwards = policy.select(reordered(view, [3, 2, 1, 0], (2, 1), 2), keep)
    assert torch.equal(backwards, together[[3, 2, 1, 0]])
    alone = policy.select(reordered(view, [2, 3], (2,), 2), keep[2:])

    assert torch.equal(alone, together[2:])
    if policy.scope == LANE:
        for lane in range(4):
            single = reordered(view, [lane], (view.layers[lane // 2],), 1)
            assert torch.equal(policy.select(single, keep[:1]), together[lane : lane + 1])

    pad = torch.nn.functional.pad
    statistics = {
        own: pad(values, (0, 7)) if values.dim() == 2 else values
        for own, values in view.statistics.items()
    }
    slots = Slots(pad(view.keys, (0, 0, 0, 7)), pad(view.values, (0, 0, 0, 7)))
    positions = pad(view.positions, (0, 7), value=-1)
    padded = changed(view, positions=positions, statistics=statistics, slots=slots)

    retained = retained_positions(padded, policy.select(padded, keep))
    assert retained == retained_positions(view, together)


@rules_that(lambda policy: policy.scope == LAYER)
def test_heads_of_a_layer_scope_rule_retain_one_set(name):
    policy, view = rule_and_view(name)

    keep = torch.full_like(num_slots(view), policy.min_cap + 9)
    retained = view.by_layer(policy.select(view, keep))

    assert torch.equal(retained[:, 0], retained[:, 1])


@every_rule
def test_rule_retains_whole_pieces_within_the_limit(name):
    policy, view = rule_and_view(name)
    least = policy.min_cap + 2 * PIECE
    slots = view.positions.shape[1]

    for count in (least, (least + int(num_slots(view).min())) // 2, int(num_slots(view).min())):
        keep = torch.full_like(num_slots(view), count)
        retained = policy.select(view, keep, PIECE)
        assert (retained.sum(dim=1) <= keep).all()
        assert policy.retains_fewer or (retained.sum(dim=1) > keep - 2 * PIECE).all()
        for start in range(0, slots, PIECE):
            piece = slice(start, start + PIECE)
            is_whole = (retained[:, piece] | ~view.live[:, piece]).all(dim=1)
            assert (is_whole | ~retained[:, piece].any(dim=1)).all()


@rules_that(lambda policy: policy.statistics)
def test_view_without_statistics_or_recorded_queries_is_refused_by_name(name):
    policy, view = rule_and_view(name)
    with pytest.raises(PolicyError, match="built without the statistic"):
        policy.select(changed(view, statistics={}), num_slots(view) - 1)
    if not reads_queries(policy):
        return
    empty = {name: torch.zeros_like(values) for name, values in view.statistics.items()}
    with pytest.raises(PolicyError, match="no query"):
        policy.select(changed(view, statistics=empty), num_slots(view) - 1)


# ---- validation and selections -------------------------------------------------------------------


VIEW = KVView(torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1]]), next_position=4)


def both_lanes(tokens):
    return torch.full((2,), tokens)


@dataclass(frozen=True)
class Masked(EvictionPolicy):
    make_mask: object

    def select(self, view, keep, piece_tokens=1):
        return self.make_mask(view, keep)


@dataclass(frozen=True)
class Scored(ScorePolicy):
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
    with pytest.raises(PolicyError, match="protects 3 slots of a lane, but only 2 may be retained"):
        Scored(torch.zeros(2, 4), num_protected=3).select(VIEW, both_lanes(2))


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        *((torch.zeros(3, 5), "[3, 5]"), (torch.zeros(4), "[4]"), ([0.0], "a list")),
        (None, "a NoneType"),
    ],
)
def test_score_of_a_wrong_shape_is_refused_with_the_names_of_the_dimensions(scores, found):
    with pytest.raises(PolicyError) as refused:
        Scored(scores).select(VIEW, both_lanes(2))

    wanted = "Scored.score must return a tensor of shape [lanes, slots] = [2, 4], got "
    assert str(refused.value).startswith(wanted)
    assert str(refused.value).endswith(found)


class Unchecked(Eviction):
    """Returns the selection of the policy unchecked, as without runtime type checks."""

    def select(self, view, keep):
        return self.policy.select(view, keep, self.piece_tokens)


def submit_with_policy(engine, policy):
    engine.submit(GenerationRequest([3] * 40, engines.greedy(), request_id="long"))
    [request] = engine.scheduler.waiting.of_tenant("default")
    spec, text = request.eviction.spec, request.spec.evict
    request.eviction.selection = Unchecked(policy=policy, spec=spec, text=text)


@pytest.mark.parametrize(
    ("make_mask", "hint"),
    [
        (lambda view, keep: view.live, "must retain 18"),
        (lambda view, keep: torch.zeros(3, 5, dtype=torch.bool), "bool and shape [lanes, slots]"),
        (lambda view, keep: view.positions.double(), "got torch.float64"),
        (lambda view, keep: view.live.tolist(), "got a list"),
        (lambda view, keep: view.positions[7], "policy Masked raised IndexError: "),
        (lambda view, keep: {}["key"], "raised KeyError: 'key' (test_conformance.py, line "),
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


def with_size(kind, **default):
    return make_dataclass("Odd", [("size", kind, field(**default))], bases=(Recent,), frozen=True)


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (with_size(int, kw_only=True), "option 'size' of policy 'odd' needs a default"),
        (with_size(int | None, default=None), "option 'size' of policy 'odd' needs a default"),
        (with_size(list, default_factory=list), "option 'size' of policy 'odd' needs a default"),
        (
            type("Plain", (EvictionPolicy,), {"select": lambda self, view, keep: view.live}),
            "dataclass",
        ),
    ],
)
def test_class_with_other_options_is_refused_on_registration(policy, message):
    with pytest.raises(ConfigError, match=message):
        registry.register("odd")(policy)


FEW_SCORES = st.sampled_from([-2.5, -1.0, 0.0, 0.25, 3.0])  # with many ties


@st.composite
def lanes(draw, max_slots=12):
    width = draw(st.integers(1, max_slots))
    scores = draw(st.sampled_from([FEW_SCORES, st.floats(-1e6, 1e6, width=32)]))
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, width))
        score = draw(st.lists(scores, min_size=width, max_size=width))
        markers = draw(st.lists(st.booleans(), min_size=width, max_size=width))
        live = [slot < count for slot in range(width)]
        protected = [mark and is_live for mark, is_live in zip(markers, live, strict=True)]
        drawn.append((score, live, protected))
    return tuple(zip(*drawn, strict=True))


def tensors(lanes):
    score, live, protected = lanes
    return torch.tensor(score, dtype=torch.float64), torch.tensor(live), torch.tensor(protected)


def plain_selection(score, live, protected, keep):
    """One lane: protected first, then by score, ties to the lower slot."""
    order = sorted(
        (slot for slot in range(len(score)) if live[slot]),
        key=lambda slot: (not protected[slot], -score[slot], slot),
    )
    return [slot in order[:keep] for slot in range(len(score))]


@given(st.data(), lanes())
def test_retained_set_equals_a_plain_sort_in_torch_and_numpy(data, lanes):
    _, live, protected = lanes
    bounds = [(sum(least), sum(most)) for least, most in zip(protected, live, strict=True)]
    keep = [data.draw(st.integers(*bound)) for bound in bounds]

    retained = choose_slots(*tensors(lanes), torch.tensor(keep))

    assert retained.tolist() == [
        plain_selection(*lane, number) for *lane, number in zip(*lanes, keep, strict=True)
    ]

    # the wanted number may be zero or exceed the free slots
    score, free, _ = tensors(lanes)
    wanted = torch.tensor([data.draw(st.integers(0, free.shape[1])) for _ in free])

    best = best_of(score.numpy(), free.numpy(), wanted.numpy())

    assert best.tolist() == best_with_torch(score, free, wanted).tolist()
    assert best.sum(axis=1).tolist() == torch.minimum(wanted, free.sum(dim=1)).tolist()


def test_lanes_share_free_slots_and_need_none_for_piece_edges_without_evictions():
    score = torch.tensor([[[1.0, 5.0, 3.0, 4.0], [5.0, 1.0, 4.0, 4.0]]])
    free, wanted = torch.tensor([[[True, False, True, True]]]), torch.tensor([[2]])

    expected = [[[False, False, True, True], [True, False, True, False]]]
    assert best_slots(score, free, wanted).tolist() == expected
    assert best_with_torch(score, free, wanted).tolist() == expected

    # different caps: one lane retains all of its 15, fewer than sinks and two edges of 9
    short, long = [*range(15), *[-1] * 15], list(range(30))
    view = KVView(torch.tensor([short, long]), next_position=30)

    retained = Recent(sinks=4).select(view, torch.tensor([15, 24]), piece_tokens=10)

    assert retained.sum(dim=1).tolist() == [15, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_precision_is_ranked(dtype):
    score = torch.tensor([[3.0, 1.0, 2.0, 4.0, torch.nan, torch.inf]], dtype=dtype)
    live = torch.arange(6)[None] < 4
    retained = choose_slots(score, live, ~live & live, torch.tensor([2]))

    assert retained.tolist() == [[True, False, False, True, False, False]]
    empty = torch.zeros(2, 0, dtype=torch.bool)
    none = choose_slots(torch.zeros(2, 0, dtype=dtype), empty, empty, torch.tensor([0, 0]))
    assert none.shape == (2, 0)


def plain_pieces(score, live, protected, keep, piece_tokens):
    """One lane, piece by piece: protected pieces, then by mean, ties to the lower piece."""
    count = sum(live)
    starts = range(0, count, piece_tokens)
    pieces = [[*range(start, min(start + piece_tokens, count))] for start in starts]
    protected_pieces = [p for p in pieces if len(p) < piece_tokens or any(protected[s] for s in p)]
    free = [p for p in pieces if p not in protected_pieces]
    free.sort(key=lambda p: (-sum(score[slot] for slot in p) / piece_tokens, p[0]))
    num_free = (keep - sum(map(len, protected_pieces))) // piece_tokens
    retained = {slot for piece in [*protected_pieces, *free[:num_free]] for slot in piece}
    return [slot in retained for slot in range(len(score))]


@given(st.data(), lanes(max_slots=24), st.integers(1, 7))
def test_whole_pieces_equal_a_plain_loop(data, lanes, piece_tokens):
    score, live, protected = lanes
    score = tuple([float(round(number)) for number in lane] for lane in score)  # exact means
    lanes = list(zip(score, live, protected, strict=True))
    needed = [sum(plain_pieces(*lane, 0, piece_tokens)) for lane in lanes]
    bounds = [(least, max(least, sum(own))) for least, own in zip(needed, live, strict=True)]
    keep = [data.draw(st.integers(*bound)) for bound in bounds]

    retained = choose_pieces(*tensors((score, live, protected)), torch.tensor(keep), piece_tokens)

    for own, lane, number in zip(retained.tolist(), lanes, keep, strict=True):
        assert own == plain_pieces(*lane, number, piece_tokens)
    assert (retained.sum(dim=1) <= torch.tensor(keep)).all()


def test_too_many_protected_pieces_are_refused_with_both_numbers():
    live = torch.ones(1, 8, dtype=torch.bool)
    protected = torch.zeros_like(live)
    protected[0, [0, 7]] = True

    expected = "pieces of protected slots hold 8 tokens, but only 6 may be retained"
    with pytest.raises(PolicyError, match=expected):
        choose_pieces(torch.zeros(1, 8), live, protected, torch.tensor([6]), 4)


class LayerScores(ScorePolicy):
    scope = LAYER

    def __init__(self, scores):
        self.scores = scores

    def score(self, view):
        return self.scores


@given(st.lists(FEW_SCORES, min_size=24, max_size=24), st.integers(4, 6), st.integers(1, 3))
def test_heads_of_a_layer_retain_one_set_by_their_mean_score(scores, keep, piece_tokens):
    by_lane = torch.tensor(scores, dtype=torch.float64).view(4, 6)  # two layers of two heads
    view = KVView(torch.arange(6).expand(4, 6), next_position=6, heads_per_layer=2)

    retained = LayerScores(by_lane).select(view, torch.full((4,), keep), piece_tokens)

    for layer in (0, 1):
        mean = by_lane[2 * layer : 2 * layer + 2].mean(dim=0).tolist()
        lane = (mean, [True] * 6, [False] * 6)
        expected = plain_pieces(*lane, keep, piece_tokens)
        assert retained[2 * layer].tolist() == retained[2 * layer + 1].tolist() == expected


def test_ada_with_pieces_stays_within_the_layer_total():
    """Cap 34: 33 retained, half of them the newest, 4 sinks; in pieces of ten up to 40."""
    schedule = "cap=34,every=1,when=decode,granularity=chunk,chunk_tokens=10"
    rule = make_eviction(f"h2o:sinks=4,{schedule},budget=ada")
    eviction = rule.for_request(134, LaneShape(1, 2, page_tokens=4, page_bytes=256, fixed_bytes=0))
    sums = {rule.statistics[0].name: torch.rand(2, 134, generator=torch.manual_seed(0))}
    view = KVView(torch.arange(134).expand(2, 134), 134, heads_per_layer=2, statistics=sums)

    retained = eviction.select(view, torch.tensor([33, 33]))

    assert 48 <= int(retained.sum()) <= 66
    assert retained[:, :4].all()
    assert retained[:, -4:].all()
