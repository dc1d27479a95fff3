"""Layers that stay resident within a budget, and batches that share a pass of offloaded layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.plan.weights import SLOTS, best_batches, place_weights, planned_weights
from support.model_specs import small_spec

MODEL = small_spec(*[None] * 8)


@pytest.mark.parametrize(
    ("budget", "offloaded_layers"),
    [(None, ()), (65, ()), (64, (0, 2, 4)), (54, (0, 1, 3, 4)), (44, (0, 1, 2, 3, 4))],
)
def test_resident_layers_fill_the_budget_minus_two_slots(budget, offloaded_layers):
    """Six layers of 10 B and 5 B of other weights: n offloaded use 5 + 10 * (6 - n) + 20 B."""
    found = place_weights([10] * 6, 5, budget)

    assert found.offloaded_layers == offloaded_layers
    resident = 5 + 10 * (6 - len(offloaded_layers))
    assert found.device_bytes == resident + (20 if offloaded_layers else 0)
    assert found.host_bytes == 10 * len(offloaded_layers)
    assert found.total_bytes == 65


def test_budget_below_the_minimum_is_refused_with_the_minimum():
    assert place_weights([10] * 6, 5, 25).offloaded_layers == (0, 1, 2, 3, 4, 5)
    with pytest.raises(ConfigError, match=r"24 B is too small.* 25 B .*raise --weights-memory"):
        place_weights([10] * 6, 5, 24)
    with pytest.raises(ConfigError, match=r"at least 25 B"):
        place_weights([10, 10], 5, 24)
    assert not place_weights([10, 10], 5, 25).offloaded_layers  # the slots hold them


@given(
    layers=st.lists(st.integers(1, 40), min_size=1, max_size=24),
    other=st.integers(0, 50),
    budget=st.integers(1, 1200),
)
def test_budget_is_met_or_refused_if_impossible(layers, other, budget):
    try:
        found = place_weights(layers, other, budget)
    except ConfigError:
        least = other + SLOTS * max(layers) if len(layers) > SLOTS else other + sum(layers)
        assert budget < least
        return
    assert found.device_bytes <= budget
    assert found.host_bytes + found.device_bytes == found.total_bytes + SLOTS * found.slot_bytes
    assert len(set(found.offloaded_layers)) == len(found.offloaded_layers) != 1
    gaps = [b - a for a, b in zip(found.offloaded_layers, found.offloaded_layers[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_planned_weights_place_equal_layers():
    total = MODEL.weight_bytes(2)
    layer_bytes = MODEL.layer_parameters * 2 // 8
    found = planned_weights(MODEL, 2, total - layer_bytes)
    assert planned_weights(MODEL, 2, None).device_bytes == total
    assert len(found.offloaded_layers) == 3
    assert found.device_bytes == total - layer_bytes
    assert found.text.startswith("weights: ")
    assert "3 of 8 layers offloaded through 2 slots" in found.text


@pytest.mark.parametrize(
    ("copy_s", "batches"), [(0.0, 1), (0.9, 1), (1.0, 1), (1.1, 2), (3.5, 4), (4.0, 4), (99.0, 8)]
)
def test_the_fewest_batches_that_hide_the_copy_share_a_pass(copy_s, batches):
    assert best_batches(copy_s, batch_s=1.0) == batches
