"""Batches of lines on Ray: blocks of a file, and an actor with the records of `quire batch`."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli.main import app
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.scale.batch import LINE, NUMBER, RECORD, BatchActor, line_blocks, lines_of, read_lines
from support.command_line import read_records, write_lines

SEED = 7
OPTIONS = {"dtype": "float32", "kv": KVConfig(memory="4MiB"), "verify": False}
BODY = {"prompt": ["<|doc|>A", "<|doc|>B"], "max_tokens": 4}
LINES = [
    {"id": "a", "prompt": "<|doc|>Once upon a time"},
    {"id": "b", "prompt": "<|doc|>The cat", "temperature": 0.0, "max_tokens": 3},
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"id": "many", "prompt": "<|doc|>One day", "n": 2},
    {"id": "bad", "prompt": "x", "temperature": -1},
    {"id": "long", "prompt": "<|doc|>" + "word " * 9000},
    "no JSON object",
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": BODY},
    {"id": "evicts", "prompt": "<|doc|>Once upon", "record_evictions": True},
]


@pytest.fixture(scope="module")
def actor():
    sampling = SamplingParams(max_tokens=8, temperature=0.7)
    made = BatchActor("quire-tiny", OPTIONS, sampling, seed=SEED, with_prompt=True)
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

    batch = {LINE: np.array(texts, dtype=object), NUMBER: np.arange(1, len(texts) + 1)}
    numbers, records = records_of(actor, batch)

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


def test_another_column_may_be_the_prompt_and_one_is_needed():
    lines, numbers = lines_of({"text": ["a"], NUMBER: [4]}, prompt_key="text")
    assert (json.loads(lines[0]), numbers) == ({"text": "a"}, [4])
    with pytest.raises(ConfigError, match="expected a column line, prompt"):
        lines_of({"text": ["a"]})


CONTENT = st.binary(max_size=6).map(lambda line: line.replace(b"\n", b""))


@given(
    st.lists(CONTENT | st.sampled_from([b"", b"  ", b"\r", b'{"id": 1}']), max_size=24),
    st.sets(st.integers(1, 24)),
    st.integers(1, 5),
    st.booleans(),
)
def test_blocks_have_each_remaining_line_once(tmp_path_factory, lines, completed, most, ends):
    source = tmp_path_factory.mktemp("lines") / "in.jsonl"
    source.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    with source.open("rb") as file:
        wanted = [
            (number, raw.rstrip(b"\n"))
            for number, raw in enumerate(file, start=1)
            if raw.strip() and number not in completed
        ]

    blocks = list(line_blocks(source, completed, most))
    found = [list(read_lines(source, block)) for block in blocks]

    assert [line for block in found for line in block] == wanted
    assert all(0 < len(block) <= most for block in found)
    assert all(len(block) == most for block in found[:-1])
