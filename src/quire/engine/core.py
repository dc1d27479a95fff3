"""The engine: requests in, deltas out, one step at a time. Single-threaded; its callers are not."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.eviction import Evictor
from quire.engine.outputs import Delta, FinishReason, Usage
from quire.engine.pool import KVPool, build_pool
from quire.engine.request import Request, RequestState
from quire.engine.runner import Runner, StepLogits
from quire.engine.sampler import SampledToken, Sampler, ScoredToken, prompt_logprobs
from quire.engine.sampling_params import SamplingParams
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.scheduler import Scheduler
from quire.engine.stats import EngineStats, request_bytes
from quire.engine.stop_rules import OutputText
from quire.engine.times import StepTimes
from quire.engine.validation import checked_params, checked_prompt
from quire.errors import InvariantError, RequestError
from quire.kv.config import KVConfig
from quire.models.loader import LoadedModel


class Engine:
    """Continuous batching of requests over one paged KV memory.

    Args:
        model: loaded weights and tokenizer.
        kv: the KV memory.
        schedule: steps and queues.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.schedule_config = schedule or ScheduleConfig()
        self.pool: KVPool = build_pool(model, kv or KVConfig(), self.schedule_config)
        eviction = self.pool.eviction
        evictor = Evictor(self.pool.kv, eviction.policy) if eviction.policy else _never
        self.scheduler = Scheduler(
            self.pool.kv.memory, self.schedule_config, eviction.spec, evictor
        )
        self.times = StepTimes()
        self._runner = Runner(model.decoder, self.pool.kv, self.times)
        self._sampler = Sampler(model.spec.vocab_size, model.generation.eos_token_ids)
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._texts: dict[str, OutputText] = {}
        self._scores: dict[str, list[ScoredToken | None]] = {}
        self._cancelled: list[Request] = []
        self._arrivals = 0
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_processed_tokens = 0

    # ---- in ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._cancelled)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request; return its id.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, a prompt over the context,
                options that do not fit the model, or an id that is in use.
            NeverFits: it needs more KV than the whole pool has.
        """
        spec = self.model.spec
        prompt = checked_prompt(prompt_token_ids, spec)
        resolved = checked_params(params or SamplingParams(), len(prompt), self.model)
        self._arrivals += 1
        request_id = request_id or f"request-{self._arrivals}"
        if request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is already running; use another id")
        seed = resolved.seed
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=resolved,
            sampling_seed=random.getrandbits(63) if seed is None else seed,
            priority=priority,
            arrival=self._arrivals,
            rope_regime=self.model.decoder.rope_regime(len(prompt) + resolved.max_tokens),
            arrival_s=self._clock(),
        )
        self.scheduler.submit(request)
        self._requests[request_id] = request
        self._texts[request_id] = OutputText(
            resolved, self.model.generation.eos_token_ids, self.model.tokenizer, prompt
        )
        self._scores[request_id] = [None]
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request now; its last delta comes with the next step. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.state is not RequestState.FINISHED:
            self.scheduler.finish(request)
            self._cancelled.append(request)

    # ---- a step --------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Process one batch of tokens; return what it added to the answers."""
        deltas = [self._aborted(request) for request in self._cancelled]
        self._cancelled.clear()
        started_s = time.perf_counter()
        plan = self.scheduler.schedule()
        self.times.schedule_s += time.perf_counter() - started_s
        for request, error in self.scheduler.failures:
            deltas.append(self._end(request, "error", error=str(error)))
        self.scheduler.failures.clear()
        if not plan.requests:
            if self.scheduler.has_work and not deltas:
                raise InvariantError("requests are running or waiting, but no step can be planned")
            return deltas
        results = self._runner.run(plan)
        self.scheduler.commit(plan)
        self.times.steps_s += time.perf_counter() - started_s
        self.num_steps += 1
        self.num_processed_tokens += sum(plan.tokens)
        deltas += self._score_prompts(results)
        deltas += self._sample(results)
        deltas += self._end_without_tokens(plan.requests)
        return deltas

    def _score_prompts(self, results: list[StepLogits]) -> list[Delta]:
        deltas = []
        for result in results:
            request, num_top = result.request, result.request.params.prompt_logprobs
            scores = self._scores[request.request_id]
            first = result.first_position + 1  # the row of token i scores token i + 1
            if num_top is None or first > len(request.prompt_token_ids):
                continue
            following = request.prompt_token_ids[first : first + len(result.logits)]
            try:
                scored = prompt_logprobs(result.logits[: len(following)], following, num_top)
            except RequestError as error:
                self.scheduler.finish(request)
                deltas.append(self._end(request, "error", error=str(error)))
                continue
            scores[first:] = scored  # a preempted prompt is scored again from its start
        return deltas

    def _sample(self, results: list[StepLogits]) -> list[Delta]:
        ready = [
            result
            for result in results
            if result.request.state is RequestState.RUNNING
            and result.request.num_uncomputed == 0
            and result.request.params.max_tokens
        ]
        if not ready:
            return []
        logits = self._last_rows(ready)
        tokens = self._sampler.sample(logits, [result.request for result in ready])
        return [
            self._add_token(result.request, token)
            for result, token in zip(ready, tokens, strict=True)
        ]

    @staticmethod
    def _last_rows(results: list[StepLogits]) -> Tensor:
        rows = [result.logits[-1:] for result in results]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _add_token(self, request: Request, token: SampledToken) -> Delta:
        now = self._clock()
        if token.error is not None:
            self.scheduler.finish(request)
            return self._end(request, "error", error=token.error)
        if not request.output_token_ids:
            request.first_token_s = now
        request.output_token_ids.append(token.token_id)
        self.num_generated_tokens += 1
        output = self._texts[request.request_id]
        text = output.push(token.token_id)
        logprobs = None if request.params.logprobs is None else (token,)
        if output.ending is None:
            return Delta(
                request_id=request.request_id,
                text=text,
                token_ids=(token.token_id,),
                logprobs=logprobs,
            )
        self.scheduler.finish(request)
        ending = output.ending
        return self._end(
            request,
            ending.finish_reason,
            text=text,
            token_ids=(token.token_id,),
            logprobs=logprobs,
            stop_reason=ending.stop_reason,
        )

    def _end_without_tokens(self, requests: list[Request]) -> list[Delta]:
        """Requests that only wanted their prompt scored."""
        done = [
            r
            for r in requests
            if r.state is RequestState.RUNNING and r.num_uncomputed == 0 and not r.params.max_tokens
        ]
        for request in done:
            self.scheduler.finish(request)
        return [self._end(request, "length") for request in done]

    # ---- out -----------------------------------------------------------------------------------

    def _aborted(self, request: Request) -> Delta:
        return self._end(request, "abort", text=self._texts[request.request_id].abort())

    def _end(self, request: Request, reason: FinishReason, **parts: object) -> Delta:
        request.finish_s = self._clock()
        del self._requests[request.request_id], self._texts[request.request_id]
        scores = self._scores.pop(request.request_id)
        return Delta(
            request_id=request.request_id,
            finish_reason=reason,
            prompt_logprobs=tuple(scores) if request.params.prompt_logprobs is not None else None,
            usage=_usage(request),
            **parts,  # type: ignore[arg-type]
        )

    def stats(self) -> EngineStats:
        """The ledger: who holds how many bytes, and what the engine has done so far."""
        memory, scheduler = self.pool.kv.memory, self.scheduler
        return EngineStats(
            kv_total_bytes=memory.total_bytes,
            kv_used_bytes=memory.used_bytes,
            kv_free_bytes=memory.free_bytes,
            kv_peak_bytes=memory.arena_peak_bytes,
            scratch_peak_bytes=self.pool.kv.backend.peak_scratch_bytes,
            weight_bytes=self.model.weight_bytes,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_processed_tokens=self.num_processed_tokens,
            num_generated_tokens=self.num_generated_tokens,
            times=replace(self.times),
            requests=request_bytes(scheduler.running, memory),
        )

    def check(self) -> None:
        """Prove the memory's bookkeeping; cheap enough for an idle engine.

        Raises:
            InvariantError: it does not add up, or an idle engine still holds pages.
        """
        memory = self.pool.kv.memory
        memory.check()
        if not self.has_work and len(memory.live_rows):
            raise InvariantError(f"an idle engine holds rows {memory.live_rows.tolist()}")


def _usage(request: Request) -> Usage:
    first = request.first_token_s or request.finish_s
    return Usage(
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(request.output_token_ids),
        cached_tokens=0,
        preemptions=request.preemptions,
        kv_peak_bytes=request.kv_peak_bytes,
        first_token_s=first - request.arrival_s,
        total_s=request.finish_s - request.arrival_s,
    )


def _never(request: Request, keep: int) -> None:
    raise InvariantError(f"request {request.request_id}: eviction to {keep} without a policy")
