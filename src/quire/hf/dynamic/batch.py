"""`DynamicBatch`: continuous batching for any Transformers model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from quire.config.sampling_params import SamplingParams
from quire.hf.dynamic.batch_options import BatchOptions, read_params
from quire.hf.dynamic.dense_batch import DenseBatch
from quire.hf.dynamic.paged_batch import PagedBatch
from quire.hf.dynamic.query import KVBytes, NewToken, Query, StepRecord


class DynamicBatch:
    """A batch whose free rows are filled with queued queries.

        batch = DynamicBatch(model, batch_size=8, batcher="baton_pd")
        handles = [batch.submit(ids, max_new_tokens=64) for ids in prompts]
        batch.run()
        outputs = [handle.token_ids for handle in handles]

    With dense rows the model runs through its ordinary forward and cache argument, and is not
    modified. With paged rows its forward is wrapped, as by `QuireCache`; `close` restores it.

    Args:
        model: a causal language model of Transformers, in eval mode, on one device. Dense rows
            need sdpa or eager attention.
        options: see `BatchOptions`; single options can be passed by name instead.

    Raises:
        UnsupportedModel: its forward does not work with such rows; states the reason.
        ConfigError, UnknownName: an option is wrong.
        UnsoundCombination: a policy and a codec, or a batcher, that exclude each other.
    """

    def __init__(
        self, model: PreTrainedModel, options: BatchOptions | None = None, **named: object
    ) -> None:
        self.options = replace(options or BatchOptions(), **named)  # type: ignore[arg-type]
        self._rows: DenseBatch | PagedBatch
        if self.options.in_pages:
            self._rows = PagedBatch(model, self.options)
        else:
            self._rows = DenseBatch(model, self.options)

    # ---- queries -------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int | None = None,
        *,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        deadline_s: int | float | None = None,
    ) -> Query:
        """Queue a query.

        Args:
            prompt_token_ids: the prompt.
            max_new_tokens: maximum number of generated tokens; default: that of `sampling`.
            sampling: sampling parameters, seed and stop rules included; default: greedy.
            priority: lower values are scheduled first, and may preempt higher ones.
            deadline_s: deadline on the options' clock; of equal priorities the earliest runs first.

        Returns:
            The handle: `token_ids`, `text` and `logprobs` have the output so far, `choices` all n
            completions, this one first; see `finished` and `finish_reason`.

        Raises:
            RequestError: the query is invalid; states the reason.
            NeverFits: the query alone exceeds the column or byte limit.
        """
        params = read_params(sampling, max_new_tokens, self.options)
        return self._rows.submit(prompt_token_ids, params, priority, deadline_s)

    def cancel(self, query: Query) -> None:
        """Cancel a query in any state; other queries continue. No effect on a finished query."""
        self._rows.cancel(query)

    def preempt(self, query: Query) -> None:
        """Preempt a running query: swap its KV to CPU memory. The query resumes in rank order.

        Raises:
            RequestError: the query has no row.
        """
        self._rows.preempt(query)

    def extract(self, query: Query) -> Query:
        """Remove a query from the batch with all of its state; `adopt` adds it to a batch.

        Raises:
            RequestError: the query is finished, its prefill is in progress, or rows are paged.
        """
        return self._rows.extract(query)

    def adopt(self, query: Query) -> None:
        """Add a query that was extracted from a batch of the same model.

        Its KV is moved to CPU memory. If CPU memory is full, the KV is recomputed.

        Raises:
            RequestError: the query was not extracted, or rows are paged.
            NeverFits: the query alone exceeds the column or byte limit of this batch.
        """
        self._rows.adopt(query)

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def last(self) -> StepRecord:
        """Record of the last step."""
        return self._rows.last

    @property
    def device_meter(self) -> KVBytes:
        """Current and peak bytes of KV on the device; dense: prefills and the queue included."""
        return self._rows.device_meter

    @property
    def host_meter(self) -> KVBytes:
        """Current and peak bytes of KV in CPU memory."""
        return self._rows.host_meter

    @property
    def has_work(self) -> bool:
        """Whether any query is unfinished."""
        return self._rows.has_work

    @property
    def num_running(self) -> int:
        """Queries in rows."""
        return self._rows.num_running

    @property
    def num_queued(self) -> int:
        """Queries without a row."""
        return self._rows.num_queued

    def run(self) -> None:
        """Step until every query is finished."""
        while self.has_work:
            self.step()

    def step(self) -> list[NewToken]:
        """Free memory, fill rows, and decode one token for every row.

        Returns:
            New tokens, first tokens of prompts included.

        Raises:
            SlabFull: vector shaping has left more holes than the capacity allows. Queries keep
                their state; only `cancel` can free columns.
            Exception: an exception of the model, unchanged. Queries keep their tokens, and the KV
                of those in rows is recomputed, so that another step can be tried.
        """
        return self._rows.step()

    # ---- close ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory of paged rows, and restore the model; no effect on dense rows."""
        self._rows.close()

    def __enter__(self) -> "DynamicBatch":
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()
