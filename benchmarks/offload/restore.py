"""Part `restore`: prefix load, prefill, or both in parallel; by data sheets and measured.

The engine runs the packaged model, with its prefix KV in a Redis server that it starts. The
server's responses are delayed to the ratio of load to prefill of Llama-3-8B on an H200, from a disk
or over 10 Gb; nothing else is delayed. The output after a prefix load must equal the output without
it.
"""

import socket
import socketserver
import statistics
import threading
import time
from contextlib import suppress
from typing import cast

from benchmarks.common.models import LLAMA_3_8B, OPT_6_7B
from benchmarks.common.redis_server import RedisServer
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.offload.config import OffloadBenchConfig
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel, load_model
from quire.offload.prefix_store.prefix_loader import PrefixLoader
from quire.offload.split import Loading, read_seconds, restore_seconds, restore_split
from quire.plan.preemption_costs import LearnedCosts, assumed_prefill
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates
from quire.sampling.outputs import OutputDelta

_LINKS = (("PCIe 5", 55e9), ("NVMe", 6.9e9), ("100 Gb", 11e9), ("10 Gb", 1.1e9))
_PRESETS = (("disk", 6.9e9), ("10gb", 1.1e9))
_SHEET_TOKENS = 16_384
_H200_FLOPS_PER_S = 650e12  # of large products in half precision, below the peak
_SLOW_PREFILL = PrefillRates(token_s=1e6)
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def run_restore(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
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
                    f"Loads of {tokens:,} prefix tokens of quire-tiny from a Redis server, "
                    f"at the ratios of Llama-3-8B on an H200; medians of {config.repeats}, ms."
                ),
                columns=("tier", "load all", "prefill all", "both", "prefilled", "formula"),
                rows=tuple(rows),
            ),
        ),
    )


def _sheet() -> Table:
    rows: list[tuple[Cell, ...]] = []
    sheets = (("Llama-3-8B", LLAMA_3_8B, _SHEET_TOKENS), ("OPT-6.7B", OPT_6_7B, 4096))
    for model, spec, tokens in sheets:
        prefill = assumed_prefill(spec, _H200_FLOPS_PER_S)
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
        caption="Loading a prefix on an H200 by data sheets, ms.",
        columns=("model", "tokens", "from", "prefilled", "load all", "prefill all", "both"),
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
    prefill_s, output = min(_run(plain, prompt) for _ in range(2))
    kv_bytes = tokens * model.spec.kv_bytes_per_token(4)
    server = RedisServer()
    link = SlowLink(server.port, kv_bytes / (_ratio(bytes_per_s) * prefill_s))
    stored = PrefixCacheConfig(remote=f"redis://127.0.0.1:{link.port}")
    engine = Engine(model, KVConfig(prefix_cache=stored))
    try:
        _run(engine, prompt)
        rounds, prefilled = [], 0
        for _ in range(config.repeats + 1):  # the engine learns rates in the first round
            load_s, loaded = _run(engine, prompt, _SLOW_PREFILL)
            both_s, restored = _run(engine, prompt)
            prefilled = _prefilled_tokens(engine, tokens)
            assert loaded == restored == output, "a prefix load changed the output"
            rounds.append((load_s, _run(plain, prompt)[0], both_s))
    finally:
        engine.close()
        link.close()
        server.close()
    suffix = "" if name == "disk" else f"_{name}"
    gain = statistics.median(load / both for load, _, both in rounds[1:])
    claims[f"restore_gain_vs_load{suffix}"] = gain
    claims[f"restore_over_alone{suffix}"] = statistics.median(
        both / min(load, read) for load, read, both in rounds[1:]
    )
    load_s, plain_s, both_s = (statistics.median(found) for found in zip(*rounds[1:], strict=True))
    formula_s = _formula_s(model, tokens, load_s, plain_s)
    return (name, *(1e3 * s for s in (load_s, plain_s, both_s)), prefilled, 1e3 * formula_s)


def _formula_s(model: LoadedModel, tokens: int, load_s: float, prefill_s: float) -> float:
    """Predicted seconds of both in parallel, from the single times."""
    shape = assumed_prefill(model.spec, 1.0)
    scale = prefill_s / read_seconds(shape, tokens)
    prefill = PrefillRates(token_s=shape.token_s * scale, square_s=shape.square_s * scale)
    loading = Loading(token_s=load_s / tokens)
    split = restore_split(prefill, loading, tokens)
    return restore_seconds(prefill, loading, tokens, split)


def _ratio(bytes_per_s: float) -> float:
    """Load time over prefill time, by data sheets."""
    prefill = assumed_prefill(LLAMA_3_8B, _H200_FLOPS_PER_S)
    loading = Loading(token_s=LLAMA_3_8B.kv_bytes_per_token(2) / bytes_per_s)
    return loading.seconds(_SHEET_TOKENS) / read_seconds(prefill, _SHEET_TOKENS)


def _run(
    engine: Engine, prompt: list[int], prefill: PrefillRates | None = None
) -> tuple[float, list[int]]:
    """Run a prompt with an empty cache; return the time to its first token, and the token.

    Args:
        engine: idle engine.
        prompt: token ids.
        prefill: prefill rates that the engine assumes; None: the rates it has learned.
    """
    sequence_memory = engine.scheduler.sequence_memory
    sequence_memory.drop_cached()
    learned = engine.prefix_loader
    if learned is not None:
        learned.tier.transfer_worker.drain()
        if prefill is not None:
            sequence_memory.prefix_loader = _with_costs(learned, engine, prefill)
    started_s = time.perf_counter()
    engine.submit(GenerationRequest(prompt, _ONE_TOKEN))
    deltas: list[OutputDelta] = []
    while engine.has_work:
        deltas += engine.step()
    elapsed_s = time.perf_counter() - started_s
    sequence_memory.prefix_loader = learned
    return elapsed_s, [token_id for delta in deltas for token_id in delta.token_ids]


def _with_costs(learned: PrefixLoader, engine: Engine, prefill: PrefillRates) -> PrefixLoader:
    copies = CopyRate(bytes_per_s=1e9)
    costs = LearnedCosts(Costs(copies=CopyRates(out=copies, back=copies), prefill=prefill))
    return PrefixLoader(learned.tier, costs, engine.scheduler.sequence_memory, engine.events)


def _prefilled_tokens(engine: Engine, tokens: int) -> int:
    """Prefilled tokens of the last prompt; all tokens if no prefix was loaded."""
    newest = engine.events.newest(["admitted", "prefix_loaded"])[-1]
    return tokens - int(newest.data["tokens"]) if newest.kind == "prefix_loaded" else tokens


_PIECE_BYTES = 256 << 10


class SlowLink:
    """A TCP proxy of a local server that delays its responses, until it is closed.

    Args:
        port: port of the server on this machine.
        bytes_per_s: rate of all responses together.

    Attributes:
        port: port to connect to.
    """

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._server = _Proxy(port, bytes_per_s)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="slow link", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no further connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port, self.bytes_per_s = port, bytes_per_s
        self.turn = threading.Lock()
        self.deadline_s = 0.0

    def delay(self, num_bytes: int) -> None:
        """Wait for the time of a transfer: all connections share absolute deadlines."""
        with self.turn:
            start_s = max(self.deadline_s, time.perf_counter())
            self.deadline_s = start_s + num_bytes / self.bytes_per_s
            left_s = self.deadline_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        proxy = cast("_Proxy", self.server)
        with suppress(OSError), socket.create_connection(("127.0.0.1", proxy.port)) as server:
            back = threading.Thread(target=_forward, args=(self.request, server), daemon=True)
            back.start()
            while data := server.recv(_PIECE_BYTES):
                proxy.delay(len(data))
                self.request.sendall(data)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
