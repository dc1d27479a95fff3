"""M7: time to resume a preempted request by swapping, by recompute, or half by each, by length.

The engine runs all three modes, with random weights in a real model shape. The first two modes use
`measure_swap` of `python -m benchmarks memory` on the device. The third uses preempted requests
whose KV is twice the swap space. Overlapping recompute of the first part of a prefix with loading
of the rest is measured by the part `restore` of `python -m benchmarks offload`; preempted requests
do not do this.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.common.models import llama_of, random_model
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.shapes import SPECS
from benchmarks.memory.swapping import (
    SwapConfig,
    SwapTime,
    measure_swap,
    measured_breakeven,
    swap_space_for,
)
from benchmarks.offload.machines import MACHINES
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.kv.store import store_of
from quire.models.loader import LoadedModel
from quire.plan.offload.split import Loading, read_seconds
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import PrefillRates
from quire.profile.ceilings import (
    ChunkTime,
    kv_memory_for,
    measure_copies,
    prefill_rates,
    random_prompt,
    seconds,
)
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig

_VALUE_BYTES = 2  # bfloat16
_DECODED = SamplingParams(max_tokens=4, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTimes:
    """Median times of requests of one length.

    Attributes:
        tokens: tokens of the request.
        swap_s: time to swap its KV out and in.
        recompute_s: time to prefill it.
    """

    tokens: int
    swap_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridTime:
    """Time of a request for which the swap space holds half of the KV.

    Attributes:
        recomputed_tokens: tokens at the start of the request that are recomputed.
        seconds: time to swap its tail out, recompute its head, and swap its tail in.
        error: relative error of its KV after resuming.
    """

    recomputed_tokens: int
    seconds: float
    error: float


def run_swap(bench: DeviceBench) -> PartResult:
    """Run the part."""
    lengths = lengths_that_fit(bench)
    model = _model(bench, max(lengths))
    times = _times(bench, model, lengths)
    hybrids = [measured_hybrid(bench, model, tokens) for tokens in lengths]
    pairs = list(zip(times, hybrids, strict=True))
    prefill = fitted(times)
    ratios = {t.tokens: t.recompute_s / t.swap_s for t in times}
    return PartResult(
        claims={
            "swap_token_us": 1e6 * times[-1].swap_s / times[-1].tokens,
            "swap_read_token_us": 1e6 * prefill.token_s,
            "swap_read_square_ns": 1e9 * prefill.square_s,
            "swap_breakeven_tokens": measured_breakeven(ratios),
            "swap_hybrid_over_alone": max(
                hybrid.seconds / min(t.swap_s, t.recompute_s) for t, hybrid in pairs
            ),
            "swap_restored_error": max(hybrid.error for hybrid in hybrids),
        }
        | _paged(bench),
        tables=(_table(bench, [_row(bench, time, hybrid) for time, hybrid in pairs]),),
    )


# ---- the model and its engine ------------------------------------------------------------------


def lengths_that_fit(bench: DeviceBench) -> list[int]:
    """Free the benchmark's pinned pool; return the lengths whose swap space may be pinned.

    Raises:
        ConfigError: no length fits.
    """
    bench.drop_pool()
    spec, most_bytes = SPECS[bench.config.swap_model], bench.config.pinned_bytes
    sizes = {n: swap_space_for(spec, n, _VALUE_BYTES) for n in bench.config.swap_tokens}
    found = [tokens for tokens, size in sizes.items() if size <= most_bytes]
    if not found:
        raise ConfigError(
            f"expected {min(sizes.values()):,} B of host memory for swap space, but only "
            f"{most_bytes:,} B may be pinned; raise --pinned"
        )
    return found


def _model(bench: DeviceBench, longest: int) -> LoadedModel:
    """Model on the device, if the device has memory for its weights and the KV memory."""
    spec = SPECS[bench.config.swap_model]
    weight_bytes = spec.num_parameters * _VALUE_BYTES
    bench.target.require(
        weight_bytes + kv_memory_for(spec, longest + 2),
        f"{bench.config.swap_model} with a request of {longest:,} tokens",
        "use shorter prompts, or omit the part swap",
    )
    config = llama_of(spec, longest + _DECODED.max_tokens + 2)
    return random_model(config, dtype=torch.bfloat16, device=bench.target.device)


def _times(bench: DeviceBench, model: LoadedModel, lengths: Sequence[int]) -> list[LengthTimes]:
    config = bench.config
    swap = SwapConfig(
        lengths=tuple(lengths), repeats=config.repeats, max_num_batched_tokens=config.chunk_tokens
    )
    found = list(measure_swap(model, swap))
    return [_medians(tokens, [t for t in found if t.tokens == tokens]) for tokens in lengths]


def _medians(tokens: int, found: Sequence[SwapTime]) -> LengthTimes:
    return LengthTimes(
        tokens=tokens,
        swap_s=statistics.median(time.swap_s for time in found),
        recompute_s=statistics.median(time.recompute_s for time in found),
    )


def fitted(times: Sequence[LengthTimes]) -> PrefillRates:
    """Prefill rates fitted to all lengths."""
    return prefill_rates(
        [ChunkTime(tokens=t.tokens, before=0, seconds=t.recompute_s) for t in times]
    )


# ---- half of each ------------------------------------------------------------------------------


def measured_hybrid(bench: DeviceBench, model: LoadedModel, tokens: int) -> HybridTime:
    """Median over preempted requests of one length, after one warm-up request."""
    engine = Engine(
        model,
        KVConfig(
            memory=kv_memory_for(model.spec, tokens + _DECODED.max_tokens),
            swap_space=model.spec.kv_bytes(tokens, _VALUE_BYTES) // 2,
            prefix_cache=PrefixCacheConfig(enabled=False),
        ),
        ScheduleConfig(max_num_batched_tokens=bench.config.chunk_tokens, preempt="hybrid"),
    )
    found = [
        _hybrid_once(bench, engine, random_prompt(model, tokens, seed))
        for seed in range(bench.config.repeats + 1)
    ][1:]
    return HybridTime(
        recomputed_tokens=found[-1].recomputed_tokens,
        seconds=statistics.median(time.seconds for time in found),
        error=max(time.error for time in found),
    )


def _hybrid_once(bench: DeviceBench, engine: Engine, prompt: list[int]) -> HybridTime:
    """Preempt a request after its prefill; return the time until all of its KV is restored.

    The last step also decodes a token after it swaps the tail in; only its copy is counted.

    """
    request_id = engine.submit(GenerationRequest(prompt, _DECODED))
    request = _prefilled(engine, len(prompt))
    held = _held_kv(engine, request, len(prompt))
    elapsed_s = seconds(lambda: engine.scheduler.lifecycle.preempt(request, "measured"))
    if request.memory.swapped is None:
        raise ConfigError(f"expected swap space for half of the KV of {len(prompt)} tokens")
    recomputed_tokens = request.memory.swapped.keep_from
    elapsed_s += _resume_s(bench, engine, request)
    restored = _held_kv(engine, request, len(prompt))
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    error = float((restored - held).norm() / held.norm())
    return HybridTime(recomputed_tokens=recomputed_tokens, seconds=elapsed_s, error=error)


def _resume_s(bench: DeviceBench, engine: Engine, request: Request) -> float:
    """Duration of the steps that recompute the head, and of the final copy."""

    def step() -> None:
        engine.step()
        bench.target.wait()

    elapsed_s = step_s = 0.0
    while request.memory.swapped is not None:
        elapsed_s += step_s
        step_s = seconds(step)
    return elapsed_s + float(engine.events.newest(["swapped_in"])[-1].data["seconds"])


def _prefilled(engine: Engine, tokens: int) -> Request:
    """Step until the last submitted request has finished prefill; return the request."""
    engine.step()
    [request] = engine.scheduler.running
    while request.progress.num_computed < tokens:
        engine.step()
    return request


def _held_kv(engine: Engine, request: Request, tokens: int) -> Float[Tensor, " values"]:
    """Keys and values of the request's first tokens, page by page, in float32 on the CPU."""
    memory = engine.pool.kv.memory
    store = store_of(memory)
    planes: list[Tensor] = []
    for table in memory.tables.values():
        page_class = table.group.page_class
        pages = table.pages[request.memory.row][:, : tokens // page_class.tokens]
        views = store.views(page_class)
        index = torch.from_numpy(pages.reshape(-1).astype("int64")).to(store.device)
        planes += [
            plane[index].flatten() for plane in (views.key, views.value) if plane is not None
        ]
    return torch.cat(planes).cpu().float()


# ---- tables ------------------------------------------------------------------------------------


def _paged(bench: DeviceBench) -> Numbers:
    """swap_pages_*: GB/s of copies through scattered pages, as in an engine's swap."""
    sizes = (bench.config.paged_bytes,)
    found = list(measure_copies(bench.target.device, sizes, bench.config.repeats))
    [scattered] = [time for time in found if time.scattered]
    return {
        "swap_pages_out_gb_per_s": scattered.num_bytes / scattered.out_s / 1e9,
        "swap_pages_back_gb_per_s": scattered.num_bytes / scattered.back_s / 1e9,
    }


def _row(bench: DeviceBench, time: LengthTimes, hybrid: HybridTime) -> tuple[Cell, ...]:
    machine, spec = MACHINES[bench.config.machine], SPECS[bench.config.swap_model]
    sheet = assumed_prefill(spec, machine.flops_per_s)
    loading = Loading(token_s=spec.kv_bytes_per_token(_VALUE_BYTES) / machine.link_bytes_per_s)
    n, recomputed = time.tokens, hybrid.recomputed_tokens
    expected = (
        2 * loading.seconds(n),
        read_seconds(sheet, n),
        2 * loading.seconds(n - recomputed) + read_seconds(sheet, recomputed),
    )
    measured = (time.swap_s, time.recompute_s, hybrid.seconds)
    return (n, *(1e3 * s for s in measured), recomputed / n, *(1e3 * s for s in expected))


def _table(bench: DeviceBench, rows: list[tuple[Cell, ...]]) -> Table:
    return Table(
        name="device-swap",
        caption=(
            f"{bench.where} {bench.config.swap_model} in the engine, one request, ms. Swap: its "
            f"KV swapped out and in. Recompute: in chunks of {bench.config.chunk_tokens:,}. "
            "Hybrid: half of the KV swapped, the other half recomputed. Expected: by the data "
            f"sheet of {bench.config.machine}."
        ),
        columns=(
            *("tokens", "swap", "recompute", "hybrid", "recomputed fraction"),
            *("swap, expected", "recompute, expected", "hybrid, expected"),
        ),
        rows=tuple(rows),
    )
