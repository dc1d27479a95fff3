"""Budgets that are known before prefill: pyramid, scissors, duo, and caps by layer."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.errors import ConfigError, UnknownName
from quire.policies.budgets.base import Shape, share_out
from quire.policies.budgets.by_layer import ByLayer
from quire.policies.budgets.duo import Duo, read_scores
from quire.policies.budgets.pyramid import PUBLISHED, Pyramid
from quire.policies.budgets.scissors import Scissors
from quire.policies.registry import make_budget


def shape_of(
    cap: int, *, layers: int = 4, heads: int = 1, prompt: int = 10_000, least: int = 1
) -> Shape:
    return Shape(
        cap=cap, leaving=0, num_layers=layers, heads=heads, prompt_tokens=prompt, least=least
    )


shapes = st.builds(
    shape_of,
    st.integers(30, 3000),
    layers=st.integers(1, 40),
    heads=st.integers(1, 3),
    prompt=st.integers(1, 9000),
    least=st.integers(1, 29),
)


# ---- whole tokens from shares --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (10, [3, 2, 1], [5, 3, 2]),  # 5, 3 1/3, 1 2/3: the largest fraction is rounded up
        (10, [1, 1, 1], [4, 3, 3]),  # equal fractions: the first is rounded up
        (1, [1, 1], [1, 0]),
        (0, [1, 2], [0, 0]),
        (7, [0, 1], [0, 7]),
    ],
)
def test_share_out_rounds_the_largest_fractions_up(total, weights, shares) -> None:
    assert share_out(total, weights) == shares


@given(st.integers(0, 10_000), st.lists(st.integers(0, 99), min_size=1, max_size=40))
def test_share_out_sums_to_the_total_with_rounding_below_one(total, weights) -> None:
    assume(sum(weights))

    shares = share_out(total, weights)

    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1


# ---- pyramid -------------------------------------------------------------------------------------


def test_pyramid_equals_the_published_caps() -> None:
    """The paper's setting, w = 8 retained by every layer.

    cap 128, w 8: C = 120, low = 120 // 20 = 6, high = 240 - 6 = 234; L = 4: steps of 228 / 3 = 76,
    so 234 158 82 6, and 8 more each; together 4 * 128 = 512.
    """
    caps = Pyramid().lane_capacities(shape_of(128, least=9))

    assert caps == (242, 166, 90, 14)
    assert sum(caps) == 4 * 128


def test_published_rounding_exceeds_the_total() -> None:
    """cap 128, w 0, L = 6: low = 6, high = 250, the step 244 / 5 = 48.8 becomes 48.

    Published: 250 202 154 106 58 10, together 780, 12 over 6 * 128 = 768. With largest fractions:
    250, 201.2, 152.4, 103.6, 54.8, 6: the two remaining go to 0.8 and 0.6.
    """
    published = Pyramid(rounding=PUBLISHED).lane_capacities(shape_of(128, layers=6))
    exact = Pyramid().lane_capacities(shape_of(128, layers=6))

    assert published == (250, 202, 154, 106, 58, 10)
    assert exact == (250, 201, 152, 104, 55, 6)
    assert sum(exact) == 768


def test_short_prompt_flattens_the_pyramid() -> None:
    """C = 100: below 200 tokens all get the cap; at 195 - 0 the first layer would get the prompt.

    n = 200, beta 100: high = min(199, 200) = 199. With w = 20, cap 120, n = 205: high = 185, low
    = 200 - 185 = 15, in place of 195 and 5.
    """
    assert Pyramid().lane_capacities(shape_of(100, prompt=199)) is None
    assert Pyramid(beta=100).lane_capacities(shape_of(100, prompt=200, layers=2)) == (199, 1)
    assert Pyramid().lane_capacities(shape_of(120, prompt=205, layers=2, least=21)) == (205, 35)


@given(shapes, st.integers(1, 30))
def test_pyramid_keeps_the_total_and_decreases(shape: Shape, beta: int) -> None:
    assume(shape.spare >= beta)

    caps = Pyramid(beta=beta).lane_capacities(shape) or (shape.cap,) * shape.num_lanes

    assert sum(caps) == shape.num_lanes * shape.cap
    assert min(caps) >= shape.least
    assert list(caps) == sorted(caps, reverse=True)
    for layer in range(shape.num_layers):
        assert len(set(caps[layer * shape.heads : (layer + 1) * shape.heads])) == 1


@given(shapes, st.integers(1, 30))
def test_published_pyramid_exceeds_the_total_by_rounding_only(shape, beta) -> None:
    assume(shape.spare >= beta)

    caps = Pyramid(beta=beta, rounding=PUBLISHED).lane_capacities(shape)

    over = 0 if caps is None else sum(caps) // shape.heads - shape.num_layers * shape.cap
    assert 0 <= over <= shape.num_layers * (shape.num_layers - 1) / 2


def test_too_steep_pyramid_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="raise cap from 30 to 31 or lower beta to 19"):
        Pyramid().lane_capacities(shape_of(30, least=12))

    assert Pyramid().lane_capacities(shape_of(31, least=12)) is not None
    assert Pyramid(beta=19).lane_capacities(shape_of(30, least=12)) is not None


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
    ],
)
def test_invalid_budget_options_are_refused(text, error, message) -> None:
    with pytest.raises(error, match=message):
        make_budget(text)


# ---- scissors ------------------------------------------------------------------------------------


def test_scissors_give_later_layers_more() -> None:
    """cap 100, w 0, L = 5, slope 0.5: 50 75 100 125 150."""
    assert Scissors().lane_capacities(shape_of(100, layers=5)) == (50, 75, 100, 125, 150)
    assert Scissors(slope=0.0).lane_capacities(shape_of(100, layers=2)) == (100, 100)
    assert Scissors().lane_capacities(shape_of(100, layers=1)) is None


@given(shapes, st.floats(0, 0.99))
def test_scissors_keep_the_total_and_increase(shape: Shape, slope: float) -> None:
    try:
        caps = Scissors(slope=slope).lane_capacities(shape) or (shape.cap,) * shape.num_lanes
    except ConfigError:
        assert shape.spare * (1 - slope) < 1.001
        return

    assert sum(caps) == shape.num_lanes * shape.cap
    assert min(caps) >= shape.least
    if slope * shape.spare * 2 > shape.num_layers - 1 or not slope:  # steps of a token or more
        assert list(caps) == sorted(caps)


def test_too_steep_scissors_are_refused() -> None:
    with pytest.raises(ConfigError, match="gives the first layer no tokens besides the 9"):
        Scissors(slope=0.9).lane_capacities(shape_of(18, least=10))


# ---- duo -----------------------------------------------------------------------------------------


def test_retrieval_heads_hold_the_prompt_and_streaming_heads_a_fraction() -> None:
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
def test_duo_keeps_the_total_and_the_order_of_the_scores(shape: Shape, streaming, rng) -> None:
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


def test_scores_of_a_file_are_read_once(tmp_path) -> None:
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
        ("", "got none"),
        ("0.5 nan", "got nan"),
        ("1 2 3 4 5 6 inf", "got inf"),
        ("0.5 heads", "'heads'"),
        ("0.25\n" * 300_000, "more than 1,048,576 characters"),
    ],
)
def test_files_that_are_no_scores_are_refused(text, found, tmp_path) -> None:
    file = tmp_path / "heads.tsv"
    file.write_text(text)

    with pytest.raises(ConfigError, match=rf"budget duo: .*heads\.tsv.*{found}"):
        Duo(scores=str(file)).lane_capacities(shape_of(50))
    with pytest.raises(ConfigError, match=r"expected 4 scores .* got 3; measure this model"):
        Duo(scores="1x3").lane_capacities(shape_of(50))


@pytest.mark.parametrize(
    ("text", "layers", "heads", "found"),
    [
        ("1 2 3 4\n5 6 7 8", 4, 2, "expected 8 scores .* got 8 in 2 lines"),
        ("1 2\n3 4\n5 6 7\n8", 4, 2, "got 8 in 4 lines"),
        ("1 2\n\n3 4", 2, 2, None),
    ],
)
def test_lines_are_layers_and_columns_heads(text, layers, heads, found, tmp_path) -> None:
    file = tmp_path / "heads.tsv"
    file.write_text(text)
    duo, shape = Duo(scores=str(file)), shape_of(50, layers=layers, heads=heads)

    if found is None:
        assert duo.lane_capacities(shape)
    else:
        with pytest.raises(ConfigError, match=found):
            duo.lane_capacities(shape)


def test_packaged_scores_are_of_one_shape_of_model() -> None:
    """SmolLM2-135M: 30 layers, 3 KV heads of 64 elements; SmolLM-135M has the same shape."""
    duo = Duo(scores="smollm2")

    assert duo.lane_capacities(replace(shape_of(50, layers=30, heads=3), head_dim=64))
    for layers, heads, dim, found in ((15, 6, 64, "in 30 lines"), (30, 3, 128, "instead of 128")):
        with pytest.raises(ConfigError, match=found):
            duo.lane_capacities(replace(shape_of(50, layers=layers, heads=heads), head_dim=dim))


# ---- caps by layer -------------------------------------------------------------------------------


def test_caps_by_layer_are_used_as_given() -> None:
    assert ByLayer(caps="700x2/300x2").lane_capacities(shape_of(500, heads=2)) == (
        *(700, 700, 700, 700),
        *(300, 300, 300, 300),
    )


def test_factors_divide_the_total() -> None:
    """2 : 1 : 1 of 3 * 100: 150 75 75. Equal factors give equal caps."""
    assert ByLayer(factors="2/1/1").lane_capacities(shape_of(100, layers=3)) == (150, 75, 75)
    assert ByLayer(factors="0.2x3").lane_capacities(shape_of(100, layers=3)) == (100, 100, 100)


def test_caps_that_differ_from_the_total_are_refused_with_the_matching_cap() -> None:
    with pytest.raises(ConfigError, match=r"the sum 800 \(4 layers times cap=200\), got 900"):
        ByLayer(caps="300x2/150x2").lane_capacities(shape_of(200))
    with pytest.raises(ConfigError, match="cap=225"):
        ByLayer(caps="300x2/150x2").lane_capacities(shape_of(200))


def test_missing_layer_cap_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 4 layers, which evict in this model, got 3"):
        ByLayer(caps="200x3").lane_capacities(shape_of(200))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 2000))
def test_factors_keep_the_total(factors: list[int], cap: int) -> None:
    budget = ByLayer(factors="/".join(map(str, factors)))

    caps = budget.lane_capacities(shape_of(cap, layers=len(factors)))

    assert sum(caps) == cap * len(factors)
    for larger, larger_cap in zip(factors, caps, strict=True):
        for smaller, smaller_cap in zip(factors, caps, strict=True):
            assert larger <= smaller or larger_cap >= smaller_cap
