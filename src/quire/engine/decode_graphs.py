"""Decode steps as CUDA graphs, one for each size of a batch.

A decode step launches many short kernels, and on a GPU their launches can take longer than the
kernels. A CUDA graph launches all of them at once, with the same arguments each time. So a batch is
padded to the next of a few sizes, and its inputs are copied to the addresses that the graph of this
size reads (see `kv.static_step`). The graph contains the forward of the decoder, from token ids to
logits, and records attention statistics. Page tables are updated before a replay, sampling follows
it.

A step runs without a graph if it contains prompt tokens, if a row records query moments or residual
similarity, returns hidden states or stores keys before RoPE, or if the batch is larger than the
largest size.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from weakref import WeakSet

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.backend import StaticPlans
from quire.kv.paged_kv import PagedKV
from quire.kv.static_step import (
    DecodeRows,
    StaticAttention,
    StaticInputs,
    StaticShape,
    recorded_statistics,
)
from quire.models.base import Decoder
from quire.models.loader import LoadedModel
from quire.sampling.pending_tokens import InputTokens
from quire.scheduler.schedule_config import ScheduleConfig

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
        """Capture a computation."""
        ...


class CudaGraph:
    """A CUDA graph and its output, in the memory pool of the graphs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph, self._output = graph, output

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output


class CudaGraphs:
    """Captures CUDA graphs on a stream of their own; all graphs share one memory pool.

    Graphs of one pool may overwrite the memory of each other, so that they must run one after
    another, and a result must be copied before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: WeakSet[CudaGraph] = WeakSet()

    def capture(self, call: Callable[[], Tensor]) -> Captured:
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


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStats:
    """Counters of decode graphs since the engine's start."""

    replayed: int = 0  # forwards that a graph ran
    not_replayed: int = 0  # other forwards, such as those with prompt tokens
    captures: int = 0
    off: str | None = None  # why no more graphs are used; None while they are


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes that are captured: powers of 2, and the largest batch."""
    return (*(1 << n for n in range((max_rows - 1).bit_length())), max_rows)


@dataclass(frozen=True, slots=True)
class _Key:
    shape: StaticShape
    rope_variant: int


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, with everything whose memory it reads."""

    inputs: StaticInputs  # what a replay reads, with attention
    attention: StaticAttention
    call: Callable[[], Tensor]
    captured: Captured


class DecodeGraphs:
    """Captures and replays decode steps; if required, steps that cannot be captured are refused."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        capture: GraphCapture,
        max_rows: int,
        *,
        required: bool = False,
    ) -> None:
        assert isinstance(kv.backend, StaticPlans), "checked by why_no_graphs"
        self._decoder, self._kv, self._capture = decoder, kv, capture
        self._backend: StaticPlans = kv.backend
        self._required = required
        self.sizes = graph_sizes(max_rows)
        self._groups = [group for group in kv.memory.layout.groups if not group.private]
        self._tables: tuple[Tensor, ...] = ()
        self._graphs: dict[_Key, _Graph] = {}
        self._replayed = self._not_replayed = self._captures = 0
        self._off: str | None = None

    @property
    def stats(self) -> GraphStats:
        return GraphStats(
            replayed=self._replayed,
            not_replayed=self._not_replayed,
            captures=self._captures,
            off=self._off,
        )

    def note_other(self) -> None:
        self._not_replayed += 1

    def run(
        self, batch: DecodeRows, rope_variant: int
    ) -> Float[Tensor, "num_samples vocab"] | None:
        """Logits of each row, from a graph; None if the step must run without one."""
        count = len(batch.rows)
        statistics = recorded_statistics(self._kv, batch.rows)
        if self._off is not None or count > self.sizes[-1] or statistics is None:
            return None
        graph = self._graph(batch, rope_variant, statistics)
        if graph is None:
            return None
        live = graph.inputs.fill(batch, self._kv)
        if not graph.attention.refresh(live):
            return None
        logits = graph.captured.replay()
        self._replayed += 1
        return logits[:count].clone()  # the next replay overwrites them

    def _graph(
        self, batch: DecodeRows, rope_variant: int, statistics: tuple[str, ...]
    ) -> _Graph | None:
        kv = self._kv
        tables = tuple(kv.tables[group.name].current() for group in kv.memory.layout.groups)
        if not _same(tables, self._tables):  # reallocated: graphs read the previous ones
            self._graphs.clear()
            self._tables = tables
        key = _Key(self._shape(batch, statistics), rope_variant)
        found = self._graphs.get(key)
        if found is None:
            found = self._make(key, batch)
            if found is not None:
                self._graphs[key] = found
        return found

    def _shape(self, batch: DecodeRows, statistics: tuple[str, ...]) -> StaticShape:
        count = len(batch.rows)
        size = next(size for size in self.sizes if size >= count)
        held = (self._kv.memory.tables[group.name].num_slots[batch.rows] for group in self._groups)
        uniform = tuple(bool((slots == slots[:, :1]).all()) for slots in held)
        return StaticShape(size, uniform, statistics)

    def _make(self, key: _Key, batch: DecodeRows) -> _Graph | None:
        kv = self._kv
        inputs = StaticInputs(self._groups, key.shape, kv.store.device, kv.statistics)
        tables = [kv.tables[group.name].current() for group in self._groups]
        attention = StaticAttention(self._kv, self._backend, inputs, tables)
        if not attention.is_possible:
            self._turn_off(f"attention {self._kv.backend.name} cannot read these pages")
            return None
        # warm-up calls read the inputs, and their attention must not count
        if not attention.refresh(inputs.fill(batch, kv, record=False)):
            return None
        call = self._forward(inputs, attention, key.rope_variant)
        try:
            captured = self._capture.capture(call)
        except RuntimeError as error:
            self._turn_off(f"the step cannot be captured: {error}", error)
            return None
        self._captures += 1
        return _Graph(inputs, attention, call, captured)

    def _forward(
        self, inputs: StaticInputs, attention: StaticAttention, rope_variant: int
    ) -> Callable[[], Tensor]:
        samples = torch.arange(inputs.shape.size, device=self._kv.store.device)

        def forward() -> Tensor:
            return self._decoder.forward(
                inputs.token_ids, inputs.positions, samples, attention, rope_variant=rope_variant
            )

        return forward

    def _turn_off(self, reason: str, cause: Exception | None = None) -> None:
        if self._required:
            raise _refusal(reason) from cause
        self._off = reason
        self._graphs.clear()
        _log.warning("decode steps run without CUDA graphs: %s", reason)


def why_no_graphs(kv: PagedKV) -> str | None:
    """Return why no decode step of an engine can be a graph, or None."""
    if not isinstance(kv.backend, StaticPlans):
        return f"attention {kv.backend.name} makes a new plan for every step"
    if kv.offload is not None:
        return "offloaded KV is transferred in every step"
    if not kv.rotated:
        return "keys are stored before RoPE"
    if kv.joined:
        return "rows attend to latents in a form that is chosen in every step"
    if kv.states:
        return "recurrent states are read and written between layers"
    if any(group.page_class.has_bounds for group, _ in kv.place.values()):
        return "sparse attention selects pages in every step"
    if kv.full_precision or kv.promoted:
        return "the KV codec keeps some tokens in full precision"
    return None


def refuse_graphs(model: LoadedModel, schedule: ScheduleConfig) -> None:
    """Refuse required graphs that are not possible for a model, before memory is allocated."""
    reason = _why_not_here(model, schedule)
    if schedule.cuda_graphs and reason is not None:
        raise _refusal(reason)


def make_graphs(model: LoadedModel, kv: PagedKV, schedule: ScheduleConfig) -> DecodeGraphs | None:
    """Make the decode graphs of an engine, or none, by its options."""
    reason = _why_not_here(model, schedule) or why_no_graphs(kv)
    if schedule.cuda_graphs and reason is not None:
        raise _refusal(reason)
    if schedule.cuda_graphs is False or reason is not None:
        return None
    capture, max_rows = CudaGraphs(kv.store.device), schedule.max_num_seqs
    required = schedule.cuda_graphs is True
    return DecodeGraphs(model.decoder, kv, capture, max_rows, required=required)


def _why_not_here(model: LoadedModel, schedule: ScheduleConfig) -> str | None:
    device, ranks = model.decoder.device, model.group.size
    if device.type != "cuda":
        return f"the model is on {device.type}, and graphs are a feature of CUDA devices"
    if schedule.batch_invariant:
        return "batch-invariant steps run as forwards of a fixed number of rows"
    if model.weights is not None:
        return "offloaded weights are transferred in every step"
    return f"{ranks} ranks sum their results inside of each layer" if ranks > 1 else None


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"--cuda-graphs is not possible: {reason}; leave it out, or use --no-cuda-graphs"
    )


def decode_rows(rows: list[int], inputs: InputTokens, positions: list[int]) -> DecodeRows:
    """Return the rows of a step as arrays."""
    return DecodeRows(
        np.array(rows, dtype=np.int64),
        np.array(inputs.token_ids, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        inputs.write_pending,
    )


def _same(tables: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    pairs = zip(tables, others, strict=False)
    return len(tables) == len(others) and all(one is other for one, other in pairs)
