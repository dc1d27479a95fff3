import json
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import uvicorn

from clients.__main__ import TEMPLATE
from clients.programs import SCRIPTS
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.serve.app import create_app
from serve.conftest import PATIENCE_S, wait_until


@contextmanager
def running_server(llm):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(llm), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url(llm):
    large = LLM(llm.model, kv=KVConfig(memory="64MiB"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large.model.tokenizer, "chat_template", TEMPLATE.read_text(encoding="utf-8"))
        with running_server(large) as address:
            yield address
    assert not large.engine.has_work


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_unmodified_client_passes_its_checks(url, name):
    script = SCRIPTS / f"{name}_client.py"
    done = subprocess.run([sys.executable, script, url], capture_output=True, text=True)
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [check for check in checks if not check["passed"]] == []
    assert done.returncode == 0, done.stderr
