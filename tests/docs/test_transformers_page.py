"""The page about Transformers shows the output of its code."""

import pytest

from support.snippets import ROOT, snippets


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_page_shows_the_output_of_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = snippets(ROOT / "docs/transformers.md")

    exec(snippet.code, {"__name__": "page"})

    assert capsys.readouterr().out == snippet.output
