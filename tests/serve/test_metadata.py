"""Metadata in a body is repeated in the response, as in OpenAI's API."""

import json

import pytest

METADATA = {"trace": "t-9"}


def test_completion_response_includes_its_metadata(complete):
    assert complete(metadata=METADATA)["metadata"] == METADATA
    assert "metadata" not in complete()


def test_stream_chunks_include_the_metadata(post):
    messages = [{"role": "user", "content": "Once"}]
    response = post(
        "/v1/chat/completions", messages=messages, max_tokens=2, stream=True, metadata=METADATA
    )

    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    assert lines
    assert all(json.loads(line)["metadata"] == METADATA for line in lines)


@pytest.mark.parametrize("metadata", [{"n": 1}, {"n": "v" * 513}, {str(i): "" for i in range(17)}])
def test_invalid_metadata_is_refused(post, metadata):
    response = post("/v1/completions", prompt="Once", max_tokens=1, metadata=metadata)

    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("metadata")
