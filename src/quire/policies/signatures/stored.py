"""Signatures that stay with their tokens: written when others leave, read when the next ones do.

Those of tokens that are protected so far, as the newest are, and of layers that lose nothing yet
are not written: every head would keep all of these, which says nothing about them.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.layout.statistics import SignatureBits, SignedUntil, Statistic
from quire.policies.view import KVView

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
    view: KVView, bits: Bool[Tensor, "layer head slot"], may_leave: Bool[Tensor, "layer slot"]
) -> Mapping[Statistic, Float[Tensor, "..."]]:
    """What to write down of the bits of each query head.

    Args:
        view: with what was written before.
        bits: of each query head.
        may_leave: slots that something is to be known of.
    """
    heads = torch.arange(view.group, device=bits.device)
    numbers = (bits.view(-1, view.group, bits.shape[2]).long() << heads[:, None]).sum(dim=1)
    behind = torch.where(may_leave, view.first_heads(view.positions) + 1, 0).amax(dim=1)
    behind = behind.repeat_interleave(view.heads_per_layer)[:, None, None]
    return {BITS: numbers.float(), UNTIL: torch.maximum(view.remembered(UNTIL), behind.float())}


def _by_layer(
    view: KVView, bits: Bool[Tensor, "lanes_or_heads ..."]
) -> Bool[Tensor, "layer head slot"]:
    """A row for each query head, by layer."""
    return bits.view(-1, view.heads_per_layer * view.group, bits.shape[-1])
