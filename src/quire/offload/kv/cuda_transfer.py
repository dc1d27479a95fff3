"""A carrier and marks for a CUDA device: a stream of its own, events, no thread.

Copies are queued when they are asked for, behind what the computing stream has queued by then: it
has left the slot that they fill. Who computes waits for an event, in its stream and not here.
"""

import time
from collections.abc import Callable

import torch

from quire.kv.step_log import Marks
from quire.offload.swap.transfer import Transfer


class StreamTransfer:
    """A copy queued on a stream.

    Args:
        event: behind it.
        device: of who computes.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def result(self) -> None:
        """What the current stream does from now on finds it done."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def exception(self) -> BaseException | None:
        """Return when it is done."""
        self._event.synchronize()
        return None


class EventMarks:
    """Moments of streams, which are read when the step is over.

    Args:
        device: whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._zero_s = device, time.perf_counter()
        self._zero = self.now()

    def now(self) -> object:
        """See `Marks`: of the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, requested: object) -> object:
        """See `Marks`: of the stream that copies."""
        return self.now()

    def ended(self) -> object:
        """See `Marks`."""
        return self.now()

    def seconds(self, mark: object) -> float:
        """See `Marks`; of the clock of the host too, which the stream lags behind a little."""
        if isinstance(mark, float):
            return mark - self._zero_s
        assert isinstance(mark, torch.cuda.Event), "a mark of a device"
        assert isinstance(self._zero, torch.cuda.Event), "likewise"
        mark.synchronize()
        return float(self._zero.elapsed_time(mark)) / 1e3


class StreamTransferWorker:
    """Copies on a stream beside the one that computes.

    Args:
        device: whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        """See `TransferWorker`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            return StreamTransfer(self._stream.record_event(), self._device)

    def marks(self) -> Marks:
        """See `TransferWorker`."""
        return EventMarks(self._device)

    def close(self) -> None:
        """Nothing to end."""
