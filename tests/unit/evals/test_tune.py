import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import ConfigError
from quire.evals.intervals import Mean
from quire.evals.pace import Pace
from quire.evals.tune.predict import predicted_rows
from quire.evals.tune.run import TuneConfig, divided
from quire.evals.tune.search import FIRST_PROMPTS, first_round, halve, pareto, round_sizes
from quire.evals.tune.space import SearchCandidate, Space
from support.model_specs import small_spec
from support.texts import lines_prompts

CANDIDATES = [SearchCandidate("int8", f"sinks:cap={n}") for n in range(30)]


def exact(mean):
    return Mean(mean, mean, mean, 10, most=mean)


def test_space_has_the_baseline_first_and_every_combination_once():
    rules = ("full", "snapkv:window=8", "h2o")
    lists = {"caps": ("50%", "128"), "budgets": ("uniform", "pyramid")}
    space = Space(codecs=("none", "int8"), rules=rules, schedules=("prefill_end",), **lists)

    found = space.candidates()

    assert found[0] == space.baseline == SearchCandidate("none", "full")
    assert len(found) == len(set(found)) == 2 * (1 + 2 * 2 * 2)
    assert SearchCandidate("int8", "snapkv:window=8,cap=50%,when=prefill_end") in found
    assert SearchCandidate("none", "h2o:cap=128,when=prefill_end,budget=(pyramid)") in found
    with pytest.raises(ConfigError, match="--caps has no values"):
        Space(caps=())
    for rule in ("recent:sinks=4,budget=(ada)", "snapkv:budget=ada"):
        own = replace(space, rules=("full", rule)).candidates()
        assert {one.evict.count("budget") for one in own} == {0, 1}  # a rule's own budget stays
        assert len(own) == 2 * (1 + 2)


def alone(one):
    return ()


@given(st.integers(1, 500))
def test_rounds_grow_to_all_prompts(count):
    sizes = round_sizes(count)
    assert sizes[-1] == count
    assert sizes == sorted(sizes)
    assert sizes[0] >= min(count, 6)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=30))
def test_search_finds_the_max_requests_that_reach_the_quality(found):
    candidates = CANDIDATES[: len(found)]
    rows = {one: r for one, (r, _) in zip(candidates, found, strict=True)}
    quality = {one: exact(q) for one, (_, q) in zip(candidates, found, strict=True)}

    options = {"parts": alone, "prompts": 200, "wanted": 0.9}
    rounds = halve(candidates, rows, lambda one, _: quality[one], **options)

    good = [one for one in candidates if quality[one].mean >= 0.9]
    assert bool(good) == bool(rounds[-1].kept)
    if good:
        assert rows[rounds[-1].kept[0]] == max(rows[one] for one in good)


def test_a_poor_codec_removes_its_combinations_unmeasured():
    space = Space(codecs=("none", "int4"), rules=("h2o",), caps=("50%",), schedules=("decode",))
    codec, both = (SearchCandidate("int4", rule) for rule in ("full", "h2o:cap=50%,when=decode"))
    measured = []

    def measure(one, count):
        measured.append(one)
        return exact(0.5 if one == codec else 1.0)

    found = first_round([space.baseline, both], measure, space.parts, 0.9)

    assert found.kept == (space.baseline,)
    assert codec in measured
    assert both not in measured


def test_the_first_round_removes_what_no_prompt_speaks_for():
    poor, mixed, good = CANDIDATES[:3]
    measured = []

    def measure(one, count):
        measured.append((one, count))
        if one == mixed and count == FIRST_PROMPTS:
            return Mean(0.8, 0.7, 0.85, count, most=1.0)
        return exact(0.5 if one != good else 0.95)

    rows = dict.fromkeys((poor, mixed, good), 10)
    rounds = halve([poor, mixed, good], rows, measure, parts=alone, prompts=100, wanted=0.9)

    assert rounds[0].kept == (mixed, good)
    assert (mixed, 11) in measured
    assert [count for one, count in measured if one == poor] == [FIRST_PROMPTS]


def test_place_and_time_of_the_search_are_noted():
    notes = []
    rows, few = dict.fromkeys(CANDIDATES, 10), CANDIDATES[:6]
    options = {"prompts": 18, "wanted": 0.9, "note": lambda *found: notes.append(found)}

    halve(few, rows, lambda *_: exact(1.0), parts=alone, **options)

    first, then = 6 * 4, 2 * (6 - 4) + 1 * (18 - 6)
    assert notes[0] == ("round 1/3, 1/6", first - 4 + then)
    assert notes[5] == ("round 1/3, 6/6", then)
    assert notes[6] == ("round 2/3, 1/6", 5 * 2 + 2 * 12)  # all six passed the first round
    assert notes[-1][1] == 0

    now = iter([0.0, 10.0, 40.0, 40.0, 100.0])
    pace = Pace(100.0, clock=lambda: next(now))

    assert pace.left(5) == ""
    with pace.measuring(3):
        pass
    assert pace.left(5) == ", about 0:00:50 left"
    assert pace.left(0) == ""
    assert [pace.is_over, pace.is_over] == [False, True]
    with pytest.raises(ConfigError, match="--time-limit above 0, in seconds, got 0"):
        Pace(0.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_pareto_front_is_not_beaten(found):
    candidates = CANDIDATES[: len(found)]
    rows = {one: r for one, (r, _) in zip(candidates, found, strict=True)}
    quality = {one: exact(q / 9) for one, (_, q) in zip(candidates, found, strict=True)}

    front = pareto(candidates, quality, rows)

    assert max(one.mean for one in quality.values()) in [quality[one].mean for one in front]
    for one in front:
        for other in candidates:
            better = rows[other] >= rows[one] and quality[other].mean > quality[one].mean
            assert not better
            assert not (rows[other] > rows[one] and quality[other].mean >= quality[one].mean)


def test_prompts_are_divided_and_help_names_the_required_options():
    searched, held = divided(11, TuneConfig(held_out=0.4))
    assert sorted([*searched, *held]) == list(range(11))
    assert len(held) == 4
    with pytest.raises(ConfigError, match="at least 4 prompts"):
        divided(3, TuneConfig())
    result = CliRunner().invoke(app, ["tune", "--help"])
    assert "--data and --kv-memory are required." in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("metric", "f1"), ("objective", "cost"), ("min_quality", 1.5)),
        *(("held_out", 1.0), ("max_tokens", 0)),
    ],
)
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}"):
        TuneConfig(**{option: value})


SMALL = """tune quire-tiny --kv-memory 4MiB --max-tokens 6 --min-quality 0.9 --json
    --codecs none,int8,int2 --rules full;recent --caps 50% --schedules prefill_end"""


def tune(data, *more):
    return CliRunner().invoke(
        app, [*SMALL.split(), "--data", str(data), "--out", str(data.parent / "out"), *more]
    )


def run(data, *more):
    result = tune(data, *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines_prompts(12)))
    return path


@pytest.mark.slow
def test_an_interrupted_search_goes_on_with_the_same_result(tmp_path, data):
    whole, _ = run(data)
    scores = tmp_path / "out" / "scores.jsonl"
    lines = scores.read_text().splitlines()
    scores.write_text("\n".join(lines[: len(lines) // 2]) + "\n" + lines[-1][:20])

    again, stderr = run(data)

    speeds = {name for name in whole["claims"] if name.endswith("tokens_per_s")}
    assert speeds
    for name in whole["claims"].keys() - speeds:
        assert again["claims"][name] == whole["claims"][name]
    assert again["arms"]["chosen"] == whole["arms"]["chosen"]
    assert again["arms"]["rounds"] == whole["arms"]["rounds"]
    assert f"resumes: {len(lines) // 2} results are stored in {scores}\n" in stderr


def test_a_search_ends_at_its_time_limit_with_the_best_so_far(tmp_path, data, monkeypatch):
    checks = iter([False, False])
    monkeypatch.setattr(Pace, "is_over", property(lambda _: next(checks, True)))

    ended = tune(data, "--time-limit", "3600")

    assert ended.exit_code == 2
    lines = ended.stderr.splitlines()
    assert re.fullmatch(r"round 1/2, 1/\d: .* on 4 prompts, about \d:\d\d:\d\d left", lines[1])
    assert "error: time limit at round 1/2, 3/" in lines[-1]
    assert "best so far: --kv-codec " in lines[-1]
    assert (tmp_path / "out" / "scores.jsonl").exists()


RAISES = """
from dataclasses import dataclass
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register


@register("raises")
@dataclass(frozen=True, slots=True)
class Raises(SinksAndRecent):
    def score(self, view):
        raise RuntimeError("not today")
"""


def search_with_rule(folder, data, *options):
    """Search with the rule in another process, in which only it is registered."""
    rule = folder / "raises.py"
    rule.write_text(RAISES)
    line = [*SMALL.split(), "--data", str(data), "--policy-file", str(rule), *options]
    command = [sys.executable, "-m", "quire", *line, "--out", str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)


@pytest.mark.slow
def test_a_rule_that_raises_is_refused_and_the_others_are_compared(tmp_path, data):
    ended = search_with_rule(tmp_path, data, "--rules", "full;raises;recent")

    found = json.loads(ended.stdout.splitlines()[-1])
    refused = found["arms"]["refused"]
    assert refused
    assert all("raises:" in one and "not today" in why for one, why in refused.items())
    assert "refused: " in ended.stderr
    assert "raises" not in str(found["arms"]["chosen"])

    (tmp_path / "none").mkdir()  # all rules raise
    ended = search_with_rule(tmp_path / "none", data, "--rules", "full;raises", "--codecs", "none")

    assert "All candidates that hold more requests were refused.\n" in ended.stderr
    assert re.search(r"\nRefused: 1, such as .*raises.*not today", ended.stderr)
    assert "use more prompts" not in ended.stderr


@pytest.mark.slow
def test_the_result_holds_more_requests_and_its_file_is_a_configuration(tmp_path, data):
    found, stderr = run(data, "--min-quality", "0.97")  # a near tie: one token of 36 may differ

    claims, words = found["claims"], " ".join(stderr.split())
    assert claims["requests_gain"] >= 1.8
    assert claims["held_out_quality"] >= 0.97
    assert claims["held_out_prompts"] == 6
    assert claims["chosen_running_at_once"] == 6 >= claims["baseline_running_at_once"]
    assert re.match(r"[1-5] of 5 candidates hold more requests than the baseline's \d+;", stderr)
    assert "on 6 prompts\n" in stderr
    assert "on 6 held-out prompts\n" in stderr
    holds = r"the KV memory holds (\d+) requests of \d+ prompt and 6 output tokens, (\S+) times the"
    assert re.search(holds, words)
    assert re.search(r"6 held-out prompts ran, 6 of them at once, \d+ tokens/s", words)
    page = (tmp_path / "out" / "tuned.md").read_text()
    few = re.search(r"6 held-out prompts do not show a top_1 of 0.97: the interval [^;]*", words)
    assert few
    assert all(text in page for text in (few[0], "Held-out prompts", "reached on these prompts"))
    config = ["--config", str(tmp_path / "out" / "tuned.toml")]
    line = ["generate", *config, "--prompt", "<|doc|>a", "--max-tokens", "2"]
    used = CliRunner().invoke(app, line)
    assert used.exit_code == 0, used.output


@pytest.mark.slow
def test_the_file_has_the_dtype_page_size_and_sparse_attention_of_the_search(tmp_path, data):
    sparse = "quest:pages=2,recent=1,sinks=0"
    options = ["--dtype", "float32", "--block-size", "32", "--sparse", sparse, "--no-measure"]
    claims = run(data, *options)[0]["claims"]

    found = tomllib.loads((tmp_path / "out" / "tuned.toml").read_text())
    assert found["dtype"] == "float32"
    assert found["kv"]["page_tokens"] == 32
    assert found["kv"]["sparse"] == sparse
    assert claims["held_out_quality"] < 1, "the reference reads all pages"


def test_a_baseline_that_is_chosen_is_measured_once(data):
    stderr = tune(data, "--codecs", "none,int2", "--rules", "full", "--min-quality", "1").stderr
    assert stderr.count("--kv-codec none --evict full: 6 held-out prompts ran") == 1
    assert (
        "No candidate that holds more requests reached --min-quality 1 on the 6 prompts of the "
        "search and the 6 others: use more prompts, or lower --min-quality" in stderr
    )
    assert "do not show" not in stderr
    assert "tuned.toml holds the baseline, which has no gain; details: " in stderr
    assert "Use it" not in stderr


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ({"prompt": 5}, "--kv-memory 4MiB", "got 5"),
        ({"question": "a"}, "--kv-memory 4MiB", "got ['question']"),
        (None, "--kv-memory 4MiB --evict h2o:cap=9", "unknown option '--evict'"),
        (None, "", "needs a KV memory of a fixed size"),
        (None, "--kv-memory auto", "add --kv-memory, such as 64MiB; auto may be another size in a"),
        (None, "--kv-memory 16KiB", "one"),
        (None, "--kv-memory 4MiB --metric answer --max-tokens 5000", "the model's context"),
        (None, "--data no.jsonl", "no such file"),  # reported before the options
    ],
)
def test_wrong_prompts_and_options_are_refused(data, content, options, expected):
    if content:
        data.write_text(json.dumps(content) + "\n")
    line = ["tune", "quire-tiny", "--data", str(data), "--out", str(data.parent / "o")]

    result = CliRunner().invoke(app, [*line, *options.split()])

    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())


def test_bounds_of_sparse_attention_count_in_the_bytes_of_a_row():
    model = small_spec(None, None)
    sizes = {"page_tokens": 16, "kv_bytes": 1 << 24, "prompt_tokens": 160, "new_tokens": 1}
    plain, sparse = (
        predicted_rows(model, codec="float32", evict="full", sparse=rule, **sizes).row_bytes
        for rule in ("off", "quest:budget=10%")
    )
    assert sparse == plain + 10 * 2 * model.num_kv_heads * model.head_dim * model.num_layers * 4
