import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.errors import ConfigError, PolicyError, UnknownName
from quire.layout.statistics import AttentionSum, QueryRing, ResidualSimilarity
from quire.policies.base import SinksAndRecent
from quire.policies.budgets.ada import Ada
from quire.policies.budgets.base import UNBOUNDED, Shape, share_out
from quire.policies.budgets.by_layer import ByLayer
from quire.policies.budgets.duo import Duo, read_scores
from quire.policies.budgets.fastgen import FastGen
from quire.policies.budgets.lazy import Lazy
from quire.policies.budgets.pyramid import PUBLISHED, Pyramid
from quire.policies.budgets.scissors import Scissors
from quire.policies.budgets.squeeze import Squeeze, highest_cluster
from quire.policies.registry import make_budget
from quire.policies.view import KVView
from support.histories import Slots


def shape_of(cap, *, layers=4, heads=1, prompt=10_000, least=1, **more):
    shape = {"cap": cap, "leaving": 0, "num_layers": layers, "heads": heads, "least": least}
    return Shape(**shape | {"prompt_tokens": prompt} | more)


shapes = st.builds(
    shape_of,
    st.integers(30, 3000),
    layers=st.integers(1, 40),
    heads=st.integers(1, 3),
    prompt=st.integers(1, 9000),
    least=st.integers(1, 29),
)


def test_share_out_rounds_the_largest_fractions_up():
    for total, weights, shares in (
        (10, [3, 2, 1], [5, 3, 2]),  # 5, 3 1/3, 1 2/3: the largest fraction is rounded up
        (10, [1, 1, 1], [4, 3, 3]),  # equal fractions: the first is rounded up
        *((1, [1, 1], [1, 0]), (0, [1, 2], [0, 0]), (7, [0, 1], [0, 7])),
    ):
        assert share_out(total, weights) == shares


@given(st.integers(0, 10_000), st.lists(st.integers(0, 99), min_size=1, max_size=40))
def test_share_out_sums_to_the_total_with_rounding_below_one(total, weights):
    assume(sum(weights))

    shares = share_out(total, weights)

    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1


def test_pyramid_equals_the_published_caps_whose_rounding_exceeds_the_total():
    """The paper's setting, w = 8 retained by every layer.

    cap 128, w 8: C = 120, low = 120 // 20 = 6, high = 240 - 6 = 234; L = 4: steps of 228 / 3 = 76,
    so 234 158 82 6, and 8 more each; together 4 * 128 = 512.
    """
    caps = Pyramid().lane_capacities(shape_of(128, least=9))
    assert caps == (242, 166, 90, 14)
    assert sum(caps) == 4 * 128

    # cap 128, w 0, L = 6: low = 6, high = 250, the step 244 / 5 = 48.8 becomes 48.
    # Published: 250 202 154 106 58 10, together 780, 12 over 6 * 128 = 768. With largest fractions:
    # 250, 201.2, 152.4, 103.6, 54.8, 6: the two remaining go to 0.8 and 0.6.
    published = Pyramid(rounding=PUBLISHED).lane_capacities(shape_of(128, layers=6))
    exact = Pyramid().lane_capacities(shape_of(128, layers=6))
    assert published == (250, 202, 154, 106, 58, 10)
    assert exact == (250, 201, 152, 104, 55, 6)
    assert sum(exact) == 768


def test_short_prompt_flattens_the_pyramid():
    """C = 100: below 200 tokens all get the cap; at 195 - 0 the first layer would get the prompt.

    n = 200, beta 100: high = min(199, 200) = 199. With w = 20, cap 120, n = 205: high = 185, low
    = 200 - 185 = 15, in place of 195 and 5.
    """
    assert Pyramid().lane_capacities(shape_of(100, prompt=199)) is None
    assert Pyramid(beta=100).lane_capacities(shape_of(100, prompt=200, layers=2)) == (199, 1)
    assert Pyramid().lane_capacities(shape_of(120, prompt=205, layers=2, least=21)) == (205, 35)


@given(shapes, st.integers(1, 30))
def test_pyramids_keep_the_total_and_published_ones_exceed_it_by_rounding_only(shape, beta):
    assume(shape.spare >= beta)

    caps = Pyramid(beta=beta).lane_capacities(shape) or (shape.cap,) * shape.num_lanes

    assert sum(caps) == shape.num_lanes * shape.cap
    assert min(caps) >= shape.least
    assert list(caps) == sorted(caps, reverse=True)
    for layer in range(shape.num_layers):
        assert len(set(caps[layer * shape.heads : (layer + 1) * shape.heads])) == 1

    caps = Pyramid(beta=beta, rounding=PUBLISHED).lane_capacities(shape)
    over = 0 if caps is None else sum(caps) // shape.heads - shape.num_layers * shape.cap
    assert 0 <= over <= shape.num_layers * (shape.num_layers - 1) / 2


def test_too_steep_pyramids_scissors_and_small_shares_are_refused():
    with pytest.raises(ConfigError, match="raise cap from 30 to 31 or lower beta to 19"):
        Pyramid().lane_capacities(shape_of(30, least=12))
    assert Pyramid().lane_capacities(shape_of(31, least=12)) is not None
    assert Pyramid(beta=19).lane_capacities(shape_of(30, least=12)) is not None
    with pytest.raises(ConfigError, match="gives the first layer no tokens besides the 9"):
        Scissors(slope=0.9).lane_capacities(shape_of(18, least=10))
    with pytest.raises(ConfigError, match="gives some layers no tokens besides the 8"):
        Squeeze(share=0.1).lane_capacities(shape_of(17, layers=3, least=9))
    assert Squeeze(share=0.1).lane_capacities(shape_of(18, layers=3, least=9)) == (8 + 28,) * 3

    expected = "needs more than its 4 sinks in a lane after an eviction, got 4 tokens"
    with pytest.raises(ConfigError, match=expected):
        Lazy().lane_capacities(shape_of(12, layers=2, leaving=8))
    assert Lazy().lane_capacities(shape_of(13, layers=2, leaving=8)) == (UNBOUNDED, UNBOUNDED)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("pyramid:beta=0", ConfigError, "beta >= 1"),
        ("pyramid:rounding=publishd", UnknownName, "did you mean published"),
        ("pyramid:bta=3", UnknownName, "did you mean beta"),
        ("scissors:slope=1", ConfigError, "0 <= slope < 1"),
        ("scissors:slope=nan", ConfigError, "needs a finite number"),
        ("duo", ConfigError, "needs scores=smollm2, or scores=FILE"),
        ("duo:scores=1x4,streaming=0", ConfigError, "0 < streaming <= 1"),
        ("duo:scores=1e-3/0.5", ConfigError, "at most 9 digits .* got scores=1e-3/0.5; write"),
        ("duo:scores=-1/2", ConfigError, "got scores=-1/2"),
        ("duo:scores=0.1234567890/1", ConfigError, "at most 9 digits"),
        ("by_layer", ConfigError, "needs caps=512/256/... or factors="),
        ("by_layer:caps=8/8,factors=1/1", ConfigError, "needs caps=512/256/... or factors="),
        ("by_layer:caps=8/x", ConfigError, "numbers above 0 with / between layers"),
        ("by_layer:caps=8.5/8", ConfigError, "numbers above 0 with / between layers"),
        ("by_layer:caps=8/-1", ConfigError, "numbers above 0 with / between layers"),
        ("by_layer:factors=1/0", ConfigError, "numbers above 0 with / between layers"),
        ("by_layer:caps=8x0/8", ConfigError, "numbers above 0 with / between layers"),
        ("by_layer:caps=8x999999999", ConfigError, "numbers above 0 with / between layers"),
        ("by_layer:factors=1e-999999999/1", ConfigError, "numbers above 0 with / between layers"),
        ("squeeze:share=0", ConfigError, "0 < share <= 1"),
        ("squeeze:groups=1", ConfigError, "2 groups or more"),
        ("lazy:threshold=2", ConfigError, "0 <= threshold <= 1"),
        ("lazy:sinks=-1", ConfigError, "sinks >= 0"),
        ("lazy:last=0", ConfigError, "window of at least 1 query"),
        ("fastgen:share=1.5", ConfigError, "0 < share <= 1"),
        ("ada:floor=-0.1", ConfigError, "0 <= floor <= 1"),
        ("ada:floor=1.5", ConfigError, "0 <= floor <= 1"),
    ],
)
def test_invalid_budget_options_are_refused(text, error, message):
    with pytest.raises(error, match=message):
        make_budget(text)
    with pytest.raises(ConfigError, match="0 <= floor <= 1"):
        Ada(floor=math.nan)


def test_scissors_give_later_layers_more():
    """cap 100, w 0, L = 5, slope 0.5: 50 75 100 125 150."""
    assert Scissors().lane_capacities(shape_of(100, layers=5)) == (50, 75, 100, 125, 150)
    assert Scissors(slope=0.0).lane_capacities(shape_of(100, layers=2)) == (100, 100)
    assert Scissors().lane_capacities(shape_of(100, layers=1)) is None


@given(shapes, st.floats(0, 0.99))
def test_scissors_keep_the_total_and_increase(shape, slope):
    try:
        caps = Scissors(slope=slope).lane_capacities(shape) or (shape.cap,) * shape.num_lanes
    except ConfigError:
        assert shape.spare * (1 - slope) < 1.001
        return

    assert sum(caps) == shape.num_lanes * shape.cap
    assert min(caps) >= shape.least
    if slope * shape.spare * 2 > shape.num_layers - 1 or not slope:  # steps of a token or more
        assert list(caps) == sorted(caps)


def test_retrieval_heads_hold_the_prompt_and_streaming_heads_a_fraction():
    """cap 50, w 0, n 100, streaming 0.2: 10 each; 160 are left: 90 and 70 for the two highest.

    With w = 9: C = 41, 8 + 9 = 17 each, 4 * 33 = 132 left: 83 up to 100, then 49 more than 17.
    Equal scores: the lower lane first.
    """
    budget = Duo(scores="0.1/0.7/0.2/0.9", streaming=0.2)

    assert budget.lane_capacities(shape_of(50, prompt=100)) == (10, 80, 10, 100)
    assert budget.lane_capacities(shape_of(50, prompt=100, least=10)) == (17, 66, 17, 100)
    same = Duo(scores="1x4", streaming=0.5)
    assert same.lane_capacities(shape_of(50, layers=2, heads=2, prompt=100)) == (100, 50, 25, 25)


@given(shapes, st.floats(0.01, 1), st.randoms())
def test_duo_keeps_the_total_and_the_order_of_the_scores(shape, streaming, rng):
    scores = [rng.randrange(5) for _ in range(shape.num_lanes)]
    budget = Duo(scores="/".join(map(str, scores)), streaming=streaming)

    caps = budget.lane_capacities(shape)

    assert caps is not None
    assert sum(caps) == shape.num_lanes * shape.cap
    assert min(caps) >= shape.least
    assert max(caps) <= max(shape.prompt_tokens, shape.cap)
    by_score = [caps[lane] for lane in sorted(range(len(caps)), key=lambda lane: -scores[lane])]
    assert by_score == sorted(caps, reverse=True)
    if shape.prompt_tokens <= shape.cap:
        assert set(caps) == {shape.cap}


def test_scores_of_a_file_are_read_once(tmp_path):
    file = tmp_path / "heads.tsv"
    file.write_text("0.5\t1\n-2e-1\t0\n")
    duo = Duo(scores=str(file), streaming=0.2)

    assert duo.file == str(file)
    assert duo.lane_capacities(shape_of(50, layers=2, heads=2, prompt=100)) == (80, 100, 10, 10)
    file.unlink()
    assert duo.lane_capacities(shape_of(50, layers=2, heads=2, prompt=100)) == (80, 100, 10, 10)
    assert [len(row) for row in read_scores("smollm2")] == [3] * 30
    assert Duo(scores="smollm2").file == Duo(scores="1x4").file == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("", "got none"), ("0.5 nan", "got nan"), ("1 2 3 4 5 6 inf", "got inf")),
        ("0.5 heads", "'heads'"),
        ("0.25\n" * 300_000, "more than 1,048,576 characters"),
    ],
)
def test_files_that_are_no_scores_are_refused(text, found, tmp_path):
    file = tmp_path / "heads.tsv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"budget duo: .*heads\.tsv.*{found}"):
        Duo(scores=str(file)).lane_capacities(shape_of(50))
    with pytest.raises(ConfigError, match=r"expected 4 scores .* got 3; measure this model"):
        Duo(scores="1x3").lane_capacities(shape_of(50))


@pytest.mark.parametrize(
    ("text", "layers", "heads", "dim", "found"),
    [
        ("1 2 3 4\n5 6 7 8", 4, 2, 0, "expected 8 scores .* got 8 in 2 lines"),
        ("1 2\n3 4\n5 6 7\n8", 4, 2, 0, "got 8 in 4 lines"),
        ("1 2\n\n3 4", 2, 2, 0, None),
        # SmolLM2-135M: 30 layers, 3 KV heads of 64 elements; SmolLM-135M has the same shape
        ("smollm2", 30, 3, 64, None),
        ("smollm2", 15, 6, 64, "in 30 lines"),
        ("smollm2", 30, 3, 128, "instead of 128"),
    ],
)
def test_lines_are_layers_and_columns_heads(text, layers, heads, dim, found, tmp_path):
    file = tmp_path / "heads.tsv"
    file.write_text(text)
    shape = replace(shape_of(50, layers=layers, heads=heads), head_dim=dim)
    refused = nullcontext() if found is None else pytest.raises(ConfigError, match=found)
    with refused:
        assert Duo(scores=text if text == "smollm2" else str(file)).lane_capacities(shape)


def test_caps_by_layer_are_used_as_given_or_refused_if_the_total_differs():
    expected = (*[700] * 4, *[300] * 4)
    assert ByLayer(caps="700x2/300x2").lane_capacities(shape_of(500, heads=2)) == expected
    # 2 : 1 : 1 of 3 * 100; equal factors give equal caps
    assert ByLayer(factors="2/1/1").lane_capacities(shape_of(100, layers=3)) == (150, 75, 75)
    assert ByLayer(factors="0.2x3").lane_capacities(shape_of(100, layers=3)) == (100, 100, 100)

    with pytest.raises(ConfigError, match=r"the sum 800 \(4 layers times cap=200\), got 900"):
        ByLayer(caps="300x2/150x2").lane_capacities(shape_of(200))
    with pytest.raises(ConfigError, match="cap=225"):
        ByLayer(caps="300x2/150x2").lane_capacities(shape_of(200))
    with pytest.raises(ConfigError, match="expected 4 layers, which evict in this model, got 3"):
        ByLayer(caps="200x3").lane_capacities(shape_of(200))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 2000))
def test_factors_keep_the_total(factors, cap):
    budget = ByLayer(factors="/".join(map(str, factors)))

    caps = budget.lane_capacities(shape_of(cap, layers=len(factors)))

    assert sum(caps) == cap * len(factors)
    by_factor = [cap for _, cap in sorted(zip(factors, caps, strict=True))]
    assert by_factor == sorted(caps)


def view_of(live, heads, positions=None):
    width = max(live)
    slot = torch.arange(width).expand(len(live), width)
    in_use = slot < torch.tensor(live)[:, None]
    slot_positions = slot if positions is None else positions
    return KVView(torch.where(in_use, slot_positions, -1), 1000, heads_per_layer=heads)


def plain_division(live, protected, scores, positions, keep, floor):
    """One layer: even shares by filling heads, best counts by one sort, largest fractions."""
    heads = range(len(live))
    num_protected = [sum(p) for p in protected]
    num_free = [count - t for count, t in zip(live, num_protected, strict=True)]
    total = max(0, min(sum(keep), sum(live)) - sum(num_protected))
    even = [Fraction(0)] * len(live)
    while (remaining := total - sum(even)) > 0:
        open_heads = [h for h in heads if even[h] < num_free[h]]
        step = min(remaining / len(open_heads), min(num_free[h] - even[h] for h in open_heads))
        for h in open_heads:
            even[h] += step
    free = [(h, s) for h in heads for s in range(live[h]) if not protected[h][s]]
    rank = {(h, s): (-scores[h][s], positions[h][s], h) for h, s in free}
    first = set()
    if total >= len(live):
        by_head = [[slot for slot in free if slot[0] == h] for h in heads]
        first = {min(slots, key=rank.__getitem__) for slots in by_head if slots}
    rest = sorted((slot for slot in free if slot not in first), key=rank.__getitem__)
    best = [*first, *rest[: total - len(first)]]
    shares = [(1 - floor) * sum(slot[0] == h for slot in best) + floor * even[h] for h in heads]
    whole = [math.floor(share) for share in shares]
    by_loss = sorted(heads, key=lambda h: (whole[h] - shares[h], h))
    for h in by_loss[: total - sum(whole)]:
        whole[h] += 1
    return [w + t for w, t in zip(whole, num_protected, strict=True)]


@st.composite
def layers(draw):
    heads, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    width = draw(st.integers(1, 10))
    live = draw(st.lists(st.integers(1, width), min_size=heads * layers, max_size=heads * layers))
    markers = [draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in live]
    scores = [draw(st.lists(st.integers(0, 6), min_size=width, max_size=width)) for _ in live]
    positions = [sorted(draw(st.permutations(range(20)))[:width]) for _ in live]
    keep = [draw(st.integers(1, width)) for _ in live]
    floor = draw(st.sampled_from([Fraction(n, 10) for n in range(11)]))
    return heads, live, [[m == 0 for m in lane] for lane in markers], scores, positions, keep, floor


@given(layers())
def test_division_equals_a_plain_loop(given_layers):
    heads, live, protected, scores, positions, keep, floor = given_layers
    width = max(live)
    padded = torch.tensor([lane[:width] for lane in scores], dtype=torch.float32)
    mask = torch.tensor([lane + [False] * (width - len(lane)) for lane in protected])
    view = view_of(live, heads, torch.tensor([lane[:width] for lane in positions]))

    retained = Ada(floor=float(floor)).divide(view, padded, mask, torch.tensor(keep)).tolist()

    for start in range(0, len(live), heads):
        layer = slice(start, start + heads)
        parts = (part[layer] for part in (live, protected, scores, positions, keep))
        assert retained[layer] == plain_division(*parts, floor)
        least, total = [sum(lane) for lane in protected[layer]], sum(retained[layer])
        assert total == max(sum(least), min(sum(keep[layer]), sum(live[layer])))
        for at_least, tokens, held in zip(least, retained[layer], live[layer], strict=True):
            assert at_least <= tokens <= held


@dataclass(frozen=True)
class ByAttention(SinksAndRecent):
    def score(self, view):
        return view.statistic(AttentionSum())


def test_unbounded_caps_share_what_the_others_leave():
    """Four lanes of cap 10: 4 and 8 leave 28, for two lanes; three lanes leave 40 - 5 for three."""
    shape = shape_of(10, layers=4)
    assert shape.within_total([4, UNBOUNDED, 8, UNBOUNDED]) == (4, 14, 8, 14)
    assert shape.within_total([UNBOUNDED, 5, UNBOUNDED, UNBOUNDED]) == (12, 5, 12, 11)
    assert shape.within_total([4, 10, 8, 10]) == (4, 10, 8, 10)
    assert shape.within_total([UNBOUNDED] * 4) == (10,) * 4


def tightest(numbers, groups):
    """The least sum of squared distances from means, of all ways to cut the sorted numbers."""
    ranked = sorted(numbers)
    cuts = combinations(range(1, len(ranked)), min(groups, len(set(ranked))) - 1)
    groupings = [
        [ranked[start:end] for start, end in pairwise((0, *cut, len(ranked)))] for cut in cuts
    ]
    return min(sum(map(spread, grouping)) for grouping in groupings)


def spread(numbers):
    return sum((number - sum(numbers) / len(numbers)) ** 2 for number in numbers)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(2, 4))
def test_highest_cluster_belongs_to_an_optimal_grouping(integers, groups):
    numbers = [float(number) for number in integers]

    found = highest_cluster(numbers, groups)

    inside = [number for i, number in enumerate(numbers) if i in found]
    outside = [number for i, number in enumerate(numbers) if i not in found]
    assert max(outside, default=-1) < min(inside)
    assert bool(outside) == (len(set(numbers)) > 1)
    rest = tightest(outside, min(groups, len(set(numbers))) - 1) if outside else 0
    assert spread(inside) + rest == pytest.approx(tightest(numbers, groups), abs=1e-9)


def view_with_cosines(cosines, heads=1, tokens=50):
    record = torch.tensor([[[c * tokens, tokens]] for c in cosines for _ in range(heads)])
    positions, statistics = torch.zeros(len(record), 1).long(), {ResidualSimilarity().name: record}
    return KVView(positions, 1, heads_per_layer=heads, statistics=statistics)


def test_squeeze_worked_example_does_not_shrink_protected_tokens():
    """Cosines 0.2 0.5 0.9 0.91: the last two shrink; 0.3 * 100 = 30, (4 - 0.6) * 100 / 2 = 170."""
    view = view_with_cosines([0.2, 0.5, 0.9, 0.91], heads=2)

    caps = Squeeze().finalize(view, ByAttention(), shape_of(100, layers=4, heads=2))

    assert caps == (170, 170, 170, 170, 30, 30, 30, 30)

    # 20 of 100 are protected: 0.5 * 80 + 20 = 60 and (2 - 0.5) * 80 + 20 = 140.
    view = view_with_cosines([0.1, 0.9])

    shape = shape_of(100, layers=2, least=21)
    assert Squeeze(share=0.5, groups=2).finalize(view, ByAttention(), shape) == (140, 60)
    # equal cosines
    caps = Squeeze().finalize(view_with_cosines([0.5] * 3), ByAttention(), shape_of(100, layers=3))

    assert caps == (100, 100, 100)


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(40, 500),
    st.integers(1, 30),
    st.sampled_from([0.1, 0.3, 0.5, 1.0]),
)
def test_squeeze_keeps_the_total(cosines, heads, cap, least, share):
    shape = shape_of(cap, layers=len(cosines), heads=heads, least=least)
    budget = Squeeze(share=share)

    reserved = budget.lane_capacities(shape)
    caps = budget.finalize(view_with_cosines(cosines, heads), ByAttention(), shape)

    assert sum(caps) == cap * shape.num_lanes
    assert min(caps) >= least
    assert all(cap <= most for cap, most in zip(caps, reserved, strict=True))


def test_layer_without_recorded_similarity_raises_an_error():
    view = view_with_cosines([0.2, 0.5], tokens=0)
    with pytest.raises(PolicyError, match="some layer has recorded none; use another budget"):
        Squeeze().finalize(view, ByAttention(), shape_of(100, layers=2))


def view_with_masses(far, tokens=10):
    """One head a layer; its last query gives `far` of its attention to the token at position 3."""
    ring = QueryRing(window=1)
    keys = torch.zeros(len(far), tokens, 1)
    for layer, mass in enumerate(far):
        # softmax of one product x against tokens - 1 zeros is mass
        keys[layer, 3, 0] = torch.tensor(mass * (tokens - 1) / (1 - mass)).log()
    record = torch.tensor([[[1.0, tokens]]] * len(far))  # the query 1, at the last position
    more = {"statistics": {ring.name: record}, "slots": Slots(keys, keys), "head_dim": 1}
    return KVView(torch.arange(tokens).expand(len(far), tokens), tokens, **more)


def test_lazy_caps_layers_with_local_attention_only():
    """Ten tokens, cap 9 with one sink and the newest 8 (2 to 9): only position 1 is far.

    Cap 7: the sink and 4 to 9; positions 1, 2, 3 are far, of which 3 has 0.05 or 0.5 and the other
    nine divide the rest: 0.95 * 7 / 9 = 0.739 near, and 0.5 * 7 / 9 = 0.389.
    """
    view, budget = view_with_masses([0.05, 0.5]), Lazy(threshold=0.7, sinks=1, last=1)

    assert budget.finalize(view, ByAttention(), shape_of(7, layers=2)) == (7, UNBOUNDED)
    assert budget.finalize(view, ByAttention(), shape_of(9, layers=2, leaving=2)) == (9, UNBOUNDED)
    for threshold, caps in ((0.74, (UNBOUNDED, UNBOUNDED)), (0.38, (7, 7))):
        budget = Lazy(threshold=threshold, sinks=1, last=1)
        assert budget.finalize(view, ByAttention(), shape_of(7, layers=2)) == caps


@given(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_higher_lazy_threshold_caps_no_more_layers(far, first, second):
    view, shape = view_with_masses(far), shape_of(6, layers=len(far))

    budgets = (Lazy(threshold=x, sinks=1, last=1) for x in sorted((first, second)))
    low, high = (budget.finalize(view, ByAttention(), shape) for budget in budgets)

    assert all(a <= b for a, b in zip(low, high, strict=True))


def test_bounded_lazy_layers_retain_the_fewest_tokens_above_the_threshold():
    """Ten tokens. Layer 0: position 3 has 0.05, each other 0.106; six have 0.633: a sink, 5 to 9.

    Layer 1: position 3 has 0.5, each other 0.056; a sink and 4 to 9 have 0.389, below 0.6. Of 14
    tokens layer 0 retains 6 and layer 1 the others. If an eviction removes 2, layer 0 holds 8.
    """
    view, budget = view_with_masses([0.05, 0.5]), Lazy(threshold=0.6, sinks=1, last=1)

    assert budget.finalize(view, ByAttention(), shape_of(7, layers=2, bounded=True)) == (6, 8)
    shape = shape_of(9, layers=2, leaving=2, bounded=True)
    assert budget.finalize(view, ByAttention(), shape) == (8, 10)
    shape = shape_of(7, layers=2, least=7, bounded=True)
    assert budget.finalize(view, ByAttention(), shape) == (7, 7)
    all_lazy = Lazy(threshold=0.3, sinks=1, last=1)
    assert all_lazy.finalize(view, ByAttention(), shape_of(7, layers=2, bounded=True)) == (7, 7)


@given(
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=6),
    st.floats(0, 1),
    st.integers(3, 12),
    st.integers(1, 2),
)
def test_bounded_lazy_caps_are_within_the_total(far, threshold, cap, least):
    shape = shape_of(cap, layers=len(far), least=least, bounded=True)
    budget = Lazy(threshold=threshold, sinks=1, last=1)

    caps = budget.finalize(view_with_masses(far), ByAttention(), shape)

    assert sum(caps) <= cap * len(far)
    assert min(caps) >= least


def view_with(received, positions=None):
    """Heads of a layer with these sums of attention."""
    count, slots = received.shape
    positions = torch.arange(slots).expand(count, slots) if positions is None else positions
    statistics = {AttentionSum().name: received}
    return KVView(positions, slots, heads_per_layer=count, statistics=statistics)


def test_fastgen_selects_the_smallest_cap_that_recovers_attention_of_own_slots():
    """Ten slots, one sink and two recent protected; least = 4, cap = 6; 0.9 must be recovered.

    Head 0: protected slots have 95 of 100. Head 1: they have 40, the best three others 30 20 5:
    with one more 70, with three more 95. Head 2: all have the same 10, so six have 60.
    """
    received = torch.tensor(
        [[60.0, 1, 1, 1, 1, 1, 0, 0, 20, 15], [20.0, 30, 20, 5, 1, 1, 1, 2, 10, 10], [10.0] * 10]
    )
    rule, budget = ByAttention(sinks=1, recent=2), FastGen(share=0.9)
    shape = shape_of(6, layers=1, heads=3, least=4)
    assert budget.finalize(view_with(received), rule, shape) == (4, 6, UNBOUNDED)
    # heads 0 and 2, bounded: 4, and of 2 * 6 tokens the other 8
    shape = shape_of(6, layers=1, heads=2, least=4, bounded=True)
    assert budget.finalize(view_with(received[[0, 2]]), rule, shape) == (4, 8)

    # Head 1 holds four tokens, as many as the least cap: they have all of its attention.
    positions = torch.tensor([list(range(10)), [0, 7, 8, 9, *[-1] * 6]])
    received = torch.tensor([[10.0] * 10, [5.0, 5, 5, 5, *[0.0] * 6]])
    shape = shape_of(6, layers=1, heads=2, least=4, bounded=True)
    rule = ByAttention(sinks=1, recent=2)
    assert FastGen(share=0.9).finalize(view_with(received, positions), rule, shape) == (8, 4)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=8), min_size=1, max_size=4),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    st.integers(4, 12),
    st.integers(0, 1),
)
def test_fastgen_caps_recover_the_share_of_attention(received, share, cap, leaving):
    attention = torch.tensor(received, dtype=torch.float32)
    view = view_with(attention)
    rule = ByAttention(sinks=1, recent=1)
    shape = shape_of(cap, layers=1, heads=len(received), least=3 + leaving, leaving=leaving)

    caps = FastGen(share=share).finalize(view, rule, shape)

    assert set(caps) <= {shape.least, shape.cap, UNBOUNDED}
    for lane, lane_cap in enumerate(caps):
        keep = torch.full((len(received),), min(8, lane_cap - leaving))
        recovered = (attention * rule.select(view, keep))[lane].sum()
        assert recovered >= share * attention[lane].sum()
