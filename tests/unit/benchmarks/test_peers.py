"""The peers benchmark without engines: shapes, jobs, order, numbers, claims, rows, stored cells."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.result import PartResult
from benchmarks.peers import part as part_module
from benchmarks.peers.config import Eviction, PeersConfig, Shape, parse_shape
from benchmarks.peers.engines import (
    Engine,
    chosen_engines,
    default_quire,
    preloaded,
    python_of,
    quire_engine,
)
from benchmarks.peers.measures import (
    Cells,
    Measures,
    build_job,
    interleaved,
    kv_bytes_per_token,
    measures_of,
    part_claims,
    worst_totals,
)
from benchmarks.peers.part import COLUMNS, Failure, PeersPart, result_of, run_worker
from quire.errors import ConfigError, UnknownName

ENGINES = chosen_engines((), default_quire(), Eviction())


def shape(name: str) -> Shape:
    return parse_shape(name)


def config(folder: Path, *shapes: str, **changed: Any) -> PeersConfig:
    made = PeersConfig(
        models=("tiny",),
        shapes=tuple(map(shape, shapes)),
        engines=tuple(engine.name for engine in ENGINES),
        environments=folder / "environments",
        files=folder / "files",
        repeats=2,
        threads=1,
    )
    return replace(made, **changed)


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


def measures(shape_: Shape, step_s: float, **changed: Any) -> Measures:
    return measures_of(result(shape_, step_s, **changed), shape_, judged_prompts=1)


def test_shape_names_are_parsed():
    plain, fixed = shape("32x512+64"), shape("fixed:32x512+256")

    assert plain.lengths == ((512, 64),) * 32
    assert plain.kv_bytes(100) == 2 * 32 * 576 * 100
    assert not plain.is_fixed
    assert fixed.kv_bytes(100) == 32 * 768 * 100 // 4
    assert fixed.is_fixed


def test_requests_beyond_the_context_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="context of the model tiny is 1024"):
        config(tmp_path, "1x1000+64")


def test_interleaving_rotates_the_first_engine():
    order = [(round_, engine.name) for round_, engine in interleaved(ENGINES[:3], 4)]
    names = [engine.name for engine in ENGINES[:3]]

    for round_ in range(4):
        assert sorted(n for r, n in order if r == round_) == sorted(names)
    assert [order[3 * round_][1] for round_ in range(4)] == [*names, names[0]]


def test_engines_of_a_round_get_the_same_work(tmp_path):
    made = config(tmp_path, "2x8+4")
    jobs = [build_job(made, "tiny", made.shapes[0], engine, 1) for engine in ENGINES]
    other = build_job(made, "tiny", made.shapes[0], ENGINES[0], 0)

    for job in jobs:
        assert job["prompts"] == jobs[0]["prompts"]
        assert job["new_tokens"] == [4, 4]
        assert job["kv_bytes"] == 2 * 24 * kv_bytes_per_token("tiny")
        assert job["warmup_prompts"] != job["prompts"]
        assert json.loads(json.dumps(job)) == job
    assert other["prompts"] != jobs[0]["prompts"]
    assert jobs[0]["options"] == {"flags": []}


def test_quire_options_are_flags():
    found = quire_engine("int8=--weight-codec int8 --evict 'recent:cap=64'")

    assert found.options == {"flags": ["--weight-codec", "int8", "--evict", "recent:cap=64"]}
    assert found.evicts
    assert not quire_engine("quire=").evicts
    with pytest.raises(ConfigError, match="NAME=FLAGS"):
        quire_engine("--weight-codec int8")


def test_engines_are_chosen_by_name():
    found = chosen_engines(("vllm", "hf_static"), default_quire(), Eviction())

    assert [engine.name for engine in found] == ["quire", "quire_evict", "hf_static", "vllm"]
    with pytest.raises(UnknownName, match="vlm"):
        chosen_engines(("vlm",), (), Eviction())
    with pytest.raises(ConfigError, match="different names"):
        chosen_engines((), (quire_engine("a="), quire_engine("a=")), Eviction())


def test_environments_are_found_by_folder(tmp_path):
    vllm = next(engine for engine in ENGINES if engine.name == "vllm")
    assert python_of(vllm, tmp_path) is None
    python = tmp_path / "vllm" / "bin" / "python"
    library = tmp_path / "vllm" / "lib" / "libiomp5.so"
    for path in (python, library):
        path.parent.mkdir(parents=True)
        path.touch()

    assert python_of(vllm, tmp_path) == python
    assert str(library) in preloaded(vllm, tmp_path)


def test_measures_are_computed_from_token_times():
    """Two prompts of 3 tokens, at 1, 2, 3 s and at 2, 3, 4 s: 3 tokens in the last 2 s."""
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
    found = part_claims("125m", work, rounds, ENGINES)

    assert found.claims == {"total_vs_best_peer_32x8_2": pytest.approx(0.5)}
    assert found.best_peers == {"total_vs_best_peer_32x8_2": "vllm"}
    other = part_claims("1100m", work, rounds, ENGINES)
    assert list(other.claims) == ["total_vs_best_peer_32x8_2_1100m"]
    claims = worst_totals(
        {
            ("125m", work): found.claims,
            ("125m", shape("33x8+2")): {"total_vs_best_peer_33x8_2": 0.8},
            ("125m", shape("1x8+2")): {"total_vs_best_peer_1x8_2": 3.0},
        }
    )
    assert claims == {"total_vs_best_peer": 0.8}


def test_user_claims_exclude_peers_with_smaller_weights():
    """OpenVINO decodes 4 times faster with half the bytes; vLLM twice as fast with equal bytes."""
    for name, claim in (("1x8+3", "one_user"), ("8x8+3", "eight_users")):
        work = shape(name)
        found = part_claims(
            "125m",
            work,
            [
                {
                    "quire": measures(work, 4.0),
                    "vllm": measures(work, 2.0),
                    "openvino": measures(work, 1.0, weight_bytes=50),
                }
            ],
            ENGINES,
        )

        assert found.claims[f"{claim}_vs_best_peer"] == pytest.approx(0.5)
        assert found.best_peers[f"{claim}_vs_best_peer"] == "vllm"


def test_fixed_memory_claims_compare_full_with_full_and_evicting_with_evicting():
    work = shape("fixed:4x8+2")
    steps = {"quire": 2, "quire_evict": 1, "openvino": 4, "openvino_evict": 3, "vllm": 8}
    rounds = [{name: measures(work, step_s) for name, step_s in steps.items()}]

    assert part_claims("125m", work, rounds, ENGINES).claims == {
        "fixed_kv_vs_openvino_full": pytest.approx(2),
        "fixed_kv_vs_vllm": pytest.approx(4),
        "fixed_kv_vs_openvino_evicting": pytest.approx(3),
    }


def test_an_engine_that_fails_makes_no_claim():
    work = shape("32x8+2")

    assert part_claims("125m", work, [{"quire": measures(work, 1.0)}, {}], ENGINES).claims == {}


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
    made = PeersPart(
        config=settings,
        model="tiny",
        shape=settings.shapes[0],
        engines=ENGINES,
        cells=Cells(tmp_path / "cells.jsonl"),
        commit="abc",
        show=lambda _cell: None,
    )
    return made, ran


def test_an_engine_that_fails_has_a_row_with_its_error(made_part):
    part, _ = made_part
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


def test_a_resumed_run_repeats_failed_cells_only(made_part, tmp_path):
    part, ran = made_part
    first = part.run()
    ran.clear()
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": {')  # an interrupted run

    again = replace(part, cells=Cells(tmp_path / "cells.jsonl")).run()

    assert {name for _, name in ran} == {"vllm", "llamacpp"}
    assert again.tables[0].rows[0] == first.tables[0].rows[0]
    ran.clear()
    replace(part, cells=Cells(tmp_path / "cells.jsonl"), commit="def").run()
    assert len(ran) == 2 * 6
    ran.clear()
    replace(part, cells=Cells(tmp_path / "cells.jsonl"), commit="def").run()
    assert {name for _, name in ran} == {"vllm", "llamacpp"}


def test_result_is_the_last_json_object_of_the_output():
    assert result_of(0, 'log\n{"a": 1}\nbye\n', "") == {"a": 1}
    assert result_of(0, "log\n", "") == Failure("the worker printed no result")
    failed = result_of(-9, "", "Traceback\nValueError: too small\n(worker) shut down\n")
    assert failed == Failure("exit status -9: ValueError: too small")


@pytest.mark.parametrize(
    "python", ["#!/missing/interpreter\n", "#!/bin/sh\necho ModuleNotFoundError: x >&2; exit 1\n"]
)
def test_broken_environment_says_how_to_rebuild_it(python, tmp_path):
    made = config(tmp_path, "2x8+3")
    engine = next(engine for engine in ENGINES if engine.name == "openvino")
    folder = made.environments / "openvino"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(python)
    (folder / "bin" / "python").chmod(0o755)

    found = run_worker(engine, build_job(made, "tiny", made.shapes[0], engine, 0), made)

    assert isinstance(found, Failure)
    assert f"rm -r {folder}, then make peers PEERS={made.environments}" in found.reason


def test_process_that_does_not_end_is_killed(tmp_path):
    """`sleep 60` ignores the worker's command, which sh reads as its arguments."""
    made = config(tmp_path, "2x8+3", timeout_s=0.2, run_under=("sh", "-c", "sleep 60"))
    found = run_worker(ENGINES[0], build_job(made, "tiny", made.shapes[0], ENGINES[0], 0), made)

    assert found == Failure("not finished after 0.2 s")
