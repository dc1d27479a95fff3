"""Response bodies of completions and chats: choices, usage and metadata."""

import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from pydantic import BaseModel

from quire.config.generation_request import echoed_options
from quire.sampling import outputs
from quire.sampling.outputs import OutputDelta, RequestOutput, Usage, summed
from quire.sampling.sampler import SampledToken
from quire.serve.logprobs import (
    Scored,
    TokenPieces,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from quire.serve.tools.chat import CallWriter

Responses = dict[int | str, dict[str, Any]]


class ErrorObject(BaseModel):
    """An error in OpenAI's format; `param` is the name of the invalid field."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of a response to a refused or failed request."""

    error: ErrorObject


class MessagesErrorObject(BaseModel):
    """An error in Anthropic's format."""

    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """The body of a response to a refused or failed request for messages."""

    type: str
    error: MessagesErrorObject


def _errors(model: type[BaseModel]) -> Responses:
    refused = "The request is refused: its error names the field and what to change."
    failed = "The server is busy, shuts down or has failed."
    return {
        "4XX": {"description": refused, "model": model},
        "5XX": {"description": failed, "model": model},
    }


ERRORS = _errors(ErrorBody)
"""Responses of all paths."""

MESSAGES_ERRORS = _errors(MessagesErrorBody)
"""Responses of the paths of Anthropic's API."""

STREAM: Responses = {200: {"content": {"text/event-stream": {}}}}
"""Response of a path whose requests may have `stream`."""

PROBE: Responses = {
    "5XX": {"description": "The server accepts no requests. The body is empty.", "content": {}}
}
"""Responses of the probes."""

# ---- writers -------------------------------------------------------------------------------------

# Formats choices of whole outputs and of deltas in OpenAI's two formats.
#
# A delta without text makes no chunk; its log-probabilities are sent with the next chunk.

Choice = dict[str, object]


@dataclass(slots=True, kw_only=True)
class CompletionWriter:
    """Formats a choice of /v1/completions."""

    index: int
    pieces: TokenPieces
    wants_logprobs: bool
    echo: str | None = None  # text of the prompt if it precedes the output
    scores_prompt: bool = False  # whether the choice contains the scores of the prompt
    _held: list[SampledToken] = field(default_factory=list)
    _shown: int = 0

    def whole(self, output: RequestOutput, choice: outputs.Choice) -> Choice:
        logprobs = None
        if self.wants_logprobs:
            scores: list[Scored] = list(choice.logprobs or ())
            placed = self._placed(choice.logprobs or (), choice.text, len(self.echo or ""))
            if self.echo is not None:
                scores = [*(output.prompt_logprobs or ()), *scores]
                prompt = output.prompt_token_ids
                offsets = self.pieces.prompt_offsets(prompt, self.echo)
                placed = self.pieces.placed(prompt, offsets, self.echo) + placed
            logprobs = completion_logprobs(self.pieces, placed, scores)
        body = self._choice((self.echo or "") + choice.text, logprobs, choice)
        if self.scores_prompt:
            body["prompt_logprobs"] = prompt_logprobs(self.pieces, output.prompt_logprobs or ())
        return body

    def chunks(self, delta: OutputDelta) -> list[Choice]:
        """Format a delta as chunks; none if the delta has no text and does not finish."""
        text = (self.echo or "") + delta.text
        self.echo = None
        self._held += delta.logprobs or ()
        if not text and delta.finish_reason is None:
            return []
        logprobs = None
        if self.wants_logprobs:
            # the text of other tokens may still be cut by a stop text
            end = math.inf if delta.finish_reason is not None else self._shown + len(text)
            scores = list(takewhile(lambda score: (score.text_offset or 0) < end, self._held))
            del self._held[: len(scores)]
            placed = self._placed(scores, text, 0, self._shown)
            logprobs = completion_logprobs(self.pieces, placed, scores)
        self._shown += len(text)
        return [self._choice(text, logprobs, delta)]

    def _placed(
        self, scores: Sequence[SampledToken], text: str, before: int, start: int = 0
    ) -> list[tuple[str, int]]:
        ids = [score.token_id for score in scores]
        offsets = [before + (score.text_offset or 0) for score in scores]
        return self.pieces.placed(ids, offsets, text, before + start)

    def _choice(
        self, text: str, logprobs: dict[str, object] | None, source: outputs.Choice | OutputDelta
    ) -> Choice:
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": source.finish_reason,
            "stop_reason": source.stop_reason,
        }


@dataclass(slots=True, kw_only=True)
class ChatWriter:
    """Formats a choice of /v1/chat/completions."""

    index: int
    pieces: TokenPieces
    wants_logprobs: bool
    calls: CallWriter | None = None  # None: all text is content
    _held: list[SampledToken] = field(default_factory=list)
    _began: bool = False

    def whole(self, output: RequestOutput, choice: outputs.Choice) -> Choice:
        message: dict[str, object] = {"role": "assistant", "content": choice.text, "refusal": None}
        message["tool_calls"] = None
        if self.calls is not None:
            message |= self.calls.message(choice.text)
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs or ()),
            "finish_reason": self._finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def chunks(self, delta: OutputDelta) -> list[Choice]:
        """Format a delta as chunks: the role first, then content, then the finish reason."""
        self._held += delta.logprobs or ()
        chunks = []
        if not self._began:
            self._began = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        chunks += [self._chunk(part, logprobs=self._take_held()) for part in self._parts(delta)]
        if delta.finish_reason is not None:
            last = self._chunk({}, logprobs=self._take_held() if self._held else None)
            last |= {"finish_reason": self._finish_reason(delta.finish_reason)}
            chunks.append(last | {"stop_reason": delta.stop_reason})
        return chunks

    def _parts(self, delta: OutputDelta) -> list[dict[str, object]]:
        """Content and tool calls that a delta adds."""
        if self.calls is not None:
            return self.calls.deltas(delta.text, is_last=delta.finish_reason is not None)
        return [{"content": delta.text}] if delta.text else []

    def _finish_reason(self, reason: str | None) -> str | None:
        return reason if self.calls is None else self.calls.finish_reason(reason)

    def _chunk(
        self, content: dict[str, object], *, logprobs: dict[str, object] | None = None
    ) -> Choice:
        return {
            "index": self.index,
            "delta": content,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _take_held(self) -> dict[str, object] | None:
        held, self._held = self._held, []
        return self._logprobs(held) if held else None

    def _logprobs(self, scores: Sequence[SampledToken]) -> dict[str, object] | None:
        return chat_logprobs(self.pieces, scores) if self.wants_logprobs else None


Writer = CompletionWriter | ChatWriter


# ---- responses -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Metadata of a response, equal in all its chunks."""

    id: str
    model: str
    whole: str
    chunk: str
    created: int  # Unix time in seconds
    # options of the request that the response contains
    echoed: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of_completion(cls, model: str, options: Mapping[str, object]) -> "Envelope":
        return cls._new("cmpl-", model, "text_completion", "text_completion", options)

    @classmethod
    def of_chat(
        cls, model: str, options: Mapping[str, object], id_prefix: str = "chatcmpl-"
    ) -> "Envelope":
        return cls._new(id_prefix, model, "chat.completion", "chat.completion.chunk", options)

    @classmethod
    def _new(
        cls, prefix: str, model: str, whole: str, chunk: str, options: Mapping[str, object]
    ) -> "Envelope":
        return cls(
            id=f"{prefix}{uuid.uuid4().hex}",
            model=model,
            whole=whole,
            chunk=chunk,
            created=int(time.time()),
            echoed=echoed_options(options),
        )

    def body(self, choices: Sequence[Choice], usage: dict[str, object]) -> dict[str, object]:
        return self._around(self.whole, choices) | {"usage": usage}

    def chunk_body(
        self, choices: Sequence[Choice], usage: dict[str, object] | None
    ) -> dict[str, object]:
        """Body of one chunk of a stream; the key `usage` is left out if None."""
        body = self._around(self.chunk, choices)
        return body if usage is None else body | {"usage": usage}

    def _around(self, kind: str, choices: Sequence[Choice]) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            "system_fingerprint": None,
            **self.echoed,
        }


def usage_body(usages: Iterable[Usage]) -> dict[str, object]:
    """The `usage` object of a response.

    The extensions of Quire are sums over the prompts: of the peak KV of each prompt with all its
    outputs, of its recomputed tokens, and of the largest number of evictions and of tokens evicted
    from one of its outputs. `max_tokens` and `max_tokens_limit` are added if the context or the KV
    memory limited the output.
    """
    usage = summed(list(usages))
    accepted, details = usage.accepted_draft_tokens, dict[str, object]()
    if usage.draft_tokens:
        details["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": usage.draft_tokens - accepted,
        }
    return token_counts(usage.prompt_tokens, usage.completion_tokens) | {
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
        **usage.extensions(),
    }


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    """Token counts of the `usage` object, which are known during generation."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
