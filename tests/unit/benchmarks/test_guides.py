import json

import pytest

from benchmarks.guides import body_limits, layer_batches, lm_eval, page_map, simulate
from benchmarks.guides.body_limits import CaseFound
from benchmarks.guides.layer_batches import LayerBatchesConfig, StepBytes
from benchmarks.guides.page_map import PageMapConfig
from quire.errors import ConfigError
from quire.kv.page_map import FIRST_ROW, FREE, SHARED, read_pages
from quire.policies import registry
from support.snippets import ROOT


def test_simulation_of_the_guide_gives_the_stored_figures(capsys: pytest.CaptureFixture[str]):
    stored = json.loads((ROOT / "docs/results/simulate_guide.json").read_text())["claims"]

    with registry.temporary_registrations():
        simulate.main()

    found = json.loads(capsys.readouterr().out.splitlines()[-1])["claims"]
    names = ("kv_mean_share", "kv_peak_share", "waste_fraction", "refused_never_fits")
    for name in (f"{variant}_{name}" for variant in ("full", "rule") for name in names):
        assert found[name] == pytest.approx(stored[name])
    assert (found["full_refused_never_fits"], found["rule_refused_never_fits"]) == (2, 0)


def test_tasks_of_the_guide_are_written_from_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    lm_eval.write_tasks(lm_eval.PAGE.read_text(encoding="utf-8"))

    lines = (tmp_path / "tasks/pairs.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert json.loads(lines[-1])["answer"] == "17049"
    names = sorted(path.stem for path in (tmp_path / "tasks").glob("*.yaml"))
    assert names == ["quire_pairs", "quire_pairs_choice", "quire_perplexity"]
    for name in names:
        assert f"task: {name}\n" in (tmp_path / f"tasks/{name}.yaml").read_text()


SMALL_MAP = PageMapConfig(requests=4, pages=64, chunk_pages=3, repeats=1)
SMALL_STEP = LayerBatchesConfig(
    hidden_size=32, intermediate_size=64, heads=2, step_tokens=64, batches=2
)


def pages_of(memory, requests=SMALL_MAP.requests):
    owner, state, _ = read_pages(memory, range(requests)).in_order()
    return owner, state


def test_pages_alternate_or_come_in_chunks_and_pairs_share_half_of_them():
    alternating, _ = pages_of(page_map.alternating(SMALL_MAP))
    chunks, _ = pages_of(page_map.in_chunks(SMALL_MAP))

    for owner in (alternating, chunks):  # each request holds its part of the pages
        parts = [(owner == FIRST_ROW + row).sum() for row in range(SMALL_MAP.requests)]
        assert parts == [SMALL_MAP.pages_each] * SMALL_MAP.requests == [15] * 4
    held = alternating[alternating != FREE]
    assert (held[1:] != held[:-1]).all()
    assert (chunks[: SMALL_MAP.chunk_pages] == chunks[0]).all()

    owner, state = pages_of(page_map.shared_in_pairs(SMALL_MAP))
    shared = (state & SHARED > 0).sum()
    assert shared == 2 * 10  # two pairs; 2 / 3 of 15 pages
    assert (owner != FREE).sum() == shared + 4 * 10


def test_steps_transfer_each_layer_once_and_single_batches_as_often_as_they_are():
    whole, shared = (layer_batches.step_bytes(SMALL_STEP, batches) for batches in (1, 2))

    plain_bytes = 4 * 4 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)  # four layers in float32
    assert whole.transferred_bytes == shared.transferred_bytes
    assert plain_bytes <= whole.transferred_bytes < 1.01 * plain_bytes  # parameters are aligned

    whole = [StepBytes(160, 58), StepBytes(162, 58), StepBytes(900, 58)]

    assert layer_batches.claims(LayerBatchesConfig(), whole, [StepBytes(57, 58)]) == {
        "one_batch_peak_bytes": 162,
        "one_batch_transferred_bytes": 58,
        "layer_by_layer_peak_bytes": 57,
        "layer_by_layer_transferred_bytes": 58,
        "one_after_the_other_transferred_bytes": 8 * 58,
    }
    with pytest.raises(ConfigError, match=r"expected equal transfers .* got \[58, 59\] bytes"):
        layer_batches.transferred([StepBytes(1, 58), StepBytes(1, 59)])


def test_claims_are_medians_and_the_largest_memory():
    rounds = [
        CaseFound(response_s=seconds, other_s=2 * seconds, resident_bytes=number)
        for seconds, number in ((0.1, 7), (0.3, 9), (0.2, 8))
    ]

    found = body_limits.claims({"no_key": rounds}, {"prompts": [0.1, 0.9, 0.2], "content": [0.3]})

    assert found == {
        "no_key_response_s": 0.2,
        "no_key_other_s": 0.4,
        "no_key_resident_bytes": 9,
        "prompts_health_s": 0.2,
        "content_health_s": 0.3,
        "slowest_health_s": 0.3,
    }
