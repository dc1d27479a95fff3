"""Values that the shell completes, and that completion imports no large library."""

import os
import subprocess
import sys

import pytest

from quire.cli.completion import (
    budget_names,
    codec_names,
    complete_codec,
    complete_model,
    complete_policy,
    complete_rule,
    policy_names,
)
from quire.layout.codec_names import codec_pair
from quire.policies.registry import registered, registered_budgets


def test_completed_names_are_the_registered_ones():
    assert policy_names() == ["full", *registered()]
    assert budget_names() == list(registered_budgets())
    for name in codec_names():
        if name != "none":
            codec_pair(name)


def test_policies_are_completed_with_a_cap():
    assert complete_rule("h2") == ["h2o:cap=", "h2o_sinks:cap="]
    assert complete_rule("fu") == ["full"]
    assert complete_policy("pyr") == ["pyramid"]


def test_codecs_of_keys_and_of_values_are_completed():
    assert complete_codec("kiv") == ["kivi4", "kivi2"]
    assert complete_codec("int8/int4_h") == ["int8/int4_hadamard"]


def test_models_are_completed_from_folders(tmp_path, monkeypatch):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "llama" / "config.json").write_text("{}")
    (tmp_path / "models" / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "models" / "notes.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)

    assert complete_model("") == ["quire-tiny", "smollm2", "models/"]
    assert complete_model("models/") == ["models/llama", "models/tiny.gguf"]
    assert complete_model(f"{tmp_path}/models/l") == [f"{tmp_path}/models/llama"]
    assert complete_model("nowhere/") == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quire generate --evict ", "h2o:cap="),
        ("quire generate quire-tiny x --kv-codec int8", "int8_channel"),
        ("quire policies tov", "tova"),
        ("quire generate --dtype ", "bfloat16"),
        ("quire serve qui", "quire-tiny"),
        ("quire ", "generate"),
    ],
)
def test_shell_completion_yields_values_without_importing_torch(words, expected):
    code = (
        "import sys; sys.argv = ['quire']\n"
        "from quire.cli.main import run\n"
        "try:\n    run()\n"
        "finally:\n    assert not {'torch', 'transformers'} & sys.modules.keys(), 'heavy'\n"
    )
    given = words.split(" ")
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {
            "_QUIRE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(given) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert expected in found.stdout.split(), found.stderr
    assert "heavy" not in found.stderr
