"""`quire batch --base-url`: records equal those of the engine; refused options of Ray."""

import importlib.util
import json
import threading

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from support.command_line import write_lines
from support.http_server import answering

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
DONE = {"choices": [{"index": 0, "text": "out", "finish_reason": "length"}], "usage": USAGE}


def chat_body(text):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}


class Server:
    """Responds with the next of some responses, then with an output."""

    def __init__(self, *responses):
        self.responses, self.bodies, self.headers = list(responses), [], []
        self.open = self.max_open = 0
        self.awaited_open = 1  # requests that are open before the first response
        self._lock = threading.Condition()

    def __call__(self, path, body, headers):
        with self._lock:
            self.bodies.append((path, body))
            self.headers.append(dict(headers))
            self.open += 1
            self.max_open = max(self.open, self.max_open)
            found = self.responses.pop(0) if self.responses else None
            self._lock.notify_all()
            self._lock.wait_for(lambda: self.max_open >= self.awaited_open, timeout=10)
        threading.Event().wait(0.02)
        with self._lock:
            self.open -= 1
        if found is not None:
            return found
        return 200, {"x-request-id": "r1"}, chat_body("out") if "chat" in path else DONE


LINES = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
    {"custom_id": "b", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user"}]}},
    {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "x"}},
    {"id": "d", "prompt": "y", "max_tokens": 4},
]


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def write(*lines):
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return source, target

    return write


def batch(files, url, *arguments, code=0):
    source, target = files
    line = ["batch", "m", str(source), str(target), "--base-url", url, *arguments]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == code, result.output
    text = target.read_text(encoding="utf-8") if target.exists() else ""
    return result, {r["line"]: r for r in map(json.loads, text.splitlines())}


def test_every_line_gets_a_record_of_its_response(files):
    server = Server()
    with answering(server) as url:
        result, records = batch(files(*LINES), f"{url}/v1", "--api-key", "k", "--json")

    bodies = dict(server.bodies)
    assert bodies["/v1/chat/completions"]["max_tokens"] == 128
    assert bodies["/v1/embeddings"] == {"model": "m", "input": "x"}
    assert {one["authorization"] for one in server.headers} == {"Bearer k"}
    assert records[1]["custom_id"] == "a"
    assert records[1]["response"] == {"status_code": 200, "request_id": "r1", "body": DONE}
    assert records[2]["response"]["body"] == chat_body("out")
    assert (records[4]["id"], records[4]["text"], records[4]["usage"]) == ("d", "out", USAGE)
    claims = json.loads(result.stdout.splitlines()[-1])["claims"]
    assert (claims["requests_completed"], claims["completion_tokens"]) == (4, 8)


@pytest.mark.parametrize("status", [429, 503])
def test_a_refused_request_is_repeated_after_the_time_of_the_server(files, status):
    server = Server(*[(status, {"retry-after": "0.01"}, {})] * 3)
    with answering(server) as url:
        _, records = batch(files(LINES[0]), url)
    assert len(server.bodies) == 4
    assert records[1]["error"] is None


def test_an_invalid_request_gets_an_error_record_without_a_repetition(files):
    server = Server((400, {}, {"error": {"message": "bad prompt"}}))
    with answering(server) as url:
        _, records = batch(files(LINES[0], {"prompt": ""}, ["no object"]), url, code=1)
    assert len(server.bodies) == 1
    assert records[1]["response"]["status_code"] == 400
    assert records[1]["error"] == {"code": "status_400", "message": "bad prompt"}
    assert "expected a prompt" in records[2]["error"]
    assert "expected a JSON object" in records[3]["error"]


def test_no_more_requests_are_open_than_the_limit(files):
    server, lines = Server(), [LINES[3] | {"id": str(i)} for i in range(12)]
    server.awaited_open = 3
    with answering(server) as url:
        batch(files(*lines), url, "--max-concurrency", "3")
    assert server.max_open == 3


def test_a_batch_resumes_after_the_server_was_unreachable(files):
    pair = files(LINES[0], LINES[3])
    with answering(Server()) as url:
        pass
    result, records = batch(pair, url, "--max-retries", "0", code=2)
    assert "cannot be reached" in result.stderr
    assert "to resume" in result.stderr
    assert not records

    server = Server((200, {}, DONE))
    with answering(server) as other:
        batch(pair, other, "--overwrite")
        _, records = batch(pair, other)

    assert len(server.bodies) == 2  # the second run sent nothing
    assert records.keys() == {1, 2}
    with answering(Server((401, {}, {"error": {"message": "no"}}))) as url:  # a refused key
        result, records = batch(files(LINES[0]), url, "--overwrite", code=2)
    assert "set --api-key" in result.stderr
    assert not records


def openai_line(url="/v1/completions", **body):
    return {"custom_id": "a", "url": url, "body": body}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (openai_line(prompt="\ud800"), "body.prompt: the text is not Unicode"),
        (
            openai_line(prompt="x", temperature=float("nan")),
            "body.temperature: expected a finite numb",
        ),
        (openai_line("/v1/a\nb", prompt="x"), "expected url as a path"),
        (openai_line("/v1/" + "a" * 70_000, prompt="x"), "expected url as a path"),
    ],
)
def test_a_line_that_is_no_request_gets_an_error_record_and_the_others_run(files, line, message):
    server = Server()
    with answering(server) as url:
        _, records = batch(files(line, LINES[3]), url, code=1)
    assert len(server.bodies) == 1
    assert message in records[1]["error"]["message"]
    assert records[2]["text"] == "out"


@pytest.mark.parametrize(
    ("headers", "content", "message"),
    [({"content-encoding": "gzip"}, b"no gzip", "the request failed"), ({}, b"<html>", "<html>")],
)
def test_a_response_that_cannot_be_read_fails_its_line_alone(files, headers, content, message):
    server = Server((200, headers, content))
    with answering(server) as url:
        _, records = batch(files(LINES[0], LINES[3]), url, "--max-concurrency", "1", code=1)
    assert message in records[1]["error"]["message"]
    assert records[2]["text"] == "out"


@pytest.mark.parametrize(
    ("url", "option", "value", "message"),
    [
        ("http://127.0.0.1:port", "--api-key", "k", "expected --base-url"),
        ("http://", "--api-key", "k", "expected --base-url"),
        ("http://127.0.0.1:1", "--api-key", "\u00e9", "printable ASCII"),
        ("http://127.0.0.1:1", "--kv-memory", "64MiB", "has no effect with --base-url"),
        ("http://127.0.0.1:1", "--dtype", "float32", "has no effect with --base-url"),
    ],
)
def test_an_invalid_url_key_or_option_of_the_engine_is_refused(files, url, option, value, message):
    result, _ = batch(files(LINES[0]), url, option, value, code=2)
    assert message in result.stderr


# ---- options of Ray ------------------------------------------------------------------------------


CONFIG_ERROR = 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--ray-replicas=2", "has no effect without --ray: add --ray"),
        ("--router=least_loaded", "has no effect without --ray: add --ray"),
        ("--ray-cpus=2", "has no effect without --ray: add --ray"),
        ("--kv-events=events.jsonl", "is an option of one engine"),
        ("--kv-events-endpoint=tcp://127.0.0.1:5557", "is an option of one engine"),
    ],
)
def test_options_of_ray_need_ray_and_those_of_one_engine_none(quire, option, message):
    ray = ("--ray",) if "engine" in message else ()
    result = quire("serve", "quire-tiny", *ray, option)
    assert result.exit_code == CONFIG_ERROR
    assert f"{option.partition('=')[0]} {message}" in result.stderr


def test_a_batch_runs_on_ray_or_on_a_server(quire, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    files = (source, tmp_path / "out.jsonl")

    both = quire("batch", "m", *files, "--ray", "--base-url=http://127.0.0.1:1")
    alone = quire("batch", "m", *files, "--ray-replicas=2")

    assert both.exit_code == alone.exit_code == CONFIG_ERROR
    assert "--base-url is an option of one engine" in both.stderr
    assert "--ray-replicas has no effect without --ray" in alone.stderr


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_without_ray_the_error_names_the_extra(quire, command, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    without = "importlib.util.find_spec"
    monkeypatch.setattr(without, lambda name: None if name == "ray" else find(name))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    files = (source, tmp_path / "out.jsonl") if command == "batch" else ()

    result = quire(command, "quire-tiny", *files, "--ray")

    assert result.exit_code == CONFIG_ERROR
    assert f"quire {command} --ray needs ray" in result.stderr
    assert "quire-llm[ray]" in result.stderr
