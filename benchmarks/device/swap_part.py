"""M7: a preempted sequence is swapped, read again, or both at once: what each takes, by length.

The sequence is read chunk by chunk, with random weights and KV in one piece a layer. What an engine
takes for swaps and recomputation is the part `swap` of `python -m benchmarks memory`.
"""

import statistics
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.host_bytes import HostBytes
from benchmarks.device.random_layer import Layer, normed
from benchmarks.device.shapes import SPECS, DecodeCase
from benchmarks.device.target import Target
from benchmarks.memory.swapping import measured_breakeven
from benchmarks.offload.machines import MACHINES
from benchmarks.offload_schedule.executor import dispatch
from benchmarks.offload_schedule.restore import plan_restore
from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense
from quire.offload.timeline import Kind
from quire.plan.fitting import fit_seconds
from quire.plan.offload.restore import Loading, read_seconds, restore_seconds, restore_split
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import PrefillRates
from quire.profile.copies import measure_copies
from quire.profile.prefill_rates import ChunkTime, prefill_rates

_CHANGE = "name shorter prompts, or leave the part swap out"


class PromptHarness:
    """One sequence on a device, and a copy of its KV on the host.

    Tokens of a chunk see the whole chunk: half a chunk's products of attention too many, and the
    same kernel whatever is ahead.

    Args:
        case: one row; its context is the longest prompt.
        chunk_tokens: that a call reads.
        target: the device.
        pool: host memory; taken back from whoever had it.

    Attributes:
        kv: on the device, [layer, token, width].
        host: its copy.

    Raises:
        ConfigError: device or pool has no room.
    """

    def __init__(
        self, case: DecodeCase, chunk_tokens: int, target: Target, pool: HostBytes
    ) -> None:
        self.case, self.chunk_tokens = case, chunk_tokens
        spec, dtype = case.spec, getattr(torch, case.dtype)
        weight_bytes = spec.num_layers * case.layer_weight_bytes
        target.require(weight_bytes + case.kv_bytes, f"a prompt of {case.context:,}", _CHANGE)
        draw = torch.Generator(target.device)
        draw.manual_seed(0)
        self._layers = [Layer.random(case, draw) for _ in range(spec.num_layers)]
        shape = (spec.num_layers, case.context, case.kv_width)
        self.kv = torch.zeros(shape, dtype=dtype, device=target.device)
        pool.clear()
        self.host = pool.take(shape, dtype)
        self._embedded = torch.randn(
            chunk_tokens, spec.hidden_size, generator=draw, device=target.device, dtype=dtype
        )

    def read(self, first: int, count: int) -> None:
        """One chunk through all layers; its KV is in its place behind it."""
        with torch.inference_mode():
            hidden = self._embedded[:count]
            for kv, layer in zip(self.kv, self._layers, strict=True):
                given = normed(hidden)
                layer.project(given, kv[first : first + count])
                out = self._attend(given @ layer.query, kv[: first + count])
                hidden = layer.finish(hidden, out)

    def read_all(self, tokens: int) -> None:
        """A prompt from its beginning."""
        for first in range(0, tokens, self.chunk_tokens):
            self.read(first, min(self.chunk_tokens, tokens - first))

    def save(self, tokens: int) -> None:
        """Begin to copy its KV to the host, layer by layer."""
        for kv, host in zip(self.kv, self.host, strict=True):
            host[:tokens].copy_(kv[:tokens], non_blocking=True)

    def load(self, first: int, count: int) -> None:
        """Begin to copy some tokens' KV back."""
        for kv, host in zip(self.kv, self.host, strict=True):
            kv[first : first + count].copy_(host[first : first + count], non_blocking=True)

    def off(self, tokens: int) -> float:
        """How far the device's KV is from the host's, relative."""
        kv, host = self.kv[:, :tokens], self.host[:, :tokens].to(self.kv.device)
        return float((kv - host).float().norm() / host.float().norm())

    def _attend(
        self, query: Float[Tensor, "token head"], kv: Float[Tensor, "seen width"]
    ) -> Float[Tensor, "token head"]:
        spec, count = self.case.spec, len(query)
        planes = kv.view(1, -1, 2, spec.num_kv_heads, spec.head_dim)
        key, value = (planes[:, :, side].transpose(1, 2) for side in (0, 1))
        heads = query.view(1, count, spec.num_heads, spec.head_dim).transpose(1, 2)
        out = attend_dense(heads, key, value, math=AttentionMath(spec.head_dim**-0.5), seen=None)
        return out.transpose(1, 2).reshape(count, -1)


_LEAST_TOKEN_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTimes:
    """One length, medians.

    Attributes:
        tokens: of the sequence.
        out_s, back_s: of its KV to the host and back.
        read_s: of reading it again.
    """

    tokens: int
    out_s: float
    back_s: float
    read_s: float


def run_swap(bench: DeviceBench) -> PartResult:
    """The part."""
    harness = _harness(bench)
    lengths = [n for n in bench.config.swap_tokens if n <= harness.case.context]
    times = [_times(bench, harness, tokens) for tokens in lengths]
    prefill, loading = fitted(times)
    both = [_hybrid(bench, harness, time, prefill, loading) for time in times]
    rows = [_row(bench, harness.case, time, found) for time, found in zip(times, both, strict=True)]
    ratios = {t.tokens: t.read_s / (t.out_s + t.back_s) for t in times}
    return PartResult(
        claims={
            "swap_token_us": 1e6 * (times[-1].out_s + times[-1].back_s) / times[-1].tokens,
            "swap_read_token_us": 1e6 * prefill.token_s,
            "swap_read_square_ns": 1e9 * prefill.square_s,
            "swap_breakeven_tokens": measured_breakeven(ratios),
            "swap_hybrid_over_alone": max(
                found[1] / min(t.back_s, t.read_s) for t, found in zip(times, both, strict=True)
            ),
            "swap_restored_error": max(found[2] for found in both),
        }
        | _paged(bench),
        tables=(_table(bench, harness.case, rows),),
    )


def _harness(bench: DeviceBench) -> PromptHarness:
    """With the longest prompt that the pool has room for."""
    config, spec = bench.config, SPECS[bench.config.swap_model]
    token_bytes = spec.kv_bytes_per_token(2)
    fits = [n for n in config.swap_tokens if n * token_bytes <= bench.pool.num_bytes]
    if not fits:
        raise ConfigError(
            f"expected room for {min(config.swap_tokens) * token_bytes:,} B of KV on the host, the "
            f"pool has {bench.pool.num_bytes:,} B; raise --pinned"
        )
    case = DecodeCase(model=config.swap_model, rows=1, context=max(fits))
    return PromptHarness(case, config.chunk_tokens, bench.target, bench.pool)


def _times(bench: DeviceBench, harness: PromptHarness, tokens: int) -> LengthTimes:
    target, repeats = bench.target, bench.config.repeats
    read_s = target.median(lambda: harness.read_all(tokens), repeats)
    out_s = target.median(lambda: harness.save(tokens), repeats)
    back_s = target.median(lambda: harness.load(0, tokens), repeats)
    return LengthTimes(tokens=tokens, out_s=out_s, back_s=back_s, read_s=read_s)


def fitted(times: list[LengthTimes]) -> tuple[PrefillRates, Loading]:
    """Rates of reading and of loading that fit all lengths best."""
    prefill = prefill_rates([ChunkTime(tokens=t.tokens, before=0, seconds=t.read_s) for t in times])
    load_call_s, load_s = fit_seconds([(1, t.tokens) for t in times], [t.back_s for t in times])
    return prefill, Loading(token_s=max(load_s, _LEAST_TOKEN_S), call_s=load_call_s)


def _hybrid(
    bench: DeviceBench,
    harness: PromptHarness,
    time: LengthTimes,
    prefill: PrefillRates,
    loading: Loading,
) -> tuple[int, float, float]:
    """Tokens read again, seconds of both at once, and how far the KV is from what was saved."""
    tokens, chunk = time.tokens, harness.chunk_tokens
    split = restore_split(prefill, loading, tokens, chunk)
    harness.read_all(tokens)
    harness.save(tokens)
    schedule = plan_restore(
        prefill,
        loading,
        tokens=tokens,
        read_tokens=split,
        token_bytes=harness.case.kv_bytes / harness.case.context,
        chunk_tokens=chunk,
    )
    work = dispatch(
        {
            Kind.PROJECT: lambda op: harness.read(op.first, op.tokens),
            Kind.KV_IN: lambda op: harness.load(op.first, op.tokens),
        }
    )
    bench.target.seconds(lambda: None)  # what was begun has ended
    harness.kv.fill_(0)
    executor, taken = bench.target.executor(), []
    for _ in range(bench.config.repeats + 1):
        timeline = executor.run(schedule, work)
        taken.append(float(timeline.wall_s or timeline.seconds))
    return split, statistics.median(taken[1:]), harness.off(tokens)


def _paged(bench: DeviceBench) -> Numbers:
    """swap_pages_*: GB/s through pages that lie scattered, as an engine swaps them."""
    sizes = (bench.config.paged_bytes,)
    found = list(measure_copies(bench.target.device, sizes, bench.config.repeats))
    [scattered] = [time for time in found if time.scattered]
    return {
        "swap_pages_out_gb_per_s": scattered.num_bytes / scattered.out_s / 1e9,
        "swap_pages_back_gb_per_s": scattered.num_bytes / scattered.back_s / 1e9,
    }


def _row(
    bench: DeviceBench, case: DecodeCase, time: LengthTimes, found: tuple[int, float, float]
) -> tuple[Cell, ...]:
    machine = MACHINES[bench.config.machine]
    sheet = assumed_prefill(case.spec, machine.flops_per_s)
    loading = Loading(token_s=case.spec.kv_bytes_per_token(2) / machine.link_bytes_per_s)
    n = time.tokens
    split = restore_split(sheet, loading, n)
    expected = (
        2 * loading.seconds(n),
        read_seconds(sheet, n),
        loading.seconds(n) + restore_seconds(sheet, loading, n, split),
    )
    measured = (time.out_s + time.back_s, time.read_s, time.out_s + found[1])
    return (n, *(1e3 * s for s in measured), found[0] / n, *(1e3 * s for s in expected))


def _table(bench: DeviceBench, case: DecodeCase, rows: list[tuple[Cell, ...]]) -> Table:
    return Table(
        name="device-swap",
        caption=(
            f"{bench.where} {case.model}, one sequence, ms: its KV out and back; read again in "
            f"chunks of {bench.config.chunk_tokens:,}; out, then its front read again while its "
            f"back is loaded. Expected: by the data sheet of {bench.config.machine}."
        ),
        columns=(
            *("tokens", "swap", "read again", "both", "share read"),
            *("swap, expected", "read again, expected", "both, expected"),
        ),
        rows=tuple(rows),
    )
