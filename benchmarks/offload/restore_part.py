"""Bringing a prefix back: all loaded, all recomputed, or both at once; by data sheets, and really.

The engine reads a prompt with the packaged model, whose KV lies in a store over TCP. The store's
answers are as slow as the ratio of loading to prefill of Llama-3-8B on an H200 asks for, from a
disk or over 10 Gb; nothing else is padded. A restored prefix is answered as a computed one.
"""

import statistics
import time

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.machines import MACHINES, MODELS
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel, load_model
from quire.offload.prefix_store.prefix_loader import PrefixLoader
from quire.offload.tiers.host import HostTier
from quire.offload.tiers.lru import LRUTier
from quire.offload.tiers.server import StoreServer
from quire.plan.offload.restore import Loading, read_seconds, restore_seconds, restore_split
from quire.plan.preemption_costs import LearnedCosts, assumed_prefill
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates
from quire.sampling.outputs import OutputDelta

_LINKS = (("PCIe 5", 55e9), ("NVMe", 6.9e9), ("100 Gb", 11e9), ("10 Gb", 1.1e9))
_PRESETS = (("disk", 6.9e9), ("10gb", 1.1e9))
_SHEET_TOKENS = 16_384
_NEVER_READ = PrefillRates(token_s=1e6)
_ANSWER = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def run_restore(config: OffloadBenchConfig) -> PartResult:
    """The part."""
    model = load_model("quire-tiny", dtype="float32", device="cpu", verify=False)
    claims: Numbers = {}
    rows = [_preset(config, model, name, rate, claims) for name, rate in _PRESETS]
    tokens = _prompt_tokens(config, model)
    return PartResult(
        claims=claims,
        tables=(
            _sheet(),
            Table(
                name="offload-engine-restore",
                caption=(
                    f"An engine brings {tokens:,} tokens of quire-tiny back from a store over TCP, "
                    f"at the ratios of Llama-3-8B on an H200; medians of {config.repeats}, ms."
                ),
                columns=("tier", "load all", "read all", "both", "read again", "formula"),
                rows=tuple(rows),
            ),
        ),
    )


def _sheet() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for model, tokens in (("Llama-3-8B", 16_384), ("OPT-6.7B", 4096)):
        spec = MODELS[model]
        prefill = assumed_prefill(spec, MACHINES["h200"].flops_per_s)
        for name, rate in _LINKS:
            loading = Loading(token_s=spec.kv_bytes_per_token(2) / rate)
            split = restore_split(prefill, loading, tokens)
            times = (
                loading.seconds(tokens),
                read_seconds(prefill, tokens),
                restore_seconds(prefill, loading, tokens, split),
            )
            rows.append((model, tokens, name, split / tokens, *(1e3 * t for t in times)))
    return Table(
        name="offload-restore",
        caption="Restoring a prefix on an H200 by data sheets, ms.",
        columns=("model", "tokens", "from", "read again", "load all", "read all", "both"),
        rows=tuple(rows),
    )


def _prompt_tokens(config: OffloadBenchConfig, model: LoadedModel) -> int:
    return min(config.restore_tokens, model.spec.max_positions - 8)


def _preset(
    config: OffloadBenchConfig,
    model: LoadedModel,
    name: str,
    bytes_per_s: float,
    claims: Numbers,
) -> tuple[Cell, ...]:
    tokens = _prompt_tokens(config, model)
    prompt = [3 + i * i % 97 for i in range(tokens)]
    plain = Engine(model, KVConfig())
    read_s, answer = min(_run(plain, prompt) for _ in range(2))
    kv_bytes = tokens * model.spec.kv_bytes_per_token(4)
    server = StoreServer(
        LRUTier(HostTier(2 * kv_bytes + (8 << 20))),
        bytes_per_s=kv_bytes / (_ratio(bytes_per_s) * read_s),
    )
    engine = Engine(
        model, KVConfig(prefix_cache=PrefixCacheConfig(remote="{}:{}".format(*server.address)))
    )
    try:
        _run(engine, prompt)
        rounds, read_again = [], 0
        for _ in range(config.repeats + 1):  # the first one shows the rates
            load_s, loaded = _run(engine, prompt, _NEVER_READ)
            both_s, restored = _run(engine, prompt)
            read_again = _read_again(engine, tokens)
            assert loaded == restored == answer, "a restored prefix is answered differently"
            rounds.append((load_s, _run(plain, prompt)[0], both_s))
    finally:
        engine.close()
        server.close()
    suffix = "" if name == "disk" else f"_{name}"
    gain = statistics.median(load / both for load, _, both in rounds[1:])
    claims[f"restore_gain_vs_load{suffix}"] = gain
    claims[f"restore_over_alone{suffix}"] = statistics.median(
        both / min(load, read) for load, read, both in rounds[1:]
    )
    load_s, plain_s, both_s = (statistics.median(found) for found in zip(*rounds[1:], strict=True))
    formula_s = _formula_s(model, tokens, load_s, plain_s)
    return (name, *(1e3 * s for s in (load_s, plain_s, both_s)), read_again, 1e3 * formula_s)


def _formula_s(model: LoadedModel, tokens: int, load_s: float, read_s: float) -> float:
    """Seconds of both at once, of what each took alone; attention's share is that of arithmetic."""
    shape = assumed_prefill(model.spec, 1.0)
    scale = read_s / read_seconds(shape, tokens)
    prefill = PrefillRates(token_s=shape.token_s * scale, square_s=shape.square_s * scale)
    loading = Loading(token_s=load_s / tokens)
    split = restore_split(prefill, loading, tokens)
    return restore_seconds(prefill, loading, tokens, split)


def _ratio(bytes_per_s: float) -> float:
    """Seconds of loading over seconds of reading, by data sheets."""
    spec = MODELS["Llama-3-8B"]
    prefill = assumed_prefill(spec, MACHINES["h200"].flops_per_s)
    loading = Loading(token_s=spec.kv_bytes_per_token(2) / bytes_per_s)
    return loading.seconds(_SHEET_TOKENS) / read_seconds(prefill, _SHEET_TOKENS)


def _run(
    engine: Engine, prompt: list[int], prefill: PrefillRates | None = None
) -> tuple[float, list[int]]:
    """Seconds to the first token, with nothing cached in memory, and that token.

    Args:
        engine: idle.
        prompt: tokens.
        prefill: what reading is said to take; None: what the engine has learned.
    """
    sequence_memory = engine.scheduler.sequence_memory
    sequence_memory.sharing.drop_cached()
    learned = engine.prefix_loader
    if learned is not None:
        learned.tier.transfer_worker.drain()
        if prefill is not None:
            sequence_memory.prefix_loader = _with_costs(learned, engine, prefill)
    started_s = time.perf_counter()
    engine.submit(GenerationRequest(prompt, _ANSWER))
    deltas: list[OutputDelta] = []
    while engine.has_work:
        deltas += engine.step()
    taken_s = time.perf_counter() - started_s
    sequence_memory.prefix_loader = learned
    return taken_s, [token_id for delta in deltas for token_id in delta.token_ids]


def _with_costs(learned: PrefixLoader, engine: Engine, prefill: PrefillRates) -> PrefixLoader:
    copies = CopyRate(bytes_per_s=1e9)
    costs = LearnedCosts(Costs(copies=CopyRates(out=copies, back=copies), prefill=prefill))
    return PrefixLoader(
        learned.tier, costs, engine.scheduler.sequence_memory.sharing, engine.events
    )


def _read_again(engine: Engine, tokens: int) -> int:
    """Tokens of the last prompt that were read; all where nothing was loaded for it."""
    newest = engine.events.newest(["admitted", "prefix_loaded"])[-1]
    return tokens - int(newest.data["tokens"]) if newest.kind == "prefix_loaded" else tokens
