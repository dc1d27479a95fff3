import json
import re

import pytest

from docs import board_page

LINE = """board quire-tiny --kv-memory 8MiB --tasks repeats --num-prompts 3 --seeds 1 --tokens 200
    --no-sanity-check --json --no-share-prefill"""
GRID = "--rules sinks;kvcrush_openvino --budgets 50% --schedules prefill_end --codecs none"
SMALL = [*LINE.split(), *GRID.split()]


def last_line(run):
    return json.loads(run.stdout.splitlines()[-1], parse_constant=pytest.fail)  # no Infinity


def page_of(folder):
    return (folder / "board.md").read_text(encoding="utf-8")


def test_a_run_resumes_and_reports_what_is_refused(quire, tmp_path):
    first = quire(*SMALL, "--out", tmp_path)
    assert first.exit_code == 0, first.stderr
    again = quire(*SMALL, "--out", tmp_path)

    result = last_line(first)
    assert result["claims"]["entries"] == 2
    [why] = result["arms"]["refused"].values()
    assert "evicts whole pages or chunks, not single tokens" in why
    assert "Refused: 1, such as --kv-codec none --evict kvcrush_openvino:cap=50%" in first.stderr
    assert last_line(again)["arms"] == result["arms"]  # tokens/s too
    assert f"resumes: 2 of 3 results are stored in {tmp_path / 'cells'}\n" in again.stderr
    assert "resumes: " not in first.stderr
    assert {"board.md", "board.json"} <= {path.name for path in tmp_path.iterdir()}


def test_a_run_ends_at_its_time_limit_and_its_pages_say_so(quire, tmp_path):
    stopped = quire(*SMALL, "--out", tmp_path, "--time-limit", "0.001")

    result = last_line(stopped)
    assert (result["claims"]["entries"], result["arms"]["entries_left"]) == (1, 2)
    done = r"1/3 .*full: repeats, accuracy 1\.000, about \d:\d\d:\d\d left\n"
    assert re.search(done, stopped.stderr)
    assert "time limit: 1 of 3 entries are done" in stopped.stderr
    rules = ("--rules", "random;kvcrush_openvino;sinks", "--time-limit")
    assert quire(*SMALL, "--out", tmp_path, "--rules", "sinks").exit_code == 0
    stored = last_line(quire(*SMALL, "--out", tmp_path, *rules, "0.001"))
    assert {row["entry"]["rule"] for row in stored["arms"]["rows"]} == {"full", "sinks"}
    assert stored["arms"]["entries_left"] == 2  # the stored entry comes after those left out
    assert "**2 entries did not run before the time limit.**" in page_of(tmp_path)


def test_without_a_task_that_counts_there_is_no_quality(quire, tmp_path):
    """And without a rule that runs the exit code is 1."""
    tasks = ("--tasks", "arithmetic", "--rules", "kvcrush_openvino")
    run = quire(*SMALL, "--out", tmp_path, *tasks)

    result = last_line(run)
    assert run.exit_code == 1
    assert result["claims"] == {"entries": 1, "refused": 1, "sanity_check_passed": 0}
    assert "quality" not in result["arms"]["rows"][0]
    assert "Choose other tasks (--tasks), or shorter prompts (--tokens)" in run.stderr
    assert "Pareto-optimal of" not in run.stderr
    assert not (tmp_path / "board.svg").exists()


@pytest.mark.parametrize("command", ["board", "eval"])
def test_a_length_that_is_too_short_is_refused_before_the_sanity_check(quire, command, tmp_path):
    tasks = ("--tasks", "repeats,lines", "--tokens", "30", "--kv-memory", "8MiB")
    result = quire(command, "quire-tiny", *tasks, "--out", tmp_path)

    assert result.exit_code == 2
    assert re.search(r"into 30 tokens: expected --tokens of \d+ or more", result.stderr)
    assert "sanity check" not in result.stderr
    unsized = quire("board", "quire-tiny")
    assert unsized.exit_code == 2
    assert "quire board needs a KV memory of a fixed size" in unsized.stderr


def test_the_documents_get_page_chart_and_rows(quire, tmp_path):
    out, docs = tmp_path / "board", tmp_path / "docs"
    for folder in (out, docs / "images", docs / "results"):
        folder.mkdir(parents=True)
    run = quire(*SMALL, "--out", out)
    assert run.exit_code == 0, run.stderr

    board_page.main([str(out)], docs)

    page = (docs / "board-measured.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {board_page.HEADING} quire-tiny\n\n`bash runs/board.sh`")
    assert "8,388,608 B of KV memory" in page
    assert "](images/board.svg)" in page
    assert (docs / "images" / "board.svg").read_bytes() == (out / "board.svg").read_bytes()
    rows = json.loads((docs / "results" / "board.json").read_text(encoding="utf-8"))
    assert rows["arms"] == last_line(run)["arms"]


def test_the_documents_get_a_section_about_a_run_of_kvpress(tmp_path):
    stored, other = board_page.DOCS / "results" / "board.json", tmp_path / "kvpress.json"
    run = json.loads(stored.read_text(encoding="utf-8"))
    presses = {"versions": {"kvpress": "0.5"}, "left_out": {}, "pairs": []}
    other.write_text(json.dumps(run | {"arms": run["arms"] | {"presses": presses}}))
    for folder in ("images", "results"):
        (tmp_path / folder).mkdir()
    timed = "results/fixed_memory.json"
    (tmp_path / timed).write_bytes((board_page.DOCS / timed).read_bytes())

    board_page.main([str(stored), "--kvpress", str(other), "beside", "other work"], tmp_path)

    page = (tmp_path / "board-measured.md").read_text(encoding="utf-8")
    assert "\n## Presses of kvpress\n\n`bash runs/kvpress.sh`, commit" in page
    assert "another environment (kvpress 0.5)" in page
    assert "--evict 'recent:sinks=4,budget=(duo:scores=smollm2),cap=50%,when=prefill_end'`" in page
    assert "so `niah` is no new task for them." in page
    speeds = json.loads((tmp_path / timed).read_text(encoding="utf-8"))
    int8 = speeds["claims"]["--kv-codec int8 --evict full"]
    assert re.search(rf"\| `--kv-codec int8 --evict full` \|.*\| {int8:.2f} \(\d.\d\d to", page)
    rounds = speeds["config"]["rounds"]
    assert f"highest of {rounds} rounds (`bash runs/fixed_memory.sh`, commit " in page
    assert ". beside other work\n" in page
    copied = json.loads((tmp_path / "results" / "kvpress.json").read_text(encoding="utf-8"))
    assert copied["arms"]["presses"] == presses


def test_entries_read_few_pages_and_all_pages_give_the_outputs_of_full_kv(quire, tmp_path):
    rules = ("off", "quest:pages=6", "quest:pages=99")
    options = ("--rules", "sinks", "--sparse", ";".join(rules), "--tasks", "repeats,perplexity")
    line = [each for each in SMALL if each != "--no-share-prefill"]
    run = quire(*line, *options, "--tokens", "400", "--out", tmp_path)

    assert run.exit_code == 0, run.stderr
    rows = last_line(run)["arms"]["rows"]
    found = {(row["entry"]["rule"], row["entry"]["sparse"]): row["scores"] for row in rows}
    assert found.keys() == {(rule, sparse) for rule in ("full", "sinks") for sparse in rules}
    full = found["full", "off"]
    near = pytest.approx(full, rel=1e-3)  # from a cached prefix, in batches of other shapes
    assert found["full", "quest:pages=99"] == near != found["full", "quest:pages=6"]
    assert "| `full, quest:pages=6` | 100% |" in page_of(tmp_path)
    assert "--evict full --sparse quest:pages=6: perplexity" in run.stderr


def test_full_kv_shares_the_prefills_of_entries_that_read_few_pages(quire, tmp_path):
    rules = ("off", "quest:pages=6", "quest:pages=99")
    options = ("--rules", "", "--sparse", ";".join(rules), "--tasks", "quote,summary")
    line = [each for each in SMALL if each != "--no-share-prefill"]
    found = {}
    for sharing in ("--share-prefill", "--no-share-prefill"):
        run = quire(*line, *options, sharing, "--tokens", "400", "--out", tmp_path / sharing)
        assert run.exit_code == 0, run.stderr
        rows = last_line(run)["arms"]["rows"]
        found[sharing] = {
            row["entry"]["sparse"]: (row["kv_share"], *row["scores"].values()) for row in rows
        }
    shared, own = found.values()
    assert shared == {sparse: pytest.approx(row, rel=0.01) for sparse, row in own.items()}
    assert shared["quest:pages=99"][1:] == shared["off"][1:] != shared["quest:pages=6"][1:]
    assert shared["off"][0] == 1 < shared["quest:pages=99"][0], "bounds are part of the KV bytes"


@pytest.mark.slow
def test_the_best_entries_are_confirmed_with_more_prompts_and_other_lengths(quire, tmp_path):
    grids = tmp_path / "grids.toml"
    grids.write_text(
        "[[grid]]\nrules = ['recent:sinks=4', 'random']\nbudgets = ['50%']\n"
        "schedules = ['prefill_end']\ncodecs = ['none', 'int8']\n"
    )
    options = ("--grids", grids, "--share-prefill", "--confirm", "1", "--confirm-prompts", "4,3")
    command = (*LINE.split(), *options, "--confirm-tokens", "200,240", "--out", tmp_path)
    run = quire(*command)

    assert run.exit_code == 0, run.stderr
    arms = last_line(run)["arms"]
    configs = [one["config"] for one in arms["confirmed"]]
    assert [(one["tokens"], one["num_prompts"]) for one in configs] == [(200, 4), (240, 3)]
    assert {one["seeds"][0] for one in configs} == {2}  # new prompts
    best = {row["evict"] for one in arms["confirmed"] for row in one["arms"]["rows"]}
    assert "full" in best
    assert len(best) <= 4  # full KV, and one of each class of bytes
    page = page_of(tmp_path)
    assert "## Confirmed" in page
    assert "with 4, 3 prompts of 200, 240 tokens" in page
    assert last_line(quire(*command))["arms"] == arms


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--tasks", "arithmetic"), "--confirm at 1024 tokens: left out, no entry has a quality"),
        (
            ("--tasks", "perplexity", "--confirm-prompts", "9999999"),
            "tokens: expected a text of more",
        ),
    ],
)
def test_a_leaderboard_without_confirmed_entries_has_its_pages(quire, tmp_path, options, why):
    rules = ("--rules", "random", "--tasks", "repeats,perplexity")
    run = quire(*SMALL, *rules, "--confirm", "1", *options, "--out", tmp_path)
    assert run.exit_code == 0, run.stderr
    assert why in " ".join(run.stderr.split())
    assert last_line(run)["claims"]["entries"] == 2
    assert "## Confirmed" not in page_of(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--confirm", "-1"), "--confirm"),
        (("--quick",), "no effect with --quick: --rules, --budgets, --schedules, --codecs"),
        (("--grids", "no.toml"), "no effect with --grids: --rules, --budgets, --schedules, --cod"),
        (("--confirm", "0", "--confirm-tokens", "9"), "without --confirm: --confirm-tokens; leave"),
        (("--confirm-tokens", ""), "expected --confirm-tokens of 1 or more, got ''"),
        (("--confirm-tokens", "200,99999"), "--confirm-tokens of at most 4096, the model's"),
        (("--confirm-prompts", "0"), "expected --confirm-prompts of at least 1, one for each task"),
        (("--confirm-prompts", "9,9"), "one for each length of --confirm-tokens, got '9,9'"),
        (("--confirm-prompts", "many"), "expected --confirm-prompts as whole numbers"),
    ],
)
def test_invalid_options_are_refused_before_the_first_entry(quire, tmp_path, options, message):
    run = quire(*SMALL, "--confirm", "1", *options, "--out", tmp_path)
    assert run.exit_code == 2
    assert message in " ".join(run.stderr.split())
    assert not (tmp_path / "cells").exists()


@pytest.mark.slow
def test_rules_that_one_engine_cannot_serve_together_run_in_several(quire, tmp_path):
    """Re-rotated keys are stored before RoPE, and `kvzip` reads no tokens of residual codecs."""
    rules = ("--rules", "recent;streaming:sinks=4;kvzip", "--codecs", "none,int4+residual=16")
    run = quire(*SMALL, *rules, "--num-prompts", "2", "--share-prefill", "--out", tmp_path)

    assert run.exit_code == 0, run.stderr
    arms = last_line(run)["arms"]
    [why] = arms["refused"].values()
    assert "kvzip" in next(iter(arms["refused"]))
    assert "full precision" in why
    assert len(arms["rows"]) == 7


def test_bytes_without_eviction_are_those_of_an_engine_without_rules(quire, tmp_path):
    """`keydiff` keeps tokens by head, in pages of one head, which share no page's last slots."""
    rules = ("--rules", "keydiff", "--codecs", "none,int8", "--num-prompts", "2")
    shares = []
    for sharing in ("--share-prefill", "--no-share-prefill"):
        run = quire(*SMALL, *rules, sharing, "--out", tmp_path / sharing)
        assert run.exit_code == 0, run.stderr
        rows = last_line(run)["arms"]["rows"]
        shares.append({r["entry"]["codec"]: r["kv_share"] for r in rows if r["evict"] == "full"})
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)
