"""`quire calibrate`: calibration files of a model, codec errors with and without them."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from quire.cli.calibrate import calibrate
from quire.errors import ConfigError, UnknownName


def quire_calibrate(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("calibrate")(calibrate)
    return CliRunner().invoke(app, ["quire-tiny", *arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("calibrated")


@pytest.fixture(scope="module")
def result(folder) -> Result:
    codecs = "int4; int4:equalise=1/int8; int8_channel/int4"
    return quire_calibrate(
        "--output", str(folder), "--tokens", "512", "--kv-codec", codecs, "--json"
    )


def test_calibrate_writes_a_file_per_side_that_needs_constants(result, folder):
    assert result.exception is None, result.output
    written = sorted(path.name for path in (folder / "quire-kv").iterdir())

    assert written == ["key.int4_equalise_1.safetensors", "key.int8_channel.safetensors"]


def test_calibrate_reports_codec_errors_on_held_out_text(result):
    claims = json.loads(result.output.splitlines()[-1])["claims"]

    assert 0 < claims["int4:equalise=1/int8_product_error"] < claims["int4_product_error"] < 0.2
    assert 0 < claims["int8_channel/int4_product_error"] < claims["int4_product_error"]
    assert claims["int8_channel/int4_value_error"] == claims["int4_value_error"]


def test_calibrate_on_a_text_file(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The keys of a cache have channels that are large in all tokens. " * 20)

    result = quire_calibrate("--text", str(text), "--kv-codec", "int8", "--tokens", "128")

    assert result.output.startswith("int8: relative error of query-key products 0.0")


def test_invalid_input_is_refused(tmp_path):
    missing = quire_calibrate("--text", str(tmp_path / "none.txt"), "--kv-codec", "int8")
    unknown = quire_calibrate("--kv-codec", "int8; int9")
    (tmp_path / "short.txt").write_text("too short")
    short = quire_calibrate("--text", str(tmp_path / "short.txt"), "--kv-codec", "int8")

    assert isinstance(missing.exception, ConfigError)
    assert "none.txt cannot be read" in str(missing.exception)
    assert isinstance(unknown.exception, UnknownName)
    assert isinstance(short.exception, ConfigError)
    assert "at least 64 tokens" in str(short.exception)
