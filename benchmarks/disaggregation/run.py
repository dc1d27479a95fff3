"""Time between the tokens of decoding requests, with prompts computed beside them or elsewhere.

    together    one engine    | decode . decode + chunk of a prompt . decode + chunk ... |
    separate    prefill       | prompt ........ | its KV --> store
                decode        | decode . decode . decode . decode <-- store . decode ... |

The streams decode in the engine of this process. A long prompt goes to it at once, or first to the
prefill process and then to it. All outputs must be equal.
"""

import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.redis_server import RedisServer
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.disaggregation.config import DisaggregationConfig
from benchmarks.disaggregation.prefill_process import Prefiller
from benchmarks.serve.model_files import model_folder
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.models.loader import LoadedModel, load_model
from quire.sampling.outputs import OutputDelta

STORE_BYTES = 2 << 30
STORES = ("redis", "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How the prompts are computed.

    Attributes:
        name: name in the table.
        threads: threads of this process.
        separate: whether prompts are computed in another process.
    """

    name: str
    threads: int
    separate: bool


VARIANTS = (
    Variant(name="together, 1 thread", threads=1, separate=False),
    Variant(name="together, 2 threads", threads=2, separate=False),
    Variant(name="separate, 1 thread each", threads=1, separate=True),
)


@dataclass(slots=True)
class _Run:
    """What one run of a variant has observed.

    Attributes:
        tokens: token ids by request.
        times_s: time of each token of a request.
        sent_s: time at which a long prompt arrived.
        cached_tokens: tokens of the long prompts that were not computed here.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    sent_s: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0

    def add(self, deltas: list[OutputDelta]) -> None:
        """Note the tokens of a step."""
        now_s = time.perf_counter()
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            times_s = self.times_s.setdefault(delta.request_id, [])
            times_s += [now_s] * len(delta.token_ids)
            if delta.usage is not None and delta.request_id in self.sent_s:
                self.cached_tokens += delta.usage.cached_tokens

    def gaps_ms(self) -> list[float]:
        """Time before each token of the streams, without the first ones."""
        streams = [found for name, found in self.times_s.items() if name not in self.sent_s]
        return [1e3 * gap for times_s in streams for gap in np.diff(times_s)]

    def first_tokens_ms(self) -> list[float]:
        """Time to the first token of each long prompt."""
        return [1e3 * (self.times_s[name][0] - sent_s) for name, sent_s in self.sent_s.items()]


def run_disaggregation(config: DisaggregationConfig) -> PartResult:
    """Run all variants in turn.

    Raises:
        ConfigError: an unknown store, or it is redis and no Redis or Valkey server is installed.
    """
    if config.store not in STORES:
        raise ConfigError(f"expected --store to be one of {', '.join(STORES)}, got {config.store}")
    folder = model_folder(config.model, Path(config.files))
    model = load_model(folder, device="cpu", verify=False)
    found: dict[str, list[_Run]] = {variant.name: [] for variant in VARIANTS}
    threads = torch.get_num_threads()
    try:
        for _ in range(config.repeats):
            for variant in VARIANTS:
                found[variant.name].append(_run_variant(config, model, folder, variant))
    finally:
        torch.set_num_threads(threads)
    runs = [run for runs in found.values() for run in runs]
    assert all(run.tokens == runs[0].tokens for run in runs), "the outputs of variants differ"
    rows = tuple(_row(config, name, runs) for name, runs in found.items())
    return PartResult(claims=_claims(rows), tables=(_table(config, rows),))


def _table(config: DisaggregationConfig, rows: tuple[tuple[Cell, ...], ...]) -> Table:
    return Table(
        name="disaggregation",
        caption=(
            f"{config.streams} streams of {config.model} decode while {config.prompts} prompts of "
            f"{config.prompt_tokens:,} tokens arrive every {config.interval_s:g} s; medians of "
            f"{config.repeats}."
        ),
        columns=(
            *("variant", "TPOT p50, ms", "TPOT p99, ms", "longest gap, ms"),
            *("TTFT of a long prompt, ms", "long prompts not computed here"),
        ),
        rows=rows,
    )


def _row(config: DisaggregationConfig, name: str, runs: list[_Run]) -> tuple[Cell, ...]:
    prompt_tokens = config.prompts * config.prompt_tokens
    columns = zip(
        *(
            (
                *(float(np.percentile(run.gaps_ms(), share)) for share in (50, 99, 100)),
                statistics.median(run.first_tokens_ms()),
                run.cached_tokens / prompt_tokens,
            )
            for run in runs
        ),
        strict=True,
    )
    return (name, *(statistics.median(column) for column in columns))


def _claims(rows: tuple[tuple[Cell, ...], ...]) -> Numbers:
    together, with_two, separate = rows
    p99 = [float(row[2] or 0) for row in (together, with_two, separate)]
    return {
        "disaggregation_p99_gain": p99[0] / p99[2],
        "disaggregation_p99_gain_over_two_threads": p99[1] / p99[2],
        "disaggregation_tpot_p99_ms": p99[2],
        "disaggregation_not_recomputed": float(separate[5] or 0),
    }


# ---- one run -------------------------------------------------------------------------------------


def _run_variant(
    config: DisaggregationConfig, model: LoadedModel, folder: str, variant: Variant
) -> _Run:
    torch.set_num_threads(variant.threads)
    with ExitStack() as undo:
        cache, prefiller = PrefixCacheConfig(), None
        if variant.separate:
            url, size = undo.enter_context(_store(config)), str(STORE_BYTES)
            cache = PrefixCacheConfig(remote=url, remote_memory=STORE_BYTES, load="whole")
            prefiller = undo.enter_context(Prefiller(folder, url, f"{size}B", config.kv_memory))
        engine = Engine(model, KVConfig(memory=config.kv_memory, prefix_cache=cache))
        undo.callback(engine.close)
        _decode_all(engine, [_request(config, "warm", config.prompts)], prefiller)
        return _measure(config, engine, prefiller)


@contextmanager
def _store(config: DisaggregationConfig) -> Iterator[str]:
    if config.store == "file":
        with tempfile.TemporaryDirectory(prefix="kv-") as folder:
            yield f"file://{folder}"
        return
    server = RedisServer()
    try:
        yield server.url
    finally:
        server.close()


def _request(config: DisaggregationConfig, name: str, number: int) -> GenerationRequest:
    prompt = [5 + (number * 31 + i * i) % 89 for i in range(config.prompt_tokens)]
    return GenerationRequest(prompt, _greedy(config.new_tokens), request_id=name)


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _decode_all(
    engine: Engine, requests: list[GenerationRequest], prefiller: Prefiller | None
) -> None:
    """Run requests to their ends, first in the prefill process."""
    for number, request in enumerate(requests):
        if prefiller is not None:
            prefiller.send(number, list(request.prompt))  # type: ignore[arg-type]
            prefiller.done.get()
        engine.submit(request)
        while engine.has_work:
            engine.step()


def _measure(config: DisaggregationConfig, engine: Engine, prefiller: Prefiller | None) -> _Run:
    run, long = _Run(), [_request(config, f"long {n}", n) for n in range(config.prompts)]
    for number in range(config.streams):
        prompt = [7 + number, *range(5, 20)]
        stream = GenerationRequest(
            prompt, _greedy(config.stream_tokens), request_id=f"stream {number}"
        )
        engine.submit(stream)
    started_s, num_sent, num_submitted = time.perf_counter(), 0, 0
    while engine.has_work or num_submitted < len(long):
        due_s = started_s + (num_sent + 1) * config.interval_s - time.perf_counter()
        if num_sent < len(long) and due_s <= 0:
            run.sent_s[f"long {num_sent}"] = time.perf_counter()
            if prefiller is None:
                engine.submit(long[num_sent])
                num_submitted += 1
            else:
                prefiller.send(num_sent, list(long[num_sent].prompt))  # type: ignore[arg-type]
            num_sent += 1
        if prefiller is not None:
            wait_s = 0.0 if engine.has_work else max(0.001, min(due_s, 0.1))
            for number in _finished(prefiller, wait_s):
                engine.submit(long[number])
                num_submitted += 1
        elif not engine.has_work:
            time.sleep(max(0.0, due_s))
        if engine.has_work:
            run.add(engine.step())
    return run


def _finished(prefiller: Prefiller, wait_s: float) -> Iterator[int]:
    """Prompts whose KV is in the store by now, or within the wait."""
    try:
        yield prefiller.done.get(block=wait_s > 0, timeout=wait_s or None)
        while True:
            yield prefiller.done.get_nowait()
    except queue.Empty:
        return
