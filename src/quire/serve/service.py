"""The service behind the endpoints: engine, model name, limits and tokenizer."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from quire.api.async_llm import AsyncLLM, QueueLimit
from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.inspection.totals import (
    HISTORY_INTERVAL_S,
    HISTORY_POINTS,
    Point,
    history_points,
)
from quire.engine.ledger import Snapshot
from quire.errors import ConfigError, EngineDead, RequestError
from quire.models.chat_template import with_chat_template
from quire.sampling.grammar import CompiledGrammar
from quire.sampling.output_stream import OutputStream
from quire.scheduler.events import KVEvent
from quire.serve.config import MAX_OUTPUTS, ServerConfig
from quire.serve.errors import Draining, FieldError, ShutDown, UnknownModel
from quire.serve.logprobs import TokenPieces
from quire.serve.metrics.observer import EngineObserver
from quire.serve.protocol import PromptBody
from quire.serve.rate_limits import Charge, RateLimit, RateLimits
from quire.serve.tenant_keys import TenantFile, TenantKeys
from quire.serve.text import Texts, Turn, with_budget
from quire.serve.tools.parsers import ToolParsers
from quire.serve.tracing import open_traces


@dataclass(slots=True)
class InspectionCost:
    """Time that the engine's thread spent on views of the engine."""

    calls: int = 0
    seconds: float = 0.0
    max_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds
        self.max_seconds = max(self.max_seconds, seconds)


T = TypeVar("T")

CHARGED_TOKENS = 256
"""Tokens of each output that a request without `max_tokens` is charged before it ends."""


class Service:
    """One served model.

    Attributes:
        rate_limits: requests and tokens that each tenant may use.
        texts, pieces: tokenizer of the model.
        tools: parser of the model's tool calls.
        inspection: cost of the views that `inspect` returned.
        history: points of the dashboard's charts by tenant, one per second.
        observer: counts for the metrics; None before the start.
        traces: spans of requests; None without `--otlp-traces-endpoint`.
    """

    def __init__(
        self,
        llm: LLM,
        config: ServerConfig,
        keys: TenantKeys | None = None,
        tenants: TenantFile | None = None,
    ) -> None:
        self.llm, self.config = llm, config
        tenants = tenants or TenantFile()
        self.keys = keys or TenantKeys()
        self.rate_limits = RateLimits(
            RateLimit(
                requests_per_minute=config.requests_per_minute,
                tokens_per_minute=config.tokens_per_minute,
            ),
            tenants.rate_limits,
        )
        self.model_name = config.served_model_name or llm.model.name
        self._rules = dict(tenants.evict)
        model = with_chat_template(llm.model, config.chat_template)
        self.pieces = TokenPieces(model.tokenizer)
        self.texts = Texts(model, self.pieces, config.tokenizer_threads, llm.content_format)
        self.tools = ToolParsers(config.tool_parser, model.tokenizer)
        self.inspection = InspectionCost()
        self.history: deque[dict[str | None, Point]] = deque(maxlen=HISTORY_POINTS)
        self.observer: EngineObserver | None = None
        self.traces = open_traces(config.otlp_traces_endpoint, self.model_name)
        self._engine: AsyncLLM | None = None
        self._is_draining = False
        self._max_tokens = llm.engine.scheduler.peaks.longest_request(
            llm.model.spec.max_positions, llm.engine.pool.eviction.spec
        )
        for tenant, rule in self._rules.items():
            try:
                self.llm.context_tokens(1, rule)
            except (ConfigError, RequestError) as error:
                raise ConfigError(f"tenant {tenant!r}, evict: {error}") from None

    def start(self) -> None:
        config = self.config
        queue = QueueLimit(requests=config.max_num_queued_reqs, tokens=config.max_num_queued_tokens)
        self.observer = EngineObserver(self.llm.engine, self.traces)
        self._engine = AsyncLLM(self.llm.engine, queue_limit=queue, observer=self.observer)

    async def record_history(self) -> None:
        """Append to `history` until the engine stops."""
        read = partial(history_points, by_tenant=self.keys.tells_tenants_apart)
        with suppress(EngineDead):
            while True:
                self.history.append(await self._running().inspect(read))
                await asyncio.sleep(HISTORY_INTERVAL_S)

    async def stop(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self.observer is not None:
            self.observer.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        self.texts.close()

    def drain(self) -> None:
        self._is_draining = True

    async def end_requests(self) -> None:
        """End open requests with an error, and refuse those that are not submitted yet."""
        await self._running().end_requests(ShutDown)

    @property
    def is_alive(self) -> bool:
        return self._engine is not None and self._engine.is_alive

    def num_open(self, tenant: str | None) -> int:
        if self._engine is None:
            return 0
        return self._engine.num_open if tenant is None else self._engine.num_open_of(tenant)

    @property
    def has_died(self) -> bool:
        return self._engine is not None and self._engine.has_failed

    @property
    def is_ready(self) -> bool:
        return self.is_alive and not self._is_draining

    def check_draining(self) -> None:
        if self._is_draining:
            raise Draining

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence in tokens: limited by model context and KV memory."""
        return self._max_tokens

    async def ledger(self) -> Snapshot:
        return await self._running().ledger()

    async def events(self, kinds: Sequence[str], *, since: int, most: int) -> list[KVEvent]:
        return await self._running().events(kinds, since=since, most=most)

    async def inspect(self, read: Callable[[Engine], T]) -> T:
        def timed(engine: Engine) -> T:
            started_s = time.perf_counter()
            found = read(engine)
            self.inspection.add(time.perf_counter() - started_s)
            return found

        return await self._running().inspect(timed)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def shows_texts(self) -> bool:
        """Whether a client may see texts of tokens: of its own tenant only."""
        return self.config.has_dashboard(with_keys=self.keys.tells_tenants_apart)

    def _running(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDead("the server has not started yet")
        return self._engine

    def available_tokens(self, prompt_tokens: int) -> int:
        """Maximum output tokens after a prompt, at least 1; the engine refuses too long prompts.

        With an unbounded context (streaming policies) it is the length of the longest sequence.
        """
        if self.llm.context_tokens(prompt_tokens) > self.llm.model.spec.max_positions:
            return self._max_tokens
        return max(1, self._max_tokens - prompt_tokens)

    def turn(self, tenant: str, evict: str | None = None) -> Turn:
        context = self.llm.model.spec.max_positions
        longest = self.llm.context_tokens(context, evict)
        if longest > context:
            return Turn(tenant, None)
        return Turn(tenant, self._max_tokens if evict is None else longest)

    def rule_of(self, body: PromptBody, tenant: str) -> str | None:
        """The eviction rule of a request: of its body, else of its tenant; None: the engine's."""
        rule = self._rules.get(tenant) if body.evict is None else body.evict
        if body.kv_budget is None:
            return rule
        default = self.llm.engine.pool.rules.default.text
        return with_budget(default if rule is None else rule, body.kv_budget)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise UnknownModel(name, self.model_name)

    def check_number(self, num_prompts: int, params: SamplingParams) -> None:
        each = params.num_sequences
        if num_prompts * each > MAX_OUTPUTS:
            raise FieldError(
                "prompt",
                f"{num_prompts} prompts x {each} outputs exceed the limit of {MAX_OUTPUTS} outputs "
                "per request: send several requests",
            )

    def charge(
        self,
        tenant: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        is_estimate: bool = False,
    ) -> Charge:
        """Charge the rate limits of a tenant; an estimate is `CHARGED_TOKENS` of each output."""
        each = min(params.max_tokens, CHARGED_TOKENS) if is_estimate else params.max_tokens
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        tokens = prompt_tokens + len(prompts) * each * params.num_sequences
        return self.rate_limits.charge(
            tenant,
            requests=len(prompts),
            tokens=tokens,
            min_tokens=prompt_tokens + 1 if is_estimate else None,
        )

    async def compile(self, params: SamplingParams, tenant: str) -> CompiledGrammar | None:
        """Compile the structure of an output in a tokenizer thread; None without a structure.

        The engine finds it if the caller keeps the result until `submit` returns.
        """
        if params.structured_outputs is None:
            return None
        compiler = self.llm.engine.input_processor.grammars
        return await self.texts.in_turn_of(
            tenant, partial(compiler.compile, params.structured_outputs)
        )

    async def submit(self, requests: Sequence[GenerationRequest]) -> OutputStream:
        """Submit all prompts of an HTTP request to the engine."""
        return await self._running().submit(requests)
