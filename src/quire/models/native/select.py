"""Selects the decoder of a loaded model: native, or the layers of Transformers."""

import logging

from transformers import PreTrainedModel

from quire.errors import ConfigError, UnknownName
from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import has_products
from quire.models.adapter import TransformersDecoder
from quire.models.layer_source import LayerSource
from quire.models.native.decoder import NativeDecoder
from quire.models.native.layers import refusal

IMPLEMENTATIONS = ("auto", "native", "transformers")
WEIGHT_CODECS = ("auto", "int8", "int4")

_log = logging.getLogger(__name__)


def make_decoder(
    model: PreTrainedModel, weights: LayerSource | None, *, impl: str, codec: str
) -> TransformersDecoder:
    """Make the decoder of a model.

    Args:
        model: on its final device, in its final dtype.
        weights: prefetches the weights of layers that are not on the device, or None.
        impl: auto, native or transformers.
        codec: of the linear layers' weights: auto (as they are), int8 or int4.

    Raises:
        ConfigError: the native decoder was requested, or is needed for the codec, and the model or
            this CPU does not support it; states the reason.
    """
    if impl not in IMPLEMENTATIONS:
        raise UnknownName("model_impl", impl, list(IMPLEMENTATIONS))
    if codec not in WEIGHT_CODECS:
        raise UnknownName("weight_codec", codec, list(WEIGHT_CODECS))
    library = load_library()
    reason = _why_not_native(model, weights)
    if isinstance(library, NotLoaded):
        reason = library.reason
    wants_native = impl == "native" or codec != "auto"
    if codec != "auto" and impl == "transformers":
        raise ConfigError(
            f"weight_codec={codec} needs the native decoder: use model_impl=auto or native"
        )
    if wants_native and reason is not None:
        option = f"weight_codec={codec}" if codec != "auto" else "model_impl=native"
        raise ConfigError(f"{option} is not possible: {reason}")
    if impl == "transformers" or reason is not None or isinstance(library, NotLoaded):
        _log.info("layers of Transformers: %s", reason or "as requested")
        return TransformersDecoder(model, weights)
    return NativeDecoder(model, library, None if codec == "auto" else codec)


def _why_not_native(model: PreTrainedModel, weights: LayerSource | None) -> str | None:
    library = load_library()
    if isinstance(library, NotLoaded):
        return library.reason
    if not has_products(library):
        return "this CPU has neither AVX2 nor AVX-512"
    if weights is not None:
        return "weights are offloaded, and fused layers keep all weights in memory"
    return refusal(model)
