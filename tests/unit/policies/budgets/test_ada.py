"""Ada: division of a layer's slots between its heads, compared with a plain loop."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.policies.budgets.ada import Ada
from quire.policies.view import KVView


def view_of(live: list[int], heads: int, positions: torch.Tensor | None = None) -> KVView:
    width = max(live)
    slot = torch.arange(width).expand(len(live), width)
    in_use = slot < torch.tensor(live)[:, None]
    slot_positions = slot if positions is None else positions
    return KVView(
        torch.where(in_use, slot_positions, -1), next_position=1000, heads_per_layer=heads
    )


def plain_division(live, protected, scores, positions, keep, floor: Fraction) -> list[int]:
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
    rank = {
        slot: (-scores[slot[0]][slot[1]], positions[slot[0]][slot[1]], slot[0]) for slot in free
    }
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


@pytest.mark.parametrize("floor", [-0.1, 1.5, math.nan])
def test_floor_outside_zero_to_one_is_refused(floor: float) -> None:
    with pytest.raises(ConfigError, match="0 <= floor <= 1"):
        Ada(floor=floor)


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
def test_division_equals_a_plain_loop(given_layers) -> None:
    heads, live, protected, scores, positions, keep, floor = given_layers
    width = max(live)
    padded = torch.tensor([lane[:width] for lane in scores], dtype=torch.float32)
    mask = torch.tensor([lane + [False] * (width - len(lane)) for lane in protected])
    view = view_of(live, heads, torch.tensor([lane[:width] for lane in positions]))

    retained = Ada(floor=float(floor)).divide(view, padded, mask, torch.tensor(keep)).tolist()

    for start in range(0, len(live), heads):
        layer = slice(start, start + heads)
        expected = plain_division(
            *(part[layer] for part in (live, protected, scores, positions, keep)), floor
        )
        assert retained[layer] == expected
        protected_tokens = [sum(lane) for lane in protected[layer]]
        assert sum(retained[layer]) == max(
            sum(protected_tokens), min(sum(keep[layer]), sum(live[layer]))
        )
        for at_least, tokens, num_slots in zip(
            protected_tokens, retained[layer], live[layer], strict=True
        ):
            assert at_least <= tokens <= num_slots
