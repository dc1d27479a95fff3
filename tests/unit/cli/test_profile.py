"""`quire profile`, `quire bench` and `quire calibrate`: quick runs, files, invalid options."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from quire.cli.calibrate import calibrate
from quire.cli.main import app
from quire.errors import ConfigError, UnknownName
from quire.eviction.calibration import read_vectors, retrieval_scores
from quire.models.loader import load_model
from quire.models.tokenizer import encode_prompt
from quire.plan.ceilings import Ceilings, NotUsable, read_ceilings
from quire.plan.machine import this_machine
from quire.profile import ceilings


def quire(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def profile_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a profile smaller than --quick: values are only compared."""
    small = replace(ceilings.QUICK_PROFILE, repeats=2, buffer_bytes=8 << 20)
    monkeypatch.setattr(ceilings, "QUICK_PROFILE", small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_profile_is_written_and_read_back(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    run = profile_of(quire("profile", "--quick", "--output", str(path), "--json"))

    found = read_ceilings(path, this_machine(run["config"]["threads"]))
    assert isinstance(found, Ceilings)
    assert run["name"] == "profile"
    assert run["claims"]["read_bytes_per_s"] == found.read_bytes_per_s
    assert run["claims"]["bfloat16_flops_per_s"] == found.peak_product_rate()
    assert isinstance(read_ceilings(path, this_machine(run["config"]["threads"] + 1)), NotUsable)


@pytest.mark.slow
def test_profile_retains_the_rates_of_models_measured_before(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    arguments = ("profile", "--quick", "--output", str(path), "--json")
    first = profile_of(quire(*arguments, "quire-tiny"))
    profile_of(quire(*arguments))

    found = read_ceilings(path, this_machine(first["config"]["threads"]))
    assert isinstance(found, Ceilings)
    [(key, rates)] = found.prefill.items()
    assert key.endswith("bfloat16, cpu")
    assert rates.token_s == first["arms"]["ceilings"]["prefill"][key]["token_s"]
    assert found.copies["cpu"].out.bytes_per_s > 0


def test_quick_profile_does_not_replace_the_stored_profile(cache: Path):
    missing = quire("profile", "--quick", str(cache / "none"))  # fails before measuring
    assert missing.exit_code != 0
    assert "GB/s" not in missing.output
    assert profile_of(quire("profile", "--quick", "--json"))["config"]["output"] is None
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "--quick", "--evict", "h2o"), "'h2o' has no effect without a model: "),
        (("serve", "--host", ""), "0.0.0.0 for all"),
        (("calibrate", "quire-tiny", "--kv-codec", " ; "), "--kv-codec with one or more codecs"),
    ],
)
def test_empty_or_unused_option_values_are_refused(arguments, message):
    result = quire(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


SMALL = ("--kv-memory", "4MiB", "--no-verify", "--threads", "1", "--dtype", "float32")
SHAPE = ("--input-len", "24", "--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1")


def bench(*arguments: str) -> dict[str, Any]:
    return profile_of(quire("bench", *arguments, *SMALL, *SHAPE, "--json"))


def test_throughput_and_latency_count_requests_tokens_and_percentiles():
    run = bench("throughput", "quire-tiny", "--num-prompts", "3")

    claims = run["claims"]
    assert len(run["arms"]["rounds"]) == 2
    assert claims["requests_per_s"] == pytest.approx(3 / claims["total_s"])
    assert claims["output_tokens_per_s"] == pytest.approx(12 / claims["total_s"])
    assert claims["total_tokens_per_s"] == pytest.approx((72 + 12) / claims["total_s"])
    assert 0 < claims["kv_peak_bytes"] <= claims["kv_total_bytes"] <= 4 << 20

    run = bench("latency", "quire-tiny", "--batch-size", "2")

    claims, totals = run["claims"], [found["total_s"] for found in run["arms"]["rounds"]]
    assert min(totals) <= claims["latency_p50_s"] <= claims["latency_p99_s"] <= max(totals)
    assert 0 < claims["first_token_p50_s"] < claims["latency_mean_s"]
    assert run["config"]["shape"]["requests"] == 2

    result = quire("bench", "throughput", *SMALL, "--input-len", "99999")
    assert result.exit_code == 2
    assert "--input-len + --output-len" in result.stderr


# ---- quire calibrate -----------------------------------------------------------------------------


def quire_calibrate(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("calibrate")(calibrate)
    return CliRunner().invoke(app, ["quire-tiny", *arguments])


def test_calibrate_writes_a_file_per_side_that_needs_constants_also_for_a_text(tmp_path):
    options = ("--kv-codec", "int4; int4:equalise=1/int8; int8_channel/int4", "--tokens", "512")
    result = quire_calibrate("--output", str(tmp_path), *options, "--json")
    assert result.exception is None, result.output
    written = sorted(path.name for path in (tmp_path / "quire-kv").iterdir())

    assert written == ["key.int4_equalise_1.safetensors", "key.int8_channel.safetensors"]
    # codec errors on held-out text
    claims = json.loads(result.output.splitlines()[-1])["claims"]

    assert 0 < claims["int4:equalise=1/int8_product_error"] < claims["int4_product_error"] < 0.2
    assert 0 < claims["int8_channel/int4_product_error"] < claims["int4_product_error"]
    assert claims["int8_channel/int4_value_error"] == claims["int4_value_error"]

    text = tmp_path / "text.txt"
    text.write_text("The keys of a cache have channels that are large in all tokens. " * 20)
    result = quire_calibrate("--text", str(text), "--kv-codec", "int8", "--tokens", "128")
    assert result.output.startswith("int8: relative error of query-key products 0.0")


def test_retrieval_scores_are_the_change_of_the_output_without_distant_tokens(tmp_path):
    """Equal to attention written out for each head, on the first of the prompts."""
    file = tmp_path / "heads.tsv"
    result = quire_calibrate("--retrieval-heads", str(file), "--prompts", "2", "--json")
    assert result.exception is None, result.output
    assert json.loads(result.output.splitlines()[-1])["claims"] == {"kv_heads": 32}
    decoder = load_model("quire-tiny").decoder
    ids, answers = [(7 * i * i + i) % 500 for i in range(96)], [40, 90]

    scores = retrieval_scores(decoder, [(ids, answers), (ids, answers[:1])])

    shape = decoder.spec.heads[0]
    lines = file.read_text().splitlines()
    assert [len(line.split("\t")) for line in lines] == list(map(len, scores))
    for vectors, row in zip(read_vectors(decoder, ids), scores, strict=True):
        for head, score in enumerate(row):
            group = slice(head * shape.group, (head + 1) * shape.group)
            changes = []
            for query in (39, 89, 39):  # before the answers
                near = [i < 4 or query - i < 96 // 8 for i in range(query + 1)]
                logits = vectors.query[group, query] @ vectors.key[head, : query + 1].T
                logits = logits.double() * shape.key_dim**-0.5
                far = torch.where(torch.tensor(near), logits, -torch.inf)
                exact, other = (
                    (x.softmax(dim=1) @ vectors.value[head, : query + 1].double()).flatten()
                    for x in (logits, far)
                )
                changes.append(float((exact - other).norm() / exact.norm()))
            expected = ((changes[0] + changes[1]) / 2 + changes[2]) / 2
            assert score == pytest.approx(expected, rel=1e-2)  # bfloat16


@pytest.mark.parametrize("first_token", [[], [7]])
def test_answers_of_retrieval_prompts_are_of_the_whole_text(monkeypatch, tmp_path, first_token):
    """Prompts are encoded as one text, with the first token of models that have one."""
    found, tokenizer = [], load_model("quire-tiny").tokenizer

    def with_first(tokenizer, text):
        return [*first_token, *encode_prompt(tokenizer, text)]

    monkeypatch.setattr("quire.models.tokenizer.encode_prompt", with_first)
    scores = "quire.eviction.calibration.retrieval_scores"
    monkeypatch.setattr(scores, lambda decoder, texts: found.extend(texts) or [[0.5]])
    result = quire_calibrate("--retrieval-heads", str(tmp_path / "new" / "a.tsv"), "--prompts", "2")
    assert result.exception is None, result.output

    for ids, answers in found:
        text = tokenizer.decode([ids[index] for index in answers])
        assert ids[:1] == first_token or not first_token
        assert len(ids) < 600
        assert re.fullmatch(r"[\s\d.]+", text)


def test_invalid_input_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    heads = ("--retrieval-heads", str(tmp_path / "a"), "--text", "b", "--tokens", "99")
    missing = ("--text", str(tmp_path / "none.txt"), "--kv-codec", "int8")
    for arguments, kind, message in (
        (("--prompts", "3"), ConfigError, "no effect without --retrieval-heads: --prompts"),
        (heads, ConfigError, "no effect with --retrieval-heads: --text, --tokens; leave"),
        (missing, ConfigError, "none.txt cannot be read"),
        (("--kv-codec", "int8; int9"), UnknownName, "int9"),
        (("--text", str(tmp_path / "short.txt"), *missing[2:]), ConfigError, "at least 64 tokens"),
    ):
        error = quire_calibrate(*arguments).exception
        assert isinstance(error, kind)
        assert message in str(error)
