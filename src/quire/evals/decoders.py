"""Decoders around another one: they forward calls, record logits, or force tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.models.base import Decoder, MeanRotations, PagedAttention


class ForwardingDecoder:
    """Passes every call on to another decoder; what measures one overrides `forward`.

    Args:
        decoder: that runs.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def spec(self) -> ModelSpec:
        """See `Decoder`."""
        return self._decoder.spec

    @property
    def dtype(self) -> torch.dtype:
        """See `Decoder`."""
        return self._decoder.dtype

    @property
    def device(self) -> torch.device:
        """See `Decoder`."""
        return self._decoder.device

    @property
    def num_rope_variants(self) -> int:
        """See `Decoder`."""
        return self._decoder.num_rope_variants

    def rope_variant(self, final_tokens: int) -> int:
        """See `Decoder`."""
        return self._decoder.rope_variant(final_tokens)

    def prepare(self, statistic: Statistic) -> str | None:
        """See `Decoder`."""
        return self._decoder.prepare(statistic)

    def prepare_pre_rope(self) -> str | None:
        """See `Decoder`."""
        return self._decoder.prepare_pre_rope()

    def rotations(self, rope_variant: int = 0) -> MeanRotations | None:
        """See `Decoder`."""
        return self._decoder.rotations(rope_variant)

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        """See `Decoder`."""
        return self._decoder.forward(
            token_ids, positions, sample_rows, attention, rope_variant=rope_variant
        )


class RecordingDecoder(ForwardingDecoder):
    """Records the logits of every forward."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._recorded: list[Tensor] = []

    def take(self) -> Float[Tensor, "rows vocab"]:
        """All logits since the last call, in the order in which they were computed."""
        recorded, self._recorded = self._recorded, []
        return torch.cat(recorded)

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        """See `Decoder.forward`."""
        logits = super().forward(
            token_ids, positions, sample_rows, attention, rope_variant=rope_variant
        )
        self._recorded.append(logits.float().cpu())
        return logits


class ForcingDecoder(RecordingDecoder):
    """Records logits, and makes the given tokens the most likely ones.

    A greedy request thus follows a given output, so that the distributions of two configurations
    are compared after equal tokens. One request at a time.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._tokens: tuple[int, ...] = ()
        self._count = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Force these output tokens in the next request, and forget recorded logits."""
        self._tokens, self._count = tuple(tokens), 0
        self._recorded.clear()

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        """See `Decoder.forward`."""
        logits = super().forward(
            token_ids, positions, sample_rows, attention, rope_variant=rope_variant
        )
        wanted = self._tokens[self._count : self._count + len(logits)]
        self._count += len(logits)
        if not wanted:
            return logits
        forced = torch.full_like(logits, torch.finfo(logits.dtype).min)
        forced[torch.arange(len(wanted)), torch.tensor(wanted)] = 0.0
        return forced
