"""Plans of Triton's attention whose live slots change between calls, as in a CUDA graph."""

import numpy as np
import pytest
import torch

from quire.kernels.backend import StaticLanes, StaticPlans, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from support.interpreted import CPU, interpreted, triton_backend
from support.pairwise import every_pair
from unit.kernels.test_triton_attention import make_lanes, math_of, one_head_pages

launch = interpreted("launch")

MOST, GROUP, SLOT_BYTES = 96, 2, 128
STEPS = ([90, 7, 33], [91, 8, 1], [16, 17, 96])
"""Live slots of three rows, one step after another."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16 slots, so that a row of 96 slots has six."""
    monkeypatch.setattr(launch, "TILE_BYTES", 1)
    monkeypatch.setattr(launch, "SUM_BYTES", 1)


def lanes_of(slots, window=None, **shape):
    """Three decode rows whose page tables have columns for all slots."""
    return make_lanes(tokens=[1, 1, 1], slots=slots, window=window, **shape)


def static_plan(backend, lanes, slots):
    """A plan that reads live slots from a tensor."""
    static = StaticLanes(slots, MOST, lanes.window)
    return backend.static_plan(StepShape.of(lanes.tokens), static, [lanes.pages], SLOT_BYTES)


@every_pair(window=[None, 20], by_head=[False, True], multiprocessors=[1, 16])
def test_one_plan_equals_the_reference_as_slots_change(window, by_head, multiprocessors):
    backend = triton_backend(multiprocessors=multiprocessors)
    slots = torch.ones((3, 2 if by_head else 1), dtype=torch.int32)
    plan = None
    for number, live in enumerate(STEPS):
        shape = one_head_pages(live) if by_head else {"slots": [[n] for n in live]}
        lanes = lanes_of(shape.pop("slots"), window, seed=number, **shape)
        query = lanes.query(GROUP)
        plan = plan or static_plan(backend, lanes, slots)
        slots.copy_(torch.from_numpy(lanes.slots))

        assert backend.refresh(plan, lanes.slots)
        got = backend.attend(plan, lanes.pages, math_of(query), query, lanes.fresh())

        expected = lanes.attend(ReferenceAttention(), query, math_of(query))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_more_slots_than_planned_are_refused():
    backend, lanes = triton_backend(), lanes_of([[5], [5], [5]])
    plan = static_plan(backend, lanes, torch.ones((3, 1), dtype=torch.int32))

    assert backend.refresh(plan, np.full((3, 1), MOST, dtype=np.int32))
    assert not backend.refresh(plan, np.full((3, 1), MOST + 1, dtype=np.int32))


def test_pages_without_a_kernel_have_no_static_plan():
    lanes = lanes_of([[5], [5], [5]], dtype=torch.float64)
    backend = triton_backend(GatheredAttention(CPU))

    assert static_plan(backend, lanes, torch.ones((3, 1), dtype=torch.int32)) is None


def test_a_step_without_a_kernel_fails_instead_of_falling_back():
    backend, lanes = triton_backend(GatheredAttention(CPU)), lanes_of([[5], [5], [5]])
    plan = static_plan(backend, lanes, torch.full((3, 1), 5, dtype=torch.int32))
    query = lanes.query(GROUP).double()

    with pytest.raises(RuntimeError, match="the Triton kernels cannot compute this step"):
        backend.attend(plan, lanes.pages, math_of(query), query, lanes.fresh())


def test_the_backend_has_static_plans():
    assert isinstance(triton_backend(), StaticPlans)
