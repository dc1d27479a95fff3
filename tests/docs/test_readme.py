import json
import re
import shlex
from contextlib import closing

import httpx
import pytest

from benchmarks.peers.chart import PART, bars
from quire.layout.limits import REFUSED
from support import zoo
from support.forking import Program
from support.snippets import ROOT, snippets

README = (ROOT / "README.md").read_text(encoding="utf-8")
FEATURES = (ROOT / "docs/features.md").read_text(encoding="utf-8")


def test_readme_shows_the_output_of_its_eight_lines(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = snippets(ROOT / "README.md")
    exec(snippet.code, {"__name__": "readme"})
    assert capsys.readouterr().out == snippet.output
    assert len([line for line in snippet.code.splitlines() if line]) == 8


def test_readme_names_make_targets_and_the_figures_of_the_demo():
    claims = json.loads((ROOT / "docs/results/demo.json").read_text(encoding="utf-8"))["claims"]
    assert f"`quire demo` asks SmolLM2 {claims['questions']} questions" in README
    assert f"in {claims['full_kv_total_bytes'] / 2**20:g} MiB of KV memory" in README
    assert claims["exactness_equal"] == claims["exactness_checked"]

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pages = ("scale", "guides/troubleshooting", "guides/evaluate", "guides/from-other-engines")

    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert f"\n{target}: setup\n" in makefile
    for page in (*pages, "tiers", "glossary"):
        assert re.search(rf"\(docs/{page}\.md[#)]", README), page
    assert "`quire doctor`" in README


def test_readme_chart_shows_the_stored_run() -> None:
    run = json.loads((ROOT / "docs/results/peers.json").read_text(encoding="utf-8"))
    image = (ROOT / "docs/images/engines.svg").read_text(encoding="utf-8")
    found = bars(run)
    [table] = run["arms"][PART]["tables"]
    text = " ".join(README.split())

    assert {"quire", "hf_static", "openvino"} <= {bar.engine for bar in found}
    for bar in found:
        assert f">{bar.at_once:,}<" in image
        assert f">{bar.tokens_per_s:,.0f}<" in image
        assert f"in {bar.kv_bytes / 1e6:.1f} MB of KV, a quarter of what they need" in text
    rounds = re.search(r"medians of \d+ rounds", table["caption"])
    assert rounds is not None
    assert rounds[0] in text


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_block_with_quire_cache_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = [block for block in blocks("python") if "QuireCache" in block]
    exec(code, {})
    assert "bytes of KV" in capsys.readouterr().out


@pytest.mark.slow
def test_commands_and_client_of_the_server_run(capsys: pytest.CaptureFixture[str]) -> None:
    [serve] = [b.strip() for b in blocks("sh") if b.startswith("quire serve")]
    [curl] = [b.strip() for b in blocks("sh") if b.startswith("curl")]
    [client] = [block for block in blocks("python") if "openai" in block]
    answer = "The capital of France is Paris."
    server = Program("support.forking:run_quire", *shlex.split(serve)[1:], "--port", "0")
    with closing(server):
        url = next(line for line in server.stdout if line.startswith("Serving ")).split()[-1]
        body = json.loads(shlex.split(curl)[-1])
        found = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
        exec(client.replace("http://127.0.0.1:8000/v1", url), {})

    assert found["choices"][0]["message"]["content"] == answer
    assert f'"content": "{answer}"' in README
    assert f'"kv_peak_bytes": {found["usage"]["kv_peak_bytes"]}' in README
    assert capsys.readouterr().out == answer + "\n"


def test_features_name_every_tested_architecture_and_only_refused_ones_as_refused() -> None:
    [row] = [line for line in FEATURES.splitlines() if "equal to Transformers in tests" in line]

    named = set(row.split("`")[1::2])

    tested = zoo.ARCHITECTURES | zoo.OWN_ATTENTION | zoo.LATENT
    assert named == {make().model_type for make in tested.values()}
    [row] = [line for line in FEATURES.splitlines() if "refused with the reason" in line]
    refused = row.split("`")[1::2]
    assert len(refused) >= 5
    assert set(refused) <= set(REFUSED)
