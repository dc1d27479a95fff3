import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, PolicyError, UnknownName, UnsoundCombination
from quire.layout.eviction import (
    MAX_CHARACTERS,
    MOST,
    PREFILL_END,
    PRESSURE,
    SCHEDULES,
    Cap,
    EvictionSpec,
    scoring_of,
)
from quire.layout.statistics import AttentionSum, ResidualSimilarity
from quire.policies import registry
from quire.policies.base import EvictionPolicy, ScorePolicy
from quire.policies.budgets.ada import Ada
from quire.policies.budgets.base import UNBOUNDED
from quire.policies.budgets.uniform import Uniform
from quire.policies.eviction import Eviction, LaneShape, make_eviction
from quire.policies.h2o import H2O
from quire.policies.recent import Recent
from quire.policies.registry import policy_of, registered
from quire.policies.snapkv import SnapKV
from quire.policies.view import KVView

LANES = LaneShape(num_layers=4, heads=2, page_tokens=16, page_bytes=16 * 1024)


@dataclass(frozen=True)
class FirstSlots(EvictionPolicy):
    def select(self, view, keep, piece_tokens=1):
        return view.live & (view.live.cumsum(dim=1) <= keep[:, None])


@pytest.fixture
def policies():
    with registry.temporary_registrations():
        registry.register("everything")(FirstSlots)
        yield


def refusal(text, prompt_tokens=None):
    def resolve():
        rule = make_eviction(text)
        if prompt_tokens is not None:
            rule.for_request(prompt_tokens, LANES)

    with pytest.raises(ConfigError) as refused:
        resolve()
    return refused.value


def test_options_are_parsed_or_have_defaults_and_full_evicts_nothing():
    schedule = "cap=25%,every=32,when=prefill_end,granularity=chunk,chunk_tokens=8"
    rule = make_eviction(f"snapkv:window=16,{schedule},budget=(ada:floor=0.3)")

    assert rule.policy == SnapKV(window=16)
    assert rule.budget == Ada(floor=0.3)
    assert rule.cap == Cap(share=0.25)
    assert (rule.every, rule.when) == (32, "prefill_end")
    assert (rule.granularity, rule.chunk_tokens) == ("chunk", 8)
    assert rule.evicts

    rule = make_eviction("h2o:cap=512")

    assert rule.policy == H2O()
    assert rule.budget == Uniform()
    assert (rule.every, rule.when, rule.granularity) == (None, "prefill_and_decode", "token")
    squeezed = make_eviction("h2o:cap=99,budget=squeeze,when=decode")
    assert squeezed.statistics == (AttentionSum(), ResidualSimilarity())
    fast = make_eviction("h2o:cap=99,budget=fastgen,when=decode")
    assert fast.statistics == (AttentionSum(),)

    rule = make_eviction("full")

    assert not rule.evicts
    assert rule.statistics == ()
    assert rule.for_request(10, LANES) == Eviction()
    view, keep = KVView(torch.arange(6).expand(2, 6), 6, heads_per_layer=2), torch.tensor([3, 3])
    retained = Eviction(policy=Recent(sinks=1)).select(view, keep)  # a uniform budget
    assert retained.equal(Recent(sinks=1).select(view, keep))
    with pytest.raises(PolicyError, match="full retains all tokens"):
        Eviction().select(KVView(torch.tensor([[0]]), 1), torch.tensor([1]))


OF_PROMPT = "up to 100% of the prompt, or whole tokens such as 512"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ConfigError, "expected a policy such as 'recent:cap=512,sinks=4', got ''"),
        ("full:cap=8", ConfigError, "'full' retains all tokens and has no options"),
        ("recent", ConfigError, "needs a cap, such as cap=512, cap=25% or cap=2MiB"),
        ("recant:cap=99", UnknownName, "did you mean recent?"),
        ("zzz:cap=99", UnknownName, "choose from average"),
        ("recent:cap=99,snks=4", UnknownName, "did you mean sinks?"),
        ("recent:cap=99,evry=4", UnknownName, "did you mean every?"),
        ("recent:cap=99,budjet=ada", UnknownName, "did you mean budget?"),
        ("recent:cap", ConfigError, "expected option=value"),
        ("recent:cap=", ConfigError, "expected option=value"),
        ("recent:cap=99,cap=98", ConfigError, "option 'cap' is repeated"),
        ("recent:cap=99,budget=(ada", ConfigError, "parentheses do not match"),
        ("recent:cap=99,budget=ada)", ConfigError, "parentheses do not match"),
        ("H2O:cap=99", UnknownName, "did you mean h2o?"),
        ("recent:cap=99,sinks=four", ConfigError, "option sinks needs a whole number, got 'four'"),
        ("recent:cap=99,sinks=-1", ConfigError, "expected sinks >= 0"),
        ("recent:cap=99,every=many", ConfigError, "every needs a whole number of tokens"),
        ("recent:cap=99,every=0", ConfigError, "every needs a number from 1 to"),
        ("recent:cap=99,chunk_tokens=0", ConfigError, "chunk_tokens needs a number from 1 to"),
        ("recent:cap=99,when=allways", UnknownName, "unknown eviction schedule 'allways'"),
        ("recent:cap=99,when=prefilend", UnknownName, "did you mean prefill_end"),
        ("recent:cap=99,granularity=pages", UnknownName, "did you mean page?"),
        ("recent:cap=99,budget=pyramyd", UnknownName, "did you mean pyramid?"),
        ("h2o:cap=99,budget=(ada:flor=1)", UnknownName, "did you mean floor?"),
        ("recent:cap=0", ConfigError, "expected a cap from 1 to"),
        ("expected_attention:future=99999999,cap=99", ConfigError, "expected future from 1 to"),
        ("triattention:max_offset=0,cap=99", ConfigError, "expected max_offset from 1 to"),
        ("recent:cap=-5", ConfigError, "expected a cap from 1 to"),
        (f"recent:cap={MOST + 1}", ConfigError, "expected a cap from 1 to"),
        ("recent:cap=0%", ConfigError, f"{OF_PROMPT}, got 0%"),
        ("recent:cap=101%", ConfigError, f"{OF_PROMPT}, got 101%"),
        ("recent:cap=nan%", ConfigError, f"{OF_PROMPT}, got nan%"),
        ("recent:cap=1.5", ConfigError, f"{OF_PROMPT}, got 1.5"),
        ("recent:cap=0.4B", ConfigError, "expected a cap from 1 to"),
        ("recent:cap=infMiB", ConfigError, "expected a cap such as 512"),
        ("recent:cap=nanMiB", ConfigError, "expected a cap such as 512"),
        ("recent:cap=lots", ConfigError, "expected a cap such as 512"),
        ("recent:cap=1", ConfigError, "expected 1 <= every < cap, got every=1, cap=1"),
        ("recent:cap=5,sinks=4", ConfigError, "leaves 4 tokens after an eviction (cap 5, 1"),
        ("recent:cap=4,sinks=4,when=prefill_end", ConfigError, "but the rule needs 5"),
        ("value_norm:base=(h2oo),cap=99", UnknownName, "did you mean h2o"),
        ("value_norm:base=(h2o:cap=9),cap=99", ConfigError, "cap of 'h2o:cap=9' cannot be set in"),
        ("auto", ConfigError, "'auto' needs a cap, such as cap=50%"),
        ("auto:cap=50%,sinks=4", ConfigError, "takes cap, when, every and granularity; got sinks"),
        ("auto:cap=50%,budget=ada", ConfigError, "got budget in 'auto:cap=50%,budget=ada'"),
        ("recent:cap=99,sinks=" + "1" * MAX_CHARACTERS, ConfigError, "at most 1000 characters"),
    ],
)
def test_invalid_policy_text_is_refused(text, error, message):
    refused = refusal(text)
    assert type(refused) is error
    assert message in str(refused)


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "everything:cap=99,budget=ada",
            "compares scores, and this rule returns none; use budget=un",
        ),
        ("everything:cap=99,budget=lazy,when=decode", "budget lazy compares scores"),
        (
            "recent:cap=99,budget=ada",
            "one set for all heads of a layer; use a rule with one set per",
        ),
        ("tova:cap=99,budget=fastgen,when=decode", "budget fastgen divides a layer over its heads"),
        ("tova:cap=99,budget=(duo:scores=1x8)", "budget duo divides a layer over its heads"),
        ("kvcrush:cap=99,budget=(duo:scores=1x8)", "budget duo divides a layer over its heads"),
        ("streaming:cap=99,budget=(duo:scores=1x8)", "budget duo divides a layer over its heads"),
        ("streaming:cap=99,budget=lazy,when=decode", "positions, and keys are re-rotated; use"),
    ],
)
def test_unsound_combinations_are_refused_with_an_alternative(text, message):
    refused = refusal(text)
    assert type(refused) is UnsoundCombination
    assert message in str(refused)
    assert repr(text) in str(refused)


@pytest.mark.parametrize(
    "text",
    [
        *("recent:cap=99,budget=lazy,when=decode", "h2o:cap=99,budget=squeeze", "recent:cap=2"),
        *("h2o:cap=99,budget=fastgen,when=pressure", "kvcrush:cap=99,sets=head,budget=ada"),
        *("kvcrush:cap=99,sets=head,budget=fastgen", "tova:cap=99,budget=pyramid"),
        *("streaming:cap=99,budget=squeeze,when=decode", "tova:cap=99,scope=lane,budget=ada"),
        *("h2o:cap=99,budget=fastgen,when=prefill_end", "sinks:cap=99,budget=(duo:scores=1x8)"),
        "random:cap=99,budget=(duo:scores=smollm2),when=pressure",
        "h2o:cap=99,budget=ada,when=pressure,granularity=page",
        "value_norm:cap=99,base=h2o_sinks",
        "value_norm:cap=99,base=(value_norm:base=(h2o:recent=8),power=2)",
        "recent:cap=5,sinks=4,when=prefill_end,every=64",
    ],
)
def test_sound_combinations_are_accepted(text):
    assert make_eviction(text).text == text


def test_cap_is_resolved_for_the_prompt():
    for cap, tokens in (
        *(("500", 500), ("25%", 250), ("0.25", 250), ("100%", 1000)),  # of 1,000 tokens
        ("33.35%", 333),  # down to whole tokens
        *(("2MiB", 2048), ("0.5MiB", 512), ("1GiB", 1 << 20)),  # 1 KiB a token
        *(("300KiB", 288), ("311295B", 288), ("311296B", 304)),  # rounded down to whole pages
    ):
        assert make_eviction(f"recent:cap={cap}").for_request(1000, LANES).spec.cap == tokens, cap


def spec_of(text, prompt_tokens):
    return make_eviction(text).for_request(prompt_tokens, LANES).spec


def accepts(text, prompt_tokens):
    try:
        spec_of(text, prompt_tokens)
    except ConfigError:
        return False
    return True


def text_of(name, when, granularity="token"):
    """A text of a rule with `{}` as its cap."""
    granularity = "page" if policy_of(name, {}).needs_pieces else granularity
    return f"{name}:cap={{}},when={when},granularity={granularity}"


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("when", SCHEDULES)
@pytest.mark.parametrize("name", registered())
def test_percent_cap_is_a_cap_in_tokens_of_at_min_the_minimum_of_the_rule(name, when, granularity):
    if scoring_of(policy_of(name, {}).statistics) and when != PREFILL_END:
        return  # refused, whatever the cap
    text = text_of(name, when, granularity)
    least = next(cap for cap in itertools.count(1) if accepts(text.format(cap), 300))
    prompts = range(1, 301, 1 if granularity == "token" else 13)

    for percent, prompt_tokens in itertools.product((1, 25, 50, 99, 100), prompts):
        tokens = max(least, int(percent / 100 * prompt_tokens))
        found = spec_of(text.format(f"{percent}%"), prompt_tokens)
        assert found == spec_of(text.format(tokens), prompt_tokens)
        if when != PRESSURE and prompt_tokens <= tokens:
            assert found.exact_tokens(prompt_tokens) >= prompt_tokens


BUDGETS = (
    *("pyramid", "(pyramid:beta=50)", "(pyramid:rounding=published)", "scissors"),
    *("(scissors:slope=0.99)", "squeeze", "(squeeze:share=0.01)", "lazy", "(lazy:sinks=99)"),
    *("(duo:scores=1x8)", "(duo:scores=0.1/0.2/0.3x6,streaming=0.01)"),
    *("fastgen", "ada", "(by_layer:factors=1.5x2/0.5x2)", "(by_layer:factors=9/0.1/1/1)"),
)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["h2o", "snapkv", "lagkv", "recent"])
def test_percent_cap_is_raised_until_its_budget_leaves_every_lane_the_minimum(name, budget):
    if name == "recent" and budget in ("ada", "fastgen"):
        return  # one set per layer
    prompts = range(1, 301, 11)
    percents = (1, 50, 100)
    for when, percent, prompt_tokens in itertools.product(SCHEDULES, percents, prompts):
        text = f"{name}:cap={percent}%,when={when},budget={budget}"
        rule = make_eviction(text)
        spec = rule.for_request(prompt_tokens, LANES).spec
        assert spec.min_cap - spec.leaving >= rule.policy.min_cap
        # the total is that of a cap in tokens
        assert spec == spec_of(f"{name}:cap={spec.cap},when={when},budget={budget}", prompt_tokens)


def test_percent_cap_is_raised_to_the_tokens_that_an_eviction_must_leave_or_refused():
    for text, prompt_tokens, cap in (
        ("recent:cap=25%,sinks=4", 276, 69),
        ("recent:cap=25%,every=64", 200, 65),
        ("recent:cap=25%,sinks=4,every=64", 275, 69),
        ("recent:cap=25%,sinks=4,every=64", 280, 70),
        ("recent:cap=1%,sinks=1,when=prefill_end", 9, 2),
    ):
        assert spec_of(text, prompt_tokens).cap == cap, (text, prompt_tokens)
    budget = "(by_layer:factors=999999999x3/0.000000001)"
    for text in (f"recent:cap=25%,every={MOST}", f"recent:cap=50%,budget={budget}"):
        for prompt_tokens in (1, 300, 1 << 20):  # no number of tokens replaces it
            assert "expected 1 <= every < cap" in str(refusal(text, prompt_tokens))


def test_cap_in_bytes_includes_statistics_per_sequence():
    rule = make_eviction("recent:cap=100KiB")
    lanes = replace(LANES, fixed_bytes=20 * 1024)

    assert rule.for_request(1000, LANES).spec.cap == 96
    assert rule.for_request(1000, lanes).spec.cap == 80
    with pytest.raises(ConfigError) as refused:
        make_eviction("recent:cap=35KiB").for_request(1000, lanes)
    assert str(refused.value) == (
        "'recent:cap=35KiB': a sequence needs 16,384 B for one page of 16 tokens in every lane and "
        "20,480 B for the statistics of a sequence, got a cap of 35,840 B; raise cap, or set "
        "it in tokens"
    )


@pytest.mark.parametrize(
    ("cap", "prompt", "every"),
    [
        *(("2", 9, 1), ("64", 9, 8), ("511", 9, 63), ("512", 9, 64), ("4000", 9, 64)),
        *(("50%", 300, 18), ("1%", 300, 1), ("96KiB", 9, 12)),  # 1 KiB a token
    ],
)
def test_every_defaults_to_an_eighth_of_the_cap_up_to_64(cap, prompt, every):
    rule = make_eviction(f"recent:cap={cap}")
    spec = rule.for_request(prompt, LANES).spec

    assert (spec.every, spec.leaving) == (every, every)
    assert EvictionSpec(cap=spec.cap) == EvictionSpec(cap=spec.cap, every=every)
    assert rule.max_every == (every if cap.isdecimal() else 64)
    # tokens that a rule adds do not change the default
    spec = spec_of("kvcrush_openvino:cap=320,blocks=2,granularity=page", 900)
    assert (spec.cap, spec.every) == (320 + 2 * LANES.page_tokens, 40)
    spec = spec_of("recent:cap=10,when=prefill_end,every=64", 100)
    assert (spec.cap, spec.leaving) == (10, 0)


def test_lane_capacities_are_those_of_budgets_also_finalized_later():
    rule = make_eviction("recent:cap=100,every=10,sinks=4,budget=(pyramid:beta=10)")
    spec = rule.for_request(1000, LANES).spec

    # each lane has at least 14: 86 are divided, from 164 to 8: 178 126 74 22
    assert spec.lane_capacities == (178, 178, 126, 126, 74, 74, 22, 22)
    assert spec.min_cap == 22
    assert not spec.ragged
    text = "recent:cap=100,every=10,sinks=4,budget=(by_layer:caps=14/186/100/100)"
    assert "(cap 14, 10 evicted), but the rule needs 5" in str(refusal(text, 1000))
    error = refusal("recent:cap=50%,budget=(by_layer:caps=8x4)")
    assert isinstance(error, UnsoundCombination)
    assert "cap=50% depends on the prompt; give cap in tokens" in str(error)

    rule = make_eviction("sinks:cap=100,when=prefill_end,budget=lazy")
    spec = rule.for_request(1000, LANES).spec
    assert spec.lane_capacities == (UNBOUNDED,) * 8
    assert spec.lane_peak_tokens(spec.lane_capacities[0], 1500, 1000) == 1500
    assert spec_of("sinks:cap=4%,when=prefill_end,budget=(lazy:sinks=0)", 100).cap == 5


def test_caps_are_finalized_after_prefill():
    rule = make_eviction("h2o:cap=20,recent=2,when=prefill_end,budget=(squeeze:groups=2,share=0.5)")
    eviction = rule.for_request(30, LANES)
    similarity = torch.tensor([[[cosine * 30, 30.0]] for cosine in (0.1, 0.1, 0.2, 0.2)])
    statistics = {ResidualSimilarity().name: similarity.repeat_interleave(2, dim=0)}
    more = {"heads_per_layer": 2, "prompt_tokens": 30, "statistics": statistics}
    view = KVView(torch.arange(30).expand(8, 30), 30, **more)

    finalized = rule.finalize(eviction, view, LANES)

    # 2 of 20 are protected in all: half of 18 is 9, the others get 27
    assert finalized.spec.lane_capacities == (29, 29, 29, 29, 11, 11, 11, 11)
    assert finalized.spec.cap == 20
    uniform = make_eviction("h2o:cap=20,when=prefill_end")
    plain = uniform.for_request(30, LANES)
    assert uniform.finalize(plain, view, LANES) is plain


def test_pieces_are_chunks_or_pages_and_need_a_cap_with_their_edges():
    def pieces(granularity):
        eviction = make_eviction(f"recent:cap=512,{granularity}").for_request(999, LANES)
        return eviction.piece_tokens, eviction.by_page, eviction.keeps_order

    assert pieces("granularity=token") == (1, False, False)
    assert pieces("granularity=chunk") == (20, False, True)
    assert pieces("granularity=chunk,chunk_tokens=7") == (7, False, True)
    assert pieces("granularity=page") == (16, True, True)
    # one slot, 64 evicted at a time, and a piece of 16 at each end: 97
    text = "recent:cap={},every=64,granularity=page"
    assert make_eviction(text.format(97)).for_request(500, LANES).spec.cap == 97
    assert "but the rule needs 33" in str(refusal(text.format(96), 500))


@dataclass(frozen=True)
class GivenScores(ScorePolicy):
    scores: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    sinks: int = 0
    recent: int = 0

    def score(self, view):
        return self.scores

    def protected(self, view, keep):
        return view.oldest_positions(self.sinks) | view.newest(self.recent)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=24, max_size=24), min_size=4, max_size=4),
    st.integers(12, 24),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_ada_keeps_the_layer_total_and_protected_slots(scores, keep, piece_tokens, sinks, recent):
    view = KVView(torch.arange(24).expand(4, 24), next_position=24, heads_per_layer=2)
    policy = GivenScores(torch.tensor(scores, dtype=torch.float32), sinks, recent)
    eviction = Eviction(policy=policy, budget=Ada(), piece_tokens=piece_tokens)

    retained = eviction.select(view, torch.full((4,), keep))

    by_layer = view.by_layer(retained).sum(dim=(1, 2))
    if piece_tokens == 1:
        assert by_layer.tolist() == [2 * keep] * 2
    assert (by_layer <= 2 * keep).all()
    assert (by_layer > 2 * (keep - piece_tokens)).all()
    assert (retained | ~policy.protected(view, torch.tensor([keep]))).all()
    whole = retained[:, : 24 - 24 % piece_tokens].reshape(4, -1, piece_tokens)
    assert (whole.all(dim=2) | ~whole.any(dim=2)).all()


@pytest.mark.parametrize(
    "text", ["snapkv:cap={}", "sinks:cap={},every=64", "recent:cap={},sinks=90"]
)
def test_cap_that_the_error_names_is_the_smallest_that_works(text):
    with pytest.raises(ConfigError, match=r"cap=\d+ works") as caught:
        make_eviction(text.format(68 if "every" in text else 32))

    cap = int(str(caught.value).rpartition("cap=")[2].split()[0])
    make_eviction(text.format(cap))
    with pytest.raises(ConfigError):
        make_eviction(text.format(cap - 1))
