"""Collectives of torch.distributed, with gloo between threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import RankFailed
from quire.parallel.group import ONE_RANK, TensorGroup, TorchGroup, open_group

CPU = torch.device("cpu")


def on_ranks(folder, size, work, timeout_s=60.0):
    """Run a function in a thread for each rank; return the results."""
    meeting = threading.Barrier(size)
    options = {"rendezvous": folder / "rendezvous", "timeout_s": timeout_s}

    def run(rank: int):
        return work(open_group(rank, size, CPU, **options, meet=lambda: meeting.wait() and None))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_is_equal_on_all_ranks(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(7, 33).to(dtype) for _ in range(size)]

    found = on_ranks(tmp_path, size, lambda group: group.sum(parts[group.rank].clone()))

    expected = torch.stack([part.float() for part in parts]).sum(dim=0).to(dtype)
    for one in found:
        assert one.dtype == dtype
        assert torch.equal(one, found[0])
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.int32])
def test_gather_returns_the_tensors_of_all_ranks(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = [torch.randint(0, 2, (4, 3)).to(dtype).T for _ in range(3)]  # not contiguous
    for found in on_ranks(tmp_path, 3, lambda group: group.gather(parts[group.rank])):
        assert all(torch.equal(one, part) for one, part in zip(found, parts, strict=True))


def test_union_min_and_meet(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> tuple[list[bool], int]:
        group.meet()
        mask = np.array([group.rank == 0, group.rank == 1, False])
        return group.union(mask).tolist(), group.least(10 - group.rank)

    assert on_ranks(tmp_path, 2, work) == [([True, True, False], 9)] * 2


def test_rank_that_does_not_join_a_collective_is_an_error(tmp_path: Path) -> None:
    done = threading.Event()

    def work(group: TorchGroup) -> None:
        if group.rank == 1:
            done.wait(60.0)
            return
        try:
            with pytest.raises(RankFailed, match="rank 0: a collective failed"):
                group.sum(torch.ones(4))
        finally:
            done.set()

    on_ranks(tmp_path, 2, work, timeout_s=3.0)  # also the limit to open the group


def test_one_rank_returns_its_arguments() -> None:
    tensor, mask = torch.ones(2), np.array([True, False])

    assert isinstance(ONE_RANK, TensorGroup)
    assert ONE_RANK.sum(tensor) is tensor
    assert ONE_RANK.gather(tensor) == [tensor]
    assert ONE_RANK.union(mask) is mask
    assert ONE_RANK.least(3) == 3
    ONE_RANK.meet()
