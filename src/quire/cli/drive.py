"""Keeps an engine fed from a stream of jobs: a bounded number is submitted at any time.

Loads torch through the engine: commands import this module when they run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.api.llm import LLM
from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.sampling.outputs import Answer, AnswerBuilder

OnStep = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to be run.

    Attributes:
        key: the caller's number of it.
        part: which of the caller's prompts under that number.
        prompt: text or token ids; None when there are messages.
        messages: a chat, each {"role", "content"}; None when there is a prompt.
        params: how it samples.
        evict: which of its tokens stay; None takes the engine's rule.
        record_evictions: keep which tokens leave.
        cache_salt: only jobs with the same one share KV.
        priority: lower goes first.
        deadline_s: seconds from its submission in which its answer is wanted.
    """

    key: int
    params: SamplingParams
    evict: str | None = None
    record_evictions: bool | None = None
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    part: int = 0


class Driver:
    """Runs jobs through an engine, `window` of them submitted at most.

    Args:
        llm: idle; its engine is used directly, so that one refused job stops no other.
        window: jobs submitted and not yet answered, at most.
        on_step: called after every step of the engine.
    """

    def __init__(self, llm: LLM, *, window: int, on_step: OnStep) -> None:
        self._llm, self._window, self._on_step = llm, window, on_step
        self._open: dict[str, tuple[Job, AnswerBuilder]] = {}

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Answer | RequestError]]:
        """Answer jobs as they finish, in no order; a refused one comes with its refusal."""
        exhausted = False
        while self._open or not exhausted:
            while not exhausted and len(self._open) < self._window:
                job = next(jobs, None)
                if job is None:
                    exhausted = True
                    continue
                refusal = self._submit(job)
                if refusal is not None:
                    yield job, refusal
            yield from self._step()

    def _submit(self, job: Job) -> RequestError | None:
        try:
            token_ids = self._encode(job)
            request_id = self._llm.engine.submit(
                token_ids,
                job.params,
                evict=job.evict,
                record_evictions=job.record_evictions,
                cache_salt=job.cache_salt,
                priority=job.priority,
                deadline_s=job.deadline_s,
            )
        except RequestError as refusal:
            return refusal
        self._open[request_id] = (job, AnswerBuilder(request_id, tuple(token_ids)))
        return None

    def _encode(self, job: Job) -> list[int]:
        if job.messages is not None:
            return self._llm.encode_chat(job.messages)
        assert job.prompt is not None, "a job has a prompt or messages"
        return self._llm.encode(job.prompt)

    def _step(self) -> Iterator[tuple[Job, Answer | RequestError]]:
        if not self._open:
            return
        for delta in self._llm.engine.step():
            job, builder = self._open[delta.request_id]
            answer = builder.add(delta)
            if answer is not None:
                del self._open[delta.request_id]
                yield job, answer
        self._on_step()
