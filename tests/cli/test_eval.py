import json

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.evals.suite import runner, sanity
from quire.evals.suite.registry import TASKS
from quire.evals.suite.sanity import FAILED, PASSED, Sanity
from support.command_line import write_lines
from support.texts import lines_prompts

SMALL = ("--kv-memory", "8MiB", "--num-prompts", "10", "--tokens", "128", "--json")
LINES = ("--tasks", "lines", *SMALL)
RULE = ("--evict", "recent:cap=25%,sinks=4,every=8")


def invoke(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def result(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout)


def refused(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    return done.stderr.splitlines()[-1]


@pytest.fixture
def judge(monkeypatch):
    """The sanity check without its prompts."""
    found = {"sanity": Sanity(status=PASSED)}
    monkeypatch.setattr(sanity, "check", lambda *args, **options: found["sanity"])
    return found


@pytest.mark.parametrize("form", [(), ("quire-tiny",), ("run",), ("run", "quire-tiny")])
def test_run_is_the_default_command(form, judge):
    found = result(*form, *LINES)
    assert found["name"] == "eval"
    assert found["config"]["model"] == "quire-tiny"
    assert found["claims"]["lines_128_accuracy"] == 1.0
    assert found["claims"]["lines_128_kv_peak_bytes"] > 0
    assert found["claims"]["lines_128_output_tokens_per_s"] > 0


@pytest.mark.slow
def test_quick_suite_scores_every_task_and_runs_the_sanity_check():
    found = result("--suite", "quick", "--kv-memory", "16MiB", "--num-prompts", "2", "--json")

    [rows] = [rows for arm, rows in found["arms"].items() if arm == "full"]
    tasks = "lines kv niah labels arithmetic perplexity"
    assert [row["task"] for row in rows] == tasks.split()
    assert found["arms"]["sanity_check"]["status"] == "passed"
    assert found["claims"]["sanity_check_passed"] == 1
    assert found["claims"]["lines_256_accuracy"] == 1.0
    assert 5 < found["claims"]["perplexity_256_perplexity"] < 200


def test_rule_is_compared_with_full_kv(judge):
    found = result(*LINES, *RULE)

    [verdict] = found["arms"]["verdicts"]
    assert found["claims"]["full_lines_128_accuracy"] == 1.0
    assert found["claims"]["configured_lines_128_accuracy"] < 0.7
    assert verdict["verdict"] == "worse"
    assert verdict["difference"]["high"] < 0
    full, configured = (found["arms"][arm][0] for arm in ("full", "configured"))
    assert configured["by_depth"]["0"] == 0.0
    assert configured["kv_peak_bytes"] <= full["kv_peak_bytes"]


@pytest.mark.slow
def test_model_that_fails_the_sanity_check_gives_no_verdict(judge):
    judge["sanity"] = Sanity(status=FAILED, reason="lines at 256 tokens: 10% with full KV")
    arguments = [argument for argument in (*LINES, *RULE) if argument != "--json"]

    done = invoke(*arguments)
    found = result(*LINES, *RULE)

    assert "Sanity check: failed: lines at 256 tokens: 10% with full KV." in done.stdout
    assert f"{RULE[1]} compared with full KV" in done.stdout
    assert "configured" not in done.output
    assert found["arms"]["verdicts"][0]["verdict"] == "none"
    assert found["arms"]["verdicts"][0]["difference"]["high"] < 0
    assert [found["arms"][arm][0]["kv"] for arm in ("full", "configured")] == ["full", RULE[1]]
    assert found["claims"]["sanity_check_passed"] == 0
    left_out = result(*LINES, *RULE, "--no-sanity-check")["arms"]
    assert left_out["sanity_check"]["status"] == "not run"
    assert left_out["verdicts"][0]["verdict"] == "none"


def test_later_run_continues_with_stored_cells(judge, tmp_path, monkeypatch):
    two = ("--tasks", "lines,kv", *SMALL, "--out", tmp_path)
    first = result(*LINES, "--out", tmp_path)
    ran = []
    original = runner.SampleRunner.run

    def counted(self, task, *options):
        ran.append(task.name)
        return original(self, task, *options)

    monkeypatch.setattr(runner.SampleRunner, "run", counted)
    second = result(*two)
    third = result(*two)

    assert ran == ["kv"]
    assert second["arms"]["full"][0] == first["arms"]["full"][0]
    assert third["arms"] == second["arms"]
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == third
    result(*two, "--seed", "2")
    assert ran == ["kv", "lines", "kv"]
    again = invoke(*two, "--seed", "2")
    assert f"resumes: 2 of 2 results are stored in {tmp_path / 'cells'}\n" in again.stderr


def test_perplexity_of_a_codec_is_higher(judge):
    found = result("--tasks", "perplexity", *SMALL, "--kv-codec", "int2")

    full, coded = (found["claims"][f"{arm}_perplexity_128_nll"] for arm in ("full", "configured"))
    assert coded > full


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("taks",), "no such command 'taks'"),
        (("--suite", "quik"), "unknown suite 'quik': did you mean quick"),
        (("--tasks", "line"), "unknown task 'line': did you mean lines"),
        (("--tasks", "lines", "--tokens", "many"), "--tokens as whole numbers"),
        (("--tasks", "lines", "--tokens", "0"), "--tokens of 1 or more"),
        (("--tasks", "lines", "--num-prompts", "0"), "--num-prompts of 1 or more"),
        (("--tasks", "lines", "--data", "x"), "expected the task perplexity"),
        (("--tasks", "perplexity", "--data", "none"), "got none: no such file"),
        (("--tasks", "lines", "--evict", "recnt:cap=5"), "did you mean recent"),
        (("--tasks", "lines", "--tokens", "9000"), "lower --tokens"),
        (("--tasks", "perplexity", "-tp", "2"), "a model in one process"),
    ],
)
def test_invalid_options_are_refused(arguments, message, judge):
    assert message in refused(*arguments, "--kv-memory", "8MiB")


def test_fidelity_of_full_kv_is_exact_and_of_a_rule_lower(tmp_path):
    path = write_lines(tmp_path / "prompts.jsonl", lines_prompts(4))
    options = ("--data", path, "--kv-memory", "4MiB", "--max-tokens", 8, "--json")

    full = result("fidelity", *options)["claims"]
    rule = result("fidelity", *options, *RULE, "--out", tmp_path / "out")

    assert (full["top_1"], full["exact"], full["prompts"]) == (1.0, 1.0, 4)
    assert full["kl_nats"] == pytest.approx(0.0, abs=1e-6)
    assert rule["claims"]["top_1"] < 1.0
    assert rule["claims"]["kl_nats_low"] > 0.0
    assert rule["claims"]["kv_peak_bytes"] <= rule["claims"]["full_kv_peak_bytes"]
    stored = (tmp_path / "out" / "result.json").read_text(encoding="utf-8")
    assert json.loads(stored) == rule
    assert "context holds" in refused("fidelity", "--data", path, "--max-tokens", 4090)
    assert "one process" in refused("fidelity", "--data", path, "-tp", 2)


def test_tasks_are_listed_one_on_each_line():
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", "tasks"]).stdout
    listed = result("tasks", "--json")["tasks"]

    assert [row["name"] for row in listed] == [*TASKS]
    for row in listed:
        [line] = [line for line in text.splitlines() if line.split()[:1] == [row["name"]]]
        assert row["summary"] in line
