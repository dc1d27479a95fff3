"""A simulated cluster: replicas of the simulated engine behind a router, in virtual time.

    requests that arrived -> router -> replica 0: inbox, scheduler, KV memory
                               ^    -> replica 1: ...
                               |            |
                               '-- loads, KV events

Every replica has its own clock, which a step moves to the end of the step. The cluster processes
ends of steps and arrivals in the order of time, so the router sees each replica as it is at that
time. One replica gives exactly the result of `quire.sim.run`.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

from quire.errors import InvariantError
from quire.scale.config import ClusterConfig
from quire.scale.routing.base import KvEvent, ReplicaLoad, RoutedRequest, Router
from quire.scale.routing.block_index import REMOVED, STORED
from quire.scale.routing.loads import LoadView
from quire.scale.routing.policies import RouterConfig, make_router
from quire.sim.engine import Job, SimResult, SimulatedEngine
from quire.sim.run import Progress, SimConfig, check_finished, make_engine
from quire.sim.traces.base import Trace


class BlockEventList:
    """A `PrefixListener` that collects KV events since the last call of `take`."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        self.events.append({"type": STORED, "block_hashes": list(block_hashes)})

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        self.events.append({"type": REMOVED, "block_hashes": list(block_hashes)})

    def take(self) -> list[KvEvent]:
        taken, self.events = self.events, []
        return taken


@dataclass(slots=True)
class Replica:
    """One replica of the cluster."""

    name: str  # its `replica_id`
    engine: SimulatedEngine
    events: BlockEventList | None  # None if the router does not follow them
    steps: bool = False  # whether a step is running
    reported_s: float = -math.inf  # time of its last load report

    def load(self) -> ReplicaLoad:
        engine = self.engine
        return ReplicaLoad(
            replica_id=self.name,
            active_kv_bytes=engine.active_bytes,
            kv_capacity_bytes=engine.memory.total_bytes,
            queued_prompt_tokens=engine.pending_tokens,
            running_requests=engine.num_running,
            queued_requests=engine.num_waiting,
        )


T = TypeVar("T")

_PROGRESS_EVENTS = 1000
CHOICE, END, EVENTS = "choice", "end", "events"


@dataclass(slots=True)
class ClusterResult:
    """The result of a simulated cluster."""

    trace: Trace
    replicas: list[SimResult]
    placed: list[int]  # number of the replica of each request, in the order of arrival
    end_s: float = 0.0  # when the last request finished
    # measured duration of each call of the router
    router_calls_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def routing_s(self) -> float:
        """Time of the router for each request: medians, which other processes do not disturb."""
        calls = self.router_calls_s
        total_s = sum(median(times) * len(times) for times in calls.values())
        return total_s / max(1, len(calls[CHOICE]))


def make_cluster(
    trace: Trace, config: SimConfig, cluster: ClusterConfig, router: RouterConfig
) -> "Cluster":
    """A cluster ready to run."""
    replicas = []
    for number in range(cluster.replicas):
        events = BlockEventList() if cluster.kv_events else None
        replicas.append(Replica(f"r{number}", make_engine(trace, config, events), events))
    made = make_router(router, block_tokens=replicas[0].engine.block_tokens)
    return Cluster(trace, replicas, made, cluster)


class Cluster:
    """Simulation of a trace with several engines."""

    def __init__(
        self, trace: Trace, replicas: Sequence[Replica], router: Router, config: ClusterConfig
    ) -> None:
        self.result = ClusterResult(
            trace, [replica.engine.result for replica in replicas], [-1] * len(trace.requests)
        )
        self._replicas, self._router, self._config = list(replicas), router, config
        self._by_name = {replica.name: number for number, replica in enumerate(replicas)}
        self._view = LoadView()
        self._arrivals, self._num_arrived = trace.requests, 0
        self._ends: list[tuple[float, int]] = []  # (end of the running step, replica)
        self._sent: dict[int, tuple[RoutedRequest, Replica]] = {}  # by the identity of the job

    def run(self, progress: Progress | None = None) -> ClusterResult:
        num_events = 0
        while (now_s := self._next_s()) < math.inf:
            changed = self._end_steps(now_s)
            changed |= self._receive(now_s)
            for number in sorted(changed):
                self._begin_step(number, now_s)
            num_events += 1
            if progress is not None and num_events % _PROGRESS_EVENTS == 0:
                progress(now_s, self._num_arrived)
        if any(replica.engine.has_work for replica in self._replicas):
            raise InvariantError("requests are waiting, but no step can be planned")
        engines = [replica.engine for replica in self._replicas]
        check_finished(engines)
        self.result.end_s = max(engine.clock.now_s for engine in engines)
        return self.result

    def _next_s(self) -> float:
        """Time of the next arrival or end of a step."""
        arrivals, number = self._arrivals, self._num_arrived
        next_s = arrivals[number].arrival_s if number < len(arrivals) else math.inf
        return min(next_s, self._ends[0][0]) if self._ends else next_s

    # ---- steps ---------------------------------------------------------------------------------

    def _end_steps(self, now_s: float) -> set[int]:
        ended = set()
        while self._ends and self._ends[0][0] <= now_s:
            _, number = heapq.heappop(self._ends)
            replica = self._replicas[number]
            replica.steps = False
            for job in replica.engine.end_step():
                self._finish(job)
            self._note_events(replica)
            ended.add(number)
        return ended

    def _begin_step(self, number: int, now_s: float) -> None:
        replica = self._replicas[number]
        if not replica.steps and replica.engine.begin_step():
            replica.steps = True
            heapq.heappush(self._ends, (replica.engine.clock.now_s, number))
        for job in replica.engine.take_rejected():
            self._finish(job)

    def _finish(self, job: Job) -> None:
        request, replica = self._sent.pop(id(job))
        self._timed(END, partial(self._router.note_finished, request, replica.name))

    def _note_events(self, replica: Replica) -> None:
        if replica.events is not None:
            events = replica.events.take()
            if events:
                self._timed(EVENTS, partial(self._router.note_block_events, replica.name, events))

    # ---- requests ------------------------------------------------------------------------------

    def _receive(self, now_s: float) -> set[int]:
        """Send the requests that have arrived; return the replicas that got some."""
        reached: set[int] = set()
        while self._num_arrived < len(self._arrivals):
            arrived = self._arrivals[self._num_arrived]
            if arrived.arrival_s > now_s:
                break
            engine = self._replicas[0].engine
            job = engine.open_job(arrived, self._num_arrived + 1)
            request = RoutedRequest(
                prompt_blocks=engine.block_hashes(job),
                prompt_tokens=job.record.prompt_tokens,
                tenant=arrived.tenant,
            )
            reached.add(self._send(request, job, now_s))
            self._num_arrived += 1
        return reached

    def _send(self, request: RoutedRequest, job: Job, now_s: float) -> int:
        """Send a request to the replica that the router chooses; return its number."""
        loads = self._loads(now_s)

        def choose() -> tuple[str, int]:
            replica_id = self._router.choose(request, loads)
            uncached_tokens = self._router.uncached_tokens(request, replica_id)
            self._router.note_sent(request, replica_id)
            return replica_id, uncached_tokens

        replica_id, uncached_tokens = self._timed(CHOICE, choose)
        number = self.result.placed[self._num_arrived] = self._by_name[replica_id]
        replica = self._replicas[number]
        self._sent[id(job)] = request, replica
        if not replica.steps and replica.engine.clock.now_s < now_s:
            replica.engine.wait(now_s)
        job.pending_tokens -= replica.engine.cached_tokens(job)
        replica.engine.deliver(job)
        self._view.sent(replica_id, uncached_tokens)
        return number

    def _loads(self, now_s: float) -> list[ReplicaLoad]:
        if not self._config.report_interval_s:
            return [replica.load() for replica in self._replicas]
        for replica in self._replicas:
            if replica.reported_s + self._config.report_interval_s <= now_s:
                replica.reported_s = now_s
                self._view.report(replica.load())
        return list(self._view.loads().values())

    def _timed(self, what: str, call: Callable[[], T]) -> T:
        started_s = perf_counter()
        found = call()
        self.result.router_calls_s[what].append(perf_counter() - started_s)
        return found
