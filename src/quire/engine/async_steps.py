"""Asynchronous scheduling: a step is planned and launched before the last step's tokens are read.

    CPU      plan and launch 2 | read 1, outputs of 1 | plan and launch 3 | read 2, outputs of 2 |
    device   step 1 ----------> step 2 -------------------------------> step 3 ----------------->

Decoding rows of step 2 read their input token from the tensor of sampled tokens of step 1. If a
request has ended with step 1, its row in step 2 is discarded. Its pages are freed when step 1 is
read: the device runs operations on KV in the order of their launches. The length of an output is
known before, so that a request at `max_tokens` has no further row.

A step is not planned if it may preempt or evict (see `Scheduler.plan_ahead`): then the tokens are
read first. The tokens of a step are read in the same call if it advances a beam search, scores a
prompt or computes embeddings. If sampling depends on the values of earlier tokens (penalties,
banned sequences, structured outputs), these are read between the launches of the forward and of
sampling.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.engine.pool import KVPool
from quire.engine.shared_pool import PoolMember
from quire.errors import ConfigError
from quire.models.loader import LoadedModel
from quire.sampling.logits import StepLogits
from quire.sampling.outputs import OutputDelta
from quire.sampling.pooling import StepHidden
from quire.sampling.sampling_step import LaunchedStep, SamplingStep
from quire.scheduler.request import PlannedFork, RequestState
from quire.scheduler.schedule_config import CONTINUOUS, ScheduleConfig
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import parse_speculative
from quire.scheduler.step import StepPlan

BEAMS, NO_TOKENS, PROMPT_SCORES = "beam search", "no output tokens", "prompt log-probabilities"
SAMPLER = "another sampler"

Results = Sequence[StepLogits | StepHidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncStats:
    """Counters of asynchronous scheduling since the engine's start."""

    ahead: int = 0  # steps launched before the tokens of the last step were read
    # steps whose tokens were read before the next step was planned, by reason
    waited: Mapping[str, int] = field(default_factory=dict)
    discarded: int = 0  # rows of requests that had ended with the step before


class AsyncSteps:
    """The step in flight: launched, and its tokens not read. If not enabled, none ever is."""

    def __init__(self, scheduler: Scheduler, sampling_step: SamplingStep, *, enabled: bool) -> None:
        self._scheduler, self._sampling_step = scheduler, sampling_step
        self.enabled = enabled
        self._in_flight: LaunchedStep | None = None
        self._next: LaunchedStep | None = None  # launched while `_in_flight` is not read
        self._ahead = self._discarded = 0
        self._waited: Counter[str] = Counter()

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def stats(self) -> AsyncStats:
        return AsyncStats(ahead=self._ahead, waited=dict(self._waited), discarded=self._discarded)

    def plan(self) -> StepPlan:
        """Plan the step after the one in flight; an empty plan if that must be read before."""
        assert self._in_flight is not None
        plan = self._scheduler.plan_ahead(self._in_flight.requests)
        if isinstance(plan, str):
            self._waited[plan] += 1
            return StepPlan()
        plan.pending = self._in_flight.pending
        self._ahead += 1
        return plan

    def sample(
        self, plan: StepPlan, results: Results, forks: Sequence[PlannedFork]
    ) -> Iterator[OutputDelta]:
        """Read the step in flight, and sample the tokens of a step that has been launched.

        The tokens are in flight afterwards, unless they must be read at once.
        """
        reason = self._why_read(plan, results) if self.enabled else None
        is_read = not self.enabled or reason is not None
        is_late = not is_read and any(result.request.params.reads_output for result in results)
        if not (is_read or is_late):
            self._launch(results, forks)
        yield from self._collect()
        self._scheduler.note_inputs(plan)
        self._discarded += sum(r.progress.state is RequestState.FINISHED for r in plan.requests)
        if is_read:
            yield from self._sampling_step.deltas(results, plan.requests, forks)
        elif is_late:
            self._launch(results, forks)
        self._in_flight, self._next = self._next, None
        if reason is not None:
            self._waited[reason] += 1

    def abandon(self, plan: StepPlan) -> StepPlan:
        """Forget the tokens in flight after an error; they are sampled again, and are the same."""
        steps = [step for step in (self._in_flight, self._next) if step is not None]
        requests = list(dict.fromkeys([*plan.requests, *(r for s in steps for r in s.requests)]))
        for request in requests:
            request.progress.num_pending = 0
        self._in_flight = self._next = None
        return StepPlan(requests) if plan.requests else plan

    def _launch(self, results: Results, forks: Sequence[PlannedFork]) -> None:
        """Sample the tokens of a step; those that a further step reads are pending."""
        self._next = self._sampling_step.launch(results, forks)
        for request in () if self._next is None else self._next.requests:
            request.progress.num_pending += (
                request.num_output_tokens + 1 < request.params.max_tokens
            )

    def _collect(self) -> Iterator[OutputDelta]:
        if self._in_flight is None:
            return
        for request in self._in_flight.requests:
            request.progress.num_pending -= request.progress.num_pending > 0
        yield from self._sampling_step.collect(self._in_flight)

    def _why_read(self, plan: StepPlan, results: Results) -> str | None:
        """Why the tokens of a step are read at once; None if they may be in flight."""
        if not all(request.params.max_tokens for request in plan.requests):
            return NO_TOKENS
        for result in results:
            request = result.request
            if request.params.use_beam_search:
                return BEAMS
            scores = request.params.prompt_logprobs is not None
            if scores and result.first_position < len(request.prompt_token_ids):
                return PROMPT_SCORES
        return None if self._sampling_step.can_launch else SAMPLER


def refuse_async(model: LoadedModel, schedule: ScheduleConfig, member: PoolMember | None) -> None:
    """Refuse required asynchronous scheduling that is not possible, before memory is allocated."""
    reason = _why_not_here(model, schedule, member)
    if schedule.async_scheduling and reason is not None:
        raise _refusal(reason)


def is_async(
    model: LoadedModel,
    pool: KVPool,
    schedule: ScheduleConfig,
    member: PoolMember | None,
    *,
    has_tiers: bool,
) -> bool:
    """Whether an engine schedules asynchronously, by its options."""
    reason = _why_not_here(model, schedule, member) or _why_not_with(pool, has_tiers=has_tiers)
    if schedule.async_scheduling and reason is not None:
        raise _refusal(reason)
    wanted = schedule.async_scheduling
    if wanted is None:
        wanted = model.decoder.device.type == "cuda"
    return wanted and reason is None


def _why_not_here(
    model: LoadedModel, schedule: ScheduleConfig, member: PoolMember | None
) -> str | None:
    if member is not None:
        return "the engines of a shared pool preempt requests of each other between steps"
    if model.group.size > 1:
        return f"{model.group.size} ranks agree on the tokens of each step"
    if model.weights is not None:
        return "offloaded weights are transferred in every step"
    options = {
        "--batcher": schedule.batcher != CONTINUOUS,
        "--batch-invariant": schedule.batch_invariant,
        "--high-watermark": schedule.high_watermark < 1,
        "--scale-down-at": schedule.scale_down_at is not None,
        "--tenants": bool(schedule.tenants),
        "--urgent": schedule.urgent is not None,
        "--speculative": parse_speculative(schedule.speculative) is not None,
    }
    used = [name for name, is_used in options.items() if is_used]
    return f"{used[0]} is set, whose decisions need the tokens of the last step" if used else None


def _why_not_with(pool: KVPool, *, has_tiers: bool) -> str | None:
    if pool.offload is not None:
        return "offloaded KV is transferred in every step"
    if has_tiers:
        return "cached prefixes are loaded from a tier between steps"
    if pool.kv.full_precision or pool.kv.promoted:
        return "the KV codec keeps some tokens in full precision"
    return None


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"--async-scheduling is not possible: {reason}; leave it out, or use --no-async-scheduling"
    )
