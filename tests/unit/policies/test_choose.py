"""Retained sets compared with plain loops: ties, ragged lanes, protected slots, whole pieces."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import PolicyError
from quire.policies.base import LAYER, ScorePolicy
from quire.policies.choose import best_of, best_slots, best_with_torch, choose_pieces, choose_slots
from quire.policies.view import KVView

FEW_SCORES = st.sampled_from([-2.5, -1.0, 0.0, 0.25, 3.0])  # with many ties
MANY_SCORES = st.floats(-1e6, 1e6, width=32)


@st.composite
def lanes(draw, max_slots: int = 12):
    """Scores, live and protected slots of some lanes."""
    width = draw(st.integers(1, max_slots))
    scores = draw(st.sampled_from([FEW_SCORES, MANY_SCORES]))
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, width))
        score = draw(st.lists(scores, min_size=width, max_size=width))
        markers = draw(st.lists(st.booleans(), min_size=width, max_size=width))
        live = [slot < count for slot in range(width)]
        drawn.append(
            (score, live, [mark and is_live for mark, is_live in zip(markers, live, strict=True)])
        )
    return tuple(zip(*drawn, strict=True))


def tensors(lanes):
    score, live, protected = lanes
    return torch.tensor(score, dtype=torch.float64), torch.tensor(live), torch.tensor(protected)


def plain_selection(score, live, protected, keep) -> list[bool]:
    """One lane: protected first, then by score, ties to the lower slot."""
    order = sorted(
        (slot for slot in range(len(score)) if live[slot]),
        key=lambda slot: (not protected[slot], -score[slot], slot),
    )
    return [slot in order[:keep] for slot in range(len(score))]


@given(st.data(), lanes())
def test_retained_set_equals_a_plain_sort(data, lanes) -> None:
    _, live, protected = lanes
    bounds = [(sum(least), sum(most)) for least, most in zip(protected, live, strict=True)]
    keep = [data.draw(st.integers(*bound)) for bound in bounds]

    retained = choose_slots(*tensors(lanes), torch.tensor(keep))

    assert retained.tolist() == [
        plain_selection(*lane, number) for *lane, number in zip(*lanes, keep, strict=True)
    ]


@given(st.data(), lanes())
def test_torch_and_numpy_select_the_same_slots(data, lanes) -> None:
    """The wanted number may be zero or exceed the free slots."""
    score, free, _ = tensors(lanes)
    wanted = torch.tensor([data.draw(st.integers(0, free.shape[1])) for _ in free])

    best = best_of(score.numpy(), free.numpy(), wanted.numpy())

    assert best.tolist() == best_with_torch(score, free, wanted).tolist()
    assert best.sum(axis=1).tolist() == torch.minimum(wanted, free.sum(dim=1)).tolist()


def test_several_lanes_can_share_free_slots() -> None:
    score = torch.tensor([[[1.0, 5.0, 3.0, 4.0], [5.0, 1.0, 4.0, 4.0]]])
    free, wanted = torch.tensor([[[True, False, True, True]]]), torch.tensor([[2]])

    expected = [[[False, False, True, True], [True, False, True, False]]]
    assert best_slots(score, free, wanted).tolist() == expected
    assert best_with_torch(score, free, wanted).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_precision_is_ranked(dtype: torch.dtype) -> None:
    score = torch.tensor([[3.0, 1.0, 2.0, 4.0]], dtype=dtype)
    live = torch.ones(1, 4, dtype=torch.bool)

    retained = choose_slots(score, live, ~live, torch.tensor([2]))

    assert retained.tolist() == [[True, False, False, True]]


def test_lanes_without_slots_retain_none() -> None:
    empty = torch.zeros(2, 0, dtype=torch.bool)

    retained = choose_slots(torch.zeros(2, 0), empty, empty, torch.tensor([0, 0]))

    assert retained.shape == (2, 0)


def test_slots_that_are_not_live_are_never_retained() -> None:
    score = torch.tensor([[1.0, torch.nan, torch.inf]])
    live = torch.tensor([[True, False, False]])

    retained = choose_slots(score, live, ~live, torch.tensor([1]))

    assert retained.tolist() == [[True, False, False]]


def plain_pieces(score, live, protected, keep, piece_tokens) -> list[bool]:
    """One lane, piece by piece: protected pieces, then by mean, ties to the lower piece."""
    count = sum(live)
    pieces = [
        list(range(start, min(start + piece_tokens, count)))
        for start in range(0, count, piece_tokens)
    ]
    protected_pieces = [
        p for p in pieces if len(p) < piece_tokens or any(protected[slot] for slot in p)
    ]
    free = [p for p in pieces if p not in protected_pieces]
    free.sort(key=lambda p: (-sum(score[slot] for slot in p) / piece_tokens, p[0]))
    num_free = (keep - sum(map(len, protected_pieces))) // piece_tokens
    retained = {slot for piece in [*protected_pieces, *free[:num_free]] for slot in piece}
    return [slot in retained for slot in range(len(score))]


@given(st.data(), lanes(max_slots=24), st.integers(1, 7))
def test_whole_pieces_equal_a_plain_loop(data, lanes, piece_tokens: int) -> None:
    score, live, protected = lanes
    score = tuple([float(round(number)) for number in lane] for lane in score)  # exact means
    lanes = list(zip(score, live, protected, strict=True))
    needed = [sum(plain_pieces(*lane, 0, piece_tokens)) for lane in lanes]
    keep = [
        data.draw(st.integers(least, max(least, sum(is_live))))
        for least, is_live in zip(needed, live, strict=True)
    ]

    retained = choose_pieces(*tensors((score, live, protected)), torch.tensor(keep), piece_tokens)

    assert retained.tolist() == [
        plain_pieces(*lane, number, piece_tokens) for lane, number in zip(lanes, keep, strict=True)
    ]
    assert (retained.sum(dim=1) <= torch.tensor(keep)).all()


def test_too_many_protected_pieces_are_refused_with_both_numbers() -> None:
    live = torch.ones(1, 8, dtype=torch.bool)
    protected = torch.zeros_like(live)
    protected[0, [0, 7]] = True

    with pytest.raises(
        PolicyError, match=r"pieces of protected slots hold 8 tokens, but only 6 may be retained"
    ):
        choose_pieces(torch.zeros(1, 8), live, protected, torch.tensor([6]), 4)


class LayerScores(ScorePolicy):
    """Given scores; one set for the heads of a layer."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores

    @property
    def scope(self) -> str:
        return LAYER

    def score(self, view: KVView) -> torch.Tensor:
        return self.scores


@given(st.lists(FEW_SCORES, min_size=24, max_size=24), st.integers(4, 6), st.integers(1, 3))
def test_heads_of_a_layer_retain_one_set_by_their_mean_score(
    scores: list[float], keep: int, piece_tokens: int
) -> None:
    by_lane = torch.tensor(scores, dtype=torch.float64).view(4, 6)  # two layers of two heads
    view = KVView(torch.arange(6).expand(4, 6), next_position=6, heads_per_layer=2)

    retained = LayerScores(by_lane).select(view, torch.full((4,), keep), piece_tokens)

    for layer in (0, 1):
        mean = by_lane[2 * layer : 2 * layer + 2].mean(dim=0).tolist()
        lane = (mean, [True] * 6, [False] * 6)
        expected = plain_pieces(*lane, keep, piece_tokens)
        assert retained[2 * layer].tolist() == retained[2 * layer + 1].tolist() == expected
