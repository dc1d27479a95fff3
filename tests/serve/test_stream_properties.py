"""Server-sent events of any request, read by a parser of the standard, in any pieces."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEXTS = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\r\n\u2028\u2029\x85\x0b\0:{}\"'\\"),
    min_size=1,
    max_size=24,
)
SHARED = [HealthCheck.function_scoped_fixture]  # every request has a new application
CHATS, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


class EventParser:
    """Parser of `text/event-stream`, as in section 9.2.6 of the HTML standard."""

    def __init__(self):
        self.events, self._data, self._kind, self._rest = [], [], "", b""

    def feed(self, piece):
        self._rest += piece
        lines = self._rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        *whole, self._rest = lines
        for line in whole:
            self._line(line.decode("utf-8"))

    def _line(self, line):
        if not line:
            if self._data:
                self.events.append((self._kind or "message", "\n".join(self._data)))
            self._data, self._kind = [], ""
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._kind = value

    @property
    def is_complete(self):
        return not self._rest and not self._data


def events_of(content, seed):
    """Events of a body that arrives in pieces of random sizes."""
    rng, parser, start = random.Random(seed), EventParser(), 0
    while start < len(content):
        size = rng.choice((1, 2, 3, 7, 64, 4096))
        parser.feed(content[start : start + size])
        start += size
    assert parser.is_complete
    return parser.events


@settings(max_examples=15, suppress_health_check=SHARED)
@given(text=TEXTS, options=st.fixed_dictionaries({"n": st.integers(1, 3)}), seed=st.integers(0, 99))
def test_streamed_echo_is_the_whole_text(post, text, options, seed):
    body = {"prompt": text, "max_tokens": 2, "temperature": 0, "echo": True, **options}
    whole = post(COMPLETIONS, **body)
    assert whole.status_code == 200, whole.text

    streamed = post(COMPLETIONS, **body, stream=True)

    *events, (kind, last) = events_of(streamed.content, seed)
    assert (kind, last) == ("message", "[DONE]")
    texts = [""] * options["n"]
    for _, data in events:
        for choice in json.loads(data)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole.json()["choices"]]


@settings(max_examples=10, suppress_health_check=SHARED)
@given(text=TEXTS, seed=st.integers(0, 99), logprobs=st.booleans(), usage=st.booleans())
def test_streamed_chat_is_the_whole_message(post, text, seed, logprobs, usage):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, "temperature": 0}
    whole = post(CHATS, **body)

    streamed = post(
        CHATS,
        **body,
        stream=True,
        logprobs=logprobs,
        stream_options={"include_usage": usage},
    )

    *events, (_, last) = events_of(streamed.content, seed)
    chunks = [json.loads(data) for _, data in events]
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert last == "[DONE]"
    assert "".join(deltas) == whole.json()["choices"][0]["message"]["content"]
    assert any("usage" in chunk and chunk["usage"] for chunk in chunks) == usage


@pytest.mark.parametrize("path", ["/v1/responses", MESSAGES])
@settings(max_examples=6, suppress_health_check=SHARED)
@given(text=TEXTS, seed=st.integers(0, 99))
def test_named_events_agree_with_their_data(post, path, text, seed):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
    if path != MESSAGES:
        body = {"input": text, "max_output_tokens": 3}

    response = post(path, **body, stream=True)

    events = events_of(response.content, seed)
    assert response.status_code == 200, response.text
    assert all(json.loads(data)["type"] == kind for kind, data in events)
    assert len(events) > 3
