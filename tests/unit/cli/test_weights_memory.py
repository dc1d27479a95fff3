"""`--weights-memory` on the command line, in a config file and in `quire plan`."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.api.llm import LLM
from quire.cli.main import app
from quire.cli.options import ModelConfig
from quire.cli.plan import PlanOptions, plan_report
from quire.cli.settings import Settings
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.models.loader import load_model
from quire.offload.weights.placement import place_beyond

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
TINY = "quire-tiny"


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
    line = [sys.executable, "-m", "quire", command, TINY, "--kv-memory", "2MiB", *options]
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
            load_model(TINY, placer=place_beyond(text))
    model = open_llm("all").model
    with pytest.raises(ConfigError, match="weights_memory cannot be set for a loaded model"):
        LLM(model, weights_memory="12MiB")


def test_plan_gives_freed_weight_memory_to_kv():
    folder = Path(load_model(TINY, verify=False).folder or "")
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
