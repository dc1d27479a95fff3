"""Runs of the same requests with synchronous and with asynchronous scheduling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.sampling.outputs import OutputDelta
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.byte_tokenizer import byte_tokenizer
from support.kv_options import kv_config

END_TOKENS = (7, 19, 31, 43, 55, 67)
"""So many end tokens that random outputs end in their middle."""


def model_with_text(impl: str = "auto", device: str = "cpu") -> LoadedModel:
    """A zoo model with a tokenizer of bytes and end tokens."""
    model = engines.load("llama", device, impl=impl)
    generation = replace(model.generation, eos_token_ids=END_TOKENS)
    return replace(model, tokenizer=byte_tokenizer(), generation=generation)


@dataclass
class Output:
    """What a client gets of one completion; logprobs of the tokens, and of the prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    embedding: Any = None

    def add(self, delta: OutputDelta) -> None:
        """Add a delta."""
        assert self.reason is None, "a delta after the last one"
        self.tokens += delta.token_ids
        self.text += delta.text
        self.reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.error = delta.error
        self.logprobs += [(t.token_id, round(t.logprob, 3), t.rank) for t in delta.logprobs or ()]
        scores = [score for score in delta.prompt_logprobs or () if score is not None]
        self.logprobs += [(s.token_id, round(s.logprob, 3), s.rank) for s in scores]
        if delta.embedding is not None:
            self.embedding = [round(float(value), 3) for value in delta.embedding]


Outputs = dict[tuple[str, int], Output]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests and the options of an engine; `wave` requests are submitted every `steps` steps."""

    prompts: Sequence[list[int]]
    params: Sequence[Mapping[str, object]]
    kv: Mapping[str, object] = field(default_factory=dict)
    schedule: Mapping[str, object] = field(default_factory=dict)
    wave: int = 4
    steps: int = 3

    def engine(self, model: LoadedModel, *, asynchronous: bool) -> Engine:
        """An idle engine."""
        kv = {"memory": "1MiB", "page_tokens": 4} | dict(self.kv)
        schedule = {"max_num_seqs": 6, "admission": "optimistic"} | dict(self.schedule)
        config = ScheduleConfig(async_scheduling=asynchronous, **schedule)
        return Engine(model, kv_config(**kv), config)

    def request(self, number: int) -> GenerationRequest:
        """The request with this number; its id is `r` and the number."""
        options = self.params[number % len(self.params)]
        if not options.get("use_beam_search"):
            options = {"seed": number, **options}
        params = SamplingParams(**options)
        return GenerationRequest(self.prompts[number], params, request_id=f"r{number}")

    def run(self, engine: Engine, before: Callable[[int], None] = lambda _: None) -> Outputs:
        """Run all requests on an idle engine, with its checks; `before` gets the step."""
        outputs: Outputs = {}
        submitted, step = 0, 0
        while submitted < len(self.prompts) or engine.has_work:
            if step % self.steps == 0:
                for number in range(submitted, min(submitted + self.wave, len(self.prompts))):
                    engine.submit(self.request(number))
                    submitted = number + 1
            before(step)
            for delta in engine.step():
                outputs.setdefault((delta.request_id, delta.index), Output()).add(delta)
            engine.check()
            step += 1
        assert not engine.scheduler.running
        return outputs
