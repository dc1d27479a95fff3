import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.common.result import PartResult
from benchmarks.peers import measures as peer_measures
from benchmarks.peers import part as part_module
from benchmarks.peers.chart import PART, bars, chart_svg
from benchmarks.peers.config import Eviction, PeersConfig, Shape, parse_shape
from benchmarks.peers.engines import Engine, chosen_engines, default_quire, quire_engine
from benchmarks.peers.part import COLUMNS, Failure, PeersPart, make_model, result_of, run_worker
from quire.errors import UnknownName

ENGINES = chosen_engines((), default_quire(), Eviction())


def shape(name: str) -> Shape:
    return parse_shape(name)


def config(folder: Path, *shapes: str, **changed: Any) -> PeersConfig:
    folders = {"environments": folder / "environments", "files": folder / "files"}
    engines = tuple(engine.name for engine in ENGINES)
    sizes = {"models": ("tiny",), "shapes": tuple(map(shape, shapes)), "repeats": 2, "threads": 1}
    return PeersConfig(engines=engines, **(folders | sizes | changed))


def result(shape_: Shape, step_s: float, **changed: Any) -> dict[str, Any]:
    """All prompts get one token per step of `step_s`; prompt i starts i steps late."""
    times_s = [
        [step_s * (i + number + 1) for number in range(new)]
        for i, (_, new) in enumerate(shape_.lengths)
    ]
    return {
        "version": "1.0",
        "weights_type": "bfloat16",
        "weight_bytes": 100,
        "kv_type": "bfloat16",
        "kv_bytes": 10,
        "load_s": 1.0,
        "total_s": max(found[-1] for found in times_s),
        "times_s": times_s,
        "tokens": [[7] * new for _, new in shape_.lengths],
        "peak_rss_bytes": 1_000,
    } | changed


def measures(shape_: Shape, step_s: float, **changed: Any) -> peer_measures.Measures:
    return peer_measures.measures_of(result(shape_, step_s, **changed), shape_, judged_prompts=1)


def test_engines_of_a_round_get_the_same_work(tmp_path):
    made = config(tmp_path, "2x8+4")
    jobs = [peer_measures.build_job(made, "tiny", made.shapes[0], engine, 1) for engine in ENGINES]
    other = peer_measures.build_job(made, "tiny", made.shapes[0], ENGINES[0], 0)
    fixed = shape("fixed:32x512+256")

    assert (fixed.is_fixed, made.shapes[0].is_fixed) == (True, False)
    assert (shape("32x512+64").kv_bytes(100), fixed.kv_bytes(100)) == (3_686_400, 614_400)

    for job in jobs:
        assert job["prompts"] == jobs[0]["prompts"]
        assert job["new_tokens"] == [4, 4]
        assert job["kv_bytes"] == 2 * 24 * peer_measures.kv_bytes_per_token("tiny")
        assert job["warmup_prompts"] != job["prompts"]
        assert json.loads(json.dumps(job)) == job
    assert other["prompts"] != jobs[0]["prompts"]
    assert jobs[0]["options"] == {"flags": []}


def test_engines_are_chosen_by_name_and_measured_by_token_times():
    found = chosen_engines(("vllm", "hf_static"), default_quire(), Eviction())

    assert [engine.name for engine in found] == ["quire", "quire_evict", "hf_static", "vllm"]
    with pytest.raises(UnknownName, match="vlm"):
        chosen_engines(("vlm",), (), Eviction())
    own = quire_engine("int8=--weight-codec int8 --evict 'recent:cap=64'")
    assert own.options == {"flags": ["--weight-codec", "int8", "--evict", "recent:cap=64"]}
    assert own.evicts
    assert not quire_engine("quire=").evicts

    # two prompts of 3 tokens, at 1, 2, 3 s and at 2, 3, 4 s: 3 tokens in the last 2 s
    found = measures(shape("2x8+3"), 1.0)
    assert found.total_s == 4
    assert found.prefill_s == 2
    assert found.decode_tokens_per_s == pytest.approx(3 / 2)
    assert found.first_token_s == pytest.approx(1.5)
    assert found.tokens_per_s == pytest.approx(6 / 4)
    assert found.judged == [[7, 7, 7]]


def test_total_claim_pairs_rounds_with_the_fastest_peer():
    """Quire over vLLM in the three rounds: 2/4, 3/4 and 2/8; the median is 1/2."""
    work = shape("32x8+2")
    steps = ((2.0, 4.0, 9.0), (3.0, 4.0, 9.0), (2.0, 8.0, 9.0))
    rounds = [
        {"quire": measures(work, a), "vllm": measures(work, b), "openvino": measures(work, c)}
        for a, b, c in steps
    ]
    found = peer_measures.part_claims("125m", work, rounds, ENGINES)

    assert found.claims == {"total_vs_best_peer_32x8_2": pytest.approx(0.5)}
    assert found.best_peers == {"total_vs_best_peer_32x8_2": "vllm"}
    other = peer_measures.part_claims("1100m", work, rounds, ENGINES)
    assert list(other.claims) == ["total_vs_best_peer_32x8_2_1100m"]
    claims = peer_measures.worst_totals(
        {
            ("125m", work): found.claims,
            ("125m", shape("33x8+2")): {"total_vs_best_peer_33x8_2": 0.8},
            ("125m", shape("1x8+2")): {"total_vs_best_peer_1x8_2": 3.0},
        }
    )
    assert claims == {"total_vs_best_peer": 0.8}


def test_claims_compare_equal_weights_of_users_and_equal_eviction_in_fixed_memory():
    """OpenVINO decodes 4 times faster with half the bytes; vLLM twice as fast with equal bytes."""
    for name, claim in (("1x8+3", "one_user"), ("8x8+3", "eight_users")):
        work = shape(name)
        round_ = {"quire": measures(work, 4.0), "vllm": measures(work, 2.0)}
        round_["openvino"] = measures(work, 1.0, weight_bytes=50)
        found = peer_measures.part_claims("125m", work, [round_], ENGINES)

        assert found.claims[f"{claim}_vs_best_peer"] == pytest.approx(0.5)
        assert found.best_peers[f"{claim}_vs_best_peer"] == "vllm"

    work = shape("fixed:4x8+2")
    steps = {"quire": 2, "quire_evict": 1, "openvino": 4, "openvino_evict": 3, "vllm": 8}
    rounds = [{name: measures(work, step_s) for name, step_s in steps.items()}]

    assert peer_measures.part_claims("125m", work, rounds, ENGINES).claims == {
        "fixed_kv_vs_openvino_full": pytest.approx(2),
        "fixed_kv_vs_vllm": pytest.approx(4),
        "fixed_kv_vs_openvino_evicting": pytest.approx(3),
    }
    work = shape("32x8+2")  # without the others in each round
    alone = [{"quire": measures(work, 1.0)}, {}]
    assert peer_measures.part_claims("125m", work, alone, ENGINES).claims == {}


@pytest.fixture
def made_part(tmp_path, monkeypatch):
    """A part whose workers are replaced: vLLM fails, llama.cpp loses a token."""
    ran: list[tuple[int, str]] = []

    def run(engine: Engine, job: dict[str, Any], found: PeersConfig) -> dict[str, Any] | Failure:
        ran.append((len(ran), engine.name))
        if engine.name == "vllm":
            return Failure("no environment")
        made = result(found.shapes[0], 1.0 + len(ran) / 100)
        if engine.name == "llamacpp":
            made["tokens"][0].pop()
        return made

    monkeypatch.setattr(part_module, "run_worker", run)
    for name in ("prepare", "make_model"):
        monkeypatch.setattr(part_module, name, lambda *_given: None)
    settings = config(tmp_path, "2x8+3", judged_prompts=0)
    cells, shape_ = peer_measures.Cells(tmp_path / "cells.jsonl"), settings.shapes[0]
    run_of = {"model": "tiny", "shape": shape_, "commit": "abc", "show": lambda _cell: None}
    return PeersPart(config=settings, engines=ENGINES, cells=cells, **run_of), ran


def test_an_engine_that_fails_has_a_row_with_its_error_and_is_repeated(made_part, tmp_path):
    part, ran = made_part
    found = part.run()
    [table] = found.tables
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in table.rows}

    assert list(rows) == ["quire", "hf_static", "hf_cb", "vllm", "openvino", "llamacpp"]
    assert rows["vllm"]["error"] == "no environment"
    assert rows["vllm"]["total s"] is None
    assert "got 2 outputs of 5 tokens" in str(rows["llamacpp"]["error"])
    assert rows["quire"]["error"] == ""
    assert rows["quire"]["Quire's time / engine's"] == pytest.approx(1)
    assert len(found.raw["cells"]) == 2 * len(rows)
    assert PartResult.from_json(json.loads(json.dumps(found.to_json()))) == found

    ran.clear()
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": {')  # an interrupted run

    again = replace(part, cells=peer_measures.Cells(tmp_path / "cells.jsonl")).run()

    assert {name for _, name in ran} == {"vllm", "llamacpp"}
    assert again.tables[0].rows[0] == found.tables[0].rows[0]
    ran.clear()
    replace(part, cells=peer_measures.Cells(tmp_path / "cells.jsonl"), commit="def").run()
    assert len(ran) == 2 * 6


def test_result_is_the_last_json_object_and_max_at_once_counts_open_requests():
    assert result_of(0, 'log\n{"a": 1}\nbye\n', "") == {"a": 1}
    assert result_of(0, "log\n", "") == Failure("the worker printed no result")
    failed = result_of(-9, "", "Traceback\nValueError: too small\n(worker) shut down\n")
    assert failed == Failure("exit status -9: ValueError: too small")
    assert peer_measures.max_at_once([[1.0, 2.0, 3.0], [2.5, 4.0], [3.5, 5.0]]) == 2
    # the second starts when the first ends
    assert peer_measures.max_at_once([[1.0, 2.0], [2.0, 3.0]]) == 1
    assert peer_measures.max_at_once([]) == 0


SHAPE = parse_shape("3x8+4")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> PeersConfig:
    folder = tmp_path_factory.mktemp("peers")
    make_model("tiny", folder / "files")
    folders = {"environments": folder / "environments", "files": folder / "files"}
    sizes = {"models": ("tiny",), "shapes": (SHAPE,), "threads": 1, "timeout_s": 300}
    return PeersConfig(engines=("quire", "hf_static"), dtype="float32", **sizes, **folders)


def outputs(engine: Engine, workers: PeersConfig) -> list[list[int]]:
    found = run_worker(engine, peer_measures.build_job(workers, "tiny", SHAPE, engine, 0), workers)
    assert not isinstance(found, Failure), found.reason
    run = peer_measures.measures_of(found, SHAPE, judged_prompts=3)
    assert 0 < run.first_token_s <= run.prefill_s < run.total_s
    assert run.weight_bytes > 0
    assert run.peak_rss_bytes > 10 * run.weight_bytes
    return run.judged


@pytest.mark.slow
def test_workers_of_transformers_and_quire_generate_the_same_tokens(workers):
    [static] = chosen_engines(("hf_static",), (), Eviction())
    quire = quire_engine("quire=--dtype float32")
    assert outputs(static, workers) == outputs(quire, workers)


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


CHART_COLUMNS = ["engine", "KV MB", "tokens/s", "at once", "error"]


def stored(*rows):
    return {"arms": {PART: {"tables": [{"columns": CHART_COLUMNS, "rows": list(rows)}]}}}


def test_bars_are_in_a_fixed_order_without_failed_engines():
    run = stored(
        ["quire", 75.5, 400.4, 9, ""],
        ["openvino", 75.5, 250.0, 8, ""],
        ["vllm", None, None, None, "no result: time limit"],
        ["quire_int8", 75.5, 500.0, 20, ""],
    )

    [other, quire] = bars(run)

    assert (other.engine, quire.engine) == ("openvino", "quire")
    assert (quire.at_once, quire.kv_bytes) == (9, 75_500_000)
    picture = chart_svg(bars(stored(["quire", 75.5, 1400.4, 9, ""]))).decode()
    assert all(f">{text}<" in picture for text in ("Quire", "1,400", "9"))
