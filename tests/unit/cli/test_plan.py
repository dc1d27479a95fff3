"""`quire plan`: the report, printed text, JSON, invalid input; `--weights-memory`."""

import itertools
import json
import math
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from models.tiny import config_of
from quire.api.llm import LLM
from quire.cli.main import app
from quire.cli.options import ModelConfig
from quire.cli.plan import PlanOptions, board_quality, plan, plan_report
from quire.cli.plan_report import DEVICES, RETAINED
from quire.cli.settings import Settings
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, ModelError, UnknownName, UnsoundCombination
from quire.layout.model import ModelSpec
from quire.layout.sizes import parse_size
from quire.models.loader import load_model
from quire.models.source import find_model
from quire.offload.weights.placement import place_beyond
from quire.plan.ceilings import Ceilings, write_ceilings
from quire.plan.machine import this_machine
from quire.plan.rates import DecodeRates, PrefillRates, StepRates, model_key, steps_key
from quire.scheduler.schedule_config import ScheduleConfig
from support.model_specs import PUBLIC_SHAPES

MIB, GIB = 2**20, 2**30
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
TINY: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 512} | LAYERS | SIZES
TINY |= {"torch_dtype": "float16"}


def quire_plan(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("plan")(plan)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_kv_memory_is_the_remainder_in_pages_of_sequences(folder):
    sizes = {"headroom_bytes": 1_000_000, "activation_peak_bytes": 500_000}
    report = plan_report(folder, PlanOptions(device="cuda", memory_bytes=10_000_000, **sizes))

    weights_bytes = report.model.num_parameters * 2
    assert report.dtype == "float16"
    assert report.capacity.sequence_tokens == 512
    assert report.memory.weights_bytes == weights_bytes
    assert report.memory.kv_bytes == 10_000_000 - 1_000_000 - 500_000 - weights_bytes

    cpu, cuda = (
        plan_report(folder, PlanOptions(device=name, memory_bytes=GIB)) for name in DEVICES
    )

    assert cuda.memory.process_bytes == 0 < 400 * 2**20 < cpu.memory.process_bytes < 600 * 2**20
    assert cpu.memory.kv_bytes == cuda.memory.kv_bytes - cpu.memory.process_bytes
    with pytest.raises(UnknownName, match="device"):
        plan_report(folder, PlanOptions(device="tpu"))
    with pytest.raises(UnknownName, match="weight-codec"):
        plan_report(folder, PlanOptions(weight_codec="int5"))
    with pytest.raises(ConfigError, match="--weights-memory all"):
        plan_report(folder, PlanOptions(weight_codec="int8", weights_memory_bytes=1 << 20))


def test_sparse_attention_stores_bounds_and_reads_few_pages(folder: Path):
    options = PlanOptions(memory_bytes=GIB)
    rules = ("off", "quest:budget=100%", "quest:pages=8,dense_layers=1")
    off, all_pages, few = (plan_report(folder, replace(options, sparse=rule)) for rule in rules)

    page_bytes, bounds_bytes = 2 * 2 * 16 * 16 * 2, 2 * 2 * 16 * 2  # 2 KV heads of 16, float16
    assert off.capacity.page_bytes == page_bytes
    assert all_pages.capacity.page_bytes == few.capacity.page_bytes == page_bytes + bounds_bytes
    assert few.capacity.sequences < off.capacity.sequences
    # 32 pages of 512 tokens; the first of 4 layers reads all of them
    read_bytes = 32 * page_bytes + 3 * (8 * page_bytes + 32 * bounds_bytes)
    assert few.sparse_share == read_bytes / (4 * 32 * page_bytes)
    assert few.step.kv_read_bytes == few.sparse_share * off.step.kv_read_bytes
    assert all_pages.step == off.step
    assert off.crossover_batch == all_pages.crossover_batch < few.crossover_batch
    plain = next(c for c in few.choices if c.weight_codec == c.kv_codec == "float16")
    assert plain.sequences["all tokens"] == few.capacity.sequences

    with pytest.raises(UnsoundCombination, match="--sparse"):
        plan_report(folder, replace(options, sparse=rules[2], kv_codec="int8_channel/int8"))
    shown = quire_plan(str(folder), "--memory", "1GiB", "--sparse", rules[2])
    assert "sparse attention" in shown.stdout
    assert "reads 48.4% of" in shown.stdout
    refused = quire_plan(str(folder), "--sparse", rules[2], "--maximize-batch", "64,8")
    assert "leave out --sparse" in refused.stderr


def test_choices_are_plans_with_other_codecs_and_retained_tokens(folder: Path):
    options = PlanOptions(memory_bytes=GIB)
    choices = plan_report(folder, options).choices

    pairs = list(itertools.product(("float16", "int8", "int4"), repeat=2))
    assert [(choice.weight_codec, choice.kv_codec) for choice in choices] == pairs
    for choice in choices:
        weight_codec = "auto" if choice.weight_codec == "float16" else choice.weight_codec
        codecs = {"weight_codec": weight_codec, "kv_codec": choice.kv_codec}
        planned = plan_report(folder, replace(options, **codecs))
        assert choice.kv_bytes == planned.capacity.pool_bytes
        assert choice.sequences["all tokens"] == planned.capacity.sequences
        assert choice.tokens == planned.capacity.pool_tokens
        full, half, quarter = choice.sequences.values()
        assert 1.8 * full < half < 2.1 * full
        assert 1.8 * half < quarter < 2.1 * half


def test_choices_that_do_not_fit_say_so(folder: Path):
    process_bytes = plan_report(folder, PlanOptions(memory_bytes=GIB)).memory.process_bytes
    memory_bytes = process_bytes + 300_000  # more than int4 weights, less than float16
    sizes = {"headroom_bytes": 0, "activation_peak_bytes": 1, "memory_bytes": memory_bytes}
    report = plan_report(folder, PlanOptions(**sizes, weight_codec="int4"))
    stored, *_, coded = report.choices

    assert coded.kv_bytes > 0 == stored.kv_bytes
    assert stored.sequences == dict.fromkeys(RETAINED, 0)
    both = (
        r"--weight-codec int8 or int4, on a CPU.*--weights-memory.*--weight-codec int8 leaves \d+"
    )
    refused = {
        both: sizes,
        r"\(--weight-codec int4, on a CPU\)": {"memory_bytes": 1000, "weight_codec": "int8"},
        r"= -[\d,]+ B; offload layers": {"memory_bytes": 1000, "weight_codec": "int4"},
        r"; it fits with --weight-codec int4$": sizes | {"kv_memory_bytes": 100_000},
    }
    for reason, given in refused.items():
        with pytest.raises(ConfigError, match=reason):
            plan_report(folder, PlanOptions(**given))
    with pytest.raises(ConfigError, match="of KV need --memory") as least:
        plan_report(folder, PlanOptions(memory_bytes=1000))
    found = re.findall(r"--memory (\w+)(?: with --weight-codec (\w+))?", str(least.value))
    for size, *flags in found:
        coded_as = PlanOptions(memory_bytes=parse_size(size), weight_codec=flags[0] or "auto")
        assert 1 <= plan_report(folder, coded_as).capacity.sequences <= 2  # sizes are whole MiB
    with pytest.raises(ConfigError, match=r"--headroom.*of KV need --memory \w+$"):
        plan_report(folder, PlanOptions(memory_bytes=MIB, device="cuda", kv_memory_bytes=GIB))
    arguments = ("--headroom", "0B", "--activation-peak", "1B", "--memory", f"{memory_bytes}B")
    shown = quire_plan(str(folder), *arguments, "--weight-codec", "int4").stdout
    assert "does not fit" in shown


def test_choices_leave_out_codecs_that_the_model_or_device_cannot_use(folder: Path):
    config = TINY | {"head_dim": 27}
    (folder / "config.json").write_text(json.dumps(config))
    options = PlanOptions(memory_bytes=GIB, device="cuda")

    choices = plan_report(folder, options).choices
    assert [(c.weight_codec, c.kv_codec) for c in choices] == [
        ("float16", "float16"), ("float16", "int8"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--device cpu"):
        plan_report(folder, replace(options, weight_codec="int8"))
    refused = quire_plan(str(folder), "--device", "cuda:0")
    assert (refused.exit_code, "needs --memory" in refused.stderr) == (2, True)


def test_board_adds_the_quality_of_its_model(folder: Path, tmp_path: Path):
    def row(codec: str, budget: str, mean: float, source: str = "quire") -> dict[str, Any]:
        entry = {"rule": "x", "budget": budget, "schedule": "", "codec": codec, "source": source}
        quality = {"mean": mean, "low": 0.0, "high": 1.0, "count": 1, "most": 1.0}
        sizes = {"kv_peak_bytes": 1.0, "kv_share": 1.0, "tokens_per_s": 1.0}
        return {"entry": entry, "quality": quality, "scores": {}} | sizes

    rows = [row("none", "", 1.0), row("int8", "50%", 0.5), row("int8", "50%", 0.75)]
    rows.append(row("int8", "25%", 1.0, "kvpress"))
    board = tmp_path / "board.json"
    board.write_text(json.dumps({"config": {"model": str(folder)}, "arms": {"rows": rows}}))
    report = plan_report(folder, PlanOptions(memory_bytes=GIB))

    assert board_quality(board, str(folder), report) == {
        "float16": {"all tokens": 1.0}, "int8": {"50%": 0.75},
    }  # fmt: skip
    assert "0.75" in quire_plan(str(folder), "--memory", "1GiB", "--board", str(board)).stdout
    for other, reason in (("config.json", "is another file"), ("no.json", "No such file")):
        refused = quire_plan(str(folder), "--memory", "1GiB", "--board", str(folder / other))
        assert refused.exit_code == 2
        assert "--board: expected the board.json of quire board" in refused.stderr
        assert reason in refused.stderr
    refused = quire_plan(str(folder), "--board", str(board), "--maximize-batch", "100,10")
    assert (refused.exit_code, "leave out" in refused.stderr) == (2, True)
    with pytest.raises(ConfigError, match="not another"):
        board_quality(board, "another", report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "memory", "requests"),
    [
        ("quire-tiny", "float32", "20MiB", 8),
        ("smollm2", "bfloat16", "64MiB", 4),
        ("smollm2", "float32", "128MiB", 4),
    ],
)
def test_planned_memory_is_within_a_tenth_of_the_resident_memory(model, dtype, memory, requests):
    run = f"""
from quire import LLM, KVConfig, SamplingParams
llm = LLM({model!r}, dtype={dtype!r}, kv=KVConfig(memory={memory!r}))
prompts = [[row + 100 + token for token in range(600)] for row in range({requests})]
llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0))
status = open("/proc/self/status").read()
print(int(status.partition("VmHWM:")[2].split()[0]) * 1024, llm.stats().kv_peak_bytes)
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    resident_bytes, kv_bytes = map(int, done.stdout.split())
    plan = quire_plan(model, "--dtype", dtype, "--memory", "8GiB", "--kv-memory", memory, "--json")
    claims = json.loads(plan.stdout.splitlines()[-1])["claims"]
    names = ("process_bytes", "weights_bytes", "activation_peak_bytes")
    planned_bytes = kv_bytes + sum(claims[name] for name in names)

    assert planned_bytes == pytest.approx(resident_bytes, rel=0.1)


def test_pages_and_sequences_follow_from_the_kv_memory(folder: Path):
    """A page: K and V, 2 heads * 16 * 16 tokens * 2 B = 2 KiB; 64 tokens: 4 pages in 4 layers."""
    report = plan_report(folder, PlanOptions(kv_memory_bytes=1 << 20, sequence_tokens=64, batch=40))

    assert report.kv_bytes_per_token == 2 * 4 * 2 * 16 * 2
    assert report.capacity.page_bytes == 2048
    assert report.capacity.sequences == 32
    assert report.capacity.limit == "memory"
    tokens = ScheduleConfig().max_num_batched_tokens
    assert PlanOptions().max_num_batched_tokens == tokens


def test_kv_memory_is_that_of_a_server_in_whole_slabs():
    sizes = {"memory_bytes": GIB, "kv_memory_bytes": 5 * MIB}
    options = PlanOptions(**sizes, dtype="float32", kv_codec="int8")
    folder, _ = find_model("quire-tiny")
    report = plan_report(folder, options)
    kv = KVConfig(memory="5MiB", codec="int8")
    llm = LLM("quire-tiny", dtype="float32", kv=kv, verify=False)
    held = llm.stats().kv_total_bytes

    assert held == report.capacity.pool_bytes == report.claims()["kv_memory_bytes"] < 5 * MIB
    line = "--memory 1GiB --kv-memory 5MiB --dtype float32 --kv-codec int8"
    text = quire_plan(*line.split()).stdout
    assert f"{held:,}" in text
    assert f"{5 * MIB:,}" not in text


def test_plan_names_the_kv_memory_of_a_batch_that_does_not_fit(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def shown(*options: str) -> str:
        return " ".join(quire_plan(str(folder), "--batch", "100", *options).stdout.split())

    text = shown("--kv-memory", "1MiB", "--memory", "1GiB")
    found = re.search(r"does not fit: raise --kv-memory to ([\w.]+), or lower --batch", text)
    assert found is not None
    assert "batch of 100 │ fits" in shown("--kv-memory", found[1], "--memory", "1GiB")
    less = f"{parse_size(found[1]) - MIB // 4}B"
    assert "batch of 100 │ does not fit" in shown("--kv-memory", less, "--memory", "1GiB")
    sizes = ("--headroom", "0B", "--activation-peak", "1B", "--device", "cuda", "--memory", "1MiB")
    assert "does not fit: raise --memory" in shown(*sizes)
    process = "520MiB"  # leaves less than the batch needs
    both = re.search(
        r"raise --kv-memory to (\w+) and --memory to (\w+), or lower --batch or",
        shown("--kv-memory", "1MiB", "--memory", process, "--headroom", "0B"),
    )
    assert both is not None
    enough = ("--kv-memory", both[1], "--memory", both[2], "--headroom", "0B")
    assert "batch of 100 │ fits" in shown(*enough)
    one = quire_plan(str(folder), "--kv-memory", "40KiB", "--memory", "1GiB", "--batch", "1").stdout
    assert "or lower --sequence-tokens" in " ".join(one.replace("│", "").split())
    assert "needs --maximize-batch" in quire_plan(str(folder), "--policy-file", __file__).output


def test_plan_names_its_memory_and_smaller_codecs_hold_more_sequences(folder):
    result = quire_plan("--memory", "1GiB", "--workload", "512,64,8")
    assert result.exit_code == 0, result.output
    for text in ("quire-tiny", "weights", "activations", "headroom", "bytes per token", "4,096"):
        assert text in result.output
    assert "benefit of KV management" in result.output
    text = " ".join(quire_plan(str(folder)).stdout.split())
    assert re.search(r"memory: all of this machine, of which [\d.]+ \w+ are free now", text)
    assert "of this machine" not in quire_plan(str(folder), "--memory", "1GiB").stdout

    options = PlanOptions(kv_memory_bytes=1 << 20, sequence_tokens=64)
    codecs = ("float32", "float16", "int8", "int8/int4", "int4")
    plans = [plan_report(folder, replace(options, kv_codec=codec)) for codec in codecs]

    held = [report.capacity.sequences for report in plans]
    assert all(fewer < more for fewer, more in itertools.pairwise(held))
    assert plan_report(folder, options).capacity.sequences == held[1]


@pytest.mark.parametrize(
    ("codec", "page_tokens", "expected"),
    [
        # 16 elements in int4: 8 bytes, and 4 of scale and zero; K and V, 4 layers, 2 heads
        ("int4", 16, 2 * 4 * 2 * (8 + 4)),
        # two layers of four in int8, 16 elements and a scale; two in float16
        ("int8+plain_layers=1+sinks=4", 16, 2 * 2 * (2 * (16 + 2) + 2 * 16 * 2)),
        # channels of a page of 3 tokens: a third of a scale and a zero for each element
        ("int4_page", 3, 2 * 4 * 2 * (8 + 16 * 4 / 3)),
    ],
)
def test_kv_bytes_per_token(folder: Path, codec: str, page_tokens: int, expected: float):
    options = PlanOptions(kv_memory_bytes=1 << 20, kv_codec=codec, page_tokens=page_tokens)
    report = plan_report(folder, options)
    assert report.kv_bytes_per_token == math.ceil(expected)
    assert report.step.kv_read_bytes == pytest.approx(report.batch * 512 * expected, rel=1e-5)


def test_promoted_token_records_are_counted_for_every_sequence(folder: Path):
    """In four layers 16 records of a key and a value of 2 heads: 16 elements, a scale each."""
    plain, mixed = (
        plan_report(folder, PlanOptions(kv_memory_bytes=1 << 20, kv_codec=f"int4+residual=8{more}"))
        for more in ("", "+promoted=16:int8")
    )
    slot_bytes, page_bytes = 2 * 2 * (8 + 4), 16 * 2 * 2 * 12
    assert mixed.capacity.page_bytes == page_bytes + 16 * 4  # evictable tokens have positions
    assert plain.capacity.page_bytes == page_bytes
    window_bytes, records_bytes = 8 * 2 * 2 * 32, 16 * (2 * 2 * (16 + 2) + 4)

    def needed(page: int, extra: int) -> int:
        return 4 * (32 * page + extra)

    assert plain.capacity.sequences == (1 << 20) // needed(page_bytes, window_bytes)
    by_bytes = (1 << 20) // needed(page_bytes + 64, window_bytes + records_bytes)
    assert by_bytes - 1 <= mixed.capacity.sequences <= by_bytes  # classes of pages lose slabs
    assert mixed.capacity.sequences < plain.capacity.sequences
    assert mixed.kv_bytes_per_token == plain.kv_bytes_per_token == 4 * slot_bytes


@pytest.mark.parametrize(
    ("name", "codec", "shown", "per_token", "saved"),
    [
        (
            "gemma-4-e2b",
            "bfloat16",
            [
                "1 KV head of 256 or 1 KV head of 512",
                "window 512 11 1 KV head of 256 11,264 at most 527 tokens, 5.67 MiB",
                "window 512 2 1 1 KV head of 256 1,024 at most 527 tokens",
                *("16 read the KV of these 0", "full 2 1 KV head of 512 4,096 all tokens"),
                *("full 2 1 1 KV head of 512 2,048 all tokens", "4 read the KV of these 0"),
                "save 24,576 of 43,008 B per token (57%)",
                "page size 16,384 or 32,768 B: 16 tokens",
            ],
            12 * 256 * 2 * 2 + 3 * 512 * 2 * 2,
            16 * 256 * 2 * 2 + 4 * 512 * 2 * 2,
        ),
        (
            *("gemma-4-e2b", "int8", ["save 12,368 of 21,644 B per token"]),
            12 * 2 * (256 + 2) + 3 * 2 * (512 + 2),
            16 * 2 * (256 + 2) + 4 * 2 * (512 + 2),
        ),
        (
            "gemma-4-31b",
            "bfloat16",
            [
                "16 KV heads of 256 or 4 values of 512 + 128 rotated elements",
                "window 1024 50 16 KV heads of 256 819,200 at most 1,039 tokens, 812.50 MiB",
                "full 10 4 values of 512 + 128 rotated elements 51,200 all tokens",
            ],
            50 * 16 * 2 * 256 * 2 + 10 * 4 * (512 + 128) * 2,
            0,
        ),
        (
            "llama-4-scout",
            "int8",
            [
                "8 KV heads of 128",
                "chunk 8192 36 8 KV heads of 128 74,880 at most 8,192 tokens, 585.00 MiB",
                "full 12 8 KV heads of 128 24,960 all tokens",
            ],
            48 * 8 * 2 * (128 + 2),
            0,
        ),
        (
            "deepseek-v3",
            "bfloat16",
            [
                "671,026,404,352 parameters, 61 layers, latent of 512 + 64 rotated elements, 1 for",
                "bytes per token and layer 1,152: 576 elements instead of 40,960 of 128 heads",
            ],
            61 * (512 + 64) * 2,
            0,
        ),
        (
            "deepseek-v3.2",
            "bfloat16",
            [
                "latent of 512 + 64 rotated elements and index key of 128, 1 for all heads",
                "bytes per token and layer 1,408: 704 elements instead of 40,960 of 128 heads",
            ],
            61 * (512 + 64 + 128) * 2,
            0,
        ),
        (
            "mimo-v2-flash",
            "bfloat16",
            [
                "4 KV heads of 192 (keys) and 128 (values) or 8 KV heads",
                "window 129 39 8 KV heads of 192 (keys) and 128 (values) 199,680 at most 144",
                "full 9 4 KV heads of 192 (keys) and 128 (values) 23,040 all tokens",
            ],
            39 * 8 * (192 + 128) * 2 + 9 * 4 * (192 + 128) * 2,
            0,
        ),
    ],
)
def test_each_kind_of_layer_is_shown_with_its_bytes(
    folder, monkeypatch, name, codec, shown, per_token, saved
):
    monkeypatch.setenv("COLUMNS", "200")
    (folder / "config.json").write_text(json.dumps(PUBLIC_SHAPES[name]))
    result = quire_plan(str(folder), "--memory", "2TiB", "--kv-codec", codec)
    text = " ".join(result.stdout.replace("│", " ").replace("┃", " ").split())
    report = plan_report(folder, PlanOptions(memory_bytes=2 << 40, kv_codec=codec))

    for part in shown:
        assert part in text, text
    assert report.kv_bytes_per_token == per_token
    assert report.saved_bytes_per_token == saved
    for kind in report.kinds.values():  # nothing is padded
        assert kind.page_bytes * kind.layers == 16 * kind.bytes_per_token


def test_latents_of_deepseek_v3_in_80_gib(folder: Path):
    """2,048 pages of 16 tokens in each of 61 layers; int8: 512 codes, a scale of 2, 64 x 2 B.

    80 GiB = 85,899,345,920 B hold 37 sequences of 2,302,672,896 B.
    """
    (folder / "config.json").write_text(json.dumps(PUBLIC_SHAPES["deepseek-v3"]))
    options = PlanOptions(memory_bytes=2 << 40, kv_memory_bytes=80 << 30, sequence_tokens=32_768)
    plain = plan_report(folder, options)
    int8, both = (
        plan_report(folder, replace(options, kv_codec=codec)) for codec in ("int8", "int8/int8")
    )

    assert plain.capacity.sequences == (80 << 30) // (61 * 2048 * 16 * 1152) == 37
    assert plain.kv_bytes_per_token == 61 * 1152
    assert int8.kv_codec == "bfloat16/int8"
    assert int8.kv_bytes_per_token == 61 * (512 + 2 + 64 * 2)
    assert int8.capacity.page_bytes == 16 * 642 + 32  # whole cache lines
    assert int8.capacity.sequences == (80 << 30) // (61 * 2048 * 10_304) == 66
    assert both.kv_bytes_per_token == 61 * (512 + 2 + 64 + 2)

    index = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    config = PUBLIC_SHAPES["deepseek-v3"] | index | {"model_type": "deepseek_v32"}
    (folder / "config.json").write_text(json.dumps(config))
    report = plan_report(folder, options)
    (kind,) = report.kinds.values()
    assert report.kv_bytes_per_token == 61 * (512 + 64 + 128) * 2
    assert (kind.latent, kind.index_dim) == (True, 128)
    assert "index key of 128" in quire_plan(str(folder), "--memory", "2TiB").stdout


@pytest.mark.parametrize(
    ("model_type", "codec", "shown"),
    [
        # 2 layers of 160 x 4 and 4 x 32 x 8 elements of 4 B
        ("mamba2", "none", ["no attention", "13,312 B (13.00 KiB) per sequence", " any "]),
        # it reads 4 * (72,216 - 128 * 64) B of weights = 38.5 * 6,656 B
        ("mamba2", "none+states=bfloat16", ["6,656 B (6.50 KiB)", "from batch 39; at batch 8"]),
        ("jamba", "none", ["2 KV heads of 16", "per sequence", "4 layers"]),
        (
            "dots3_note_text",
            "none",
            ["56 elements instead of 160", "1,088 elements instead of 24,5"],
        ),
    ],
)
def test_states_and_latents_of_several_widths_are_shown(folder, model_type, codec, shown):
    config_of(model_type).save_pretrained(folder)

    options = ("--memory", "64GiB", "--workload", "100,20,4", "--kv-codec", codec)
    result = quire_plan(str(folder), *options)

    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.replace("│", " ").split())
    for part in shown:
        assert part in text, text


def test_memory_bar_is_proportional_and_a_config_file_has_defaults(folder, tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text(
        f'model = "{folder}"\nkv-codec = "int8"\nkv-memory = "1MiB"\nblock-size = 32\n'
        'evict = "h2o:cap=64"\nmax-num-seqs = 4\nthreads = 1\n'
    )

    result = quire_plan("--config", str(file), "--kv-memory", "2MiB", "--json")

    assert result.exit_code == 0, result.output
    config = json.loads(result.stdout.splitlines()[-1])["config"]
    assert (config["kv_codec"], config["page_tokens"]) == ("int8", 32)
    assert config["kv_memory_bytes"] == 2 << 20
    refused = quire_plan("--config", str(file), "--evict", "recent:cap=64")
    assert (refused.exit_code, "--maximize-batch" in refused.output) == (2, True)

    # 64 cells for 2 MiB: KV 512 KiB, 1 B of activations; half (up to rounding) headroom
    sizes = "--memory 2MiB --headroom 1MiB --kv-memory 512KiB --activation-peak 1B --device cuda"
    result = quire_plan(str(folder), *sizes.split())
    bar = next(line for line in result.output.splitlines() if line.startswith("["))
    assert len(bar) == 66
    assert (bar.count("K"), bar.count("A")) == (16, 1)
    assert bar.count("W") == round(64 * plan_report(folder).memory.weights_bytes / 2**21)
    assert abs(bar.count("H") - 32) <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "0"), "memory=0 B"),
        (("--workload", "9" * 5_000 + ",1,1"), "expected input tokens"),
        (("--maximize-batch", "9" * 5_000 + ",1"), "expected input tokens"),
        (("--memory", "10kB"), "no memory is left for KV"),
        (("--memory", "1GiB", "--kv-memory", "2GiB"), "does not fit"),
        (("--kv-memory", "100B"), "does not hold one sequence"),
        (("--dtype", "floot16"), "unknown dtype 'floot16': did you mean"),
        (("--kv-codec", "int9"), "unknown codec 'int9'"),
        (("--kv-codec", "int8+states="), "expected states to be float32, bfloat16, int8, got ''"),
        (("--block-size", "0"), "tokens >= 1"),
        (("--sequence-tokens", "0"), "sequence_tokens=0"),
        (("--batch", "-1"), "--batch: expected 1 or more, got -1"),
        (("--max-num-batched-tokens=-1",), "max_num_batched_tokens=-1"),
        (("--max-num-batched-tokens", "0"), "max_num_batched_tokens=0: expected 1 or more"),
        *((("--workload", text), "expected input tokens, output") for text in ("1,2", "1,2,x")),
        *(
            (("--workload", "0,2,3"), "workload 0,2,3"),
            (("--workload=-1,2,3",), "expected input t"),
        ),
    ],
)
def test_invalid_options_print_one_line_with_the_expected_value(folder, arguments, message):
    result = quire_plan(str(folder), *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_hub_model_is_planned_from_its_config_only(folder: Path, monkeypatch: pytest.MonkeyPatch):
    fetched: dict[str, list[str]] = {}

    def download(name: str, *, allow_patterns: list[str], revision: None) -> str:
        fetched[name] = allow_patterns
        return str(folder)

    monkeypatch.setattr("quire.models.source.snapshot_download", download)

    result = quire_plan("org/model", "--memory", "1GiB")

    assert result.exit_code == 0, result.output
    assert "org/model: " in result.output
    assert fetched == {"org/model": ["config.json"]}


def test_missing_and_unusable_values_of_a_config_are_named(folder: Path):
    (folder / "config.json").write_text(json.dumps(TINY | {"torch_dtype": None}))
    assert plan_report(folder).dtype == "float32"
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert "num_hidden_layers" in quire_plan(str(folder)).stderr
    (folder / "config.json").write_text(json.dumps(TINY | {"torch_dtype": 16}))
    with pytest.raises(ModelError, match="'torch_dtype' is 16"):
        plan_report(folder)
    own = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(own))
    refused = quire_plan(str(folder), "--memory", "1GiB").stderr
    assert "deepseek_v4 is not supported: its layers compress the keys and values" in refused
    for name, message in (("nowhere", "no such folder"), ("results", "has no config.json")):
        (folder / "results").mkdir(exist_ok=True)
        assert message in quire_plan(str(folder / name)).stderr


@pytest.mark.parametrize(("codec", "times_smaller"), [("int8", 1.9), ("int4", 3.3)])
def test_weights_of_a_codec_are_those_of_the_loaded_model(codec: str, times_smaller: float) -> None:
    folder, _ = find_model("quire-tiny")
    plain = plan_report(folder, PlanOptions(memory_bytes=1 << 30))
    coded = plan_report(folder, PlanOptions(memory_bytes=1 << 30, weight_codec=codec))
    loaded = load_model("quire-tiny", device="cpu", weight_codec=codec, verify=False)
    assert coded.memory.weights_bytes == pytest.approx(loaded.weight_bytes, rel=0.03)
    assert plain.memory.weights_bytes / coded.memory.weights_bytes > times_smaller
    assert coded.memory.kv_bytes > plain.memory.kv_bytes
    assert coded.crossover_batch < plain.crossover_batch


def test_sequence_beyond_the_context_gives_the_reason_and_no_figures_of_a_batch(folder: Path):
    possible = quire_plan(str(folder), "--sequence-tokens", "512", "--batch", "3")
    too_long = quire_plan(str(folder), "--sequence-tokens", "513", "--batch", "3")

    [row] = [line for line in too_long.stdout.splitlines() if "sequences of 513 tokens" in line]
    assert "impossible: the model's context is 512 tokens" in row
    for text in ("batch of 3", "KV reads exceed weight reads"):
        assert text in possible.stdout
        assert text.partition(" of")[0].partition(" exc")[0] not in too_long.stdout


BLOCKS = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
BLOCKS |= {"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2_048}
LLAMA_125M = TINY | BLOCKS | {"max_position_embeddings": 8_192, "torch_dtype": "bfloat16"}
RATES = StepRates(
    whole=PrefillRates(token_s=1e-4),
    blocks=PrefillRates(token_s=2e-4),
    decode=DecodeRates(batch_s=((1, 0.01),), slot_s=5e-7),
)
ARMS = ("full", "decode", "decode_extreme", "prefill_and_decode")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of LLAMA_125M, and an empty cache: no stored measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_125M))
    return tmp_path


@pytest.fixture
def cache(large: Path) -> Path:
    return large / "cache" / "quire" / "ceilings.json"


def arguments_of(folder: Path, *more: str) -> list[str]:
    lengths = ("--maximize-batch", "3584,512", "--kv-memory", "96MiB", "--cap", "896")
    return [str(folder), *lengths, "--memory", "4GiB", "--json", *more]


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output.splitlines()[-1])
    return found


def store(path: Path, rates: dict[str, StepRates]) -> None:
    key = model_key(ModelSpec.from_config(LLAMA_125M), dtype="bfloat16", device="cpu")
    assert steps_key("m", "recent:cap=2,every=1,when=decode") == "m; recent"
    assert steps_key("m", "h2o:recent=9,cap=25%") == "m; h2o:recent=9"
    measured = {"read_bytes_per_s": 2e10, "copy_bytes_per_s": 1e10, "products": ()}
    steps = {steps_key(key, rule): rate for rule, rate in rates.items()}
    machine = this_machine(torch.get_num_threads())
    write_ceilings(Ceilings(machine=machine, steps=steps, **measured), path)


def test_batches_and_row_bytes_follow_from_page_sizes(large: Path):
    """96 MiB are 8,192 tokens of 12,288 B; 48 lanes of one head, 12 of a layer.

    full       4,095 tokens: 256 pages of 16,384 B in 12 lanes
    decode     3,584 tokens: 224 pages of 4,224 B (64 B of positions, in whole vectors) and of 64 B
               of attention sums in 48 lanes
    extreme    224 layer pages of 16,512 B in 12 lanes: all heads retain the newest token
    both       896 tokens: 56 pages in 48 lanes, 8.7 times
    """
    claims = last_line(quire_plan(*arguments_of(large)))["claims"]

    assert [claims[f"{arm}_batch"] for arm in ARMS] == [2, 2, 2, 8]
    rows = [claims[f"{arm}_row_bytes"] for arm in ARMS]
    assert rows[0::2] == [256 * 12 * 16_384, 224 * 12 * 16_512]
    assert rows[1::2] == [224 * 48 * (4_224 + 64), 56 * 48 * (4_224 + 64)]


def test_promoted_records_are_counted_for_rules_that_score_tokens(large: Path):
    """8 records of a head in 48 lanes: key and value of 64 elements and a scale, a position."""
    codec = "int4+residual=64"
    plain, mixed = (
        last_line(quire_plan(*arguments_of(large, "--kv-codec", codec + more)))["claims"]
        for more in ("", "+promoted=8:int8")
    )
    record_bytes = 2 * (64 + 2) + 4
    page_bytes = -(-8 * record_bytes // 64) * 64

    more_bytes = [mixed[f"{arm}_row_bytes"] - plain[f"{arm}_row_bytes"] for arm in ARMS]
    assert more_bytes == [0, 48 * page_bytes, 0, 48 * page_bytes]


@pytest.mark.parametrize(("rows", "batches"), [(1, [1, 1, 1, 4]), (4, [4, 4, 4, 17])])
def test_batch_of_full_kv_is_the_number_of_full_rows_in_the_pool(large: Path, rows, batches):
    """At a pool of b x 4,096 tokens ED and FKV have a batch of b, as in the paper."""
    run = last_line(quire_plan(*arguments_of(large, "--kv-memory", f"{rows * 48}MiB")))
    assert [run["claims"][f"{arm}_batch"] for arm in ARMS] == batches


def test_without_measurements_rates_are_missing_and_rules_are_not_wrapped(large, monkeypatch):
    result = quire_plan(*arguments_of(large))
    run = last_line(result)

    assert not any(name.endswith("tokens_per_s") for name in run["claims"])
    assert "prefill_and_decode_pays" not in run["claims"]
    assert "run `quire profile MODEL --evict full`" in run["arms"]["missing"][0]
    assert "unknown" in result.output
    monkeypatch.setenv("COLUMNS", "80")
    text = quire_plan(*arguments_of(large, "--evict", "tova")).output
    assert "\nprefill and decode: --evict 'tova:cap=896,when=prefill_and_decode'\n" in text
    assert "\ndecode, to 2 tokens: a bound on eviction in decode, not a rule for use\n" in text


def test_throughput_is_predicted_from_stored_rates(large: Path, cache: Path):
    """Full KV, 2 rows: 7,168 tokens of 0.1 ms; 511 steps of 10 ms plus 0.5 us per row and slot.

    A row has 3,585 to 4,095 slots.
    """
    store(cache, {"full": RATES, "recent": RATES, "average": RATES})
    run = last_line(quire_plan(*arguments_of(large)))
    decode_s = 511 * 0.01 + 2 * 5e-7 * sum(range(3_585, 4_096))

    for alone in ("--evict tova:cap=9", "--cap 9", "--every 9", "--threads 1"):
        assert "--maximize-batch" in quire_plan(str(large), *alone.split()).stderr
    claims = run["claims"]
    assert claims["full_tokens_per_s"] == pytest.approx(1_024 / (0.7168 + decode_s))
    assert claims["prefill_and_decode_tokens_per_s"] > claims["decode_extreme_tokens_per_s"]
    assert claims["prefill_and_decode_pays"] == 1
    assert run["arms"]["missing"] == []


def test_missing_rates_are_named_with_the_option_that_measures_them(large: Path, cache: Path):
    store(cache, {"full": RATES, "recent": RATES, "average": RATES})
    tova = last_line(quire_plan(*arguments_of(large, "--evict", "tova:cap=9")))
    assert "full_tokens_per_s" in tova["claims"]
    assert "decode_tokens_per_s" not in tova["claims"]
    [missing] = tova["arms"]["missing"]
    assert "run `quire profile MODEL --evict tova`" in missing
    run = last_line(quire_plan(*arguments_of(large, "--weight-codec", "int4")))

    full, *_ = run["arms"]["missing"]
    assert full.startswith("steps of this model in int4 with full were not measured")
    assert "run `quire profile MODEL --weight-codec int4 --evict full`" in full


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("--batch", "2", "memory suffices"), ("--maximize-batch", "800,512", "within the cap")],
)
def test_a_batch_that_needs_no_eviction_is_reported(large: Path, option, value, reason):
    run = last_line(quire_plan(*arguments_of(large, option, value)))
    assert run["claims"]["prefill_and_decode_pays"] == 0
    assert reason in run["arms"]["verdict"]["reasons"][0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--maximize-batch", "3584"), "3584,512"),
        (("--maximize-batch", "0,1"), "3584,512"),
        (("--maximize-batch", "3,4,5"), "3584,512"),
        (("--maximize-batch", "8000,512"), "context of 8,192"),
        (("--cap", "many"), "expected a cap"),
        (("--cap", "64", "--every", "64"), "every < cap"),
        (("--evict", "h3o"), "h2o"),
        (("--evict", "full"), "retains all tokens"),
        (("--kv-memory", "1KiB"), "hold"),
    ],
)
def test_invalid_batch_is_refused(large: Path, more, message):
    result = quire_plan(*arguments_of(large, *more))
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow
def test_memory_plan_does_not_load_torch(large: Path):
    code = f"""
import sys
from quire.cli.main import app
app(["plan", {str(large)!r}], standalone_mode=False)
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- offloaded weights ---------------------------------------------------------------------------


GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
TINY_NAME = "quire-tiny"


def open_llm(weights_memory: str) -> LLM:
    model = {"dtype": "float32", "device": "cpu", "verify": False}
    loading = ModelConfig(weights_memory=weights_memory, **model)
    return Settings(loading=loading, kv=KVConfig(memory="4MiB")).open_llm()


def test_offloaded_weights_give_the_same_output_and_stay_within_the_budget(capsys):
    resident, offloaded = open_llm("all"), open_llm("12MiB")
    expected = resident.generate("The quick brown", GREEDY)[0]
    output = offloaded.generate("The quick brown", GREEDY)[0]

    stats = offloaded.stats()
    assert output.token_ids == expected.token_ids
    assert stats.weight_bytes <= 12 << 20
    assert stats.weight_bytes + stats.host_weight_bytes > resident.stats().weight_bytes
    assert stats.offloaded_weight_bytes >= offloaded.engine.num_steps * stats.host_weight_bytes > 0
    assert resident.stats().host_weight_bytes == resident.stats().offloaded_weight_bytes == 0
    assert capsys.readouterr().err == ""

    open_llm("1GiB")
    assert "weights: all" in capsys.readouterr().err  # no layer is offloaded


def test_log_probabilities_with_offloaded_weights_differ_by_less_than_the_documented_limit():
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in (3, 60, 150, 300)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)

    found = []
    for weights_memory in ("all", "9MiB"):
        outputs = open_llm(weights_memory).generate(prompts, sampling)
        scored = [token for output in outputs for token in output.prompt_logprobs if token]
        found.append([token.logprob for token in scored])

    assert len(found[0]) == sum(map(len, prompts)) - len(prompts)
    assert max(abs(ours - theirs) for ours, theirs in zip(*found, strict=True)) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_process_with_offloaded_weights_ends_without_reports_of_triton(command: str):
    """Triton's extension module reports the objects that Python does not free at its exit."""
    pytest.importorskip("triton")
    options = ["--weights-memory", "9MiB", "--device", "cpu", "--dtype", "float32"]
    options += ["a", "--max-tokens", "2"] if command == "generate" else ["--port", "0"]
    line = [sys.executable, "-m", "quire", command, TINY_NAME, "--kv-memory", "2MiB", *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)
    if command == "serve":
        assert process.stdout is not None
        while not process.stdout.readline().startswith("Serving"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
    _, shown = process.communicate()

    assert process.returncode in (0, 130)  # 130: before the server has its own handler
    assert "leaked" not in shown
    assert "nanobind" not in shown


def test_unusable_weights_memory_is_refused(tmp_path: Path):
    config = tmp_path / "options.toml"
    config.write_text('[model]\nname = "quire-tiny"\nweights-memory = "1MiB"\n')
    result = CliRunner().invoke(app, ["generate", "--config", str(config), "-p", "x"])
    assert "is too small: the model" in str(result.exception) + result.output
    for text in ("much", "-1", ""):
        with pytest.raises(ConfigError, match=r"expected bytes, a size such as 4GiB, or all"):
            load_model(TINY_NAME, placer=place_beyond(text))
    model = open_llm("all").model
    with pytest.raises(ConfigError, match="weights_memory cannot be set for a loaded model"):
        LLM(model, weights_memory="12MiB")


def test_plan_gives_freed_weight_memory_to_kv():
    folder = Path(load_model(TINY_NAME, verify=False).folder or "")
    options = {"device": "cuda", "memory_bytes": 64 << 20, "dtype": "float32"}
    whole = plan_report(folder, PlanOptions(**options))
    limited = plan_report(folder, PlanOptions(**options, weights_memory_bytes=12 << 20))

    assert whole.weights.offloaded_layers == ()
    assert limited.memory.weights_bytes == limited.weights.device_bytes <= 12 << 20
    gained = whole.memory.weights_bytes - limited.memory.weights_bytes
    assert limited.memory.kv_bytes == whole.memory.kv_bytes + gained
    assert limited.claims()["offloaded_weight_bytes"] == limited.weights.host_bytes > 0

    shown = CliRunner().invoke(app, ["plan", str(folder), "--weights-memory", "8MiB"])
    assert "layers offloaded through 2 slots" in " ".join(shown.output.split())
