"""Workers that run in Quire's own environment, in processes as in a run, and the command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.peers.config import Eviction, PeersConfig, parse_shape
from benchmarks.peers.engines import Engine, chosen_engines, quire_engine
from benchmarks.peers.measures import build_job, measures_of
from benchmarks.peers.part import Failure, make_model, run_worker
from benchmarks.peers.workers.llamacpp import gguf_name, interleaved
from benchmarks.peers.workers.protocol import Job
from benchmarks.peers.workers.transformers_static import batches

SHAPE = parse_shape("3x8+4")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PeersConfig:
    folder = tmp_path_factory.mktemp("peers")
    make_model("tiny", folder / "files")
    return PeersConfig(
        models=("tiny",),
        shapes=(SHAPE,),
        engines=("quire", "hf_static"),
        environments=folder / "environments",
        files=folder / "files",
        threads=1,
        dtype="float32",
        timeout_s=300,
    )


def outputs(engine: Engine, config: PeersConfig) -> list[list[int]]:
    job = build_job(config, "tiny", SHAPE, engine, 0)
    found = run_worker(engine, job, config)
    assert not isinstance(found, Failure), found.reason
    run = measures_of(found, SHAPE, judged_prompts=3)
    assert 0 < run.first_token_s <= run.prefill_s < run.total_s
    assert run.weight_bytes > 0
    assert run.peak_rss_bytes > 10 * run.weight_bytes
    return run.judged


@pytest.mark.slow
def test_workers_of_transformers_and_quire_generate_the_same_tokens(config):
    [static] = chosen_engines(("hf_static",), (), Eviction())
    quire = quire_engine("quire=--dtype float32")

    assert outputs(static, config) == outputs(quire, config)


@pytest.mark.slow
def test_a_worker_that_raises_is_a_failure_with_the_exception(config):
    job = build_job(config, "tiny", SHAPE, quire_engine("quire=--evict nothing"), 0)
    found = run_worker(quire_engine("quire="), job, config)

    assert isinstance(found, Failure)
    assert "nothing" in found.reason


def test_static_batches_fit_in_the_kv_memory(config):
    job: Job = build_job(config, "tiny", SHAPE, quire_engine("quire="), 0)
    token_bytes = 2 * job["kv_bytes_per_token"]  # float32

    job["kv_bytes"] = 24 * token_bytes
    assert batches(job) == [[0, 1], [2]]
    job["kv_bytes"] = 36 * token_bytes
    assert batches(job) == [[0, 1, 2]]
    job["kv_bytes"] = 1
    assert batches(job) == [[0], [1], [2]]


def test_gguf_names_are_those_of_llamacpp():
    assert gguf_name("model.layers.11.self_attn.q_proj.weight") == "blk.11.attn_q.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("lm_head.weight") == "output.weight"


def test_rows_of_a_head_are_interleaved():
    """Rows 0 and 2 of a head of 4 rotate together in Transformers, rows 0 and 1 in llama.cpp."""
    np = pytest.importorskip("numpy")
    found = interleaved(np.arange(8).reshape(8, 1), heads=2)

    assert found[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.slow
def test_quick_command_ends_with_a_json_object_without_claims(tmp_path: Path):
    requested = ["peers", "--quick", "--threads", "1", "--json", "--shapes", "2x8+4"]
    folders = ["--environments", str(tmp_path), "--out", str(tmp_path)]
    engines = ["--engines", "hf_static,vllm", "--judged", "1"]
    done = CliRunner().invoke(app, [*requested, *folders, *engines], catch_exceptions=False)

    assert done.exit_code == 0, done.output
    run = json.loads(done.output.strip().splitlines()[-1])
    assert run["claims"] == {}
    assert run["quick_figures"]["total_vs_best_peer_2x8_4_15m"] > 0
    assert set(run["config"]["engines"]) == {"quire", "quire_evict", "hf_static"}
    cells = run["arms"]["15m 2x8+4"]["raw"]["cells"]
    assert [cell["key"]["engine"] for cell in cells] == ["quire", "hf_static"]
    assert all(cell["error"] == "" for cell in cells)
    assert {"peers.json", "peers.md", "cells.jsonl"} <= {p.name for p in tmp_path.iterdir()}
