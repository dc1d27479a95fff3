"""`quire calibrate`: calibration files of a model, codec errors with and without them."""

import json
import re

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from quire.cli.calibrate import calibrate
from quire.errors import ConfigError, UnknownName
from quire.eviction.calibration import read_vectors, retrieval_scores
from quire.models.loader import load_model
from quire.models.tokenizer import encode_prompt


def quire_calibrate(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("calibrate")(calibrate)
    return CliRunner().invoke(app, ["quire-tiny", *arguments])


def test_calibrate_writes_a_file_per_side_that_needs_constants(tmp_path):
    options = ("--kv-codec", "int4; int4:equalise=1/int8; int8_channel/int4", "--tokens", "512")
    result = quire_calibrate("--output", str(tmp_path), *options, "--json")
    assert result.exception is None, result.output
    written = sorted(path.name for path in (tmp_path / "quire-kv").iterdir())

    assert written == ["key.int4_equalise_1.safetensors", "key.int8_channel.safetensors"]
    # codec errors on held-out text
    claims = json.loads(result.output.splitlines()[-1])["claims"]

    assert 0 < claims["int4:equalise=1/int8_product_error"] < claims["int4_product_error"] < 0.2
    assert 0 < claims["int8_channel/int4_product_error"] < claims["int4_product_error"]
    assert claims["int8_channel/int4_value_error"] == claims["int4_value_error"]


def test_calibrate_on_a_text_file(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The keys of a cache have channels that are large in all tokens. " * 20)
    result = quire_calibrate("--text", str(text), "--kv-codec", "int8", "--tokens", "128")
    assert result.output.startswith("int8: relative error of query-key products 0.0")


def test_retrieval_scores_are_the_change_of_the_output_without_distant_tokens(tmp_path):
    """Equal to attention written out for each head, on the first of the prompts."""
    file = tmp_path / "heads.tsv"
    result = quire_calibrate("--retrieval-heads", str(file), "--prompts", "2", "--json")
    assert result.exception is None, result.output
    assert json.loads(result.output.splitlines()[-1])["claims"] == {"kv_heads": 32}
    decoder = load_model("quire-tiny").decoder
    ids, answers = [(7 * i * i + i) % 500 for i in range(96)], [40, 90]

    scores = retrieval_scores(decoder, [(ids, answers), (ids, answers[:1])])

    shape = decoder.spec.heads[0]
    lines = file.read_text().splitlines()
    assert [len(line.split("\t")) for line in lines] == list(map(len, scores))
    for vectors, row in zip(read_vectors(decoder, ids), scores, strict=True):
        for head, score in enumerate(row):
            group = slice(head * shape.group, (head + 1) * shape.group)
            changes = []
            for query in (39, 89, 39):  # before the answers
                near = [i < 4 or query - i < 96 // 8 for i in range(query + 1)]
                logits = vectors.query[group, query] @ vectors.key[head, : query + 1].T
                logits = logits.double() * shape.key_dim**-0.5
                far = torch.where(torch.tensor(near), logits, -torch.inf)
                exact, other = (
                    (x.softmax(dim=1) @ vectors.value[head, : query + 1].double()).flatten()
                    for x in (logits, far)
                )
                changes.append(float((exact - other).norm() / exact.norm()))
            expected = ((changes[0] + changes[1]) / 2 + changes[2]) / 2
            assert score == pytest.approx(expected, rel=1e-2)  # bfloat16


@pytest.mark.parametrize("first_token", [[], [7]])
def test_answers_of_retrieval_prompts_are_of_the_whole_text(monkeypatch, tmp_path, first_token):
    """Prompts are encoded as one text, with the first token of models that have one."""
    found, tokenizer = [], load_model("quire-tiny").tokenizer

    def with_first(tokenizer, text):
        return [*first_token, *encode_prompt(tokenizer, text)]

    monkeypatch.setattr("quire.models.tokenizer.encode_prompt", with_first)
    scores = "quire.eviction.calibration.retrieval_scores"
    monkeypatch.setattr(scores, lambda decoder, texts: found.extend(texts) or [[0.5]])
    result = quire_calibrate("--retrieval-heads", str(tmp_path / "new" / "a.tsv"), "--prompts", "2")
    assert result.exception is None, result.output

    for ids, answers in found:
        text = tokenizer.decode([ids[index] for index in answers])
        assert ids[:1] == first_token or not first_token
        assert len(ids) < 600
        assert re.fullmatch(r"[\s\d.]+", text)


def test_invalid_input_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    heads = ("--retrieval-heads", str(tmp_path / "a"), "--text", "b", "--tokens", "99")
    missing = ("--text", str(tmp_path / "none.txt"), "--kv-codec", "int8")
    for arguments, kind, message in (
        (("--prompts", "3"), ConfigError, "no effect without --retrieval-heads: --prompts"),
        (heads, ConfigError, "no effect with --retrieval-heads: --text, --tokens; leave"),
        (missing, ConfigError, "none.txt cannot be read"),
        (("--kv-codec", "int8; int9"), UnknownName, "int9"),
        (("--text", str(tmp_path / "short.txt"), *missing[2:]), ConfigError, "at least 64 tokens"),
    ):
        error = quire_calibrate(*arguments).exception
        assert isinstance(error, kind)
        assert message in str(error)
