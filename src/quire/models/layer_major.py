"""Run several forwards of one model layer by layer: each layer for all forwards, then the next.

    row by row           a: 0 1 2 3   b: 0 1 2 3        every layer is prefetched twice
    column by column     a0 b0  a1 b1  a2 b2  a3 b3     every layer is prefetched once

Each forward is the model's own and runs on its own thread. Only one thread runs at a time: at the
start of a layer, a forward passes its turn to the next one. A waiting forward holds its hidden
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
    """Not an error of its own: another forward has failed."""


@dataclass(slots=True)
class _Turns:
    """Schedules the turns of forwards.

    Attributes:
        mine: one semaphore for each forward; released when the forward may continue.
        enter: called with the number of the forward that continues.
        done: numbers of the finished forwards.
        failed: whether a forward has raised.
    """

    mine: list[threading.Semaphore]
    enter: Callable[[int], None]
    done: set[int] = field(default_factory=set)
    failed: bool = False

    def wait(self, number: int) -> None:
        self.mine[number].acquire()
        if self.failed:
            raise _Stopped
        self.enter(number)

    def hand_on(self, number: int) -> None:
        count = len(self.mine)
        order = ((number + ahead) % count for ahead in range(1, count + 1))
        following = next((other for other in order if other not in self.done), None)
        if following is not None:
            self.mine[following].release()

    def fail(self) -> None:
        self.failed = True
        for semaphore in self.mine:
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
        self._number = threading.local()
        self._turns: _Turns | None = None
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
        turns = self._turns = _Turns([threading.Semaphore(0) for _ in forwards], enter)
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        try:
            running = [
                self._threads.submit(
                    contextvars.copy_context().run, self._run, turns, number, forward, stream
                )
                for number, forward in enumerate(forwards)
            ]
            turns.mine[0].release()
            wait(running)
        finally:
            self._turns = None
        errors = [e for e in (done.exception() for done in running) if e is not None]
        for error in errors:
            if not isinstance(error, _Stopped):
                raise error
        return [done.result() for done in running]

    def _run(
        self,
        turns: _Turns,
        number: int,
        forward: Callable[[], T],
        stream: torch.cuda.Stream | None,
    ) -> T:
        self._number.is_mine = number
        try:
            turns.wait(number)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                result = forward()
        except BaseException:
            turns.fail()
            raise
        turns.done.add(number)
        turns.hand_on(number)
        return result

    def _at_layer(self, module: nn.Module, args: tuple[object, ...]) -> None:
        turns = self._turns
        if turns is not None:
            number = self._number.is_mine
            turns.hand_on(number)
            turns.wait(number)
