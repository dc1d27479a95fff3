"""Ray Serve and batches of lines on Ray: options, starts and records, with a double of Ray."""

import asyncio
import json
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli.main import app
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, EngineDead, UnknownName
from quire.scale.batch import LINE, NUMBER, RECORD, BatchActor, line_blocks, lines_of, read_lines
from quire.scale.config import RayConfig
from quire.scale.recipe import EngineRecipe
from quire.scale.serve import launch
from quire.scale.serve.builder import recipe_of
from quire.scale.serve.recipe import ServeRecipe
from quire.serve.config import KEY_VARIABLE
from support.command_line import read_records, write_lines


def test_texts_become_the_values_of_their_fields():
    texts = """model=quire-tiny kv-memory=64MiB enable-prefix-caching=false
        kv-offload-memory=1MiB max-num-seqs=8 served-model-name=tiny shutdown-timeout=2.5
        allowed-origins=https://a.example,https://b.example ray-replicas=1:4 router=least_loaded
        ray-cpus=2 dtype=float32 verify=false max_model_len=128"""
    recipe = recipe_of(dict(text.split("=") for text in texts.split()))

    options = recipe.engine.options
    assert options["kv"].memory == 64 * 2**20
    assert not options["kv"].prefix_cache.enabled
    assert options["kv"].offload.kv_memory == 2**20
    assert options["schedule"].max_num_seqs == 8
    assert options.items() >= {"dtype": "float32", "verify": False, "max_model_len": 128}.items()
    assert recipe.server.served_model_name == "tiny"
    assert recipe.server.shutdown_timeout == 2.5
    assert recipe.server.allowed_origins == ("https://a.example", "https://b.example")
    assert (recipe.ray.min_replicas, recipe.ray.max_replicas) == (1, 4)
    assert recipe.routing.name == "least_loaded"
    assert recipe.engine.threads == 2
    of_file = recipe_of({"model": "quire-tiny", "max-num-seqs": 8, "verify": False})
    assert of_file.engine.options["schedule"].max_num_seqs == 8
    assert of_file.engine.options["verify"] is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model=NAME"),
        ({"model": "m", "max-num-seqs": "many"}, "expected max-num-seqs as int, got 'many'"),
        ({"model": "m", "verify": "1"}, "expected verify as bool"),
        ({"model": "m", "port": 8000}, "HTTP options of Ray Serve"),
        ({"model": "m", "ray-replicas": "4:1"}, "MIN:MAX"),
        ({"model": "m", "kv-memory": "64"}, "kv-memory"),
        ({"model": "m", "kv-memori": "64MiB"}, "kv-memory"),
    ],
)
def test_wrong_options_are_refused(args, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        recipe_of(args)


def test_a_recipe_has_digests_of_keys_only(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sk-from-environment")

    recipe = recipe_of({"model": "m", "api-key": "sk-from-option"})
    sent = pickle.dumps(recipe)

    assert b"sk-from" not in sent
    for key in ("sk-from-environment", "sk-from-option"):
        assert pickle.loads(sent).keys.tenant_of(f"Bearer {key}") == "default"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"replicas": "0"}, "ray-replicas"), ({"replicas": "a"}, "ray-replicas")),
        *(({"object_store_memory": "10MiB"}, "80MiB"), ({"retries": -1}, "ray-retries")),
        *(({"max_ongoing": 0}, "ray-max-ongoing"), ({"target_kv": 1.5}, "ray-target-kv")),
        ({"cpus": -1.0}, "ray-cpus"),
        ({"downscale_delay_s": -1.0}, "ray-downscale-delay"),
        ({"stats_period_s": 0.0}, "ray-stats-period"),
    ],
)
def test_wrong_options_of_ray_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RayConfig(**options)


RECIPE = ServeRecipe(engine=EngineRecipe(model="quire-tiny"))


class SlowServe(ModuleType):
    """`ray.serve` whose proxies start after some polls; None: never."""

    def __init__(self, num_polls):
        super().__init__("ray.serve")
        self.num_polls, self.calls = num_polls, []

    def start(self, **options):
        self.calls.append("start")
        if self.calls == ["start"]:
            raise TimeoutError("HTTP proxies not available after 60s.")

    def run(self, application, *, name, route_prefix):
        self.calls.append("run")
        raise TimeoutError("Proxies not available after 60s.")

    def status(self):
        self.calls.append("status")
        is_up = self.num_polls is not None and self.calls.count("status") > self.num_polls
        proxy = SimpleNamespace(value="HEALTHY" if is_up else "STARTING")
        return SimpleNamespace(proxies={"node": proxy})


@pytest.fixture
def slow_serve(monkeypatch):
    """Install a `ray.serve` that is slow to start; return what makes one."""

    def install(num_polls):
        serve, ray, config = SlowServe(num_polls), ModuleType("ray"), ModuleType("config")
        ray.serve, config.HTTPOptions = serve, dict
        for name, module in (("ray", ray), ("ray.serve", serve), ("ray.serve.config", config)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(launch, "application", lambda recipe: recipe)
        monkeypatch.setattr(launch, "POLL_S", 0.0)
        return serve

    return install


def test_a_start_waits_for_slow_proxies_but_not_forever(slow_serve, monkeypatch):
    serve = slow_serve(3)

    launch.start_serve(RECIPE)
    launch.run_application(RECIPE)

    assert serve.calls == ["start", "start", "run", *["status"] * 4]
    slow_serve(None)
    monkeypatch.setattr(launch, "PROXY_WAIT_S", 0.01)
    with pytest.raises(EngineDead, match=r"HTTP proxy has not started .*: free cores"):
        launch.run_application(RECIPE)


# ---- batches of lines ----------------------------------------------------------------------------


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


def test_columns_are_members_of_lines_of_which_one_is_the_prompt(actor):
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
