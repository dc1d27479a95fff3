"""Rates of transfer, KV recompute and CPU attention, measured when an engine starts.

They are a prior only: `MeasuredRates` learns the times of concurrent operations from steps.
"""

import time
from collections.abc import Callable

import torch

from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_partial
from quire.models.adapter import TransformersDecoder
from quire.models.base import Decoder
from quire.offload.split import COPY
from quire.offload.step_log import HOST_ATTEND, PROJECT
from quire.plan.fitting import fit_seconds

_COPY_BYTES = (1 << 18, 1 << 20, 1 << 22)
_TOKENS = (16, 64, 256)
_TIMES = 3

Run = Callable[[], object]


def measure_offload_speeds(
    decoder: Decoder, layer: int, *, recomputes: bool
) -> dict[str, tuple[float, float]]:
    """Seconds per call and per byte or token of copies, KV recompute and CPU attention, by kind.

    Args:
        decoder: runs the products.
        layer: model layer to measure.
        recomputes: whether the decoder is prepared to recompute keys and values.
    """
    device = decoder.device
    found = {COPY: _fit(_COPY_BYTES, lambda size: _copy(size, device))}
    if recomputes and isinstance(decoder, TransformersDecoder):
        found[PROJECT] = _fit(_TOKENS, lambda tokens: _recompute(decoder, layer, tokens))
    return found | {HOST_ATTEND: _fit(_TOKENS, lambda tokens: _attend(decoder, tokens))}


def _fit(sizes: tuple[int, ...], prepare: Callable[[int], Run]) -> tuple[float, float]:
    """Fit seconds per call and per unit to the fastest of a few runs of each size."""
    amounts, seconds = [], []
    for size in sizes:
        run = prepare(size)
        run()
        amounts.append((1.0, float(size)))
        seconds.append(min(_timed(run) for _ in range(_TIMES)))
    call_s, unit_s = fit_seconds(amounts, seconds)
    return call_s, max(unit_s, 1e-15)


def _timed(run: Run) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _copy(num_bytes: int, device: torch.device) -> Run:
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def run() -> None:
        target.copy_(source, non_blocking=True)
        _wait(device)

    return run


def _recompute(decoder: TransformersDecoder, layer: int, tokens: int) -> Run:
    device = decoder.device
    inputs = torch.zeros(tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=device)
    positions = torch.arange(tokens, device=device)

    def run() -> None:
        decoder.keys_and_values(layer, inputs, positions)
        _wait(device)

    return run


def _attend(decoder: Decoder, tokens: int) -> Run:
    spec = decoder.spec
    query = torch.zeros(1, spec.num_heads, 1, spec.head_dim, dtype=decoder.dtype)
    key = torch.zeros(1, spec.num_kv_heads, tokens, spec.head_dim, dtype=decoder.dtype)
    return lambda: attend_partial(query, key, key, math=AttentionMath(1.0), seen=None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
