"""`DynamicBatch`: continuous batching for any Transformers model, through its ordinary forward."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from transformers import PreTrainedModel

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError, SlabFull
from quire.hf.dynamic.batch_memory import BatchMemory, BatchSlots
from quire.hf.dynamic.batch_options import BatchOptions, check_query, dense_params, read_params
from quire.hf.dynamic.filling import Filling
from quire.hf.dynamic.query import (
    CANCELLED,
    NewToken,
    Query,
    QueryQueues,
    QueryState,
    StepRecord,
)
from quire.hf.dynamic.sampling_step import DenseSampling
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.space import ByteMeter
from quire.models.tokenizer import undecodable_ids
from quire.sampling.detokenizer import OutputText

_PREFETCH_TOKENS = 2  # tokens before a row is expected to be free: prefetch the next query's KV


class DynamicBatch:
    """A batch whose free rows are filled with queued queries.

        batch = DynamicBatch(model, batch_size=8, batcher="baton_pd")
        handles = [batch.submit(ids, max_new_tokens=64) for ids in prompts]
        batch.run()
        outputs = [handle.token_ids for handle in handles]

    The KV is one slab with a row for each query. The model runs through its ordinary forward and
    cache argument, and is not modified. `quire.LLM` runs the same model object in pages, with
    eviction, codecs and a prefix cache.

    Args:
        model: a causal language model of Transformers, in eval mode, on one device, with sdpa or
            eager attention.
        options: see `BatchOptions`; single options can be passed by name instead.

    Attributes:
        device_meter, host_meter: current and peak bytes of KV; device_meter counts the slab
            and the prefilled queue.
        last: record of the last step.

    Raises:
        UnsupportedModel: rows of different lengths cannot share its forward; states the reason.
        ConfigError, UnknownName: an option is wrong.
    """

    def __init__(
        self, model: PreTrainedModel, options: BatchOptions | None = None, **named: object
    ) -> None:
        options = replace(options or BatchOptions(), **named)  # type: ignore[arg-type]
        self.options = options
        self._model = SlabModel(model)
        self._sampling_step = DenseSampling(
            self._model.vocab_size,
            self._model.eos_token_ids,
            undecodable_ids(options.tokenizer, self._model.vocab_size),
            self.options.clock,
        )
        self._capacity_tokens = limit = options.capacity_tokens or self._model.max_tokens
        self.device_meter = ByteMeter()
        self.host_meter = ByteMeter(self.options.swap_space)
        holds = self.options.scale_at is None
        self._batch_slots = BatchSlots(self._model.shape, self.device_meter, limit, holds=holds)
        self._queues = QueryQueues()
        self._memory = BatchMemory(
            self._model,
            self.options,
            self._batch_slots,
            self._queues,
            self.device_meter,
            self.host_meter,
        )
        self._filling = Filling(
            self._model,
            self.options,
            self._batch_slots,
            self._queues,
            self._memory,
            self._sampling_step,
        )
        self._rule = self._filling.rule
        self._count, self._seeds = 0, Random()
        self.last = StepRecord()

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
            The handle: `token_ids`, `text` and `logprobs` have the output so far; see `finished`
            and `finish_reason`.

        Raises:
            RequestError: the query is invalid; states the reason.
            NeverFits: the query alone exceeds the column or byte limit.
        """
        params = dense_params(read_params(sampling, max_new_tokens, self.options))
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        query = Query(
            number=self._count,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            sampling_seed=seed,
            priority=priority,
            deadline_s=deadline_s,
            submitted_s=self.options.clock(),
        )
        self._check(query)
        query.output_text = OutputText(
            params, self._model.eos_token_ids, self.options.tokenizer, query.prompt_token_ids
        )
        self._count += 1
        self._queues.wait(query)
        return query

    def _check(self, query: Query) -> None:
        check_query(
            query,
            vocab_size=self._model.vocab_size,
            context_tokens=self._model.max_tokens,
            capacity_tokens=self._capacity_tokens,
        )
        self._memory.refuse_too_large(query)

    def cancel(self, query: Query) -> None:
        """Cancel a query in any state; other queries continue. No effect on a finished query."""
        if query.finished:
            return
        if query.state is QueryState.RUNNING:
            self._batch_slots.leave(query, clear=not self._rule.runs_to_end)
        elif query.state in (QueryState.WAITING, QueryState.READY):
            self._queues.leave(query)
        query.drop_kv()
        query.finish(CANCELLED, self.options.clock())
        self._close_if_idle()

    def preempt(self, query: Query) -> None:
        """Preempt a running query: swap its KV to CPU memory. The query resumes in rank order.

        Raises:
            RequestError: the query has no row.
        """
        if query.state is not QueryState.RUNNING or self._rule.runs_to_end:
            raise RequestError(
                f"expected a running query of a batcher that changes its rows, got one that is "
                f"{query.state.value} under {self.options.batcher}"
            )
        self._memory.preempt(query)

    def extract(self, query: Query) -> Query:
        """Remove a query from the batch with all of its state; `adopt` adds it to a batch.

        Raises:
            RequestError: the query is finished, or its prefill is in progress.
        """
        if query.state is QueryState.RUNNING:
            self.preempt(query)
        if query.state not in (QueryState.WAITING, QueryState.READY):
            raise RequestError(
                f"expected a waiting or running query, got one that is {query.state.value}: step "
                "until its prefill has ended, or extract another query"
            )
        self._queues.leave(query)
        query.state = QueryState.EXTRACTED
        self._close_if_idle()
        return query

    def adopt(self, query: Query) -> None:
        """Add a query that was extracted from a batch of the same model.

        Its KV is moved to CPU memory. If CPU memory is full, the KV is recomputed.

        Raises:
            RequestError: the query was not extracted.
            NeverFits: the query alone exceeds the column or byte limit of this batch.
        """
        if query.state is not QueryState.EXTRACTED:
            raise RequestError(
                f"expected a query that `extract` has returned, got one that is {query.state.value}"
            )
        self._check(query)
        query.number = self._count
        self._count += 1
        self._memory.queue_swapped(query)

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any query is unfinished."""
        return bool(self._batch_slots.live or len(self._queues))

    @property
    def num_running(self) -> int:
        """Queries in rows."""
        return len(self._batch_slots.live)

    @property
    def num_queued(self) -> int:
        """Queries without a row."""
        return len(self._queues)

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
        self._sampling_step.begin_step()
        record = self.last = StepRecord()
        try:
            self._advance(record)
        except SlabFull:
            raise
        except BaseException:
            self._filling.recover()
            raise
        record.kv_bytes = self.device_meter.used_bytes
        return self._sampling_step.new

    def _advance(self, record: StepRecord) -> None:
        self._memory.shrink()
        self._filling.preempt_for_priority()
        self._filling.fill(record)
        if self._batch_slots.live:
            self._decode(record)
        soon = any(query.tokens_left <= _PREFETCH_TOKENS for query in self._batch_slots.live)
        if soon and self._queues.ready:
            self._memory.fetch(self._queues.ready[0])
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.has_work:
            self._batch_slots.close()

    def _decode(self, record: StepRecord) -> None:
        slab = self._batch_slots.slab
        assert slab is not None
        rows = list(self._batch_slots.rows)
        new_tokens = [self._step_tokens(query) for query in rows]
        record.queued = self.num_queued > 0
        started_s = self.options.clock()
        try:
            logits = self._model.decode(slab, new_tokens)
        except SlabFull:
            self._filling.requeue()
            raise
        live = [row for row, query in enumerate(rows) if query is not None]
        running = [query for query in rows if query is not None]
        logits = logits if len(live) == len(rows) else logits[live]
        self._sampling_step.next(running, logits)
        record.decode_s = self.options.clock() - started_s
        record.rows, record.live = len(rows), len(live)
        record.columns, record.new_columns = slab.window.width, max(map(len, new_tokens))
        record.valid_tokens = sum(slab.lengths[row] for row in live)
        for query in running:
            if query.finished:
                self._batch_slots.leave(query, clear=not self._rule.runs_to_end)

    def _step_tokens(self, query: Query | None) -> list[int]:
        """Return the tokens of a row's query that this step processes."""
        if query is None:
            return []
        if query not in self._filling.shaped:
            return query.output_token_ids[-1:]
        if query.started_s is None:
            query.started_s = self.options.clock()
        return [*query.prompt_token_ids, *query.output_token_ids]
