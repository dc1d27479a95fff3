"""Metadata of a request: validated on construction and attached to its output."""

import asyncio
from contextlib import closing

import pytest

from quire.api.async_llm import AsyncLLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import RequestError
from support import engines

METADATA = {"user": "u-1", "trace": "t-9"}
PROMPT = [3, 4, 5]


@pytest.fixture
def engine():
    return Engine(engines.load("llama"), KVConfig(memory="96KiB", page_tokens=8))


def test_outputs_have_the_metadata_of_their_request(engine):
    requests = [
        GenerationRequest(PROMPT, engines.greedy(3), metadata=METADATA),
        GenerationRequest(PROMPT, engines.greedy(3)),
    ]

    async def main():
        with closing(AsyncLLM(engine)) as llm:
            return [await llm.generate(request) for request in requests]

    found = [output.request for output in asyncio.run(main())]

    assert [request.metadata for request in found] == [METADATA, None]


def test_metadata_is_copied(engine):
    given = dict(METADATA)
    request = GenerationRequest(PROMPT, metadata=given)
    given["user"] = "another"

    assert request.metadata == METADATA


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "expected metadata to be a dictionary, got 7"),
        ({"n": 1}, "expected metadata with string values, got 'n': 1"),
        ({str(i): "" for i in range(17)}, "16 pairs at most, got 17"),
        ({"n" * 65: ""}, "names of 64 and values of 512 characters at most, got 65 and 0"),
        ({"n": "v" * 513}, "got 1 and 513"),
    ],
)
def test_invalid_metadata_is_refused(given, message):
    with pytest.raises(RequestError, match=message) as refused:
        GenerationRequest(PROMPT, metadata=given)

    assert refused.value.param == "metadata"


def test_request_options_are_validated_on_construction():
    with pytest.raises(RequestError, match="expected priority to be a whole number, got 'high'"):
        GenerationRequest(PROMPT, priority="high")
