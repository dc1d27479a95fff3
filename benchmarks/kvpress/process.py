"""The process of the other environment: `PYTHON -I worker.py`, JSON lines in both directions."""

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from quire.errors import ConfigError, RequestError
from quire.models.loader import LoadedModel

WORKER = Path(__file__).with_name("worker.py")
_FLAG = "--python"
_INSTALL = (
    f"python3 -m venv FOLDER; FOLDER/bin/pip install torch kvpress; then {_FLAG} FOLDER/bin/python"
)
_MAX_CHARACTERS = 300


def model_message(model: LoadedModel, dtype: str) -> dict[str, object]:
    """The first message of a process.

    Args:
        model: the model of the leaderboard.
        dtype: type of its weights, as in --dtype.

    Raises:
        ConfigError: the other environment cannot load the same weights.
    """
    if model.folder is None or model.weight_codec != "auto":
        given = model.name if model.folder is None else f"--weight-codec {model.weight_codec}"
        raise ConfigError(
            f"expected a model folder in Hugging Face format and weights without a codec with "
            f"{_FLAG}, got {given}"
        )
    return {
        "folder": str(model.folder),
        "dtype": dtype,
        "device": str(model.decoder.device),
        "threads": torch.get_num_threads(),
    }


class PressProcess:
    """A process that runs kvpress on one model.

    Args:
        python: Python of an environment that has kvpress.
        model: the first message: folder, dtype, device and number of threads.

    Raises:
        ConfigError: the Python does not start, or cannot import kvpress or load the model.
    """

    def __init__(self, python: Path, model: Mapping[str, object]) -> None:
        self._python = python
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [str(python), "-I", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                encoding="utf-8",
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(
                f"expected {_FLAG} as the Python of an environment with kvpress, got {python}: "
                f"{error.strerror}. To build one: {_INSTALL}"
            ) from error
        about = self._first(model)
        self.versions: Mapping[str, str] = about["versions"]
        self.names: tuple[str, ...] = tuple(about["presses"])

    def run(self, job: Mapping[str, object]) -> dict[str, Any]:
        """Run one job.

        Raises:
            RequestError: the press does not run, with kvpress's reason.
            ConfigError: the process ended.
        """
        found = self._answer(job)
        if "error" in found:
            raise RequestError(str(found["error"])[:_MAX_CHARACTERS])
        return found

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "both are pipes"
            try:
                stream.close()
            except BrokenPipeError:
                continue  # it ended before it read the last message
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> "PressProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _first(self, model: Mapping[str, object]) -> dict[str, Any]:
        try:
            about = self._answer(model)
            if "error" in about:
                raise ConfigError(
                    f"expected {_FLAG} as the Python of an environment with kvpress that loads "
                    f"{model['folder']}, got {self._python}: {about['error']}. To build one: "
                    f"{_INSTALL}"
                )
        except ConfigError:
            self.close()
            raise
        return about

    def _answer(self, message: Mapping[str, object]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "both are pipes"
        assert stdout is not None, "both are pipes"
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            found = json.loads(stdout.readline())
        except (BrokenPipeError, ValueError) as error:  # an empty line: the process ended
            raise ConfigError(
                f"expected {_FLAG} as the Python of an environment with kvpress, got "
                f"{self._python}, whose process ended: {self._last_words()}. To build one: "
                f"{_INSTALL}"
            ) from error
        return found if isinstance(found, dict) else {"error": f"got {found!r}, expected an object"}

    def _last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return (lines or ["it wrote no message"])[-1][:_MAX_CHARACTERS]
