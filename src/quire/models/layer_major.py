"""Run several forwards of one model layer by layer: each layer for all forwards, then the next.

    row by row           a: 0 1 2 3   b: 0 1 2 3        every layer is prefetched twice
    column by column     a0 b0  a1 b1  a2 b2  a3 b3     every layer is prefetched once

Each forward is the model's own and runs on its own thread. Only one thread runs at a time: at the
start of a layer, a forward yields to the next forward. A waiting forward holds its hidden
states only; all other activations in memory are those of one forward.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from quire.plan.offload.resident import MOST_BATCHES

T = TypeVar("T")


class _Stopped(Exception):
    """Raised in a waiting forward because another forward has failed."""


@dataclass(slots=True)
class _RoundRobin:
    """Runs forwards one at a time, in round-robin order.

    Attributes:
        may_run: one semaphore for each forward; released when the forward may continue.
        enter: called with the number of the forward that continues.
        done: numbers of the finished forwards.
        failed: whether a forward has raised.
    """

    may_run: list[threading.Semaphore]
    enter: Callable[[int], None]
    done: set[int] = field(default_factory=set)
    failed: bool = False

    def wait(self, number: int) -> None:
        self.may_run[number].acquire()
        if self.failed:
            raise _Stopped
        self.enter(number)

    def yield_to_next(self, number: int) -> None:
        count = len(self.may_run)
        order = ((number + ahead) % count for ahead in range(1, count + 1))
        following = next((other for other in order if other not in self.done), None)
        if following is not None:
            self.may_run[following].release()

    def fail(self) -> None:
        self.failed = True
        for semaphore in self.may_run:
            semaphore.release()


class LayerMajor:
    """The layers of one model; forwards switch at the start of each layer.

    Args:
        layers: layers of the model; a hook is registered on each.
        device: device of the model.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(MOST_BATCHES, thread_name_prefix="quire-batch")
        self._thread = threading.local()
        self._round_robin: _RoundRobin | None = None
        for layer in layers:  # runs before all other hooks of the layer
            layer.register_forward_pre_hook(self._at_layer, prepend=True)

    def run(self, forwards: Sequence[Callable[[], T]], enter: Callable[[int], None]) -> list[T]:
        """Run at most `MOST_BATCHES` forwards and return the result of each.

        Args:
            forwards: each runs all layers, in order.
            enter: called with a forward's number each time the forward continues.

        Raises:
            BaseException: the exception of the first failed forward; the others were stopped.
        """
        semaphores = [threading.Semaphore(0) for _ in forwards]
        round_robin = self._round_robin = _RoundRobin(semaphores, enter)
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        try:
            running = [
                self._threads.submit(
                    contextvars.copy_context().run, self._run, round_robin, number, forward, stream
                )
                for number, forward in enumerate(forwards)
            ]
            round_robin.may_run[0].release()
            wait(running)
        finally:
            self._round_robin = None
        errors = [e for e in (done.exception() for done in running) if e is not None]
        for error in errors:
            if not isinstance(error, _Stopped):
                raise error
        return [done.result() for done in running]

    def _run(
        self,
        round_robin: _RoundRobin,
        number: int,
        forward: Callable[[], T],
        stream: torch.cuda.Stream | None,
    ) -> T:
        self._thread.forward_number = number
        try:
            round_robin.wait(number)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                result = forward()
        except BaseException:
            round_robin.fail()
            raise
        round_robin.done.add(number)
        round_robin.yield_to_next(number)
        return result

    def _at_layer(self, module: nn.Module, args: tuple[object, ...]) -> None:
        round_robin = self._round_robin
        if round_robin is not None:
            number = self._thread.forward_number
            round_robin.yield_to_next(number)
            round_robin.wait(number)
