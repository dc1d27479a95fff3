"""`quire plan --maximize-batch`: batches, bytes, predictions from stored rates, invalid input."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from quire.cli.plan import plan
from quire.cli.plan_maximize import parse_lengths
from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.ceilings import Ceilings, write_ceilings
from quire.plan.machine import this_machine
from quire.plan.rates import DecodeRates, PrefillRates, StepRates, model_key, steps_key

LLAMA_125M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2_048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
RATES = StepRates(
    whole=PrefillRates(token_s=1e-4),
    blocks=PrefillRates(token_s=2e-4),
    decode=DecodeRates(batch_s=((1, 0.01),), slot_s=5e-7),
)
ARMS = ("full", "decode", "decode_extreme", "prefill_and_decode")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_125M))
    return tmp_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: no stored measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "ceilings.json"


def quire_plan(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("plan")(plan)
    return CliRunner().invoke(app, list(arguments))


def arguments_of(folder: Path, *more: str) -> list[str]:
    lengths = ("--maximize-batch", "3584,512", "--kv-memory", "96MiB", "--cap", "896")
    return [str(folder), *lengths, "--memory", "4GiB", "--json", *more]


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output.splitlines()[-1])
    return found


def store(path: Path, rates: dict[str, StepRates]) -> None:
    key = model_key(ModelSpec.from_config(LLAMA_125M), dtype="bfloat16", device="cpu")
    ceilings = Ceilings(
        machine=this_machine(torch.get_num_threads()),
        read_bytes_per_s=2e10,
        copy_bytes_per_s=1e10,
        products=(),
        steps={steps_key(key, rule): rate for rule, rate in rates.items()},
    )
    write_ceilings(ceilings, path)


def test_batches_and_row_bytes_follow_from_page_sizes(folder: Path):
    """96 MiB are 8,192 tokens of 12,288 B; 48 lanes of one head, 12 of a layer.

    full       4,095 tokens: 256 pages of 16,384 B in 12 lanes
    decode     3,584 tokens: 224 pages of 4,224 B (64 B of positions, in whole vectors) and of 64 B
               of attention sums in 48 lanes
    extreme    224 layer pages of 16,512 B in 12 lanes: all heads retain the newest token
    both       896 tokens: 56 pages in 48 lanes, 8.7 times
    """
    claims = last_line(quire_plan(*arguments_of(folder)))["claims"]

    assert [claims[f"{arm}_batch"] for arm in ARMS] == [2, 2, 2, 8]
    assert [claims[f"{arm}_row_bytes"] for arm in ARMS] == [
        256 * 12 * 16_384,
        224 * 48 * (4_224 + 64),
        224 * 12 * 16_512,
        56 * 48 * (4_224 + 64),
    ]


def test_promoted_records_are_counted_for_rules_that_score_tokens(folder: Path):
    """8 records of a head in 48 lanes: key and value of 64 elements and a scale, a position."""
    codec = "int4+residual=64"
    plain, mixed = (
        last_line(quire_plan(*arguments_of(folder, "--kv-codec", codec + more)))["claims"]
        for more in ("", "+promoted=8:int8")
    )
    record_bytes = 2 * (64 + 2) + 4
    page_bytes = -(-8 * record_bytes // 64) * 64

    more_bytes = [mixed[f"{arm}_row_bytes"] - plain[f"{arm}_row_bytes"] for arm in ARMS]
    assert more_bytes == [0, 48 * page_bytes, 0, 48 * page_bytes]


@pytest.mark.parametrize(("rows", "batches"), [(1, [1, 1, 1, 4]), (4, [4, 4, 4, 17])])
def test_batch_of_full_kv_is_the_number_of_full_rows_in_the_pool(folder: Path, rows, batches):
    """At a pool of b x 4,096 tokens ED and FKV have a batch of b, as in the paper."""
    run = last_line(quire_plan(*arguments_of(folder, "--kv-memory", f"{rows * 48}MiB")))

    assert [run["claims"][f"{arm}_batch"] for arm in ARMS] == batches


def test_without_measurements_rates_are_reported_as_missing(folder: Path):
    result = quire_plan(*arguments_of(folder))
    run = last_line(result)

    assert not any(name.endswith("tokens_per_s") for name in run["claims"])
    assert "prefill_and_decode_pays" not in run["claims"]
    assert "run `quire profile MODEL --evict full`" in run["arms"]["missing"][0]
    assert "unknown" in result.output


def test_throughput_is_predicted_from_stored_rates(folder: Path, cache: Path):
    """Full KV, 2 rows: 7,168 tokens of 0.1 ms; 511 steps of 10 ms plus 0.5 us per row and slot.

    A row has 3,585 to 4,095 slots.
    """
    store(cache, {"full": RATES, "recent": RATES, "average": RATES})
    run = last_line(quire_plan(*arguments_of(folder)))
    decode_s = 511 * 0.01 + 2 * 5e-7 * sum(range(3_585, 4_096))

    claims = run["claims"]
    assert claims["full_tokens_per_s"] == pytest.approx(1_024 / (0.7168 + decode_s))
    assert claims["prefill_and_decode_tokens_per_s"] > claims["decode_extreme_tokens_per_s"]
    assert claims["prefill_and_decode_pays"] == 1
    assert run["arms"]["missing"] == []


def test_eviction_rules_are_not_wrapped_in_a_narrow_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    text = quire_plan(*arguments_of(folder, "--evict", "tova")).output

    assert "\nprefill and decode: --evict 'tova:cap=896,when=prefill_and_decode'\n" in text
    assert "\ndecode, to 2 tokens: a bound on eviction in decode, not a rule for use\n" in text


def test_unmeasured_rule_is_named(folder: Path, cache: Path):
    store(cache, {"full": RATES, "recent": RATES})
    run = last_line(quire_plan(*arguments_of(folder, "--evict", "tova:cap=9")))

    assert "full_tokens_per_s" in run["claims"]
    assert "decode_tokens_per_s" not in run["claims"]
    [missing] = run["arms"]["missing"]
    assert "run `quire profile MODEL --evict tova`" in missing


def test_rates_of_other_weights_are_missing_with_the_option_that_measures_them(
    folder: Path, cache: Path
):
    store(cache, {"full": RATES, "recent": RATES, "average": RATES})
    run = last_line(quire_plan(*arguments_of(folder, "--weight-codec", "int4")))

    full, *_ = run["arms"]["missing"]
    assert full.startswith("steps of this model in int4 with full were not measured")
    assert "run `quire profile MODEL --weight-codec int4 --evict full`" in full


def test_fixed_batch_that_fits_memory_needs_no_block_prefill(folder: Path):
    run = last_line(quire_plan(*arguments_of(folder, "--batch", "2")))

    assert run["claims"]["prefill_and_decode_pays"] == 0
    assert "memory suffices" in run["arms"]["verdict"]["reasons"][0]


def test_prompt_below_the_cap_is_reported(folder: Path):
    run = last_line(quire_plan(*arguments_of(folder, "--maximize-batch", "800,512")))

    assert run["claims"]["prefill_and_decode_pays"] == 0
    assert "within the cap" in run["arms"]["verdict"]["reasons"][0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--maximize-batch", "3584"), "3584,512"),
        (("--maximize-batch", "0,1"), "3584,512"),
        (("--maximize-batch", "8000,512"), "context of 8,192"),
        (("--cap", "many"), "expected a cap"),
        (("--cap", "64", "--every", "64"), "every < cap"),
        (("--evict", "h3o"), "h2o"),
        (("--evict", "full"), "retains all tokens"),
        (("--kv-memory", "1KiB"), "hold"),
    ],
)
def test_invalid_input_is_refused(folder: Path, more, message):
    result = quire_plan(*arguments_of(folder, *more))

    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    "alone",
    [
        ("--evict", "tova:cap=9"),
        ("--cap", "9"),
        ("--every", "9"),
        ("--threads", "1"),
    ],
)
def test_batch_options_without_maximize_batch_are_refused(folder: Path, alone):
    result = quire_plan(str(folder), *alone)

    assert result.exit_code == 2
    assert "--maximize-batch" in result.output


def test_maximize_batch_takes_two_lengths():
    assert parse_lengths("3584, 512") == (3_584, 512)
    with pytest.raises(ConfigError):
        parse_lengths("3,4,5")


def test_memory_plan_does_not_load_torch(folder: Path):
    code = (
        "import sys, typer; from typer.testing import CliRunner; from quire.cli.plan import plan;"
        f"app = typer.Typer(); app.command()(plan); r = CliRunner().invoke(app, [{str(folder)!r}]);"
        "assert r.exit_code == 0, r.output\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_key_ignores_cap_and_interval():
    assert steps_key("m", "recent:cap=2,every=1,when=decode") == "m; recent"
    assert steps_key("m", "h2o:recent=9,cap=25%") == "m; h2o:recent=9"


def test_stored_rates_are_read_back(cache: Path):
    from quire.plan.ceilings import read_ceilings

    rates = replace(RATES, decode=DecodeRates(batch_s=((1, 1.0), (8, 2.0)), evict_slot_s=2.0))
    store(cache, {"average": rates})
    found = read_ceilings(cache, this_machine(torch.get_num_threads()))

    assert isinstance(found, Ceilings)
    assert list(found.steps.values()) == [rates]
