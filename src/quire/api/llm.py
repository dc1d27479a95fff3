"""The Python entry: prompts in, answers out."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from transformers import PreTrainedTokenizerBase

from quire.api.inputs import as_requests, as_token_ids
from quire.api.threads import CallLock
from quire.config.generation_request import (
    GenerationRequest,
    OptionsOfMany,
    Prompt,
    RequestOptions,
)
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.ledger import Snapshot
from quire.engine.option_effects import refuse_without_effect
from quire.engine.stats import EngineStats
from quire.errors import ConfigError, EngineDead, RequestError
from quire.layout.options import require_type
from quire.models.loader import LoadedModel, load_model
from quire.models.tokenizer import encode_chat, encode_prompt
from quire.offload.weights.placement import ALL_WEIGHTS, place_beyond
from quire.sampling.outputs import OutputBuilder, OutputDelta, RequestOutput
from quire.scheduler.schedule_config import ScheduleConfig

Progress = Callable[[EngineStats, list[OutputDelta]], None]
_Taker = Callable[[OutputDelta], None]


class LLM:
    """A model with a KV memory fixed in bytes.

    Calls from several threads are safe and run one after the other: a call waits until `generate`
    of another thread returns. `AsyncLLM` is the concurrent entry: its requests share the batch.
    Between two pieces of a `stream` any thread may call anything; requests that are open at the
    same time share the batch. Inside a step, in a listener of KV events, only `stats`, `ledger`
    and the encoders may be called.

    Args:
        model: "quire-tiny", a folder in Hugging Face format, a hub name, or a loaded model.
        dtype: auto (as stored), float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        kv: the KV memory: its size, pages, and what stays.
        schedule: how much a step does, how many requests run.
        trust_remote_code: run Python code that the model folder brings.
        verify: compare with Transformers' own attention at load.
        return_memory: give freed host memory back to the system; see `Engine`.
        weights_memory: bytes of the device for weights, a size, or "all": see `place_beyond`.

    Raises:
        ConfigError: options that cannot be; before the KV memory is taken.
        ModelError: a model folder that cannot be read.
    """

    def __init__(  # noqa: PLR0913 - one parameter per option
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "auto",
        device: str = "auto",
        kv: KVConfig | None = None,
        schedule: ScheduleConfig | None = None,
        trust_remote_code: bool = False,
        verify: bool = True,
        return_memory: bool = False,
        weights_memory: int | str | None = ALL_WEIGHTS,
    ) -> None:
        require_type("kv", kv, KVConfig, type(None))
        require_type("schedule", schedule, ScheduleConfig, type(None))
        refuse_without_effect(kv or KVConfig())
        if not isinstance(model, LoadedModel):
            require_type("model", model, str, Path)
            require_type("dtype", dtype, str)
            require_type("device", device, str)
            model = load_model(
                model,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                verify=verify,
                placer=place_beyond(weights_memory),
            )
        elif weights_memory not in (ALL_WEIGHTS, None):
            raise ConfigError(
                "a loaded model has its weights where they are: give weights_memory with the "
                "folder or name of a model"
            )
        self.model = model
        self.engine = Engine(model, kv, schedule, return_memory=return_memory)
        self._takers: dict[str, _Taker] = {}  # of the open requests, by request id
        self._calls = CallLock(self._cancel)
        self._is_closed = False

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as the model's tokenizer reads it, or ids as they are.

        Raises:
            RequestError: text for a model without a tokenizer, or neither text nor a list.
        """
        return self._encode(prompt)

    def _encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return encode_prompt(self._tokenizer(), prompt)
        return as_token_ids(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template.

        Raises:
            RequestError: the model has no chat template, or it refuses these messages.
        """
        return encode_chat(self._tokenizer(), messages)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.model.tokenizer is None:
            raise RequestError(f"{self.model.name} has no tokenizer: give prompts as token ids")
        return self.model.tokenizer

    def context_tokens(self, prompt_tokens: int, evict: str | None = None) -> int:
        """Tokens that a sequence may come to: the model's context, or more where a stream may.

        Args:
            prompt_tokens: of its prompt.
            evict: which tokens stay; None takes `KVConfig.evict`.

        Raises:
            RequestError: a policy this engine does not serve, or that leaves too little.
        """
        return self.engine.input_processor.context_tokens(prompt_tokens, evict)

    def generate(
        self,
        prompts: Prompt | GenerationRequest | Sequence[Prompt | GenerationRequest],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[OptionsOfMany],
    ) -> list[RequestOutput]:
        """Answer prompts, all of them together; answers come in the order of the prompts.

        Args:
            prompts: one or many, each a string, a list of token ids, or a `GenerationRequest`,
                which brings its own options.
            sampling: one for all, or one for each.
            progress: called after every step with the engine's numbers and the step's deltas.
            options: priority, deadline_s, tenant, cache_salt, evict, record_evictions and
                request_id, each one for all or a list with one for each; `GenerationRequest`
                explains them.

        Raises:
            EngineDead: the LLM is closed.
            RequestError: a prompt or its options are wrong; nothing has been run then.
            NeverFits: a prompt needs more KV than the whole pool has.
        """
        requests = as_requests(prompts, sampling, options)
        builders: dict[str, OutputBuilder] = {}
        answers: dict[str, RequestOutput] = {}

        def take(delta: OutputDelta) -> None:
            answer = builders[delta.request_id].add(delta)
            if answer is not None:
                answers[delta.request_id] = answer

        with self._calls.held(), self._withdrawing(builders):
            self._refuse_closed()
            for index, request in enumerate(requests):
                with _named(f"prompt {index}" if len(requests) > 1 else ""):
                    ids = self._encode(request.prompt)
                    request_id = self._submit(replace(request, prompt=ids), take)
                builders[request_id] = OutputBuilder(request_id, tuple(ids), request)
            while len(answers) < len(builders):
                deltas = self._step()
                if progress is not None:
                    progress(self.stats(), deltas)
        return [answers[request_id] for request_id in builders]

    def stream(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[OutputDelta]:
        """Answer one prompt piece by piece. Closing the iterator cancels the request.

        Several streams may be open, and `generate` may be called meanwhile, also inside the loop
        over the pieces: each gets its own. No lock is held between two pieces, so an iterator that
        is left half way blocks no other call. Its request keeps its KV until the iterator is
        closed, which Python does when nothing refers to it any more.

        Args:
            prompt: a string, a list of token ids, or a `GenerationRequest`.
            sampling: options; None takes the defaults.
            options: as for `generate`.

        Raises:
            EngineDead: at the next piece; the LLM is closed.
            RequestError: at the first piece; the prompt or its options are wrong.
        """
        inbox: deque[OutputDelta] = deque()
        [request] = as_requests([prompt], sampling, options)
        request = replace(request, prompt=self._encode(request.prompt))
        request_ids: list[str] = []
        done = False
        with self._withdrawing(request_ids):
            with self._calls.held():
                request_ids.append(self._submit(request, inbox.append))
            while not done:
                while not inbox:
                    self._step_for(inbox)
                delta = inbox.popleft()
                done = delta.is_last
                yield delta

    def stats(self) -> EngineStats:
        """What the engine has done, and who holds how many bytes: cheap enough for every step."""
        with self._calls.reading():
            return self.engine.stats()

    def ledger(self) -> Snapshot:
        """Who holds every byte of KV, as plain JSON values; `docs/ledger.md` explains them."""
        with self._calls.reading():
            return self.engine.ledger()

    def close(self) -> None:
        """End open requests, write cached prefixes to their tier, where there is one, and close it.

        The tier closes by itself when nothing refers to the engine any more, or the process ends.
        `generate`, `stream` and open streams raise `EngineDead` from then on; `stats`, `ledger` and
        the encoders still answer. A second `close` changes nothing.

        Raises:
            RequestError: the call comes from inside a step.
        """
        with self._calls.held():
            with self._calls.changing():
                self._refuse_beside_async()
            self._cancel(list(self._takers))
            self._is_closed = True
            with self._calls.changing():
                self.engine.close()

    def _submit(self, request: GenerationRequest, take: _Taker) -> str:
        self._refuse_closed()
        self._refuse_beside_async()
        with self._calls.changing():
            request_id = self.engine.submit(request)
        self._takers[request_id] = take
        return request_id

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise EngineDead("the LLM is closed and takes no request: make a new LLM of its model")

    def _refuse_beside_async(self) -> None:
        if self.engine.runs_in_thread:
            raise RequestError(
                "the engine of this LLM belongs to an AsyncLLM, which runs it in its own thread: "
                "submit to the AsyncLLM, or close it before this call"
            )

    def _step(self) -> list[OutputDelta]:
        """One step for all open requests, whichever call makes it."""
        self._refuse_closed()
        with self._calls.changing():
            deltas = self.engine.step()
            for delta in deltas:
                take = self._takers.get(delta.request_id)
                if take is None:  # withdrawn
                    continue
                if delta.is_last:
                    del self._takers[delta.request_id]
                take(delta)
        return deltas

    def _step_for(self, inbox: deque[OutputDelta]) -> None:
        """A step, unless the call of another thread has filled the inbox meanwhile."""
        with self._calls.held():
            if not inbox:
                self._step()

    @contextmanager
    def _withdrawing(self, request_ids: Collection[str]) -> Iterator[None]:
        """Cancel at the end those requests that are not done; their last deltas are dropped."""
        try:
            yield
        finally:
            self._calls.withdraw(request_ids)

    def _cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._takers.pop(request_id, None) is not None:
                with self._calls.changing():
                    self.engine.cancel(request_id)
        if not self._takers and self.engine.has_work:
            self._step()  # so that the engine is idle again


@contextmanager
def _named(prompt: str) -> Iterator[None]:
    """Let an error about one prompt of many say which."""
    try:
        yield
    except RequestError as error:
        if not prompt:
            raise
        raise type(error)(f"{prompt}: {error}") from error
