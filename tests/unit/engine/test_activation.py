"""The measured activation memory of a step."""

import pytest
import torch

from benchmarks.common.models import SHAPES, random_model
from quire.engine import kv_memory
from quire.engine.kv_memory import measure_activation_peak
from quire.sampling.device_sampling import (
    SCRATCH_BYTES,
    SCRATCH_BYTES_OF_TOKEN,
    sampling_scratch_bytes,
)
from quire.scheduler.schedule_config import ScheduleConfig

STEP_BYTES = 5_000


@pytest.fixture
def cuda(monkeypatch):
    """A decoder on a CUDA device whose steps take `STEP_BYTES`."""
    decoder = random_model(SHAPES["tiny"](), dtype=torch.float32).decoder
    monkeypatch.setattr(decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(kv_memory, "run_largest_step", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1_000 + STEP_BYTES)
    return decoder


def test_activations_on_a_device_include_the_scratch_memory_of_sampling(cuda):
    schedule = ScheduleConfig(max_num_seqs=3)

    found = measure_activation_peak(cuda, schedule)

    scratch_bytes = schedule.num_rows * cuda.spec.vocab_size * SCRATCH_BYTES_OF_TOKEN
    assert found == STEP_BYTES + scratch_bytes
    assert measure_activation_peak(cuda, schedule, 2) == STEP_BYTES + 2 * scratch_bytes


def test_scratch_memory_of_sampling_is_bounded_by_its_blocks():
    few, many = (sampling_scratch_bytes(rows, 128_256) for rows in (2, 1_000))

    assert few == 2 * 128_256 * SCRATCH_BYTES_OF_TOKEN
    assert SCRATCH_BYTES - 128_256 * SCRATCH_BYTES_OF_TOKEN < many <= SCRATCH_BYTES


def test_one_row_of_a_huge_vocabulary_is_a_block():
    assert sampling_scratch_bytes(4, SCRATCH_BYTES) == SCRATCH_BYTES * SCRATCH_BYTES_OF_TOKEN
