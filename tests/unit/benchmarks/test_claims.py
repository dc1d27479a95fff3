import json

import pytest

from benchmarks.claims.__main__ import main
from benchmarks.claims.registry import (
    figure_spans,
    read_registry,
    stated_figures,
    uncovered,
    unused_exemptions,
)
from quire.errors import ConfigError

REGISTRY = """
documents = ["page.md"]

[quick.short]
command = ["bash", "runs/speed.sh"]
duration_s = 1

[claim.speed]
document = "page.md"
sentence = "It takes {} of the time and {} MB."
stored = "docs/results/speed.json"
figures = ["claims/ratio", { keys = ["claims/kv_bytes"], scale = 1e-6 }]
script = "runs/speed.sh"
quick = "short"

[exempt."page.md"]
"a limit of 5 s" = "an option"
"""
PAGE = "# Page\n\nIt takes 0.36 of\nthe time and 75.5 MB. There is a limit of 5 s.\n"


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "docs/claims.toml").write_text(REGISTRY)
    (tmp_path / "page.md").write_text(PAGE)
    measure(tmp_path)
    script(tmp_path)
    return tmp_path


def measure(checkout, ratio=0.3557, kv_bytes=75_497_472):
    stored = {"claims": {"ratio": ratio, "kv_bytes": kv_bytes}}
    (checkout / "docs/results/speed.json").write_text(json.dumps(stored))


def script(checkout, ratio=0.3557, commands=""):
    printed = json.dumps({"claims": {"ratio": ratio, "kv_bytes": 75_497_472}})
    text = f"echo a table\n{commands}\necho '{printed}'\n"
    (checkout / "runs/speed.sh").write_text(text)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def rows_of(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_figures_that_agree_give_exit_code_0(checkout, capsys):
    assert main(["--json"], checkout) == 0

    found = rows_of(capsys)
    assert (found["compared"], found["disagree"]) == (4, 0)
    assert [row["stated"] for row in found["rows"]] == ["0.36", "75.5"] * 2
    assert found["rows"][0]["measured"] == 0.3557
    assert found["rows"][1]["measured"] == pytest.approx(75.497472)
    sources = [row["source"] for row in found["rows"][1:3]]
    assert sources == ["docs/results/speed.json", "bash runs/speed.sh"]


def test_changed_figure_of_a_sentence_is_found(checkout, capsys):
    edit(checkout / "page.md", "0.36", "0.35")

    assert main(["--stored"], checkout) == 1

    printed = capsys.readouterr()
    for text in ("page.md", "It takes {} of", "stated 0.35, measured 0.3557", "results/speed.json"):
        assert text in printed.err
    assert "NO" in printed.out
    assert "2 comparisons, 1 disagree" in printed.out


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        ("measured=0.5", "stated 0.36, measured 0.5; source: bash runs/speed.sh"),
        ("echo broken >&2; exit 3", "expected exit code 0, got 3: broken"),
        ("echo '[1]'; exit 0", "expected a JSON object as last line, got '[1]'"),
        ("echo '{}'; exit 0", "expected the key 'claims/ratio', no 'claims' in it"),
    ],
)
def test_quick_form_without_the_figure_is_found(checkout, capsys, commands, message):
    ratio = 0.5 if commands == "measured=0.5" else 0.3557
    script(checkout, ratio=ratio, commands=commands)
    assert main([], checkout) == 1
    assert message in capsys.readouterr().err
    assert main(["--stored"], checkout) == 0


@pytest.mark.parametrize(
    ("old", "new", "message", "code"),
    [
        ("It takes", "It took", "expected the sentence once, found it 0 times", 1),
        ("# Page", PAGE, "expected the sentence once, found it 2 times", 1),
        ("claims/ratio", "claims/ratios", "no 'ratios' in it", 1),
        ("claims/ratio", "claims", "expected a number at 'claims', got dict", 1),
        ("results/speed", "results/none", "none.json does not exist", 1),
        ('script = "runs/', 'script = "run/', "expected the script run/speed", 1),
        ('document = "page.md"', 'document = "p.md"', "No such file", 1),
        ("documents =", "documents", "after a key", 2),
        ('stored = "docs/results/speed.json"', "", "claim.speed.stored\n  Field required", 2),
        ("{} MB.", "MB.", "got 2 for 1", 2),
        ('quick = "short"', 'quick = "long"', "expected a quick form of ['short'], got 'long'", 2),
        ("scale = 1e-6", 'combine = "ratio"', "ratio got 1 keys", 2),
        ("scale = 1e-6", "factor = 1e-6", "factor\n  Extra inputs", 2),
    ],
)
def test_missing_sentence_result_or_script_is_found_and_a_wrong_registry_refused(
    checkout, capsys, old, new, message, code
):
    path = "page.md" if old in ("It takes", "# Page") else "docs/claims.toml"
    edit(checkout / path, old, new)
    assert main(["--stored"], checkout) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("combine", "expected"),
    [("ratio", 0.5), ("max", 4.0), ("min", 2.0), ("sum", 6.0), ("inverse", 1 / 6)],
)
def test_values_of_several_keys_are_combined(checkout, capsys, combine, expected):
    (checkout / "docs/results/speed.json").write_text('{"claims": {"ratio": 2, "kv": [4]}}')
    of = '{ keys = ["claims/kv_bytes"], scale = 1e-6 }'
    edit(checkout / "docs/claims.toml", " and {} MB.", "")
    edit(checkout / "docs/claims.toml", f'"claims/ratio", {of}', of)
    edit(checkout / "docs/claims.toml", "scale = 1e-6", f'combine = "{combine}"')
    edit(checkout / "docs/claims.toml", '"claims/kv_bytes"', '"claims/ratio", "claims/kv/0"')

    main(["--stored", "--json"], checkout)

    assert rows_of(capsys)["rows"][0]["measured"] == expected


def test_figure_of_the_results_log_is_found_by_its_sentence(checkout, capsys):
    edit(checkout / "docs/claims.toml", '"docs/results/speed.json"', '"docs/log.md"')
    edit(checkout / "docs/claims.toml", "claims/ratio", "measured {} of it")
    edit(checkout / "docs/claims.toml", "claims/kv_bytes", "peak {} B")
    (checkout / "docs/log.md").write_text("We measured 0.357 of it, peak 75,497,472 B.")
    assert main(["--stored"], checkout) == 0

    edit(checkout / "docs/log.md", "0.357", "0.4")
    assert main(["--stored"], checkout) == 1
    assert "stated 0.36, measured 0.4; source: docs/log.md" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stated", "agreeing", "other"),
    [("0.36", 0.3551, 0.3549), ("1,024", 1024.4, 1025), ("-0.6", -0.61, -0.66), ("2", 2.4, 2.6)],
)
def test_stated_figure_agrees_if_the_value_rounds_to_it(stated, agreeing, other):
    [figure] = stated_figures(f"a {stated} b", "a {} b")
    assert figure.agrees(agreeing)
    assert not figure.agrees(other)


def test_figures_are_read_whole_and_found_without_claim_and_exemption(checkout):
    [figure] = stated_figures("takes 10.36 s, then 0.36 s", "then {} s")
    assert (figure.text, figure.value) == ("0.36", 0.36)
    with pytest.raises(ConfigError, match="0 times"):
        stated_figures("reads 1.75 MB", "reads 1.{}5 MB, or")
    with pytest.raises(ConfigError, match="0 times"):
        stated_figures("it takes 0.361", "it takes 0.3{}1 s")

    registry = read_registry(checkout / "docs/claims.toml")
    assert list(uncovered(registry, checkout)) == []

    page = checkout / "page.md"
    page.write_text(PAGE + "\nIt is 3 times as fast.\n\n| a | 0.52 |\n")
    found = list(uncovered(registry, checkout))
    assert found == ["page.md:6: It is 3 times as fast.", "page.md:8: | a | 0.52 |"]

    page.write_text(PAGE.replace(" There is a limit of 5 s.", ""))
    assert unused_exemptions(registry, checkout) == ["page.md: a limit of 5 s"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((1, f"takes {kind}") for kind in ("5 ms", "12 % less", "3.4 times as many", "1.5 GiB")),
        *(
            (1, text)
            for text in ("a 2x gain", "1,024 tokens/s", "0.36 of the time", "| a | 0.52 |")
        ),
        *((1, text) for text in ("the KL rose to 0.088.", "```text\nit took 5 s\n```")),
        (1, "```text\nlatency 36.170\n```"),
        *((0, text) for text in ("`--kv-memory 8GiB` is an option", "16 tokens of 8 bits")),
        (0, "```sh\nquire plan MODEL --kv-memory 8 GiB\n```"),
        (0, "```\nquire serve MODEL --kv-memory 8 GiB\n```"),
        (0, "<!-- tested: it -->\n```python\nx()\n```\n\n```text\n5 s\n```"),
        *((0, text) for text in ("a timeout (default: 60 s)", "[a page](page-2%20b.md)")),
        *((0, f"Python 3.11, 3.12 or {v}, with PyTorch before 2.10") for v in ("3.13", "5.24.0")),
        (0, "<!-- generated: it -->\n| 64 MiB | 0.52 |\n<!-- end -->"),
    ],
)
def test_figures_of_a_measured_kind_are_found_and_no_others(count, text):
    assert len(figure_spans(text)) == count
