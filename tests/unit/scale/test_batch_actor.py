"""The actor of batches against `quire batch`: equal records for equal lines."""

import asyncio
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.scale.batch import LINE, NUMBER, RECORD, BatchActor, lines_of
from support.command_line import read_records, write_lines

SEED = 7
OPTIONS = {"dtype": "float32", "kv": KVConfig(memory="4MiB"), "verify": False}
LINES = [
    {"id": "a", "prompt": "<|doc|>Once upon a time"},
    {"id": "b", "prompt": "<|doc|>The cat", "temperature": 0.0, "max_tokens": 3},
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"id": "many", "prompt": "<|doc|>One day", "n": 2},
    {"id": "bad", "prompt": "x", "temperature": -1},
    {"id": "long", "prompt": "<|doc|>" + "word " * 9000},
    "no JSON object",
    {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": ["<|doc|>A", "<|doc|>B"], "max_tokens": 4},
    },
    {"id": "evicts", "prompt": "<|doc|>Once upon", "record_evictions": True},
]


@pytest.fixture(scope="module")
def actor():
    made = BatchActor(
        "quire-tiny",
        OPTIONS,
        SamplingParams(max_tokens=8, temperature=0.7),
        seed=SEED,
        with_prompt=True,
    )
    yield made
    made.close()


def records_of(actor, batch):
    found = asyncio.run(actor(batch))
    return found[NUMBER], [json.loads(record) for record in found[RECORD]]


OF_ONE_RUN = (
    *("cached_tokens", "kv_peak_bytes", "preemptions", "first_token_s", "total_s"),
    "prompt_tokens_details",
)


def without_times(record):
    """A record without the fields that differ between two runs."""
    body = (record.get("response") or {}).get("body") or {}
    body.pop("created", None)
    for usage in (record.get("usage"), body.get("usage")):
        for name in OF_ONE_RUN:
            (usage or {}).pop(name, None)
    return record


def test_records_are_those_of_quire_batch(actor, tmp_path):
    source, target = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    options = ("--max-tokens=8", "--temperature=0.7", f"--seed={SEED}", "--with-prompt")
    options += ("--dtype=float32", "--kv-memory=4MiB", "--no-verify")
    command = ["batch", "quire-tiny", str(source), str(target), *options]
    assert CliRunner().invoke(app, command).exit_code == 1  # some lines are refused
    wanted = {record["line"]: without_times(record) for record in read_records(target)}
    texts = source.read_text().splitlines()

    numbers, records = records_of(
        actor, {LINE: np.array(texts, dtype=object), NUMBER: np.arange(1, len(texts) + 1)}
    )

    assert numbers == list(range(1, len(LINES) + 1))
    assert [record["line"] for record in records] == numbers
    assert {record["line"]: without_times(record) for record in records} == wanted


def test_columns_are_members_of_lines(actor):
    batch = {
        "id": np.array(["a", "b"]),
        "prompt": np.array(["<|doc|>One", "<|doc|>Two"]),
        "max_tokens": np.array([2, 3]),
        "stop": np.array([None, "."], dtype=object),
    }

    numbers, records = records_of(actor, batch)

    assert numbers == [0, 0]
    assert [record["id"] for record in records] == ["a", "b"]
    assert records[0]["usage"]["completion_tokens"] == 2


def test_another_column_may_be_the_prompt():
    lines, numbers = lines_of({"text": ["a"], NUMBER: [4]}, prompt_key="text")

    assert (json.loads(lines[0]), numbers) == ({"text": "a"}, [4])


def test_a_batch_without_prompts_is_refused():
    with pytest.raises(ConfigError, match="expected a column line, prompt"):
        lines_of({"text": ["a"]})
