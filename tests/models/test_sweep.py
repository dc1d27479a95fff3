"""A sample of the sweep over model types, and the agreement of its committed results.

The whole sweep is `python -m tests.models.sweep` (docs/reference/models.md).
"""

import json

import pytest
import torch

from models.cases import (
    EQUAL,
    FAILED,
    LONGEST,
    NEW_TOKENS,
    NOT_TESTED,
    PROMPT_TOKENS,
    REFUSED,
    TOLERANCE,
    Recorder,
    decode,
    difference,
    finish,
    random_tokens,
    run_type,
    scan,
)
from models.command import RESULTS, main, read
from models.tiny import SIZES, TYPES, build, config_of
from quire.cli.plan_report import PlanOptions, plan_report
from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.models.loader import load_model
from quire.plan.capacity import Workload
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import greedy
from support.kv_options import kv_config
from support.snippets import ROOT

SAMPLE = (
    *("llama", "mistral", "gpt_oss", "gpt2", "mixtral", "laguna", "bloom"),
    *("gemma3n_text", "gemma4_text", "gemma4_unified_text", "llama4_text", "mimo_v2_flash"),
    *("diffllama", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "bamba", "jamba", "mamba2"),
)
"""Every kind of cache, positions and heads: see the table of docs/reference/models.md."""

SAMPLED_CASES = ("tight", "chunks of 7")
WITH_CODES = ("llama", "bloom", "mimo_v2_flash")  # the plain backend is slow
LONG = ("deepseek_v3", "longcat_flash", "minicpm3")
MIN_EQUAL = 130

KNOWN = json.loads((ROOT / RESULTS).read_text())
BY_TYPE = {one["type"]: one for one in KNOWN["types"]}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_sampled_type_is_equal_to_transformers(model_type):
    found = run_type(model_type, [*SAMPLED_CASES, *(["int8"] if model_type in WITH_CODES else [])])
    assert found.result == BY_TYPE[model_type]["result"] == EQUAL, found.why


@pytest.mark.parametrize("chunk_tokens", [256, 24])
@pytest.mark.parametrize("model_type", LONG)
def test_logits_of_2000_tokens_in_chunks_equal_those_of_one_call(
    model_type, chunk_tokens, tmp_path
):
    """Chunks of 256 tokens expand latents; those of 24, and single tokens, attend to them."""
    model = build(model_type, max_positions=4096)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    tokens = random_tokens(2000, loaded.spec.vocab_size, seed=3)
    prompt, forced = tokens[:-20], tokens[-20:]
    engine = Engine(loaded, kv_config(memory="16MiB"), ScheduleConfig(chunk_tokens=chunk_tokens))
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler, {"r0": forced})
    engine.submit(GenerationRequest(prompt, greedy(20), request_id="r0"))
    finish(engine)

    assert difference(recorder.logits("r0"), scan(model, prompt, forced)) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "jamba", "zaya"])
def test_hybrids_in_bfloat16_differ_by_less_than_their_rounding(model_type, tmp_path):
    """Convolutions are stored in the type of the model, states of scans in float32."""
    model = build(model_type).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="bfloat16", device="cpu")
    expected = decode(model, list(range(3, 45)), 12)
    engine = Engine(loaded, kv_config(memory="4MiB"), ScheduleConfig(chunk_tokens=16))
    forced = {"r0": expected.tokens}
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler, forced)
    engine.submit(GenerationRequest(expected.prompt, greedy(12), request_id="r0"))
    finish(engine)
    rounding = difference(
        scan(build(model_type), expected.prompt, expected.tokens), expected.logits
    )

    assert difference(recorder.logits("r0"), expected.logits) <= rounding


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_has_the_committed_result(model_type):
    found = run_type(model_type)
    assert found.result == BY_TYPE[model_type]["result"], found.why


@pytest.mark.parametrize("model_type", [t for t in TYPES if BY_TYPE[t]["result"] == EQUAL])
def test_every_equal_type_is_planned(model_type, tmp_path):
    config_of(model_type).save_pretrained(tmp_path)
    options = PlanOptions(
        memory_bytes=64 << 30,
        kv_codec="int4+residual=32+sinks=4",
        sequence_tokens=LONGEST,
        workload=Workload(input_tokens=PROMPT_TOKENS, output_tokens=NEW_TOKENS, batch=4),
    )
    report = plan_report(tmp_path, options)

    assert report.capacity.sequences > 0
    assert report.kv_bytes_per_token or report.state_bytes


def test_results_have_all_types_with_the_sizes_of_tiny_configs():
    assert list(BY_TYPE) == list(TYPES)
    results = [one["result"] for one in KNOWN["types"]]
    assert {FAILED, NOT_TESTED}.isdisjoint(results)
    assert results.count(EQUAL) == KNOWN["totals"][EQUAL] >= MIN_EQUAL
    for one in KNOWN["types"]:
        assert one["control"] if one["result"] == EQUAL else len(one["why"]) > 40
    config = config_of("gpt_oss")
    assert config.num_key_value_heads == SIZES["num_key_value_heads"]
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2


def test_sweep_repeats_no_type_of_its_file_and_writes_json_last(tmp_path, capsys):
    out = tmp_path / "models.jsonl"

    assert [main(["bert", "--out", str(out)]) for _ in range(2)] == [0, 0]
    *_, total, last = capsys.readouterr().out.splitlines()
    assert total.startswith("1 types")
    assert json.loads(last)["totals"]["not text decoders"] == 1
    assert read(out)["bert"]["result"] == REFUSED
    assert len(out.read_text().splitlines()) == 2  # the begin and the end of one run
