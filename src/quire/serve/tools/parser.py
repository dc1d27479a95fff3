"""Base of the parsers of tool calls: content, markers, and objects that are calls.

A parser gets a text in parts and returns events. Their concatenation does not depend on the parts.
Text that is no valid call is content. Whitespace before a call and after the last one is dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from quire.serve.tools.json_text import WHITESPACE, Arguments, CallEvent, CallReader


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the message."""

    text: str


Event = Content | CallEvent


class ToolParser(ABC):
    """Finds the tool calls in the text of one output.

    A subclass handles the part of the text in `_buffer` that belongs to its current mode.

    Attributes:
        num_calls: number of calls that began.
    """

    marker: str = ""
    """Text that begins calls; "" if calls have no marker."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._buffer = ""
        self._space = ""  # whitespace that precedes a call or content
        self._events: list[Event] = []
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Event]:
        """Add text; return what is certain."""
        self._buffer += text
        while self._buffer and self._advance():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """End the text; return the rest. An incomplete call that has not begun is content."""
        rest, self._buffer = self._pending() + self._buffer, ""
        if self._reader is not None and not self._reader.has_started:
            rest = self._opening() + self._reader.raw + rest
        self._reader = None
        if rest:
            self._add_content(rest)
        if self._space and not self.num_calls:
            self._events.append(Content(self._space))
        return self._taken()

    @abstractmethod
    def _advance(self) -> bool:
        """Process a part of the buffer; False if more text is needed."""

    def _pending(self) -> str:
        """Text outside of the buffer that is content if the output ends now."""
        return ""

    def _opening(self) -> str:
        """Text before an object that is content if the object is no call."""
        return ""

    def _on_call_end(self) -> None:
        """Choose the mode after a call."""
        return

    def _on_failure(self) -> None:
        """Choose the mode after an object that is no call."""
        return

    # ---- parts of the formats ------------------------------------------------------------------

    def _add_content(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip(WHITESPACE)
        self._space = text[len(shown) :]
        if shown:
            self._events.append(Content(shown))

    def _find_marker(self) -> bool:
        """Pass on content up to a marker, and drop the marker; whether one was found."""
        before, found, after = self._buffer.partition(self.marker)
        if found:
            self._add_content(before)
            self._buffer = after
            return True
        held = _possible(self._buffer, self.marker)
        self._add_content(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _skip_space(self) -> str:
        """Drop whitespace at the start of the buffer; return the next character or ""."""
        self._buffer = self._buffer.lstrip(WHITESPACE)
        return self._buffer[:1]

    def _read_call(self) -> bool:
        """Read characters of a call; True if it ended or failed."""
        reader = self._reader
        if reader is None:
            reader = self._reader = CallReader()
        for count, character in enumerate(self._buffer, start=1):
            had_started = reader.has_started
            self._events += reader.feed(character)
            if reader.has_started and not had_started:
                self._count_call()
            if reader.state != "reading":
                self._buffer, self._reader = self._buffer[count:], None
                if reader.state == "failed":
                    self._add_content(self._opening() + reader.raw)
                    self._on_failure()
                else:
                    self._on_call_end()
                return True
        self._buffer = ""
        return False

    def _count_call(self) -> None:
        self.num_calls += 1
        self._space = ""

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)


def _possible(text: str, marker: str) -> int:
    """Length of the longest suffix of a text that is a prefix of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


def merged(events: Sequence[Event]) -> list[Event]:
    """Join adjacent texts of one kind."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        else:
            joined.append(event)
    return joined
