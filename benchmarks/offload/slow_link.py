"""A link at a chosen rate for the copies of an engine: each copy is real and ends at a deadline."""

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire.offload.swap.transfer import ThreadTransferWorker, Transfer
from quire.plan.rates import CopyRate


class SlowLink:
    """A link that several transfer workers share.

    Args:
        rate: rate of the link.

    Attributes:
        is_slow: whether copies take the time of the rate; otherwise they run at full speed.
    """

    def __init__(self, rate: CopyRate) -> None:
        self.rate, self.is_slow = rate, False
        self._turn, self._deadline_s = threading.Lock(), 0.0

    def carry(self, copy: Callable[[], None], num_bytes: int) -> None:
        """Run a copy and wait until the link would have finished it."""
        with self._turn:
            begun_s = max(self._deadline_s, time.perf_counter())
            copy()
            if self.is_slow:
                self._deadline_s = begun_s + self.rate.seconds(num_bytes)
                time.sleep(max(0.0, self._deadline_s - time.perf_counter()))


class SlowTransferWorker(ThreadTransferWorker):
    """Runs copies on a thread, one after the other, on a slow link.

    Args:
        link: the link.
    """

    def __init__(self, link: SlowLink) -> None:
        super().__init__()
        self._link = link

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        """See `TransferWorker`."""
        return super().submit(lambda: self._link.carry(copy, num_bytes), num_bytes)


def slowed(
    compute: Callable[..., tuple[Tensor, Tensor]], link: SlowLink, token_s: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Let the recompute of keys and values take a given time per token while the link is slow.

    Args:
        compute: recomputes keys and values of a layer from its inputs.
        link: the link.
        token_s: seconds of a token; longer than the real time.
    """

    def run(layer: int, inputs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end_s = time.perf_counter() + len(inputs) * token_s
        found = compute(layer, inputs, *args, **kwargs)
        if link.is_slow:
            time.sleep(max(0.0, end_s - time.perf_counter()))
        return found

    return run
