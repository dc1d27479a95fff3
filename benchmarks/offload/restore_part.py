"""Bringing a prefix back: all loaded, all read again, or both at once; by data sheets, and really.

On threads a prefix lies in a tier: on disk, or in a store over TCP. Its back is loaded from there
while real products stand for reading its front, both padded to a preset's ratio.
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.machines import MACHINES, MODELS
from benchmarks.offload_schedule.executor import dispatch
from benchmarks.offload_schedule.restore import plan_restore
from benchmarks.offload_schedule.threads import Pace, ThreadExecutor, expected
from quire.offload.tiers.base import Tier
from quire.offload.tiers.disk import DiskTier
from quire.offload.tiers.host import HostTier
from quire.offload.tiers.network import NetworkTier
from quire.offload.tiers.server import StoreServer
from quire.offload.timeline import DEVICE, IN, Kind, Operation
from quire.plan.offload.restore import Loading, read_seconds, restore_seconds, restore_split
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import PrefillRates
from quire.profile.timing import seconds

_LINKS = (("PCIe 5", 55e9), ("NVMe", 6.9e9), ("100 Gb", 11e9), ("10 Gb", 1.1e9))
_PRESETS = (("disk", 6.9e9), ("10gb", 1.1e9))
_WIDTH, _INNER, _CHUNK = 2048, 512, 128  # numbers of a token on threads; tokens of 1 MiB
_HEADROOM = 2.0


def run_restore(config: OffloadBenchConfig) -> PartResult:
    """The part."""
    claims: Numbers = {}
    rows = [_threads(config, name, rate, claims) for name, rate in _PRESETS]
    return PartResult(
        claims=claims,
        tables=(
            _sheet(),
            Table(
                name="offload-restore-threads",
                caption=(
                    f"{config.restore_tokens:,} tokens from a tier on threads, at the ratios of "
                    f"Llama-3-8B on an H200; medians of {config.repeats}, ms."
                ),
                columns=("tier", "read again", "load all", "read all", "both", "formula"),
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


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix in a tier, and the rates that this machine pretends."""

    tier: Tier
    tokens: int
    prefill: PrefillRates
    loading: Loading
    x: torch.Tensor
    weight: torch.Tensor

    @property
    def token_bytes(self) -> int:
        return 4 * _WIDTH

    def run(self, read_tokens: int) -> float:
        """Seconds of bringing it back with so many tokens read again.

        Raises:
            AssertionError: what came back is not what was stored.
        """
        schedule = plan_restore(
            self.prefill,
            self.loading,
            tokens=self.tokens,
            read_tokens=read_tokens,
            token_bytes=self.token_bytes,
            chunk_tokens=_CHUNK,
        )
        out = torch.full((self.tokens, _WIDTH), float("nan"))

        def read(op: Operation) -> None:
            rows = slice(op.first, op.first + op.tokens)
            torch.mm(self.x[rows], self.weight, out=out[rows])

        def load(op: Operation) -> None:
            target = out[op.first : op.first + op.tokens]
            self.tier.read("prefix", target.numpy().data, op.first * self.token_bytes)

        paces = {DEVICE: Pace(expected), IN: Pace(expected)}
        work = dispatch({Kind.PROJECT: read, Kind.KV_IN: load})
        timeline = ThreadExecutor(paces).run(schedule, work)
        assert torch.allclose(out, self.x @ self.weight, atol=1e-3), "restored KV differs"
        return float(timeline.wall_s or timeline.seconds)


def _threads(
    config: OffloadBenchConfig, name: str, bytes_per_s: float, claims: Numbers
) -> tuple[Cell, ...]:
    with tempfile.TemporaryDirectory() as folder:
        total_bytes = max(2 << 20, 8 * config.restore_tokens * _WIDTH)
        server = None
        if name == "disk":
            tier: Tier = DiskTier(Path(folder), total_bytes)
        else:
            server = StoreServer(HostTier(total_bytes))
            tier = NetworkTier(*server.address)
        try:
            prefix = _prefix(config, tier, bytes_per_s)
            return _measured(config, name, prefix, claims)
        finally:
            tier.close()
            if server is not None:
                server.close()


def _measured(
    config: OffloadBenchConfig, name: str, prefix: _Prefix, claims: Numbers
) -> tuple[Cell, ...]:
    tokens = prefix.tokens
    split = restore_split(prefix.prefill, prefix.loading, tokens, _CHUNK)
    rounds = [[prefix.run(n) for n in (0, tokens, split)] for _ in range(config.repeats + 1)][1:]
    load_s, read_s, both_s = (statistics.median(found) for found in zip(*rounds, strict=True))
    gain = statistics.median(load / both for load, _, both in rounds)
    suffix = "" if name == "disk" else f"_{name}"
    claims[f"restore_gain_vs_load{suffix}"] = gain
    claims[f"restore_over_alone{suffix}"] = statistics.median(
        both / min(load, read) for load, read, both in rounds
    )
    formula_s = restore_seconds(prefix.prefill, prefix.loading, tokens, split)
    return (name, split, *(1e3 * t for t in (load_s, read_s, both_s, formula_s)))


def _prefix(config: OffloadBenchConfig, tier: Tier, bytes_per_s: float) -> _Prefix:
    """At the ratio of loading to reading, and of attention to products, of Llama-3-8B."""
    tokens = config.restore_tokens
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, _INNER, generator=draw)
    weight = torch.randn(_INNER, _WIDTH, generator=draw) / _INNER**0.5
    out = torch.empty(_CHUNK, _WIDTH)
    taken_s = min(seconds(lambda: torch.mm(x[:_CHUNK], weight, out=out)) for _ in range(9))
    spec = MODELS["Llama-3-8B"]
    sheet = assumed_prefill(spec, MACHINES["h200"].flops_per_s)
    token_s = _HEADROOM * taken_s / _CHUNK
    scale = token_s / sheet.token_s
    prefill = PrefillRates(token_s=token_s, square_s=sheet.square_s * scale * 16_384 / tokens)
    loading = Loading(token_s=spec.kv_bytes_per_token(2) / bytes_per_s * scale)
    tier.write("prefix", (x @ weight).numpy().data, {"tokens": tokens})
    return _Prefix(tier, tokens, prefill, loading, x, weight)
