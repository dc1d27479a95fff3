"""Capture of a computation whose inputs and outputs keep their addresses, to repeat it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor

WARM_UP_CALLS = 2
"""Calls before a capture: kernels are compiled and libraries allocate their workspaces in them."""


@runtime_checkable  # for the shape checks in tests
class Captured(Protocol):
    """A captured computation."""

    def replay(self) -> Tensor:
        """Repeat the computation on the present inputs; the next replay overwrites the result."""
        ...


@runtime_checkable  # for the shape checks in tests
class GraphCapture(Protocol):
    """Captures computations."""

    def capture(self, call: Callable[[], Tensor]) -> Captured:
        """Capture a computation.

        Args:
            call: the computation; may be called several times, with equal results.

        Raises:
            RuntimeError: the computation cannot be captured, such as one that reads data.
        """
        ...


class CudaGraph:
    """A CUDA graph and its output.

    Args:
        graph: the captured graph.
        output: tensor in the memory pool of the graphs.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph, self._output = graph, output

    def replay(self) -> Tensor:
        """See `Captured`: launch the graph on the current stream."""
        self._graph.replay()
        return self._output


class CudaGraphs:
    """Captures CUDA graphs on a stream of their own; all graphs share one memory pool.

    Graphs of one pool may overwrite the memory of each other, so that they must run one after
    another, and a result must be copied before the next replay.

    Args:
        device: device of the computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: WeakSet[CudaGraph] = WeakSet()

    def capture(self, call: Callable[[], Tensor]) -> Captured:
        """See `GraphCapture`."""
        if not self._alive:  # torch frees a pool with its last graph and then refuses its handle
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device during the capture
        mode = "thread_local"
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode)
        try:
            # a capture that fails does not restore the stream; the outer context does
            with torch.cuda.stream(current), capture:
                output = call()
        except RuntimeError:
            self._reset_generator()
            raise
        captured = CudaGraph(graph, output)
        self._alive.add(captured)
        return captured

    def _reset_generator(self) -> None:
        """Capture nothing: a failed capture leaves torch's random numbers in the state of one.

        Without this, the next random number raises "Offset increment outside graph capture"
        (PyTorch 2.11).
        """
        current = torch.cuda.current_stream(self._device)
        # the error of the capture is the one to report; builds without CUDA raise AssertionError
        with suppress(RuntimeError, AssertionError), torch.cuda.stream(current):
            graph = torch.cuda.CUDAGraph()
            mode = "thread_local"
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode=mode):
                torch.zeros(1, device=self._device)


class RepeatedCall:
    """A computation that is called again instead of replayed.

    Args:
        call: the computation.
    """

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self._call = call

    def replay(self) -> Tensor:
        """See `Captured`."""
        return self._call()


class RepeatedCalls:
    """Repeats calls on any device: the inputs are those of a graph, the launches are not."""

    def capture(self, call: Callable[[], Tensor]) -> Captured:
        """See `GraphCapture`."""
        return RepeatedCall(call)
