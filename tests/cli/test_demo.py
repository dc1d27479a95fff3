import io
import json

import pytest
from rich.console import Console

from quire.api.llm import LLM
from quire.cli import doctor as doctor_module
from quire.cli.demo_run import DOCUMENTS, QUESTIONS, bar_of, document_text, request_rows
from quire.cli.exactness import Exactness, compare_with_generate
from quire.config.kv_config import KVConfig
from quire.engine.stats import RequestBytes
from quire.errors import ModelError
from support.command_line import last_json


@pytest.mark.slow
def test_demo_compares_uses_of_the_same_memory(quire):
    """With quire-tiny, whose answers are wrong; outputs equal those of Transformers."""
    done = quire("demo", "quire-tiny", "--max-tokens", "4", "--kv-memory", "24MiB", "--json")
    report, printed = last_json(done), " ".join(done.stderr.split())
    claims, variants = report["claims"], report["config"]["variants"]

    assert done.exit_code == 0
    assert claims["questions"] == len(QUESTIONS) == 8
    assert claims["full_requests"] == 11  # with three turns of a chat
    assert claims["exactness_equal"] + claims["exactness_ties"] == claims["exactness_checked"] == 4
    assert [variant["name"] for variant in variants] == ["full", "int8", "evict", "evict_int8"]
    for name in (variant["name"] for variant in variants):
        assert 0 < claims[f"{name}_kv_peak_bytes"] <= claims["full_kv_total_bytes"] <= 24 * 2**20
        assert claims[f"{name}_completion_tokens_per_s"] > 0
        assert 0 <= claims[f"{name}_right"] <= claims[f"{name}_answers"] == 11
        assert 1 <= claims[f"{name}_max_running"] <= 8
    assert claims["int8_max_running"] > claims["full_max_running"]
    assert claims["int8_cached_tokens"] > claims["full_cached_tokens"]  # questions share documents
    shown = "prefix hits;right answers;base=snapkv,cap=512;compared with Transformers"
    assert all(text in printed for text in shown.split(";"))
    names = [variant["name"] for variant in variants]
    wrong = sum(claims[f"{name}_answers"] - claims[f"{name}_right"] for name in names)
    assert printed.count("wrong with ") == wrong > 0


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("It took place on January 14, 1862.", True),
        ("on the 14th of january", True),
        ("In London.", False),
    ],
)
def test_an_output_that_contains_an_answer_is_right(output, right):
    assert QUESTIONS[0].is_right(output) is right


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_whole_paragraphs_that_contain_the_answers(name):
    text = document_text(name)
    assert 3_500 < len(text) < 5_500
    assert text[-1] in ".!?'\""
    for question in QUESTIONS:
        assert question.document != name or question.is_right(text)


def test_live_view_shows_requests_and_a_different_output_is_detected():
    sizes = [(f"r{i}", 1024 * i) for i in range(1, 6)]
    requests = tuple(RequestBytes(request_id=r, tokens=16, kv_bytes=b) for r, b in sizes)

    bars = [bar_of(size, 1024, 40) for size in (2048, 1536, 1 << 20)]
    assert bars == ["██", "█▌", "█" * 40]
    console = Console(width=60, file=io.StringIO())
    console.print(request_rows(requests, 3, 1024, 60))
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert lines == ["r1         16 tokens █", "r2         16 tokens ██", "and 3 more"]

    llm = LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="2MiB"), verify=False)
    (correct,) = llm.generate("<|doc|>The king said")
    wrong_ids = (*correct.token_ids[:3], correct.token_ids[3] + 1, *correct.token_ids[4:])
    fields = {name: getattr(correct, name) for name in correct.__slots__}
    wrong = type(correct)(**fields | {"token_ids": wrong_ids})

    assert compare_with_generate("quire-tiny", [correct]) == Exactness(1, 1, 0)
    assert not compare_with_generate("quire-tiny", [correct, wrong]).passed


@pytest.mark.slow
def test_doctor_passes_on_a_healthy_machine(quire):
    result = quire("doctor", "--json")

    report = last_json(result)
    assert result.exit_code == 0, result.output
    assert report["claims"] == {"healthy": 1}
    findings = report["arms"]["findings"]
    names = {finding["name"] for finding in findings}
    missing = [f["mark"] for f in findings if f["value"].startswith("not available")]
    assert set(missing) <= {"--"}
    assert {"torch", "threads", "memory", "attention auto", "packaged model"} <= names
    assert {"C extension", "huge pages"} <= names
    kernels = {kernel["operation"] for kernel in report["arms"]["kernels"]}
    operations = "linear layers;RMSNorm and RoPE;attention, decode;attention, prefill;sampling"
    assert kernels == set(operations.split(";"))


@pytest.mark.slow
def test_doctor_reports_a_fault(quire, monkeypatch):
    def broken(*arguments: object, **options: object) -> None:
        raise ModelError("the weights are missing")

    monkeypatch.setattr("quire.models.loader.load_model", broken)

    result = quire("doctor", "--json")

    assert result.exit_code == 1
    assert "the weights are missing" in json.dumps(last_json(result))
    assert last_json(result)["claims"] == {"healthy": 0}


@pytest.mark.slow
def test_doctor_reports_a_wrong_test_output(monkeypatch):
    compared = "quire.cli.exactness.compare_with_generate"
    monkeypatch.setattr(compared, lambda *arguments: Exactness(1, 0, 0))

    findings = {finding.name: finding for finding in doctor_module.examine()}

    assert not findings["test request"].ok
    assert findings["packaged model"].ok


def test_doctor_shows_the_implementation_of_a_model():
    found = doctor_module.model_finding("quire-tiny")
    missing = doctor_module.model_finding("no-such-folder")
    assert found.ok
    assert "implementation: " in found.value
    assert not missing.ok
