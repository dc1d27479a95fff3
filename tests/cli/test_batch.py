"""`quire batch` on a random model: every line has exactly one record, also after SIGKILL."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from quire.cli import batch_run
from quire.cli.progress import LiveProgress
from support import zoo
from support.command_line import last_json, read_records, write_lines
from support.forking import Program

OPTIONS = ("--kv-memory", "64KiB", "--max-tokens", "6", "--no-verify")
BAD = [
    "{",
    '{"prompt": [1, 2], "temperature": NaN}',
    r'{"prompt": [1, 2], "metadata": {"\ud800": "a"}}',
    {"prompt": [1, 2], "logit_bias": {"9" * 5_000: 1}},
    '{"prompt": [1, 2], "seed": ' + "9" * 400 + "}",
    *({"prompt": []}, {"prompt": [1, 999]}, {"prompt": [1], "max_token": 3}),
    {"prompt": "text, but there is no tokenizer"},
    {"prompt": [5] * 600},  # more than the context
    {"prompt": [5] * 300},  # more KV than the memory holds
]


def prompts(count: int) -> list[object]:
    return [{"id": f"p{i}", "prompt": [2 + i % 100, 7, 9]} for i in range(count)]


def words(result) -> str:
    """Standard error, where a terminal breaks no line."""
    return " ".join(result.stderr.split())


def by_line(target: Path) -> dict[int, dict]:
    return {record["line"]: record for record in read_records(target)}


@pytest.fixture
def batch(quire, zoo_folder: Path, tmp_path: Path):
    """Run lines with their records in tmp_path/out.jsonl."""

    def run(lines: list[object] | None, *arguments: object):
        source = tmp_path / "in.jsonl"
        if lines is not None:
            write_lines(source, lines)
        target = tmp_path / "out.jsonl"
        result = quire("batch", zoo_folder, source, target, *OPTIONS, *arguments)
        return result, target

    return run


def test_every_line_has_one_record(batch):
    result, target = batch(prompts(20), "--max-num-seqs", "2")

    records = read_records(target)
    assert result.exit_code == 0, result.output
    assert sorted(record["line"] for record in records) == list(range(1, 21))
    assert {record["id"] for record in records} == {f"p{i}" for i in range(20)}
    assert all(record["error"] is None for record in records)
    assert all(record["usage"]["completion_tokens"] <= 6 for record in records)
    assert "warning" not in result.stderr  # as no id is there twice
    assert "nothing to do: every line has a record" in batch(None, "--max-num-seqs", "2")[0].stderr
    empty, _ = batch([""], "--overwrite")
    assert (empty.exit_code, "in.jsonl has no requests" in empty.stderr) == (0, True)


def openai_line(name: str, **body: object) -> object:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def completion(name: str, prompt: object, **body: object) -> object:
    return openai_line(name, prompt=prompt, seed=3, temperature=1.0, n=2, **body)


def test_line_with_several_prompts_has_one_record_with_all_choices(batch):
    token_ids = [[2, 7, 9], [3, 7, 9], [4, 7, 9]]
    alone = [completion(str(i), prompt) for i, prompt in enumerate(token_ids)]

    result, target = batch([*alone, completion("all", token_ids)])

    assert result.exit_code == 0, result.output
    bodies = {r["custom_id"]: r["response"]["body"] for r in read_records(target)}
    *single, several = (bodies[name] for name in ("0", "1", "2", "all"))
    texts = [choice["text"] for body in single for choice in body["choices"]]
    assert [choice["text"] for choice in several["choices"]] == texts
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert several["usage"][count] == sum(body["usage"][count] for body in single)
    lines = [completion("a", [[1, 2], [1, 999]]), completion("b", [[1]] * 1_025)]
    result, target = batch(lines, "--overwrite")
    assert result.exit_code == 1  # one refused prompt refuses its line
    errors = {r["custom_id"]: r["error"]["message"] for r in read_records(target)}
    assert "token ids" in errors["a"]
    assert "1025 prompts x 2 outputs" in errors["b"]


def test_invalid_lines_have_error_records_and_the_others_run(batch):
    mixed = [line for pair in zip(prompts(len(BAD)), BAD, strict=True) for line in pair]

    result, target = batch(mixed)

    records = by_line(target)
    assert result.exit_code == 1
    errors = words(result)
    assert f"error records: {len(BAD)} of {2 * len(BAD)} lines, in {target}" in errors
    assert "first error: line 2: the line is not JSON: " in errors
    hint = r"correct (\d+) of them in the input; --retry-failed runs all again, .*with more memory"
    hinted = re.search(hint, errors)
    assert hinted is not None
    assert 0 < int(hinted[1]) < len(BAD)
    assert sorted(records) == list(range(1, 2 * len(BAD) + 1))
    for number, record in records.items():
        assert (record["error"] is None) == (number % 2 == 1), record


def test_correction_is_suggested_if_every_failed_line_is_invalid(batch):
    result, target = batch([*prompts(1), {"promt": [1]}, "{"])

    errors = words(result)
    assert result.exit_code == 1
    assert f"error records: 2 of 3 lines, in {target}" in errors
    assert "first error: line 2: " in errors
    assert "unknown field `promt`: did you mean `prompt`?" in errors
    assert "correct them in the input and use --retry-failed" in errors

    batch([{"promt": [1]}], "--overwrite")
    corrected, _ = batch([{"prompt": [1]}], "--retry-failed")
    assert corrected.exit_code == 0, corrected.output


def test_retry_failed_runs_only_the_failed_lines(batch):
    lines = [*prompts(3), {"id": "long", "prompt": [5] * 300}, "{"]
    _, target = batch(lines)
    never = "line 4 ('long') does not fit the KV memory: 300 prompt tokens and 6 to generate"
    assert by_line(target)[4]["error"].startswith(never)
    succeeded = [record for record in read_records(target) if record["error"] is None]

    options = ("--kv-memory", "512KiB", "--json")
    repeated, _ = batch(None, *options)
    assert repeated.exit_code == 1  # no line was retried
    claims = last_json(repeated)["claims"]
    assert (claims["requests_completed"], claims["requests_with_errors"]) == (0, 0)
    assert claims["requests_completed_before"] == 3
    assert claims["requests_with_errors_before"] == 2

    retried, _ = batch(None, "--retry-failed", *options)
    records = by_line(target)
    assert retried.exit_code == 1
    assert "error records: 1 of 5 lines" in retried.stderr
    claims = last_json(retried)["claims"]
    assert (claims["requests_completed"], claims["requests_with_errors"]) == (1, 1)
    assert claims["requests_completed_before"] == 3
    assert claims["requests_with_errors_before"] == 0
    assert records[4]["error"] is None
    assert "not JSON" in records[5]["error"]
    assert read_records(target)[:3] == succeeded
    assert len(read_records(target)) == 5

    batch([openai_line("c", prompt=[5] * 300, max_tokens=2)], "--overwrite")
    result, target = batch(None, "--retry-failed", "--kv-memory", "512KiB")
    assert result.exit_code == 0
    assert by_line(target)[1]["response"]["status_code"] == 200


def test_model_of_a_config_file_need_not_be_repeated(quire, zoo_folder: Path, tmp_path: Path):
    source, target = write_lines(tmp_path / "in.jsonl", prompts(2)), tmp_path / "out.jsonl"
    file = tmp_path / "c.toml"
    file.write_text(f"model = {json.dumps(str(zoo_folder))}\n")
    result = quire("batch", "--config", file, source, target, *OPTIONS)

    assert result.exit_code == 0, result.output
    assert len(read_records(target)) == 2
    assert quire("batch", "--config", file, source).exit_code == 2
    file.write_text("max_tokens = 3\n")
    assert "name the model first" in quire("batch", "--config", file, source, target).stderr


def test_summary_shows_evictions_recomputed_tokens_and_prefix_hits(batch):
    same = [[2 + i % 100 for i in range(40)], [3 + i % 100 for i in range(40)]]
    lines = [{"prompt": same[i % 2], "max_tokens": 60, "ignore_eos": True} for i in range(6)]
    names = ("evictions", "evicted_tokens", "recomputed_tokens", "cached_tokens")

    def found(*options: str) -> dict[str, int]:
        result, target = batch(lines, "--overwrite", "--json", *options)
        claims = last_json(result)["claims"]
        usages = [record["usage"] for record in read_records(target)]
        for name in names:
            assert claims[name] == sum(usage[name] for usage in usages)
        for text in ("evictions", "evicted", "recomputed", "in the prefix cache"):
            assert text in result.output
        return claims

    tight = ("--swap-space", "0", "--admission", "optimistic", "--no-enable-prefix-caching")
    recomputing = found(*tight)
    assert recomputing["recomputed_tokens"] > recomputing["cached_tokens"] == 0
    without = found("--kv-memory", "1MiB", "--evict", "recent:cap=4096")
    assert without["evictions"] == without["recomputed_tokens"] == 0 < without["cached_tokens"]
    evicting = found("--kv-memory", "1MiB", "--evict", "recent:cap=64,every=8")
    assert evicting["evicted_tokens"] > evicting["evictions"] > 0


def test_blank_lines_are_skipped_and_options_of_a_line_override_those_of_the_command(batch):
    result, target = batch(["", {"prompt": [3], "max_tokens": 2}, {"prompt": [3]}, "   ", ""])

    counts = {r["line"]: r["usage"]["completion_tokens"] for r in read_records(target)}
    assert counts == {2: 2, 3: 6}
    assert result.exit_code == 0


def test_sampled_outputs_of_a_resumed_run_equal_an_uninterrupted_run(batch):
    _, target = batch(prompts(8), "--temperature", "1.5")
    expected = {n: (r["text"], r["usage"]["completion_tokens"]) for n, r in by_line(target).items()}
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:3]) + lines[3][:-9])

    batch(None, "--temperature", "1.5", "--kv-memory", "512KiB", "--max-num-seqs", "3")

    resumed = {n: (r["text"], r["usage"]["completion_tokens"]) for n, r in by_line(target).items()}
    assert resumed == expected
    assert len(read_records(target)) == 8


def test_other_input_or_options_are_refused_without_overwrite(batch):
    _, target = batch(prompts(3))
    before = target.read_bytes()

    for arguments in ((), ("--retry-failed",)):
        refused, _ = batch(prompts(7)[3:], *arguments)
        assert refused.exit_code == 2
        assert "another input" in refused.stderr
    refused, _ = batch(prompts(4)[1:])
    assert refused.exit_code == 2
    assert "1 of 3 records belong to lines that were changed or removed" in words(refused)
    assert "--retry-failed discards" in words(refused)
    refused, _ = batch(prompts(3), "--temperature", "1")
    assert refused.exit_code == 2
    assert "temperature: None before, 1.0 now" in refused.stderr
    refused, _ = batch(prompts(3), "--sparse", "quest:budget=10%")
    assert "sparse: None before, 'quest:budget=10%' now" in words(refused)
    assert target.read_bytes() == before

    result, _ = batch(prompts(7)[3:], "--overwrite")
    assert result.exit_code == 0
    assert len(read_records(target)) == 4


def test_added_lines_run_and_the_others_keep_their_records(batch):
    def texts(target: Path) -> dict[str, str]:
        return {record["id"]: record["text"] for record in read_records(target)}

    _, target = batch(prompts(3), "--temperature", "1.5")
    first = target.read_bytes(), texts(target)

    appended, _ = batch(prompts(5), "--temperature", "1.5")
    second = target.read_bytes(), texts(target)
    inserted, _ = batch(["", *prompts(6)[::-1]], "--temperature", "1.5")

    assert (appended.exit_code, inserted.exit_code) == (0, 0)
    assert second[0].startswith(first[0])
    assert texts(target).items() >= second[1].items() >= first[1].items()
    lines = {record["id"]: record["line"] for record in read_records(target)}
    assert lines == {f"p{number}": 7 - number for number in range(6)}
    again, _ = batch(None, "--temperature", "1.5")
    assert "nothing to do" in again.stderr

    # ids of moved lines stay; a mark of the byte order, and an id that is no name
    texts = [json.dumps(line) for line in ({"id": "q", "prompt": [5]}, {"id": True, "prompt": [6]})]
    batch(["\ufeff" + texts[0], texts[1]], "--overwrite")
    result, _ = batch([{"id": "new", "prompt": [7]}, *texts])
    assert "2 of 2 records are kept" in words(result)
    ids = {record["line"]: record["id"] for record in read_records(target)}
    assert ids == {1: "new", 2: "q", 3: "line-3"}


def test_retry_failed_runs_corrected_and_new_lines_and_the_others_keep_their_records(batch):
    unnamed = {"prompt": [9, 9]}
    lines = [*prompts(3), unnamed, openai_line("c", prompt=[3]), {"id": "x", "promt": [1]}, unnamed]
    result, target = batch([*lines, {"id": "line-8", "prompt": [8]}], "--temperature", "1.5")
    assert "correct them in the input" in words(result)
    before = by_line(target)

    edited = [*prompts(2), {"id": "new", "prompt": [4]}, {"id": "new", "prompt": [5]}, *lines[3:5]]
    edited += [{"id": "x", "prompt": [1]}, unnamed, {"id": "line-8", "prompt": [8]}]
    result, _ = batch(edited, "--retry-failed", "--temperature", "1.5", "--json")

    assert result.exit_code == 0, result.output
    assert "6 of 8 records are kept; 2 of changed or removed lines are discarded" in words(result)
    claims = last_json(result)["claims"]
    assert (claims["requests_completed"], claims["requests_completed_before"]) == (3, 6)
    after = by_line(target)
    assert sorted(after) == list(range(1, 10))
    ids = [after[line]["id"] for line in sorted(after)]
    assert ids == [*("p0", "p1", "new", "new", "line-5", "batch_req_6"), *("x", "line-8", "line-8")]
    for old, new in ((1, 1), (2, 2), (4, 5), (7, 8), (8, 9)):
        assert after[new]["text"] == before[old]["text"]
    assert after[6]["response"]["body"]["choices"] == before[5]["response"]["body"]["choices"]
    assert after[6]["response"]["body"]["id"] == "cmpl-6"


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl", "out.jsonl.state", "link.jsonl"])
@pytest.mark.parametrize("is_there", [False, True])
def test_kv_events_into_an_input_or_output_file_are_refused(
    quire, zoo_folder, tmp_path, name, is_there
):
    source, target = write_lines(tmp_path / "in.jsonl", prompts(2)), tmp_path / "out.jsonl"
    (tmp_path / "link.jsonl").symlink_to(target)
    if is_there:
        quire("batch", zoo_folder, source, target, *OPTIONS)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.exists()}

    events = ("--kv-events", tmp_path / name)
    result = quire("batch", zoo_folder, source, target, "--overwrite", *events)

    assert result.exit_code == 2
    assert "give another file to --kv-events" in words(result)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.exists()} == before


def test_lines_share_kv_only_with_equal_cache_salt(batch, tmp_path: Path):
    prompt = list(range(2, 2 + 64))
    lines = [{"prompt": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]

    events = tmp_path / "events.jsonl"
    batch(lines, "--max-num-seqs", "1", "--kv-memory", "1MiB", "--kv-events", events)

    cached = [e["cached_tokens"] for e in read_records(events) if e["kind"] == "admitted"]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("nowhere.jsonl", "out.jsonl", "error: "),
        (".", "out.jsonl", "error: "),
        ("in.jsonl", "nowhere/out.jsonl", "cannot be written"),
        ("in.jsonl", "in.jsonl", "error: "),
    ],
)
def test_files_that_cannot_be_used_are_refused(quire, tmp_path: Path, source, target, message):
    before = write_lines(tmp_path / "in.jsonl", prompts(1)).read_bytes()

    line = ("batch", "quire-tiny", tmp_path / source, tmp_path / target, "--overwrite")
    result = quire(*line)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert target == "in.jsonl" or not (tmp_path / target).exists()
    assert (tmp_path / "in.jsonl").read_bytes() == before


def test_data_rows_use_the_prompt_key(batch):
    rows = [{"tokens": [3, 4], "answer": "x", "max_tokens": "not an option"}]

    _, target = batch(rows, "--prompt-key", "tokens", "--with-prompt")

    (record,) = read_records(target)
    assert (record["error"], record["prompt"]) == (None, [3, 4])


def test_text_prompt_gets_the_prefix_and_chat_the_template(quire, tmp_path: Path):
    lines = [{"question": "The king", "answer": "?"}, {"question": "The queen"}]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    quick = ("--kv-memory", "2MiB", "--no-verify", "--max-tokens", "4", "--dtype", "float32")

    keys = ("--prompt-key", "question", "--prefix", "<|doc|>")
    quire("batch", "quire-tiny", source, target, *keys, *quick)

    chat = {"messages": [{"role": "user", "content": "The king"}]}  # the template adds <|doc|>
    write_lines(source, [chat, {"prompt": "<|doc|>The queen"}])
    by_template = tmp_path / "chat.jsonl"
    quire("batch", "quire-tiny", source, by_template, *quick)
    texts = [{r["line"]: r["text"] for r in read_records(path)} for path in (target, by_template)]
    assert texts[0] == texts[1]
    assert texts[0][1]


def test_number_of_submitted_lines_is_bounded(batch, monkeypatch):
    waiting = []
    monkeypatch.setattr(batch_run, "WINDOW_PER_RUNNING", 2)

    def record(progress, num_done, read_stats):
        stats = read_stats()
        waiting.append(stats.num_running + stats.num_waiting)

    monkeypatch.setattr(LiveProgress, "show", record)

    result, target = batch(prompts(40), "--max-num-seqs", "3")

    assert result.exit_code == 0
    assert len(read_records(target)) == 40
    assert max(waiting) <= 6


def test_interrupt_keeps_records_and_explains_how_to_resume(batch, monkeypatch):
    def interrupt(progress, num_done, read_stats):
        if num_done >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(LiveProgress, "show", interrupt)
    result, target = batch(prompts(12), "--max-num-seqs", "1")
    monkeypatch.undo()

    assert result.exit_code == 130
    assert "run the same command to resume" in result.stderr
    num_records = len(read_records(target))
    assert 3 <= num_records < 12

    batch(None, "--max-num-seqs", "1")
    assert len(read_records(target)) == 12


def test_duplicate_ids_and_other_models_are_warned_about_and_all_lines_run(batch):
    line = openai_line("c", prompt=[3, 4], max_tokens=2)

    result, target = batch([*prompts(2), line, {"id": "c", "prompt": [3]}, "{", line, line])

    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: line 6 has the same custom_id 'c' as line 3; 1 more lines have a duplicate. "
        "All lines run; use `line` to distinguish their records"
    ]
    assert len(read_records(target)) == 7

    models, body = {"a": "gpt-x", "b": "gpt-y", "c": "gpt-x"}, {"prompt": [3, 4], "max_tokens": 2}
    lines = [openai_line(name, model=model, **body) for name, model in models.items()]
    result, target = batch(lines, "--overwrite")
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: line 1 names model 'gpt-x', but ")
    assert warning.endswith(" runs all lines; 1 more names in other lines")
    assert [record["error"] for record in read_records(target)] == [None] * 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_for_events_keeps_all_records(batch):
    result, target = batch(prompts(3), "--kv-events", "/dev/full", "--json")

    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: KV events cannot be written to /dev/full: No space left on dev")
    assert last_json(result)["claims"]["requests_completed"] == 3
    assert len(read_records(target)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("in.jsonl", "out.jsonl"), "name the model first, as in quire batch quire-tiny in.jsonl"),
        (("in.jsonl",), ", got in.jsonl"),
        ((), ", got no arguments"),
    ],
)
def test_batch_without_a_model_is_refused_with_the_usage(quire, tmp_path, arguments, message):
    result = quire("batch", *arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: expected quire batch MODEL INPUT OUTPUT")
    assert message in result.stderr
    both = quire("batch", "m", "in.jsonl", tmp_path / "o", "--overwrite", "--retry-failed")
    assert (both.exit_code, "--retry-failed has no effect" in both.stderr) == (2, True)


def test_records_include_the_metadata_of_their_lines(batch):
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
    assert "expected metadata with string values" in bad["error"]


# ---- killed batches ------------------------------------------------------------------------------


KILLS = 6
NUM_LINES = 80
INVALID_EVERY = 40
DONE = 1  # exit status of a complete run with invalid lines


def run(*arguments: object, call: int | None = None) -> tuple[int, int | None]:
    """The exit status of `quire batch`, and its number of calls unless it was killed at one."""
    program = Program("support.forking:run_batch_until", call, *map(str, arguments))
    with closing(program):
        printed = program.stdout.read().split()
        return program.wait(), int(printed[-1]) if printed else None


def requests() -> list[object]:
    lines: list[object] = [
        {"prompt": [2 + i % 120, 7, 9 + i % 11], "max_tokens": 4 + i % 12, "temperature": 1.0}
        for i in range(NUM_LINES)
    ]
    lines[INVALID_EVERY - 1 :: INVALID_EVERY] = ["{"] * (NUM_LINES // INVALID_EVERY)
    return lines


def outputs_by_line(path: Path) -> dict[int, tuple[object, ...]]:
    records = read_records(path)
    names, counts = ("id", "text", "finish_reason", "error"), ("prompt_tokens", "completion_tokens")
    outputs = {
        r["line"]: (*(r[name] for name in names), *((r["usage"] or {}).get(n) for n in counts))
        for r in records
    }
    assert len(outputs) == len(records), "a line has two records"
    return outputs


@pytest.mark.slow
def test_batch_killed_at_any_time_writes_every_result_once(tmp_path: Path):
    rng = random.Random(2026)
    model = zoo.save("llama", tmp_path / "model")
    source = write_lines(tmp_path / "in.jsonl", requests())
    options = ("--kv-memory=32KiB", "--max-num-seqs=4", "--seed=11", "--no-verify")
    uninterrupted, target = tmp_path / "uninterrupted.jsonl", tmp_path / "out.jsonl"

    status, num_calls = run(model, source, uninterrupted, *options)
    assert status == DONE

    sizes, part = set(), num_calls // 7
    for number in range(KILLS):  # while it starts, and after more was written
        call = rng.randrange(part) + (part if number % 3 else 0)
        status, _ = run(model, source, target, *options, call=1 + call)
        size = target.stat().st_size if target.exists() else 0
        sizes.add(size)
        assert status == -signal.SIGKILL
        if size and rng.random() < 0.5:  # simulates a machine failure during a write
            os.truncate(target, rng.randrange(max(0, size - 300), size))

    assert run(model, source, target, *options)[0] == DONE
    assert outputs_by_line(target) == outputs_by_line(uninterrupted)
    assert outputs_by_line(target).keys() == set(range(1, NUM_LINES + 1))
    assert len(sizes - {0}) >= 3, "too few kills occurred during the run"


@pytest.mark.slow
def test_installed_program_completes_after_a_kill(tmp_path: Path):
    program = Path(sys.executable).with_name("quire")
    if not program.is_file():
        pytest.skip("quire is not installed here as a script")
    model = zoo.save("llama", tmp_path / "model")
    source, target = write_lines(tmp_path / "in.jsonl", requests()), tmp_path / "out.jsonl"
    command = [program, "batch", model, source, target, "--kv-memory", "32KiB"]
    command += ["--max-num-seqs", "2", "--threads", "1"]

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (target.exists() and target.stat().st_size) and first.poll() is None:
        time.sleep(0.01)
    first.kill()
    first.wait()
    second = subprocess.run(command, capture_output=True)

    assert second.returncode == DONE, second.stderr
    assert outputs_by_line(target).keys() == set(range(1, NUM_LINES + 1))
