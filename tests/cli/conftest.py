"""Fixtures that run `quire` in this process with tiny models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from quire.cli.main import app
from support import zoo

Quire = Callable[..., Result]


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    # a second thread does not help with models of this size
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory) -> Path:
    """A random Llama without a tokenizer: prompts are token ids."""
    return zoo.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def quire() -> Quire:
    def run(*arguments: object, **options) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
