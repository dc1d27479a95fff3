"""A bounded thread pool with fair scheduling between tenants."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    """A job of a tenant, and the future for its result."""

    tenant: str
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


@dataclass(slots=True)
class _Turns:
    """The jobs of one tenant: its last turn, its waiting jobs (oldest first), and running jobs."""

    last: int
    waiting: deque[_Job] = field(default_factory=deque)
    running: int = 0


class FairPool:
    """Runs jobs in threads. All methods must be called in one event loop.

    The next job belongs to the tenant with the fewest running jobs; ties are broken by the oldest
    last turn. A tenant that was idle ranks after tenants that have waited for more than one turn.
    A tenant can use all threads except one, so that it cannot block another tenant's job.

    Args:
        threads: maximum number of threads; a single thread is shared by all tenants.
        name: prefix of the thread names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._free = threads
        self._most_each = max(1, threads - 1)
        self._tenants: dict[str, _Turns] = {}
        self._num_turns = 0

    def close(self) -> None:
        """Stop the threads; waiting jobs are cancelled."""
        for turns in self._tenants.values():
            for job in turns.waiting:
                job.done.cancel()
            turns.waiting.clear()
        self._executor.shutdown(cancel_futures=True)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run a job in a thread and return its result.

        Args:
            tenant: tenant of the job.
            work: the job.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        turns = self._tenants.setdefault(tenant, _Turns(last=self._num_turns - 1))
        turns.waiting.append(_Job(tenant, work, done))
        self._start()
        return await done

    def _start(self) -> None:
        while self._free and (tenant := self._next()) is not None:
            turns = self._tenants[tenant]
            job = turns.waiting.popleft()
            if job.done.cancelled():
                self._forget_idle(tenant)
                continue
            self._num_turns += 1
            turns.last = self._num_turns
            turns.running += 1
            self._free -= 1
            loop = job.done.get_loop()
            ran = loop.run_in_executor(self._executor, job.work)
            ran.add_done_callback(partial(self._finish, job))

    def _next(self) -> str | None:
        ready = {
            tenant: (turns.running, turns.last)
            for tenant, turns in self._tenants.items()
            if turns.waiting and turns.running < self._most_each
        }
        return min(ready, key=ready.__getitem__, default=None)

    def _finish(self, job: _Job, ran: "asyncio.Future[Any]") -> None:
        self._free += 1
        self._tenants[job.tenant].running -= 1
        self._forget_idle(job.tenant)
        if ran.cancelled():
            job.done.cancel()
        elif (error := ran.exception()) is not None and not job.done.done():
            job.done.set_exception(error)
        elif not job.done.done():
            job.done.set_result(ran.result())
        self._start()

    def _forget_idle(self, tenant: str) -> None:
        turns = self._tenants[tenant]
        if not turns.waiting and not turns.running:
            del self._tenants[tenant]
