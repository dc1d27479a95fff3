"""Incremental reading of JSON in the text of a model: the end of a value, and a call object."""

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallStart:
    """The begin of a call: the name of its function is known."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Text of the arguments of the call that began last."""

    text: str


CallEvent = CallStart | Arguments


class ValueEnd:
    """Finds the end of one JSON value, character by character.

    The value is not validated: brackets are counted outside of strings.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_bare")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_bare = False

    def feed(self, character: str) -> Literal["inside", "last", "after"]:
        """Process a character: it is inside the value, its last one, or after a bare value.

        The first character must not be whitespace.
        """
        if self._in_string:
            return self._in_text(character)
        if character in ",]} \t\r\n" and not self._depth:
            return "after"  # of a number, true, false or null
        if character == '"':
            self._in_string = True
        elif character in "[{":
            self._depth += 1
        elif character in "]}":
            self._depth -= 1
            return "inside" if self._depth else "last"
        return "inside"

    def _in_text(self, character: str) -> Literal["inside", "last"]:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return "inside" if self._depth else "last"
        return "inside"


Steps = Generator[None, str, None]
StepsTo = Generator[None, str, str]
StepsToValue = Generator[None, str, tuple[str, str]]

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("name", "type", "id")


class CallReader:
    """Reads one call, such as {"name": "f", "arguments": {...}}, character by character.

    The arguments are passed on as written. If they precede the name, they are held until the name
    is known. A string of arguments is decoded.

    Attributes:
        raw: the characters before the call has started, to restore an object that is no call.
        state: "reading", "done" after the closing bracket, or "failed" if it is no call.
        has_started: whether a `CallStart` was returned; then it cannot fail.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.state: Literal["reading", "done", "failed"] = "reading"
        self.has_started = False
        self._steps = self._object()
        self._events: list[CallEvent] = []
        self._name = ""
        self._arguments = ""  # held
        self._has_arguments = False
        next(self._steps)

    def feed(self, character: str) -> list[CallEvent]:
        """Process a character while `state` is "reading"."""
        if not self.has_started:
            self.raw += character
        try:
            self._steps.send(character)
        except StopIteration:
            if self.state == "reading":
                self.state = "done"
        events, self._events = self._events, []
        return events

    # The grammar as a coroutine: every `yield` receives the next character.

    def _object(self) -> Steps:
        character = yield from self._skip("")
        if character != "{":
            return self._fail()
        character = yield from self._skip("")
        while character != "}":
            if character != '"':
                return self._fail()
            key_text, _ = yield from self._value(character)
            key = _decoded(key_text)
            if key not in _ARGUMENTS + _OTHERS and not self.has_started:
                return self._fail()
            character = yield from self._skip("")
            if character != ":":
                return self._fail()
            first = yield from self._skip("")
            character = yield from self._member(key, first)
            if character not in (",", "}"):
                return self._fail()
            if character == ",":
                character = yield from self._skip("")
        return self._finish()

    def _member(self, key: object, first: str) -> StepsTo:
        """Read the value of a key; return the next character that is not whitespace."""
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            after = yield from self._read_arguments(first)
        else:
            text, after = yield from self._value(first)
            if key == "name" and not self._name:
                name = _decoded(text)
                if not isinstance(name, str) or not name:
                    self._fail()
                    return ""
                self._name = name
                if self._has_arguments:
                    self._start()
        return (yield from self._skip(after))

    def _read_arguments(self, first: str) -> StepsTo:
        if first != "{":
            text, after = yield from self._value(first)
            self._add(_as_arguments(text))
            return after
        end, character = ValueEnd(), first
        while True:
            place = end.feed(character)
            self._add(character)
            if place == "last":
                return ""
            character = yield

    def _value(self, first: str) -> StepsToValue:
        """Read a value; return its text, and the character after it or ""."""
        end, text, character = ValueEnd(), "", first
        while True:
            place = end.feed(character)
            if place == "after":
                return text, character
            text += character
            if place == "last":
                return text, ""
            character = yield

    def _skip(self, character: str) -> StepsTo:
        """Return the first character that is not whitespace."""
        while not character or character in WHITESPACE:
            character = yield
        return character

    def _add(self, text: str) -> None:
        self._arguments += text
        if self._name:
            self._start()

    def _start(self) -> None:
        if not self.has_started:
            self.has_started = True
            self._events.append(CallStart(self._name))
        self._events.append(Arguments(self._arguments))
        self._arguments = ""

    def _finish(self) -> None:
        if not self._name:
            self._fail()
        elif not self._has_arguments:
            self._add("{}")

    def _fail(self) -> None:
        if not self.has_started:
            self.state = "failed"


def _decoded(text: str) -> object:
    """The value of a JSON text; None if it is invalid."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _as_arguments(text: str) -> str:
    """Arguments that are not written as an object: a text with JSON, or nothing."""
    value = _decoded(text)
    if isinstance(value, str) and value:
        return value
    return text if value else "{}"
