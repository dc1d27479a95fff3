"""The softmax scale of a model's attention, before the first step of an engine.

Rules that compute attention from recorded queries need the scale, which a layer passes with each
call. A new engine that loads prefixes and their statistics from a tier evicts before any call.
"""

import torch
from torch import Tensor

from quire.models.base import AttentionCall, Decoder


class _ScaleRecorder:
    """Attention of one token, which attends to itself only; records the scale of the last layer."""

    scale = 1.0

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.scale = call.scale
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).to(query.dtype)


@torch.inference_mode()
def attention_scale(decoder: Decoder) -> float:
    """Return the softmax scale of the last layer, from a forward of one token.

    Args:
        decoder: the model.
    """
    token = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    recorder = _ScaleRecorder()
    decoder.forward(token, token, token[:0], recorder)
    return recorder.scale
