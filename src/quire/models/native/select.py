"""Selects the decoder of a loaded model: native, or the layers of Transformers."""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from quire.errors import ConfigError, UnknownName
from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import has_products
from quire.kernels.triton.hardware import why_no_rows
from quire.models.adapter import TransformersDecoder
from quire.models.layer_source import LayerSource
from quire.models.native.decoder import NativeDecoder
from quire.models.native.gpu_layers import gpu_refusal, row_shape
from quire.models.native.layers import refusal
from quire.models.packing import codec_refusal

IMPLEMENTATIONS = ("auto", "native", "transformers")
WEIGHT_CODECS = ("auto", "int8", "int4")

_log = logging.getLogger(__name__)


def check_choices(impl: str, codec: str, device: torch.device, *, offloaded: bool) -> None:
    """Refuse choices of `make_decoder` that are not possible for any model."""
    if impl not in IMPLEMENTATIONS:
        raise UnknownName("model_impl", impl, list(IMPLEMENTATIONS))
    if codec not in WEIGHT_CODECS:
        raise UnknownName("weight_codec", codec, list(WEIGHT_CODECS))
    if codec == "auto":
        return
    if device.type != "cpu":
        raise _no_codec(codec, f"products of quantized weights run on a CPU, not on {device.type}")
    if offloaded:
        raise _no_codec(
            codec, "offloaded layers are copied as they are stored; use --weights-memory all"
        )
    reason = _why_no_products()
    if reason is not None:
        raise _no_codec(codec, reason)


def check_model(model: PreTrainedModel, codec: str) -> None:
    """Refuse a model whose weights cannot be quantized; it may be on the meta device."""
    reason = None if codec == "auto" else codec_refusal(model, codec)
    if reason is not None:
        raise _no_codec(codec, f"of {type(model).__name__}, {reason}")


@dataclass(frozen=True, slots=True)
class Implementation:
    """Implementation of a model's layers."""

    name: str
    reason: str  # why this one is selected

    @property
    def text(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_implementation(
    model: PreTrainedModel, weights: LayerSource | None, impl: str, ranks: int = 1
) -> Implementation:
    """Return the implementation that `make_decoder` selects, and log it."""
    if impl == "transformers":
        chosen = Implementation("transformers", "as requested")
    elif (why_not := _why_not_native(model, weights, ranks)) is not None:
        chosen = Implementation("transformers", f"not native: {why_not}")
    else:
        name, unit = type(model).__name__, "CPU" if model.device.type == "cpu" else "GPU"
        chosen = Implementation("native", f"{name} has fused layers for this {unit}")
    _log.info("model implementation: %s", chosen.text)
    return chosen


def make_decoder(
    model: PreTrainedModel, weights: LayerSource | None, *, impl: str, codec: str, ranks: int = 1
) -> TransformersDecoder:
    """Make the decoder of a model.

    Args:
        model: on its final device, in its final dtype.
        weights: prefetches the weights of layers that are not on the device, or None.
        impl: auto, native or transformers.
        codec: of the linear layers' weights: auto (as they are), int8 or int4.
        ranks: number of ranks that share the model; the model is the part of one of them.
    """
    check_choices(impl, codec, model.device, offloaded=weights is not None)
    check_model(model, codec)
    kind = None if codec == "auto" else codec
    reason = None
    if impl != "transformers":  # no kernel runs for a decoder that does not use it
        reason = _why_not_native(model, weights, ranks)
    if impl == "native" and reason is not None:
        raise ConfigError(f"model_impl=native is not possible: {reason}; use model_impl=auto")
    if impl == "transformers" or reason is not None:
        return TransformersDecoder(model, weights, kind, ranks=ranks)
    if model.device.type != "cpu":
        from quire.models.native.gpu_decoder import GpuDecoder  # imports Triton

        return GpuDecoder(model)
    library = load_library()
    assert not isinstance(library, NotLoaded), "checked by _why_not_native"
    return NativeDecoder(model, library, kind)


def _no_codec(codec: str, reason: str) -> ConfigError:
    return ConfigError(f"weight_codec={codec} is not possible: {reason}")


def _why_not_native(model: PreTrainedModel, weights: LayerSource | None, ranks: int) -> str | None:
    if ranks > 1:
        return "ranks sum their results inside of each layer"
    on_cpu = model.device.type == "cpu"
    reason = _why_no_products() if on_cpu else None
    if reason is None and weights is not None:
        reason = "weights are offloaded, and fused layers keep all weights in memory"
    if on_cpu:
        return reason or refusal(model)
    reason = reason or gpu_refusal(model)
    return reason or why_no_rows(model.device, model.dtype, row_shape(model))


def _why_no_products() -> str | None:
    library = load_library()
    if isinstance(library, NotLoaded):
        return library.reason
    return None if has_products(library) else "this CPU has neither AVX2 nor AVX-512"
