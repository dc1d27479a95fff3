import math
import re
from dataclasses import replace

import pytest

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnknownName
from quire.evals.board.grid import BoardEntry, Grid, entries_of, read_grids
from quire.evals.board.pages import Speeds, chart, confirmed_lines, page
from quire.evals.board.result import BoardResult, best_of_classes, best_rules, judged_tasks, rows_of
from quire.evals.board.run import Board, BoardConfig, check_names
from quire.evals.suite.cells import CellResult, PromptResult
from quire.evals.suite.registry import task_of
from quire.evals.suite.sanity import FAILED, SKIPPED, Sanity

RULES = ("sinks", "kvcrush:base=(h2o)")
GRID = Grid(rules=RULES, budgets=("25%",), schedules=("decode",), codecs=("none",))
FULL, SINKS, KVCRUSH = GRID.entries()


def cell(task, scores, kv_bytes, seconds=2.0, metric="accuracy"):
    same = {"prompt_tokens": 90, "output_tokens": 10, "kv_peak_bytes": kv_bytes, "output": ""}
    prompts = tuple(
        PromptResult(scores={metric: float(score)}, depth=None, chance=0.0, **same)
        for score in scores
    )
    return CellResult(task=task, tokens=256, arm="", prompts=prompts, seconds=seconds)


def board(**refused):
    config = BoardConfig(entries=GRID.entries(), tasks=(task_of("lines"), task_of("labels")))
    cells = {
        FULL: [cell("lines", [1, 1, 1, 1], 1000), cell("labels", [1, 0, 0, 0], 1000)],
        SINKS: [cell("lines", [0, 1, 1, 1], 400), cell("labels", [1, 1, 1, 1], 400)],
        KVCRUSH: [cell("lines", [1, 1, 1, 1], 500), cell("labels", [0, 0, 0, 0], 500)],
    }
    return Board(config=config, cells=cells, refused=refused, sanity=SKIPPED)


def rows_by_entry(found):
    return {row.entry: row for row in rows_of(found)}


def board_of(task, cells):
    config = BoardConfig(entries=GRID.entries(), tasks=(task_of(task),))
    return Board(config=config, cells=cells, refused={}, sanity=SKIPPED)


def again(result):
    return BoardResult.stored({"arms": result.arms(), "config": result.options()})


def test_grid_has_full_kv_first_and_all_combinations_of_known_names():
    entries = Grid().entries()

    assert str(entries[0]) == "--kv-codec none --evict full"
    assert len(entries) == len(set(entries)) == 2 + 8 * 3 * 2 * 2
    assert SINKS.evict == "sinks:cap=25%,when=decode"
    assert KVCRUSH.evict == "kvcrush:base=(h2o),cap=25%,when=decode"
    applied = BoardEntry("sinks", "25%", "decode", "int8").applied(KVConfig(memory="8MiB"))
    assert (applied.codec, applied.memory) == ("int8", 8 << 20)
    check_names(Grid(rules=(*Grid().rules, "full")).entries())
    wrong = {"at least one task": {"tasks": ()}, "--num-prompts of 1 or more": {"count": 0}}
    for expected, options in (
        wrong | {"--seeds with different numbers": {"seeds": (1, 1)}}
    ).items():
        with pytest.raises(ConfigError, match=expected):
            BoardConfig(**{"entries": entries, "tasks": (task_of("lines"),)} | options)


def test_quality_is_over_the_tasks_that_full_kv_answers():
    rows = rows_by_entry(board())

    assert judged_tasks(board()) == ["lines"]
    assert rows[FULL].quality.mean == rows[KVCRUSH].quality.mean == 1.0
    assert rows[SINKS].quality.mean == 0.75
    assert rows[SINKS].quality.low < 0.75 < rows[SINKS].quality.high
    assert rows[SINKS].scores == {"lines": 0.75, "labels": 1.0}
    assert rows[SINKS].kv_share == 0.4
    assert rows[SINKS].tokens_per_s == 8 * 100 / 4.0
    assert [entry for entry, row in rows.items() if row.is_unbeaten] == [KVCRUSH, SINKS]
    assert [row.entry for row in best_rules([*rows.values()], 0.975)["25%"]] == [KVCRUSH]


def test_a_task_whose_sanity_check_failed_does_not_count():
    case = {"task": "lines", "tokens": 256, "full": 0.5, "evicted": 0.0, "passed": False}
    failed = Sanity(status=FAILED, reason="lines at 256 tokens", cases=(case,))
    found = replace(board(), sanity=failed)

    result = BoardResult.of(found)
    text = page(result, "quire-tiny", has_chart=False)

    assert judged_tasks(found) == []
    assert not any(row.is_unbeaten or "quality" in row.as_dict() for row in result.rows)
    assert again(result).rows == result.rows
    assert "**No task counts, so there is no quality and no Pareto-optimal entry: each" in text
    assert "0.5 with full KV (lines 1, labels 0.25) or failed the sanity check. Choose" in text
    assert "| `sinks` | 25% | decode | `none` | none |" in text
    assert "Rules that keep" not in text
    assert "yes |" not in text
    other = replace(failed, cases=({**case, "task": "kv"},))
    assert judged_tasks(replace(found, sanity=other)) == ["lines"]
    assert "**This model may not judge a rule**: lines at 256 tokens." in text


def test_page_has_every_row_and_says_whether_the_model_may_judge():
    result = BoardResult.of(board())

    text = page(result, "quire-tiny", has_chart=False)

    [share] = [f"{row.kv_share:.3f}" for row in result.rows if row.entry == KVCRUSH]
    assert "**This model may not judge a rule**" in text
    assert "| `sinks` | 25% | decode | `none` | 0.750" in text
    first = r"\* Cap 25% of the prompt: `kvcrush:base=\(h2o\)` \(decode, none\) 1.000 \(0.[34]"
    assert re.search(rf"{first}\d\d to 1.000\), KV {share}\n", text)
    assert "at or above 0.975, which needs at least 146 prompts in all tasks together" in text
    assert "Here none has." in text
    assert re.search(r"\| `full` \|.*\| 1.000 \(1.000 to 1.000\)", text)
    listed = text.partition("start:classes] -->\n")[2].partition("<!-- --8<-- [end:classes]")[0]
    rows = [line for line in listed.splitlines() if line.startswith("| at most")]
    assert [[line.split(" | ")[i] for i in (0, 2, 3, -1)] for line in rows] == [
        ["| at most 0.55", f"`--kv-codec none --evict '{KVCRUSH.evict}'`", "2.0 times", "yes |"],
        ["| at most 0.55", f"`--kv-codec none --evict {SINKS.evict}`", "2.5 times", "yes |"],
    ]
    assert "on 1 task of 20 prompts" in listed  # the page of the guide has only this part
    assert again(result).rows[0] == result.rows[0]
    assert chart(result).startswith(b"<?xml")


@pytest.mark.parametrize(
    ("schedule", "before", "expected"),
    [
        ("prefill_end", None, "the context is evicted before the question"),
        ("prefill_end", False, "show no loss there"),
        ("decode", True, "Every rule evicts the context before the question"),
        ("decode", None, ""),
    ],
)
def test_page_says_whether_the_question_is_evicted(schedule, before, expected):
    found = BoardResult.of(board())
    rows = [replace(r, entry=replace(r.entry, schedule=schedule)) for r in found.rows]

    found = replace(found, rows=rows, evict_before_question=before)
    text = page(found, "quire-tiny", has_chart=False)

    assert expected in text
    assert ("question" in text) == bool(expected)


def test_an_entry_that_lacks_a_confirmed_length_has_none_there():
    result = BoardResult.of(board())
    rows = {row.entry: row for row in result.rows}
    second = replace(result, rows=[rows[FULL], rows[SINKS]])

    lines = list(confirmed_lines([second, result]))
    speeds = Speeds(ratios={str(SINKS): (1.5, 1.25, 2.0)}, about="Tokens/s: of a run.")
    text = page(result, "m", has_chart=False, confirmed=[second], speeds=speeds)

    assert "At 256 tokens, quality is over lines only." in lines  # not over labels
    head = "| quality over full KV | with new prompts | tokens/s over full KV (lowest to highest) |"
    assert f"{head} Pareto |\n" in text
    assert "bytes. Tokens/s: of a run.\n" in text
    assert re.search(r"kvcrush.* \| none \| none \| yes \|\n", text)
    assert re.search(r"sinks.* \| 1.50 \(1.25 to 2.00\) \| yes \|\n", text)
    quality = f"{rows[SINKS].quality.mean:.3f}"
    [found] = [line for line in lines if "`sinks`" in line]
    [missing] = [line for line in lines if "kvcrush" in line]
    assert found.count(quality) == 2
    assert "| not run |" in missing


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rules": ("h2o", "snapkv:windw=4")}, "option of policy 'snapkv' 'windw'"),
        ({"rules": ("h2o", "snapk")}, "eviction policy 'snapk': did you mean snapkv"),
        ({"codecs": ("none", "int9")}, "codec 'int9'"),
        (
            {"schedules": ("decode", "prefil_end")},
            "--schedules 'prefil_end': did you mean prefill_",
        ),
        *(({name: ()}, f"--{name} has no values") for name in ("budgets", "schedules", "codecs")),
        *(
            ({"budgets": (budget,)}, "--budgets as fractions of the prompt such as 25%, got")
            for budget in ("25", "0.25", "%", "25 %")
        ),
    ],
)
def test_values_of_a_grid_are_refused_before_anything_runs(values, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        check_names(Grid(**values).entries())


ONE_GRID = """
[[grid]]
rules = ["snapkv", "keydiff"]
budgets = ["50%"]
schedules = ["prefill_end"]
codecs = ["none"]
"""
OTHER_GRID = ONE_GRID.replace('"snapkv", ', "").replace('"none"', '"none", "int8"')


def test_grids_of_a_file_give_each_entry_once_with_full_kv_first(tmp_path):
    file = tmp_path / "grids.toml"
    file.write_text(ONE_GRID + OTHER_GRID)

    found = [(entry.rule, entry.codec) for entry in entries_of(*read_grids(file))]

    assert found[:2] == [("full", "none"), ("full", "int8")]
    assert sorted(found[2:]) == [("keydiff", "int8"), ("keydiff", "none"), ("snapkv", "none")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tables .*, got none"),
        ("grid = [1, 2]", "tables .*, got none"),
        ("[[grid]]\n[grids]", "table in .* 'grids': did you mean grid"),
        ("[[grid]]\nrule = ['h2o']", "'rule': did you mean rules"),
        ("[[grid]]\nrules = 'h2o'", "expected rules in .* as a list of texts, got 'h2o'"),
        ("[[grid]]\nbudgets = ['25']", "fractions of the prompt"),
        ("[[grid", "cannot read --grids"),
    ],
)
def test_an_invalid_file_of_grids_is_refused(text, message, tmp_path):
    file = tmp_path / "grids.toml"
    file.write_text(text)
    with pytest.raises((ConfigError, UnknownName), match=message):
        read_grids(file)


def test_bytes_with_a_shared_prefill_are_those_of_the_measured_prompts():
    """Full KV has 1,000 and 500 bytes; a rule was measured on the second task's prompts only."""
    found, full = board(), [cell("lines", [1, 1], 1000), cell("labels", [1, 1], 500)]
    hidden = [replace(one, kv_peak_bytes=None) for one in cell("lines", [1, 1], 1).prompts]
    shared = [replace(cell("lines", [1, 1], 1), prompts=tuple(hidden)), cell("labels", [1, 1], 200)]
    config = replace(found.config, shares_prefill=True)
    found = replace(found, config=config, cells={FULL: full, SINKS: shared})
    rows = rows_by_entry(found)

    assert rows[SINKS].kv_share == 0.4
    assert rows[SINKS].kv_peak_bytes == 0.4 * 750
    assert rows[SINKS].tokens_per_s is None
    assert rows[FULL].tokens_per_s is not None
    known = replace(found, cells={FULL: full, SINKS: full})  # as with one prompt of each task
    assert rows_by_entry(known)[SINKS].tokens_per_s is None
    text = page(BoardResult.of(found), "m", has_chart=False)
    assert "tokens/s" not in text.lower()
    assert "shared the prefill of a prompt. KV is that of the first prompt of each task" in text


def test_quality_is_over_full_kv_and_the_first_of_equal_bytes_the_reference():
    worse, full = math.log(4), math.log(2)  # probabilities of 1/4 and 1/2
    cells = {
        FULL: [cell("perplexity", [full, full], 1000, metric="nll")],
        SINKS: [cell("perplexity", [worse, full], 400, metric="nll")],
    }
    means = {e: row.quality.mean for e, row in rows_by_entry(board_of("perplexity", cells)).items()}
    assert means == pytest.approx({FULL: 1.0, SINKS: 0.75})

    # equal probabilities of 0.02: the ratio is 1 in each of the resampled sets of prompts
    small = cell("perplexity", [-math.log(0.02)] * 9 + [-math.log(0.021)], 400, metric="nll")
    cells = {FULL: [small], SINKS: [replace(small, arm="other")]}
    found = rows_by_entry(board_of("perplexity", cells))[SINKS].quality
    assert found.low < 1 < found.high

    other = BoardEntry("full", "", "", "fp8")
    cells = {FULL: [cell("lines", [1, 0, 1], 9)], other: [cell("lines", [1, 1, 1], 9)]}
    result = BoardResult.of(board_of("lines", cells))
    assert result.rows[0].entry == other
    assert result.reference.entry == FULL
    assert again(result).rows == result.rows


@pytest.mark.parametrize(("tokens", "count", "shown"), [(100, 10, False), (4096, 71, True)])
def test_page_says_how_far_windows_of_one_text_overlap(tokens, count, shown):
    found = replace(BoardResult.of(board()), tasks=("perplexity",), tokens=tokens, count=count)
    lines = "\n".join(confirmed_lines([replace(found, seeds=(1,))]))
    assert ("share 85% (4,096 tokens): they are not independent" in lines) == shown
    rows = [replace(row, scores={"perplexity": 0.03512}) for row in found.rows]
    text = page(replace(found, rows=rows), "m", has_chart=False)
    assert "That of perplexity is the mean probability of a token." in text
    assert re.search(r"\| `sinks` \|.*\| 0\.0351 \|", text)


def one_rule(schedule="decode", kv_share=0.4, codec="none", is_shared=False):
    first, *_ = BoardResult.of(board()).rows
    entry = BoardEntry("full", "", "", codec)
    if schedule:
        entry = BoardEntry("sinks", "25%", schedule, codec)
    speed = None if is_shared else 1.0
    return replace(first, entry=entry, is_reference=False, kv_share=kv_share, tokens_per_s=speed)


@pytest.mark.parametrize(
    ("row", "before", "said", "explained"),
    [
        ({"schedule": "decode"}, None, "With `decode` the first output token is that of", True),
        ({"schedule": "decode"}, False, "With `decode` the first output token is that of", True),
        ({"schedule": "decode"}, True, "With `decode` the first output token is that of", False),
        ({"schedule": "prefill_end"}, None, "With `decode` the first output token is", False),
        ({"kv_share": 2.06}, None, "A KV above 1 is more than full KV's: ", True),
        ({"kv_share": 2.06}, None, "KV 2.060, more than full KV's", True),
        ({"kv_share": 0.4}, None, "A KV above 1 is more than full KV's: ", False),
        ({"is_shared": True}, None, "KV is that of the first prompt of each task", True),
        ({"is_shared": False}, None, "KV is that of the first prompt of each task", False),
        ({"schedule": "", "codec": "int8"}, None, "* No eviction: `int8` 1.000", True),
        ({"schedule": "decode", "codec": "int8"}, None, "* No eviction: none", True),
    ],
)
def test_page_explains_the_figures_that_it_has(row, before, said, explained):
    result = BoardResult.of(board())
    rows = [result.reference, one_rule(**row)]
    text = page(replace(result, rows=rows, evict_before_question=before), "m", has_chart=False)
    assert (said in text) == explained


def test_the_best_entries_of_each_class_of_bytes_are_confirmed():
    first = rows_of(board())[0]
    shares = {"a": 0.2, "b": 0.3, "c": 0.31, "d": 0.5, "e": 0.9}
    rows = []
    for name, share in shares.items():
        quality = replace(first.quality, mean=share if name != "a" else 0.5)
        entry = BoardEntry(name, "25%", "decode", "none")
        rows.append(replace(first, entry=entry, kv_share=share, quality=quality))
    assert [entry.rule for entry in best_of_classes(rows, 1)] == ["a", "d"]
    assert [entry.rule for entry in best_of_classes(rows, 2)] == ["a", "b", "d", "c"]
