"""Processes of ranks: messages, the errors that name a failed rank, and their end."""

import os
from collections.abc import Iterator

import pytest

from quire.errors import ConfigError, RankFailed
from quire.parallel import processes as rank_processes
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
