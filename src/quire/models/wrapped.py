"""A user's own model as a decoder: Quire's attention is active only in forwards with a QuireCache.

    model(..., cache=a QuireCache)   -> the cache runs the forward, chunk by chunk
    model(anything else)             -> the model's own forward, unchanged

Only the model's `forward` is wrapped. Attention implementation and rotary frequencies are set for
each chunk and restored after it. When the last cache of a model is closed, the wrapper is removed.

The cache has the name `cache` from Transformers 5.24 on, `past_key_values` before. From 5.24 on, a
forward with the former name prints a FutureWarning. Models outside of Transformers may have either
name in every version, so that the name is read from the forward's signature.
"""

import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.errors import ConfigError, UnsupportedModel
from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.models.base import PagedAttention
from quire.models.bridge import ATTENTION_NAME, BRIDGE_ATTRIBUTE, install, register, uninstall
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.models.observing import Observing, OutputProjections
from quire.models.own_attention import model_inputs, reference_attention
from quire.models.rope import RopeVariants, Rotations
from quire.models.support import refuse_class, refuse_config
from quire.models.verify import compare_with_transformers
from quire.models.weights import weight_bytes

CACHE_ARGUMENTS = ("cache", "past_key_values")
_ATTRIBUTE = "quire_wrapped_model"

Forward = Callable[..., object]


def cache_argument(parameters: Collection[str]) -> str | None:
    """The parameter of a forward that takes the cache; None if it has none."""
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def output_with_cache(logits: object, cache: object) -> CausalLMOutputWithPast:
    """The output of a forward, with the cache under this version's name."""
    name = cache_argument([field.name for field in fields(CausalLMOutputWithPast)])
    arguments: dict[str, Any] = {"logits": logits, str(name): cache}
    return CausalLMOutputWithPast(**arguments)


class ForwardingCache(ABC):
    """A cache that runs the model's forward if it is passed as the forward's cache."""

    @abstractmethod
    def run_forward(
        self, arguments: Mapping[str, object]
    ) -> CausalLMOutputWithPast | tuple[object, ...]: ...


class WrappedModel:
    """A Transformers model behind the `Decoder` seam; it is restored after the last cache.

    Raises:
        UnsupportedModel: the model's output would be wrong; states the reason and an alternative.
        ConfigError: the model is in training mode, on several devices, or belongs to an engine.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse(model)
        self._model = model
        self.spec = ModelSpec.from_config(model.config.to_dict())
        self._rope = RopeVariants(model)
        self._rope.release()
        self._configs = _configs(model)
        self._forward: Forward = model.forward
        self._own_forward = vars(model).get("forward")
        names = tuple(inspect.signature(type(model).forward).parameters)[1:]  # without self
        self._head_takes_rows = "logits_to_keep" in names
        self._lock = threading.RLock()
        self._users = 0
        register()
        self._bridge = install(model)
        self._observing = Observing(model, self._bridge, self.spec, self._probe)
        self._wrapper = _wrapper(self._forward, names)
        vars(model)["forward"] = self._wrapper
        setattr(model, _ATTRIBUTE, self)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def num_rope_variants(self) -> int:
        return self._rope.count

    def rope_variant(self, final_tokens: int) -> int:
        return self._rope.variant(final_tokens)

    def prepare(self, statistic: Statistic) -> str | None:
        return self._observing.prepare(statistic)

    def prepare_pre_rope(self) -> str | None:
        return self._observing.prepare_pre_rope()

    def rotations(self, rope_variant: int = 0) -> Rotations | None:
        return self._observing.rotations(lambda: self._frequencies(rope_variant))

    def output_projections(self) -> OutputProjections | str:
        return self._observing.output_projections

    @contextmanager
    def _frequencies(self, rope_variant: int) -> Iterator[None]:
        with self._lock:
            self._rope.select(rope_variant)
            try:
                yield
            finally:
                self._rope.release()

    def _probe(self, positions: Sequence[int], attention: PagedAttention) -> None:
        """Run the model on one token at each of these positions, without computing logits."""
        places = torch.tensor(positions, device=self.device)
        token = torch.full_like(places, self.spec.vocab_size // 2)
        self.forward(token, places, places[:0], attention)

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        head = {"logits_to_keep": sample_rows} if self._head_takes_rows else {}
        at_positions = self._bridge.at_positions(positions)
        with self._using(ATTENTION_NAME, attention, rope_variant), at_positions:
            logits = self._run(**model_inputs(self._model, token_ids, positions), **head)
        return logits if self._head_takes_rows else logits[sample_rows]

    def reference_logits(
        self, token_ids: Int[Tensor, " num_tokens"]
    ) -> Float[Tensor, "num_tokens vocab"]:
        with self._using(reference_attention(type(self._model)), None, 0):
            return self._run(input_ids=token_ids[None])

    def _run(self, **options: object) -> Tensor:
        output = self._forward(use_cache=False, return_dict=True, **options)
        logits: Tensor = output.logits[0]  # type: ignore[attr-defined]
        return logits

    @contextmanager
    def _using(
        self, implementation: str, attention: PagedAttention | None, variant: int
    ) -> Iterator[None]:
        bridged = self._bridge.attending(attention)
        with self._frequencies(variant), torch.no_grad(), bridged:
            found = [config._attn_implementation for config in self._configs]
            try:
                for config in self._configs:
                    config._attn_implementation = implementation
                yield
            finally:
                for config, own in zip(self._configs, found, strict=True):
                    config._attn_implementation = own

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Release one cache's use of the model; the last release restores the model."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._restore()

    def _restore(self) -> None:
        self._observing.close()
        uninstall(self._model)
        delattr(self._model, _ATTRIBUTE)
        if vars(self._model).get("forward") is not self._wrapper:
            return  # wrapped again by other code; Quire's wrapper then only forwards calls
        del vars(self._model)["forward"]
        if self._own_forward is not None:
            vars(self._model)["forward"] = self._own_forward


def wrap_model(model: PreTrainedModel, *, verify: bool) -> WrappedModel:
    """Return the model's decoder: the existing one of other caches, or a new one."""
    found: WrappedModel | None = getattr(model, _ATTRIBUTE, None)
    if found is not None:
        found.enter()
        return found
    wrapped = WrappedModel(model)
    wrapped.enter()
    try:
        if verify:
            compare_with_transformers(wrapped)
    except BaseException:
        wrapped.leave()
        raise
    return wrapped


def loaded_model(
    model: PreTrainedModel, decoder: WrappedModel, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedModel:
    """A user's model as the model of an engine."""
    end = getattr(model.generation_config, "eos_token_id", None)
    ids = tuple(end) if isinstance(end, list | tuple) else () if end is None else (end,)
    return LoadedModel(
        decoder=decoder,
        tokenizer=tokenizer,
        generation=GenerationDefaults(eos_token_ids=ids),
        spec=decoder.spec,
        name=model.name_or_path or type(model).__name__,
        weight_bytes=weight_bytes(model),
        folder=folder_of(model),
    )


def folder_of(model: PreTrainedModel) -> Path | None:
    """The folder that a model was loaded from; None if it was not loaded from a folder."""
    folder = Path(model.name_or_path or "") if model.name_or_path else None
    return folder if folder is not None and folder.is_dir() else None


def _refuse(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"expected a causal language model of Transformers, got {type(model).__name__}"
        )
    refuse_config(model.config)
    refuse_class(type(model))
    if cache_argument(inspect.signature(type(model).forward).parameters) is None:
        raise UnsupportedModel(
            f"{type(model).__name__} takes no cache: generate computes all tokens in every step; "
            "use quire.LLM"
        )
    if any(hasattr(module, BRIDGE_ATTRIBUTE) for module in model.modules()):
        raise ConfigError("this model belongs to a Quire engine; load another one")
    if model.training:
        raise ConfigError("this model is in training mode: call model.eval() first")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedModel(
            f"expected a model on one device, got one on {', '.join(sorted(devices))}; move it to "
            "one device"
        )


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """The configs from which modules read their attention implementation, without duplicates."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    return list(configs.values())


def _wrapper(forward: Forward, names: tuple[str, ...]) -> Forward:
    """Wrap a forward: calls with a QuireCache are run by the cache."""

    @functools.wraps(forward)
    def wrapped_forward(*arguments: object, **options: object) -> object:
        by_name = {**dict(zip(names, arguments, strict=False)), **options}
        for name in CACHE_ARGUMENTS:
            cache = by_name.get(name)
            if isinstance(cache, ForwardingCache):
                del by_name[name]
                return cache.run_forward(by_name)
        return forward(*arguments, **options)

    return wrapped_forward
