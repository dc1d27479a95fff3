import gc
import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire import LLM, KVConfig
from quire.cli.startup import LoadProgress, describe, fast_imports, status

HEAVY = {"torch", "transformers", "fastapi", "matplotlib", "scipy"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Terminal]:
    with pytest.MonkeyPatch.context() as patch:
        found = Terminal()
        patch.setattr(sys, "stderr", found)
        yield found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="2MiB"), verify=False)


def test_status_line_is_shown_on_a_terminal_and_plain_on_a_dumb_one(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal() as shown, status("loading a model"):
        pass
    assert "loading a model ..." in shown.getvalue()
    assert "\x1b" in shown.getvalue()  # the line is cleared at the end
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as shown, status("loading a model"):
        pass

    assert shown.getvalue() == "loading a model ...\n"


def test_nothing_is_shown_without_a_terminal(llm, capsys):
    loading = LoadProgress("quire-tiny")
    with loading.shown():
        pass
    loading.report(llm)
    assert capsys.readouterr() == ("", "")


def test_description_names_weights_implementation_and_kv_memory(llm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with terminal() as shown:
        LoadProgress("quire-tiny").report(llm)
    lines = shown.getvalue().splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert f"{describe(llm)}, loaded in" in " ".join(lines)  # breaks between words

    monkeypatch.setenv("COLUMNS", "200")
    with terminal() as shown:
        LoadProgress("quire-tiny").report(llm)
    assert describe(llm) in shown.getvalue()
    assert shown.getvalue().startswith("quire-tiny: ")
    for part in ("of weights in float32 on cpu", "2.00 MiB of KV memory", "loaded in"):
        assert part in shown.getvalue()


def test_garbage_collection_resumes_after_imports_without_the_imported_modules(monkeypatch):
    with fast_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), fast_imports():
        raise ImportError("missing")
    assert gc.isenabled()

    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(sys.modules)))
    with fast_imports():
        pass
    assert not frozen  # nothing was imported: other objects stay collectable
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with fast_imports():
        sys.modules["this"] = gc
    assert len(frozen) == 1


@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help"), ("codecs",)])
def test_help_and_codecs_import_no_large_library(arguments):
    code = (
        "import sys\nfrom quire.cli.main import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        f"found = {HEAVY!r} & sys.modules.keys()\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_generate_on_a_terminal_shows_what_was_loaded():
    ours, theirs = pty.openpty()
    arguments = ("generate", "quire-tiny", "a", "--max-tokens", "1", "--kv-memory", "2MiB")
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    pipes = {"stdout": subprocess.PIPE, "stderr": theirs}
    line = [sys.executable, "-m", "quire", *arguments]
    found = subprocess.run(line, env=environment, check=True, **pipes)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk

    assert b"loading quire-tiny ..." in shown
    assert b"of KV memory, loaded in" in b" ".join(shown.split())
    assert b"loading" not in found.stdout


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 4096)
    except OSError:  # the other end is closed
        return b""
