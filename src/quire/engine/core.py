"""The engine: requests in, deltas out, one step at a time. Single-threaded; its callers are not."""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.events import EventLog
from quire.engine.host_memory import keep_freed_memory
from quire.engine.ledger import Ledger, Snapshot
from quire.engine.make_scheduler import make_scheduler
from quire.engine.open_answer import OpenAnswer
from quire.engine.out_of_memory import is_out_of_memory, no_memory_text
from quire.engine.outputs import Delta
from quire.engine.pool import KVPool, build_pool
from quire.engine.request import DEFAULT_TENANT, Request, RequestState
from quire.engine.runner import Runner, StepLogits
from quire.engine.sampler import Sampler, prompt_logprobs
from quire.engine.sampling_params import SamplingParams
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.shared_pool import PoolMember
from quire.engine.stats import EngineStats, memory_numbers, request_bytes, tenant_bytes
from quire.engine.step_plan import StepPlan
from quire.engine.stop_rules import OutputText
from quire.engine.times import StepTimes
from quire.engine.validation import checked_params, checked_prompt, checked_salt
from quire.errors import InvariantError, RequestError
from quire.kv.config import KVConfig
from quire.kv.prefix_events import PrefixBroadcast
from quire.models.loader import LoadedModel


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
        kv = kv or KVConfig()
        self.pool: KVPool = build_pool(model, kv, self.schedule_config, pool)
        self.events = EventLog(clock)
        self.prefix_events = PrefixBroadcast()
        self.scheduler = make_scheduler(
            self.pool,
            kv,
            self.schedule_config,
            model_name=model.name,
            events=self.events,
            listener=self.prefix_events,
        )
        self.shares_pool = pool is not None
        if pool is not None:
            pool.arena.give_way = self.scheduler.give_way
        self.times = StepTimes()
        self._runner = Runner(model.decoder, self.pool.kv, self.times)
        self._sampler = Sampler(model.spec.vocab_size, model.generation.eos_token_ids)
        self._clock = clock
        self._open: dict[str, OpenAnswer] = {}
        self._cancelled: list[Request] = []
        self._unsent: list[Delta] = []  # of a step that failed
        self._ledger = Ledger(self.pool.kv.memory, self._requests, self.pool.host)
        self._arrivals = 0
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_processed_tokens = 0

    # ---- in ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._cancelled or self._unsent)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        cache_salt: str = "",
    ) -> str:
        """Queue a request; return its id.

        Args:
            prompt_token_ids: at least one.
            params: sampling options.
            request_id: of the caller's choice; None for one of ours.
            priority: lower goes first, within its tenant.
            tenant: on whose account.
            cache_salt: only requests of the same tenant and salt share this prompt's KV.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, a prompt over the context,
                options that do not fit the model, a salt that is too long or has control
                characters, or an id that is in use.
            NeverFits: it needs more KV than the whole pool has.
        """
        spec = self.model.spec
        prompt = checked_prompt(prompt_token_ids, spec)
        resolved = checked_params(params or SamplingParams(), len(prompt), self.model)
        cache_salt = checked_salt(cache_salt)
        self._arrivals += 1
        if request_id is None:
            request_id = self._free_id()
        elif request_id in self._open:
            raise RequestError(f"a request {request_id!r} is already running; use another id")
        seed = resolved.seed
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=resolved,
            sampling_seed=random.getrandbits(63) if seed is None else seed,
            priority=priority,
            arrival=self._arrivals,
            tenant=tenant,
            cache_salt=cache_salt,
            rope_regime=self.model.decoder.rope_regime(len(prompt) + resolved.max_tokens),
            arrival_s=self._clock(),
        )
        eos_token_ids = self.model.generation.eos_token_ids
        text = OutputText(resolved, eos_token_ids, self.model.tokenizer, prompt)
        self.scheduler.submit(request)
        self._open[request_id] = OpenAnswer(request, text, self.scheduler.finish)
        return request_id

    def share_publicly(self, token_ids: Sequence[int]) -> None:
        """Let all tenants share the KV of these tokens where their prompts begin with them.

        For system prompts that everybody may know of; what follows them stays each tenant's own.
        """
        self.scheduler.residency.identities.register_public(
            checked_prompt(token_ids, self.model.spec)
        )

    def _free_id(self) -> str:
        ids = (f"request-{number}" for number in itertools.count(self._arrivals))
        return next(request_id for request_id in ids if request_id not in self._open)

    def cancel(self, request_id: str) -> None:
        """End a request now; its last delta comes with the next step. Unknown ids are ignored."""
        answer = self._open.get(request_id)
        if answer is not None and answer.request.state is not RequestState.FINISHED:
            self.scheduler.finish(answer.request)
            self._cancelled.append(answer.request)

    # ---- a step --------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Process one batch of tokens; return what it added to the answers.

        Where the memory outside of the pool runs out, the requests of the step end with an error
        and the others go on. After any other exception the step can be tried again: the requests
        it was about are read anew.
        """
        now_s = self._clock()
        deltas, self._unsent = self._unsent, []
        deltas += [self._open.pop(r.request_id).abort(now_s) for r in self._cancelled]
        self._cancelled.clear()
        plan = StepPlan()
        try:
            plan = self._schedule(deltas)
            deltas.extend(self._process(plan))  # keeps what came before an error
        except BaseException as error:
            # their KV is half written; while a step is being planned that may be anybody's
            failed = self.scheduler.take_back(plan)
            if not plan.requests or not is_out_of_memory(error):
                self._unsent = deltas
                raise
            deltas += [self._fail(request, no_memory_text(error)) for request in failed]
        return deltas

    def _schedule(self, deltas: list[Delta]) -> StepPlan:
        started_s = time.perf_counter()
        plan = self.scheduler.schedule()
        took_s = time.perf_counter() - started_s
        self.times.schedule_s += took_s
        self.times.steps_s += took_s
        for request, error in self.scheduler.failures:
            deltas.append(self._fail(request, str(error)))
        self.scheduler.failures.clear()
        if not plan.requests and self.scheduler.has_work and not deltas:
            raise InvariantError("requests are running or waiting, but no step can be planned")
        return plan

    def _process(self, plan: StepPlan) -> Iterator[Delta]:
        if not plan.requests:
            return
        started_s = time.perf_counter()
        results = self._runner.run(plan)
        self.scheduler.commit(plan)
        self.times.steps_s += time.perf_counter() - started_s
        self.num_steps += 1
        self.num_processed_tokens += sum(plan.tokens)
        yield from self._score_prompts(results)
        yield from self._sample(results)
        yield from self._end_without_tokens(plan.requests)

    def _score_prompts(self, results: list[StepLogits]) -> Iterator[Delta]:
        for result in results:
            request, num_top = result.request, result.request.params.prompt_logprobs
            first = result.first_position + 1  # the row of token i scores token i + 1
            if num_top is None or first > len(request.prompt_token_ids):
                continue
            following = request.prompt_token_ids[first : first + len(result.logits)]
            try:
                scored = prompt_logprobs(result.logits[: len(following)], following, num_top)
            except RequestError as error:
                yield self._fail(request, str(error))
                continue
            self._open[request.request_id].add_scores(first, scored)

    def _sample(self, results: list[StepLogits]) -> Iterator[Delta]:
        ready = [
            result
            for result in results
            if result.request.state is RequestState.RUNNING
            and result.request.num_uncomputed == 0
            and result.request.params.max_tokens
        ]
        if not ready:
            return
        logits = self._last_rows(ready)
        tokens = self._sampler.sample(logits, [result.request for result in ready])
        now_s = self._clock()
        for result, token in zip(ready, tokens, strict=True):
            self.num_generated_tokens += token.error is None
            delta = self._open[result.request.request_id].add_token(token, now_s)
            if delta.finish_reason is not None:
                del self._open[delta.request_id]
            yield delta

    @staticmethod
    def _last_rows(results: list[StepLogits]) -> Tensor:
        rows = [result.logits[-1:] for result in results]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _end_without_tokens(self, requests: list[Request]) -> Iterator[Delta]:
        """Requests that only wanted their prompt scored."""
        for request in requests:
            running = request.state is RequestState.RUNNING
            if running and request.num_uncomputed == 0 and not request.params.max_tokens:
                yield self._open.pop(request.request_id).end("length", self._clock())

    # ---- out -----------------------------------------------------------------------------------

    def _fail(self, request: Request, error: str) -> Delta:
        return self._open.pop(request.request_id).end("error", self._clock(), error=error)

    def stats(self) -> EngineStats:
        """The ledger: who holds how many bytes, and what the engine has done so far."""
        memory, scheduler = self.pool.kv.memory, self.scheduler
        return EngineStats(
            **memory_numbers(memory),
            scratch_peak_bytes=self.pool.kv.backend.peak_scratch_bytes,
            weight_bytes=self.model.weight_bytes,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_processed_tokens=self.num_processed_tokens,
            num_generated_tokens=self.num_generated_tokens,
            times=replace(self.times),
            requests=(held := request_bytes(scheduler.running, memory)),
            tenants=tenant_bytes(self._requests(), held),
            host_bytes=self.pool.host.used_bytes if self.pool.host else 0,
        )

    def ledger(self) -> Snapshot:
        """Who holds every byte of KV, as plain JSON values; `docs/ledger.md` explains them."""
        return self._ledger.snapshot()

    def _requests(self) -> list[Request]:
        """All requests that have not ended."""
        queued = (a.request for a in self._open.values())
        open_ = (r for r in queued if r.state is not RequestState.FINISHED)
        return list(dict.fromkeys([*self.scheduler.running, *open_]))

    def check(self) -> None:
        """Prove the memory's bookkeeping; cheap enough for an idle engine.

        Raises:
            InvariantError: it does not add up, or an idle engine still holds pages.
        """
        memory = self.pool.kv.memory
        memory.check()
        if not self.has_work and len(memory.live_rows):
            raise InvariantError(f"an idle engine holds rows {memory.live_rows.tolist()}")
