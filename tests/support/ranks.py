"""Ranks of one model in threads of this process, with the collectives of a real group."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.rank_process import make_calls
from quire.errors import QuireError, RankFailed
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel, make_decoder
from quire.models.observing import Observing
from quire.models.sharding import shard
from quire.parallel.lockstep import Follower, Leader
from quire.policies.signatures.context import SelectionContext
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import loaded

T = TypeVar("T")
WAIT_S = 120.0
_CLOSED = object()
_BUILDING = threading.Lock()  # weights are drawn from torch's global generator


def _unlock(owner: type) -> None:
    """Remove the locks of cached properties, which ranks in threads share up to Python 3.11."""
    for found in vars(owner).values():
        if isinstance(found, cached_property) and hasattr(found, "lock"):
            found.lock = nullcontext()


_unlock(Observing)
_unlock(SelectionContext)


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.slots: list[Tensor | None] = [None] * size


class ThreadGroup:
    """One rank of a group of threads; see `quire.parallel.group.TensorGroup`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def gather(self, tensor: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.slots[self.rank] = tensor
        try:
            meeting.barrier.wait()
            found = [one.clone() for one in meeting.slots if one is not None]
            meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankFailed(f"rank {self.rank}: another rank has ended") from error
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.gather(tensor)).sum(dim=0)

    def union(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        found = self.gather(torch.from_numpy(mask))
        united: NDArray[np.bool_] = torch.stack(found).any(dim=0).numpy()
        return united

    def least(self, number: int) -> int:
        return int(torch.stack(self.gather(torch.tensor(number))).min())

    def meet(self) -> None:
        self.gather(torch.zeros(1))


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    meeting = Meeting(size)
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(meeting, rank))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, RankFailed):
            raise error
    assert not errors, errors
    return results  # type: ignore[return-value]


class QueueChannel:
    """One end of a channel between threads; see `quire.parallel.processes.Channel`."""

    def __init__(self, inbox: "queue.Queue[object]", outbox: "queue.Queue[object]") -> None:
        self._inbox, self._outbox = inbox, outbox

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def receive(self, timeout_s: float | None = None) -> object:
        try:
            message = self._inbox.get(timeout=WAIT_S if timeout_s is None else timeout_s)
        except queue.Empty:
            raise RankFailed(f"no message within {timeout_s} s") from None
        if message is _CLOSED:
            raise RankFailed("the channel is closed")
        return message

    def close(self) -> None:
        self._outbox.put(_CLOSED)


@dataclass
class Threads:
    """The threads of the ranks from 1 on; replaces `RankProcesses`."""

    meeting: Meeting
    channels: list[QueueChannel] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def failure(self, seen: BaseException) -> QuireError:
        for error in self.errors:
            if isinstance(error, QuireError) and not isinstance(error, RankFailed):
                return error
        return RankFailed(f"{seen} {self.errors}")

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def end(self) -> None:
        self.close()
        self.meeting.barrier.abort()
        for thread in self.threads:
            thread.join(WAIT_S)
        errors, self.errors = self.errors, []
        for error in errors:
            if not isinstance(error, RankFailed):
                raise error


def rank_model(architecture: str, group: ThreadGroup, *, times: int = 1) -> LoadedModel:
    """This rank's part of a zoo model."""
    with _BUILDING:
        model = zoo.build(architecture, times=times)
    shard(model, ModelSpec.from_config(model.config.to_dict()), group)
    decoder = make_decoder(model, None, impl="auto", codec="auto", ranks=group.size)
    return loaded(decoder, architecture, group=group)


@contextmanager
def rank_engines(
    architecture: str, kv: KVConfig, schedule: ScheduleConfig, *, size: int = 2
) -> Iterator[Sequence[Engine]]:
    """Engines of all ranks of a zoo model; only the first one may be called."""
    meeting = Meeting(size)
    workers = Threads(meeting)
    engines: list[Engine | None] = [None] * size

    def build(rank: int, lockstep: Leader | Follower) -> Engine:
        group = ThreadGroup(meeting, rank)
        engine = Engine(rank_model(architecture, group), kv, schedule, lockstep=lockstep)
        engines[rank] = engine
        group.meet()
        return engine

    def follow(rank: int, channel: QueueChannel) -> None:
        try:
            follower = Follower(channel, size)
            make_calls(build(rank, follower), follower)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            workers.errors.append(error)
            meeting.barrier.abort()

    for rank in range(1, size):
        there: queue.Queue[object] = queue.Queue()
        back: queue.Queue[object] = queue.Queue()
        workers.channels.append(QueueChannel(back, there))
        thread = threading.Thread(target=follow, args=(rank, QueueChannel(there, back)))
        workers.threads.append(thread)
        thread.start()
    try:
        lockstep = Leader(workers, WAIT_S)
        leader = build(0, lockstep)
        yield engines  # type: ignore[misc]
        if lockstep.failure is not None:
            meeting.barrier.abort()  # they wait for a rank that does not come
        leader.close()
        for thread in workers.threads:
            thread.join(WAIT_S)  # they finish their last step
    finally:
        workers.end()
