"""Triton: division of a step, why it cannot run, and kernels compiled for and run on a GPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import LaneSlots, StepShape
from quire.kernels.page_copies import IN_TORCH, page_copies
from quire.kernels.triton import hardware
from quire.kernels.triton.hardware import Hardware, is_interpreted, why_no_triton
from quire.kernels.triton.launch import (
    MAX_SPLITS,
    NO_WINDOW,
    WAVES,
    block_starts,
    make_plan,
    on_device,
    split_count,
)
from support.interpreted import interpreted

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_splits_occupy_an_h100():
    for programs, blocks, splits in (
        (132, 1000, 1),  # rows and heads occupy all multiprocessors
        (131, 1000, 3),
        (8, 1000, 33),
        (8, 5, 5),  # no more than blocks
        (1, 1000, MAX_SPLITS),
        (8, 0, 1),
        (0, 10, 10),
    ):
        assert split_count(programs, blocks, multiprocessors=132) == splits


@given(
    programs=st.integers(1, 4096), blocks=st.integers(1, 4096), multiprocessors=st.integers(1, 256)
)
def test_splits_never_exceed_the_blocks_nor_the_programs_needed(programs, blocks, multiprocessors):
    splits = split_count(programs, blocks, multiprocessors)

    assert 1 <= splits <= min(blocks, MAX_SPLITS)
    assert splits == 1 or programs * (splits - 1) < WAVES * multiprocessors


def test_blocks_cover_all_queries_and_plans_copy_shapes_and_blocks_once():
    step = StepShape.of(np.array([1, 1, 20, 16, 1], dtype=np.int32))
    rows, firsts = block_starts(step, 16)

    assert (rows.tolist(), firsts.tolist()) == ([2, 2, 3, 4], [16, 0, 0, 0])
    rows, firsts = block_starts(StepShape.of(np.ones(3, dtype=np.int32)), 16)
    assert len(rows) == len(firsts) == 0  # a step that only decodes

    step = StepShape.of(np.array([1, 20], dtype=np.int32))
    slots = np.array([[300, 200], [50, 40]], dtype=np.int32)
    plan = make_plan(step, LaneSlots(slots, 64), 16, 256, CPU)

    assert plan.slots.tolist() == slots.tolist()
    assert plan.starts.tolist() == [0, 1]
    assert plan.tokens.tolist() == [1, 20]
    assert {x.dtype for x in (plan.slots, plan.starts, plan.tokens)} == {torch.int32}
    assert (plan.longest, plan.longest_decode, plan.window) == (300, 64, 64)
    blocks = plan.query_blocks(16)
    assert (blocks.rows.tolist(), blocks.firsts.tolist()) == ([1, 1], [16, 0])
    assert plan.query_blocks(16) is blocks
    assert plan.query_blocks(32).rows.tolist() == [1]
    plan = make_plan(step, LaneSlots(slots, None), 16, 256, CPU)
    assert (plan.window, plan.longest_decode) == (NO_WINDOW, 300)
    step = StepShape.of(np.array([20, 20, 20], dtype=np.int32))
    plan = make_plan(step, LaneSlots(np.full((3, 1), 20, dtype=np.int32), None), 16, 256, CPU)
    blocks = plan.query_blocks(20)
    assert (blocks.rows.tolist(), blocks.firsts.tolist()) == ([0, 1, 2], [0, 0, 0])
    assert 4 * blocks.firsts.storage_offset() == 16  # aligned


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_parts_of_a_copy_start_at_multiples_of_16_bytes(sizes):
    """On a CPU torch does not align the memory of an array, so offsets are compared."""
    arrays = [np.arange(size, dtype=np.int64) + size for size in sizes]
    parts = on_device(CPU, *arrays)

    assert [part.tolist() for part in parts] == [x.tolist() for x in arrays]
    assert all(4 * part.storage_offset() % 16 == 0 for part in parts)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_triton_needs_its_interpreter_or_a_gpu_with_tensor_cores_for_bfloat16(monkeypatch):
    monkeypatch.setattr(hardware, "triton_version", lambda: "3.9.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    expected = "expected compute capability 8.0 or higher, cuda has 7.5"
    assert why_no_triton(CUDA) == expected

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert why_no_triton(CUDA) is None
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in str(why_no_triton(CUDA))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hardware, "triton_version", lambda: None)
    assert "not installed" in str(why_no_triton(CUDA))

    monkeypatch.setattr(hardware, "triton_version", lambda: "3.9.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_interpreted()
    assert why_no_triton(CPU) is None
    assert Hardware.of(CPU).interpreted

    monkeypatch.delenv("TRITON_INTERPRET")
    assert not is_interpreted()
    assert why_no_triton(CPU) == "Triton's kernels run on NVIDIA GPUs, the pages are on the CPU"
    assert "the pages are on mps" in str(why_no_triton(torch.device("mps")))


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize(
    ("version", "is_used"),
    [("2.3.1", False), ("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True), ("unknown", True)],
)
def test_old_versions_of_triton_are_not_used(monkeypatch, device, version, is_used):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(hardware, "triton_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    expected = f"expected Triton 3.6 or higher, got {version} (auto selects gathered pages)"

    assert why_no_triton(device) == (None if is_used else expected)


@pytest.mark.parametrize(
    ("capability", "shared_bytes", "tiles_ahead", "is_large"),
    [((8, 9), 99 << 10, 1, False), ((8, 0), 163 << 10, 2, False), ((9, 0), 227 << 10, 2, True)],
)
def test_tiles_fit_the_shared_memory(monkeypatch, capability, shared_bytes, tiles_ahead, is_large):
    class Properties:
        name, multi_processor_count = "GPU", 132
        major, minor = capability
        shared_memory_per_block_optin = shared_bytes

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)

    expected = Hardware("GPU", 132, tiles_ahead, large_tiles=is_large, interpreted=False)
    assert Hardware.of(CUDA) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "capability"), [("H100", "9.0"), ("A100", "8.0"), ("L4", "8.9")])
def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(gpu, capability, tmp_path):
    interpreted("backend")  # skips if Triton is not there
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "support.compiled", gpu]
    options = {"capture_output": True, "text": True, "check": False, "timeout": 1200}
    done = subprocess.run(command, env=environment, **options)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"kernels compiled for compute capability {capability}" in lines[-1]
    half = [line for line in lines if " bf16 " in line or " fp16 " in line]
    products = "decode_splits decode_sums prefill_blocks prefill_sums window_sums"
    assert {line.split()[0] for line in half} == set(products.split())
    assert not [line for line in half if "  0 tensor-core products" in line]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 96), (512, 512)]
)
def test_kernels_are_right_on_a_gpu(dtype, dims):
    """Whole rows and splits; see `self_test`."""
    from quire.kernels.triton.self_test import tested_hardware

    found = tested_hardware(torch.device("cuda"), dtype, *dims)

    assert isinstance(found, Hardware), found


@pytest.mark.gpu
def test_pages_are_packed_by_triton_on_a_gpu():
    assert page_copies(torch.device("cuda")) is not IN_TORCH
