"""Transfer worker and time marks for a CUDA device: a stream of its own, events, no thread.

A copy is queued at submission, after the work that the compute stream has queued by then: that
work has finished with the slot which the copy overwrites. The compute stream waits for the copy's
event; the CPU does not.
"""

import time
from collections.abc import Callable

import torch

from quire.offload.step_log import Marks
from quire.offload.swap.transfer import Transfer


class StreamTransfer:
    """A copy queued on a stream.

    Args:
        event: recorded after the copy.
        device: whose current stream computes.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def result(self) -> None:
        """Make the current stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def exception(self) -> BaseException | None:
        """Block until the copy is done."""
        self._event.synchronize()
        return None

    def done(self) -> bool:
        """Whether the copy has ended."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class EventMarks:
    """Time marks of streams, read after the step.

    Args:
        device: device of the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._zero_s = device, time.perf_counter()
        self._zero = self.now()

    def now(self) -> object:
        """See `Marks`: an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, requested: object) -> object:
        """See `Marks`: an event on the copy stream."""
        return self.now()

    def ended(self) -> object:
        return self.now()

    def seconds(self, mark: object) -> float:
        """See `Marks`; also accepts CPU times, which precede the stream's by its queueing delay."""
        if isinstance(mark, float):
            return mark - self._zero_s
        assert isinstance(mark, torch.cuda.Event), "a mark of a device"
        assert isinstance(self._zero, torch.cuda.Event), "likewise"
        mark.synchronize()
        return float(self._zero.elapsed_time(mark)) / 1e3


class StreamTransferWorker:
    """Copies on a stream next to the compute stream.

    Args:
        device: device of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            return StreamTransfer(self._stream.record_event(), self._device)

    def marks(self) -> Marks:
        return EventMarks(self._device)

    def close(self) -> None:
        """Do nothing: the stream needs no shutdown."""
