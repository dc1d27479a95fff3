"""The attention function that Transformers calls, and its connection to the engine.

Quire registers one function under the name "quire". There is no global context: every layer's
attention module has a `Bridge`, set when its model was loaded. The decoder sets the attention of
the current forward on that bridge. Two models in one process share no state.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from quire.errors import InvariantError, UnsupportedModel
from quire.kernels.backend import TokenIndex
from quire.kernels.latent import LatentHeads, TiedHeads
from quire.models.base import AttentionCall, PagedAttention
from quire.models.own_attention import (
    latent_heads,
    number_layers,
    replace_attention,
    replace_recurrent,
    restore_attention,
    restore_recurrent,
    tied_heads,
)
from quire.models.rotary import Rotary

ATTENTION_NAME = "quire"
BRIDGE_ATTRIBUTE = "quire_bridge"

# Options that have no effect on a causal layer without a cache. Options that begin with "output_"
# are ignored as well.
_HARMLESS_OPTIONS = frozenset(
    {
        "cache_position",
        "dropout",
        "logits_to_keep",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_KNOWN_OPTIONS = _HARMLESS_OPTIONS | frozenset(
    {"alibi", "indices", "is_causal", "s_aux", "sliding_window", "softcap"}
)


class Bridge:
    """Provides the attention of the forward in progress to the modules of one model."""

    __slots__ = ("_thread", "attention", "hooks", "latents", "rotaries")

    def __init__(self) -> None:
        self.attention: PagedAttention | None = None
        self.rotaries: Mapping[int, Rotary] = {}
        self.latents: Mapping[int, LatentHeads | TiedHeads] = {}  # by layer
        self.hooks: list[RemovableHandle] = []  # of modules that have this bridge
        self._thread = threading.local()  # forwards that run layer by layer have a thread each

    @contextmanager
    def at_positions(self, positions: Int[Tensor, " num_tokens"]) -> Iterator[None]:
        """Provide the positions of a forward's tokens to layers that read a cache's length."""
        self._thread.cache = CachedTokens(positions)
        try:
            yield
        finally:
            self._thread.cache = None

    @property
    def cached_tokens(self) -> "CachedTokens | None":
        """The lengths of the sequences in the forward of this thread; None outside of one."""
        return getattr(self._thread, "cache", None)

    @contextmanager
    def attending(self, attention: PagedAttention | None) -> Iterator[None]:
        before, self.attention = self.attention, attention
        try:
            yield
        finally:
            self.attention = before

    def switch(self, attention: PagedAttention) -> None:
        """Replace the attention for the layers that follow, within `attending`."""
        self.attention = attention

    def set_rotaries(self, rotaries: Mapping[int, Rotary]) -> None:
        self.rotaries = rotaries


class CachedTokens:
    """What a layer may ask a cache: how many tokens were processed before the current ones.

    A layer computes the positions of its tokens as `torch.arange(num_tokens)` plus this number. In
    a flat batch each token has its own number, such that the sum is the token's position.
    """

    def __init__(self, positions: Int[Tensor, " num_tokens"]) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Int[Tensor, " num_tokens"]:
        del layer_idx
        return self._before

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: attention reads the earlier ones from pages."""
        del args, kwargs
        return key_states, value_states


def register() -> None:
    """Register the attention "quire" with Transformers; idempotent.

    No function for masks is registered: Transformers then makes none. With one, it would first
    search the positions for packed sequences, for which the CPU waits for the device.
    """
    AttentionInterface.register(ATTENTION_NAME, attend_through_bridge)


def install(model: nn.Module) -> Bridge:
    """Set one new bridge on every module that has a `layer_idx`, and return the bridge.

    Modules that compute attention themselves call it from then on; see `own_attention`.
    """
    bridge = Bridge()
    number_layers(model)
    for module in model.modules():
        if hasattr(module, BRIDGE_ATTRIBUTE):
            raise InvariantError("expected a model without a decoder, got one that has a decoder")
        if hasattr(module, "layer_idx"):
            setattr(module, BRIDGE_ATTRIBUTE, bridge)
            if reads_cache_length(module):
                hook = partial(_with_length, bridge)
                bridge.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    bridge.latents = {**latent_heads(model), **tied_heads(model)}
    replace_attention(model, attend_through_bridge, lambda: bridge.attention is not None)
    replace_recurrent(model, lambda: bridge.attention)
    return bridge


def reads_cache_length(module: nn.Module) -> bool:
    """Whether a layer's attention computes positions from the length of the cache (Llama 4)."""
    forward = inspect.unwrap(type(module).forward)
    return "Attention" in type(module).__name__ and "get_seq_length" in forward.__code__.co_names


def _with_length(
    bridge: Bridge, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the missing cache of a layer; see `CachedTokens`."""
    cache = None if bridge.attention is None else bridge.cached_tokens
    return None if cache is None else (args, {**kwargs, "cache": cache})


def uninstall(model: nn.Module) -> None:
    """Remove the bridge from every module."""
    restore_attention(model)
    restore_recurrent(model)
    for module in model.modules():
        bridge = vars(module).pop(BRIDGE_ATTRIBUTE, None)
        while bridge is not None and bridge.hooks:
            bridge.hooks.pop().remove()


def attend_through_bridge(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention over the pages of the forward in progress.

    Args:
        module: the layer's attention module; has the bridge and `layer_idx`.
        query: [1, num_heads, num_tokens, head_dim], after RoPE.
        key: [1, num_kv_heads, num_tokens, head_dim], after RoPE; the rotated part of all heads in
            latent attention.
        value: [1, num_kv_heads, num_tokens, value_dim], or latents.
        attention_mask: None; paged attention derives visibility from positions. With an index, any
            mask, which is ignored.
        scaling: factor on query-key products; None means head_dim ** -0.5.
        options: further arguments of the architecture; window, softcap, sinks, ALiBi and
            the index are used.

    Returns:
        [1, num_tokens, num_heads, value_dim], and None in place of the attention weights.
    """
    bridge: Bridge | None = getattr(module, BRIDGE_ATTRIBUTE, None)
    if bridge is None or bridge.attention is None:
        raise InvariantError(
            'attention "quire" works only in forwards of a Quire decoder; '
            f"{type(module).__name__} was called outside of one"
        )
    _check(module, key, value, attention_mask, options)
    softcap, latent = options.get("softcap"), bridge.latents.get(module.layer_idx)
    key = key if latent is None else latent.stored(key)
    sinks = options.get("s_aux")
    call = AttentionCall(
        layer=module.layer_idx,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=_window(module, options),
        softcap=(float(softcap) if softcap else None),
        sinks=(sinks if isinstance(sinks, torch.Tensor) else None),
        rotary=bridge.rotaries.get(module.layer_idx),
        alibi=options.get("alibi"),
        latent=latent,
        index=options.get("indices"),
    )
    out = bridge.attention.attend(
        call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return out.unsqueeze(0), None


def _check(
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: Mapping[str, Any],
) -> None:
    name = type(module).__name__
    for option, argument in options.items():
        known = option in _KNOWN_OPTIONS and (
            option != "indices" or isinstance(argument, TokenIndex)
        )
        if known or argument is None or argument is False:
            continue
        if not option.startswith("output_"):
            raise UnsupportedModel(
                f"{name} passes {option!r} to attention, which paged attention does not support; "
                "run this model with Transformers itself"
            )
    if attention_mask is not None and options.get("indices") is None:
        raise UnsupportedModel(f"{name} passes its own attention mask; paged attention is causal")
    if options.get("is_causal") is False:
        raise UnsupportedModel(f"{name} passes is_causal=False; paged attention is causal")
    if key.shape[:-1] != value.shape[:-1]:
        raise UnsupportedModel(
            f"{name} has keys {tuple(key.shape)} and values {tuple(value.shape)}; "
            "pages need as many values as keys"
        )


def _window(module: nn.Module, options: Mapping[str, Any]) -> int | None:
    # Some models (Qwen2-MoE) apply the window in the mask and store it as an attribute only.
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return int(window) if window else None
