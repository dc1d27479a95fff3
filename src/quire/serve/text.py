"""The server's tokenizer: encodes prompts and chats, decodes token ids.

The engine detokenizes outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from quire.errors import RequestError
from quire.models.chat_template import KWARGS_FIELD, NO_KWARGS, ChatTemplate
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_prompt, encode_rendered
from quire.serve.chat_messages import Message
from quire.serve.fair_pool import FairPool
from quire.serve.logprobs import TokenPieces
from quire.serve.prompt_fields import sequences_of_words
from quire.serve.protocol import Body, ChatBody, GenerationBody, TokenizeBody
from quire.serve.text_length import text_length

T = TypeVar("T")

LONG_TEXT_CHARACTERS = 200_000
"""Longer texts take more than some tenths of a second."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and as text if it was sent as text."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tenant and length limit for the tokenization of a text.

    Attributes:
        tenant: tenant of the request.
        max_tokens: length of the longest sequence; None: unlimited.
    """

    tenant: str
    max_tokens: int | None

    def is_exceeded_by(self, num_tokens: int) -> bool:
        """Whether a number of tokens exceeds the limit."""
        return self.max_tokens is not None and num_tokens > self.max_tokens


class Texts:
    """A model's tokenizer, for the server.

    Tokenization runs in threads with fair scheduling between tenants, because long texts take
    long. A text of more than `LONG_TEXT_CHARACTERS` runs in a thread of its own, one such text at
    a time, so that other texts do not wait for it.

    Args:
        model: the model; without a tokenizer it accepts prompts as token ids only.
        pieces: texts of its tokens.
        threads: maximum number of threads. A tokenizer written in Python gets one thread, because
            it may not be thread-safe.
        content_format: form of the content of messages; see `ChatTemplate`.
    """

    def __init__(
        self,
        model: LoadedModel,
        pieces: TokenPieces,
        threads: int = 1,
        content_format: str = "auto",
    ) -> None:
        self._model, self._pieces = model, pieces
        tokenizer = model.tokenizer
        self._chat = None if tokenizer is None else ChatTemplate(tokenizer, content_format)
        self._length = None if tokenizer is None else text_length(tokenizer)
        is_fast = tokenizer is not None and tokenizer.is_fast
        self._pool = FairPool(threads if is_fast else 1, "quire-text")
        self._long_pool = FairPool(1, "quire-long-text") if is_fast else self._pool

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()
        self._long_pool.close()

    async def prompts(
        self,
        prompts: Sequence[str | list[int]],
        turn: Turn,
        *,
        add_special_tokens: bool = True,
        with_text: bool = False,
        keep: int | None = None,
    ) -> list[Prompt]:
        """Tokenize texts.

        Args:
            prompts: texts or token ids.
            turn: tenant and length limit of the request.
            add_special_tokens: add the special tokens that the tokenizer adds by default.
            with_text: decode prompts that are token ids, or truncated.
            keep: number of tokens at the end of each prompt that are used; None: all, and a
                longer prompt than the limit is refused.

        Raises:
            RequestError: a text without tokens or over the limit, or a model without a tokenizer.
        """

        def read(prompt: str | list[int]) -> Prompt:
            text, ids = None, prompt
            if isinstance(prompt, str):
                tokenizer = self._tokenizer()
                if keep is None:
                    self._check_length(prompt, turn, "prompt")
                ids = encode_prompt(
                    tokenizer, prompt, add_special_tokens=add_special_tokens, keep=_one_more(keep)
                )
                text = prompt
            assert not isinstance(ids, str), "tokenized"
            if keep is not None and len(ids) > keep:
                text, ids = None, ids[-keep:]
            # the engine refuses prompts over the limit: do not decode them
            if with_text and text is None and not turn.is_exceeded_by(len(ids)):
                text = self.decode(ids)
            return Prompt(text, ids)

        characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self._in_turn(turn, lambda: [read(prompt) for prompt in prompts], characters)

    async def chat(
        self,
        messages: list[Message],
        turn: Turn,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        tools: Sequence[Mapping[str, Any]] | None = None,
        keep: int | None = None,
    ) -> Prompt:
        """Tokenize a chat with the model's chat template.

        Args:
            messages: messages, oldest first.
            turn: tenant and length limit of the request.
            add_generation_prompt: append the tokens that begin an assistant message.
            continue_final_message: end the prompt in the text of the last message.
            template_kwargs: further variables of the template.
            tools: definitions of tools for the template.
            keep: number of tokens at the end of the prompt that are used; None: all, and a longer
                prompt than the limit is refused.

        Raises:
            RequestError: no tokenizer, no template, a template that refuses the messages, or a
                text over the limit.
        """
        tokenizer, chat = self._tokenizer(), self._chat
        assert chat is not None, "there is a tokenizer"

        def render() -> str | Prompt:
            text = chat.render(
                [message.as_dict() for message in messages],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
                tools=tools,
            )
            if keep is None:
                self._check_length(text, turn, "messages")
            return text if len(text) > LONG_TEXT_CHARACTERS else encoded(text)

        def encoded(text: str) -> Prompt:
            return Prompt(None, encode_rendered(tokenizer, text, keep))

        found = await self._in_turn(turn, render, sum(map(_characters, messages)))
        if isinstance(found, Prompt):
            return found
        text = found  # may be long by its tools and other variables only
        return await self._in_turn(turn, lambda: encoded(text), len(text))

    def reads(self, variable: str) -> bool:
        """Whether the model's chat template uses a variable."""
        return self._chat is not None and self._chat.reads(variable)

    async def bad_words(self, words: Sequence[str] | None, turn: Turn) -> list[tuple[int, ...]]:
        """Token sequences of the field `bad_words`; see `sequences_of_words`.

        Raises:
            RequestError: a word without tokens, or a model without a tokenizer.
        """
        if not words:
            return []
        tokenizer = self._tokenizer("bad_words", "use `bad_token_ids`")
        return await self._in_turn(turn, lambda: sequences_of_words(tokenizer, words))

    async def decoded(self, token_ids: list[int], turn: Turn) -> str:
        """Decode token ids in a thread; see `decode`.

        Raises:
            RequestError: more ids than the longest sequence has.
        """
        if turn.is_exceeded_by(len(token_ids)):
            raise RequestError(
                f"expected at most {turn.max_tokens:,} token ids (the longest sequence), got "
                f"{len(token_ids):,}: send them in several requests",
                param="tokens",
            )
        return await self._in_turn(turn, lambda: self.decode(token_ids))

    async def pieces(self, token_ids: list[int], turn: Turn) -> list[str]:
        """The text of each token."""
        return await self._in_turn(turn, lambda: [self._pieces.text(i) for i in token_ids])

    def decode(self, token_ids: list[int]) -> str:
        """Decode token ids, including special tokens.

        Raises:
            RequestError: an id outside the vocabulary, or a model without a tokenizer.
        """
        vocab_size = self._model.spec.vocab_size
        wrong = [token for token in token_ids if not 0 <= token < vocab_size]
        if wrong:
            raise RequestError(
                f"expected token ids from 0 to {vocab_size - 1}, got {wrong[:5]}", param="prompt"
            )
        text = self._tokenizer().decode(token_ids, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)

    def _check_length(self, text: str, turn: Turn, param: str) -> None:
        """Refuse a text that exceeds the limit, before it is tokenized."""
        if self._length is None:
            return
        least = self._length.least_tokens(text)
        if turn.is_exceeded_by(least):
            raise RequestError(
                f"the text has {len(text):,} characters, which are at least {least:,} tokens; the "
                f"limit is {turn.max_tokens:,} tokens per sequence: shorten the text",
                param=param,
            )

    def _tokenizer(
        self,
        param: str = "prompt",
        instead: str = "give prompts as token ids to /v1/completions",
    ) -> PreTrainedTokenizerBase:
        if self._model.tokenizer is None:
            raise RequestError(f"{self._model.name} has no tokenizer: {instead}", param=param)
        return self._model.tokenizer

    async def in_turn_of(self, tenant: str, work: Callable[[], T]) -> T:
        """Run a job of a tenant in a thread and return its result."""
        return await self._pool.run(tenant, work)

    async def _in_turn(self, turn: Turn, work: Callable[[], T], characters: int = 0) -> T:
        """Run a job in a thread of the pool; a job with a long text in a thread for such jobs."""
        pool = self._long_pool if characters > LONG_TEXT_CHARACTERS else self._pool
        try:
            return await pool.run(turn.tenant, work)
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: {error.reason}", param="prompt"
            ) from None


def _characters(message: Message) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def _one_more(keep: int | None) -> int | None:
    """One token more than are kept, which shows that others precede them."""
    return None if keep is None else keep + 1


# ---- template ------------------------------------------------------------------------------------

# Variables of the chat template that a request sets.

_EFFORT = "reasoning_effort"


def template_kwargs(body: ChatBody | TokenizeBody, texts: Texts) -> dict[str, Any]:
    """Variables for the chat template other than the messages.

    They include `reasoning_effort` if the template uses it.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is not None and texts.reads(_EFFORT):
        kwargs.setdefault(_EFFORT, effort)
    return kwargs


def unread_kwargs(body: Body, texts: Texts) -> list[str]:
    """Variables that the body sets and the chat template does not use."""
    if not isinstance(body, ChatBody | TokenizeBody):
        return []
    names = body.chat_template_kwargs or {}
    return [f"{KWARGS_FIELD}.{name}" for name in names if not texts.reads(name)]


def unread_fields(body: Body, texts: Texts) -> list[str]:
    """`reasoning_effort` if it has no effect: in a completion, or not used by the template."""
    if not isinstance(body, GenerationBody) or body.reasoning_effort is None:
        return []
    has_effect = isinstance(body, ChatBody) and texts.reads(_EFFORT)
    return [] if has_effect else [_EFFORT]
