"""Load and check a model from a name or a folder.

Checks run in order of cost: names, config, the table of refusals, the headers of the weight files,
then weights, then the comparison with Transformers. `checkpoint` opens the files.

The decoder is native, or consists of the layers of Transformers.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quire.errors import ConfigError, RequestError, UnknownName, UnsupportedModel
from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import has_products
from quire.kernels.triton.hardware import why_no_rows
from quire.layout import limits
from quire.layout.model import ModelSpec
from quire.layout.options import require_type
from quire.layout.packaged import NAMES
from quire.models.adapter import TransformersDecoder
from quire.models.base import Decoder
from quire.models.checkpoint import open_checkpoint
from quire.models.foreign import foreign_code, held_warnings
from quire.models.generation import GenerationDefaults
from quire.models.layer_source import LayerPlacer, LayerSource
from quire.models.native.decoder import NativeDecoder
from quire.models.native.layers import gpu_refusal, refusal, row_shape
from quire.models.packing import codec_refusal
from quire.models.sharding import refuse_unshardable, shard
from quire.models.source import GGUF
from quire.models.stored import refuse_codec
from quire.models.verify import compare_with_transformers, stored_logits
from quire.models.weights import check_finite, weight_bytes
from quire.parallel.group import ONE_RANK, TensorGroup
from quire.plan.weights import WeightsPlacement

IMPLEMENTATIONS = ("auto", "native", "transformers")
WEIGHT_CODECS = ("auto", "int8", "int4")

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run."""

    decoder: Decoder
    # None if the folder has none; then prompts are token ids
    tokenizer: PreTrainedTokenizerBase | None
    generation: GenerationDefaults
    spec: ModelSpec  # its shape; with several ranks, the shape of this rank's part
    name: str  # the folder's name or the hub's
    weight_bytes: int  # parameters and buffers, on the decoder's device
    folder: Path | None = None  # None if the model was built in memory
    weights: LayerSource | None = None  # prefetches offloaded layers; None if no layer is offloaded
    place: WeightsPlacement | None = None  # None if no weight memory limit was set
    weight_codec: str = "auto"  # of linear layers: int8 or int4; "auto": none
    implementation: Implementation | None = None  # None if the model was built in memory
    group: TensorGroup = ONE_RANK
    draft: "LoadedModel | None" = None  # its draft model, which `decoder` runs too

    @property
    def argument(self) -> str:
        """The argument MODEL of commands for this model."""
        if self.folder is None or self.name in NAMES:
            return self.name if self.folder else "MODEL"
        file = self.folder / f"{self.name}{GGUF}"
        return str(file if file.is_file() else self.folder)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            RequestError: the model has none.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"{self.name} has no tokenizer: add tokenizer.json to its folder, "
                "or give prompts as token ids"
            )
        return self.tokenizer

    def with_max_model_len(self, tokens: int) -> "LoadedModel":
        """Return the model with a shorter context; weights are shared."""
        require_type("max_model_len", tokens, int)
        context = self.spec.max_positions
        if not 1 <= tokens <= context:
            raise ConfigError(
                f"expected max_model_len (--max-model-len) from 1 to {context}, the context of "
                f"{self.name}, got {tokens}"
            )
        return replace(self, spec=replace(self.spec, max_positions=tokens))


@held_warnings()
def load_model(  # noqa: PLR0913 - one parameter per option
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    verify: bool = True,
    placer: LayerPlacer | None = None,
    model_impl: str = "auto",
    weight_codec: str = "auto",
    group: TensorGroup = ONE_RANK,
) -> LoadedModel:
    """Load a causal language model in Hugging Face format.

    Args:
        path: "quire-tiny" (inside the package), a local folder, a name on the hub, or a GGUF file.
        dtype: auto (as stored), float32, bfloat16 or float16.
        device: auto (CUDA if available, else the CPU), or a device of torch.
        trust_remote_code: run Python code from the model folder.
        verify: check that weights are finite, and compare a short prompt with Transformers' own
            attention (one more forward).
        placer: offloads the layers beyond a limit of device memory; they are prefetched in every
            pass (see `quire.offload.weights.placement.place_beyond`). None: all layers are on the
            device.
        model_impl: native (fused layers in C on a CPU, in Triton on a GPU), transformers (the
            layers of Transformers), or auto: native if architecture and device support it.
        weight_codec: auto (as loaded), or int8 or int4: quantize the linear layers at load.
        group: the ranks that share the model; each loads its part. All of them call this function
            with the same arguments.

    Raises:
        ConfigError: a wrong dtype or device, a model with Python code without
            `trust_remote_code`, or a memory for weights that is too small.
        ModelError: the folder is missing, incomplete or damaged.
        UnsupportedModel: the model's output would be wrong; states the reason and an alternative.
    """
    wanted_dtype = _dtype(dtype)
    target = _device(device)
    check_choices(model_impl, weight_codec, target, offloaded=placer is not None)
    _refuse_ranks(group, model_impl, offloaded=placer is not None)
    checkpoint = open_checkpoint(path, trust_remote_code=trust_remote_code)
    checkpoint.check()
    if weight_codec != "auto":
        refuse_codec(checkpoint.config, weight_codec)
        check_model(checkpoint.model_without_memory(), weight_codec)
    if group.size > 1:
        whole = ModelSpec.from_config(checkpoint.config.to_dict())
        refuse_unshardable(checkpoint.model_without_memory(), whole, group.size)
    tokenizer = checkpoint.load_tokenizer()
    if placer is not None:
        placer.check(checkpoint.config, dtype=wanted_dtype, trust_remote_code=trust_remote_code)
    model, name = checkpoint.read_model(wanted_dtype), checkpoint.name
    _refuse_stored_dtype(model.dtype, name)
    weights, place = None, None
    if group.size > 1:
        shard(model, ModelSpec.from_config(model.config.to_dict()), group)
        group.meet()
    if placer is None:
        nn.Module.to(model, target)
    if verify:
        check_finite(model)
    if placer is not None:
        place, weights = placer.place(model, target)
    with foreign_code(f"{name} cannot run with its config.json"):
        implementation = choose_implementation(model, weights, model_impl, group.size)
        stored = None
        if verify and weight_codec != "auto" and group.size == 1:
            stored = stored_logits(model, ModelSpec.from_config(model.config.to_dict()))
        decoder = make_decoder(
            model, weights, impl=model_impl, codec=weight_codec, ranks=group.size
        )
        if verify:
            compare_with_transformers(decoder, stored, codec=weight_codec)
    return LoadedModel(
        decoder=decoder,
        tokenizer=tokenizer,
        generation=checkpoint.generation.with_end_token(tokenizer, decoder.spec.vocab_size),
        spec=decoder.spec,
        name=name,
        weight_bytes=weight_bytes(model) if weights is None else weights.place.device_bytes,
        folder=checkpoint.folder,
        weights=weights,
        place=place,
        weight_codec=weight_codec,
        implementation=implementation,
        group=group,
    )


def _refuse_ranks(group: TensorGroup, model_impl: str, *, offloaded: bool) -> None:
    if group.size == 1:
        return
    if model_impl == "native":
        raise limits.refused(limits.NATIVE_ON_RANKS, ranks=group.size)
    if offloaded:
        raise limits.refused(limits.WEIGHTS_ON_RANKS)


def _refuse_stored_dtype(dtype: torch.dtype, name: str) -> None:
    if dtype not in _DTYPES.values():
        stored = str(dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"the weights of {name} are stored in {stored}; load it with dtype=float32, bfloat16 "
            "or float16"
        )


def _dtype(name: str) -> torch.dtype | None:
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise UnknownName("dtype", name, ["auto", *_DTYPES])
    return _DTYPES[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a device: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch found no CUDA device; use auto or cpu")
    return device
