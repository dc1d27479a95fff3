"""Bringing a prefix back in an engine: all loaded, all read again, or both at once.

The packaged model reads a prompt whose KV lies in a store over TCP. The store's answers are as slow
as the ratio of loading to reading of Llama-3-8B on an H200 asks for; nothing else is padded.
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
from quire.offload.tiers.newest import NewestTier
from quire.offload.tiers.server import StoreServer
from quire.plan.offload.restore import Loading, read_seconds
from quire.plan.preemption_costs import LearnedCosts, assumed_prefill
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates

_PRESETS = (("disk", 6.9e9), ("10gb", 1.1e9))
_SHEET_TOKENS = 16_384
_MOST_TOKENS = 2048
_NEVER_READ = PrefillRates(token_s=1e6)
_ANSWER = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def run_engine_restore(config: OffloadBenchConfig) -> PartResult:
    """The part."""
    model = load_model("quire-tiny", dtype="float32", device="cpu", verify=False)
    claims: Numbers = {}
    rows = [_preset(config, model, name, rate, claims) for name, rate in _PRESETS]
    tokens = _prompt_tokens(config, model)
    return PartResult(
        claims=claims,
        tables=(
            Table(
                name="offload-engine-restore",
                caption=(
                    f"An engine brings {tokens:,} tokens of quire-tiny back from a store over TCP, "
                    f"at the ratios of Llama-3-8B on an H200; medians of {config.repeats}, ms."
                ),
                columns=("tier", "load all", "read all", "both", "read again"),
                rows=tuple(rows),
            ),
        ),
    )


def _prompt_tokens(config: OffloadBenchConfig, model: LoadedModel) -> int:
    return min(config.restore_tokens, _MOST_TOKENS, model.spec.max_positions - 8)


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
    read_s = min(_run(plain, prompt) for _ in range(2))
    kv_bytes = tokens * model.spec.kv_bytes_per_token(4)
    server = StoreServer(
        NewestTier(HostTier(2 * kv_bytes + (8 << 20))),
        bytes_per_s=kv_bytes / (_ratio(bytes_per_s) * read_s),
    )
    engine = Engine(
        model, KVConfig(prefix_cache=PrefixCacheConfig(remote="{}:{}".format(*server.address)))
    )
    try:
        _run(engine, prompt)
        rounds, read_again = [], 0
        for _ in range(config.repeats + 1):  # the first one shows the rates
            load_s = _run(engine, prompt, _NEVER_READ)
            both_s = _run(engine, prompt)
            read_again = _read_again(engine, tokens)
            rounds.append((load_s, _run(plain, prompt), both_s))
    finally:
        engine.close()
        server.close()
    suffix = "" if name == "disk" else f"_{name}"
    gain = statistics.median(load / both for load, _, both in rounds[1:])
    claims[f"engine_restore_gain_vs_load{suffix}"] = gain
    claims[f"engine_restore_over_alone{suffix}"] = statistics.median(
        both / min(load, read) for load, read, both in rounds[1:]
    )
    medians = (1e3 * statistics.median(found) for found in zip(*rounds[1:], strict=True))
    return (name, *medians, read_again)


def _ratio(bytes_per_s: float) -> float:
    """Seconds of loading over seconds of reading, by data sheets."""
    spec = MODELS["Llama-3-8B"]
    prefill = assumed_prefill(spec, MACHINES["h200"].flops_per_s)
    loading = Loading(token_s=spec.kv_bytes_per_token(2) / bytes_per_s)
    return loading.seconds(_SHEET_TOKENS) / read_seconds(prefill, _SHEET_TOKENS)


def _run(engine: Engine, prompt: list[int], prefill: PrefillRates | None = None) -> float:
    """Seconds to the first token, with nothing cached in memory.

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
    while engine.has_work:
        engine.step()
    taken_s = time.perf_counter() - started_s
    sequence_memory.prefix_loader = learned
    return taken_s


def _with_costs(learned: PrefixLoader, engine: Engine, prefill: PrefillRates) -> PrefixLoader:
    copies = CopyRate(bytes_per_s=1e9)
    costs = LearnedCosts(Costs(copies=CopyRates(out=copies, back=copies), prefill=prefill))
    return PrefixLoader(
        learned.tier, costs, engine.scheduler.sequence_memory.sharing, engine.events
    )


def _read_again(engine: Engine, tokens: int) -> int:
    """Tokens of the last prompt that were read; all where nothing was loaded for it."""
    newest = engine.events.newest(["admitted", "restored"])[-1]
    return tokens - int(newest.data["tokens"]) if newest.kind == "restored" else tokens
