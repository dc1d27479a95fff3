"""Executor on CUDA streams: a stream per lane, events for dependencies, one wait at the end.

A lane's thread submits an operation to its stream as soon as the dependencies have been submitted.
The stream then waits for their events, so lanes can run ahead of each other. Only the host lane
waits until its dependencies are complete. Nothing synchronizes the whole device.
"""

import threading
import time
from dataclasses import dataclass

import torch

from quire.errors import LinkStalled
from quire.offload.schedule.executor import Work, no_work
from quire.offload.timeline import DEVICE, HOST, Operation, Schedule, Span, Timeline


@dataclass(slots=True)
class _Done:
    """Start and end of an operation: events on a stream, or host times."""

    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    start_s: float = 0.0
    end_s: float = 0.0


class CudaExecutor:
    """`Executor` on the streams of one device; copies must use pinned host memory.

    Work runs with its lane's stream as the current stream. Work of the device lane runs on the
    stream that was current when `run` was called: it sees earlier work on that stream, and later
    work on that stream sees the step.

    Args:
        device: a CUDA device.
        stall_s: duration in seconds after which a step counts as stalled.
    """

    def __init__(self, device: torch.device, *, stall_s: int | float = 60.0) -> None:
        # threads select their device by index, which the device of a tensor has
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
        run = _CudaRun(schedule, work or no_work, streams, self._device)
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
        self._submitted = [threading.Event() for _ in schedule.operations]
        self._failure: BaseException | None = None
        self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._origin_s = 0.0

    def result(self, current: torch.cuda.Stream, stall_s: int | float) -> Timeline:
        self._origin.record(current)
        for stream in self._streams.values():
            stream.wait_event(self._origin)
        self._origin.synchronize()  # so that host times and device times have the same origin
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
        """Wait for the last operation of each lane until the deadline."""
        while not self._ended(last):
            if self._failure is not None:
                raise self._failure
            if time.perf_counter() > deadline_s:
                pending = [
                    op.label
                    for op in self._schedule.operations
                    if not self._submitted[op.index].is_set()
                ]
                self._fail(LinkStalled(f"a step has stalled; not started: {pending[:4] or 'none'}"))
            time.sleep(2e-5)

    def _ended(self, last: list[_Done]) -> bool:
        ends = [done.end for done in last if done.end is not None]
        submitted = all(event.is_set() for event in self._submitted)
        return submitted and all(end.query() for end in ends)  # type: ignore[no-untyped-call]

    def _follow(self, operations: tuple[Operation, ...]) -> None:
        try:
            torch.cuda.set_device(self._device)
            for operation in operations:
                for need in operation.needs:
                    self._submitted[need].wait()
                if self._failure is not None:
                    return
                stream = self._streams.get(operation.lane)
                if stream is None:
                    self._on_host(operation)
                else:
                    self._on_stream(operation, stream)
                self._submitted[operation.index].set()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that called run
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
        for event in self._submitted:
            event.set()

    def _span(self, operation: Operation) -> Span:
        done = self._done[operation.index]
        if done.start is None or done.end is None:
            return Span(operation, done.start_s, done.end_s)
        start_s, end_s = (
            self._origin.elapsed_time(event) / 1e3 for event in (done.start, done.end)
        )
        return Span(operation, start_s, end_s)
