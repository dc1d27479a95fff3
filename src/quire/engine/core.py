"""The engine: queues requests, runs steps and returns output deltas. Not thread-safe."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.async_steps import AsyncSteps
from quire.engine.build import build
from quire.engine.input_processor import (
    InputProcessor,
    check_context,
    checked_prompt,
    with_max_tokens,
)
from quire.engine.inspection.request_log import RequestLog, Traces
from quire.engine.kv_export import KVExport
from quire.engine.kv_memory import is_out_of_memory, no_memory_text
from quire.engine.ledger import Ledger, Snapshot
from quire.engine.rank_decisions import RankSampler, digest
from quire.engine.shared_pool import PoolMember
from quire.engine.stats import EngineStats, stats_of
from quire.errors import ConfigError, InvariantError, PolicyError, QuireError, RequestError
from quire.kernels.memory import keep_freed_memory
from quire.kernels.native.sampling import row_sampling
from quire.kv.prefix import PrefixBroadcast
from quire.layout import limits
from quire.layout.eviction import KEEP_ALL
from quire.models.drafted import DraftedDecoder, with_draft
from quire.models.loader import LoadedModel, load_model
from quire.models.tokenizer import undecodable_ids
from quire.offload.prefix_store.prefix_loader import closing, in_flight_bytes
from quire.parallel.lockstep import Alone, Lockstep
from quire.plan.capacity import hidden_state_bytes
from quire.plan.machine import free_host_bytes
from quire.sampling.detokenizer import OutputText
from quire.sampling.grammar_matcher import MaskWorker
from quire.sampling.logits import StepLogits
from quire.sampling.output_processor import OutputProcessor
from quire.sampling.outputs import OutputDelta
from quire.sampling.pooling import StepHidden
from quire.sampling.sampler import Sampler
from quire.sampling.sampling_step import SamplingStep
from quire.scheduler.events import EventLog
from quire.scheduler.eviction_trace import RetainedSets
from quire.scheduler.peaks import need_of
from quire.scheduler.request import KV_MEMORY, TENANT, PlannedFork, Request, make_sequences
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.speculation import parse_speculative
from quire.scheduler.step import StepPlan


class Engine:
    """Continuous batching of requests over one paged KV memory.

    Args:
        model: loaded weights and tokenizer.
        kv: options of the KV memory.
        pool: membership in a shared KV memory (`SharedPool.join`); one thread must then step all
            engines of the pool. None allocates a separate KV memory.
        return_memory: let the C library return freed CPU memory to the system. By default the
            process keeps it if the model runs on a CPU: see `keep_freed_memory`.
        clock: time in seconds, for time stamps.
        events: log of KV events; None: a new log of the default size.
        lockstep: the other ranks of a tensor-parallel model; None: the model has one rank.

    Attributes:
        runner: computes the logits of a step; a wrapper that replaces it observes them.
        decode_graphs: runs decode steps of the runner as CUDA graphs; None without.
        sampling_step: samples tokens from the logits; its sampler can be replaced.
        request_log: timelines of the requests, and recently finished requests.
        kv_export: copies cached prefixes out of the KV memory and into it.

    Raises:
        ConfigError: invalid or conflicting options; raised before the arena is allocated.
    """

    def __init__(  # noqa: PLR0913 - one parameter per option
        self,
        model: LoadedModel,
        kv: KVConfig | None = None,
        schedule: ScheduleConfig | None = None,
        *,
        pool: PoolMember | None = None,
        return_memory: bool = False,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._lockstep = _lockstep_of(model, lockstep, clock)
        model = _with_draft_model(model, schedule or ScheduleConfig())
        if not return_memory and model.decoder.device.type == "cpu":
            keep_freed_memory()
        self.model = model
        self.kv_config = kv = kv or KVConfig()
        self.schedule_config = schedule or ScheduleConfig()
        self.shares_pool = pool is not None
        self._runs_in_thread = False  # True while an `AsyncLLM` steps the engine
        self.events = EventLog(clock) if events is None else events
        self.prefix_events = PrefixBroadcast()
        parts = build(
            model,
            kv,
            self.schedule_config,
            member=pool,
            events=self.events,
            listener=self.prefix_events,
            lockstep=self._lockstep,
        )
        self.pool, self.scheduler, self.times = parts.pool, parts.scheduler, parts.times
        self.runner, self.decode_graphs = parts.runner, parts.graphs
        self.prefix_loader = parts.prefix_loader
        self._closing = closing(self, self.prefix_loader)
        self._clock = clock
        self.input_processor = InputProcessor(
            model, self.pool, self.schedule_config, kv, self._lockstep.now_s, self._held_tokens
        )
        sequence_memory = self.scheduler.sequence_memory
        self.kv_export = KVExport(model, self.pool, sequence_memory, self.input_processor)
        self._traces = Traces()
        self.request_log = RequestLog(self.events, clock)
        self._outputs = OutputProcessor(
            self._open_text, self.scheduler.finish, model.generation.eos_token_ids
        )
        self.sampling_step = self._make_sampling_step()
        self._async = AsyncSteps(self.scheduler, self.sampling_step, enabled=parts.is_async)
        self._masks = MaskWorker()
        self._cancelled: list[Request] = []
        self._unsent: list[OutputDelta] = []  # deltas of a failed step
        in_flight = in_flight_bytes(self.prefix_loader)
        self._ledger = Ledger(
            self.pool.kv.memory, self.requests, self.pool.host, in_flight, self.pool.offload
        )
        self._arrivals = 0
        self.num_steps = self.num_processed_tokens = 0

    def _held_tokens(self) -> int:
        """Tokens of the longest sequence without eviction that the KV memory holds."""
        return self.scheduler.peaks.longest_sequence(self.model.spec.max_positions, KEEP_ALL)

    def _make_sampling_step(self) -> SamplingStep:
        alone, spec = self.schedule_config.batch_invariant, self.model.spec
        eos = self.model.generation.eos_token_ids
        options: dict[str, Any] = {
            "undecodable_ids": undecodable_ids(self.model.tokenizer, spec.vocab_size),
            "native": row_sampling(),
        }
        sampler = Sampler(spec.vocab_size, eos, one_by_one=alone, **options)
        if self._lockstep.size > 1:
            sampler = RankSampler(spec.vocab_size, eos, lockstep=self._lockstep, **options)
        scheduler = self.scheduler
        meter = scheduler.fairness.meter
        changes = scheduler.branch, scheduler.settle
        return SamplingStep(sampler, self._outputs, changes, self._clock, meter)

    @property
    def failure(self) -> QuireError | None:
        return self._lockstep.failure

    @property
    def runs_in_thread(self) -> bool:
        return self._runs_in_thread

    def enter_thread(self) -> None:
        self._runs_in_thread = True

    def leave_thread(self) -> None:
        self._runs_in_thread = False

    # ---- in ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting, a step is in flight, or a delta is pending."""
        if self.scheduler.has_work or self._async.in_flight:
            return True
        return bool(self._cancelled or self._unsent)

    @property
    def num_generated_tokens(self) -> int:
        return self.sampling_step.num_generated_tokens

    def submit(self, generation_request: GenerationRequest) -> str:
        """Queue a request and return its id.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, a prompt longer than the
                context, options that do not fit the model, a salt that is too long or has control
                characters, an eviction rule that the engine does not allow, or an id in use.
            NeverFits: the request needs more KV than the whole pool.
        """
        self._lockstep.call("submit", generation_request)
        arrival = self._arrivals + 1
        sampling = generation_request.sampling or SamplingParams()
        request_id = self._outputs.free_id(
            generation_request.request_id, arrival, sampling.num_sequences
        )
        request = self.input_processor.make(generation_request, request_id, arrival)
        if generation_request.limit_max_tokens:
            request = self._limited(request, generation_request)
        self._refuse_hidden_states(request)
        sequences = make_sequences(request)
        reply = self._outputs.make(request.request_id, request.params, sequences)
        self._arrivals += len(sequences)
        self.scheduler.submit(sequences[0])
        self._traces.follow(sequences)
        self.request_log.open(request.request_id, sequences)
        self._outputs.open(reply)
        return request.request_id

    def _refuse_hidden_states(self, request: Request) -> None:
        """Refuse a prompt whose hidden states between two layers do not fit in CPU memory."""
        prompt_tokens = len(request.prompt_token_ids)
        is_by_layer = self.scheduler.peaks.is_by_layer(need_of(request, prompt_tokens))
        if not is_by_layer or self.model.decoder.device.type != "cpu":
            return  # a GPU refuses the allocation
        needed_bytes = hidden_state_bytes(self.model.spec, prompt_tokens)
        free_bytes = self.model.group.least(free_host_bytes())
        if needed_bytes > free_bytes:
            raise RequestError(
                f"{prompt_tokens} prompt tokens that are evicted after prefill hold "
                f"{needed_bytes:,} B of hidden states between layers, and {free_bytes:,} B of CPU "
                "memory are free; shorten the prompt, lower --kv-memory or set "
                "when=prefill_and_decode in its eviction rule",
                param="prompt",
            )

    def _limited(self, request: Request, requested: GenerationRequest) -> Request:
        """Lower `max_tokens` to the KV memory and its tenant's limit."""
        scheduler = self.scheduler
        peaks, prompt_tokens = scheduler.peaks, len(request.prompt_token_ids)
        width = request.params.num_sequences if request.params.use_beam_search else 1

        def limit(max_tokens: int) -> str:
            # the KV of the last token is never computed
            need = need_of(request, prompt_tokens + max(0, max_tokens - 1))
            counts = peaks.whole_counts(need, width)
            if not peaks.fit_alone(counts):
                return KV_MEMORY
            may_hold = scheduler.fairness.may_hold(request, peaks.num_bytes(counts))
            return "" if may_hold else TENANT

        if not limit(request.params.max_tokens):
            return request
        lengths = range(request.params.max_tokens)
        fitting = bisect_left(lengths, True, key=lambda length: bool(limit(length))) - 1
        # if not one token fits, the request is refused, whatever its max_tokens
        sampling = with_max_tokens(request.params, max(1, fitting))
        made = self.input_processor.make(
            replace(requested, sampling=sampling), request.request_id, request.spec.arrival
        )
        made.spec = replace(made.spec, max_tokens_limit=limit(fitting + 1))
        return made

    def _open_text(self, request: Request) -> OutputText:
        model, prompt = self.model, request.prompt_token_ids
        return OutputText(request.params, model.generation.eos_token_ids, model.tokenizer, prompt)

    def share_publicly(self, token_ids: Sequence[int]) -> None:
        """Share the KV of this prefix among the prompts of all tenants.

        For public system prompts. KV after the prefix is not shared between tenants.
        """
        self._lockstep.call("share_publicly", token_ids)
        check_context(len(token_ids), self.model.spec.max_positions)
        prompt = checked_prompt(token_ids, self.model.spec)
        self.scheduler.sequence_memory.identities.register_public(prompt)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Cancel a request; the next step returns its last delta. Unknown ids are ignored.

        Args:
            request_id: id of the request.
            index: cancel only this output, unless outputs are ranked; None cancels all outputs.
        """
        if self._lockstep.failure is None:
            self._lockstep.call("cancel", request_id, index)
        for number, request in list(self._outputs.unfinished(request_id)):
            if index in (None, number) or request.params.ranked:
                self.scheduler.finish(request, "cancelled")
                self._cancelled.append(request)

    def flush_kv(self) -> None:
        """Write cached prefixes to their tiers, if there are any, and wait for these writes."""
        if self.prefix_loader is not None:
            self.prefix_loader.tier.flush()

    def close(self) -> None:
        """Write cached prefixes to the disk or the shared store, if there is one, and close it.

        Ends the processes of the other ranks.
        """
        self._closing()
        self._lockstep.close()

    # ---- a step --------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """Run one step and return the deltas of its outputs.

        With asynchronous scheduling, the step is launched, and the deltas are those of the step
        before it; see `quire.engine.async_steps`.

        If memory outside the KV pool runs out, the requests of the step end with an error and all
        other requests continue. After any other exception the step can be repeated: its requests
        are recomputed, except a beam search that was exchanging beams, which ends. An engine with
        several ranks ends after any exception.
        """
        if self._lockstep.failure is None:
            self._lockstep.call("step")
        now_s = self._clock()
        deltas, self._unsent = self._unsent, []
        for request in self._cancelled:
            deltas += self._outputs.abort(request, now_s)
        self._cancelled.clear()
        if self._lockstep.failure is not None:
            return self._end_deltas(deltas)
        plan = StepPlan()
        try:
            plan = self._plan(deltas)
            deltas.extend(self._process(plan))  # keeps the deltas before an error
        except BaseException as error:
            if isinstance(error, PolicyError) and self.scheduler.fail_by_layer(plan):
                self.scheduler.roll_back(self._async.abandon(plan))
                self._unsent = deltas  # the next step reports the error, on all ranks
                return []
            if self._lockstep.size > 1:
                self._unsent = deltas
                found = self._lockstep.fail(error)
                if found is not error:
                    raise found from error
                raise
            # KV of the step is incomplete; an error in planning may affect any request
            failed = self.scheduler.roll_back(self._async.abandon(plan))
            if not plan.requests or not is_out_of_memory(error):
                self._unsent = deltas
                raise
            for request in [request for request in failed if request in plan.requests]:
                deltas += self.sampling_step.fail(request, no_memory_text(error))
        self.request_log.note(deltas)
        return deltas

    def _end_deltas(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Return the last deltas of cancelled requests of an engine whose ranks have ended."""
        if self.scheduler.has_work and self._lockstep.failure is not None:
            raise self._lockstep.failure
        self.request_log.note(deltas)
        return deltas

    def _plan(self, deltas: list[OutputDelta]) -> StepPlan:
        started_s, is_ahead = time.perf_counter(), self._async.in_flight
        plan = self._async.plan() if is_ahead else self.scheduler.schedule()
        self.times.scheduled(time.perf_counter() - started_s)
        return plan if is_ahead else self._checked(plan, deltas)

    def _checked(self, plan: StepPlan, deltas: list[OutputDelta]) -> StepPlan:
        """Report failures of planning; return the plan, empty if it has ended requests."""
        for failure in self.scheduler.take_failures():
            deltas += self.sampling_step.fail(failure.request, str(failure.error))
        if any(not request.is_running for request in plan.requests):
            self.scheduler.roll_back(plan)  # a failure ended requests of this plan
            return StepPlan()
        if not (plan.requests or plan.waits or deltas) and self.scheduler.has_work:
            raise InvariantError("requests are running or waiting, but no step can be planned")
        if self._lockstep.size > 1:
            self._lockstep.agree(digest(plan, self.pool.kv.memory))
        return plan

    def _process(self, plan: StepPlan) -> Iterator[OutputDelta]:
        if not (plan.requests or self._async.in_flight):
            return
        results, forks = self._launch(plan) if plan.requests else ([], [])
        yield from self._async.sample(plan, results, forks)

    def _launch(self, plan: StepPlan) -> tuple[list[StepLogits | StepHidden], list[PlannedFork]]:
        """Compute the logits of a step, without waiting for a device; create its forks."""
        started_s = time.perf_counter()
        with self._masks.computed(plan.requests, plan.tokens):
            results = self.runner.run(plan)
        seconds = time.perf_counter() - started_s
        if self.scheduler.proposes:  # ranks with equal times verify equally many proposed tokens
            seconds = self._lockstep.same(lambda: time.perf_counter() - started_s)
        self.scheduler.learn(plan, seconds)
        forks = self.scheduler.note_launched(plan)
        self.times.steps_s += time.perf_counter() - started_s
        self.num_steps += 1
        self.num_processed_tokens += plan.computed_tokens
        return results, forks

    # ---- out -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return stats_of(
            self.pool,
            self.scheduler,
            self.requests(),
            model=self.model,
            num_steps=self.num_steps,
            num_processed_tokens=self.num_processed_tokens,
            num_generated_tokens=self.num_generated_tokens,
            times=replace(self.times),
            tier=None if self.prefix_loader is None else self.prefix_loader.stats,
            graphs=None if self.decode_graphs is None else self.decode_graphs.stats,
            async_scheduling=self._async.stats if self._async.enabled else None,
        )

    def ledger(self) -> Snapshot:
        """The ledger: owner of every byte of KV, as JSON values; see `docs/ledger.md`."""
        return self._ledger.snapshot()

    def eviction_trace(self, request_id: str) -> list[RetainedSets]:
        """Retained tokens of a request after each of its evictions, in order of time.

        Args:
            request_id: id of an unfinished request or of a recently finished request that recorded
                its evictions (`record_evictions`); `request#1` is the second of several outputs.
        """
        return self._traces.of(request_id, self.requests())

    def requests(self) -> list[Request]:
        unfinished = (request for _, request in self._outputs.unfinished())
        return list(dict.fromkeys([*self.scheduler.running, *unfinished]))

    def check(self) -> None:
        """Verify memory accounting and ledger page by page. Slow; for tests and idle engines."""
        (memory := self.pool.kv.memory).check()
        self._ledger.check()
        if not self.has_work and len(memory.live_rows):
            raise InvariantError(f"an idle engine holds rows {memory.live_rows.tolist()}")


def _with_draft_model(model: LoadedModel, schedule: ScheduleConfig) -> LoadedModel:
    """Load the draft model of speculative decoding, if there is one."""
    spec = parse_speculative(schedule.speculative)
    if spec is None or not spec.model or isinstance(model.decoder, DraftedDecoder):
        return model
    if model.group.size > 1:
        raise limits.refused(limits.SPECULATIVE_DRAFT_RANKS)
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    draft = load_model(spec.model, dtype=dtype, device=str(model.decoder.device))
    return with_draft(model, draft)


def _lockstep_of(
    model: LoadedModel, lockstep: Lockstep | None, clock: Callable[[], float]
) -> Lockstep:
    """Return the given lockstep, or that of a model with one rank."""
    found = Alone(clock) if lockstep is None else lockstep
    if found.size != model.group.size:
        raise ConfigError(
            f"expected a lockstep of {model.group.size} ranks, as the model has, got "
            f"{found.size}; open the model with LLM(..., tensor_parallel_size=...)"
        )
    return found
