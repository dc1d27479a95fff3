"""CUDA streams: one for each lane, events for what operations need, one wait at the end.

A lane's thread begins its operations on its stream as soon as what they need has been begun; the
device then waits for events, so that a lane that is ahead stays ahead. Only the host's lane waits
for what it needs to be done. Nothing synchronises the whole device.
"""

import threading
import time
from dataclasses import dataclass

import torch

from benchmarks.offload_schedule.executor import Work, nothing
from quire.errors import LinkStalled
from quire.offload.timeline import DEVICE, HOST, Operation, Schedule, Span, Timeline


@dataclass(slots=True)
class _Done:
    """What marks an operation: events around it on a stream, or times of the host."""

    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    start_s: float = 0.0
    end_s: float = 0.0


class CudaExecutor:
    """`Executor` on the streams of one device; copies must be between it and pinned memory.

    Work runs with its lane's stream as the current one; work of the device lane on the stream that
    was current when `run` was called, so what came before it there is seen, and what comes behind
    it sees the step.

    Args:
        device: a CUDA device.
        stall_s: a step that takes longer has stalled.
    """

    def __init__(self, device: torch.device, *, stall_s: int | float = 60.0) -> None:
        # threads choose their device by its number, which that of a tensor has
        self._device, self._stall_s = torch.empty(0, device=device).device, stall_s
        self._streams: dict[str, torch.cuda.Stream] = {}

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        """See `Executor.run`.

        Raises:
            LinkStalled: the step did not end in time.
        """
        current = torch.cuda.current_stream(self._device)
        streams = {
            lane: current if lane == DEVICE else self._stream(schedule.resource(lane))
            for lane in schedule.lanes
            if lane != HOST
        }
        run = _CudaRun(schedule, work or nothing, streams, self._device)
        return run.result(current, self._stall_s)

    def _stream(self, resource: str) -> torch.cuda.Stream:
        if resource not in self._streams:
            self._streams[resource] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._streams[resource]


class _CudaRun:
    def __init__(
        self,
        schedule: Schedule,
        work: Work,
        streams: dict[str, torch.cuda.Stream],
        device: torch.device,
    ) -> None:
        self._schedule, self._work, self._streams = schedule, work, streams
        self._device = device
        self._done = [_Done() for _ in schedule.operations]
        self._begun = [threading.Event() for _ in schedule.operations]
        self._failure: BaseException | None = None
        self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._origin_s = 0.0

    def result(self, current: torch.cuda.Stream, stall_s: int | float) -> Timeline:
        self._origin.record(current)
        for stream in self._streams.values():
            stream.wait_event(self._origin)
        self._origin.synchronize()  # so that the host's clock and the device's begin together
        self._origin_s = time.perf_counter()
        threads = [
            threading.Thread(target=self._follow, args=(operations,), name=lane, daemon=True)
            for lane, operations in self._schedule.lanes.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._origin_s + stall_s - time.perf_counter()))
        if self._failure is not None:
            raise self._failure
        last = [self._done[operations[-1].index] for operations in self._schedule.lanes.values()]
        self._await(last, self._origin_s + stall_s)
        for done in last:
            if done.end is not None:
                current.wait_event(done.end)
        return Timeline(self._schedule, tuple(map(self._span, self._schedule.operations)))

    def _await(self, last: list[_Done], deadline_s: float) -> None:
        """Wait for the last operation of each lane, and no longer than the deadline."""
        while not self._ended(last):
            if self._failure is not None:
                raise self._failure
            if time.perf_counter() > deadline_s:
                waiting = [
                    op.label
                    for op in self._schedule.operations
                    if not self._begun[op.index].is_set()
                ]
                self._fail(LinkStalled(f"a step has stalled; not begun: {waiting[:4] or 'none'}"))
            time.sleep(2e-5)

    def _ended(self, last: list[_Done]) -> bool:
        ends = [done.end for done in last if done.end is not None]
        begun = all(event.is_set() for event in self._begun)
        return begun and all(end.query() for end in ends)  # type: ignore[no-untyped-call]

    def _follow(self, operations: tuple[Operation, ...]) -> None:
        try:
            torch.cuda.set_device(self._device)
            for operation in operations:
                for need in operation.needs:
                    self._begun[need].wait()
                if self._failure is not None:
                    return
                stream = self._streams.get(operation.lane)
                if stream is None:
                    self._on_host(operation)
                else:
                    self._on_stream(operation, stream)
                self._begun[operation.index].set()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that called run
            self._fail(error)

    def _on_stream(self, operation: Operation, stream: torch.cuda.Stream) -> None:
        done = self._done[operation.index]
        with torch.cuda.stream(stream):
            for need in operation.needs:
                event = self._done[need].end
                if event is not None:
                    stream.wait_event(event)
            done.start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            done.end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            done.start.record(stream)
            self._work(operation)
            done.end.record(stream)

    def _on_host(self, operation: Operation) -> None:
        for need in operation.needs:
            event = self._done[need].end
            if event is not None:
                event.synchronize()
        done = self._done[operation.index]
        done.start_s = time.perf_counter() - self._origin_s
        self._work(operation)
        done.end_s = time.perf_counter() - self._origin_s

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for event in self._begun:
            event.set()

    def _span(self, operation: Operation) -> Span:
        done = self._done[operation.index]
        if done.start is None or done.end is None:
            return Span(operation, done.start_s, done.end_s)
        start_s, end_s = (
            self._origin.elapsed_time(event) / 1e3 for event in (done.start, done.end)
        )
        return Span(operation, start_s, end_s)
