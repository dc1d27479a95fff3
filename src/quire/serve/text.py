"""The server's tokenizer: encodes prompts and chats, decodes token ids.

Texts are limited before they are tokenized, in a pool of threads that clients share fairly. The
engine detokenizes outputs.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from quire.errors import ConfigError, RequestError
from quire.layout.eviction import Cap, parse_policy
from quire.models.chat_template import KWARGS_FIELD, NO_KWARGS, ChatTemplate
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_prompt, encode_rendered
from quire.serve.errors import FieldError, bounded
from quire.serve.logprobs import TokenPieces
from quire.serve.protocol import Body, ChatBody, GenerationBody, Message, TokenizeBody

_COMPOSED_CHARACTERS = 4
"""Most characters that Unicode composes into one: U+1F82 is a letter with 3 marks."""

_SHRINKAGE = {"NFC": _COMPOSED_CHARACTERS, "NFKC": _COMPOSED_CHARACTERS}
_PROBES = (" ", "\n", "\t", "a", "ab ", "0", "\u00e9", "\u4f60", "\U0001f600", "\u200b")
_PROBE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class TextLength:
    """A lower bound of the number of tokens of texts."""

    characters_per_token: int  # most characters of a token, without spaces next to `stripping`
    stripping: tuple[str, ...] = ()  # added tokens that include adjacent spaces

    def min_tokens(self, text: str) -> int:
        characters = len(text)
        if any(token in text for token in self.stripping):
            characters = sum(map(len, text.split()))
        return -(-characters // self.characters_per_token)


def text_length(tokenizer: PreTrainedTokenizerBase) -> TextLength | None:
    """The bound for a tokenizer; None if there is no bound."""
    normalizer = _normalizer(tokenizer)
    shrinkage, stripping = _shrinkage(normalizer), _stripping(tokenizer)
    # a token that is matched in normalized text may not appear in the original text
    if shrinkage is None or (normalizer is not None and any(t.normalized for t in stripping)):
        return None
    longest = max(map(len, tokenizer.get_vocab()), default=0) * shrinkage
    if not all(_holds(tokenizer, probe, longest) for probe in _PROBES):
        return None
    return TextLength(longest, tuple(token.content for token in stripping))


def _stripping(tokenizer: PreTrainedTokenizerBase) -> list[AddedToken]:
    """Added tokens that include any number of adjacent spaces."""
    added = tokenizer.added_tokens_decoder.values()
    return [token for token in added if token.lstrip or token.rstrip]


def _holds(tokenizer: PreTrainedTokenizerBase, probe: str, longest: int) -> bool:
    """Whether the bound is valid for a long text of one repeated string.

    The bound is not valid if the tokenizer merges unknown characters or spaces into one token.
    """
    text = probe * (max(_PROBE_CHARACTERS, 2 * longest) // len(probe))
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return len(token_ids) * longest >= len(text)


def _normalizer(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """The normalizer in the format of `tokenizer.json`; type "unknown" for slow tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"type": "unknown"}
    if backend.normalizer is None:
        return None
    described: Mapping[str, Any] = json.loads(backend.normalizer.__getstate__())
    return described


def _shrinkage(normalizer: Mapping[str, Any] | None) -> int | None:
    """Most characters that a normalizer merges into one; None if it may drop any number."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for part in map(_shrinkage, normalizer["normalizers"]):
            if part is None:
                return None
            product *= part
        return product
    if kind == "Replace":
        replaced = normalizer["pattern"].get("String")
        is_shorter = replaced is None or len(normalizer["content"]) < len(replaced)
        return None if is_shorter else 1
    return 1 if kind in ("NFD", "NFKD", "Prepend", "ByteLevel") else _SHRINKAGE.get(kind)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    tenant: str
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


@dataclass(slots=True)
class _Turns:
    """The jobs of one tenant: its last turn, its waiting jobs (oldest first), and running jobs."""

    last: int
    waiting: deque[_Job] = field(default_factory=deque)
    running: int = 0


class FairPool:
    """Runs jobs in threads. All methods must be called in one event loop.

    The next job belongs to the tenant with the fewest running jobs; ties are broken by the oldest
    last turn. A tenant that was idle ranks after tenants that have waited for more than one turn.
    A tenant can use all threads except one, so that it cannot block another tenant's job.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._free = threads
        self._max_each = max(1, threads - 1)
        self._tenants: dict[str, _Turns] = {}
        self._num_turns = 0

    def close(self) -> None:
        for turns in self._tenants.values():
            for job in turns.waiting:
                job.done.cancel()
            turns.waiting.clear()
        self._executor.shutdown(cancel_futures=True)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        turns = self._tenants.setdefault(tenant, _Turns(last=self._num_turns - 1))
        turns.waiting.append(_Job(tenant, work, done))
        self._start()
        return await done

    def _start(self) -> None:
        while self._free and (tenant := self._next()) is not None:
            turns = self._tenants[tenant]
            job = turns.waiting.popleft()
            if job.done.cancelled():
                self._forget_idle(tenant)
                continue
            self._num_turns += 1
            turns.last = self._num_turns
            turns.running += 1
            self._free -= 1
            loop = job.done.get_loop()
            ran = loop.run_in_executor(self._executor, job.work)
            ran.add_done_callback(partial(self._finish, job))

    def _next(self) -> str | None:
        ready = {
            tenant: (turns.running, turns.last)
            for tenant, turns in self._tenants.items()
            if turns.waiting and turns.running < self._max_each
        }
        return min(ready, key=ready.__getitem__, default=None)

    def _finish(self, job: _Job, ran: "asyncio.Future[Any]") -> None:
        self._free += 1
        self._tenants[job.tenant].running -= 1
        self._forget_idle(job.tenant)
        if ran.cancelled():
            job.done.cancel()
        elif (error := ran.exception()) is not None and not job.done.done():
            job.done.set_exception(error)
        elif not job.done.done():
            job.done.set_result(ran.result())
        self._start()

    def _forget_idle(self, tenant: str) -> None:
        turns = self._tenants[tenant]
        if not turns.waiting and not turns.running:
            del self._tenants[tenant]


FULL = "full"


def sequences_of_words(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str]
) -> list[tuple[int, ...]]:
    """Token sequences that write one of these words, at the beginning of a text or after a space.

    As in vLLM the sequence after a space is used only if it has as many tokens and another first
    token; other tokenizations of a word are not banned.
    """
    return list(dict.fromkeys(ids for word in words for ids in _sequences(tokenizer, word)))


def _sequences(tokenizer: PreTrainedTokenizerBase, word: str) -> Iterator[tuple[int, ...]]:
    alone = _ids(tokenizer, word.lstrip())
    if not alone:
        raise FieldError("bad_words", f"expected words with tokens, got {bounded(word, 40)!r}")
    yield alone
    spaced = _ids(tokenizer, " " + word.lstrip())
    if len(spaced) == len(alone) and spaced[0] != alone[0]:
        yield spaced


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def with_budget(rule: str, budget: int | float | str) -> str:
    """An eviction rule with another cap.

    Args:
        rule: the rule of the request, or the default of its tenant or of the engine.
        budget: tokens of a lane, a fraction of the prompt such as 0.25 or "25%", or bytes such as
            "2MiB".
    """
    text = str(budget)
    try:
        Cap.parse(text)
        policy = parse_policy(rule)
    except ConfigError as error:
        raise FieldError("kv_budget", f"kv_budget: {error}") from None
    if policy.name == FULL:
        raise FieldError(
            "kv_budget",
            "`kv_budget` needs an eviction rule, and the request has none: set `evict`, such as "
            f'"recent:cap={bounded(text, 20)}"; the server must allow it with --evict or '
            "--evict-allow",
        )
    options = {**policy.options, "cap": text.strip()}
    return f"{policy.name}:{','.join(f'{name}={value}' for name, value in options.items())}"


LONG_TEXT_CHARACTERS = 200_000
"""Longer texts take more than some tenths of a second."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and as text if it was sent as text."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tenant and length limit for the tokenization of a text."""

    tenant: str
    max_tokens: int | None  # of the longest sequence; None: unlimited

    def is_exceeded_by(self, num_tokens: int) -> bool:
        return self.max_tokens is not None and num_tokens > self.max_tokens


class Texts:
    """A model's tokenizer, for the server.

    Tokenization runs in threads with fair scheduling between tenants, because long texts take
    long. A text of more than `LONG_TEXT_CHARACTERS` runs in a thread of its own, one such text at
    a time, so that other texts do not wait for it.
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
        return self._chat is not None and self._chat.reads(variable)

    async def bad_words(self, words: Sequence[str] | None, turn: Turn) -> list[tuple[int, ...]]:
        if not words:
            return []
        tokenizer = self._tokenizer("bad_words", "use `bad_token_ids`")
        return await self._in_turn(turn, lambda: sequences_of_words(tokenizer, words))

    async def decoded(self, token_ids: list[int], turn: Turn) -> str:
        if turn.is_exceeded_by(len(token_ids)):
            raise RequestError(
                f"expected at most {turn.max_tokens:,} token ids (the longest sequence), got "
                f"{len(token_ids):,}: send them in several requests",
                param="tokens",
            )
        return await self._in_turn(turn, lambda: self.decode(token_ids))

    async def pieces(self, token_ids: list[int], turn: Turn) -> list[str]:
        return await self._in_turn(turn, lambda: [self._pieces.text(i) for i in token_ids])

    def decode(self, token_ids: list[int]) -> str:
        """Decode token ids, including special tokens."""
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
        least = self._length.min_tokens(text)
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
