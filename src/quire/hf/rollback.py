"""Removal of the last tokens of a cache: crop, and the rejected tokens of assisted decoding.

    forward     [accepted tokens][candidates]      the rows are forked before the candidates
    crop(-k)    [accepted tokens][candidates]      back to the fork; the accepted candidates are
                                  ^^^^^^ kept      processed together with the next tokens

An evicted token cannot be recovered, and statistics cannot be subtracted. So the rows are forked,
and candidates that were accepted are processed a second time. The cache is then the same as if the
rejected tokens had never been passed. Where all layers retain all tokens, without statistics, the
rows are truncated instead.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from quire.errors import ConfigError, UnsoundCombination
from quire.hf.sequences import Sequences
from quire.layout.pages import CacheLayout
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The rows of a batch before its newest tokens.

    Attributes:
        rows: forks of the rows.
        token_ids: [rows, columns] the tokens processed since then.
    """

    rows: list[Request]
    token_ids: Int[Tensor, "batch columns"]


class Rollback:
    """Removes the last tokens of all rows.

    Args:
        layout: layout of each sequence.

    Attributes:
        active: whether candidates may be removed after each forward.
        pending: accepted tokens [rows, columns] that the rows do not hold yet; None if there are
            none.
    """

    def __init__(self, layout: CacheLayout) -> None:
        groups = layout.groups
        self._truncates = all(g.ordered and not g.private and g.window is None for g in groups)
        self.active = False
        self.pending: Tensor | None = None
        self._checkpoint: Checkpoint | None = None

    @property
    def forks_rows(self) -> bool:
        """Whether candidates need forks of the rows."""
        return self.active and not self._truncates

    @property
    def num_pending(self) -> int:
        """Columns of `pending`."""
        return 0 if self.pending is None else int(self.pending.shape[1])

    def take_pending(self, token_ids: Int[Tensor, "batch columns"]) -> Tensor:
        """Return the pending tokens followed by these; none are pending afterwards."""
        pending, self.pending = self.pending, None
        return token_ids if pending is None else torch.cat([pending, token_ids], dim=1)

    def save(self, sequences: Sequences, token_ids: Int[Tensor, "batch columns"]) -> None:
        """Fork the rows before these candidates are processed.

        Raises:
            OutOfPages: no free memory for the forks; nothing was changed.
        """
        self.forget(sequences)
        if self.forks_rows and token_ids.shape[1]:
            self._checkpoint = Checkpoint(sequences.fork_rows(), token_ids)

    def forget(self, sequences: Sequences) -> None:
        """Free the forks: no tokens before this point will be removed."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            sequences.free(checkpoint.rows)

    def select(self, sequences: Sequences, indices: list[int]) -> None:
        """Select rows of the pending tokens; the candidates of the last forward are accepted."""
        self.forget(sequences)
        if self.pending is not None:
            self.pending = self.pending[indices]

    def reset(self, sequences: Sequences) -> None:
        """Free the forks and the pending tokens."""
        self.forget(sequences)
        self.pending = None

    def crop(self, sequences: Sequences, tokens: int) -> None:
        """Remove the last tokens of every row.

        Raises:
            UnsoundCombination: the state before these tokens is not available.
        """
        pending = self.num_pending
        if pending >= tokens > 0 and self.pending is not None:
            self.pending = self.pending[:, : pending - tokens]
            return
        if self._checkpoint is None:
            self.pending = None
            self._truncate(sequences, tokens - pending)
            return
        self._restore(sequences, self._checkpoint, tokens)

    def _restore(self, sequences: Sequences, checkpoint: Checkpoint, tokens: int) -> None:
        if not tokens:
            self.forget(sequences)
            return
        candidates = int(checkpoint.token_ids.shape[1])
        if tokens > candidates:
            raise UnsoundCombination(
                f"expected to remove at most the {candidates} tokens of the last forward, got "
                f"{tokens}; call cache.reset() and prefill again"
            )
        self._checkpoint = None
        sequences.roll_back(checkpoint.rows)
        accepted = checkpoint.token_ids[:, : candidates - tokens]
        self.pending = accepted if accepted.shape[1] else None

    def _truncate(self, sequences: Sequences, tokens: int) -> None:
        if not tokens:
            return
        evicted = any(row.eviction.num_evictions for row in sequences.rows)
        if evicted or any(row.memory.statistics for row in sequences.rows):
            raise UnsoundCombination(
                "evicted tokens and statistics of the removed tokens cannot be recovered; call "
                "cache.activate_past_recording() before the forward whose tokens are removed, as "
                "assisted decoding does, or cache.reset() and prefill again"
            )
        try:
            sequences.truncate(tokens)
        except ConfigError as error:
            raise UnsoundCombination(
                f"the last {tokens} tokens cannot be removed: {error}; call "
                "cache.activate_past_recording() before the forward whose tokens are removed"
            ) from error
