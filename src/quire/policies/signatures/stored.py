"""Signatures that stay with their tokens: written when tokens leave, read when the next ones do."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.policies.view import KVView
from quire.spec.statistics import SignatureBits, SignedUntil, Statistic

BITS, UNTIL = SignatureBits(), SignedUntil()


def stored_bits(
    view: KVView,
) -> tuple[Bool[Tensor, "layer head slot"], Bool[Tensor, "layer head slot"]]:
    """The bits of each query head that were written down, and where any were.

    Raises:
        PolicyError: the view was made without them.
    """
    until = view.remembered(UNTIL)[:, 0]
    signed = (view.live & (view.positions < until)).repeat_interleave(view.group, dim=0)
    numbers = torch.where(view.live, view.remembered(BITS), 0.0).nan_to_num(0, 0, 0).long()
    heads = torch.arange(view.group, device=numbers.device)
    bits = (numbers[:, None] >> heads[:, None]) & 1
    return _by_layer(view, bits.bool()), _by_layer(view, signed)


def notes_of(
    view: KVView, bits: Bool[Tensor, "layer head slot"]
) -> Mapping[Statistic, Float[Tensor, "..."]]:
    """What to write down of the bits of each query head."""
    heads = torch.arange(view.group, device=bits.device)
    numbers = (bits.view(-1, view.group, bits.shape[2]).long() << heads[:, None]).sum(dim=1)
    until = numbers.new_full((len(numbers), 1, 1), view.next_position)
    return {BITS: numbers.float(), UNTIL: until.float()}


def _by_layer(
    view: KVView, bits: Bool[Tensor, "lanes_or_heads ..."]
) -> Bool[Tensor, "layer head slot"]:
    """A row for each query head, by layer."""
    return bits.view(-1, view.heads_per_layer * view.group, bits.shape[-1])
