"""Whether FlashInfer computes attention: by its results on this device, and by its speed.

`--attention auto` compares it with another backend on this device: a decode step, and the same step
with a prompt chunk, which runs without a CUDA graph. The numbers of launches and the work of the
CPU are a part of both times.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    LaneSlots,
    LayerPages,
    StepShape,
)
from quire.kernels.flashinfer.backend import FlashInferAttention
from quire.kernels.flashinfer.package import (
    FlashInfer,
    flashinfer_version,
    import_flashinfer,
    why_no_flashinfer,
)
from quire.kernels.flashinfer.wrappers import Wrappers
from quire.kernels.triton.hardware import cannot_run, failure_of
from quire.kernels.triton.self_test import wrong_plain

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampleSteps:
    """Sizes of the steps that are timed; about 64 MiB of KV with 128 elements of 2 bytes.

    Attributes:
        rows: rows with one new token.
        slots: live slots of each row.
        chunk: new tokens of the further row of the second step.
        kv_heads: KV heads.
        group: query heads of a KV head.
        page_tokens: slots of a page.
        layers: calls of attention in a step; all read the same pages.
        repeats: timed steps; the fastest counts.
    """

    rows: int = 16
    slots: int = 1024
    chunk: int = 512
    kv_heads: int = 8
    group: int = 4
    page_tokens: int = 16
    layers: int = 8
    repeats: int = 5


SAMPLE_STEPS = SampleSteps()


@dataclass(frozen=True, slots=True)
class TimedBackends:
    """Times of the sample steps in seconds, decode and with a chunk each.

    Attributes:
        flashinfer: of FlashInfer.
        other: of the other backend.
    """

    flashinfer: tuple[float, float]
    other: tuple[float, float]

    @property
    def is_faster(self) -> bool:
        """Whether FlashInfer is faster in both steps together."""
        return sum(self.flashinfer) < sum(self.other)

    def text(self, other: str) -> str:
        """Both times, in milliseconds."""
        own, others = (
            " and ".join(f"{seconds * 1e3:.2f}" for seconds in times)
            for times in (self.flashinfer, self.other)
        )
        return f"decode and mixed sample steps took {own} ms, {other}'s {others} ms"


def usable_flashinfer(
    device: torch.device, dtype: torch.dtype, head_dim: int, other: AttentionBackend
) -> FlashInferAttention | str:
    """Return the backend, or why it is not used.

    Args:
        device: device of the pages.
        dtype: type of pages and queries.
        head_dim: elements of a vector.
        other: computes what FlashInfer does not.
    """
    reason = why_no_flashinfer(device, dtype, head_dim)
    if reason is not None:
        return reason
    package = _tested(device, dtype, head_dim, other)
    if isinstance(package, str):
        return package
    return FlashInferAttention(Wrappers(package, device), other)


def _tested(
    device: torch.device, dtype: torch.dtype, head_dim: int, other: AttentionBackend
) -> FlashInfer | str:
    key = device, dtype, head_dim
    if key not in TESTED:
        try:
            package = import_flashinfer()
            backend = FlashInferAttention(Wrappers(package, device), other)
            wrong = wrong_plain(backend, device, dtype, head_dim)
        except cannot_run() as error:
            wrong = failure_of(error).replace("Triton", "FlashInfer", 1)
        if wrong is not None:
            _log.warning("FlashInfer is not used on %s: %s; please report it", device, wrong)
        TESTED[key] = package if wrong is None else f"its kernels are not used: {wrong}"
    return TESTED[key]


TESTED: dict[tuple[torch.device, torch.dtype, int], FlashInfer | str] = {}
"""Results of the self-test by device, type and head_dim: the package, or why it is not used."""


def describe(other: str) -> str:
    """Return what runs FlashInfer's steps, and the backend of the others."""
    return f"FlashInfer {flashinfer_version()} for unquantized pages, {other} for other steps"


def is_faster(
    flashinfer: AttentionBackend,
    other: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
) -> tuple[bool, str]:
    """Return whether FlashInfer is faster than another backend here, and the measured times.

    The sample steps run once for each device, type and head_dim of a process.
    """
    key = device, dtype, head_dim
    if key not in TIMED:
        TIMED[key] = time_backends(flashinfer, other, device, dtype, head_dim)
        faster = flashinfer.name if TIMED[key].is_faster else other.name
        _log.info("attention=%s on %s: %s", faster, device, TIMED[key].text(other.name))
    return TIMED[key].is_faster, TIMED[key].text(other.name)


TIMED: dict[tuple[torch.device, torch.dtype, int], TimedBackends] = {}
"""Measured times by device, type and head_dim."""


def time_backends(
    flashinfer: AttentionBackend,
    other: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    sizes: SampleSteps = SAMPLE_STEPS,
) -> TimedBackends:
    """Time the sample steps of two backends, in turn."""
    decode = np.ones(sizes.rows, dtype=np.int32)
    mixed = np.concatenate([decode, [sizes.chunk]]).astype(np.int32)
    steps = [_Step(tokens, device, dtype, head_dim, sizes) for tokens in (decode, mixed)]
    best = {backend: [float("inf")] * len(steps) for backend in (flashinfer, other)}
    for _ in range(1 + sizes.repeats):  # the first compiles kernels; the fastest counts
        for backend, seconds in best.items():
            for number, step in enumerate(steps):
                seconds[number] = min(seconds[number], step.seconds(backend))
    (own_decode, own_mixed), (decode_s, mixed_s) = best[flashinfer], best[other]
    return TimedBackends((own_decode, own_mixed), (decode_s, mixed_s))


class _Step:
    """A step of random keys and values.

    Args:
        tokens: [rows] new tokens.
        device: device of the pages.
        dtype: type of pages and queries.
        head_dim: elements of a vector.
        sizes: of the step.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        sizes: SampleSteps,
    ) -> None:
        self._device, self._sizes = device, sizes
        self._step = StepShape.of(tokens)
        columns = -(-sizes.slots // sizes.page_tokens)
        shape = (len(tokens) * columns, 2, sizes.kv_heads, sizes.page_tokens, head_dim)
        whole = torch.zeros(shape, dtype=dtype, device=device).normal_()
        order = torch.randperm(len(whole), device=device).int()
        rows = torch.arange(len(tokens), device=device)
        table = order.view(len(tokens), 1, columns)
        self._pages = LayerPages(whole[:, 0], whole[:, 1], table, rows, 0, 1)
        slots = np.full((len(tokens), 1), sizes.slots, dtype=np.int32)
        self._lanes = LaneSlots(slots, None)
        heads = sizes.kv_heads * sizes.group
        self._query = torch.zeros(int(tokens.sum()), heads, head_dim, dtype=dtype, device=device)
        self._query.normal_()
        self._math = AttentionMath(scale=head_dim**-0.5)

    def seconds(self, backend: AttentionBackend) -> float:
        """Return the duration of the step, its plan included."""
        self._wait()
        started_s = time.perf_counter()
        slot_bytes = self._pages.key[0, :, 0].nbytes * 2
        plan = backend.plan(self._step, self._lanes, self._sizes.page_tokens, slot_bytes)
        fresh = self._fresh()
        for _ in range(self._sizes.layers):
            backend.attend(plan, self._pages, self._math, self._query, fresh)
        self._wait()
        return time.perf_counter() - started_s

    def _fresh(self) -> tuple[Tensor, Tensor]:
        """Stand in for the new keys and values, which these backends do not read."""
        heads = self._query[:, : self._sizes.kv_heads]
        return heads, heads

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
