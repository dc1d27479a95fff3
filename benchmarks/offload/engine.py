"""Parts that run engines whose KV memory is too small.

engine        cost of storing X during prefill, and decode steps:
    off       the offloaded pages are transferred
    auto      the split that measured rates select; on a CPU this is mostly the same as `off`
    half      half of the offloaded pages is recomputed from X
    host      half of the offloaded pages is attended to by CPU attention
engine_gain   decode steps on a slowed link, with the ratios of the paper:
    prefetch  all offloaded KV is transferred, one layer ahead
    lB        the split that measured rates select: part of the KV is recomputed from activations
sparse        decode steps of the 125M shape in bfloat16 on a link slowed likewise:
    prefetch  all offloaded KV is transferred, one layer ahead
    sparse    a tenth of the pages is read, and only pages that are not on the device are fetched
sparse_memory decode steps of the same shape with all KV in memory, in turn over one prefill:
    full      attention reads all pages
    sparse    attention reads a tenth of them

In `engine`, steps are timed by the wall clock, prefill by CPU seconds; variants are interleaved. In
`engine_gain` either KV is offloaded (one batch; weights on the device), or weights and KV (the
batches of a step share each layer, column by column). All copies of KV, activations and weights
take their turn on one link. Products and copies are real. Recompute and link are slowed to the
ratios: recompute of a token takes `r`, a multiple of its measured time, so that other load does not
change the ratios; the transfer of its KV takes `r / rho`.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.common.models import llama, random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.offload.config import OffloadBenchConfig
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel
from quire.offload.kv.build import OffloadChoice, measure_offload_speeds
from quire.offload.split import COPY, MeasuredRates
from quire.offload.step_log import PROJECT
from quire.offload.swap.transfer import ThreadTransferWorker, Transfer
from quire.offload.weights.links import FileLink
from quire.offload.weights.placement import WeightStream
from quire.plan.rates import CopyRate
from quire.plan.weights import MAX_BATCHES
from quire.profile.ceilings import random_prompt
from quire.scheduler.schedule_config import ScheduleConfig

ARMS: Mapping[str, Mapping[str, str]] = {
    "off": {"recompute": "off", "cpu_attention": "off"},
    "auto": {},
    "half": {"recompute": "0.5", "cpu_attention": "off"},
    "host": {"recompute": "off", "cpu_attention": "0.5"},
}
_LAYERS, _CHUNK = 6, 64
_MEMORY_SHARE = 0.75  # KV memory over the sequence's KV


def run_engine(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    model = random_model(multi_head(), dtype=torch.float32)
    tokens = config.engine_tokens
    prefill = _prefill_times(model, tokens, 2 * config.repeats)
    steps: dict[str, list[Engine]] = {}
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(config.repeats):
        for name in ARMS:
            step_s, engine = offloaded_step_s(model, tokens, config.engine_steps, name)
            times[name].append(step_s)
            steps.setdefault(name, []).append(engine)
    ends = {name: engines[-1] for name, engines in steps.items()}
    claims: Numbers = {
        "prefill_overhead_fraction": statistics.median(
            stored / off for off, stored in zip(prefill["off"], prefill["stored"], strict=True)
        )
        - 1,
        "engine_auto_over_off": statistics.median(times["auto"]) / statistics.median(times["off"]),
        "engine_hosted_bytes": _offloaded_bytes(ends["off"]),
    }
    return PartResult(
        claims=claims,
        tables=(_table(tokens, times, ends),),
        raw={"read_cpu_s": prefill, "step_s": times},
    )


def multi_head() -> LlamaConfig:
    """A shape with as many KV heads as heads, so that X is half of the KV: 6 layers of 512."""
    return llama(4_000, 512, 1_376, layers=_LAYERS, heads=8, kv_heads=8)


def _engine(model: LoadedModel, memory: int | str, arm: Mapping[str, str]) -> Engine:
    return Engine(
        model,
        KVConfig(
            memory=memory,
            offload=OffloadConfig(
                kv_memory="1GiB",
                recompute=arm.get("recompute", "auto"),
                cpu_attention=arm.get("cpu_attention", "auto"),
            ),
            prefix_cache=PrefixCacheConfig(enabled=False),
        ),
        ScheduleConfig(chunk_tokens=_CHUNK),
    )


def _prefill_times(model: LoadedModel, tokens: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of prefills without and with stored X, in turn, after one warm-up of each."""
    fractions = {"off": "off", "stored": "1"}
    found: dict[str, list[float]] = {name: [] for name in fractions}
    for turn in range(rounds + 1):
        for name in fractions if turn % 2 else reversed(fractions):
            seconds = _prefill_cpu_s(model, tokens, fractions[name])
            if turn:
                found[name].append(seconds)
    return found


def _prefill_cpu_s(model: LoadedModel, tokens: int, recompute: str) -> float:
    """CPU seconds to prefill a prompt that fits, in memory that was written before."""
    engine = _engine(model, "1GiB", {"recompute": recompute, "cpu_attention": "off"})
    elapsed_s = 0.0
    for seed in (1, 2):
        engine.submit(
            GenerationRequest(random_prompt(model, tokens, seed), SamplingParams(max_tokens=1))
        )
        started_s = time.process_time()
        while engine.has_work:
            engine.step()
        elapsed_s = time.process_time() - started_s
        engine.scheduler.sequence_memory.drop_cached()
    return elapsed_s


def offloaded_step_s(
    model: LoadedModel, tokens: int, count: int, name: str
) -> tuple[float, Engine]:
    """Median decode-step time of a prompt with an offloaded prefix, in seconds.

    Args:
        model: any model.
        tokens: prompt length.
        count: decode steps.
        name: a name in ARMS.
    """
    token_bytes = model.spec.kv_bytes_per_token(model.decoder.dtype.itemsize)
    engine = _engine(model, int(_MEMORY_SHARE * (tokens + count) * token_bytes), ARMS[name])
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    engine.submit(GenerationRequest(random_prompt(model, tokens, 2), params))
    found: list[float] = []
    while engine.has_work:
        before, started_s = engine.num_generated_tokens, time.perf_counter()
        engine.step()
        if before:
            found.append(time.perf_counter() - started_s)
    return statistics.median(found), engine


def _offloaded_bytes(engine: Engine) -> int:
    """Peak bytes of offloaded KV."""
    return 0 if engine.pool.offload is None else engine.pool.offload.prefixes.pool.peak_bytes


def _table(tokens: int, times: Mapping[str, list[float]], ends: Mapping[str, Engine]) -> Table:
    return Table(
        name="offload-engine",
        caption=(
            f"Decode steps of one sequence of {tokens:,} tokens in a KV memory for "
            f"{_MEMORY_SHARE:.0%} of "
            f"its KV; {_LAYERS} layers of 512, 8 heads over 8 KV heads, float32."
        ),
        columns=("arm", "ms", "recomputed", "CPU attention", "why"),
        rows=tuple(
            (
                name,
                1e3 * statistics.median(times[name]),
                ends[name].stats().recomputed_tokens,
                ends[name].stats().cpu_attended_tokens,
                "" if (offload := ends[name].pool.offload) is None else offload.why,
            )
            for name in ARMS
        ),
    )


_GAIN_ARMS = {"prefetch": "off", "lB": "auto"}
_SPEEDS = "quire.offload.kv.build.measure_offload_speeds"
_RHO = 0.58  # time of recompute over time of transfer: OPT-13B on an A100 with PCIe 4
_SLOWED = 3.0  # time of a recompute over its measured time
_RESIDENT = 0.1  # fraction of a sequence's KV that has room besides its staging
_MIN_RESIDENT = 24  # least such tokens
_PAGE_TOKENS = 16
_BATCHES = 2  # batches of rows that share each layer, if weights are offloaded


class SlowLink:
    """A link that several transfer workers share.

    Args:
        rate: rate of the link.

    Attributes:
        is_slow: whether copies take the time of the rate; otherwise they run at full speed.
    """

    def __init__(self, rate: CopyRate) -> None:
        self.rate, self.is_slow = rate, False
        self._turn, self._deadline_s = threading.Lock(), 0.0

    def carry(self, copy: Callable[[], None], num_bytes: int) -> None:
        """Run a copy and wait until the link would have finished it."""
        with self._turn:
            begun_s = max(self._deadline_s, time.perf_counter())
            copy()
            if self.is_slow:
                self._deadline_s = begun_s + self.rate.seconds(num_bytes)
                time.sleep(max(0.0, self._deadline_s - time.perf_counter()))


class SlowTransferWorker(ThreadTransferWorker):
    """Runs copies on a thread, one after the other, on a slow link.

    Args:
        link: the link.
    """

    def __init__(self, link: SlowLink) -> None:
        super().__init__()
        self._link = link

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        """See `TransferWorker`."""
        return super().submit(lambda: self._link.carry(copy, num_bytes), num_bytes)


def slowed(
    compute: Callable[..., tuple[Tensor, ...]], link: SlowLink, token_s: float
) -> Callable[..., tuple[Tensor, ...]]:
    """Let the recompute of keys and values take a given time per token while the link is slow.

    Args:
        compute: recomputes keys and values of a layer from its inputs.
        link: the link.
        token_s: seconds of a token; longer than the real time.
    """

    def run(layer: int, inputs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        end_s = time.perf_counter() + len(inputs) * token_s
        found = compute(layer, inputs, *args, **kwargs)
        if link.is_slow:
            time.sleep(max(0.0, end_s - time.perf_counter()))
        return found

    return run


@dataclass(frozen=True, slots=True)
class _Mode:
    """What is offloaded.

    Attributes:
        name: prefix of the claims.
        weights: whether all layers' weights are offloaded.
    """

    name: str
    weights: bool


_KV = _Mode("lB_over_prefetch", weights=False)
_THROUGHPUT = _Mode("throughput_mode", weights=True)


@dataclass(frozen=True, slots=True)
class _Run:
    """Decode steps of one engine.

    Attributes:
        step_s: median step time without the first steps, in which rates are learned.
        outputs: generated token ids by request.
        recomputed: fraction of the offloaded tokens that the last step recomputed.
        kv_peak_bytes: peak KV memory in use.
        offloaded_peak_bytes: peak offload memory in use.
    """

    step_s: float
    outputs: Mapping[str, tuple[int, ...]]
    recomputed: float
    kv_peak_bytes: int
    offloaded_peak_bytes: int


def run_engine_gain(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    found = {mode: _rounds(config, mode) for mode in (_KV, _THROUGHPUT)}
    claims: Numbers = {}
    for mode, arms in found.items():
        pairs = zip(arms["prefetch"], arms["lB"], strict=True)
        ratios = [prefetch.step_s / split.step_s for prefetch, split in pairs]
        claims[f"engine_gain_{mode.name}"] = statistics.median(ratios)
        outputs = [run.outputs for runs in arms.values() for run in runs]
        claims[f"engine_gain_{mode.name}_equal"] = int(all(o == outputs[0] for o in outputs))
    return PartResult(
        claims=claims,
        tables=(_gain_table(config, found),),
        raw={
            f"{mode.name}_{arm}_s": [run.step_s for run in runs]
            for mode, arms in found.items()
            for arm, runs in arms.items()
        },
    )


def _rounds(config: OffloadBenchConfig, mode: _Mode) -> dict[str, list[_Run]]:
    model = random_model(multi_head(), dtype=torch.float32, offloads=mode.weights)
    speeds = _speeds(model)
    found: dict[str, list[_Run]] = {arm: [] for arm in _GAIN_ARMS}
    for _ in range(config.gain_rounds):
        for arm in _GAIN_ARMS:
            found[arm].append(_run(config, mode, model, speeds, _GAIN_ARMS[arm]))
    return found


@dataclass(frozen=True, slots=True)
class _Speeds:
    """The slowed machine.

    Attributes:
        link: rate of the link.
        token_s: recompute of a token of a layer.
    """

    link: CopyRate
    token_s: float

    @property
    def rates(self) -> Mapping[str, tuple[float, float]]:
        """Rates by kind of operation."""
        return {COPY: (0.0, 1 / self.link.bytes_per_s), PROJECT: (0.0, self.token_s)}


def _speeds(model: LoadedModel) -> _Speeds:
    """Speeds with slowed recompute, and with a link that takes r / rho for the KV of a token."""
    assert isinstance(model.decoder, TransformersDecoder), "made above"
    model.decoder.prepare_recomputation()
    real = measure_offload_speeds(model.decoder, model.spec.num_layers - 1, recomputes=True)
    token_s = _SLOWED * real[PROJECT][1]
    kv_bytes = model.spec.kv_values_per_layer_token * model.decoder.dtype.itemsize
    return _Speeds(CopyRate(bytes_per_s=kv_bytes * _RHO / token_s), token_s)


def _run(
    config: OffloadBenchConfig, mode: _Mode, model: LoadedModel, speeds: _Speeds, recompute: str
) -> _Run:
    """Generate for all rows, with the link at the rate of `speeds` once prompts are computed."""
    link = SlowLink(speeds.link)
    with _on_link(model, link, speeds):
        engine = _gain_engine(config, mode, model, recompute)
        params = SamplingParams(max_tokens=config.gain_steps, ignore_eos=True, temperature=0.0)
        for row in range(config.gain_rows):
            prompt = random_prompt(model, config.gain_tokens, row)
            engine.submit(GenerationRequest(prompt, params, request_id=str(row)))
        times, outputs = _steps(engine, link, speeds, config.gain_rows, config.gain_steps)
    splits = engine.pool.offload.splits if engine.pool.offload is not None else None
    share = 0.0 if splits is None else splits.recomputed_tokens / max(1, splits.tokens)
    pool = None if engine.pool.offload is None else engine.pool.offload.prefixes.pool
    return _Run(
        statistics.median(times[len(times) // 3 :]),
        outputs,
        share,
        kv_peak_bytes=engine.stats().kv_peak_bytes,
        offloaded_peak_bytes=0 if pool is None else pool.peak_bytes,
    )


def _learn_anew(engine: Engine, speeds: _Speeds) -> None:
    """Forget the rates of the fast link."""
    splits = None if engine.pool.offload is None else engine.pool.offload.splits
    if splits is not None:
        old = splits.rates
        splits.rates = MeasuredRates(
            speeds.rates,
            kv_bytes=old.kv_bytes,
            x_bytes=old.x_bytes,
            weight_bytes=old.weight_bytes,
        )


def _steps(
    engine: Engine, link: SlowLink, speeds: _Speeds, rows: int, steps: int
) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    """Run all steps; times of those in which every row decodes.

    The machine slows to `speeds` when the first of them starts.
    """
    times, outputs = [], {str(row): list[int]() for row in range(rows)}
    while engine.has_work:
        before = [len(ids) for ids in outputs.values()]
        is_first = not link.is_slow and min(before) > 0
        link.is_slow = link.is_slow or is_first
        started_s = time.perf_counter()
        deltas = engine.step()
        if is_first:
            _learn_anew(engine, speeds)  # this step learned from the one before it
        elif min(before) and max(before) < steps:
            times.append(time.perf_counter() - started_s)
        for delta in deltas:
            outputs[delta.request_id] += delta.token_ids
    return times, {row: tuple(ids) for row, ids in outputs.items()}


@contextmanager
def _on_link(model: LoadedModel, link: SlowLink, speeds: _Speeds) -> Iterator[None]:
    """Let all copies of the engine built inside take turns on one link."""
    assert isinstance(model.decoder, TransformersDecoder), "made above"
    if isinstance(model.weights, WeightStream):
        assert isinstance(model.weights.link, FileLink), "on a CPU"
        model.weights.link.transfer_worker = SlowTransferWorker(link)
    with (
        mock.patch(_SPEEDS, return_value=speeds.rates),
        mock.patch.object(
            model.decoder,
            "keys_and_values",
            slowed(model.decoder.keys_and_values, link, speeds.token_s),
        ),
        mock.patch.object(OffloadChoice, "transfer_worker", return_value=SlowTransferWorker(link)),
    ):
        yield


def _gain_engine(
    config: OffloadBenchConfig, mode: _Mode, model: LoadedModel, recompute: str
) -> Engine:
    tokens = config.gain_tokens + config.gain_steps
    held = 2 / model.spec.num_layers * tokens + max(_RESIDENT * tokens, _MIN_RESIDENT)
    rows = config.gain_rows
    memory = int(rows * held * model.spec.kv_bytes_per_token(4))
    offload = OffloadConfig(kv_memory="2GiB", recompute=recompute, cpu_attention="off")
    kv = KVConfig(
        memory=memory,
        page_tokens=_PAGE_TOKENS,
        scratch="1GiB",
        offload=offload,
        prefix_cache=PrefixCacheConfig(enabled=False),
    )
    schedule = ScheduleConfig(
        chunk_tokens=MAX_BATCHES // _BATCHES,  # all prompts end in the same step
        max_num_seqs=rows,
        max_num_batched_tokens=rows // _BATCHES * (1 if mode.weights else MAX_BATCHES),
        objective="throughput" if mode.weights else "latency",
    )
    return Engine(model, kv, schedule)


def _gain_table(
    config: OffloadBenchConfig, found: Mapping[_Mode, Mapping[str, Sequence[_Run]]]
) -> Table:
    rows = config.gain_rows
    return Table(
        name="offload-engine-gain",
        caption=(
            f"Decode steps of {rows} sequences of {config.gain_tokens:,} tokens in the engine, on "
            f"a link slowed to rho = {_RHO}; xi = 0.5. With offloaded weights, "
            f"{_BATCHES} batches of {rows // _BATCHES} sequences share each layer."
        ),
        columns=("offloaded", "arm", "ms", "recomputed", "KV MiB", "offloaded MiB"),
        rows=tuple(
            (
                "weights and KV" if mode.weights else "KV",
                arm,
                1e3 * statistics.median(run.step_s for run in runs),
                runs[-1].recomputed,
                max(run.kv_peak_bytes for run in runs) / 2**20,
                max(run.offloaded_peak_bytes for run in runs) / 2**20,
            )
            for mode, arms in found.items()
            for arm, runs in arms.items()
        ),
    )


_SPARSE_CHUNK = 256
_SPARSE_RULE = "quest:budget=10%"
_SPARSE_ARMS = {"prefetch": "off", "sparse": _SPARSE_RULE}


@dataclass(frozen=True, slots=True)
class _SparseRun:
    """Decode steps of one engine on the slow link.

    Attributes:
        step_s: median step time.
        kv_bytes: peak KV memory in use, with the bounds of offloaded pages.
        read, fetched: fraction of the pages of KV heads that attention read, and of those of
            offloaded KV that were fetched.
    """

    step_s: float
    kv_bytes: int
    read: float
    fetched: float


def run_sparse(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    model, whole_bytes = _sparse_model(config)
    speeds = _speeds(model)
    found = {
        arm: _sparse_run(config, model, speeds, rule, whole_bytes)
        for arm, rule in _SPARSE_ARMS.items()
    }
    claims: Numbers = {
        "sparse_over_prefetch": found["prefetch"].step_s / found["sparse"].step_s,
        "sparse_kv_memory": found["sparse"].kv_bytes / whole_bytes,
        "sparse_pages_read": found["sparse"].read,
        "sparse_pages_fetched": found["sparse"].fetched,
    }
    table = Table(
        name="offload-sparse",
        caption=(
            f"Decode steps of {config.sparse_rows} sequences of {config.sparse_tokens:,} tokens of "
            f"the 125M shape in bfloat16, pages of {config.sparse_page_tokens} tokens, on a link "
            f"slowed to rho = {_RHO}. KV memory is a fraction of the whole KV."
        ),
        columns=("arm", "ms", "KV memory", "pages read", "offloaded pages fetched"),
        rows=tuple(
            (arm, 1e3 * run.step_s, run.kv_bytes / whole_bytes, run.read, run.fetched)
            for arm, run in found.items()
        ),
    )
    return PartResult(claims=claims, tables=(table,), raw={a: r.step_s for a, r in found.items()})


def _sparse_model(config: OffloadBenchConfig) -> tuple[LoadedModel, int]:
    """The 125M shape, and the bytes of the KV of all rows."""
    context = config.sparse_tokens + config.sparse_steps
    shape = llama(32_000, 768, 2_048, layers=12, heads=12, kv_heads=4, context=context)
    model = random_model(shape, dtype=torch.bfloat16)
    return model, config.sparse_rows * context * model.spec.kv_bytes_per_token(2)


def _sparse_schedule(rows: int) -> ScheduleConfig:
    """All prompts end in the same step."""
    tokens = rows * _SPARSE_CHUNK
    return ScheduleConfig(
        chunk_tokens=_SPARSE_CHUNK, max_num_seqs=rows, max_num_batched_tokens=tokens
    )


def run_sparse_memory(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    model, whole_bytes = _sparse_model(config)
    # the bounds of a page take the bytes of two of its tokens; each row has a last page of its own
    memory = int((1.1 + 2 / config.sparse_page_tokens) * whole_bytes)
    kv = KVConfig(memory=memory, page_tokens=config.sparse_page_tokens, sparse=_SPARSE_RULE)
    engine = Engine(model, kv, _sparse_schedule(config.sparse_rows))
    times: dict[str, list[float]] = {"full": [], "sparse": []}
    for turn in range(config.sparse_rounds + 1):
        for arm, rule in (("full", "off"), ("sparse", _SPARSE_RULE)):
            params = SamplingParams(
                max_tokens=config.sparse_steps, ignore_eos=True, temperature=0.0
            )
            for row in range(config.sparse_rows):
                prompt = random_prompt(model, config.sparse_tokens, row)
                name = f"{turn}-{arm}-{row}"
                engine.submit(GenerationRequest(prompt, params, request_id=name, sparse=rule))
            found: list[float] = []
            while engine.has_work:
                started_s = time.perf_counter()
                if len(engine.step()) == config.sparse_rows:
                    found.append(time.perf_counter() - started_s)
            if turn:  # the first turn computes the prompts
                times[arm].append(statistics.median(found[1:]))
    stats = engine.stats()
    return PartResult(
        claims={
            "sparse_over_full": statistics.median(
                full / sparse for full, sparse in zip(times["full"], times["sparse"], strict=True)
            ),
            "sparse_memory_kv_memory": stats.kv_peak_bytes / whole_bytes,
        },
        tables=(
            Table(
                name="sparse-memory",
                caption=(
                    f"Decode steps of {config.sparse_rows} sequences of {config.sparse_tokens:,} "
                    f"tokens of the 125M shape in bfloat16, pages of {config.sparse_page_tokens} "
                    "tokens, all KV in memory; medians of interleaved turns."
                ),
                columns=("attention", "ms"),
                rows=tuple((arm, 1e3 * statistics.median(of)) for arm, of in times.items()),
            ),
        ),
        raw=times,
    )


def _sparse_run(
    config: OffloadBenchConfig, model: LoadedModel, speeds: _Speeds, rule: str, whole_bytes: int
) -> _SparseRun:
    link = SlowLink(speeds.link)
    kv = KVConfig(
        memory=int(config.sparse_memory * whole_bytes),
        page_tokens=config.sparse_page_tokens,
        sparse=rule,
        offload=OffloadConfig(
            kv_memory=int(1.1 * whole_bytes), recompute="off", cpu_attention="off"
        ),
        prefix_cache=PrefixCacheConfig(enabled=False),
    )
    with _on_link(model, link, speeds):
        rows = config.sparse_rows
        engine = Engine(model, kv, _sparse_schedule(rows))
        params = SamplingParams(max_tokens=config.sparse_steps, ignore_eos=True, temperature=0.0)
        for row in range(rows):
            prompt = random_prompt(model, config.sparse_tokens, row)
            engine.submit(GenerationRequest(prompt, params, request_id=str(row)))
        times, _ = _steps(engine, link, speeds, rows, config.sparse_steps)
    stats, offload = engine.stats(), engine.pool.offload
    bounds = None if offload is None else offload.kv_offload.bounds
    offloaded = stats.sparse_pages_fetched + stats.sparse_page_hits
    return _SparseRun(
        statistics.median(times),
        stats.kv_peak_bytes + (0 if bounds is None else bounds.num_bytes),
        stats.sparse_pages_read / max(1, stats.sparse_pages_held),
        stats.sparse_pages_fetched / max(1, offloaded),
    )
