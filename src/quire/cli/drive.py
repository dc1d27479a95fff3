"""Runs a stream of jobs through an engine, with a bounded number of submitted requests.

Imports torch through the engine: commands import this module when they run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.errors import RequestError
from quire.sampling.outputs import OutputBuilder, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientJob:
    """One request to run."""

    key: int  # the caller's number of the job
    request: GenerationRequest
    # a chat in OpenAI's format, instead of the request's prompt
    messages: Sequence[Mapping[str, Any]] | None = None
    part: int = 0  # index of the prompt among the prompts with that number


class Driver:
    """Runs jobs through an engine, with at most `window` submitted; a refused job ends no other."""

    def __init__(self, llm: LLM, *, window: int, on_step: Callable[[], None]) -> None:
        self._llm, self._window, self._on_step = llm, window, on_step
        self._open: dict[str, tuple[ClientJob, OutputBuilder]] = {}

    def run(
        self, jobs: Iterator[ClientJob]
    ) -> Iterator[tuple[ClientJob, RequestOutput | RequestError]]:
        """Yield each job with its output in order of completion; a refused job with its error."""
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

    def _submit(self, job: ClientJob) -> RequestError | None:
        try:
            token_ids = self._encode(job)
            request_id = self._llm.engine.submit(replace(job.request, prompt=token_ids))
        except RequestError as refusal:
            return refusal
        builder = OutputBuilder(request_id, tuple(token_ids), job.request)
        self._open[request_id] = (job, builder)
        return None

    def _encode(self, job: ClientJob) -> list[int]:
        if job.messages is not None:
            return self._llm.encode_chat(job.messages)
        return self._llm.encode(job.request.prompt)

    def _step(self) -> Iterator[tuple[ClientJob, RequestOutput | RequestError]]:
        if not self._open:
            return
        for delta in self._llm.engine.step():
            job, builder = self._open[delta.request_id]
            output = builder.add(delta)
            if output is not None:
                del self._open[delta.request_id]
                yield job, output
        self._on_step()
