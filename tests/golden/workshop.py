"""What golden cases are made with: the packaged model, loaded once, and the command line."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from typer import Typer
from typer.testing import CliRunner

from quire.api.llm import LLM
from quire.cli.main import app
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel, load_model
from quire.scheduler.schedule_config import ScheduleConfig
from support.kv_options import kv_config

T = TypeVar("T")
ENGINE_OPTIONS = ("--dtype=float32", "--device=cpu", "--threads=1", "--no-verify")


class Workshop:
    """The packaged model in float32, one thread, and a folder for files.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[Callable[[Workshop], object], Any] = {}
        torch.set_num_threads(1)

    @cached_property
    def model(self) -> LoadedModel:
        return load_model("quire-tiny", dtype="float32", device="cpu", verify=False)

    @cached_property
    def served(self) -> LLM:
        return self.llm()

    def once(self, make: "Callable[[Workshop], T]") -> "T":
        if make not in self._made:
            self._made[make] = make(self)
        found: T = self._made[make]
        return found

    def folder_for(self, name: str) -> Path:
        path = self.folder / name
        while path.exists():  # another test has it
            path = path.with_name(f"{path.name}_again")
        path.mkdir()
        return path

    def llm(self, **kv: object) -> LLM:
        return LLM(self.model, kv=kv_config(**{"memory": "4MiB"} | kv))

    def engine(self, *, schedule: dict[str, object] | None = None, **kv: object) -> Engine:
        config = ScheduleConfig(**(schedule or {}))
        return Engine(self.model, kv_config(**{"memory": "4MiB"} | kv), config)

    def run(self, *arguments: object, of: Typer = app, exit_code: int = 0) -> Any:
        """The JSON object on the last line of a command's standard output."""
        with self._here():
            result = CliRunner().invoke(of, [*map(str, arguments), "--json"])
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout.splitlines()[-1])

    @contextmanager
    def _here(self) -> Iterator[None]:
        """With the folder as the current one, and as the user's cache."""
        before, cache = Path.cwd(), os.environ.get("XDG_CACHE_HOME")
        os.chdir(self.folder)
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        try:
            yield
        finally:
            os.chdir(before)
            del os.environ["XDG_CACHE_HOME"]
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = cache


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def finish(engine: Engine) -> None:
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
    engine.check()
