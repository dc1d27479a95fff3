"""The engine: requests in, deltas out, one step at a time. Single-threaded; its callers are not."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.activation import is_out_of_memory, no_memory_text
from quire.engine.build import build
from quire.engine.host_memory import keep_freed_memory
from quire.engine.input_processor import InputProcessor, check_context, checked_prompt
from quire.engine.ledger import Ledger, Snapshot
from quire.engine.shared_pool import PoolMember
from quire.engine.stats import EngineStats, stats_of
from quire.errors import InvariantError
from quire.eviction.traces import Traces
from quire.kv.prefix_blocks import PrefixBroadcast
from quire.models.loader import LoadedModel
from quire.offload.prefix_store.prefix_loader import closing, in_flight_bytes
from quire.sampling.output_processor import OutputProcessor
from quire.sampling.outputs import OutputDelta
from quire.sampling.sampler import Sampler
from quire.sampling.sampling_step import SamplingStep
from quire.sampling.stop_rules import OutputText
from quire.scheduler.events import EventLog
from quire.scheduler.eviction_trace import RetainedSets
from quire.scheduler.group import make_sequences
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step import StepPlan


class Engine:
    """Continuous batching of requests over one paged KV memory.

    Args:
        model: loaded weights and tokenizer.
        kv: the KV memory.
        schedule: steps and queues.
        pool: a place in a KV memory that several engines share (`SharedPool.join`); the engines
            are then stepped by one thread. None takes a memory of its own.
        return_memory: let the C library give freed host memory back to the system. By default a
            model on a CPU keeps it, for the whole process: see `keep_freed_memory`.
        clock: seconds, for time stamps.

    Raises:
        ConfigError: options that cannot be; raised before the arena is allocated.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVConfig | None = None,
        schedule: ScheduleConfig | None = None,
        *,
        pool: PoolMember | None = None,
        return_memory: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not return_memory and model.decoder.device.type == "cpu":
            keep_freed_memory()
        self.model = model
        self.schedule_config = schedule or ScheduleConfig()
        self.shares_pool = pool is not None
        self._runs_in_thread = False  # while an `AsyncLLM` has it
        kv = kv or KVConfig()
        self.events = EventLog(clock)
        self.prefix_events = PrefixBroadcast()
        parts = build(
            model,
            kv,
            self.schedule_config,
            member=pool,
            events=self.events,
            listener=self.prefix_events,
        )
        self.pool, self.scheduler, self.times = parts.pool, parts.scheduler, parts.times
        self._runner = parts.runner
        self.prefix_loader = parts.prefix_loader
        self._closing = closing(self, self.prefix_loader)
        self._clock = clock
        layout, rules = self.pool.kv.memory.layout, self.pool.rules
        self.input_processor = InputProcessor(model, rules, layout, self.schedule_config, kv, clock)
        self._traces = Traces()
        self._outputs = OutputProcessor(
            self._open_text, self.scheduler.finish, model.generation.eos_token_ids
        )
        self._sampling_step = self._make_sampling_step()
        self._cancelled: list[Request] = []
        self._unsent: list[OutputDelta] = []  # of a step that failed
        in_flight = in_flight_bytes(self.prefix_loader)
        self._ledger = Ledger(
            self.pool.kv.memory, self._requests, self.pool.host, in_flight, self.pool.offload
        )
        self._arrivals = 0
        self.num_steps = self.num_processed_tokens = 0

    def _make_sampling_step(self) -> SamplingStep:
        alone, spec = self.schedule_config.batch_invariant, self.model.spec
        sampler = Sampler(spec.vocab_size, self.model.generation.eos_token_ids, one_by_one=alone)
        return SamplingStep(sampler, self._outputs, self.scheduler.branch, self._clock)

    @property
    def runs_in_thread(self) -> bool:
        """Whether an `AsyncLLM` steps it in its own thread."""
        return self._runs_in_thread

    def enter_thread(self) -> None:
        """Note that an `AsyncLLM` steps it from now on."""
        self._runs_in_thread = True

    def leave_thread(self) -> None:
        """Note that nothing else steps it any more."""
        self._runs_in_thread = False

    # ---- in ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._cancelled or self._unsent)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of answers chosen since the start."""
        return self._sampling_step.num_generated_tokens

    def submit(self, generation_request: GenerationRequest) -> str:
        """Queue a request; return its id.

        Args:
            generation_request: its prompt is a list of token ids.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, a prompt over the context,
                options that do not fit the model, a salt that is too long or has control
                characters, an eviction rule this engine was not started for, or an id in use.
            NeverFits: it needs more KV than the whole pool has.
        """
        arrival = self._arrivals + 1
        sampling = generation_request.sampling or SamplingParams()
        request_id = self._outputs.free_id(
            generation_request.request_id, arrival, sampling.num_sequences
        )
        request = self.input_processor.make(generation_request, request_id, arrival)
        sequences = make_sequences(request)
        reply = self._outputs.make(request.request_id, request.params, sequences)
        self._arrivals += len(sequences)
        self.scheduler.submit(sequences[0])
        self._traces.follow(sequences)
        self._outputs.open(reply)
        return request.request_id

    def _open_text(self, request: Request) -> OutputText:
        model, prompt = self.model, request.prompt_token_ids
        return OutputText(request.params, model.generation.eos_token_ids, model.tokenizer, prompt)

    def share_publicly(self, token_ids: Sequence[int]) -> None:
        """Let all tenants share the KV of these tokens where their prompts begin with them.

        For system prompts that everybody may know of; what follows them stays each tenant's own.
        """
        check_context(len(token_ids), self.model.spec.max_positions)
        prompt = checked_prompt(token_ids, self.model.spec)
        self.scheduler.sequence_memory.sharing.identities.register_public(prompt)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request now; its last delta comes with the next step. Unknown ids are ignored.

        Args:
            request_id: of the submission.
            index: end only this one of its answers, where they are not ranked; None ends all.
        """
        for number, request in list(self._outputs.unfinished(request_id)):
            if index in (None, number) or request.params.ranked:
                self.scheduler.finish(request, "cancelled")
                self._cancelled.append(request)

    def close(self) -> None:
        """Write cached prefixes to their tier and let it go; without one there is nothing to do."""
        self._closing()

    # ---- a step --------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """Process one batch of tokens; return what it added to the answers.

        Where the memory outside of the pool runs out, the requests of the step end with an error
        and the others go on. After any other exception the step can be tried again: the requests
        it was about are read anew, except a search whose beams were being exchanged, which ends.
        """
        now_s = self._clock()
        deltas, self._unsent = self._unsent, []
        for request in self._cancelled:
            deltas += self._outputs.abort(request, now_s)
        self._cancelled.clear()
        plan = StepPlan()
        try:
            plan = self._schedule(deltas)
            deltas.extend(self._process(plan))  # keeps what came before an error
        except BaseException as error:
            # their KV is half written; while a step is being planned that may be anybody's
            failed = self.scheduler.roll_back(plan)
            if not plan.requests or not is_out_of_memory(error):
                self._unsent = deltas
                raise
            for request in failed:
                deltas += self._sampling_step.fail(request, no_memory_text(error))
        return deltas

    def _schedule(self, deltas: list[OutputDelta]) -> StepPlan:
        started_s = time.perf_counter()
        plan = self.scheduler.schedule()
        self.times.scheduled(time.perf_counter() - started_s)
        for failure in self.scheduler.take_failures():
            deltas += self._sampling_step.fail(failure.request, str(failure.error))
        if any(not request.is_running for request in plan.requests):
            self.scheduler.roll_back(plan)  # with who failed went others that were planned
            return StepPlan()
        if not (plan.requests or plan.waits or deltas) and self.scheduler.has_work:
            raise InvariantError("requests are running or waiting, but no step can be planned")
        return plan

    def _process(self, plan: StepPlan) -> Iterator[OutputDelta]:
        if not plan.requests:
            return
        started_s = time.perf_counter()
        results = self._runner.run(plan)
        self.scheduler.learn(plan, time.perf_counter() - started_s)
        copies = self.scheduler.commit(plan)
        self.times.steps_s += time.perf_counter() - started_s
        self.num_steps += 1
        self.num_processed_tokens += sum(plan.tokens)
        yield from self._sampling_step.deltas(results, plan.requests, copies)

    # ---- out -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The ledger: who holds how many bytes, and what the engine has done so far."""
        return stats_of(
            self.pool,
            self.scheduler,
            self._requests(),
            model=self.model,
            num_steps=self.num_steps,
            num_processed_tokens=self.num_processed_tokens,
            num_generated_tokens=self.num_generated_tokens,
            times=replace(self.times),
            tier=None if self.prefix_loader is None else self.prefix_loader.stats,
        )

    def ledger(self) -> Snapshot:
        """Who holds every byte of KV, as plain JSON values; `docs/ledger.md` explains them."""
        return self._ledger.snapshot()

    def eviction_trace(self, request_id: str) -> list[RetainedSets]:
        """What stayed of a request's tokens after each of its evictions, the first one first.

        Args:
            request_id: of a request that is not done, or of one of the last that were recorded
                (`record_evictions`); `request#1` is the second of several answers.

        Raises:
            RequestError: no such request is remembered.
        """
        return self._traces.of(request_id, self._requests())

    def _requests(self) -> list[Request]:
        """All requests that have not ended."""
        unfinished = (request for _, request in self._outputs.unfinished())
        return list(dict.fromkeys([*self.scheduler.running, *unfinished]))

    def check(self) -> None:
        """Prove the books of memory and ledger, page by page: for tests, and for an idle engine.

        Raises:
            InvariantError: it does not add up, or an idle engine still holds pages.
        """
        (memory := self.pool.kv.memory).check()
        self._ledger.check()
        if not self.has_work and len(memory.live_rows):
            raise InvariantError(f"an idle engine holds rows {memory.live_rows.tolist()}")
