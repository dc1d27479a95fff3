"""The reference page of the HTTP server, from its OpenAPI description and its docstrings."""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

JSON = Mapping[str, Any]

START = """# HTTP

The paths, fields, errors and headers of `quire serve`, written from the code of the server.
[Serving](../serving.md) is the guide: limits, authentication, and fields that are ignored or
refused. `GET /openapi.json` returns the same description for programs.

Bodies are JSON with `Content-Type: application/json`. If the server has
[tenant keys](../tenants.md), send `Authorization: Bearer KEY`. Null is the same as an unset field.
Fields without a stated default have that of [SamplingParams](api.md).

"""

BODIES = {
    "CompletionBody": "POST /v1/completions",
    "ChatBody": "POST /v1/chat/completions",
    "StreamOptions": "stream_options",
    "EmbeddingBody": "POST /v1/embeddings",
    "ResponsesBody": "POST /v1/responses",
    "MessagesBody": "POST /v1/messages",
    "TokenizeBody": "POST /tokenize",
    "DetokenizeBody": "POST /detokenize",
}
GENERATION = ("CompletionBody", "ChatBody")
COMMON = "Fields of completions and chats"

MEANINGS = {
    "model": "the served name, as in `GET /v1/models`; another name gets status 404",
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids; "
    "the response has `n` choices for each prompt",
    "messages": "messages with `role` and `content` (a string, or a list of text parts); other "
    "fields of a message are passed to the chat template",
    "max_tokens": "maximum tokens to generate. Default: 16 for completions, the rest of "
    "the context for chats",
    "temperature": "divides the logits; 0 (or below 1e-5) is greedy. Default: the model's, "
    "else 0.2 with `top_p` 0.9",
    "evict": "eviction policy, such as `h2o:cap=512`, of those that `--evict-allow` lists. "
    "Default: that of `--evict`",
    "sparse": "sparse attention, such as `quest:budget=10%`, or `off`; rules need a server with "
    "`--sparse`. Default: that of `--sparse`",
    "kv_budget": "cap of the request's eviction rule: tokens of a lane, a fraction of the prompt "
    'such as `0.25` or `"25%"`, or bytes such as `"2MiB"`',
    "bad_words": "texts that must not be generated, at the start of the output or after a space; "
    "other tokenizations of them are possible",
    "prompt_logprobs": "number of most likely tokens to report for each token of the prompt; not "
    "with `stream`",
    "truncate_prompt_tokens": "keep only this many tokens at the end of the prompt; -1: as many as "
    "leave room for `max_tokens` in the longest sequence",
    "stream": "send server-sent events, the last one `data: [DONE]`. Default: false",
    "stream_interval": "tokens in each event of a stream after the first one. Default: that of "
    "`--stream-interval`",
    "EmbeddingBody.input": "a string, a list of strings, a list of token ids, or a list of lists "
    "of token ids; the response has one embedding for each",
    "encoding_format": "`float`, or `base64` of little-endian float32. Default: `float`",
    "dimensions": "only the size of the model's hidden states",
    "pooling": "`last` or `mean`. Default: that of `1_Pooling/config.json` in the model folder, "
    "else `last`",
    "normalize": "scale the embedding to length 1. Default: true",
    "stream_options": "only with `stream`: see [stream_options](#stream_options)",
    "limit_max_tokens": "lower `max_tokens` to what fits into the context, the KV memory and the "
    "tenant's limit; false: refuse such a request with status 400. Default: true",
    "max_completion_tokens": "the same as `max_tokens`, and takes precedence",
    "do_sample": "false is `temperature` 0",
    "reasoning_effort": "a variable of the chat template if the template uses it; else ignored",
    "tools": "functions that the model may call, with `name`, `description` and `parameters` (a "
    "JSON schema)",
    "tool_choice": '`none`, `auto`, `required`, or `{"type": "function", "function": '
    '{"name"}}`. Default: `auto` if there are tools',
    "parallel_tool_calls": "whether the output may have several calls. Default: true",
    "response_format": 'the format of the output: `{"type": "text"}`, `json_object`, or '
    '`json_schema` with `{"name", "schema"}` in `json_schema`',
    "structured_outputs": "the structure of the output: an object with one of `json`, "
    "`json_object`, `regex`, `choice` and `grammar`; see "
    "[structured output](../guides/structured-output.md)",
    "guided_json": "a JSON schema: the same as `structured_outputs` with `json`",
    "guided_json_object": "the same as `structured_outputs` with `json_object`",
    "guided_regex": "the same as `structured_outputs` with `regex`",
    "guided_choice": "the same as `structured_outputs` with `choice`",
    "guided_grammar": "the same as `structured_outputs` with `grammar`",
    "guided_whitespace_pattern": "regular expression of the whitespace of `guided_json`",
    "echo": "put the prompt before the output, and its log-probabilities too. Default: false",
    "add_special_tokens": "add the tokenizer's special tokens to a prompt. Default: true",
    "add_generation_prompt": "append the start of the assistant's message. Default: true",
    "continue_final_message": "end the prompt in the text of the last message, which the output "
    "continues; `add_generation_prompt` must be false. Default: false",
    "chat_template_kwargs": "variables of the chat template",
    "return_token_strs": "also return the text of each token. Default: false",
    "tokens": "token ids",
    "include_usage": "send the `usage` in the last chunk. Default: false",
    "continuous_usage_stats": "send the `usage` so far in every chunk. Default: false",
    "include_obfuscation": "ignored",
    "top_logprobs": "number of most likely tokens for each output token; needs `logprobs`",
    "CompletionBody.logprobs": "number of most likely tokens to report for each output token; 0: "
    "only the output token itself",
    "ChatBody.logprobs": "return the log-probability of each output token. Default: false",
    "input": "a string, or a list of items: messages with texts, `function_call` and "
    "`function_call_output`",
    "instructions": "text of a system message before the input",
    "max_output_tokens": "maximum tokens to generate. Default: the rest of the context",
    "text": "`format`: `text`, `json_object`, or `json_schema` with `name` and `schema`",
    "reasoning": "`effort`: a variable of the chat template if the template uses it",
    "truncation": "`auto`: the start of a prompt over the longest sequence is dropped; `disabled`: "
    "it is refused. Default: `disabled`",
    "metadata": "returned in the response",
    "store": "ignored: nothing is stored",
    "background": "only false",
    "include": "only an empty list",
    "user": "ignored",
    "system": "text of a system message, as a string or a list of text blocks",
    "stop_sequences": "texts that end the output",
    "thinking": "only `disabled`",
    "output_config": "`format`: a JSON schema for the output, as "
    '`{"type": "json_schema", "schema": {...}}`',
    "MessagesBody.max_tokens": "maximum tokens to generate; required, except in "
    "`/v1/messages/count_tokens`",
    "MessagesBody.messages": "messages of `user` and `assistant`, with a string or a list of "
    "blocks: `text`, `tool_use`, `tool_result`; the output continues a last message of `assistant`",
    "MessagesBody.tools": "tools with `name`, `description` and `input_schema`",
    "MessagesBody.tool_choice": '`{"type": "auto"}`, `any`, `none`, or `tool` with a `name`',
    "ResponsesBody.tools": "functions with `name`, `description` and `parameters`",
    "TokenizeBody.prompt": "a string; set either this or `messages`",
}
"""Meanings that differ from the docstrings of the configs, or are missing, by name or BODY.name."""

RESPONSES = """## Responses

`/v1/completions` and `/v1/chat/completions` return OpenAI's objects. Quire adds:

| field | meaning |
| --- | --- |
| `choices[].stop_reason` | the stop string or stop token that ended the output; otherwise null |
| `usage.kv_peak_bytes` | largest number of KV bytes of the request, summed over its prompts |
| `usage.evictions`, `usage.evicted_tokens` | evictions from the request's KV, and their tokens |
| `usage.recomputed_tokens` | tokens that were computed again after preemptions |
| `usage.prompt_tokens_details.cached_tokens` | tokens of the prompt taken from the prefix cache |
| `metadata` | the `metadata` of the request |

## Headers

| header | direction | meaning |
| --- | --- | --- |
| `Authorization: Bearer KEY` | request | the tenant's key, if a tenant has one |
| `Content-Type: application/json` | request | needed for bodies; otherwise status 415 |
| `X-Ignored-Fields` | response | names of fields that had no effect, separated by commas |
"""


def http(texts: Mapping[str, str]) -> str:
    """Write the page.

    Args:
        texts: meaning of each field that a docstring of a config describes.
    """
    described = _openapi()
    schemas = described["components"]["schemas"]
    parts = [START, "## Paths\n\n", _table(("path", "returns"), _paths(described))]
    tables = {title: _fields(body, schemas[body], texts) for body, title in BODIES.items()}
    for title, rows in _with_common_table(tables).items():
        parts.append(f"\n## {title}\n\n" + _table(("field", "type", "meaning"), rows))
    parts.append("\n" + _queries(described))
    return "".join([*parts, "\n", _unsupported(schemas), "\n", RESPONSES, "\n", _errors()])


def _openapi() -> JSON:
    """The description of the server's routes; they are not called, so no engine is needed."""
    from fastapi import FastAPI

    from quire.config.sampling_params import SamplingParams
    from quire.serve.apis.endpoints import OtherApis
    from quire.serve.embeddings import EmbeddingEndpoint
    from quire.serve.endpoints import Endpoints
    from quire.serve.kv_endpoints import KVEndpoints
    from quire.serve.metrics.endpoint import MetricsEndpoint
    from quire.serve.metrics.observer import HttpRequests
    from quire.serve.probes import Probes
    from quire.serve.service import Service

    app, no_service = FastAPI(), Service.__new__(Service)
    endpoints = Endpoints(no_service)
    app.include_router(endpoints.router())
    app.include_router(EmbeddingEndpoint(no_service, endpoints).router())
    app.include_router(OtherApis(endpoints, SamplingParams()).router())
    app.include_router(Probes(no_service).router())
    app.include_router(MetricsEndpoint(no_service, HttpRequests()).router())
    app.include_router(KVEndpoints(no_service).router())
    return cast("JSON", app.openapi())


def _paths(described: JSON) -> list[tuple[str, str]]:
    return [
        (f"`{method.upper()} {path}`", operation["description"])
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]


Rows = list[tuple[str, str, str]]


def _with_common_table(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """Move the rows that completions and chats share to a table of their own."""
    first, second = (tables[BODIES[body]] for body in GENERATION)
    common = [row for row in first if row in second]
    own = {
        title: [row for row in rows if row not in common] if rows in (first, second) else rows
        for title, rows in tables.items()
    }
    titles = list(own)
    before = {title: own[title] for title in titles[:2]}
    return before | {COMMON: common} | {title: own[title] for title in titles[2:]}


def _fields(body: str, schema: JSON, texts: Mapping[str, str]) -> Rows:
    rows = []
    for name, field in schema["properties"].items():
        own = MEANINGS.get(f"{body}.{name}")
        meaning = own or MEANINGS.get(name) or texts.get(name)
        if meaning is None:
            raise KeyError(f"docs/http_reference.py: MEANINGS has no {name!r}, a field of {body}")
        required = " (required)" if name in schema.get("required", ()) else ""
        rows.append((f"`{name}`{required}", _type(name, field), _sentence(meaning)))
    return rows


def _sentence(text: str) -> str:
    """Drop the full stop, and say unset in place of Python's None."""
    return text.strip().removesuffix(".").replace("; None:", "; unset:").replace("None:", "Unset:")


_SHAPES = {"prompt": "string, list", "tokens": "list of int"}
_NAMES = {"integer": "int", "number": "float", "boolean": "bool"}


def _type(name: str, field: JSON) -> str:
    """A short name of a field's type with its limits; null is not repeated in each row."""
    if name in _SHAPES:
        return _SHAPES[name]
    found = [_one_type(one) for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    return ", ".join(found)


def _one_type(schema: JSON) -> str:
    if "$ref" in schema:
        return "object"
    if "enum" in schema or "const" in schema:
        return ", ".join(f'`"{v}"`' for v in schema.get("enum", [schema.get("const")]))
    if "type" not in schema:  # a field with its own validator
        return "string, list"
    if schema["type"] == "array":
        return f"list of {_one_type(schema['items'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    limits = f" {low:,.0f} to {high:,.0f}" if high is not None and high < 1 << 31 else ""
    return _NAMES.get(schema["type"], schema["type"]) + limits


QUERIES = {
    "/v1/kv/pages.cells": "largest number of cells of the map; of more pages, every n-th is shown",
    "/v1/kv/pages.map": "false: only the totals by owner and by state, without the map",
    "/v1/kv/plan.budget_bytes": "size of the KV memory; unset: the server's",
    "/v1/kv/plan.length": "tokens of a sequence; unset: 2,048, or the context if that is shorter",
    "/v1/kv/plan.retained": "tokens that an evicting lane retains; unset: all",
    "/v1/kv/plan.codec": "codec of keys and values, as in `--kv-codec`; unset: the server's",
    "/v1/kv/events.limit": "number of events, the newest ones",
    "/v1/kv/requests.limit": "number of running, of waiting and of finished requests",
    "/v1/kv/requests/{request_id}/tokens.first": "position of the first token",
    "/v1/kv/requests/{request_id}/tokens.limit": "number of tokens",
    "/v1/kv/requests/{request_id}/tokens.lanes": "true: also a bitmap for each lane",
    "/v1/kv/prefixes.limit": "number of chains, the largest ones and those before them",
    "since": "only events with a number above this",
}
"""Meanings of query parameters, by path and name, or by name."""


def _queries(described: JSON) -> str:
    """The query parameters of all paths that have some."""
    from quire.scheduler.events import KINDS

    kinds = ", ".join(f"`{kind}`" for kind in KINDS)
    meanings = {**QUERIES, "kinds": f"kinds of events, separated by commas; unset: all of {kinds}"}
    parts = []
    for path, methods in described["paths"].items():
        found = methods.get("get", {}).get("parameters", ())
        rows = [
            (f"`{one['name']}`", _query_type(one["schema"]), _default(one["schema"]), meaning)
            for one in found
            if one["in"] == "query"
            for meaning in [meanings.get(f"{path}.{one['name']}") or meanings[one["name"]]]
        ]
        if rows:
            table = _table(("parameter", "type", "default", "meaning"), rows)
            parts.append(f"## GET {path}\n\n{table}\n")
    return "".join(parts) + (
        "[Ledger](../ledger.md) describes the ledger and the events, [Dashboard](../dashboard.md) "
        "the other responses under `/v1/kv`.\n"
    )


def _query_type(schema: JSON) -> str:
    found = [_one_type(one) for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return ", ".join(found)


def _default(schema: JSON) -> str:
    """The default of a parameter; unset if it has none."""
    default = schema.get("default")
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:,}" if default is not None else "unset"


def _unsupported(schemas: JSON) -> str:
    """Fields that get status 400, and those that only some endpoints support."""
    from quire.serve.fields import INSTEAD, UNSUPPORTED

    renamed, missing, partial = [], [], []
    for name, values in sorted(UNSUPPORTED.items()):
        no_effect = ", ".join(f"`{json.dumps(value)}`" for value in values)
        if found := _supporting(name, schemas):
            partial.append((f"`{name}`", ", ".join(f"`{path}`" for path in found), no_effect))
        elif name in INSTEAD:
            renamed.append((f"`{name}`", f"`{INSTEAD[name]}`", no_effect))
        else:
            missing.append((f"`{name}`", no_effect))
    no_effect = "values without an effect"
    return (
        "## Unsupported fields\n\nA field that would change the output gets status 400. Values "
        "without an effect are accepted.\n\n### Fields with another name\n\n"
        + _table(("field", "use instead", no_effect), renamed)
        + "\n### Fields without a counterpart\n\n"
        + _table(("field", no_effect), missing)
        + "\n### Fields of some endpoints\n\nOther endpoints refuse these fields.\n\n"
        + _table(("field", "supported at", f"{no_effect} elsewhere"), partial)
    )


def _supporting(name: str, schemas: JSON) -> list[str]:
    """The paths that accept a field."""
    from quire.serve.apis.convert import EXTENSIONS

    extended = ("ResponsesBody", "MessagesBody") if name in EXTENSIONS else ()
    paths = {body: title.removeprefix("POST ") for body, title in BODIES.items()}
    accepting = [b for b in paths if name in schemas[b]["properties"] or b in extended]
    return [paths[body] for body in accepting if paths[body].startswith("/")]


def _errors() -> str:
    """The statuses in the docstring of the module of errors."""
    from quire.serve import errors

    rows = [
        (match[1], f"`{match[2]}`", match[3])
        for match in re.finditer(r"^ {4}(\d+) (\w+) +(.*)$", errors.__doc__ or "", re.MULTILINE)
    ]
    return (
        '## Errors\n\nThe body is `{"error": {"message", "type", "param", "code"}}`. `message` '
        "says what was expected, what was given and what to change. `param` is the field. An error "
        "during a stream is sent as an event with this object, before `[DONE]`.\n\n"
        + _table(("status", "type", "cause"), rows)
    )


def _table(header: tuple[str, ...], rows: list[Any]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
