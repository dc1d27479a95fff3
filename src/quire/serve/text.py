"""Between text and tokens: prompts and chats in, text out. The engine detokenizes answers."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from quire.errors import RequestError
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_chat, encode_prompt
from quire.serve.protocol import Message, Prompts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, where it came as text, and as token ids."""

    text: str | None
    token_ids: list[int]


class Texts:
    """A model's tokenizer, for the server.

    Long texts take long to read, so they are read in a thread; in one only, because tokenizers
    need not bear more.

    Args:
        model: its tokenizer may be missing; then prompts are token ids.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-text")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def prompts(self, prompts: Prompts, *, add_special_tokens: bool = True) -> list[Prompt]:
        """Read one prompt or several, as text or as ids.

        Raises:
            RequestError: text that has no tokens, or a model without a tokenizer.
        """
        if isinstance(prompts, str):
            listed: list[str | list[int]] = [prompts]
        elif isinstance(prompts[0], int):
            listed = [prompts]
        else:
            listed = prompts  # type: ignore[assignment]
        return await self._in_thread(
            lambda: [self._prompt(p, add_special_tokens=add_special_tokens) for p in listed]
        )

    async def chat(self, messages: list[Message], *, add_generation_prompt: bool = True) -> Prompt:
        """Read a conversation under the model's chat template.

        Raises:
            RequestError: no tokenizer, no template, or a template that refuses the messages.
        """
        plain = [_plain(message) for message in messages]
        tokenizer = self._tokenizer()

        def read() -> Prompt:
            ids = encode_chat(tokenizer, plain, add_generation_prompt=add_generation_prompt)
            return Prompt(None, ids)

        return await self._in_thread(read)

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            RequestError: an id outside the vocabulary, or a model without a tokenizer.
        """
        vocab_size = self._model.spec.vocab_size
        wrong = [token for token in token_ids if not 0 <= token < vocab_size]
        if wrong:
            raise RequestError(f"token ids lie in [0, {vocab_size - 1}], got {wrong[:5]}")
        text = self._tokenizer().decode(token_ids, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)

    def shown(self, prompt: Prompt) -> str:
        """A prompt as text: as it came, or decoded.

        Raises:
            RequestError: ids outside the vocabulary, or a model without a tokenizer.
        """
        return self.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _prompt(self, prompt: str | list[int], *, add_special_tokens: bool) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(None, prompt)
        tokenizer = self._tokenizer()
        if add_special_tokens:
            return Prompt(prompt, encode_prompt(tokenizer, prompt))
        prompt.encode()  # tokenizers answer what is no Unicode with a TypeError
        token_ids = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        if not token_ids:
            raise RequestError("expected a prompt of at least one token, got an empty text")
        return Prompt(prompt, [int(token) for token in token_ids])

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self._model.tokenizer is None:
            raise RequestError(
                f"{self._model.name} has no tokenizer: give prompts as token ids to /v1/completions"
            )
        return self._model.tokenizer

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is no valid Unicode: {error.reason}") from None


def _plain(message: Message) -> dict[str, object]:
    """A message as templates take it: content as one text, fields that say nothing left out."""
    fields = message.model_dump(exclude_none=True)
    if not isinstance(message.content, str):
        fields["content"] = "".join(part.text for part in message.content or ())
    return fields
