"""Synchronous Python entry point.

Checks of its arguments take `object`, because the types of the arguments are what they check.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quire.config.chat_messages import ContentFormat
from quire.config.generation_request import (
    DEFAULT_TENANT,
    OPTION_KINDS,
    GenerationRequest,
    OptionsOfMany,
    Prompt,
    RequestOptions,
    checked_option,
)
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import Pooling, SamplingParams
from quire.config.structured_outputs import StructuredOutputs
from quire.engine.core import Engine
from quire.engine.kv_export import ExportedKV
from quire.engine.ledger import Snapshot
from quire.engine.ranks import RankOptions, open_ranks
from quire.engine.stats import EngineStats
from quire.errors import ConfigError, EngineDead, QuireError, RequestError
from quire.eviction.eviction_rules import check_rules
from quire.layout import limits
from quire.layout.config import shown
from quire.layout.options import require_choice, require_type
from quire.models.chat_template import NO_KWARGS, ChatOptions, ChatTemplate
from quire.models.loader import LoadedModel, load_model
from quire.models.tokenizer import encode_prompt
from quire.models.wrapped import loaded_model, wrap_model
from quire.offload.prefix_store.prefix_kv import PrefixKV, read_file, write_file
from quire.offload.weights.placement import ALL_WEIGHTS, place_beyond
from quire.parallel.lockstep import DEFAULT_TIMEOUT_S
from quire.policies.registry import load_policy_file
from quire.sampling.outputs import OutputBuilder, OutputDelta, RequestOutput, Usage
from quire.sampling.pooling import model_pooling, normalized
from quire.scheduler.schedule_config import ScheduleConfig


class CallLock:
    """Serializes the calls of several threads, and refuses calls from inside a step.

    The lock is reentrant. Withdrawing requests does not wait for the lock, because Python may close
    an abandoned generator in any thread at any time, also inside a step. The thread that holds the
    lock then cancels these requests when its step or call ends.
    """

    def __init__(self, cancel: Callable[[list[str]], None]) -> None:
        self._cancel = cancel
        self._lock = threading.RLock()
        self._in_use = False
        self._withdrawn: deque[str] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, after the calls of other threads have ended."""
        try:
            with self._lock:
                yield
        finally:
            self._cancel_withdrawn()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock for reading the engine's state; allowed in a listener inside a step."""
        with self.held():
            before, self._in_use = self._in_use, True
            try:
                yield
            finally:
                self._in_use = before

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark a change of the engine, such as a step; the caller holds the lock.

        Raises:
            RequestError: the call comes from inside another change.
        """
        if self._in_use:
            raise RequestError(
                "expected a call between two steps, got one from inside a step, such as by a "
                "listener of KV events: save the event and call generate, stream or close later"
            )
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False

    def withdraw(self, request_ids: Iterable[str]) -> None:
        self._withdrawn.extend(request_ids)
        self._cancel_withdrawn()

    def _cancel_withdrawn(self) -> None:
        while self._withdrawn and self._lock.acquire(blocking=False):
            try:
                if self._in_use:  # by this thread, which retries when its call ends
                    return
                self._cancel(list(self._taken()))
            finally:
                self._lock.release()

    def _taken(self) -> Iterator[str]:
        """Remove and yield the withdrawn ids; safe if this thread withdraws more meanwhile."""
        with suppress(IndexError):
            while True:
                yield self._withdrawn.popleft()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """A function to run in the engine's thread, and the future for its result."""

    work: Callable[[], T]
    future: "Future[T]"

    def run(self) -> None:
        """Run the function and set the future; errors other than `QuireError` are also raised."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except QuireError as error:  # only the caller handles it
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)

    def refuse(self, error: EngineDead) -> None:
        """Set the future to an error without running the function."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def as_prompts(prompts: object) -> list[object]:
    """Return one or several prompts as a list; `as_token_ids` refuses invalid ones later."""
    if isinstance(prompts, str | bytes | Mapping | GenerationRequest) or not isinstance(
        prompts, Iterable
    ):
        return [prompts]
    many = list(prompts)
    return [many] if many and isinstance(many[0], Integral) else many


def as_token_ids(prompt: object) -> list[int]:
    """Return a prompt of token ids as a list."""
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"expected a prompt (a text or a list of token ids), got {type(prompt).__name__}"
            + _hint(prompt)
        )
    if any(isinstance(part, str) for part in prompt[:1]):
        raise RequestError(
            "expected one prompt (a text or a list of token ids), got a list of texts; only "
            "LLM.generate takes several prompts"
        )
    return list(prompt)


def as_options(sampling: object, count: int) -> list[SamplingParams | None]:
    """Return sampling options for each of `count` prompts; None if unset."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    given = sampling if isinstance(sampling, Sequence) else [sampling]
    options: list[SamplingParams | None] = []
    for params in given:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"expected SamplingParams, got {type(params).__name__}; "
                "write SamplingParams(max_tokens=16)"
            )
        options.append(params)
    if len(options) != count:
        raise RequestError(f"expected one SamplingParams or {count} of them, got {len(options)}")
    return options


def as_requests(
    prompts: object, sampling: object, options: Mapping[str, object]
) -> list[GenerationRequest]:
    """Create one request per prompt."""
    many = as_prompts(prompts)
    params = as_options(sampling, len(many))
    spread = {name: _one_for_each(name, value, len(many)) for name, value in options.items()}
    return [
        _as_request(prompt, own, {name: values[i] for name, values in spread.items()})
        for i, (prompt, own) in enumerate(zip(many, params, strict=True))
    ]


def structures_of(requests: Iterable[GenerationRequest]) -> set[StructuredOutputs]:
    """The structured outputs of requests, each once."""
    options = (request.sampling for request in requests if request.sampling is not None)
    found = (sampling.structured_outputs for sampling in options)
    return {structure for structure in found if structure is not None}


def _as_request(
    prompt: Any, sampling: SamplingParams | None, options: dict[str, Any]
) -> GenerationRequest:
    if not isinstance(prompt, GenerationRequest):
        # an invalid prompt is refused when it is encoded
        return GenerationRequest(prompt, sampling, **options)
    if sampling is not None or options:
        given = ", ".join(["sampling"] * (sampling is not None) + list(options))
        raise RequestError(
            f"a GenerationRequest has its own options, got {given} in addition: set them in the "
            "request"
        )
    return prompt


def _one_for_each(name: str, given: object, count: int) -> list[object]:
    if name not in OPTION_KINDS:
        raise RequestError(
            f"unknown request option {name!r}: expected one of {', '.join(OPTION_KINDS)}"
        )
    many = [given] * count
    if isinstance(given, Sequence) and not isinstance(given, str):
        many = list(given)
    if len(many) != count:
        raise RequestError(f"expected one {name} or {count} of them, got {len(many)}", param=name)
    return [checked_option(name, value) for value in many]


def _hint(prompt: object) -> str:
    if isinstance(prompt, bytes | bytearray):
        return "; decode it"
    return "; pass prompt.tolist()" if hasattr(prompt, "tolist") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The embedding of a prompt.

    Attributes:
        request_id: id of the request.
        prompt_token_ids: the prompt.
        embedding: float32 values; None after an error.
        error: error message; None if the embedding was computed.
        usage: resources of the request.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    embedding: tuple[float, ...] | None
    error: str | None
    usage: Usage


Conversation = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's format, oldest first."""


def as_conversations(messages: object) -> list[Conversation]:
    """One or several conversations as a list."""
    if isinstance(messages, list | tuple) and messages:
        if all(isinstance(one, Mapping) for one in messages):
            return [messages]
        if all(isinstance(one, list | tuple) for one in messages):
            return list(messages)
    raise RequestError(
        'expected messages such as [{"role": "user", "content": "Hello"}], or a list of such '
        f"conversations, got {shown(str(messages))}"
    )


def embedding_params(model: LoadedModel, pooling: Pooling | None = None) -> SamplingParams:
    """Sampling parameters of a request for an embedding."""
    chosen = model_pooling(model.folder) if pooling is None else pooling
    return SamplingParams(max_tokens=0, pooling=chosen)


def embedding_output(output: RequestOutput, *, normalize: bool) -> EmbeddingOutput:
    """The embedding of a complete output, with a Euclidean norm of 1 if `normalize` is set."""
    vector = output.embedding
    if vector is not None and normalize:
        vector = tuple(normalized(vector).tolist())
    return EmbeddingOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        embedding=vector,
        error=output.error,
        usage=output.usage,
    )


Progress = Callable[[EngineStats, list[OutputDelta]], None]
_Taker = Callable[[OutputDelta], None]


class LLM:
    """A model with a KV memory of a fixed number of bytes.

    The object is thread-safe. Calls run one after the other: a call waits until `generate` of
    another thread returns. Use `AsyncLLM` for concurrent requests. Between two deltas of a `stream`
    any thread may call any method; open requests share the batch. Inside a step (in a listener of
    KV events) only `stats`, `ledger` and the encoders may be called.

    Args:
        model: "quire-tiny", a folder in Hugging Face format, a hub name, or a model in memory: of
            Transformers (in eval mode, on one device; `close` restores its forward) or of
            `load_model`.
        tokenizer: tokenizer of a Transformers model in memory; None: prompts are token ids.
        dtype: auto (as stored), float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        kv: options of the KV memory; default: `KVConfig()`.
        schedule: scheduling options; default: `ScheduleConfig()`.
        trust_remote_code: run Python code of the model folder.
        verify: compare with Transformers' own attention at load.
        return_memory: return freed host memory to the system; see `Engine`.
        weights_memory: device memory for weights: bytes, a size, or "all"; see `place_beyond`.
        model_impl: auto, native or transformers; see `load_model`.
        weight_codec: auto, int8 or int4; see `load_model`.
        max_model_len: maximum tokens of a sequence, prompt and output; None: the model's context.
        tensor_parallel_size: number of processes (ranks) that divide the model's heads; `kv` sets
            the memory of each. `close` ends them.
        tensor_parallel_timeout: maximum time in seconds that a rank waits for the others in a step.
        chat_template_content_format: form of the content of messages that the chat template gets:
            auto, string or openai; see `ChatTemplate`.

    Attributes:
        engine, model: see `Engine` and `LoadedModel`.
        content_format: the option `chat_template_content_format`.

    Raises:
        ConfigError: invalid options; raised before the KV memory is allocated.
        ModelError: the model folder cannot be read.
    """

    def __init__(  # noqa: PLR0913 - one parameter per option
        self,
        model: str | Path | LoadedModel | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: str = "auto",
        device: str = "auto",
        kv: KVConfig | None = None,
        schedule: ScheduleConfig | None = None,
        trust_remote_code: bool = False,
        verify: bool = True,
        return_memory: bool = False,
        weights_memory: int | str | None = ALL_WEIGHTS,
        model_impl: str = "auto",
        weight_codec: str = "auto",
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        tensor_parallel_timeout: float = DEFAULT_TIMEOUT_S,
        chat_template_content_format: str = "auto",
    ) -> None:
        require_type("kv", kv, KVConfig, type(None))
        require_type("schedule", schedule, ScheduleConfig, type(None))
        require_choice(
            "chat-template-content-format", chat_template_content_format, get_args(ContentFormat)
        )
        kv = kv or KVConfig()
        load_policy_file(kv.policy_file)
        check_rules(kv.evict, kv.evict_allow)
        require_type("model", model, str, Path, LoadedModel, PreTrainedModel)
        if isinstance(model, str | Path):
            require_type("dtype", dtype, str)
            require_type("device", device, str)
            if tokenizer is not None:
                raise ConfigError(
                    "expected tokenizer= beside a Transformers model in memory, got the name of a "
                    "model, whose folder has its tokenizer: leave tokenizer out"
                )
        else:
            _refuse_load_options(
                dtype=dtype, device=device, model_impl=model_impl, weight_codec=weight_codec
            )
        self._restore: Callable[[], object] = lambda: None
        if tensor_parallel_size != 1:
            self.engine = open_ranks(
                RankOptions(
                    size=tensor_parallel_size,
                    timeout_s=tensor_parallel_timeout,
                    model=_divisible(model, weights_memory),
                    dtype=dtype,
                    device=device,
                    trust_remote_code=trust_remote_code,
                    verify=verify,
                    model_impl=model_impl,
                    weight_codec=weight_codec,
                    max_model_len=max_model_len,
                    kv=kv,
                    schedule=schedule or ScheduleConfig(),
                    return_memory=return_memory,
                )
            )
        else:
            if isinstance(model, str | Path):
                model = load_model(
                    model,
                    dtype=dtype,
                    device=device,
                    trust_remote_code=trust_remote_code,
                    verify=verify,
                    placer=place_beyond(weights_memory),
                    model_impl=model_impl,
                    weight_codec=weight_codec,
                )
            elif weights_memory not in (ALL_WEIGHTS, None):
                raise ConfigError(
                    "weights_memory cannot be set for a loaded model: pass the folder or name of "
                    "the model instead"
                )
            if isinstance(model, PreTrainedModel):
                decoder = wrap_model(model, verify=verify)
                self._restore = restoring = weakref.finalize(self, decoder.leave)
                restoring.atexit = False
                model = loaded_model(model, decoder, tokenizer)
            try:
                if max_model_len is not None:
                    model = model.with_max_model_len(max_model_len)
                self.engine = Engine(model, kv, schedule, return_memory=return_memory)
            except BaseException:
                self._restore()
                raise
        self.model = self.engine.model
        self.content_format = chat_template_content_format
        self._chat_template: ChatTemplate | None = None
        self._takers: dict[str, _Taker] = {}  # of the open requests, by request id
        self._calls = CallLock(self._cancel)
        self._is_closed = False

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: tokenize a text, copy a list of ids.

        Raises:
            RequestError: a text for a model without a tokenizer, or neither a text nor a list.
        """
        return self._encode(prompt)

    def _encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return encode_prompt(self.model.require_tokenizer(), prompt)
        return as_token_ids(prompt)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Return the token ids of a conversation, with the model's chat template.

        Args:
            messages: messages in OpenAI's format, oldest first. The content is a text or a list of
                text parts; `tool_calls` and other fields are passed to the template.
            options: see `ChatOptions`.

        Raises:
            RequestError: invalid messages, a model without a chat template, or a template that
                refuses the messages or does not write the text of one of them.
        """
        return self.chat_template.encode(messages, **options)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, with the option `chat_template_content_format`.

        Raises:
            RequestError: a model without a tokenizer.
        """
        if self._chat_template is None:
            self._chat_template = ChatTemplate(self.model.require_tokenizer(), self.content_format)
        return self._chat_template

    def context_tokens(self, prompt_tokens: int, evict: str | None = None) -> int:
        """Maximum length of a sequence: the model's context, or more with a streaming policy.

        Args:
            prompt_tokens: length of its prompt.
            evict: eviction policy; default: `KVConfig.evict`.

        Raises:
            RequestError: a policy that this engine does not allow, or whose cap is too low.
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
        """Generate outputs for prompts in one batch; return them in the order of the prompts.

        Args:
            prompts: one or several strings, token id lists or `GenerationRequest`s (with their own
                options).
            sampling: one for all prompts, or a list with one per prompt.
            progress: called after every step with the engine's statistics and the step's deltas.
            options: priority, deadline_s, tenant, cache_salt, evict, record_evictions and
                request_id, each one value for all prompts or a list with one per prompt; see
                `GenerationRequest`.

        Raises:
            EngineDead: the LLM is closed.
            RequestError: an invalid prompt or option; no request is run.
            NeverFits: a prompt needs more KV than the whole KV memory.
        """
        requests = as_requests(prompts, sampling, options)
        builders: dict[str, OutputBuilder] = {}
        outputs: dict[str, RequestOutput] = {}

        def take(delta: OutputDelta) -> None:
            output = builders[delta.request_id].add(delta)
            if output is not None:
                outputs[delta.request_id] = output

        with self._calls.held(), self._withdrawing(builders):
            self._refuse_closed()
            for index, request in enumerate(requests):
                with _named(f"prompt {index}" if len(requests) > 1 else ""):
                    ids = self._encode(request.prompt)
                    request_id = self._submit(replace(request, prompt=ids), take)
                builders[request_id] = OutputBuilder(request_id, tuple(ids), request)
            while len(outputs) < len(builders):
                deltas = self._step()
                if progress is not None:
                    progress(self.stats(), deltas)
        return [outputs[request_id] for request_id in builders]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        **options: Unpack[OptionsOfMany],
    ) -> list[RequestOutput]:
        """Generate the next message of conversations in one batch; return them in their order.

        Args:
            messages: one conversation (a list of messages; see `encode_chat`), or several.
            sampling: one for all conversations, or a list with one per conversation.
            progress: see `generate`.
            add_generation_prompt: for this and the next three see `ChatOptions`; they apply to all
                conversations.
            continue_final_message: end with the text of the last message.
            tools: definitions of tools.
            template_kwargs: further variables of the template.
            options: see `generate`.

        Raises:
            EngineDead: the LLM is closed.
            RequestError: invalid messages or options; no request is run.
            NeverFits: a conversation needs more KV than the whole KV memory.
        """
        many = as_conversations(messages)
        prompts: list[Prompt | GenerationRequest] = []
        for index, conversation in enumerate(many):
            with _named(f"conversation {index}" if len(many) > 1 else ""):
                ids = self.encode_chat(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    template_kwargs=template_kwargs,
                )
            prompts.append(ids)
        return self.generate(prompts, sampling, progress=progress, **options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        **options: Unpack[OptionsOfMany],
    ) -> list[EmbeddingOutput]:
        """Compute embeddings of prompts in one batch; return them in the order of the prompts.

        Args:
            prompts: one or several strings or token id lists.
            pooling: "last" or "mean", see `SamplingParams`; None: that of the model, else "last".
            normalize: whether embeddings have a Euclidean norm of 1.
            options: see `generate`.

        Raises:
            EngineDead: the LLM is closed.
            RequestError: an invalid prompt or option, or a model without embeddings.
            NeverFits: a prompt needs more KV than the whole KV memory.
        """
        outputs = self.generate(prompts, embedding_params(self.model, pooling), **options)
        return [embedding_output(output, normalize=normalize) for output in outputs]

    def stream(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[OutputDelta]:
        """Generate the output of one prompt as a stream. Closing the iterator cancels the request.

        Several streams may be open, and `generate` may be called meanwhile, also inside the loop
        over the deltas. No lock is held between two deltas, so an unfinished iterator does not
        block other calls. Its request holds its KV until the iterator is closed, which Python does
        when it is garbage collected.

        Args:
            prompt: a string, a list of token ids, or a `GenerationRequest`.
            sampling: sampling options; default: `SamplingParams()`.
            options: see `generate`.

        Raises:
            EngineDead: at the next delta, if the LLM is closed.
            RequestError: at the first delta, if the prompt or its options are invalid.
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
                    with self._calls.held():
                        if not inbox:
                            self._step()
                delta = inbox.popleft()
                done = delta.is_last
                yield delta

    def export_kv(
        self,
        prompt: Prompt | GenerationRequest,
        path: str | Path,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> ExportedKV:
        """Save the KV of a request's prompt to a file, for `import_kv` of another engine.

        The whole blocks of the prompt are saved, with the statistics of the request's eviction rule
        and codec. What is not cached is computed first: the request runs up to its first token. The
        prompt may include outputs, such as those of a stream that is still open.

        Args:
            prompt: a string, a list of token ids, or a `GenerationRequest`.
            path: the file, in the safetensors format; it is replaced.
            sampling: sampling options of the request that will continue; its `max_tokens` decides
                whether its eviction rule needs statistics.
            options: see `generate`; `tenant` and `cache_salt` are not saved.

        Raises:
            EngineDead: the LLM is closed.
            RequestError: an invalid prompt or option, or a prompt shorter than a block.
            UnsoundCombination: the engine has no prefix cache.
            NeverFits: the prompt needs more KV than the whole KV memory.
            StorageError: the file cannot be written.
        """
        [request] = as_requests([prompt], sampling, options)
        request = replace(request, prompt=self._encode(request.prompt))
        with self._calls.held():
            self._refuse_closed()
            kv, is_whole = self._gather(request)
            if not is_whole:
                for _ in self.stream(request):
                    break
                kv, _ = self._gather(request)
        if kv is None:
            raise RequestError(
                f"expected a prompt with a whole block of {self.engine.kv_export.block_tokens} "
                f"tokens before its last token, got {len(request.prompt)} tokens"
            )
        write_file(kv, Path(path))
        return ExportedKV(
            num_tokens=len(kv.tokens), num_bytes=kv.num_bytes, fingerprint=kv.fingerprint
        )

    def _gather(self, request: GenerationRequest) -> tuple[PrefixKV | None, bool]:
        with self._calls.changing():
            self._refuse_beside_async()
            return self.engine.kv_export.gather(request)

    def import_kv(
        self, path: str | Path, *, tenant: str = DEFAULT_TENANT, cache_salt: str = ""
    ) -> ExportedKV:
        """Load KV that `export_kv` of an engine with the same model and options has saved.

        Afterwards it is a cached prefix like any other: a request that begins with its tokens
        computes the following ones only. It is evicted when pages are needed.

        Args:
            path: the file.
            tenant: only its requests use the prefix.
            cache_salt: only requests of the same salt use it.

        Raises:
            EngineDead: the LLM is closed.
            StorageError: the file cannot be read.
            CorruptData: a checksum of the file is wrong.
            RequestError: the KV is that of another model, codec or layout, or of an eviction rule
                that this engine does not allow.
            OutOfPages: running requests hold too many pages.
            UnsoundCombination: the engine has no prefix cache.
        """
        kv = read_file(Path(path))
        with self._calls.held():
            self._refuse_closed()
            with self._calls.changing():
                self._refuse_beside_async()
                return self.engine.kv_export.insert(kv, tenant=tenant, cache_salt=cache_salt)

    def flush_kv(self) -> None:
        """Write all cached prefixes that no open request uses to their tiers, and wait for it.

        Afterwards other engines find them in a shared store. No effect without a tier. Prefixes
        that a failing store does not accept are counted in `stats`.

        Raises:
            EngineDead: the LLM is closed.
            RequestError: the call comes from inside a step.
        """
        with self._calls.held():
            self._refuse_closed()
            with self._calls.changing():
                self._refuse_beside_async()
                self.engine.flush_kv()

    def stats(self) -> EngineStats:
        """Return the engine's statistics, including bytes by owner; fast enough for every step."""
        with self._calls.reading():
            return self.engine.stats()

    def ledger(self) -> Snapshot:
        """Return the owners of all KV bytes as plain JSON values; see `docs/ledger.md`."""
        with self._calls.reading():
            return self.engine.ledger()

    def close(self) -> None:
        """Cancel open requests, write cached prefixes to their tier and close it, if there is one.

        Without a call, the tier is closed when the engine is garbage collected or the process ends.
        A Transformers model in memory gets its own forward back. Afterwards `generate`, `stream`
        and open streams raise `EngineDead`; `stats`, `ledger` and
        the encoders still work. A second `close` has no effect.

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
                self._restore()

    def _submit(self, request: GenerationRequest, take: _Taker) -> str:
        self._refuse_closed()
        self._refuse_beside_async()
        with self._calls.changing():
            request_id = self.engine.submit(request)
        self._takers[request_id] = take
        return request_id

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise EngineDead("the LLM is closed: create a new LLM with its model")

    def _refuse_beside_async(self) -> None:
        if self.engine.runs_in_thread:
            raise RequestError(
                "the engine of this LLM runs in the thread of an AsyncLLM: submit to the AsyncLLM, "
                "or close it before this call"
            )

    def _step(self) -> list[OutputDelta]:
        """Run one step for all open requests of all calls."""
        self._refuse_closed()
        with self._calls.changing():
            deltas = self.engine.step()
            for delta in deltas:
                take = self._takers.get(delta.request_id)
                if take is None:  # its request was withdrawn
                    continue
                if delta.is_last:
                    del self._takers[delta.request_id]
                take(delta)
        return deltas

    @contextmanager
    def _withdrawing(self, request_ids: Collection[str]) -> Iterator[None]:
        """Cancel unfinished requests at exit; their last deltas are discarded."""
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
            self._step()  # the engine is idle afterwards


def _refuse_load_options(**options: str) -> None:
    """Refuse options of loading a model for a model in memory."""
    for name, value in options.items():
        if value != "auto":
            raise ConfigError(
                f"{name}={value!r} cannot be set for a model in memory: pass the folder or name of "
                "the model instead"
            )


def _divisible(
    model: str | Path | LoadedModel | PreTrainedModel, weights_memory: int | str | None
) -> str | Path:
    """The folder or name of a model to divide over ranks; no offloaded layers."""
    if not isinstance(model, str | Path):
        raise ConfigError(
            "tensor_parallel_size needs the folder or name of a model, because each process loads "
            f"its part, got a model in memory, {type(model).__name__}"
        )
    if weights_memory not in (ALL_WEIGHTS, None):
        raise limits.refused(limits.WEIGHTS_ON_RANKS)
    return model


@contextmanager
def _named(prompt: str) -> Iterator[None]:
    """Add the index of a prompt to the message of a `RequestError`."""
    try:
        yield
    except RequestError as error:
        if not prompt:
            raise
        raise type(error)(f"{prompt}: {error}", param=error.param) from error
