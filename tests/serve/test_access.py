"""Request ids, the access log and the formats of log lines."""

import json
import logging

import pytest

from quire.serve.logs import JsonFormatter, TextFormatter, configure_logs

SECRET_PROMPT = "a secret prompt"
BODY = {"prompt": SECRET_PROMPT, "max_tokens": 2}


@pytest.fixture
def lines(caplog):
    """Messages of the access log so far."""
    caplog.set_level(logging.INFO, logger="quire.access")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "quire.access"]


def test_response_repeats_the_request_id_of_the_client(serve):
    response = serve(lambda client: client.get("/version", headers={"x-request-id": "job-7.a"}))

    assert response.headers["x-request-id"] == "job-7.a"


@pytest.mark.parametrize("given", ["", "a b", "ü", "x" * 129, "a\tb"])
def test_unusable_request_id_is_replaced(serve, given):
    headers = {"x-request-id": given.encode("latin-1")}
    response = serve(lambda client: client.get("/version", headers=headers))

    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 32


def test_error_has_a_request_id(serve):
    response = serve(lambda client: client.get("/nothing"))

    assert response.status_code == 404
    assert response.headers["x-request-id"]


def test_access_log_names_the_request_and_no_contents(serve, lines):
    async def main(client):
        return await client.post(
            "/v1/completions?key=sk-in-query",
            json=BODY,
            headers={"authorization": "Bearer sk-in-header", "x-request-id": "job-7"},
        )

    response = serve(main)

    [line] = lines()
    assert line.startswith("POST /v1/completions 200 in ")
    assert "tenant default, request job-7" in line
    assert response.json()["id"] in line
    assert "sk-in" not in line
    assert SECRET_PROMPT not in line


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "A"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 16}),
    ],
)
def test_access_log_has_the_response_id_of_the_client(serve, lines, path, body):
    async def main(client):
        response = await client.post(path, json=body)
        return response.json()["id"], (await client.get("/v1/kv/requests")).json()

    response_id, requests = serve(main)

    assert response_id.startswith(("msg_", "resp_"))
    assert lines()[0].endswith(f"response {response_id}")
    assert f'"{response_id}-0"' in json.dumps(requests)


@pytest.mark.parametrize(
    ("path", "options"), [("/health", {}), ("/version", {"access_log": False})]
)
def test_probes_and_a_log_that_is_off_have_no_lines(serve, lines, path, options):
    serve(lambda client: client.get(path), **options)

    assert lines() == []


def test_path_of_a_client_stays_on_one_line(serve, lines):
    serve(lambda client: client.get("/a%0Ab%00" + "c" * 1000))

    [line] = lines()
    assert "\n" not in line
    assert "a?b?ccc" in line
    assert len(line) < 500


def test_json_lines_have_the_fields_of_the_record():
    record = logging.LogRecord(
        "quire.access", logging.INFO, "", 0, "%s took %d s", ("a\u2028", 3), None
    )
    record.fields = {"status": 200}

    [text] = JsonFormatter().format(record).splitlines()
    line = json.loads(text)

    assert line["message"] == "a\u2028 took 3 s"
    assert (line["level"], line["logger"], line["status"]) == ("info", "quire.access", 200)
    assert line["time"].endswith("Z")


def test_json_lines_have_the_traceback():
    try:
        raise ValueError("a fault")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("quire", logging.ERROR, "", 0, "failed", (), info)

    assert "ValueError: a fault" in json.loads(JsonFormatter().format(record))["traceback"]


def test_text_lines_have_time_level_and_logger():
    record = logging.LogRecord("quire.serve", logging.WARNING, "", 0, "slow", (), None)

    time, level, logger, message = TextFormatter().format(record).split()

    assert (level, logger, message) == ("WARNING", "quire.serve:", "slow")
    assert time.endswith("Z")


def test_second_configuration_replaces_the_first(capsys):
    logger = logging.getLogger("quire")
    before = logger.handlers, logger.propagate, logger.level
    try:
        configure_logs("text", "info")
        configure_logs("json", "warning")
        logging.getLogger("quire.test").info("hidden")
        logging.getLogger("quire.test").warning("shown")
        [line] = capsys.readouterr().err.splitlines()
    finally:
        logger.handlers, logger.propagate = before[0], before[1]
        logger.setLevel(before[2])

    assert json.loads(line)["message"] == "shown"
