"""What clients get: the bodies of completions and chats around their choices, and their usage."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.config.generation_request import echoed_options
from quire.sampling.outputs import Usage, summed
from quire.serve.writers import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What is around the choices, the same in all chunks of a response.

    Attributes:
        id: unique.
        model: the name the client asked for.
        whole, chunk: names of the two kinds of body.
        created: seconds since 1970.
        echoed: options of the request that the response repeats.
    """

    id: str
    model: str
    whole: str
    chunk: str
    created: int
    echoed: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of_completion(cls, model: str, options: Mapping[str, object]) -> "Envelope":
        """For /v1/completions."""
        return cls._new("cmpl", model, "text_completion", "text_completion", options)

    @classmethod
    def of_chat(cls, model: str, options: Mapping[str, object]) -> "Envelope":
        """For /v1/chat/completions."""
        return cls._new("chatcmpl", model, "chat.completion", "chat.completion.chunk", options)

    @classmethod
    def _new(
        cls, prefix: str, model: str, whole: str, chunk: str, options: Mapping[str, object]
    ) -> "Envelope":
        return cls(
            id=f"{prefix}-{uuid.uuid4().hex}",
            model=model,
            whole=whole,
            chunk=chunk,
            created=int(time.time()),
            echoed=echoed_options(options),
        )

    def body(self, choices: Sequence[Choice], usage: dict[str, object]) -> dict[str, object]:
        """A whole response."""
        return self._around(self.whole, choices) | {"usage": usage}

    def chunk_body(
        self, choices: Sequence[Choice], usage: dict[str, object] | None
    ) -> dict[str, object]:
        """One chunk of a stream; without `usage` the key is left out."""
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
    """What a response took.

    `kv_peak_bytes` and `evicted_tokens` are Quire's own: the sums over the prompts, of each the
    peak with all its answers and the most tokens that one of them evicted.

    Args:
        usages: one for each prompt, with all its answers.
    """
    usage = summed(list(usages))
    return token_counts(usage.prompt_tokens, usage.completion_tokens) | {
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "kv_peak_bytes": usage.kv_peak_bytes,
        "evicted_tokens": usage.evicted_tokens,
    }


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    """The part of `usage` that is known all the time."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
