"""Chooses which offloaded KV is recomputed or attended to on the CPU; refuses other requests.

requested     possible               impossible
auto          decided by rates       all KV is transferred; logged once at info level
a fraction    this fraction is used  refused, with the reason and an alternative
"""

import logging
from collections.abc import Collection
from dataclasses import replace

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnsoundCombination
from quire.kv.coded_layers import CodedLayers
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.layout import limits
from quire.layout.layout import SLOTS, can_be_offloaded
from quire.layout.limits import Limit
from quire.layout.pages import CacheLayout
from quire.layout.statistics import OfWeights, Statistic
from quire.models.adapter import TransformersDecoder
from quire.models.layer_source import LayerSource
from quire.models.loader import LoadedModel
from quire.offload.kv.cpu_attention import CPUAttention, can_attend_in_parts
from quire.offload.kv.cuda_transfer import StreamTransferWorker
from quire.offload.kv.measured_speeds import measure_offload_speeds
from quire.offload.kv.offload_memory import OffloadMemory, can_recompute, layer_bytes
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.prefix_splits import PrefixSplits, SplitLimits
from quire.offload.kv.row_requests import RowRequests
from quire.offload.recompute.activation_allocator import ActivationAllocator
from quire.offload.recompute.activation_store import ActivationCodec, ActivationStore
from quire.offload.recompute.kv_recompute import KVRecompute
from quire.offload.split import MeasuredRates, activation_gate, pipelined_split
from quire.offload.swap.transfer import ThreadTransferWorker, TransferWorker

logger = logging.getLogger(__name__)

_STORED = 1.1  # stored activations over the split, which moves with the rates
_MIN_FRACTION = 0.02  # smallest fraction of recomputed tokens that gains time


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
            UnsoundCombination: recompute or CPU attention is impossible.
            ConfigError: too few bytes for a page of KV or of activations.
        """
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
        if not self._in_parts:
            return limits.CPU_ATTENTION_OF_PARTS
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
        if not self._in_parts or fraction == 0 or (fraction is None and here):
            return None
        return CPUAttention(memory, store, coded, prefixes, self._in_parts)

    @property
    def _scratch_tokens(self) -> int:
        """Tokens of one layer whose activations fit in scratch memory on the device."""
        return self._config.scratch // self._scratch_token_bytes

    @property
    def _scratch_token_bytes(self) -> int:
        """Bytes of the activations of one token in scratch memory on the device."""
        return SLOTS * self._codec.row_bytes * max(1, len(self.groups))

    def splits(self, *, recomputes: bool, attends: bool) -> PrefixSplits:
        """Create the splits of offloaded prefixes."""
        requested = SplitLimits(
            recomputed=self._config.offload.recompute if recomputes else 0.0,
            max_recomputed=self._scratch_tokens if recomputes else 0,
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
