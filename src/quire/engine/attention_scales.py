"""The softmax scales of a model's layers, which rules need to compute attention from queries."""

import torch
from torch import Tensor

from quire.models.base import AttentionCall, Decoder


class _ScaleRecorder:
    """Attention of one token, which attends to itself only; records the scale of each layer."""

    def __init__(self) -> None:
        self.scales: dict[int, float] = {}

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.scales[call.layer] = call.scale
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).to(query.dtype)


@torch.inference_mode()
def attention_scales(decoder: Decoder) -> tuple[float, ...]:
    """Return the softmax scale of each layer, from a forward of one token.

    Layers pass it with each call; no key of config.json holds it for all architectures.
    """
    token = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    recorder = _ScaleRecorder()
    decoder.forward(token, token, token[:0], recorder)
    return tuple(recorder.scales[layer] for layer in range(decoder.spec.num_layers))
