"""Keys and values of a whole model made again by its own modules, beside those it stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.common.models import llama_125m, llama_tiny, random_weights
from benchmarks.device.target import Target
from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall

CONFIGS: Mapping[str, Callable[[], object]] = {"llama_125m": llama_125m, "llama_tiny": llama_tiny}


@dataclass(slots=True)
class _Storing:
    """Attention over one prompt, which notes what it was given and what that was made of."""

    wants_inputs: bool = True
    inputs: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note_input(self, layer: int, inputs: Tensor) -> None:
        self.inputs[layer] = inputs.clone()

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        self.stored[call.layer] = key.clone(), value.clone()
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        out = attend_dense(*heads, math=AttentionMath(call.scale), seen=None, causal=True)
        return out[0].transpose(0, 1).contiguous()


def recompute_errors(target: Target, model: str, tokens: int) -> dict[str, float]:
    """How far keys and values made from activations are from the stored ones, in bfloat16.

    Of half the tokens, so that the products have another shape than the prompt's had.

    Args:
        target: the device.
        model: name in `CONFIGS`.
        tokens: of the prompt.

    Returns:
        `key` and `value`: the largest relative norm of the difference over all layers.

    Raises:
        ConfigError: the model's modules do not say how.
    """
    weights = random_weights(CONFIGS[model](), dtype=torch.bfloat16)  # type: ignore[arg-type]
    torch.nn.Module.to(weights, target.device)
    decoder = TransformersDecoder(weights)
    why_not = decoder.prepare_recomputation()
    if why_not is not None:
        raise ConfigError(f"{model} cannot be recomputed: {why_not}")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, decoder.spec.vocab_size, (tokens,), generator=draw).to(target.device)
    places = torch.arange(tokens, device=target.device)
    storing = _Storing()
    decoder.forward(ids, places, places[-1:], storing)
    some = places[::2]
    errors: dict[str, float] = {"key": 0.0, "value": 0.0}
    for layer, stored in storing.stored.items():
        made = decoder.keys_and_values(layer, storing.inputs[layer][some], some)
        for name, found, kept in zip(errors, made, stored, strict=True):
            errors[name] = max(errors[name], relative(found, kept[some]))
    return errors


def relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    difference = (found.float() - expected.float()).norm()
    return float(difference / expected.float().norm())
