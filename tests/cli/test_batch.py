"""`quire batch` on a random model: every line once, whatever stands in it."""

import json
from pathlib import Path

import pytest

from quire.cli import batch_run
from support.command_line import last_json, read_records, write_lines

OPTIONS = ("--kv-memory", "64KiB", "--max-tokens", "6", "--no-verify")
BAD = [
    "{",
    '{"prompt": [1, 2], "temperature": NaN}',
    {"prompt": []},
    {"prompt": [1, 999]},
    {"prompt": [1], "max_token": 3},
    {"prompt": "text, but there is no tokenizer"},
    {"prompt": [5] * 600},  # more than the context
    {"prompt": [5] * 300},  # more KV than there is
]


def prompts(count: int) -> list[object]:
    return [{"id": f"p{i}", "prompt": [2 + i % 100, 7, 9]} for i in range(count)]


@pytest.fixture
def batch(quire, zoo_folder: Path, tmp_path: Path):
    """Runs lines into tmp_path/out.jsonl."""

    def run(lines: list[object] | None, *arguments: object):
        source = tmp_path / "in.jsonl"
        if lines is not None:
            write_lines(source, lines)
        target = tmp_path / "out.jsonl"
        result = quire("batch", zoo_folder, source, target, *OPTIONS, *arguments)
        return result, target

    return run


def test_every_line_is_answered_once(batch):
    result, target = batch(prompts(20), "--max-num-seqs", "2")

    records = read_records(target)
    assert result.exit_code == 0, result.output
    assert sorted(record["line"] for record in records) == list(range(1, 21))
    assert {record["id"] for record in records} == {f"p{i}" for i in range(20)}
    assert all(record["error"] is None for record in records)
    assert all(record["usage"]["completion_tokens"] <= 6 for record in records)


def completion(name: str, prompt: object, **body: object) -> object:
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "seed": 3, "temperature": 1.0, "n": 2, **body},
    }


def test_a_line_with_several_prompts_has_one_record_with_all_choices(batch):
    requested = [[2, 7, 9], [3, 7, 9], [4, 7, 9]]
    alone = [completion(str(i), prompt) for i, prompt in enumerate(requested)]

    result, target = batch([*alone, completion("all", requested)])

    assert result.exit_code == 0, result.output
    found = {r["custom_id"]: r["response"]["body"] for r in read_records(target)}
    *single, several = (found[name] for name in ("0", "1", "2", "all"))
    texts = [choice["text"] for body in single for choice in body["choices"]]
    assert [choice["text"] for choice in several["choices"]] == texts
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert several["usage"][count] == sum(body["usage"][count] for body in single)


def test_one_refused_prompt_of_several_refuses_the_line(batch):
    result, target = batch([completion("a", [[1, 2], [1, 999]]), completion("b", [[1]] * 1_025)])

    assert result.exit_code == 1
    errors = {r["custom_id"]: r["error"]["message"] for r in read_records(target)}
    assert "token ids" in errors["a"]
    assert "1025 prompts x 2 outputs" in errors["b"]


def test_bad_lines_get_an_error_record_and_the_others_run(batch):
    mixed = [line for pair in zip(prompts(len(BAD)), BAD, strict=True) for line in pair]

    result, target = batch(mixed)

    records = {record["line"]: record for record in read_records(target)}
    assert result.exit_code == 1
    assert f"error records: {len(BAD)} of {2 * len(BAD)} lines; --retry-failed" in result.stderr
    assert sorted(records) == list(range(1, 2 * len(BAD) + 1))
    for number, record in records.items():
        assert (record["error"] is None) == (number % 2 == 1), record


def test_a_line_that_never_fits_is_named_in_words(batch):
    _, target = batch([*prompts(1), {"id": "long", "prompt": [5] * 300}, {"prompt": [5] * 300}])

    errors = {record["line"]: record["error"] for record in read_records(target)}
    assert errors[1] is None
    assert errors[2].startswith(
        "line 2 ('long') does not fit the KV memory: 300 prompt tokens and 6 to generate"
    )
    assert errors[3].startswith("line 3 does not fit the KV memory: ")
    assert not any("request-" in error for error in (errors[2], errors[3]))


def test_failed_lines_are_tried_again_when_told_to_and_the_others_stay(batch):
    lines = [*prompts(3), {"id": "long", "prompt": [5] * 300}, "{"]
    _, target = batch(lines)
    answered = [record for record in read_records(target) if record["error"] is None]

    more = ("--kv-memory", "512KiB", "--json")
    again, _ = batch(None, *more)
    assert again.exit_code == 1  # nothing was tried, and it is still so
    assert last_json(again)["claims"]["requests_completed"] == 0

    retried, _ = batch(None, "--retry-failed", *more)
    records = {record["line"]: record for record in read_records(target)}
    assert retried.exit_code == 1
    assert "error records: 1 of 5 lines" in retried.stderr
    assert last_json(retried)["claims"]["requests_completed"] == 2
    assert last_json(retried)["claims"]["requests_completed_before"] == 3
    assert records[4]["error"] is None
    assert "not JSON" in records[5]["error"]
    assert read_records(target)[:3] == answered
    assert len(read_records(target)) == 5


def test_failed_lines_of_openais_format_are_tried_again_too(batch):
    body = {"prompt": [5] * 300, "max_tokens": 2}
    requested = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    batch([requested])

    result, target = batch(None, "--retry-failed", "--kv-memory", "512KiB")

    (record,) = read_records(target)
    assert result.exit_code == 0
    assert record["response"]["status_code"] == 200


def test_blank_lines_are_no_requests(batch):
    result, target = batch(["", *prompts(2), "   ", ""])

    assert sorted(record["line"] for record in read_records(target)) == [2, 3]
    assert result.exit_code == 0


def test_both_formats_may_stand_in_one_file(batch):
    body = {"prompt": [3, 4], "max_tokens": 2}
    requested = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}

    _, target = batch([requested, *prompts(1)])

    by_line = {record["line"]: record for record in read_records(target)}
    assert by_line[1]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert by_line[2]["usage"]["completion_tokens"] == 6


def test_options_of_a_line_win_over_those_of_the_command(batch):
    _, target = batch([{"prompt": [3], "max_tokens": 2}, {"prompt": [3]}])

    counts = {r["line"]: r["usage"]["completion_tokens"] for r in read_records(target)}
    assert counts == {1: 2, 2: 6}


def test_a_second_start_answers_nothing_again(batch):
    batch(prompts(5))
    result, target = batch(None, "--json")

    assert last_json(result)["claims"]["requests_completed_before"] == 5
    assert last_json(result)["claims"]["requests_completed"] == 0
    assert len(read_records(target)) == 5


def test_a_cut_output_is_completed_with_the_same_answers(batch):
    _, target = batch(prompts(8))
    whole = {r["line"]: r["text"] for r in read_records(target)}
    target.write_bytes(target.read_bytes()[:-100])

    result, _ = batch(None)

    assert result.exit_code == 0
    assert {r["line"]: r["text"] for r in read_records(target)} == whole
    assert len(read_records(target)) == 8


def test_sampled_answers_of_a_continued_run_are_those_of_an_undisturbed_one(batch):
    _, target = batch(prompts(8), "--temperature", "1.5")
    whole = {r["line"]: (r["text"], r["usage"]["completion_tokens"]) for r in read_records(target)}
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:3]))

    batch(None, "--temperature", "1.5")

    again = {r["line"]: (r["text"], r["usage"]["completion_tokens"]) for r in read_records(target)}
    assert again == whole


def test_another_input_or_other_options_are_refused_until_told_to_start_over(batch):
    _, target = batch(prompts(3))
    before = target.read_bytes()

    refused, _ = batch(prompts(4))
    assert refused.exit_code == 2
    assert "another input" in refused.stderr
    refused, _ = batch(prompts(3), "--temperature", "1")
    assert refused.exit_code == 2
    assert "temperature: None before, 1.0 now" in refused.stderr
    assert target.read_bytes() == before

    result, _ = batch(prompts(4), "--overwrite")
    assert result.exit_code == 0
    assert len(read_records(target)) == 4


def test_options_that_change_no_answer_may_change(batch):
    _, target = batch(prompts(3))
    target.write_bytes(target.read_bytes().splitlines(keepends=True)[0])

    result, _ = batch(None, "--kv-memory", "512KiB", "--max-num-seqs", "3")

    assert result.exit_code == 0
    assert len(read_records(target)) == 3


def test_the_input_is_never_overwritten(quire, zoo_folder: Path, tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", prompts(2))
    before = source.read_bytes()

    result = quire("batch", zoo_folder, source, source, "--overwrite")

    assert result.exit_code == 2
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl", "out.jsonl.state", "link.jsonl"])
@pytest.mark.parametrize("is_there", [False, True])
def test_events_are_never_written_among_records_or_requests(
    quire, zoo_folder: Path, tmp_path: Path, name: str, is_there: bool
):
    source, target = write_lines(tmp_path / "in.jsonl", prompts(2)), tmp_path / "out.jsonl"
    (tmp_path / "link.jsonl").symlink_to(target)
    if is_there:
        quire("batch", zoo_folder, source, target, *OPTIONS)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.exists()}

    events = ("--kv-events", tmp_path / name)
    result = quire("batch", zoo_folder, source, target, "--overwrite", *events)

    assert result.exit_code == 2
    assert "give another file to --kv-events" in " ".join(result.stderr.split())
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.exists()} == before


def test_lines_with_a_cache_salt_are_answered(batch):
    lines = [{"prompt": [2, 7, 9], "cache_salt": salt} for salt in ("a", "", None, "a" * 129, 7)]

    _, target = batch(lines)

    errors = {record["line"]: record["error"] for record in read_records(target)}
    assert [errors[number] for number in (1, 2, 3)] == [None] * 3
    assert "expected a cache_salt of at most 128 characters, got 129" in errors[4]
    assert "expected cache_salt to be a text, got 7" in errors[5]


def test_lines_share_kv_with_those_of_their_salt(batch, tmp_path: Path):
    prompt = list(range(2, 2 + 64))
    lines = [{"prompt": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]

    events = tmp_path / "events.jsonl"
    batch(lines, "--max-num-seqs", "1", "--kv-memory", "1MiB", "--kv-events", events)

    found = [e["cached_tokens"] for e in read_records(events) if e["kind"] == "admitted"]
    assert found[:2] == [0, 0]
    assert found[2] > 0


@pytest.mark.parametrize("name", ["nowhere.jsonl", "."])
def test_an_input_that_is_no_file_is_refused(quire, tmp_path: Path, name: str):
    result = quire("batch", "quire-tiny", tmp_path / name, tmp_path / "out.jsonl")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_cannot_be_written_is_refused(quire, tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", prompts(1))

    result = quire("batch", "quire-tiny", source, tmp_path / "nowhere" / "out.jsonl")

    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_an_empty_input_is_done_at_once(batch):
    result, target = batch([])

    assert result.exit_code == 0
    assert read_records(target) == []


def test_data_rows_are_answered_by_their_key(batch):
    rows = [{"tokens": [3, 4], "answer": "x", "max_tokens": "no option here"}]

    _, target = batch(rows, "--prompt-key", "tokens", "--with-prompt")

    (record,) = read_records(target)
    assert (record["error"], record["prompt"]) == (None, [3, 4])


def test_text_gets_the_prefix_and_a_chat_its_template(quire, tmp_path: Path):
    lines = [
        {"question": "The king", "answer": "?"},
        {"question": "The queen"},
    ]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    quick = ("--kv-memory", "2MiB", "--no-verify", "--max-tokens", "4", "--dtype", "float32")

    quire(
        "batch",
        "quire-tiny",
        source,
        target,
        "--prompt-key",
        "question",
        "--prefix",
        "<|doc|>",
        *quick,
    )

    chat = {"messages": [{"role": "user", "content": "The king"}]}  # its template adds <|doc|>
    write_lines(source, [chat, {"prompt": "<|doc|>The queen"}])
    by_template = tmp_path / "chat.jsonl"
    quire("batch", "quire-tiny", source, by_template, *quick)
    texts = [{r["line"]: r["text"] for r in read_records(path)} for path in (target, by_template)]
    assert texts[0] == texts[1]
    assert texts[0][1]


def test_few_lines_are_submitted_at_a_time(batch, monkeypatch):
    waiting = []
    monkeypatch.setattr(batch_run, "WINDOW_PER_RUNNING", 2)
    step = batch_run.BatchRun._after_step

    def watch(self, on_step):
        stats = self._llm.stats()
        waiting.append(stats.num_running + stats.num_waiting)
        step(self, on_step)

    monkeypatch.setattr(batch_run.BatchRun, "_after_step", watch)

    result, target = batch(prompts(40), "--max-num-seqs", "3")

    assert result.exit_code == 0
    assert len(read_records(target)) == 40
    assert max(waiting) <= 6


def test_the_last_line_is_the_whole_envelope(batch):
    result, _ = batch([*prompts(3), "{"], "--json")

    answer = last_json(result)
    assert answer["name"] == "batch"
    assert answer["claims"]["requests_completed"] == 4
    assert answer["claims"]["requests_with_errors"] == 1
    assert answer["arms"]["finish_reasons"]["error"] == 1
    assert {"config", "commit", "versions", "hardware", "seconds"} <= answer.keys()


def test_an_interrupt_keeps_what_is_answered_and_says_how_to_go_on(batch, monkeypatch):
    step = batch_run.BatchRun._after_step

    def interrupt(self, on_step):
        step(self, on_step)
        if self.tally.completed >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(batch_run.BatchRun, "_after_step", interrupt)
    result, target = batch(prompts(12), "--max-num-seqs", "1")
    monkeypatch.undo()

    assert result.exit_code == 130
    assert "run the same command to resume" in result.stderr
    done = len(read_records(target))
    assert 3 <= done < 12

    batch(None, "--max-num-seqs", "1")
    assert len(read_records(target)) == 12


def test_answers_of_a_state_file_are_readable(batch):
    _, target = batch(prompts(1))

    state = json.loads(Path(f"{target}.state").read_text())
    assert state["input_lines"] == 1
    assert state["config"]["max_tokens"] == 6


def test_names_of_several_lines_are_warned_of_and_all_are_answered(batch):
    body = {"prompt": [3, 4], "max_tokens": 2}
    requested = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}

    result, target = batch(
        [*prompts(2), requested, {"id": "c", "prompt": [3]}, "{", requested, requested]
    )

    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: line 6 has the same custom_id 'c' as line 3; 1 more lines have a duplicate. "
        "All lines run; use `line` to distinguish their records"
    ]
    assert len(read_records(target)) == 7


def test_names_that_are_unique_are_not_warned_of(batch):
    result, _ = batch(prompts(4))

    assert "warning" not in result.stderr


def test_to_start_over_and_to_retry_exclude_each_other(batch):
    result, target = batch(prompts(1), "--overwrite", "--retry-failed")

    assert result.exit_code == 2
    assert "--retry-failed has no effect" in result.stderr
    assert not target.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_for_events_loses_no_record(batch):
    result, target = batch(prompts(3), "--kv-events", "/dev/full", "--json")

    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        "error: KV events cannot be written to /dev/full: No space left on device"
    )
    assert last_json(result)["claims"]["requests_completed"] == 3
    assert len(read_records(target)) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("in.jsonl", "out.jsonl"), "name the model first, as in quire batch quire-tiny in.jsonl"),
        (("in.jsonl",), ", got in.jsonl"),
        ((), ", got no arguments"),
    ],
)
def test_a_batch_without_its_model_is_refused_with_what_to_type(quire, tmp_path, given, said):
    result = quire("batch", *given)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: expected quire batch MODEL INPUT OUTPUT")
    assert said in result.stderr


def test_records_repeat_the_metadata_of_their_lines(batch):
    metadata = {"trace": "t-9"}
    lines = [
        {"id": "plain", "prompt": [2, 7, 9], "metadata": metadata},
        completion("openai", [2, 7, 9], metadata=metadata),
        {"id": "without", "prompt": [2, 7, 9]},
        {"id": "bad", "prompt": [2, 7, 9], "metadata": {"n": 1}},
    ]

    result, target = batch(lines)

    plain, openai, without, bad = sorted(read_records(target), key=lambda r: r["line"])
    assert result.exit_code == 1  # one line is refused
    assert plain["metadata"] == openai["response"]["body"]["metadata"] == metadata
    assert "metadata" not in without
    assert "expected metadata of texts" in bad["error"]
