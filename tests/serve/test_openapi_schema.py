"""Requests that schemathesis generates from /openapi.json: no response is a server error.

`HYPOTHESIS_PROFILE=deep pytest tests/serve/test_openapi_schema.py` sends more than 2,000 requests.
"""

import json
import os
import time
import zlib
from collections import Counter
from contextlib import contextmanager, nullcontext

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.busy_server import served

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
CASES = 200 if DEEP else 5  # generated requests of each operation


TOKENS = "GET /v1/kv/requests/{request_id}/tokens"  # the tokens of requests that are open
LIMITS = {"messages": "max_tokens", "input": "max_output_tokens"}
"""Limits of the output by a field of the body: without it, these outputs fill the context."""

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance)
CHECKS += (response_schema_conformance,)
REQUIRED = {"model", "prompt", "tokens", *LIMITS, *LIMITS.values()}


@pytest.fixture
def url():
    """A server in a process of its own; afterwards no request is open, and no KV is left."""
    with served("--kv-memory", "1MiB") as url:
        yield url
        end_s = time.monotonic() + PATIENCE_S
        while httpx.get(f"{url}/load").json() != {"server_load": 0}:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert httpx.get(f"{url}/v1/kv/overview").json()["memory"]["requests_bytes"] == 0


KNOWN = {"name": "quire-tiny"}
"""Values of parameters of paths that exist; the test adds the id of a request."""


@schemathesis.hook
def map_path_parameters(_context, parameters):
    """Half of the requests name an existing object."""
    if parameters and zlib.crc32(repr(parameters).encode()) % 2:
        return {name: KNOWN.get(name, value) for name, value in parameters.items()}
    return parameters


@schemathesis.hook
def map_body(context, body):
    """Let more bodies pass the checks of single fields, of which one refuses the whole body.

    Most bodies name the served model and ask for few tokens. Half of them have the required fields
    only, or one more.
    """
    if not isinstance(body, dict):
        return body
    number = zlib.crc32(repr(body).encode())
    if number % 16 and context.operation.path != "/v1/embeddings":  # no output to limit
        body = {LIMITS[name]: 3 for name in body if name in LIMITS} | body
    if isinstance(body.get("model"), str) and number % 8:
        body = body | {"model": "quire-tiny"}
    if number % 2:
        return body
    kept = REQUIRED | set(sorted(body.keys() - REQUIRED)[number % 31 :][:1])
    return {name: value for name, value in body.items() if name in kept}


def finished_request(url):
    """The id of a request whose timeline the server keeps."""
    body = {"prompt": "Once upon a time", "max_tokens": 2}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    return httpx.get(f"{url}/v1/kv/requests").json()["finished"][0]["request_id"]


@contextmanager
def open_request(url):
    """The id of a request that is open until the end of the block."""
    body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        yield f"{json.loads(next(response.iter_lines())[6:])['id']}-0"


def statuses(operation, url):
    """Send generated requests of an operation; return how often each status was returned."""
    found = Counter()

    @given(operation.as_strategy())
    @settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
    def send(case):
        names_known = (case.path_parameters or {}).get("request_id") == KNOWN["request_id"]
        with open_request(url) if operation.label == TOKENS and names_known else nullcontext() as i:
            if i is not None:
                case.path_parameters["request_id"] = i
            response = case.call(timeout=PATIENCE_S)
        found[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    send()
    return found


def test_generated_requests_get_documented_responses_and_no_server_error(url):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json").exclude(
        path="/v1/kv/events/stream"
    )
    found = {}

    for operation in (each.ok() for each in schema.get_all_operations()):
        KNOWN["request_id"] = finished_request(url)  # the server keeps the last ones
        found[operation.label] = statuses(operation, url)

    print(json.dumps(found))
    assert len(found) > 25
    if DEEP:
        assert all(statuses[200] for statuses in found.values())
        assert sum(sum(statuses.values()) for statuses in found.values()) >= 2_000
