"""The engine as the server uses it: names, limits, and answers that end when their client goes."""

import asyncio
from collections.abc import Sequence

from quire.api.async_llm import AsyncLLM
from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.ledger import Snapshot
from quire.errors import EngineDead
from quire.sampling.output_stream import OutputStream
from quire.scheduler.events import KVEvent
from quire.serve.config import MAX_ANSWERS, ServerConfig
from quire.serve.errors import Draining, FieldError, UnknownModel
from quire.serve.logprobs import TokenPieces
from quire.serve.tenant_keys import TenantKeys
from quire.serve.text import Texts, Turn


class Service:
    """One model behind HTTP.

    Args:
        llm: idle; its engine runs in a thread between `start` and `stop`.
        config: options of the server.
        keys: whose requests are whose; None takes all for the default tenant's.

    Attributes:
        llm, config: see above.
        model_name: what clients call the model.
        keys: whose requests are whose.
        texts, pieces: its tokenizer.
    """

    def __init__(self, llm: LLM, config: ServerConfig, keys: TenantKeys | None = None) -> None:
        self.llm, self.config = llm, config
        self.keys = keys or TenantKeys()
        self.model_name = config.served_model_name or llm.model.name
        self.pieces = TokenPieces(llm.model.tokenizer)
        self.texts = Texts(llm.model, self.pieces, config.tokenizer_threads)
        self._engine: AsyncLLM | None = None
        self._is_draining = False
        self._max_tokens = llm.engine.scheduler.peaks.longest_sequence(
            llm.model.spec.max_positions, llm.engine.pool.eviction.spec
        )

    def start(self) -> None:
        """Start the engine's thread."""
        self._engine = AsyncLLM(self.llm.engine)

    async def stop(self) -> None:
        """End the threads; what is still open ends with an error."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        self.texts.close()

    def drain(self) -> None:
        """Refuse new requests from now on; open ones go on."""
        self._is_draining = True

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self._engine is not None and self._engine.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.is_alive and not self._is_draining

    def check_draining(self) -> None:
        """Refuse a new request while the server shuts down.

        Raises:
            Draining: it does.
        """
        if self._is_draining:
            raise Draining

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence: the model's context, or what the whole pool holds."""
        return self._max_tokens

    async def ledger(self) -> Snapshot:
        """Who holds every byte of KV; see `LLM.ledger`.

        Raises:
            EngineDead: the engine has stopped.
        """
        return await self._running().ledger()

    async def events(self, kinds: Sequence[str], *, since: int, most: int) -> list[KVEvent]:
        """The newest KV events; see `EventLog.newest`.

        Raises:
            EngineDead: the engine has stopped.
        """
        return await self._running().events(kinds, since=since, most=most)

    def _running(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDead("the server has not started yet")
        return self._engine

    def room_tokens(self, prompt_tokens: int) -> int:
        """Tokens an answer may have; 1 where the prompt leaves none, and the engine says why.

        A stream without an end gets as many as the longest sequence that has one.
        """
        if self.llm.context_tokens(prompt_tokens) > self.llm.model.spec.max_positions:
            return self._max_tokens
        return max(1, self._max_tokens - prompt_tokens)

    def turn(self, tenant: str, evict: str | None = None) -> Turn:
        """On whose account a prompt is tokenized, and the tokens that it may have.

        Args:
            tenant: of the request.
            evict: its eviction rule; None takes the engine's.

        Raises:
            RequestError: a rule that this engine does not serve.
        """
        context = self.llm.model.spec.max_positions
        longest = self.llm.context_tokens(context, evict)
        if longest > context:
            return Turn(tenant, None)
        return Turn(tenant, self._max_tokens if evict is None else longest)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; None is any.

        Raises:
            UnknownModel: with the name that is served.
        """
        if name is not None and name != self.model_name:
            raise UnknownModel(name, self.model_name)

    def check_number(self, num_prompts: int, params: SamplingParams) -> None:
        """Refuse more answers than one HTTP request may ask for.

        Raises:
            FieldError: with the number.
        """
        each = params.num_sequences
        if num_prompts * each > MAX_ANSWERS:
            raise FieldError(
                "prompt",
                f"{num_prompts} prompts x {each} answers are more than {MAX_ANSWERS}: send several "
                "requests",
            )

    async def submit(self, requests: Sequence[GenerationRequest]) -> OutputStream:
        """Have every prompt answered, each as often as the options say.

        Raises:
            RequestError: any of them is refused; then none runs.
            EngineDead: the engine has stopped.
        """
        return await self._running().submit(requests)
