"""KVCrush and its relatives against plain ones: lists, sets and sums, token by token."""

from math import ceil, floor

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.policies.eviction import make_eviction
from quire.policies.h2o import H2O
from quire.policies.kvcrush import KVCrush
from quire.policies.kvcrush_openvino import KVCrushOpenVINO
from quire.policies.lots import lots_of
from quire.policies.recent import Recent
from quire.policies.roco import RoCo
from quire.policies.signatures import anchors, bits
from quire.policies.signatures.query_heads import by_query_head, first_heads
from quire.policies.snapkv import SnapKV
from quire.policies.view import KVView
from quire.spec.statistics import AttentionSum
from unit.policies.histories import best, changed, kept_positions, make_history

BASES = [
    H2O(recent=4, sinks=2),
    H2O(power=2),
    SnapKV(window=4),
]
BASE = BASES[0]
PLAIN_ANCHORS = [anchors.RANDOM, anchors.ALTERNATING, anchors.MEAN, anchors.ZEROS, anchors.ONES]


def history_of(tokens=60, group=3, seed=0, layers=(0, 2)):
    return make_history(tokens=tokens, group=group, seed=seed, layers=layers, ragged=False)


# ---- plain -------------------------------------------------------------------------------------


def of_layers(history, policy, keep, piece):
    """By layer: positions, scores [head][token], tokens that stay, what a head would keep."""
    view = history.view(policy.statistics)
    heads = by_query_head(view, policy.base.statistics)
    scores = policy.base.score(heads)
    protected = policy.protected(view, torch.full((len(view.positions),), keep - 2 * (piece - 1)))
    per_layer = history.heads * view.group
    for number, layer in enumerate(history.layers):
        lane = number * history.heads
        tokens = history.cached[lane]
        own = range(number * per_layer, (number + 1) * per_layer)
        of_head = [dict(zip(tokens, scores[head].tolist(), strict=False)) for head in own]
        must = {t for t, held in zip(tokens, protected[lane], strict=False) if held}
        yield layer, tokens, of_head, must, [set(best(s, must, keep)) for s in of_head]


def plain_distance(signature, anchor):
    return sum(a != b for a, b in zip(signature, anchor, strict=True))


def plain_anchor(kind, signatures, layer, seed=0):
    width = len(signatures[0])
    if kind == anchors.MEAN:
        return [2 * sum(s[i] for s in signatures) > len(signatures) for i in range(width)]
    if kind == anchors.RANDOM:
        lots = lots_of(seed, torch.tensor(layer), torch.arange(width))
        return [lot % 2 == 1 for lot in lots.tolist()]
    return {
        anchors.ALTERNATING: [i % 2 == 1 for i in range(width)],
        anchors.ZEROS: [False] * width,
        anchors.ONES: [True] * width,
    }[kind]


def plain_slices(ordered, count):
    count, total = min(count, len(ordered)), len(ordered)
    cuts = [ordered[i * total // count : (i + 1) * total // count] for i in range(count)]
    return {part[(len(part) - 1) // 2] for part in cuts}


def pieces_of(tokens, piece):
    return [tokens[i : i + piece] for i in range(0, len(tokens), piece)]


def plain_kvcrush(history, policy, keep, piece=1):
    """What stays in each layer."""
    kept = []
    for layer, tokens, of_head, must, would in of_layers(history, policy, keep, piece):
        cut = pieces_of(tokens, piece)
        held = [p for p in cut if must & set(p) or len(p) < piece]
        free = [p for p in cut if p not in held]
        room = min((keep - sum(map(len, held))) // piece, len(free))
        count = floor(room * policy.share_of_all + 1e-9)
        mean = {t: np.mean([scores[t] for scores in of_head]) for t in tokens}
        score = {number: sum(mean[t] for t in p) for number, p in enumerate(free)}
        important = best(score, [], room - count)
        grouped = [number for number in range(len(free)) if number not in important]
        signature = {n: [t in head for t in free[n] for head in would] for n in grouped}
        anchor = plain_anchor(policy.anchor, list(signature.values()), layer, policy.seed)
        ordered = sorted(grouped, key=lambda n: (plain_distance(signature[n], anchor), n))
        stays = set(important) | (plain_slices(ordered, count) if count else set())
        kept.append(sorted(t for p in [*held, *(free[n] for n in stays)] for t in p))
    return [layer for layer in kept for _ in range(history.heads)]


def check(history, policy, keep, piece=1):
    view = history.view(policy.statistics)
    wanted = torch.full((len(view.positions),), keep)

    kept = kept_positions(view, policy.select(view, wanted, piece))

    assert kept == plain_kvcrush(history, policy, keep, piece)
    assert len(kept[0]) < len(history.cached[0])


# ---- kvcrush -----------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", PLAIN_ANCHORS)
@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__ + str(base.least_cap))
@pytest.mark.parametrize("group", [1, 3])
def test_kvcrush_keeps_what_the_plain_one_keeps(base, anchor, group):
    for seed in range(3):
        history = history_of(group=group, seed=seed)
        check(history, KVCrush(base=base, anchor=anchor, share=0.5, seed=seed), 30)


@pytest.mark.parametrize("anchor", [anchors.MEAN, anchors.ALTERNATING])
@pytest.mark.parametrize("piece", [2, 5])
def test_kvcrush_keeps_whole_pieces_with_their_tokens_bits_side_by_side(piece, anchor):
    for seed in range(3):
        history = history_of(tokens=90, seed=seed)
        check(history, KVCrush(base=BASE, anchor=anchor, share=0.5), 50, piece)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.9])
def test_a_share_of_what_is_left_is_for_representatives(share):
    check(history_of(), KVCrush(base=BASE, share=share), 36)


def test_additive_representatives_come_on_top_of_the_cap():
    """Cap 46 with 6 protected: 40 left, half of it on top: 66, of which 20 are representatives."""
    policy = KVCrush(base=BASE, share=0.5, representatives="additive")

    assert policy.added_tokens(46) == 20
    check(history_of(tokens=99), policy, 66)


def test_figure_3_by_hand():
    """8 tokens, 4 heads, budget 4, half of it for representatives; anchor zeros.

    Each head keeps its four best. Sums 36, 30, 9, 5, 14, 13, 8, 19 -> important 0 and 1.

        token       0     1     2     3     4     5     6     7
        head 0     9 x   8 x   1     1     4 x   2     3 x   0
        head 1     9 x   8 x   1     0     4     3     2     7 x     (5 x: 5)
        ...
    Signatures of the rest: 2 0001, 3 0000, 4 1100, 5 0011, 6 1000, 7 0111; distances to 0000 are 1,
    0, 2, 2, 1, 3; sorted 3 2 6 4 5 7; slices 3 2 6 and 4 5 7; their middles 2 and 5 stay.
    """
    scores = torch.tensor(
        [
            [90.0, 80, 1, 0, 40, 2, 30, 3],  # keeps 0 1 4 6
            [90, 80, 2, 0, 40, 1, 3, 30],  # keeps 0 1 4 7
            [90, 80, 1, 0, 2, 40, 3, 30],  # keeps 0 1 5 7
            [90, 1, 30, 0, 2, 40, 3, 50],  # keeps 0 2 5 7
        ]
    )
    statistic = AttentionSum().each()
    view = KVView(
        torch.arange(8)[None], 8, layers=(0,), group=4, statistics={statistic.name: scores}
    )
    policy = KVCrush(base=H2O(recent=0), share=0.5, anchor="zeros")

    kept = policy.select(view, torch.tensor([4]))

    assert kept_positions(view, kept) == [[0, 1, 2, 5]]


def test_a_random_pick_is_the_same_each_time_and_another_with_another_seed():
    history = history_of(tokens=200)
    policies = [KVCrush(base=BASE, pick="random", share=0.5, seed=seed) for seed in (0, 0, 1)]
    view = history.view(policies[0].statistics)
    keep = torch.full((len(view.positions),), 60)

    first, again, other = (policy.select(view, keep) for policy in policies)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.sum(dim=1), keep)


@pytest.mark.parametrize("anchor", [anchors.RANDOM, anchors.MEAN, anchors.FARTHEST])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_several_anchors_share_the_representatives_in_proportion(anchor, count):
    history = history_of(tokens=120)
    policy = KVCrush(base=BASE, anchor=anchor, anchors=count, share=0.5)
    view = history.view(policy.statistics)

    kept = policy.select(view, torch.full((len(view.positions),), 60))

    assert kept.sum(dim=1).tolist() == [60] * len(kept)
    assert torch.equal(kept[0], kept[1])


def test_one_distance_is_measured_for_each_token_and_anchor(monkeypatch):
    """Linear in tokens: counted, not timed. Two layers; what is protected is not measured."""
    measured, protected = [], BASE.sinks + BASE.recent

    def counted(words, anchor):
        measured.append(words.shape[0] * words.shape[1])
        return bits.hamming(words, anchor)

    monkeypatch.setattr(anchors, "hamming", counted)
    for number in (1, 4):
        policy = KVCrush(base=BASE, anchors=number)
        view = history_of(tokens=100).view(policy.statistics)
        measured.clear()
        policy.select(view, torch.full((len(view.positions),), 50))
        assert sum(measured) == number * 2 * (view.positions.shape[1] - protected)


def test_a_dynamic_share_is_whole_where_all_score_alike_and_nothing_where_few_have_all():
    statistic = AttentionSum().each()
    policy = KVCrush(base=H2O(recent=0), share=0.5, dynamic=True, anchor="zeros")
    flat = torch.arange(20.0, 0, -1)[None] * 1e-3 + 1
    peaked = torch.where(torch.arange(20) < 6, 1.0, 0.0)[None] * torch.arange(20.0, 0, -1)

    def important(scores):
        view = KVView(torch.arange(20)[None], 20, layers=(0,), statistics={statistic.name: scores})
        kept = policy.select(view, torch.tensor([8]))[0]
        return int(kept[:8].sum()), int(kept.sum())

    assert important(peaked) == (8, 8)
    assert important(flat)[0] < 8


# ---- what a head says --------------------------------------------------------------------------


def test_a_view_by_query_heads_scores_each_as_if_it_were_alone():
    """A rule on the view of heads gives what it gives a model without groups."""
    history = history_of(group=3)
    for base in [*BASES, SnapKV(window=6, kernel=1)]:
        policy = KVCrush(base=base)
        view = history.view(policy.statistics)
        scores = base.score(by_query_head(view, base.statistics))
        for lane in range(len(history.cached)):
            for head in range(3):
                alone = make_history(tokens=60, group=3, layers=(0, 2), ragged=False)
                alone.raw = alone.raw[:, head : head + 1]
                alone.weights = alone.weights[:, head : head + 1]
                expected = base.score(alone.view(base.statistics))[lane]
                torch.testing.assert_close(scores[lane * 3 + head], expected)


@pytest.mark.parametrize("base", [*BASES, RoCo(sinks=1, recent=2)], ids=str)
def test_a_bit_says_whether_the_head_alone_would_keep_the_token(base):
    """Also where a rule does more than rank its scores, as RoCo does."""
    view = history_of(group=3).view(KVCrush(base=base).statistics)
    keep = torch.full((len(view.positions),), 30)
    asked = KVCrush(base=base).ask(view, keep, 1)

    alone = base.select(by_query_head(view, base.statistics), keep.repeat_interleave(3))

    assert torch.equal(asked.all_bits.flatten(0, 1), alone)


def test_what_is_asked_once_a_layer_is_asked_of_its_first_head():
    history = history_of(group=3)
    base = SnapKV(window=4)
    view = history.view([*base.statistics, AttentionSum(), AttentionSum().each()])
    found = first_heads(view)

    first = torch.arange(len(history.layers)) * history.heads
    assert torch.equal(found.positions, view.positions[first])
    assert torch.equal(found.keys, view.keys[first])
    for statistic in (*base.statistics, AttentionSum()):
        assert torch.equal(found.remembered(statistic), view.remembered(statistic)[first])
    heads = (first[:, None] * 3 + torch.arange(3)).flatten()
    each = AttentionSum().each()
    assert torch.equal(found.remembered(each), view.remembered(each)[heads])


def test_packed_bits_come_back_and_their_distances_are_those_of_bits():
    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 17, 31, 63, 64, 65, 200):
        made, anchor = rng.random((3, width, 9)) < 0.5, rng.random((3, width, 1)) < 0.5
        words = bits.pack(made)

        assert words.shape == (3, 9, ceil(width / 64))
        assert (bits.unpack(words, width) == made.transpose(0, 2, 1)).all()
        assert (bits.hamming(words, bits.pack(anchor)) == (made ^ anchor).sum(axis=1)).all()


def test_kept_signatures_are_those_of_the_first_time():
    """A token's bits are written down and read again; later ones are asked afresh."""
    history = history_of()
    policy = KVCrush(base=BASE, signatures="kept", share=0.5)
    view = history.view(policy.statistics)
    keep = torch.full((len(view.positions),), 30)
    asked = policy.ask(view, keep, 1)
    before = asked.all_bits.flatten(0, 1)

    decision = policy.decide(view, keep)
    noted = {s.name: n for s, n in decision.notes.items()}
    until = noted["signed_until"]
    noted["signature_bits"] = torch.where(view.positions % 2 == 0, 7.0, 0.0)  # of all three heads
    noted["signed_until"] = torch.full_like(until, 40)
    again = policy.ask(changed(view, statistics={**view.statistics, **noted}), keep, 1)

    assert torch.equal(decision.stays, KVCrush(base=BASE, share=0.5).select(view, keep))
    assert until.unique().tolist() == [history.tokens]
    positions = view.positions.repeat_interleave(3, dim=0)
    old, again = positions < 40, again.all_bits.flatten(0, 1)
    assert torch.equal(again[old], positions[old] % 2 == 0)
    assert torch.equal(again[~old], before[~old])


# ---- OpenVINO's --------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", PLAIN_ANCHORS)
def test_openvinos_form_keeps_what_the_plain_one_keeps(anchor):
    piece, keep = 4, 56
    for seed in range(3):
        history = history_of(tokens=90, seed=seed)
        policy = KVCrushOpenVINO(base=BASE, blocks=3, anchor=anchor, seed=seed)
        view = history.view(policy.statistics)
        expected = []
        for layer, tokens, of_head, must, _ in of_layers(history, policy, keep, piece):
            cut = pieces_of(tokens, piece)
            held = [p for p in cut if must & set(p) or len(p) < piece]
            free = [p for p in cut if p not in held]
            room = (keep - sum(map(len, held))) // piece
            mean = {t: np.mean([scores[t] for scores in of_head]) for t in tokens}
            may = [t for p in free for t in p]
            half = best({t: mean[t] for t in may}, [], len(may) // 2)
            chosen = best({n: sum(mean[t] for t in p) for n, p in enumerate(free)}, [], room - 3)
            signature = [[t in half for t in p] for p in free]
            own = plain_anchor(anchor, signature, layer, seed)
            leave = [n for n in range(len(free)) if n not in chosen]
            ordered = sorted(leave, key=lambda n: (plain_distance(signature[n], own), n))
            saved = [ordered[i * (len(ordered) // 3)] for i in range(3)]
            stays = [*held, *(free[n] for n in [*chosen, *saved])]
            expected += [sorted(t for p in stays for t in p)] * history.heads

        kept = policy.select(view, torch.full((len(view.positions),), keep), piece)

        assert kept_positions(view, kept) == expected


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("kvcrush:cap=99,every=9,share=1.0", ConfigError, "expected 0 <= share < 1"),
        ("kvcrush:cap=99,every=9,share=-0.1", ConfigError, "expected 0 <= share < 1"),
        ("kvcrush:cap=99,every=9,base=recent", ConfigError, "does not tell heads apart; use"),
        ("kvcrush:cap=99,every=9,base=(kvcrush:share=0.5)", ConfigError, "does not tell"),
        ("kvcrush:cap=99,every=9,anchor=meen", UnknownName, "mean"),
        ("kvcrush:cap=99,every=9,anchor=zeros,anchors=2", ConfigError, "are all one; use random"),
        ("kvcrush:cap=99,every=9,pick=first", UnknownName, "middle"),
        ("kvcrush:cap=99,every=9,representatives=outside", UnknownName, "inside"),
        ("kvcrush:cap=14,every=8", ConfigError, "needs 7; raise cap or share"),
        ("kvcrush:cap=99,every=9,share=0.01", ConfigError, "needs 199; raise cap or share"),
        (
            "kvcrush_openvino:cap=2,when=prefill_end,granularity=page,blocks=1,base=(h2o:sinks=9)",
            ConfigError,
            "lower blocks or every",
        ),
        ("kvcrush_openvino:cap=99,every=9", UnsoundCombination, "use granularity=page"),
        ("kvcrush:cap=99,every=9,budget=ada", UnsoundCombination, "one set for all heads"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(text, error, says):
    with pytest.raises(error, match=says):
        make_eviction(text)


def test_the_least_cap_leaves_one_representative_and_one_less_is_refused():
    """h2o keeps half of what stays as newest: 7 kept leave 4 to choose, a quarter of them is 1."""
    policy = KVCrush()

    assert policy.least_cap == 7
    assert policy.least_kept(4) == 31 + 8  # four pieces of four to choose, 15 newest, two edges
    assert KVCrush(base=Recent2(), share=0.25).least_cap == 4


class Recent2(Recent):
    """A rule that protects nothing, for the arithmetic alone."""

    @property
    def scores_heads(self) -> bool:
        return True


def test_a_view_without_what_each_head_saw_is_refused():
    policy = KVCrush()
    view = changed(history_of().view(policy.statistics), statistics={})

    with pytest.raises(ConfigError.__base__, match="made without the statistic"):
        policy.select(view, view.num_slots[:, 0] - 1)
