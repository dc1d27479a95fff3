"""The interface of model and engine: decoders compute logits, the engine computes attention.

A decoder runs every layer of the model on one flat batch of tokens. In each layer it calls the
engine's attention. A decoder stores no keys or values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kernels.backend import (
    Alibi,
    AttentionMath,
    CosSin,
    HeadBuffers,
    LatentProjections,
    TokenIndex,
)
from quire.kernels.native.recurrent import PagedState
from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.models.rotary import Rotary
from quire.policies.view import OutputProjection, Rotation


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Parameters of one layer's attention call, in addition to queries, keys and values.

    Attributes:
        layer: index of the layer, from 0.
        scale: factor on query-key products, dimensionless (usually head_dim ** -0.5).
        window: sliding window W in tokens: a query at position p attends to positions > p - W;
            None: a query attends to every position up to its own.
        softcap: products become `softcap * tanh(product / softcap)` before the softmax; or None.
        sinks: [num_heads] learned logits that join each softmax and have no value; None if the
            layer has no sinks.
        rotary: RoPE of the layer; None if it was not requested or is unknown (see
            `Decoder.prepare`).
        rope: cosines and sines by which attention rotates queries and keys, which are before RoPE;
            only passed to an attention with `takes_rope`. None: they are after RoPE.
        alibi: biases of the logits by the positions of keys; None if the layer has none.
        latent: projections of latents, which are passed as values, and rotated parts as keys; None
            if keys and values are those of heads.
        index: index queries and keys, or the selection of an earlier layer; None: the layer
            attends to all tokens.
    """

    layer: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    rotary: Rotary | None = None
    rope: CosSin | None = None
    alibi: Alibi | None = None
    latent: LatentProjections | None = None
    index: TokenIndex | None = None

    @property
    def math(self) -> AttentionMath:
        """Operations on the logits."""
        return AttentionMath(
            *(self.scale, self.softcap, self.sinks),
            alibi=self.alibi,
            latent=self.latent,
            index=self.index,
        )


Part = TypeVar("Part", bound="StatePart")


@runtime_checkable  # for the shape checks in tests
class StatePart(Protocol):
    """Rows of a flat batch whose recurrent layers run in one call."""

    @property
    def tokens(self) -> Int[Tensor, " token"]:
        """Their tokens in the batch, row by row."""
        ...

    @property
    def length(self) -> int:
        """Tokens of each row."""
        ...


@runtime_checkable  # for the shape checks in tests
class SequenceStates(Protocol[Part]):
    """The recurrent states of the sequences of a flat batch."""

    @property
    def parts(self) -> Sequence[Part]:
        """All rows of the batch."""
        ...

    def load(self, layer: int, part: Part) -> dict[str, Tensor] | None:
        """Return the states [rows, *shape] of a layer, by name; None where sequences begin."""
        ...

    def in_pages(self, layer: int, part: Part) -> Mapping[str, PagedState] | None:
        """Return the states of a layer where they are; None if they begin, or are elsewhere."""
        ...

    def store(self, layer: int, part: Part, states: Mapping[str, Tensor]) -> None:
        """Overwrite the states of a layer."""
        ...


class StatesFromZeros(SequenceStates[Part], Protocol):
    """Recurrent states that are also known where their sequences begin."""

    def begun(self, layer: int, part: Part) -> dict[str, Tensor]:
        """Return the states [rows, *shape] of a layer, by name; zeros where sequences begin."""
        ...

    def rounded(self, layer: int, name: str, state: Tensor) -> Tensor:
        """Return a state [rows, *shape] as it is after it was stored; itself if nothing is lost."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenByToken:
    """States that the tokens of a batch update one after the other; see `recurrent`."""

    states: StatesFromZeros[Any]


@dataclass(frozen=True, slots=True, eq=False)
class OneSequence:
    """States of a batch that is the beginning of one sequence, and is not continued.

    Attributes:
        length: its tokens.
        device: of the model.
    """

    length: int
    device: torch.device

    @property
    def tokens(self) -> Int[Tensor, " token"]:
        return torch.arange(self.length, device=self.device)

    @property
    def parts(self) -> Sequence["OneSequence"]:
        return (self,)

    def load(self, layer: int, part: "OneSequence") -> None:
        return None

    def in_pages(self, layer: int, part: "OneSequence") -> None:
        return None

    def store(self, layer: int, part: "OneSequence", states: Mapping[str, Tensor]) -> None:
        return None


@runtime_checkable  # for the shape checks in tests
class PagedAttention(Protocol):
    """Stores the keys and values of a flat batch, and attends over each sequence's cached tokens.

    One instance serves one forward pass: it holds the sequence and the position of each row.
    If an instance has `wants_residual_similarity` set, its
    `note_residual_similarity(layer, cosines)` is called once for each layer. `cosines` is, for each
    token, the cosine between the residual stream before and after attention was added.
    If it has `takes_rope` set, a decoder may pass queries and keys before RoPE, with
    `AttentionCall.rope`; they may be overwritten.
    Recurrent layers read and write its `states`; if they are None, each token is a sequence of its
    own.
    If it has `hidden_rows`, its `note_hidden_states(states)` is called once at the end, with the
    hidden states of these rows of the batch after the last layer and its norm.
    """

    def attend(
        self,
        call: AttentionCall,
        query: Float[Tensor, "num_tokens num_heads query_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads key_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
    ) -> Float[Tensor, "num_tokens num_heads output_dim"]:
        """Write keys and values, then attend causally by logical position.

        Args:
            call: layer, scale, window and extras.
            query: [num_tokens, num_heads, query_dim], after RoPE for the forward's positions,
                except with `call.rope`.
            key: [num_tokens, num_kv_heads, key_dim], likewise; `key_dim` is `query_dim`, except
                with `call.latent`.
            value: [num_tokens, num_kv_heads, value_dim], never rotated.

        Returns:
            Weighted values, [num_tokens, num_heads, output_dim], typed like query.
        """
        ...


@runtime_checkable
class ChainedAttention(PagedAttention, Protocol):
    """Attention whose C calls a decoder can make in one chain with those of its layers."""

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> Sequence[object] | None:
        """Prepare the attention of all layers.

        Returns:
            The calls of each layer; None if the layers must call `attend`.
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
class Decoder(Protocol):
    """A model that computes the logits of a flat batch of tokens.

    Attributes:
        spec: the model's shape, from its config.
        dtype: type of the weights, and of the keys and values passed to attention.
        device: where the weights are, and where the arguments of `forward` must be.
        num_rope_variants: number of RoPE scaling variants. 1 for most models; 2 if the rotary
            frequencies depend on the final length of a request (0 short, 1 long).
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
        """Select the RoPE scaling variant of a request, fixed for its lifetime.

        Returns:
            A variant in range(num_rope_variants); requests of different variants never share a
            forward.
        """
        ...

    def prepare(self, statistic: Statistic) -> str | None:
        """Make every later forward pass the inputs of a statistic to attention.

        Returns:
            The reason why this model cannot provide them, or None if it can.
        """
        ...

    def prepare_pre_rope(self) -> str | None:
        """Prepare to pass queries and keys before RoPE, and the RoPE itself, to attention.

        Afterwards, a forward whose positions are all 0 passes queries and keys before RoPE,
        since RoPE at position 0 is the identity. `AttentionCall.rotary` rotates them to other
        positions.

        Returns:
            The reason why this model cannot provide them, or None if it can.
        """
        ...

    def rotations(self, rope_variant: int = 0) -> Rotation | None:
        """Mean rotations of queries; None if the RoPE of a layer is unknown."""
        ...

    def output_projections(self) -> OutputProjection | str:
        """Output projections of attention, or the reason why this model cannot provide them."""
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
        """Run all layers on a flat batch, and the head on the rows to sample from.

        Args:
            token_ids: int64, tokens of all sequences one after the other.
            positions: int64, logical position of each token in its own sequence, from 0.
            sample_rows: int64, rows of the batch whose logits are returned; may be empty.
            attention: computes each layer's attention for exactly this batch.
            rope_variant: RoPE scaling variant of every request in this batch.

        Returns:
            Logits in the model's dtype or float32, one row for each of sample_rows, in their order.
        """
        ...


@runtime_checkable
class FixedShapes(Decoder, Protocol):
    """A decoder in which a row's logits depend on neither its index nor the other rows."""

    def prepare_fixed_shapes(self, rows: int) -> str | None:
        """Prepare for forwards of a fixed number of rows, including padding rows.

        Returns:
            The reason why a row's logits still depend on other rows, or None if they do not.
        """
        ...


@runtime_checkable
class LayerByLayer(Decoder, Protocol):
    """A decoder that runs each layer for several batches before it runs the next layer."""

    def prepare_by_layer(self) -> str | None:
        """Return why this model cannot run `forward_together`; None if it can."""

    def forward_together(
        self, batches: Sequence[Batch], *, rope_variant: int = 0
    ) -> list[Float[Tensor, "num_samples vocab"]]:
        """Run batches layer by layer; the logits of each equal those of `Decoder.forward`.

        Args:
            batches: batches of different sequences or consecutive chunks of one, in their order;
                at most `MAX_CHUNKS`.
            rope_variant: RoPE scaling variant of all batches.

        Returns:
            The logits of each batch.
        """
        ...


@runtime_checkable
class HiddenStates(Decoder, Protocol):
    """A decoder that can pass hidden states after the last layer and its norm to attention."""

    def prepare_hidden_states(self) -> str | None:
        """Prepare to pass the hidden states of `hidden_rows`; see `PagedAttention`.

        Returns:
            The reason why this model cannot provide them, or None if it can.
        """
        ...


@runtime_checkable
class Comparable(Decoder, Protocol):
    """A decoder that can also run its model with Transformers' own attention."""

    def reference_logits(
        self, token_ids: Int[Tensor, " num_tokens"]
    ) -> Float[Tensor, "num_tokens vocab"]:
        """Logits of one sequence by Transformers alone, with its own attention and masks."""
        ...


class OwnValue:
    """Attention in which every token attends to itself only; for probes of a model."""

    @property
    def states(self) -> TokenByToken | None:
        return None  # each token is a sequence of its own

    def attend(
        self,
        call: AttentionCall,
        query: Float[Tensor, "num_tokens num_heads query_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads key_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
    ) -> Float[Tensor, "num_tokens num_heads output_dim"]:
        _, values = call.math.heads(key.transpose(0, 1), value.transpose(0, 1))
        group = query.shape[1] // len(values)
        return values.transpose(0, 1).repeat_interleave(group, dim=1).to(query.dtype)


class _MathRecorder(OwnValue):
    """Records the operations of each layer on its logits."""

    def __init__(self) -> None:
        self.math: dict[int, AttentionMath] = {}

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.math[call.layer] = call.math
        return super().attend(call, query, key, value)


@torch.inference_mode()
def attention_math(decoder: Decoder) -> tuple[AttentionMath, ...]:
    """Return the operations of each layer on its logits, from a forward of one token.

    Layers pass them with each call; no key of config.json holds them for all architectures. Those
    of layers without attention are not used.
    """
    token = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    recorder = _MathRecorder()
    decoder.forward(token, token, token[:0], recorder)
    return tuple(
        recorder.math.get(layer, AttentionMath(1.0)) for layer in range(decoder.spec.num_layers)
    )
