"""Part `kvpr`: KV offload with partial recompute against transfer alone, as KVPR measures it.

    latency        one batch; weights on the device, KV in CPU memory (KVPR, figure 7)
    throughput     weights and KV offloaded; batches of a step share each layer (KVPR, figure 6)
    one row        weights and KV offloaded, little KV: W_K and W_V are transferred first, so that
                   recompute runs during the transfer of the other weights (KVPR, table 2)

The baseline of KVPR's latency is Transformers' offloaded cache, which is the third arm there. The
host memory of all arms is pinned.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteriaList

from benchmarks.common.models import llama_of, random_model, random_weights
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.common.transformers_runs import greedy, median_gap
from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.config import SPECS
from benchmarks.gpu.others import FAILURES, step_clock
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.plan.weights import MAX_BATCHES
from quire.scheduler.schedule_config import ScheduleConfig

_ALONE, _PARTIAL = "transfer alone", "partial recompute"
_RESIDENT, _MIN_RESIDENT = 0.1, 24  # tokens of a row whose KV has room besides its staging
_THEIRS = "Transformers, offloaded cache"
_SHARING_BATCHES = 2  # batches of rows that share each layer in a decode step

Outputs = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Mode:
    """What is offloaded, and for how many rows.

    Attributes:
        name: of the claims.
        label: of the table.
        weights: whether the weights of layers are offloaded.
        rows: rows of the batch.
        shares: whether several batches of a step share each transferred layer.
    """

    name: str
    label: str
    weights: bool
    rows: int
    shares: bool = False


@dataclass(frozen=True, slots=True)
class _Steps:
    """Decode steps of an arm.

    Attributes:
        step_s: median seconds of a step; None if it did not run.
        outputs: generated tokens of each row.
        recomputed: share of the offloaded tokens that the last step recomputed; None if unknown.
        note: a remark.
    """

    step_s: float | None
    outputs: Outputs = ()
    recomputed: float | None = None
    note: str | None = None


def run_kvpr(bench: GpuBench) -> PartResult:
    """Run the part.

    kvpr_*_gain: step time with transfer alone over that with partial recompute, for latency,
    throughput and one row.
    kvpr_latency_over_transformers: step time of Transformers' offloaded cache over Quire's.
    kvpr_equal_outputs: smallest share of equal tokens of two arms; below 1 on a GPU if likeliest
    tokens are near ties, because products of other sizes round differently.
    """
    claims: Numbers = {}
    rows: list[tuple[Cell, ...]] = []
    shares = []
    for mode in _modes(bench):
        alone = _own(bench, mode, "off")
        bench.free()
        # a trial on a CPU, whose rates select no recompute, recomputes half
        partial = _own(bench, mode, "auto" if bench.target.on_gpu else "0.5")
        bench.free()
        arms = {_ALONE: alone, _PARTIAL: partial}
        assert alone.step_s is not None, "it ran"
        assert partial.step_s is not None, "it ran"
        claims[f"kvpr_{mode.name}_gain"] = alone.step_s / partial.step_s
        if mode.name == "latency":
            arms[_THEIRS] = their = _transformers(bench, mode)
            bench.free()
            if their.step_s is not None:
                claims["kvpr_latency_over_transformers"] = their.step_s / partial.step_s
        shares += [equal_share(alone.outputs, arm.outputs) for arm in arms.values() if arm.outputs]
        rows += [_row(mode, label, arm) for label, arm in arms.items()]
    claims["kvpr_equal_outputs"] = min(shares)
    return PartResult(claims=claims, tables=(_table(bench, rows),))


def _modes(bench: GpuBench) -> tuple[_Mode, ...]:
    rows = bench.config.kvpr_rows
    return (
        _Mode("latency", "KV", weights=False, rows=rows),
        _Mode("throughput", "weights and KV", weights=True, rows=rows, shares=True),
        _Mode("one_row", "weights and KV", weights=True, rows=1),
    )


def equal_share(left: Outputs, right: Outputs) -> float:
    """Return the share of equal tokens at equal places."""
    pairs = [
        (a, b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


# ---- Quire ---------------------------------------------------------------------------------------


def _own(bench: GpuBench, mode: _Mode, recompute: str) -> _Steps:
    model = random_model(
        llama_of(SPECS[bench.config.kvpr_model], _context(bench)),
        dtype=bench.dtype,
        device=bench.target.device,
        offloads=mode.weights,
    )
    engine = _engine(bench, mode, model, recompute)
    config = bench.config
    count = config.warm_steps + config.steps
    options = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    prompts = bench.prompts(mode.rows, config.kvpr_tokens, model.spec.vocab_size)
    ids = [engine.submit(GenerationRequest(prompt, options)) for prompt in prompts]
    outputs: dict[str, list[int]] = {name: [] for name in ids}
    times_s = []
    while engine.has_work:
        decoding = all(0 < len(tokens) < count for tokens in outputs.values())
        started_s = time.perf_counter()
        deltas = engine.step()
        if decoding:
            times_s.append(time.perf_counter() - started_s)
        for delta in deltas:
            outputs[delta.request_id] += delta.token_ids
    offload = engine.pool.offload
    splits = None if offload is None else offload.splits
    share = None if splits is None else splits.recomputed_tokens / max(1, splits.tokens)
    return _Steps(
        statistics.median(times_s[-config.steps :]), [outputs[name] for name in ids], share
    )


def _context(bench: GpuBench) -> int:
    return bench.config.kvpr_tokens + bench.config.warm_steps + bench.config.steps + 1


def _engine(bench: GpuBench, mode: _Mode, model: LoadedModel, recompute: str) -> Engine:
    tokens = _context(bench)
    row_bytes = model.spec.kv_bytes(tokens, bench.dtype.itemsize)
    held = 2 / model.spec.num_layers + max(_RESIDENT, _MIN_RESIDENT / tokens)
    offload = OffloadConfig(
        kv_memory=int(1.5 * mode.rows * row_bytes) + (16 << 20),
        recompute=recompute,
        cpu_attention="off",
    )
    kv = KVConfig(
        memory=int(mode.rows * held * row_bytes) + (1 << 16),
        offload=offload,
        swap_space=0,
        prefix_cache=PrefixCacheConfig(enabled=False),
        attention=bench.config.attention,  # type: ignore[arg-type]
    )
    # all prompts end in the same step; their older KV is offloaded between the chunks
    chunk_tokens = bench.config.kvpr_chunk
    batch_tokens = mode.rows * chunk_tokens
    if mode.shares:
        batch_tokens = max(1, mode.rows // _SHARING_BATCHES)
        chunk_tokens = max(1, MAX_BATCHES * batch_tokens // mode.rows)
    schedule = ScheduleConfig(
        max_num_seqs=mode.rows,
        max_num_batched_tokens=batch_tokens,
        chunk_tokens=chunk_tokens,
        objective="throughput" if mode.shares else "latency",
    )
    return Engine(model, kv, schedule)


# ---- Transformers --------------------------------------------------------------------------------


def _transformers(bench: GpuBench, mode: _Mode) -> _Steps:
    """Decode steps of `generate` with its offloaded cache; without offload on a CPU."""
    config = bench.config
    count = config.warm_steps + config.steps
    shape = llama_of(SPECS[config.kvpr_model], _context(bench))
    model = random_weights(shape, dtype=bench.dtype, device=bench.target.device)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    prompts = bench.prompts(mode.rows, config.kvpr_tokens, shape.vocab_size)
    ids, clock = torch.tensor(prompts, device=bench.target.device), step_clock(bench)
    cache: dict[str, Any] = {"cache_implementation": "offloaded"} if bench.target.on_gpu else {}
    try:
        with torch.inference_mode():
            found = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=greedy(count, **cache),
                stopping_criteria=StoppingCriteriaList([clock]),
            )
    except FAILURES as error:
        return _Steps(None, note=f"failed: {error}"[:80])
    note = None if cache else "not offloaded: it needs a CUDA device"
    outputs = found[:, ids.shape[1] :].tolist()
    return _Steps(median_gap(clock.times_s[-config.steps - 1 :]), outputs, note=note)


# ---- table ---------------------------------------------------------------------------------------


def _row(mode: _Mode, label: str, arm: _Steps) -> tuple[Cell, ...]:
    ms = None if arm.step_s is None else 1e3 * arm.step_s
    rate = None if arm.step_s is None else mode.rows / arm.step_s
    return mode.label, mode.rows, label, ms, rate, arm.recomputed, arm.note


def _table(bench: GpuBench, rows: Sequence[tuple[Cell, ...]]) -> Table:
    config = bench.config
    return Table(
        name="gpu-kvpr",
        caption=(
            f"{bench.where} Medians of {config.steps} decode steps in the shape of "
            f"{config.kvpr_model} with {config.kvpr_tokens:,} tokens of prompt; most KV in pinned "
            "CPU memory."
        ),
        columns=("offloaded", "rows", "arm", "ms", "tokens/s", "recomputed", "remark"),
        rows=tuple(rows),
    )
