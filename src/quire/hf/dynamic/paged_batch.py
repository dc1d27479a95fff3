"""A dynamic batch in Quire's pages: eviction, codecs, shared prompts, all sampling options."""

import weakref
from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, RequestError
from quire.hf.cache_memory import folder_of
from quire.hf.dynamic.batch_options import BatchOptions
from quire.hf.dynamic.query import (
    CANCELLED,
    KVBytes,
    NewToken,
    Query,
    QueryState,
    StepBytes,
    StepRecord,
)
from quire.hf.wrapped import WrappedModel, wrap_model
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.sampling.outputs import OutputDelta
from quire.scheduler.batchers.registry import parse_batcher
from quire.scheduler.group import sequence_id
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig

_QUEUED = ("baton_pd", "baton_pd_best_fit")  # batchers with a queue of prefilled queries


def loaded_model(
    model: PreTrainedModel, decoder: WrappedModel, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedModel:
    """A user's model as the model of an engine.

    Args:
        model: the model.
        decoder: the wrapped model.
        tokenizer: for the text of outputs; None: token ids only.
    """
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return LoadedModel(
        decoder=decoder,
        tokenizer=tokenizer,
        generation=GenerationDefaults(eos_token_ids=ids),
        spec=decoder.spec,
        name=model.name_or_path or type(model).__name__,
        weight_bytes=sum(part.numel() * part.element_size() for part in model.parameters()),
        folder=folder_of(model),
    )


def kv_options(options: BatchOptions) -> KVConfig:
    """Options of the KV memory of paged rows.

    Raises:
        ConfigError: an option that only dense rows have.
    """
    defaults = BatchOptions()
    for name in ("capacity_tokens", "group_tokens"):
        if getattr(options, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name} is an option of dense rows; leave it out with rows='paged', whose prompts "
                "are prefilled in chunks without padding"
            )
    return KVConfig(
        memory="auto" if options.scale_at is None else options.scale_at,
        swap_space="auto" if options.swap_space is None else options.swap_space,
        page_tokens=options.page_tokens,
        codec=options.codec,
        evict=options.policy,
    )


def schedule_options(options: BatchOptions) -> ScheduleConfig:
    """Options of the scheduler of paged rows.

    Raises:
        UnknownName, ConfigError: the batcher is unknown, or needs dense rows.
    """
    batcher = options.batcher
    parse_batcher(batcher)
    if batcher in _QUEUED:
        batcher += f":prefill={options.prefill},tokens={options.prefill_tokens}"
        batcher += f",hold={options.queue}"
    # a step returns its own tokens
    return ScheduleConfig(max_num_seqs=options.batch_size, batcher=batcher, async_scheduling=False)


_PREEMPTED = "preempted by the caller"


class PagedBatch:
    """A dynamic batch whose KV is in pages; see `DynamicBatch`.

    The scheduler, the batching rules and the memory are those of the engine.

    Args:
        model: a causal language model of Transformers, in eval mode, on one device.
        options: options of the batch.

    Attributes:
        last: record of the last step.

    Raises:
        UnsupportedModel: its attention does not work with pages; states the reason.
        ConfigError, UnknownName, UnsoundCombination: an option is wrong.
    """

    def __init__(self, model: PreTrainedModel, options: BatchOptions) -> None:
        self.last = StepRecord()
        self._options = options
        self._decoder = wrap_model(model, verify=True)
        self._closing = weakref.finalize(self, self._decoder.leave)
        self._closing.atexit = False
        try:
            loaded = loaded_model(model, self._decoder, options.tokenizer)
            kv, schedule = kv_options(options), schedule_options(options)
            self._engine = Engine(loaded, kv, schedule, clock=options.clock)
        except BaseException:
            self._closing()
            raise
        self._count = 0
        self._ids: dict[Query, tuple[str, int]] = {}
        self._queries: dict[str, Query] = {}

    # ---- bytes ---------------------------------------------------------------------------------

    @property
    def device_meter(self) -> KVBytes:
        """Bytes of pages, without those that only the prefix cache holds."""
        memory = self._engine.pool.kv.memory
        idle = self._engine.scheduler.sequence_memory.sharing.idle_bytes
        used = sum(pool.used_bytes for pool in memory.pools.values()) - idle
        return StepBytes(used, memory.arena_peak_bytes)

    @property
    def host_meter(self) -> KVBytes:
        """Bytes of swapped KV."""
        host = self._engine.pool.host
        return StepBytes() if host is None else StepBytes(host.used_bytes, host.peak_bytes)

    # ---- queries -------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        deadline_s: int | float | None,
    ) -> Query:
        """Queue a query; see `DynamicBatch.submit`."""
        now_s = self._options.clock()
        left_s = None if deadline_s is None else max(0.0, deadline_s - now_s)
        request_id = self._engine.submit(
            GenerationRequest(list(prompt_token_ids), params, priority=priority, deadline_s=left_s)
        )
        choices = [
            Query(
                number=self._count + index,
                prompt_token_ids=list(prompt_token_ids),
                params=params,
                priority=priority,
                deadline_s=deadline_s,
                submitted_s=now_s,
            )
            for index in range(params.n)
        ]
        choices[0].choices = choices
        self._count += params.n
        self._queries[request_id] = choices[0]
        self._ids |= {query: (request_id, index) for index, query in enumerate(choices)}
        return choices[0]

    def cancel(self, query: Query) -> None:
        """Cancel one completion; of ranked completions all."""
        if query.finished or query not in self._ids:
            return
        self._engine.cancel(*self._ids[query])
        query.finish(CANCELLED, self._options.clock())

    def preempt(self, query: Query) -> None:
        """Preempt a running query; its KV is swapped or recomputed, by measured cost."""
        request = self._running().get(sequence_id(*self._ids.get(query, ("", 0))))
        if query.finished or request is None:
            raise RequestError(f"expected a running query, got one that is {query.state.value}")
        self._engine.scheduler.lifecycle.preempt(request, _PREEMPTED)
        self._note_states()

    def extract(self, query: Query) -> Query:
        """Refused."""
        raise self._stays(query)

    def adopt(self, query: Query) -> None:
        """Refused."""
        raise self._stays(query)

    def _stays(self, query: Query) -> RequestError:
        return RequestError(
            f"query {query.number} cannot be moved: its KV is in the pages of one batch; use "
            "rows='dense' to move queries between batches"
        )

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any query is unfinished."""
        return self._engine.has_work

    @property
    def num_running(self) -> int:
        """Sequences in rows."""
        return len(self._engine.scheduler.running)

    @property
    def num_queued(self) -> int:
        """Sequences without a row."""
        return self._engine.scheduler.num_waiting

    def step(self) -> list[NewToken]:
        """Run one step of the engine; see `DynamicBatch.step`."""
        record = self.last = StepRecord()
        started_s = self._options.clock()
        decoding = sum(bool(r.output_token_ids) for r in self._engine.scheduler.running)
        deltas = self._engine.step()
        record.decode_s = self._options.clock() - started_s
        record.rows = record.live = decoding
        record.kv_bytes = self.device_meter.used_bytes
        record.queued = self.num_queued > 0
        new = [token for delta in deltas for token in self._add(delta)]
        self._note_states()
        return new

    def _add(self, delta: OutputDelta) -> list[NewToken]:
        """Add a delta to its query; return its tokens."""
        first = self._queries[delta.request_id]
        query, now_s = first.choices[delta.index], self._options.clock()
        if delta.usage is not None:
            first.preemptions = delta.usage.preemptions
            del self._queries[delta.request_id]
            for choice in first.choices:
                del self._ids[choice]
        if query.finished:  # cancelled by the caller
            return []
        query.output_token_ids += delta.token_ids
        query.times_s += [now_s] * len(delta.token_ids)
        query.text += delta.text
        query.logprobs += delta.logprobs or ()
        query.score, query.prompt_logprobs = delta.score, delta.prompt_logprobs
        if delta.finish_reason is not None:
            query.stop_reason = delta.stop_reason
            query.finish(_reason(delta), now_s)
        return [NewToken(query, token_id) for token_id in delta.token_ids]

    def _running(self) -> dict[str, Request]:
        return {request.request_id: request for request in self._engine.scheduler.running}

    def _note_states(self) -> None:
        running = self._running()
        for query, place in self._ids.items():
            if not query.finished:
                runs = sequence_id(*place) in running
                query.state = QueryState.RUNNING if runs else QueryState.WAITING

    def close(self) -> None:
        """Free the memory and restore the model."""
        self._engine.close()
        self._closing()


def _reason(delta: OutputDelta) -> str:
    if delta.finish_reason == "abort":
        return CANCELLED
    return f"error: {delta.error}" if delta.error else str(delta.finish_reason)
