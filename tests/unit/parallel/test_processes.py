import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, RankFailed
from quire.parallel import processes as rank_processes
from quire.parallel.group import ONE_RANK, TensorGroup, TorchGroup, open_group
from quire.parallel.processes import RankProcesses

OWN = "expected another option"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    monkeypatch.setattr(rank_processes, "END_S", 0.2)
    found = RankProcesses("support.rank_stub", 3)
    assert [channel.receive(60.0) for channel in found.channels] == ["started"] * 2
    yield found
    found.close()


def tell(ranks: RankProcesses, first: str, second: str) -> None:
    ranks.channels[0].send(first)
    ranks.channels[1].send(second)


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_close_ends_all_processes_and_removes_the_folder(ranks: RankProcesses) -> None:
    tell(ranks, "one", "two")
    assert [channel.receive(30.0) for channel in ranks.channels] == [(1, "one"), (2, "two")]
    assert ranks.folder.is_dir()

    ranks.close()

    assert all(map(is_gone, ranks.process_ids))
    assert not ranks.folder.exists()
    ranks.close()


def test_process_that_does_not_end_is_killed(ranks: RankProcesses) -> None:
    tell(ranks, "ignore", "two")
    assert ranks.channels[0].receive(30.0) == "ready"
    ranks.close()
    assert all(map(is_gone, ranks.process_ids))


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("kill", "follow", r"rank 1 \(process \d+\) ended by signal 9"),
        ("follow", "exit", r"rank 2 \(process \d+\) ended with exit status 7"),
        ("raise", "follow", "rank 1: ValueError: a reason"),
        ("follow", "follow", "a collective failed"),
        ("follow", "refuse", OWN),  # the error of an option is raised as it is
    ],
)
def test_failure_names_the_rank_that_failed_first(ranks, first, second, text):
    tell(ranks, first, second)
    with pytest.raises(RankFailed if text != OWN else ConfigError, match=text) as error:
        raise ranks.failure(RankFailed("a collective failed"))  # rank 0 saw a closed connection
    assert ("restart the engine" in str(error.value)) == (text != OWN)


def test_late_message_is_an_error(ranks: RankProcesses) -> None:
    tell(ranks, "one", "ignore")
    ranks.channels[1].receive(30.0)
    with pytest.raises(RankFailed, match=r"rank 2 \(process \d+\) did not respond within 0.01 s"):
        ranks.channels[1].receive(0.01)


# ---- collectives of torch.distributed ------------------------------------------------------------


CPU = torch.device("cpu")


def on_ranks(folder, size, work, timeout_s=60.0):
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


def test_collectives_end_with_an_error_or_return_the_arguments_of_one_rank(tmp_path):
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

    tensor, mask = torch.ones(2), np.array([True, False])

    assert isinstance(ONE_RANK, TensorGroup)
    assert ONE_RANK.sum(tensor) is tensor
    assert ONE_RANK.gather(tensor) == [tensor]
    assert ONE_RANK.union(mask) is mask
    assert ONE_RANK.least(3) == 3
    ONE_RANK.meet()
