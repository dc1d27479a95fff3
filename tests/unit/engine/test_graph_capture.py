"""Capture of CUDA graphs: streams and memory pools, with a stand-in for torch's functions."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.cuda import CUDAGraph

from quire.engine.decode_graphs import WARM_UP_CALLS, CudaGraphs


class Cuda:
    """The functions of `torch.cuda` that a capture calls.

    As in torch, the end of a failed capture raises before the stream is restored, and the handle of
    a pool is refused once all of its graphs were deleted.

    Attributes:
        current: the current stream.
        used: handles of the pools of all captures.
    """

    def __init__(self):
        self.current = SimpleNamespace(name="main", wait_stream=lambda other: None)
        self.used = []
        self._handles = 0

    def Stream(self, device):  # noqa: N802, torch's name
        return SimpleNamespace(name="capture", wait_stream=lambda other: None)

    def current_stream(self, device=None):
        return self.current

    def graph_pool_handle(self):
        self._handles += 1
        return self._handles

    def CUDAGraph(self):  # noqa: N802, torch's name
        return Mock(spec=CUDAGraph)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool=None, stream=None, *, capture_error_mode):
        assert capture_error_mode == "thread_local"  # other threads use the device
        self.used.append(pool)
        before, self.current = self.current, stream
        yield
        self.current = before  # not after an exception


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in, in place of torch's functions."""
    found = Cuda()
    for name in ("Stream", "current_stream", "graph_pool_handle", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


def test_a_capture_runs_on_its_own_stream_after_warm_up_calls(cuda):
    streams = []

    def call():
        streams.append(cuda.current.name)
        return torch.ones(1)

    captured = CudaGraphs(torch.device("cuda")).capture(call)

    assert streams == ["capture"] * (WARM_UP_CALLS + 1)
    assert cuda.current.name == "main"
    assert captured.replay() == 1


def test_a_failed_capture_restores_the_stream(cuda):
    calls = []

    def call():
        calls.append(1)
        if len(calls) > WARM_UP_CALLS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="capturing"):
        CudaGraphs(torch.device("cuda")).capture(call)
    assert cuda.current.name == "main"
    assert cuda.used[1:] == [None]  # the second one restores the state of random numbers


def test_graphs_share_a_pool_until_all_of_them_are_deleted(cuda):
    capture, graphs = CudaGraphs(torch.device("cuda")), []
    graphs += [capture.capture(lambda: torch.ones(1)) for _ in range(3)]
    del graphs[:2]
    graphs.append(capture.capture(lambda: torch.ones(1)))

    assert len(set(cuda.used)) == 1
    graphs.clear()
    capture.capture(lambda: torch.ones(1))
    assert len(set(cuda.used)) == 2
