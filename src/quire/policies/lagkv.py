"""LagKV (Liang et al. 2025, arXiv 2504.04704): how far a token deviates from those that follow.

After the sinks, cached tokens are cut into partitions of `lag`. Keys and values of a partition are
scaled per channel by the minimum and maximum of the next partition. The weight of a token is its
std over channels (divisor n - 1), softmax-normalized over the partition. The sum of the key's and
the value's weights ranks a token:

    score(token) = rank in its partition (0: lowest) / lag

Differs from the paper: ranks are compared, so that every partition loses the same number of tokens,
ties to the lower position. The last whole partition and all later tokens are retained. A channel
whose minimum and maximum are equal in the next partition is shifted but not scaled.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError
from quire.policies.base import ScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView

_MIN_RANGE = 1e-6  # channels with a smaller range are not scaled


@register("lagkv")
@dataclass(frozen=True, slots=True)
class LagKV(ScorePolicy):
    """Retain the tokens whose keys and values deviate most from those of the next tokens.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        lag: tokens of a partition, at least 2; the last one to two partitions are retained.
    """

    cost = "one read of keys and values at an eviction"

    sinks: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks)
        if self.lag < 2:
            raise ConfigError(f"expected lag >= 2 tokens, got {self.lag}")

    @property
    def min_cap(self) -> int:
        return self.sinks + 2 * self.lag

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        place, partitions = self._places(view)
        judged = int(partitions.max()) - 1  # partitions with a successor, in the longest lane
        if judged < 1:
            return torch.zeros_like(view.positions, dtype=torch.float32)
        first = (place < 0).sum(dim=1, keepdim=True)
        steps = torch.arange((judged + 1) * self.lag, device=place.device)
        behind = (first + steps).clamp_max(place.shape[1] - 1)[:, :, None]
        of_keys, of_values = (
            _weight(torch.take_along_dim(numbers, behind, dim=1), self.lag)
            for numbers in (view.keys, view.values)
        )
        return (
            _ranks(of_keys + of_values).gather(1, place.clamp(0, judged * self.lag - 1)) / self.lag
        )

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        del keep
        place, partitions = self._places(view)
        tail = place >= (partitions - 1).clamp_min(0) * self.lag
        return view.live & ((place < 0) | tail)

    def _places(self, view: KVView) -> tuple[Int[Tensor, "lane slot"], Int[Tensor, "lane 1"]]:
        """Return each slot's index after the sinks (negative: a sink), and the partition count."""
        sinks = view.oldest_positions(self.sinks).sum(dim=1, keepdim=True)
        slots = torch.arange(view.positions.shape[1], device=view.positions.device)
        return slots - sinks, (view.num_slots - sinks) // self.lag


def _weight(
    numbers: Float[Tensor, "lane token head_dim"], lag: int
) -> Float[Tensor, "lane judged {lag}"]:
    """Return the weight of each token in its partition, without the last partition."""
    parts = numbers.view(numbers.shape[0], -1, lag, numbers.shape[2])
    following = parts[:, 1:]
    least = following.amin(dim=2, keepdim=True)
    width = following.amax(dim=2, keepdim=True) - least
    scaled = (parts[:, :-1] - least) / torch.where(width < _MIN_RANGE, 1.0, width)
    return scaled.std(dim=3).softmax(dim=2)


def _ranks(weight: Float[Tensor, "lane judged lag"]) -> Int[Tensor, "lane token"]:
    """Return the rank of each token in its partition, 0 the lowest; ties rank the first higher."""
    best_first = weight.argsort(dim=2, descending=True, stable=True)
    return (weight.shape[2] - 1 - best_first.argsort(dim=2)).flatten(1)
