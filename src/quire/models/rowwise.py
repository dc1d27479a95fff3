"""Forwards of a fixed number of rows, in which a row's result depends on no other row or index.

Forwards of equal shape run the same kernels with the same splits, independent of their contents.
In a matrix product every row is then summed in the same order. Elementwise functions are the
exception: torch splits a tensor into equal parts for its threads. It computes most of a part with
vector instructions and the last few elements without, and the two can round exp, tanh and erf
differently. Activations are therefore computed in groups of whole rows that one thread computes.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from quire.models.base import AttentionCall, Decoder

ONE_THREAD_NUMBERS = 16_384  # up to this size torch runs elementwise functions on one thread
VECTOR_NUMBERS = 64  # a multiple of torch's vector width on any CPU
_SEED = 20


def _class_of(entry: object) -> type:
    found = entry[0] if isinstance(entry, tuple) else entry  # with or without arguments
    assert isinstance(found, type), "ACT2CLS contains classes"
    return found


_CLASSES = tuple({_class_of(entry) for entry in ACT2CLS.values()})


class RowwiseActivation(nn.Module):
    """An activation whose result for a row does not depend on the row's index.

    Args:
        activation: elementwise.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, numbers: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Apply the activation."""
        width = numbers.shape[-1]
        together = 1 if width % VECTOR_NUMBERS else max(1, ONE_THREAD_NUMBERS // width)
        rows = numbers.reshape(-1, width)
        parts = [self.activation(part) for part in torch.split(rows, together)]
        return torch.cat(parts).view(numbers.shape)


def make_activations_rowwise(model: nn.Module) -> None:
    """Wrap every activation of a model; idempotent."""
    for parent in list(model.modules()):
        if isinstance(parent, (RowwiseActivation, *_CLASSES)):
            continue
        for name, child in list(parent._modules.items()):
            if child is not None and isinstance(child, _CLASSES):
                setattr(parent, name, RowwiseActivation(child))


class _OwnRow:
    """Attention in which every row attends only to itself."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def rows_depend(decoder: Decoder, rows: int) -> str | None:
    """Compare forwards of the same rows in different orders, bit for bit.

    Args:
        decoder: runs the forwards.
        rows: number of rows of a forward.

    Returns:
        The reason why a row depends on its index, or None if all logits are equal.
    """
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(decoder.spec.vocab_size, (rows,), generator=generator)
    in_order = torch.arange(rows)
    positions = in_order % decoder.spec.max_positions
    expected = decoder.forward(ids, positions, in_order, _OwnRow())
    orders = (in_order.roll(1), in_order.flip(0), torch.randperm(rows, generator=generator))
    for order in orders:
        found = decoder.forward(ids[order], positions[order], in_order, _OwnRow())
        if not torch.equal(found, expected[order]):
            return (
                f"with {torch.get_num_threads()} threads the logits of a token depend on its index "
                f"among the {rows} rows of a forward; set --threads to a power of two"
            )
    return None
