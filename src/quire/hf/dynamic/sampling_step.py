"""Sampling of the next tokens of queries, and detection of finished queries."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from quire.hf.dynamic.query import NewToken, Query
from quire.kernels.native.sampling import row_sampling
from quire.sampling.sampler import Sampler


class DenseSampling:
    """Samples the next tokens after every forward."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        undecodable_ids: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self.new: list[NewToken] = []
        self._sampler = Sampler(
            vocab_size, eos_token_ids, undecodable_ids=undecodable_ids, native=row_sampling()
        )
        self._clock = clock

    def begin_step(self) -> None:
        self.new = []

    def first(self, logits: Mapping[Query, Float[Tensor, " vocab"]]) -> None:
        """Sample first tokens after prefill; recomputed queries already have them."""
        fresh = [query for query in logits if not query.output_token_ids and not query.finished]
        if fresh:
            self.next(fresh, torch.stack([logits[query] for query in fresh]))

    def next(self, queries: Sequence[Query], logits: Float[Tensor, "query vocab"]) -> None:
        now_s = self._clock()
        for query, token in zip(queries, self._sampler.sample(logits, queries), strict=True):
            if token.error is not None:
                query.finish(f"error: {token.error}", now_s)
                continue
            query.output_token_ids.append(token.token_id)
            query.times_s.append(now_s)
            if query.params.logprobs is not None:
                query.logprobs.append(token)
            self.new.append(NewToken(query, token.token_id))
            assert query.output_text is not None, "set when the query is submitted"
            query.text += query.output_text.push(token.token_id)
            ending = query.output_text.ending
            if ending is not None:
                query.stop_reason = ending.stop_reason
                query.finish(ending.finish_reason, now_s)
