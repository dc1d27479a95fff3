"""Generated tasks fit, are deterministic and score as RULER does; verdicts, stored cells."""

import json
import re
from dataclasses import asdict, make_dataclass, replace

import pytest
from typer.testing import CliRunner

from quire.api.llm import LLM
from quire.cli.main import app
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.errors import ConfigError
from quire.evals.questions import DEPTHS
from quire.evals.suite import sanity
from quire.evals.suite.base import SampleOptions
from quire.evals.suite.cells import CellFolder, CellResult, PromptResult
from quire.evals.suite.engines import full_kv, is_full, kv_name
from quire.evals.suite.registry import SUITES, TASKS, fraction_found, suite_of, suites_with, task_of
from quire.evals.suite.runner import SampleRunner, compare
from quire.evals.suite.sanity import FAILED, NO_CASE, PASSED, SKIPPED, Sanity
from quire.evals.tasks import ALL_FAMILIES, FAMILIES, make, rough_measure
from quire.evals.tune.scores import fingerprint_of

GENERATED = [task.name for task in TASKS.values() if task.name not in ("perplexity", "summary")]
NEW = sorted(ALL_FAMILIES.keys() - FAMILIES.keys())


def options(**changed):
    return SampleOptions(**({"count": 5, "measure": rough_measure, "tokens": 700} | changed))


@pytest.mark.parametrize("name", GENERATED)
def test_samples_fit_are_deterministic_and_score_1_with_their_answer_only(name):
    found = task_of(name).samples(options())

    assert found == task_of(name).samples(options())
    assert found != task_of(name).samples(options(seed=2))
    assert len({sample.prompt for sample in found}) == 5
    if name in ("lines", "niah", "passkey", "variables", "copy"):
        assert [sample.depth for sample in found] == [*DEPTHS]
    for sample in found:
        assert rough_measure(sample.prompt) <= 700
        assert sample.max_tokens >= rough_measure(sample.references[0])
        if name != "arithmetic":  # a question that does not contain the answer
            assert sample.question
            assert sample.prompt.endswith(sample.question)
            answers = {answer.strip() for answer in sample.references}
            assert answers.isdisjoint(sample.question.split())

    task = task_of(name)
    [sample] = task.samples(options(count=1))

    [right] = task.score(sample, ", ".join(sample.references) + " and more").values()
    [wrong] = task.score(sample, "%").values()
    assert (right, wrong) == (1.0, 0.0)
    if name == "niah_multivalue":  # some of several answers score their fraction
        assert task.score(sample, sample.references[2]) == {"found": 0.25}


@pytest.fixture(scope="module")
def llm():
    return LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="8MiB"))


def samples_of(llm, name, count=3):
    measured = options(measure=lambda text: len(llm.encode(text)), tokens=256, count=count)
    return task_of(name), task_of(name).samples(measured)


def cell_of(name, prompts):
    return CellResult(task=name, tokens=256, arm="full", prompts=prompts, seconds=1.0)


@pytest.fixture
def scores_of(llm):
    def found(name, evict, before=None):
        kv = KVConfig(memory="8MiB", evict=evict)
        runner = SampleRunner(LLM(llm.model, kv=kv), kv, evict_before_question=before)
        results, _ = runner.run(*samples_of(llm, name, 5))
        return sum(result.scores["accuracy"] for result in results), results

    return found


@pytest.mark.parametrize("name", ["majority", "topics", "labels", "retold", "lines"])
def test_a_rule_that_evicts_nearly_all_tokens_loses_every_task(name, scores_of):
    """Also tasks whose answer is one token: the first output token is not that of full KV."""
    assert scores_of(name, "full")[0] == 5
    assert scores_of(name, "sinks:cap=5,when=prefill_end")[0] <= 2


def test_only_an_eviction_before_the_question_can_lose_an_answer_of_one_token(scores_of):
    """A question after a context that fits the cap gets the outputs of full KV."""
    rule = "random:cap=12.5%,when=prefill_end"
    assert scores_of("majority", rule, before=False)[0] == 5
    assert scores_of("majority", rule)[0] <= 2

    fits = "snapkv:window=16,cap=100%,when=prefill_end"
    full, after = (
        [(one.output, one.prompt_tokens, one.output_tokens) for one in scores_of("retold", rule)[1]]
        for rule in ("full", fits)
    )
    assert full == after


@pytest.mark.parametrize("name", NEW)
def test_answers_follow_from_the_prompt(name):
    task = make(name, 3, 700)
    answers = task.queries[0].answers or (task.queries[0].answer,)

    assert all(answer in task.context for answer in answers)
    assert len(set(answers)) == len(answers)
    if name in ("niah_multivalue", "tracking", "cwe"):
        with pytest.raises(ConfigError, match="--tokens"):
            make(name, 1, 40)


def test_words_values_of_keys_and_tracked_variables_are_those_of_ruler():
    task = make("niah_multivalue", 1, 600)
    lines = [line for line in task.context.splitlines() if line.startswith("One of the special")]
    assert [line.rpartition(" ")[2].rstrip(".") for line in lines] == [*task.queries[0].answers]
    assert len({line.partition(" is: ")[0] for line in lines}) == 1

    task = make("cwe", 1, 900)
    common = task.queries[0].answers
    listed = task.context.partition("most often.\n")[2].split()[1::2]
    least = min(listed.count(word) for word in common)
    assert all(listed.count(word) < least for word in set(listed) - set(common))

    task = make("tracking", 1, 700, hops=3, chains=2)
    values = {}
    for line in task.context.splitlines():
        if line.startswith("VAR "):
            name, value = line.removeprefix("VAR ").split(" = ")
            values[name] = values.get(value.removeprefix("VAR "), value)

    wanted = values[task.queries[0].answers[0]]
    assert f"the value {wanted} " in task.prompt()
    assert {n for n, v in values.items() if v == wanted} == set(task.queries[0].answers)
    assert len(values) == 8


def test_perplexity_windows_are_continuous_text():
    task = task_of("perplexity")
    samples = task.samples(options(tokens=100))

    assert len({sample.prompt for sample in samples}) == 5
    for sample in samples:
        length = rough_measure(sample.prompt + sample.continuation)
        assert 80 <= length <= 101
        assert 0.6 < rough_measure(sample.prompt) / length < 0.8
        assert sample.continuation.startswith(" ")
    for seeds in ((1, 2, 3), (-1, 12345, 20261130)):  # other text within the book
        found = [task.samples(options(tokens=100, seed=seed)) for seed in seeds]
        windows = {(sample.prompt, sample.continuation) for one in found for sample in one}
        assert len(windows) == 15
        assert all(rough_measure(text) >= 5 for _, text in windows)


def test_perplexity_is_that_of_a_file_and_lower_is_better(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six " * 200, encoding="utf-8")

    [sample] = task_of("perplexity").samples(options(count=1, tokens=50, data=path))
    assert sample.prompt + sample.continuation in path.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="longer text"):
        task_of("perplexity").samples(options(tokens=5000, data=path))
    with pytest.raises(ConfigError, match="cannot read"):
        task_of("perplexity").samples(options(data=tmp_path / "none.txt"))

    means = cell([1.0, 3.0], "nll").means()
    assert list(means) == ["perplexity", "nll"]
    assert means["perplexity"].mean == pytest.approx(7.389056)
    assert means["perplexity"].low < means["perplexity"].mean < means["perplexity"].high
    found = compare(task_of("perplexity"), cell([2.0] * 9, "nll"), cell([1.0] * 9, "nll"), GOOD)

    assert (found.verdict, found.difference.mean) == ("better", -1.0)


def test_suites_name_known_tasks_and_full_kv_has_no_rule_and_no_codec():
    for name, suite in SUITES.items():
        assert all(name in suites_with(task) for task in suite.tasks)
    assert suite_of("quick").count == 10
    assert fraction_found("123, 456 and ABC", ["123", "789", "abc", "0"]) == 0.5

    kv = KVConfig(memory="1MiB", evict="recent:cap=64", codec="int8", record_evictions=True)
    assert not is_full(kv)
    assert is_full(full_kv(kv))
    assert (kv_name(kv), kv_name(full_kv(kv))) == ("int8 recent:cap=64", "full")
    assert full_kv(kv).memory == kv.memory
    assert is_full(KVConfig(memory="2MiB"))
    sparse = KVConfig(sparse="quest:pages=8")
    assert not is_full(sparse)
    assert is_full(full_kv(sparse))
    assert kv_name(sparse) == "quest:pages=8"


@pytest.mark.parametrize(
    "command", [("eval", "run", "quire-tiny"), ("board", "quire-tiny", "--seeds", "1")]
)
def test_prompts_beyond_the_context_are_refused_before_they_are_generated(command, tmp_path):
    line = [*command, "--tasks", "lines", "--tokens", "99999", "--no-sanity-check"]

    result = CliRunner().invoke(app, [*line, "--kv-memory", "16MiB", "--out", str(tmp_path)])

    assert result.exit_code == 2
    assert "--tokens of at most 4096" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("name", "tolerance"), [("perplexity", 1e-4), ("summary", 0.03)])
def test_a_rule_that_evicts_nearly_all_tokens_changes_a_texts_probabilities(llm, name, tolerance):
    """The summary of full KV is scored along its own tokens; 1 up to ties."""
    task, samples = samples_of(llm, name)

    def run(evict, full=None):
        kv = KVConfig(memory="8MiB", evict=evict)
        results, _ = SampleRunner(LLM(llm.model, kv=kv), kv).run(task, samples, full)
        return results

    full = run("full")
    metric = task.metrics[0]
    for rule, better in (("full", True), ("recent:cap=6,when=prefill_end", False)):
        for one, other in zip(run(rule, cell_of(name, full)), full, strict=True):
            same = one.scores[metric] == pytest.approx(other.scores[metric], abs=tolerance)
            assert same == better
            assert one.output_ids == other.output_ids  # the tokens, not their text encoded again


def test_an_empty_output_of_full_kv_does_not_count(llm):
    task, samples = samples_of(llm, "summary", 2)
    runner = SampleRunner(llm, KVConfig(memory="8MiB"))
    full, _ = runner.run(task, samples)
    cell = cell_of("summary", full)
    empty = [replace(one, output_ids=()) for one in full]

    partly, _ = runner.run(task, samples, replace(cell, prompts=(empty[0], full[1])))
    found = replace(cell, prompts=partly)

    assert partly[0].scores == {}
    assert found.values("top_1") == [partly[1].scores["top_1"]]
    assert found.summary()["scores"]["top_1"]["count"] == 1
    with pytest.raises(ConfigError, match="every output of task 'summary' with full KV is empty"):
        runner.run(task, samples, replace(cell, prompts=tuple(empty)))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["prefill_end", "prefill_and_decode", "decode"])
@pytest.mark.parametrize("name", ["retold", "summary"])
def test_rules_that_share_a_prefill_get_the_scores_of_their_own(llm, name, when):
    task, samples = samples_of(llm, name)
    rules = [f"{rule},cap=50%,when={when}" for rule in ("snapkv:window=16", "keydiff:recent=1")]
    kv = KVConfig(memory="16MiB", evict_allow="snapkv:window=16; keydiff:recent=1")
    shared = LLM(llm.model, kv=kv)
    prompts, _ = SampleRunner(llm, KVConfig(memory="8MiB")).run(task, samples)
    full = cell_of(name, prompts)
    for rule in rules:
        own = KVConfig(memory="8MiB", evict=rule, prefix_cache=PrefixCacheConfig(enabled=False))
        alone, _ = SampleRunner(LLM(llm.model, kv=own), own).run(task, samples, full)
        runner = SampleRunner(shared, replace(kv, evict=rule), shares_prefill=True)
        runner.run(replace(task, name="earlier"), samples, full)  # its prefixes are not for bytes
        found, _ = runner.run(task, samples, full)
        ours, theirs = ([(one.scores, one.output) for one in of] for of in (found, alone))
        assert ours == theirs
        assert found[0].kv_peak_bytes == alone[0].kv_peak_bytes
        assert {one.kv_peak_bytes for one in found[1:]} == {None}


# ---- verdicts and stored cells -------------------------------------------------------------------


GOOD = Sanity(status=PASSED)
CASES = ["lines", "kv", "niah"]
SIZES = {"tasks": CASES, "measure": rough_measure, "context_tokens": 4096, "seed": 1}


def cell(values, metric="accuracy", arm="full", task="lines"):
    same = {"chance": 0.0, "prompt_tokens": 100, "output_tokens": 5, "output": "x"}
    prompts = tuple(
        PromptResult(
            scores={metric: value}, depth=(index % 5) / 4, kv_peak_bytes=1000 + index, **same
        )
        for index, value in enumerate(values)
    )
    return CellResult(task=task, tokens=256, arm=arm, prompts=prompts, seconds=2.0)


@pytest.mark.parametrize(
    ("zeros", "verdict"), [(10, "worse"), (0, "no difference found"), (1, "no difference found")]
)
def test_verdict_follows_from_the_interval_of_the_difference(zeros, verdict):
    values = [0.0] * zeros + [1.0] * (10 - zeros)
    found = compare(task_of("lines"), cell([1.0] * 10), cell(values), GOOD)
    assert (found.verdict, found.difference.mean) == (verdict, pytest.approx(-zeros / 10))


@pytest.mark.parametrize(("count", "verdict"), [(5, "none"), (6, "worse")])
def test_a_verdict_needs_six_prompts(count, verdict):
    full, found = cell([1.0] * count), cell([0.0] * count)
    nlls = cell([2.0] * count, "nll"), cell([3.0] * count, "nll")

    scored = compare(task_of("lines"), full, found, GOOD)
    measured = compare(task_of("perplexity"), *nlls, GOOD)

    assert (scored.verdict, measured.verdict) == (verdict, verdict)
    expected = "expected 6 prompts or more for a verdict, got 5: raise --num-prompts"
    assert scored.reason == measured.reason == (expected if count < 6 else "")
    assert full.means()["accuracy"].low < 1 == full.means()["accuracy"].high


@pytest.mark.parametrize("check", [SKIPPED, Sanity(status=FAILED, reason="lines at 256")])
def test_without_passed_sanity_check_there_is_no_verdict(check):
    found = compare(task_of("lines"), cell([1.0] * 10), cell([0.0] * 10), check)
    assert (found.verdict, found.difference.mean) == ("none", -1.0)
    assert found.reason == check.reason


def test_a_failed_task_of_the_check_takes_its_own_verdict_only():
    """SmolLM2 finds needles, but fails on lines: its verdicts about needles are given."""
    cases = (
        {"task": "lines", "tokens": 256, "full": 0.1, "evicted": 0.0, "passed": False},
        {"task": "niah", "tokens": 512, "full": 1.0, "evicted": 0.0, "passed": True},
    )
    check = Sanity(status=FAILED, reason="lines", cases=cases)

    tasks = map(task_of, ("lines", "niah", "retold"))
    found = [compare(task, cell([1.0] * 10), cell([0.0] * 10), check) for task in tasks]
    assert [one.verdict for one in found] == ["none", "worse", "worse"]
    assert {one.difference.mean for one in found} == {-1.0}
    assert "got lines at 256 tokens: 10% with full KV" in found[0].reason


def test_cells_have_scores_by_depth_and_no_verdict_on_unsolved_tasks():
    half = [0.0, 0.0, 1.0, 0.0, 1.0] * 2

    found = compare(task_of("lines"), cell(half), cell(half), GOOD)
    assert (found.verdict, found.difference.mean) == ("none", 0.0)
    assert found.reason == "expected at least 0.5 with full KV, got 0.40"
    nll = compare(task_of("perplexity"), cell(half, "nll"), cell(half, "nll"), GOOD)
    assert nll.verdict == "no difference found"  # a perplexity has no bound

    found = cell([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])

    summary = found.summary()
    assert found.name == "lines_256"
    assert summary["by_depth"] == {"0": 0.5, "0.25": 0.0, "0.5": 1.0, "0.75": 1.0, "1": 0.0}
    assert summary["kv_peak_bytes"] == 1005
    assert summary["output_tokens_per_s"] == 15.0
    assert summary["total_tokens_per_s"] == 315.0
    assert summary["scores"]["accuracy"]["mean"] == 0.5


def test_fingerprints_ignore_options_that_are_off_only():
    option = ("memory", int | None, None)
    before, off, on = (
        make_dataclass("Options", [option, *further])
        for further in ([], [("sparse", str, "off")], [("levels", int, 2)])
    )
    assert fingerprint_of(off()) == fingerprint_of(before())
    others = (before(0), off(sparse="on"), on(), on(levels=1))
    assert len(set(map(fingerprint_of, (before(), *others)))) == 5


def test_stored_cell_is_read_again_for_equal_options_only(tmp_path):
    stored, found = CellFolder(tmp_path), cell([1.0, 0.0])
    assert stored.cell("a", "x") is None
    stored.write("a", "x", asdict(found))

    assert CellFolder(tmp_path).cell("a", "x") == found
    assert stored.cell("a", "y") is None
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["a.json"]  # no parts left
    for damaged in ('{"of": "x", "val', '{"of": "x", "values": {}}'):
        (tmp_path / "cells" / "a.json").write_text(damaged, encoding="utf-8")
        assert stored.cell("a", "x") is None
    CellFolder(None).write("a", "x", {})
    assert CellFolder(None).read("a", "x") is None


def test_sanity_check_evicts_to_a_quarter_and_states_failures():
    rules = []

    def knows_everything(prompts, evict, max_tokens):
        rules.append(evict)
        return ["12345"] * len(prompts)

    found = sanity.check(knows_everything, **SIZES)

    assert rules[:2] == ["full", "recent:cap=64,every=16,sinks=4"]
    assert found.status == FAILED
    assert "lines at 256 tokens: 0% with full KV" in found.reason
    assert json.dumps(found.as_dict())
    short = sanity.check(knows_everything, **SIZES | {"context_tokens": 30})
    assert (short.status, "--tokens" in short.reason) == (FAILED, True)


@pytest.mark.parametrize(
    ("tasks", "status", "ran"),
    [(["niah", "qa"], FAILED, ["niah"]), (["qa", "retold"], NO_CASE, []), (CASES, FAILED, CASES)],
)
def test_sanity_check_runs_the_cases_of_the_evaluated_tasks_only(tasks, status, ran):
    found = sanity.check(lambda prompts, *_: [""] * len(prompts), **SIZES | {"tasks": tasks})
    assert (found.status, [case["task"] for case in found.cases]) == (status, ran)
    assert all(task in found.reason for task in ran)
    assert not any(task in found.reason for task in set(CASES) - set(ran))
    assert found.passed == (not ran)
    assert compare(task_of("retold"), cell([1.0] * 10), cell([0.0] * 10), found).verdict == "worse"


def reads_visible(visible):
    """Answer as a model that reads the visible part of a prompt."""

    def answer(prompts, evict, max_tokens):
        found = []
        for prompt in prompts:
            key = re.findall(r"[a-z]+-[a-z]+", prompt)[-1]
            shown = rf"{key}[>\"']*(?:: [<\"']?| is: )([^>\"',]+)"
            found.append(re.search(shown, visible(prompt, evict)))
        return ["" if match is None else f"{match[1]}> and more" for match in found]

    return answer


def newest(prompt, evict):
    """The text that full KV, or a cap in tokens of about 3 characters, retains."""
    cap = re.match(r"recent:cap=(\d+)", evict)
    return prompt if cap is None else prompt[-3 * int(cap[1]) :]


@pytest.mark.parametrize(
    ("visible", "full", "evicted"),
    [(newest, 1.0, 0.0), (lambda prompt, _: prompt, 1.0, 1.0), (lambda *_: "", 0.0, 0.0)],
    ids=["its context", "more than its context", "nothing"],
)
def test_sanity_check_passes_a_model_that_reads_only_its_context(visible, full, evicted):
    found = sanity.check(reads_visible(visible), **SIZES)
    assert {case["full"] for case in found.cases} == {full}
    assert {case["evicted"] for case in found.cases} == {evicted}
    assert found.passed == ((full, evicted) == (1.0, 0.0))
