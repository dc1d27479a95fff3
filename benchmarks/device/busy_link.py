"""A link with background traffic, which takes about half of the bandwidth once it starts.

On a GPU, a thread copies to the device on its own stream, and the copies of both streams alternate.
A CPU has no link: the copy stream is throttled to a fixed rate, then to half of it.
"""

import threading
from abc import ABC, abstractmethod

import torch

from benchmarks.common.host_bytes import HostBytes
from benchmarks.common.target import Target
from benchmarks.offload_schedule.threads import Pace, ThreadExecutor, ThrottledLink
from quire.offload.schedule.executor import Executor
from quire.offload.timeline import IN
from quire.plan.rates import CopyRate

_COPY_BYTES = 64 << 20
_IN_FLIGHT = 4
_JOIN_S = 30.0


class BusyLink(ABC):
    """Background traffic on the link.

    Attributes:
        executor: the executor whose link is used.
    """

    executor: Executor

    @abstractmethod
    def begin(self) -> None:
        """Start the traffic."""

    @abstractmethod
    def end(self) -> None:
        """Stop the traffic; repeated calls have no effect."""


class ThrottledHalf(BusyLink):
    """Simulated background traffic on a throttled link, for a device without one.

    Args:
        rate: initial rate of copies.

    Attributes:
        link: the throttled link; its rate changes.
    """

    def __init__(self, rate: CopyRate) -> None:
        self._rate = rate
        self.link = ThrottledLink(rate)
        self.executor = ThreadExecutor({IN: Pace(self.link.seconds)})

    def begin(self) -> None:
        """See `BusyLink`."""
        self.link.rate = CopyRate(bytes_per_s=self._rate.bytes_per_s / 2, call_s=self._rate.call_s)

    def end(self) -> None:
        """See `BusyLink`."""
        self.link.rate = self._rate


class SecondStream(BusyLink):
    """Background traffic from copies on another stream.

    Args:
        target: a CUDA device.
        executor: executor of the steps.
    """

    def __init__(self, target: Target, executor: Executor) -> None:
        self.executor, self._target = executor, target
        self._pool = HostBytes(_COPY_BYTES, target)
        self._source = self._pool.take((_COPY_BYTES,), torch.uint8)
        self._into = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=target.device)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """See `BusyLink`."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """See `BusyLink`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None

    def _copy(self) -> None:
        torch.cuda.set_device(self._target.device)
        stream = torch.cuda.Stream(self._target.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                for _ in range(_IN_FLIGHT):
                    self._into.copy_(self._source, non_blocking=True)
                stream.synchronize()
