"""The seam between a model and the engine: who computes logits, and who answers attention.

A decoder runs every layer of the model on one flat batch of tokens and asks the engine for
attention, layer by layer. It keeps no keys and no values of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.models.rotary import Rotary


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of attention, besides its queries, keys and values.

    Attributes:
        layer: index of the layer, from 0.
        scale: factor on query-key products, dimensionless (usually head_dim ** -0.5).
        window: sliding window W in tokens: a query at position p sees positions > p - W; None sees
            every position up to its own.
        softcap: products become `softcap * tanh(product / softcap)` before the softmax; or None.
        sinks: [num_heads] learned logits that join each softmax and carry no value; None for none.
        rotary: what RoPE did to the queries; None where nobody asked, or where none can tell (see
            `Decoder.prepare`).
    """

    layer: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    rotary: Rotary | None = None


@runtime_checkable  # for the shape checks in tests
class PagedAttention(Protocol):
    """Stores the keys and values of a flat batch, and attends over what each sequence holds.

    One instance serves one forward pass: it knows which row belongs to which sequence and where.
    One that has `wants_residual_similarity` set is also told
    `note_residual_similarity(layer, cosines)`, once for each layer: the cosine between the residual
    stream before and after attention was added, for each token.
    """

    def attend(
        self,
        call: AttentionCall,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """Write keys and values, then attend causally by logical position.

        Args:
            call: layer, scale, window and extras.
            query: [num_tokens, num_heads, head_dim], after RoPE for the forward's positions.
            key: [num_tokens, num_kv_heads, head_dim], likewise.
            value: like key, never rotated.

        Returns:
            Weighted values, shaped and typed like query.
        """
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Arguments of one forward; see `Decoder.forward`."""

    token_ids: Int[Tensor, " num_tokens"]
    positions: Int[Tensor, " num_tokens"]
    sample_rows: Int[Tensor, " num_samples"]
    attention: PagedAttention


@runtime_checkable
class MeanRotations(Protocol):
    """What RoPE will do to queries, on average."""

    def mean_rotation(
        self, layer: int, start: int, tokens: int
    ) -> Float[Tensor, "head_dim head_dim"]:
        """R for which R @ q is the mean of q rotated to `tokens` positions from `start` on.

        float32, with the factor on cosines and sines where a model has one; the identity for a
        layer without RoPE.
        """
        ...


@runtime_checkable
class Decoder(Protocol):
    """A model that turns a flat batch of tokens into logits.

    Attributes:
        spec: the model's shape, from its config.
        dtype: type of the weights, and of the keys and values given to attention.
        device: where the weights are, and where the arguments of `forward` must be.
        num_rope_variants: 1 for most models; 2 where the rotary frequencies depend on how long the
            whole request will be (0 short, 1 long).
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def num_rope_variants(self) -> int: ...

    def rope_variant(self, final_tokens: int) -> int:
        """Say which frequencies a request needs, for all of its life.

        Args:
            final_tokens: prompt plus the most tokens it may generate.

        Returns:
            A regime in range(num_rope_regimes); different regimes never share a forward.
        """
        ...

    def prepare(self, statistic: Statistic) -> str | None:
        """Get ready to give attention what a statistic needs, in every forward from now on.

        Returns:
            Why this model cannot, or None.
        """
        ...

    def prepare_pre_rope(self) -> str | None:
        """Get ready to give attention queries and keys before RoPE, and what turns them.

        From then on a forward whose positions are all 0 gives them: there nothing turns. Each
        `AttentionCall.rotary` moves them.

        Returns:
            Why this model cannot, or None.
        """
        ...

    def rotations(self, rope_variant: int = 0) -> MeanRotations | None:
        """Mean rotations of queries; None where layers rotate in a way that nobody can tell."""
        ...

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        """Run all layers on a flat batch, and the head on the rows that will be sampled.

        Args:
            token_ids: int64, tokens of all sequences one after the other.
            positions: int64, logical position of each token in its own sequence, from 0.
            sample_rows: int64, rows of the batch whose logits are wanted; may be empty.
            attention: answers each layer's attention for exactly this batch.
            rope_variant: regime of every request in this batch.

        Returns:
            Logits in the model's dtype or float32, one row for each of sample_rows, in their order.
        """
        ...


@runtime_checkable
class FixedShapes(Decoder, Protocol):
    """A decoder of which a row's logits depend on neither its place nor the other rows."""

    def prepare_fixed_shapes(self, rows: int) -> str | None:
        """Get ready for forwards of so many rows each, padded ones included.

        Returns:
            Why a row's logits depend on the others all the same, or None.
        """
        ...


@runtime_checkable
class LayerByLayer(Decoder, Protocol):
    """A decoder that runs several batches through a layer before the next one."""

    def forward_together(
        self, batches: Sequence[Batch], *, rope_variant: int = 0
    ) -> list[Float[Tensor, "num_samples vocab"]]:
        """Run batches, each as `Decoder.forward` would, layer by layer.

        Args:
            batches: of different sequences, at most `MOST_BATCHES`.
            rope_variant: of all of them.

        Returns:
            The logits of each.
        """
        ...


@runtime_checkable
class Comparable(Decoder, Protocol):
    """A decoder that can also run its model as Transformers does."""

    def reference_logits(
        self, token_ids: Int[Tensor, " num_tokens"]
    ) -> Float[Tensor, "num_tokens vocab"]:
        """Logits of one sequence by Transformers alone, with its own attention and masks."""
        ...
