"""Builds the parts of an engine's KV offload: host pool, activation store, splits, transfers.

`OffloadChoice` chooses which offloaded KV is recomputed or attended to on the CPU, and refuses
other requests:

requested     possible               impossible
auto          decided by rates       all KV is transferred; logged once at info level
a fraction    this fraction is used  refused, with the reason and an alternative

Rates of transfer, KV recompute and CPU attention are measured when an engine starts. They are a
prior only: `MeasuredRates` learns the times of concurrent operations from steps.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnsoundCombination
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_partial
from quire.kv.coded_layers import CodedLayers
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.layout import limits
from quire.layout.eviction import PRESSURE
from quire.layout.layout import SLOTS, can_be_offloaded, classes_with_bounds
from quire.layout.limits import Limit
from quire.layout.pages import PAGE_ALIGNMENT_BYTES, CacheLayout, LaneGroup
from quire.layout.statistics import OfWeights, Statistic
from quire.models.adapter import TransformersDecoder
from quire.models.base import Decoder
from quire.models.layer_source import LayerSource
from quire.models.loader import LoadedModel
from quire.offload.host_side import host_pool
from quire.offload.kv.cpu_attention import CPUAttention, can_attend_in_parts
from quire.offload.kv.cuda_transfer import StreamTransferWorker
from quire.offload.kv.hot_pages import OffloadedBounds
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.offloader import RowRequests
from quire.offload.kv.prefix_splits import PrefixSplits, SplitLimits
from quire.offload.kv.step_offload import KVOffload
from quire.offload.recompute.activation_allocator import ActivationAllocator
from quire.offload.recompute.activation_store import ActivationCodec, ActivationStore
from quire.offload.recompute.kv_recompute import KVRecompute
from quire.offload.split import COPY, MeasuredRates, activation_gate, pipelined_split
from quire.offload.step_log import HOST_ATTEND, PROJECT
from quire.offload.swap.transfer import ThreadTransferWorker, TransferWorker
from quire.plan.fitting import fit_seconds
from quire.scheduler.request import Request

logger = logging.getLogger(__name__)

_COPY_BYTES = (1 << 18, 1 << 20, 1 << 22)
_TOKENS = (16, 64, 256)
_TIMES = 3
_BLOCK_BYTES = 256 << 10  # contiguous activations of a layer
_MIN_BLOCKS = 64
_STORED = 1.1  # stored activations over the split, which moves with the rates
_MIN_FRACTION = 0.02  # smallest fraction of recomputed tokens that gains time

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
    return found | {HOST_ATTEND: _fit(_TOKENS, lambda tokens: _attend(decoder, layer, tokens))}


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


def _attend(decoder: Decoder, layer: int, tokens: int) -> Run:
    heads, dtype = decoder.spec.heads[layer], decoder.dtype
    query = torch.zeros(1, heads.query_heads, 1, heads.query_dim, dtype=dtype)
    key = torch.zeros(1, heads.kv_heads, tokens, heads.query_dim, dtype=dtype)
    value = torch.zeros(1, heads.kv_heads, tokens, heads.value_dim, dtype=dtype)
    return lambda: attend_partial(query, key, value, math=AttentionMath(1.0), seen=None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True, slots=True)
class OffloadMemory:
    """Sizes of the KV and the activations that share the offload memory.

    Attributes:
        groups: lane groups that can be offloaded.
        page_tokens: tokens of a page.
        row_bytes: bytes of a token's activations in one layer.
        num_layers: layers with activations.
    """

    groups: Sequence[LaneGroup]
    page_tokens: int
    row_bytes: int
    num_layers: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's activations in all layers."""
        return self.row_bytes * self.num_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of KV in every lane."""
        return sum(g.num_lanes * g.page_class.page_bytes for g in self.groups)

    def activation_bytes(self, fraction: float, total_bytes: int) -> int:
        """Bytes for activations, such that they and the KV run out together.

        Args:
            fraction: fraction (0 to 1) of the tokens with stored activations.
            total_bytes: size of offload memory.
        """
        return int(total_bytes * self._share(fraction))

    def min_bytes(self, fraction: float) -> int:
        """Smallest offload memory that holds a page of every lane, and of activations if any.

        Args:
            fraction: fraction (0 to 1) of the tokens with stored activations.
        """
        if not fraction:
            return self.page_bytes
        share, activation_bytes = self._share(fraction), self.page_tokens * self.token_bytes
        min_bytes = max(ceil(self.page_bytes / (1 - share)), ceil(activation_bytes / share))
        min_bytes = -(-min_bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
        while self.activation_bytes(fraction, min_bytes) < activation_bytes:  # rounding
            min_bytes += PAGE_ALIGNMENT_BYTES
        return min_bytes

    def allocator(self, activation_bytes: int) -> ActivationAllocator | None:
        """Create the allocator of activation blocks; None if not one block fits."""
        page, tokens = self.page_tokens, activation_bytes // max(1, self.token_bytes)
        wanted = min(_BLOCK_BYTES // self.row_bytes, tokens // _MIN_BLOCKS)
        block = max(page, wanted // page * page)
        return ActivationAllocator(tokens // block, block, page) if tokens >= block else None

    def _share(self, fraction: float) -> float:
        """Fraction of offload memory for activations."""
        kv_bytes = sum(layer_bytes(g) * len(g.layers) for g in self.groups)
        return fraction * self.token_bytes / (fraction * self.token_bytes + kv_bytes)


def layer_bytes(group: LaneGroup) -> int:
    """Bytes of a token's KV in one layer of a group."""
    return group.page_class.slot_bytes * group.lanes_per_layer


def can_recompute(group: LaneGroup) -> bool:
    """Whether single slots of a group can be recomputed with identical contents."""
    page_class = group.page_class
    return group.lanes_per_layer == 1 and not page_class.per_page and page_class.rotated


class OffloadChoice:
    """Decides which fraction of offloaded prefixes may be recomputed or attended to on the CPU.

    Args:
        model: computes and recomputes.
        config: the user's options.
        layout: layout of the KV memory.

    Attributes:
        memory: division of offload memory over KV and activations.
    """

    def __init__(self, model: LoadedModel, config: KVConfig, layout: CacheLayout) -> None:
        self._model, self._config, self.layout = model, config, layout
        self._staged = [g for g in layout.groups if can_be_offloaded(g)]
        of = {group.of for group in layout.groups if group.full_precision is not None}
        alone = [g for g in self._staged if g.name not in of]
        self.groups = [g for g in alone if can_recompute(g)]
        self._in_parts = [g.name for g in alone if can_attend_in_parts(g)]
        self._layers = sorted(layer for g in self.groups for layer in g.layers if layer)
        self._kv_bytes = max(map(layer_bytes, self._staged))
        self._codec = ActivationCodec(
            config.offload.activation_codec, model.spec.hidden_size, model.decoder.dtype
        )
        self.memory = OffloadMemory(
            self._staged, config.page_tokens, self._codec.row_bytes, len(self._layers)
        )
        self._measured: MeasuredRates | None = None
        self._recomputes = False

    @property
    def weights(self) -> LayerSource | None:
        """Offloaded weights of the model; None if all weights are on the device."""
        return self._model.weights

    # ---- refusals ------------------------------------------------------------------------------

    def refuse_without_effect(self, stream_bytes: int, statistics: Collection[Statistic]) -> None:
        """Refuse options that were set explicitly but would have no effect, before allocation.

        Args:
            stream_bytes: size of offload memory.
            statistics: attention statistics that the default eviction rule needs.

        Raises:
            UnsoundCombination: no request would be offloaded, or recompute or CPU attention is
                impossible.
            ConfigError: too few bytes for a page of KV or of activations.
        """
        promotes = any(group.promoted is not None for group in self.layout.groups)
        rule = self._config.evict
        # under pressure, sequences of a group are offloaded: they do not evict
        if promotes and rule != "full" and f"when={PRESSURE}" not in rule:
            raise limits.refused(limits.OFFLOAD_OF_PROMOTED)
        self._refuse_recompute()
        self._refuse_too_small(stream_bytes)
        self._refuse_activation_codec()
        fraction, obstacle = self._config.offload.cpu_attention, self._no_host_attention(statistics)
        if fraction and obstacle is not None:
            raise UnsoundCombination(
                f"--kv-offload-cpu-attention {fraction:g} cannot attend to any KV on the CPU: "
                f"{obstacle.reason}; {obstacle.instead}, or use --kv-offload-cpu-attention auto "
                "or off"
            )

    def _refuse_too_small(self, stream_bytes: int) -> None:
        fraction = self._config.offload.recompute or 0.0
        min_bytes = self.memory.min_bytes(fraction)
        if stream_bytes >= min_bytes:
            return
        holds = "a page of every lane"
        if fraction:
            holds += f" and, for --kv-offload-recompute {fraction:g}, a page of activations"
        raise ConfigError(
            f"expected --kv-offload-memory of {min_bytes:,} B or more ({holds}), got "
            f"{stream_bytes:,} B: raise it or leave it out"
        )

    def _refuse_recompute(self) -> None:
        fraction = self._config.offload.recompute
        if not fraction:
            return
        obstacle = self._no_recompute()
        if obstacle is not None:
            raise UnsoundCombination(
                f"--kv-offload-recompute {fraction:g} cannot recompute any KV: {obstacle.reason}; "
                f"{obstacle.instead}, or use --kv-offload-recompute auto or off"
            )
        min_bytes = self._config.page_tokens * self._scratch_token_bytes
        if self._config.scratch < min_bytes:
            raise ConfigError(
                f"--kv-offload-recompute {fraction:g} cannot recompute any KV: expected --scratch "
                f"of {min_bytes:,} B or more (a page of activations), got "
                f"{self._config.scratch:,} B; raise --scratch"
            )

    def _refuse_activation_codec(self) -> None:
        codec, fraction = self._config.offload.activation_codec, self._config.offload.recompute
        if codec is None:
            return
        obstacle = self._no_recompute() if fraction is None else None
        if fraction == 0 or obstacle is not None:
            reason = "--kv-offload-recompute is off" if obstacle is None else obstacle.reason
            raise UnsoundCombination(
                f"--kv-offload-activation-codec {codec.name} stores activations that KV is "
                "recomputed from, and "
                f"none is: {reason}; leave out --kv-offload-activation-codec"
            )

    def _no_recompute(self) -> Limit | None:
        return self._no_recompute_here() or self._no_recompute_by_model()

    def _no_recompute_here(self) -> Limit | None:
        """Why KV of this layout cannot be recomputed."""
        if any(group.lanes_per_layer > 1 for group in self._staged):
            return limits.RECOMPUTE_OF_HEADS
        return None if self.groups else limits.RECOMPUTE_OF_PAGES

    def _no_recompute_by_model(self) -> Limit | None:
        """Why this model cannot recompute KV; prepares the model if it can."""
        decoder, limit = self._model.decoder, limits.RECOMPUTE_BY_MODEL
        if not isinstance(decoder, TransformersDecoder):
            return replace(limit, reason="this decoder cannot recompute KV")
        why = decoder.prepare_recomputation()
        return None if why is None else replace(limit, reason=why)

    def _no_host_attention(self, statistics: Collection[Statistic]) -> Limit | None:
        if not self._in_parts and any(group.topk is not None for group in self._staged):
            return limits.CPU_ATTENTION_WITH_INDEX
        if not self._in_parts:
            return limits.CPU_ATTENTION_OF_PARTS
        if classes_with_bounds(self.layout):
            return limits.CPU_ATTENTION_WITH_SPARSE
        if any(isinstance(statistic, OfWeights) for statistic in statistics):
            return limits.CPU_ATTENTION_WITH_WEIGHTS
        return None

    # ---- choices -------------------------------------------------------------------------------

    def fraction_and_reason(self) -> tuple[float, str]:
        """Fraction (0 to 1) of a sequence's tokens with stored activations, and the reason."""
        requested = self._config.offload.recompute
        if requested == 0:
            return 0.0, "KV alone is transferred: --kv-offload-recompute off"
        gate = activation_gate(
            self._model.spec,
            kv_value_bytes=self._kv_bytes / self._model.spec.kv_values_per_layer_token,
            x_value_bytes=self._codec.row_bytes / self._codec.hidden,
        )
        obstacle = self._no_recompute_here()
        if obstacle is None and requested is None and not gate.pays:
            return 0.0, gate.reason
        obstacle = obstacle or self._no_recompute_by_model()
        if obstacle is not None:
            return 0.0, f"KV alone is transferred: {obstacle.reason}"
        self._recomputes = True
        if requested is not None:
            return requested, f"{requested:.2g} of it is recomputed from activations, as requested"
        rates = self._rates().layer(tokens=0)
        tokens = self._model.spec.max_positions
        fraction = min(1.0, _STORED * pipelined_split(rates, tokens) / tokens)
        speed = f"recomputing KV takes {rates.recompute_ratio:.2g}x the time of its transfer"
        if fraction < _MIN_FRACTION:
            return 0.0, f"{speed}: KV alone is transferred"
        return fraction, f"{gate.reason}; {speed}: at most {fraction:.2g} of it is recomputed"

    def log_fallbacks(self, why: str, *, recomputes: bool, attends: bool) -> None:
        """Log once what `auto` does not use.

        Args:
            why: reason from `fraction_and_reason`.
            recomputes: whether the engine recomputes any KV.
            attends: whether it attends on the CPU.
        """
        if self._config.offload.recompute is None and not recomputes:
            logger.info("--kv-offload-recompute auto recomputes no KV: %s", why)
        if self._config.offload.cpu_attention is None and not attends:
            obstacle = self._no_host_attention(())
            reason = "the device is the CPU" if obstacle is None else obstacle.reason
            logger.info("--kv-offload-cpu-attention auto attends on the device alone: %s", reason)

    def kv_recompute(self, allocator: ActivationAllocator, rows: RowRequests) -> KVRecompute:
        """Create the recompute of keys and values."""
        decoder = self._model.decoder
        assert isinstance(decoder, TransformersDecoder), "checked by fraction_and_reason"
        inputs = ActivationStore(allocator, self._layers, self._codec, decoder.device)
        groups = [group.name for group in self.groups]
        return KVRecompute(decoder, inputs, rows, decoder.device, groups=groups)

    def attention(
        self, memory: KVMemory, store: PageStore, coded: CodedLayers, prefixes: OffloadedPrefixes
    ) -> CPUAttention | None:
        """Create the CPU attention; None if it is off, impossible, or the device is the CPU."""
        fraction = self._config.offload.cpu_attention
        here = self._model.decoder.device.type == "cpu"
        off = fraction == 0 or (fraction is None and here) or bool(classes_with_bounds(self.layout))
        if not self._in_parts or off:
            return None
        return CPUAttention(memory, store, coded, prefixes, self._in_parts)

    @property
    def _scratch_token_bytes(self) -> int:
        """Bytes of the activations of one token in scratch memory on the device."""
        return SLOTS * self._codec.row_bytes * max(1, len(self.groups))

    def splits(self, *, recomputes: bool, attends: bool) -> PrefixSplits:
        """Create the splits of offloaded prefixes."""
        requested = SplitLimits(
            recomputed=self._config.offload.recompute if recomputes else 0.0,
            max_recomputed=self._config.scratch // self._scratch_token_bytes if recomputes else 0,
            host=self._config.offload.cpu_attention if attends else 0.0,
        )
        return PrefixSplits(
            self._rates(),
            page_tokens=self._config.page_tokens,
            num_layers=sum(len(group.layers) for group in self._staged),
            requested=requested,
        )

    def transfer_worker(self) -> TransferWorker:
        """Create the worker that runs the copies."""
        device = self._model.decoder.device
        return StreamTransferWorker(device) if device.type == "cuda" else ThreadTransferWorker()

    def _rates(self) -> MeasuredRates:
        if self._measured is None:
            model, layer = self._model, self._staged[0].layers[-1]
            self._measured = MeasuredRates(
                measure_offload_speeds(model.decoder, layer, recomputes=self._recomputes),
                kv_bytes=self._kv_bytes,
                x_bytes=self._codec.row_bytes,
                weight_bytes=0 if model.weights is None else model.weights.place.mean_layer_bytes,
            )
        return self._measured


@dataclass(frozen=True, slots=True)
class KVOffloadComponents:
    """The parts of an engine's KV offload.

    Attributes:
        prefixes: offloaded prefixes of all sequences.
        kv_offload: creates the offload of each step.
        splits: divides offloaded prefixes; None if all KV is transferred.
        why: reason that KV is or is not recomputed, for messages.
        offload_bytes: size of offload memory, for KV and activations.
    """

    prefixes: OffloadedPrefixes
    kv_offload: KVOffload
    splits: PrefixSplits | None
    why: str
    offload_bytes: int

    def totals(self) -> dict[str, int]:
        """Bytes offloaded and tokens not transferred so far, under the names of `EngineStats`."""
        kv_recompute, attention = self.kv_offload.kv_recompute, self.kv_offload.attention
        hot = self.kv_offload.hot_reads
        return {
            "offloaded_bytes": self.prefixes.pool.used_bytes,
            "activation_bytes": 0 if kv_recompute is None else kv_recompute.store.used_bytes,
            "recomputed_tokens": 0 if kv_recompute is None else kv_recompute.num_recomputed,
            "cpu_attended_tokens": 0 if attention is None else attention.num_attended,
            "sparse_pages_fetched": hot.fetched,
            "sparse_page_hits": hot.hits,
        }

    def check(self) -> None:
        """Check that every byte of offload memory is free or has one owner.

        Raises:
            InvariantError: a byte has no owner or several.
        """
        self.prefixes.pool.check()
        if self.kv_offload.kv_recompute is not None:
            self.kv_offload.kv_recompute.store.allocator.check()


def build_kv_offload(
    choice: OffloadChoice,
    memory: KVMemory,
    store: PageStore,
    coded: CodedLayers,
    stream_bytes: int,
    running: Sequence[Request],
) -> KVOffloadComponents:
    """Divide offload memory over KV and activations, by measured rates or the user's fractions.

    Args:
        choice: which offloaded KV is recomputed or attended to on the CPU.
        memory: block tables and pools of the KV memory.
        store: bytes of the KV memory.
        coded: encodes and decodes pages.
        stream_bytes: size of offload memory.
        running: requests that hold KV; the scheduler's own list.
    """
    fraction, why = choice.fraction_and_reason()
    allocator = choice.memory.allocator(choice.memory.activation_bytes(fraction, stream_bytes))
    activation_bytes = (
        0
        if allocator is None
        else allocator.num_blocks * allocator.block_tokens * choice.memory.token_bytes
    )
    pool = host_pool(store, choice.layout, stream_bytes - activation_bytes)
    bounds = None
    if classes_with_bounds(choice.layout):
        bounds = OffloadedBounds(store, choice.layout, pool.total_bytes)
    prefixes = OffloadedPrefixes(
        memory,
        pool,
        store.page_positions,
        allocator,
        save_bounds=None if bounds is None else bounds.save,
    )
    kv_recompute = None
    if allocator is not None:
        rows = RowRequests(fraction, running, memory)
        kv_recompute = choice.kv_recompute(allocator, rows)
    attention = choice.attention(memory, store, coded, prefixes)
    splits = None
    if kv_recompute is not None or attention is not None:
        splits = choice.splits(recomputes=kv_recompute is not None, attends=attention is not None)
    choice.log_fallbacks(why, recomputes=kv_recompute is not None, attends=attention is not None)
    kv_offload = KVOffload(
        memory,
        prefixes,
        choice.transfer_worker(),
        splits=splits,
        kv_recompute=kv_recompute,
        attention=attention,
        weights=choice.weights,
        bounds=bounds,
    )
    return KVOffloadComponents(prefixes, kv_offload, splits, why, stream_bytes)
