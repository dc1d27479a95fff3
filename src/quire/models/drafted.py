"""A model with a draft model for speculative decoding, as one decoder with one KV memory.

    layers     0 .. a-1     a .. a+b-1
               model        draft model, whose layers never evict

Each forward runs both on the same tokens, so that the KV of the draft model is that of the same
sequences: it is shared, copied, preempted and dropped together with the model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from quire.errors import ConfigError
from quire.layout import limits
from quire.layout.model import LayerSpec, ModelSpec
from quire.layout.statistics import Statistic
from quire.models.base import (
    AttentionCall,
    Batch,
    Decoder,
    FixedShapes,
    HiddenStates,
    LayerByLayer,
    PagedAttention,
)
from quire.models.loader import LoadedModel
from quire.policies.view import OutputProjection, Rotation


@dataclass(frozen=True, slots=True)
class _DraftAttention:
    """The attention of a batch for the layers of the draft model."""

    whole: PagedAttention
    first_layer: int
    states = None  # no layer has a recurrent state

    @property
    def takes_rope(self) -> bool:
        return getattr(self.whole, "takes_rope", False)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        moved = replace(call, layer=self.first_layer + call.layer)
        return self.whole.attend(moved, query, key, value)


class DraftedDecoder:
    """Runs a model and its draft model; see `Decoder`.

    Args:
        model: computes the logits.
        draft: proposes tokens.
    """

    def __init__(self, model: Decoder, draft: Decoder) -> None:
        self._model, self._draft = model, draft
        self.spec = _joined(model.spec, draft.spec)
        self.dtype, self.device = model.dtype, model.device
        self.num_rope_variants = model.num_rope_variants

    def rope_variant(self, final_tokens: int) -> int:
        return self._model.rope_variant(final_tokens)

    def prepare(self, statistic: Statistic) -> str | None:
        return self._model.prepare(statistic)

    def prepare_pre_rope(self) -> str | None:
        return "a draft model stores keys after RoPE"

    def rotations(self, rope_variant: int = 0) -> Rotation | None:
        return self._model.rotations(rope_variant)

    def output_projections(self) -> OutputProjection | str:
        return self._model.output_projections()

    def prepare_fixed_shapes(self, rows: int) -> str | None:
        for decoder in (self._model, self._draft):
            if not isinstance(decoder, FixedShapes):
                return f"{type(decoder).__name__} has no forward pass of a fixed number of rows"
            reason = decoder.prepare_fixed_shapes(rows)
            if reason is not None:
                return reason
        return None

    def prepare_by_layer(self) -> str | None:
        for decoder in (self._model, self._draft):
            if not isinstance(decoder, LayerByLayer):
                return f"{type(decoder).__name__} runs no layer for several batches"
            reason = decoder.prepare_by_layer()
            if reason is not None:
                return reason
        return None

    def prepare_hidden_states(self) -> str | None:
        if not isinstance(self._model, HiddenStates):
            return f"{type(self._model).__name__} passes no hidden states"
        return self._model.prepare_hidden_states()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sample_rows: Tensor,
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        logits = self._model.forward(
            token_ids, positions, sample_rows, attention, rope_variant=rope_variant
        )
        self.draft_logits(Batch(token_ids, positions, sample_rows[:0], attention), rope_variant)
        return logits

    def forward_together(
        self, batches: Sequence[Batch], *, rope_variant: int = 0
    ) -> list[Float[Tensor, "num_samples vocab"]]:
        assert isinstance(self._model, LayerByLayer), "see `prepare_by_layer`"
        assert isinstance(self._draft, LayerByLayer), "see `prepare_by_layer`"
        logits = self._model.forward_together(batches, rope_variant=rope_variant)
        own = [
            replace(one, sample_rows=one.sample_rows[:0], attention=self._attention(one.attention))
            for one in batches
        ]
        self._draft.forward_together(own, rope_variant=self._variant(rope_variant))
        return logits

    def draft_logits(
        self, batch: Batch, rope_variant: int = 0
    ) -> Float[Tensor, "num_samples vocab"]:
        """Run the draft model alone, and store its keys and values."""
        return self._draft.forward(
            batch.token_ids,
            batch.positions,
            batch.sample_rows,
            self._attention(batch.attention),
            rope_variant=self._variant(rope_variant),
        )

    def _attention(self, whole: PagedAttention) -> _DraftAttention:
        return _DraftAttention(whole, self._model.spec.num_layers)

    def _variant(self, rope_variant: int) -> int:
        return min(rope_variant, self._draft.num_rope_variants - 1)


def with_draft(model: LoadedModel, draft: LoadedModel) -> LoadedModel:
    """Return a model whose forwards run its draft model too.

    Raises:
        UnsoundCombination: the draft model has recurrent states.
        ConfigError: the models have other vocabularies or contexts.
    """
    ours, theirs = model.spec, draft.spec
    if any(layer.state is not None for layer in theirs.layers):
        raise limits.refused(limits.SPECULATIVE_DRAFT_STATES)
    if theirs.max_positions < ours.max_positions:
        raise ConfigError(
            f"the draft model {draft.name} has a context of {theirs.max_positions} tokens, and "
            f"{model.name} of {ours.max_positions}; add --max-model-len {theirs.max_positions}"
        )
    if ours.vocab_size != theirs.vocab_size or not _same_tokens(model, draft):
        raise ConfigError(
            f"expected a draft model with the vocabulary of {model.name}, {ours.vocab_size} "
            f"tokens, got {draft.name} with {theirs.vocab_size} tokens"
            + (" of other texts" if ours.vocab_size == theirs.vocab_size else "")
        )
    decoder = DraftedDecoder(model.decoder, draft.decoder)
    return replace(
        model,
        decoder=decoder,
        spec=replace(decoder.spec, max_positions=ours.max_positions),
        weight_bytes=model.weight_bytes + draft.weight_bytes,
        draft=draft,
    )


def _same_tokens(model: LoadedModel, draft: LoadedModel) -> bool:
    if model.tokenizer is None or draft.tokenizer is None:
        return True
    return bool(model.tokenizer.get_vocab() == draft.tokenizer.get_vocab())


def _joined(ours: ModelSpec, theirs: ModelSpec) -> ModelSpec:
    """The shape of both: the layers of the draft model have a window of the whole context."""
    layers = list[LayerSpec]()
    for layer, heads in zip(theirs.layers, theirs.heads, strict=True):
        whole = layer.chunk is None and layer.window is None
        layers.append(
            replace(
                layer,
                window=theirs.max_positions if whole else layer.window,
                source=None if layer.source is None else ours.num_layers + layer.source,
                heads=heads,
                drafts=True,
            )
        )
    count = ours.num_layers + theirs.num_layers
    return replace(ours, num_layers=count, layers=(*ours.layers, *layers))
