"""How alike cached keys are, a bounded number of pairs at a time."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize, pad

from quire.policies.scratch import slices

_ROWS = 128  # fixed: sums over rows must not depend on what else is worked on


def mean_similarity(
    keys: Float[Tensor, "lane slot head_dim"],
    live: Bool[Tensor, "lane slot"],
    *,
    threshold: float,
    block_tokens: int = 0,
) -> Float[Tensor, "lane slot"]:
    """Mean cosine of each key with all keys of its lane, or of its block; 0 with itself.

    Of the keys that are alike to one (cosine above the threshold) the newest is forgiven: that pair
    counts 0, so that the newest of several alike tokens is not redundant.

    Args:
        keys: zeros where no slot is.
        live: slots that hold a token, in front of those that do not.
        threshold: 0 or more.
        block_tokens: neighbours among which keys are compared; 0: all of the lane.
    """
    lanes, slots, dim = keys.shape
    block = block_tokens or slots
    spare = -slots % block
    unit = pad(normalize(keys, dim=2) * live[:, :, None], (0, 0, 0, spare)).view(-1, block, dim)
    counts = pad(live, (0, spare)).view(-1, block).sum(dim=1, keepdim=True)
    sums = torch.zeros(unit.shape[:2], device=keys.device)
    for part in slices(unit.shape[0], min(_ROWS, block) * block):
        sums[part] = _column_sums(unit[part], threshold)
    return (sums / counts.clamp_min(1)).view(lanes, -1)[:, :slots]


def _column_sums(
    unit: Float[Tensor, "part token head_dim"], threshold: float
) -> Float[Tensor, "part token"]:
    tokens = torch.arange(unit.shape[1], device=unit.device)
    sums = torch.zeros(unit.shape[:2], device=unit.device)
    for start in range(0, unit.shape[1], _ROWS):
        cosines = unit[:, start : start + _ROWS] @ unit.transpose(1, 2)
        cosines.diagonal(offset=start, dim1=1, dim2=2).zero_()
        newest = torch.where(cosines > threshold, tokens, -1).amax(dim=2, keepdim=True)
        pair = newest.clamp_min(0)
        cosines.scatter_(2, pair, torch.where(newest < 0, cosines.gather(2, pair), 0.0))
        sums += cosines.sum(dim=1)
    return sums
