"""The page about Transformers prints what its code prints."""

import pytest

from support.snippets import ROOT, snippets


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_prints_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = snippets(ROOT / "docs/transformers.md")

    exec(snippet.code, {"__name__": "page"})

    assert capsys.readouterr().out == snippet.output
