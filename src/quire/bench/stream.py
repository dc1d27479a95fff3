"""Reads the response to one request: times of its events, text, tokens, and errors."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

_MOST_ERROR_CHARACTERS = 500


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened to one request.

    Attributes:
        start_s: time when it was sent; times are those of `time.perf_counter`.
        prompt_tokens: length of its prompt.
        first_s: time of the first event with text; None without one.
        last_s: time of the last event with text.
        end_s: end of the response.
        itl_s: times between events with text (inter-token latencies).
        output_tokens: tokens by the server's usage; else the number of events with text.
        text: the output.
        error: reason of a failure; empty if the request was successful.
    """

    start_s: float
    prompt_tokens: int
    first_s: float | None = None
    last_s: float = 0.0
    end_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the whole output arrived."""
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token; 0 without one."""
        return 0.0 if self.first_s is None else self.first_s - self.start_s

    @property
    def e2el_s(self) -> float:
        """Seconds from sending to the last token (end-to-end latency)."""
        return (self.last_s if self.first_s is not None else self.end_s) - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first one; None with fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    def note_text(self, now_s: float) -> None:
        """Record the time of an event with text."""
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.itl_s.append(now_s - self.last_s)
        self.last_s = now_s


class EventReader:
    """Splits a stream of server-sent events into the JSON of each event."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterator[str]:
        """Yield the contents of the events that this segment completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def read_stream(segments: Iterable[tuple[float, bytes]], outcome: Outcome) -> None:
    """Read a streamed response.

    Args:
        segments: parts of the body with the times of their arrival.
        outcome: receives times, text and tokens.
    """
    reader, usage, events, texts = EventReader(), None, 0, list[str]()
    for now_s, segment in segments:
        outcome.end_s = now_s
        for content in reader.add(segment):
            if content == "[DONE]":
                continue
            chunk = json.loads(content)
            if chunk.get("error"):
                outcome.error = error_text(chunk)
            usage = chunk.get("usage") or usage
            text = text_of(chunk)
            if text is not None:
                events += 1
                outcome.note_text(now_s)
                texts.append(text)
    outcome.text = "".join(texts)
    reported = (usage or {}).get("completion_tokens")
    outcome.output_tokens = events if reported is None else reported
    if not outcome.error and outcome.first_s is None:
        outcome.error = "the response has no output"


def text_of(chunk: dict[str, Any]) -> str | None:
    """Text that an event adds; None for an event without text, as at the start of a chat."""
    if not chunk.get("choices"):
        return None
    choice = chunk["choices"][0]
    if "text" in choice:
        return choice["text"] or None
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or None


def error_text(body: object) -> str:
    """Message of an error, at most 500 characters."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:_MOST_ERROR_CHARACTERS]
