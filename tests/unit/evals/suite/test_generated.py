"""Generated tasks and perplexity windows: they fit, are deterministic, and score as RULER does."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from quire.api.llm import LLM
from quire.cli.main import app
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.errors import ConfigError
from quire.evals.questions import DEPTHS
from quire.evals.suite.base import SampleOptions
from quire.evals.suite.cells import CellResult
from quire.evals.suite.registry import SUITES, TASKS, fraction_found, suite_of, suites_with, task_of
from quire.evals.suite.runner import SampleRunner
from quire.evals.tasks import ALL_FAMILIES, FAMILIES, make, rough_measure

GENERATED = [task.name for task in TASKS.values() if task.name not in ("perplexity", "summary")]
NEW = sorted(ALL_FAMILIES.keys() - FAMILIES.keys())


def options(**changed):
    return SampleOptions(**({"count": 5, "measure": rough_measure, "tokens": 700} | changed))


@pytest.mark.parametrize("name", GENERATED)
def test_samples_fit_the_length_and_are_deterministic(name):
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
    """Scores of a task under a rule, and the results of its prompts."""

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


@pytest.mark.parametrize("name", GENERATED)
def test_the_answer_scores_1_and_another_text_0(name):
    task = task_of(name)
    [sample] = task.samples(options(count=1))

    [right] = task.score(sample, ", ".join(sample.references) + " and more").values()
    [wrong] = task.score(sample, "%").values()
    assert (right, wrong) == (1.0, 0.0)
    if name == "niah_multivalue":  # some of several answers score their fraction
        assert task.score(sample, sample.references[2]) == {"found": 0.25}


@pytest.mark.parametrize("name", NEW)
def test_answers_follow_from_the_prompt(name):
    task = make(name, 3, 700)
    answers = task.queries[0].answers or (task.queries[0].answer,)

    assert all(answer in task.context for answer in answers)
    assert len(set(answers)) == len(answers)
    if name in ("niah_multivalue", "tracking", "cwe"):
        with pytest.raises(ConfigError, match="--tokens"):
            make(name, 1, 40)


def test_needles_of_one_key_have_its_values_and_common_words_are_the_most_frequent():
    task = make("niah_multivalue", 1, 600)
    lines = [line for line in task.context.splitlines() if line.startswith("One of the special")]
    assert [line.rpartition(" ")[2].rstrip(".") for line in lines] == [*task.queries[0].answers]
    assert len({line.partition(" is: ")[0] for line in lines}) == 1

    task = make("cwe", 1, 900)
    common = task.queries[0].answers
    listed = task.context.partition("most often.\n")[2].split()[1::2]
    least = min(listed.count(word) for word in common)
    assert all(listed.count(word) < least for word in set(listed) - set(common))


def test_tracked_variables_have_the_first_value():
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


def test_perplexity_of_a_file_reads_it(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six " * 200, encoding="utf-8")

    [sample] = task_of("perplexity").samples(options(count=1, tokens=50, data=path))
    assert sample.prompt + sample.continuation in path.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="longer text"):
        task_of("perplexity").samples(options(tokens=5000, data=path))
    with pytest.raises(ConfigError, match="cannot read"):
        task_of("perplexity").samples(options(data=tmp_path / "none.txt"))


def test_suites_name_known_tasks_and_fractions_are_counted():
    for name, suite in SUITES.items():
        assert all(name in suites_with(task) for task in suite.tasks)
    assert suite_of("quick").count == 10
    assert fraction_found("123, 456 and ABC", ["123", "789", "abc", "0"]) == 0.5


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
        found, _ = runner.run(task, samples, full)
        ours, theirs = ([(one.scores, one.output) for one in of] for of in (found, alone))
        assert ours == theirs
        assert found[0].kv_peak_bytes == alone[0].kv_peak_bytes
        assert {one.kv_peak_bytes for one in found[1:]} == {None}
