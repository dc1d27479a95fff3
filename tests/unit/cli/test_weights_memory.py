"""`--weights-memory` from the command line, a file and a plan to where weights lie."""

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
    loading = ModelConfig(
        dtype="float32", device="cpu", verify=False, weights_memory=weights_memory
    )
    return Settings(loading=loading, kv=KVConfig(memory="4MiB")).open_llm()


def test_answers_stay_and_weights_go_where_they_were_told(capsys: pytest.CaptureFixture[str]):
    resident, streamed = open_llm("all"), open_llm("12MiB")
    expected = resident.generate("The quick brown", GREEDY)[0]
    answer = streamed.generate("The quick brown", GREEDY)[0]

    stats = streamed.stats()
    assert answer.token_ids == expected.token_ids
    assert stats.weight_bytes <= 12 << 20
    assert stats.weight_bytes + stats.host_weight_bytes > resident.stats().weight_bytes
    assert stats.offloaded_weight_bytes >= streamed.engine.num_steps * stats.host_weight_bytes > 0
    assert resident.stats().host_weight_bytes == resident.stats().offloaded_weight_bytes == 0
    assert capsys.readouterr().err == ""

    open_llm("1GiB")
    assert "weights: all" in capsys.readouterr().err  # no layer is offloaded


def test_a_command_says_the_least_budget(tmp_path: Path):
    told = tmp_path / "options.toml"
    told.write_text('[model]\nname = "quire-tiny"\nweights-memory = "1MiB"\n')
    result = CliRunner().invoke(app, ["generate", "--config", str(told), "-p", "x"])

    assert result.exit_code != 0
    assert "too small for this model" in str(result.exception) + result.output


@pytest.mark.parametrize("text", ["much", "-1", ""])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"expected bytes, a size such as 4GiB, or all"):
        load_model(TINY, placer=place_beyond(text))


def test_a_loaded_model_has_its_weights_where_they_are():
    model = open_llm("all").model
    with pytest.raises(ConfigError, match="weights_memory cannot be set for a loaded model"):
        LLM(model, weights_memory="12MiB")


def test_a_plan_gives_kv_what_weights_leave():
    folder = Path(load_model(TINY, verify=False).folder or "")
    options = {"memory_bytes": 64 << 20, "dtype": "float32"}
    whole = plan_report(folder, PlanOptions(**options))
    half = plan_report(folder, PlanOptions(**options, weights_memory_bytes=12 << 20))

    assert whole.weights.offloaded_layers == ()
    assert half.memory.weights_bytes == half.weights.device_bytes <= 12 << 20
    gained = whole.memory.weights_bytes - half.memory.weights_bytes
    assert half.memory.kv_bytes == whole.memory.kv_bytes + gained
    assert half.claims()["offloaded_weight_bytes"] == half.weights.host_bytes > 0

    shown = CliRunner().invoke(app, ["plan", str(folder), "--weights-memory", "8MiB"])
    assert "layers offloaded through 2 slots" in " ".join(shown.output.split())
